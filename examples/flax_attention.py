"""The max-retrieval model of "softmax is not enough" in Flax, with whet's softmax inside its attention.

    python examples/flax_attention.py [WEIGHTS.safetensors] [--rule RULE]

Each set holds n items, a priority and a class; the model names the class of the item with the largest priority. Its
one attention head was trained on few items; with more of them every weight falls, unless a rule sharpens. Without a
file of weights the example writes one first, of a model that has learned nothing: what it shows is the attention, not
the answers.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.flax import load_file, save_file

from whet.jax import softmax

CLASSES = 10
WIDTH = 128
SIZES = (16, 128, 1024, 8192)


class MaxRetrieval(nn.Module):
    rule: str = "none"

    @nn.compact
    def __call__(self, items, query):
        """items (batch, n, 1 + classes), query (batch, 1): logits of the classes, and stats of the attention."""
        for i in (1, 2):
            items = nn.gelu(nn.Dense(WIDTH, name=f"items_{i}")(items))
            query = nn.gelu(nn.Dense(WIDTH, name=f"query_{i}")(query))
        q = nn.Dense(WIDTH, name="attention_q")(query)
        k, v = (nn.Dense(WIDTH, name=f"attention_{name}")(items) for name in "kv")
        logits = jnp.einsum("bd,bnd->bn", q, k) / jnp.sqrt(WIDTH)
        weights, stats = softmax(logits, rule=self.rule, return_stats=True)
        found = nn.Dense(WIDTH, name="attention_out")(jnp.einsum("bn,bnd->bd", weights, v))
        return nn.Dense(CLASSES, name="out_2")(nn.gelu(nn.Dense(WIDTH, name="out_1")(found))), stats


@partial(jax.jit, static_argnums=(1, 2))
def sets(key, batch, n):
    """Random items and queries; a query is a number that means nothing."""
    priority_key, class_key, query_key = jax.random.split(key, 3)
    priorities = jax.random.uniform(priority_key, (batch, n, 1))
    classes = jax.nn.one_hot(jax.random.randint(class_key, (batch, n), 0, CLASSES), CLASSES)
    return jnp.concatenate([priorities, classes], -1), jax.random.uniform(query_key, (batch, 1))


def save_untrained(path):
    variables = jax.jit(MaxRetrieval().init)(jax.random.key(0), *sets(jax.random.key(1), 1, 16))
    save_file(flatten_dict(variables["params"], sep="."), path)


def load(path):
    return {"params": unflatten_dict(load_file(path), sep=".")}


def arguments():
    parser = argparse.ArgumentParser(description="The paper's model with whet's softmax")
    parser.add_argument("weights", nargs="?", type=Path, help="a safetensors file")
    parser.add_argument("--rule", default="target-entropy:0.2")
    return parser.parse_args()


def report(variables, rule):
    print(f"{'items':>6}  {'entropy':>15}  {'largest weight':>15}")
    print(f"{'':>6}  {'plain':>7} {'ruled':>7}  {'plain':>7} {'ruled':>7}   (ruled by {rule})")
    model = jax.jit(MaxRetrieval(rule).apply)
    for n in SIZES:
        logits, stats = model(variables, *sets(jax.random.key(n), 32, n))
        assert jnp.isfinite(logits).all()
        numbers = [column.mean() for column in (stats.entropy, stats.sharp_entropy, stats.peak, stats.sharp_peak)]
        print("{:6d}  {:7.3f} {:7.3f}  {:7.4f} {:7.4f}".format(n, *map(float, numbers)))


def main():
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = given.weights
        if path is None:
            path = Path(folder) / "untrained.safetensors"
            save_untrained(path)
        variables = load(path)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(variables)):,} parameters")
    report(variables, given.rule)


if __name__ == "__main__":
    main()
