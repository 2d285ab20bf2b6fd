"""The max-retrieval head of "softmax is not enough" in Flax, with weights that `whet train` made:

    whet train run --recipe sharp --steps 40000
    whet eval run --sizes 16,256,4096 --sets 64 --save-sets sets.safetensors
    python examples/flax_attention.py run sets.safetensors [--rule RULE]

Each set holds n items, a priority and a class; the head names the class of the item with the largest priority. On the
same sets it gives the answers that `whet eval` gives. Layers have the names of the checkpoint's tensors, so that loading
is one line.
"""

import jax
import jax.numpy as jnp
import max_retrieval
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from max_retrieval import CLASSES, WIDTH
from whet.jax import softmax


class MaxRetrieval(nn.Module):
    rule: str = "none"

    @nn.compact
    def __call__(self, items, query):
        """items (batch, n, 1 + classes), query (batch, 1): scores of the classes, and stats of the attention."""
        for i in (1, 2):
            items = nn.gelu(nn.Dense(WIDTH, name=f"item{i}")(items))
            query = nn.gelu(nn.Dense(WIDTH, name=f"query{i}")(query))
        q = nn.Dense(WIDTH, name="q")(query)
        k, v = (nn.Dense(WIDTH, name=name)(items) for name in "kv")
        logits = jnp.einsum("bd,bnd->bn", q, k) / jnp.sqrt(WIDTH)
        weights, stats = softmax(logits, rule=self.rule, return_stats=True)
        found = nn.Dense(WIDTH, name="o")(jnp.einsum("bn,bnd->bd", weights, v))
        return nn.Dense(CLASSES, name="output")(nn.gelu(nn.Dense(WIDTH, name="hidden")(found))), stats


def evaluate(run, sets, rule):
    """Yields the number of items, the answers, the right answers and the largest weights."""
    head = {"params": unflatten_dict(max_retrieval.load_weights(run), sep=".")}
    model = jax.jit(MaxRetrieval(rule).apply)
    for items, queries, targets in max_retrieval.load_sets(sets):
        scores, stats = model(head, items, queries)
        yield items.shape[1], scores.argmax(-1), targets, stats.sharp_peak


def main():
    max_retrieval.main(__doc__, evaluate)


if __name__ == "__main__":
    main()
