"""The paper's head in JAX and optax, twice, and the steps that `whet bench train --keep` kept.

`straightforward` projects the keys and values of every item, as one would write it down. `folded` uses that there is
one query a set: q . K h = (K^T q) . h, and V of the weighted sum is the weighted sum of V. Shapes: B sets, N items.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import safe_open

CLASSES = 10

Parameters = dict[str, jax.Array]  # layer.kernel (in, out) and layer.bias (out)
Scores = Callable[[Parameters, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Batch:
    priorities: np.ndarray  # (B, N)
    classes: np.ndarray  # (B, N)
    queries: np.ndarray  # (B,)
    targets: np.ndarray  # (B,)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.priorities, self.classes, self.queries, self.targets


@dataclass(frozen=True)
class Kept:
    """What the command kept of its first steps."""

    recipe: dict
    before: Parameters
    gradient: Parameters  # of the first step's cross-entropy
    after: Parameters
    batches: list[Batch]
    losses: np.ndarray  # cross-entropy of each step, without the L2 term


def load(path: Path | str) -> Kept:
    with safe_open(str(path), framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        recipe = json.loads(file.metadata()["recipe"])

    def group(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    batches = list(_batches(group("batches."), recipe["batch"]))
    return Kept(recipe, group("before."), group("gradient."), group("after."), batches, tensors["losses"])


def _batches(flat: dict[str, np.ndarray], sets: int) -> Iterator[Batch]:
    """The tensors hold the batches one after the other."""
    item = 0
    for step, items in enumerate(flat["sizes"]):
        of_items, of_sets = slice(item, item + sets * items), slice(step * sets, (step + 1) * sets)
        yield Batch(flat["priorities"][of_items].reshape(sets, items),
                    flat["classes"][of_items].reshape(sets, items).astype(np.int32),
                    flat["queries"][of_sets], flat["targets"][of_sets].astype(np.int32))
        item += sets * items


def in_float64(kept: Kept) -> Kept:
    """The same in double, to be trained under jax.enable_x64(True): what both float32 trainings should come to."""
    def wide(tensors: Parameters) -> Parameters:
        return {name: t.astype(np.float64) for name, t in tensors.items()}

    batches = [replace(b, priorities=b.priorities.astype(np.float64), queries=b.queries.astype(np.float64))
               for b in kept.batches]
    return replace(kept, before=wide(kept.before), batches=batches)


# ---- the head


def dense(p: Parameters, layer: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{layer}.kernel"] + p[f"{layer}.bias"]


gelu = partial(jax.nn.gelu, approximate=True)


def encode(p: Parameters, priorities: jax.Array, classes: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encoded items (B, N, 128) and queries (B, 128)."""
    items = jnp.concatenate([priorities[..., None], jax.nn.one_hot(classes, CLASSES)], axis=-1)
    items = gelu(dense(p, "item2", gelu(dense(p, "item1", items))))
    return items, gelu(dense(p, "query2", gelu(dense(p, "query1", queries[:, None]))))


def read_out(p: Parameters, attended: jax.Array) -> jax.Array:
    """Class scores (B, 10) of the attended values (B, 128)."""
    return dense(p, "output", gelu(dense(p, "hidden", dense(p, "o", attended))))


def straightforward(p: Parameters, priorities: jax.Array, classes: jax.Array, queries: jax.Array) -> jax.Array:
    items, query = encode(p, priorities, classes, queries)
    q, k, v = dense(p, "q", query), dense(p, "k", items), dense(p, "v", items)
    weights = jax.nn.softmax(jnp.einsum("bd,bnd->bn", q, k) / np.sqrt(q.shape[-1]))
    return read_out(p, jnp.einsum("bn,bnd->bd", weights, v))


def folded(p: Parameters, priorities: jax.Array, classes: jax.Array, queries: jax.Array) -> jax.Array:
    items, query = encode(p, priorities, classes, queries)
    q = dense(p, "q", query)
    direction = q @ p["k.kernel"].T  # the bias of k adds the same to every logit of a set: softmax drops it
    weights = jax.nn.softmax(jnp.einsum("bd,bnd->bn", direction, items) / np.sqrt(q.shape[-1]))
    return read_out(p, dense(p, "v", jnp.einsum("bn,bnd->bd", weights, items)))


# ---- training


def cross_entropy(scores: Scores, p: Parameters, priorities: jax.Array, classes: jax.Array, queries: jax.Array,
                  targets: jax.Array) -> jax.Array:
    found = scores(p, priorities, classes, queries)
    return optax.softmax_cross_entropy_with_integer_labels(found, targets).mean()


def l2_term(recipe: dict, p: Parameters) -> jax.Array | float:
    factor = {"none": 0.0, "half": recipe["l2"] / 2, "sum": recipe["l2"]}[recipe["l2_form"]]
    chosen = [t for name, t in p.items() if recipe["l2_biases"] or not name.endswith(".bias")]
    return factor * sum(jnp.sum(t * t) for t in chosen)


class Training:
    """Adam on one form of the head, from the kept weights on. The recipe must keep its rate and have no rule."""

    def __init__(self, kept: Kept, scores: Scores) -> None:
        if (kept.recipe["schedule"], kept.recipe["warmup"], kept.recipe["rule"]) != ("constant", 0, "none"):
            raise ValueError("recipe: has a schedule, a warm-up or a rule, which these steps don't know")
        self._start = kept.before
        self._optimizer = optax.adam(kept.recipe["rate"])
        self._step = jax.jit(partial(self._one_step, scores, kept.recipe), donate_argnums=(0, 1))
        self.restart()

    def restart(self) -> None:
        self.parameters = {name: jnp.array(t) for name, t in self._start.items()}  # a copy: steps take what they get
        self._state = self._optimizer.init(self.parameters)

    def _one_step(self, scores: Scores, recipe: dict, p: Parameters, state: optax.OptState,
                  *batch: jax.Array) -> tuple[Parameters, optax.OptState, jax.Array]:
        def loss(p: Parameters) -> tuple[jax.Array, jax.Array]:
            fit = cross_entropy(scores, p, *batch)
            return fit + l2_term(recipe, p), fit

        gradients, fit = jax.grad(loss, has_aux=True)(p)
        updates, state = self._optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, fit

    def run(self, batches: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """One step a batch; the cross-entropy of each. Returns when all is done."""
        losses = []
        for batch in batches:
            self.parameters, self._state, loss = self._step(self.parameters, self._state, *batch)
            losses.append(loss)
        return jax.block_until_ready((losses, self.parameters))[0]


# ---- comparing


def on_device(batches: Sequence[Batch]) -> list[tuple[jax.Array, ...]]:
    return [tuple(jnp.asarray(a) for a in batch.arrays) for batch in batches]


def first_gradient(kept: Kept, scores: Scores) -> dict[str, np.ndarray]:
    """Of the cross-entropy, as the command keeps it."""
    slope = jax.jit(jax.grad(partial(cross_entropy, scores)))
    return {name: np.asarray(g) for name, g in slope(kept.before, *kept.batches[0].arrays).items()}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of a tensor as a whole: |found - expected| / |expected|."""
    expected = np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
