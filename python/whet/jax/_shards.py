"""Attention whose keys lie on the devices along an axis of a mesh. Every device calls it within shard_map.

Two phases, as whet/shard.h has them: the states of all rows are gathered, every device finds the same beta of each, and
sums of weighted values are added up. What is gathered are records, two uint32 for each of their float64 numbers, which JAX
may not have: merged in the order of devices they have the same bits everywhere.

`_part` is what one device adds to the output, and has the gradient; the sum over devices around it JAX differentiates. So
every device is given the gradient to the whole output, and parts of gradients to what devices share are added, in the way
of shard_map with check_vma or of shard_map without.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from whet import _core
from whet.jax._ffi import call, varying, varying_alike

if TYPE_CHECKING:
    from whet.jax.attention import _Arrays, _Options

# numbers of a record
_STATE, _WEIGHED, _SUMS, _SEARCH, _GRADIENT_SUMS = 6, 4, 5, 5, 6
_KEPT_LOGITS = 256 << 20  # bytes in which a rule that searches keeps logits from step to step
_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "query_scale")


def check_shards(axis_name: Hashable, key: jax.Array, normalizer: str, **refused: Any) -> None:
    """A ValueError for what can't be had of keys on several devices."""
    try:
        index = jax.lax.axis_index(axis_name)
    except (NameError, TypeError):
        raise ValueError(f"axis_name: is {axis_name!r}, must be an axis, or a tuple of axes, of a shard_map around the "
                         "call") from None
    if not varying(index) <= varying(key):
        raise ValueError(f"key: is the same on every device along {axis_name!r}, must be a part of the keys")
    for name, given in refused.items():
        if given is not None and given is not False and not (isinstance(given, int) and given == 0):
            raise ValueError(f"{name}: given, must not be with axis_name")
    if normalizer not in ("softmax", "hard"):
        raise ValueError(f"normalizer: is {normalizer!r}, must be 'softmax' or 'hard' with axis_name: the others need more "
                         "of a row than devices exchange")


@partial(jax.jit, static_argnums=(0, 1))
def sharded_attention(options: _Options, axis: Hashable, arrays: _Arrays) -> jax.Array:
    """The output of all devices, the same on each."""
    shape = (*arrays.query.shape[:3], arrays.value.shape[3])
    if 0 in shape:  # XLA fails where all operands of a shard are empty
        return jnp.zeros(shape, arrays.query.dtype)
    plan = _Plan(options, axis, int(jax.lax.psum(1, axis)), arrays.query.dtype)
    # What devices share, in the type of the arithmetic: parts of its gradient are then added before they are rounded.
    shared = {name: None if given is None else given.astype(plan.arithmetic)
              for name, given in (("query", arrays.query), ("sinks", arrays.sinks), ("query_scale", arrays.query_scale))}
    *alike, index = varying_alike(*arrays._replace(**shared), jax.lax.axis_index(axis).astype(np.int32).reshape(1))
    sums, mass = jax.lax.psum(_part(plan, type(arrays)(*alike), index), axis)
    return _quotient(sums, mass).astype(plan.dtype)


@jax.custom_vjp
def _quotient(sums: jax.Array, mass: jax.Array) -> jax.Array:
    mass = _at_queries(mass)
    return jnp.where(mass == 0, 0, sums / jnp.where(mass == 0, 1, mass))


# _part takes the gradient to the output, not that to its sums.
_quotient.defvjp(lambda sums, mass: (_quotient(sums, mass), None), lambda _, dout: (dout, None))


def _at_queries(rows: jax.Array) -> jax.Array:
    """(B, N, T) to (B, T, N, 1)."""
    return jnp.swapaxes(rows, 1, 2)[..., None]


@dataclass(frozen=True)
class _Plan:
    options: _Options
    axis: Hashable
    shards: int
    dtype: Any  # of queries, keys and values

    @property
    def arithmetic(self) -> Any:
        return jnp.promote_types(self.dtype, np.float32)

    @property
    def rules(self) -> list[str]:
        return [name for name in self.options.rules.split(";") if name]  # none if there are no heads

    @property
    def searches(self) -> bool:
        return any(name.startswith("target-") for name in self.rules)

    def knows_betas(self, sinks: bool) -> bool:
        """Whether no state decides beta. That of a row of one key is always 1, which a sink beside it would show."""
        return all(name == "none" or (name.startswith("fixed:") and not sinks) for name in self.rules)

    @property
    def beta_moves(self) -> bool:
        """Whether the gradient goes through a rule; at beta = 1 none does."""
        return any(_core.betas_move(np.array([2.0]), name, self.options.hold_beta) for name in self.rules)

    def call(self, target: str, operands: dict[str, Any], results: dict[str, Any]) -> dict[str, jax.Array]:
        attributes = {**self.options.attributes(), "hold_beta": self.options.hold_beta, "shards": np.int64(self.shards)}
        return call(f"whet_shard_{target}", operands, results, **attributes)

    def gathered(self, records: jax.Array) -> jax.Array:
        """(B, N, T, numbers) of all devices: (B, devices, N, T, numbers)."""
        return jax.lax.all_gather(records, self.axis, axis=1)


class _Rows(NamedTuple):
    """What forward leaves of the rows, the same on every device but for the mass."""

    states: jax.Array
    rows: jax.Array
    mass: jax.Array  # that of this device's keys


def _records(arrays: _Arrays, numbers: int) -> tuple[tuple[int, ...], Any]:
    batch, queries, heads, _ = arrays.query.shape
    return (batch, heads, queries, 2 * numbers), np.uint32


# ---- forward


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _part(plan: _Plan, arrays: _Arrays, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This device's sums of weighted values, (B, T, N, E), and masses, (B, N, T)."""
    sums, rows = _forward(plan, arrays, index)
    return sums, rows.mass


def _forward(plan: _Plan, arrays: _Arrays, index: jax.Array) -> tuple[jax.Array, _Rows]:
    arrays = arrays._replace(query=arrays.query.astype(plan.dtype))
    operands = {**arrays._asdict(), "shard": index}
    states = {"states": _records(arrays, _STATE)}
    rows = {**states, "rows": _records(arrays, _WEIGHED)}
    batch, queries, heads, _ = arrays.query.shape
    mass = (batch, heads, queries), plan.arithmetic
    sums = {"out": ((batch, queries, heads, arrays.value.shape[-1]), plan.arithmetic), "mass": mass}
    if plan.knows_betas(arrays.sinks is not None):
        part = plan.call("partial", operands, {**sums, **states})
        found = plan.call("rows", {"gathered": plan.gathered(part["states"]), "shard": index}, {**rows, "factor": mass})
        factor = found["factor"]
        return part["out"] * _at_queries(factor), _Rows(found["states"], found["rows"], part["mass"] * factor)

    of_keys = {name: given for name, given in operands.items() if name != "value"}
    logits = (batch, heads, queries, arrays.key.shape[1])
    keeps = plan.searches and np.prod(logits) * plan.arithmetic.itemsize <= _KEPT_LOGITS
    own = plan.call("states", of_keys, {**states, "logits": (logits, plan.arithmetic)} if keeps else states)
    gathered, kept = plan.gathered(own["states"]), own.get("logits")
    if plan.searches:
        merged, weighed = _searched(plan, {**of_keys, "logits": kept}, gathered, rows)
    else:
        found = plan.call("rows", {"gathered": gathered}, rows)
        merged, weighed = found["states"], found["rows"]
    part = plan.call("attention", {**operands, "rows": weighed, "logits": kept}, sums)
    return part["out"], _Rows(merged, weighed, part["mass"])


def _searched(plan: _Plan, operands: dict[str, Any], gathered: jax.Array,
              results: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The merged states and the rows at the betas that all searches end with. Every device takes the same steps."""
    batch, heads, queries, _ = results["rows"][0]
    searches = (batch, heads, queries, 2 * _SEARCH), np.uint32
    searching = (batch,), np.bool_
    first = plan.call("rows", {"gathered": gathered}, {**results, "searches": searches, "searching": searching})

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows, search, _ = state
        sums = plan.call("sums", {**operands, "rows": rows},
                         {"sums": ((batch, heads, queries, 2 * _SUMS), np.uint32)})["sums"]
        found = plan.call("step", {"rows": rows, "searches": search, "gathered": plan.gathered(sums)},
                          {"next_rows": results["rows"], "next_searches": searches, "searching": searching})
        return found["next_rows"], found["next_searches"], found["searching"]

    rows, _, _ = jax.lax.while_loop(lambda state: jnp.any(state[2]), step,
                                    (first["rows"], first["searches"], first["searching"]))
    return first["states"], rows


# ---- backward


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """The names of what a gradient is wanted for."""

    names: tuple[str, ...]


def _part_forward(plan: _Plan, arrays: _Arrays, index: Any) -> tuple[Any, Any]:
    wanted = tuple(name for name in _DIFFERENTIABLE
                   if (given := getattr(arrays, name)) is not None and given.perturbed)
    arrays = type(arrays)(*(None if given is None else given.value for given in arrays))
    sums, rows = _forward(plan, arrays, index.value)
    return (sums, rows.mass), (_Wanted(wanted), arrays, index.value, sums, rows)


def _part_backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[Any, None]:
    wanted, arrays, index, sums, rows = residuals
    dout, _ = cotangents
    none = type(arrays)(*(None for _ in arrays))
    if isinstance(dout, SymbolicZero) or not wanted.names:
        return none, None
    own = dout.astype(plan.dtype)
    operands = {**arrays._asdict(), "query": arrays.query.astype(plan.dtype), "shard": index, "dout": own,
                "rows": rows.rows}
    result = {"sums": _records(arrays, _GRADIENT_SUMS)}
    if plan.beta_moves:
        found = plan.call("gradient_sums", {**operands, "mass": rows.mass}, result)
    else:
        found = plan.call("output_sums", {"out": sums, "dout": own.astype(plan.arithmetic), "mass": rows.mass}, result)
    gradients = {f"d{name}": (getattr(arrays, name).shape, getattr(arrays, name).dtype) for name in wanted.names}
    found = plan.call("backward", {**operands, "states": rows.states, "gathered": plan.gathered(found["sums"])}, gradients)
    return none._replace(**{name: found[f"d{name}"] for name in wanted.names}), None


_part.defvjp(_part_forward, _part_backward, symbolic_zeros=True)
