"""The max-retrieval head of "softmax is not enough" in Flax, with weights that `whet train` made:

    whet train run --recipe sharp --steps 40000
    whet eval run --sizes 16,256,4096 --sets 64 --save-sets sets.safetensors
    python examples/flax_attention.py run sets.safetensors [--rule RULE]

Each set holds n items, a priority and a class; the head names the class of the item with the largest priority. On the
same sets it gives the answers that `whet eval` gives. Layers have the names of the checkpoint's tensors, so that loading
is one line.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from safetensors.flax import load_file
from whet.jax import softmax

CLASSES = 10
WIDTH = 128


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


def load_head(run):
    """The weights of a run; Adam's moments, which the checkpoint also holds, are for training on."""
    tensors = load_file(Path(run) / "checkpoint.safetensors")
    return {"params": unflatten_dict({n: t for n, t in tensors.items() if not n.startswith("adam.")}, sep=".")}


def load_sets(path):
    """Yields the sets of each size: items, queries, and the right answers."""
    tensors = load_file(path)
    for n in sorted(int(name.removesuffix(".targets")) for name in tensors if name.endswith(".targets")):
        priorities, classes, queries, targets = (tensors[f"{n}.{part}"]
                                                 for part in ("priorities", "classes", "queries", "targets"))
        yield jnp.concatenate([priorities[..., None], jax.nn.one_hot(classes, CLASSES)], -1), queries[:, None], targets


def evaluate(run, sets, rule):
    """Yields the number of items, the answers, the right answers and the stats of the attention."""
    head, model = load_head(run), jax.jit(MaxRetrieval(rule).apply)
    for items, queries, targets in load_sets(sets):
        scores, stats = model(head, items, queries)
        yield items.shape[1], scores.argmax(-1), targets, stats


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder made by 'whet train'")
    parser.add_argument("sets", help="file made by 'whet eval --save-sets'")
    parser.add_argument("--rule", default="none")
    given = parser.parse_args()
    print(f"{'items':>8}{'accuracy':>10}{'largest weight':>16}")
    for n, answers, targets, stats in evaluate(given.run, given.sets, given.rule):
        print(f"{n:8}{(answers == targets).mean():10.4f}{stats.sharp_peak.mean():16.4f}")


if __name__ == "__main__":
    main()
