"""Softmax over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from whet._arguments import flag, integer
from whet.jax._ffi import (array, call, check_bool, check_broadcasts, check_float, saved_type, stats_of, stats_type,
                           varying_alike, with_axes)
from whet.rules import RuleLike
from whet.rules import rule as rule_of
from whet.stats import Stats


@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
            hold_beta: bool = False, return_stats: Literal[False] = False) -> jax.Array: ...
@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
            hold_beta: bool = False, return_stats: Literal[True]) -> tuple[jax.Array, Stats]: ...
@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
            hold_beta: bool = False, return_stats: bool) -> jax.Array | tuple[jax.Array, Stats]: ...
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
            hold_beta: bool = False, return_stats: bool = False) -> Any:
    """jax.nn.softmax with the inverse temperature of each row chosen by a rule.

    Args:
        x: logits: float32, float64, bfloat16 or float16 (16 bits compute in float32). Integers, and
            booleans if `where` is given, become floats as in jax.nn.softmax. -inf hides a key.
        axis: the axis a row runs along; several, or None for all, make one row of all their elements.
        where: boolean, broadcast to x; False hides a key.
        rule: a rule or its name (see whet.rules). Default: none, beta = 1.
        hold_beta: gradients count beta as a constant. By default they go through the rule, as in the published code.
        return_stats: also return the whet.Stats of all rows, in the shape of x without the axis: float64 with
            jax_enable_x64, else rounded to float32. No gradient flows through them.

    Returns:
        The weights, in x's shape and dtype; ``(weights, stats)`` with return_stats. Hidden keys have weight and
        gradient 0, and so has every key of a row that sees nothing. A visible NaN or +inf makes its own row NaN and no
        other.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import jax, jax.numpy as jnp
    >>> from whet.jax import softmax
    >>> x = jnp.zeros(100).at[0].set(5.0)
    >>> weights, stats = softmax(x, rule="target-entropy:0.2", return_stats=True)
    >>> print(f"{stats.peak:.2f} became {weights[0]:.2f} at beta {stats.beta:.2f}")
    0.60 became 0.98 at beta 1.69
    >>> gradient = jax.grad(lambda x: softmax(x, rule="paper")[0])(jnp.array([1.0, 0.0, -jnp.inf]))
    >>> [f"{slope:.3f}" for slope in gradient]
    ['0.197', '-0.197', '0.000']
    """
    x = _as_float(array(x, "x"), where is not None)
    check_float(x, "x")
    if where is not None:
        where = array(where, "where")
        check_bool(where, "where")
        where = with_axes(where, x.ndim, "where")
        check_broadcasts(where, x.shape, "where")
    options = _Options(_axes(axis, x.ndim), rule_of(rule).name, flag(hold_beta, "hold_beta"),
                       flag(return_stats, "return_stats"))
    weights, stats = _jitted(options, x, where)
    return (weights, stats) if return_stats else weights


def _as_float(x: jax.Array, masked: bool) -> jax.Array:
    """Integers, and with a mask booleans, in the dtype that jax.nn.softmax gives them."""
    if masked and not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jax.eval_shape(lambda x: jnp.where(True, x, -jnp.inf), x).dtype)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jax.eval_shape(jnp.exp, x).dtype)
    return x


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Options:
    axes: tuple[int, ...]  # counted from the end, so that vmap doesn't move them
    rule: str
    hold_beta: bool
    return_stats: bool


def _axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(-ndim, 0))
    axes = tuple(integer(one, "axis") for one in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    for one in axes:
        if not -ndim <= one < ndim:
            raise ValueError(f"axis: is {one}, must be from {-ndim} to {ndim - 1} for x of {ndim} axes")
    axes = tuple(sorted(one if one < 0 else one - ndim for one in axes))
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis: {axis} names an axis twice")
    return axes


@jax.jit
def _jitted(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    x, where = varying_alike(x, where)
    if len(options.axes) == 1:
        weights, stats = _softmax(options, x, where)
    else:
        weights, stats = _softmax_of_several(options, x, where)
    return weights, None if stats is None else stats_of(jax.lax.stop_gradient(stats))


def _softmax_of_several(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    """The axes of a row become one, the last, and are themselves again in the weights."""
    count = len(options.axes)
    last = tuple(range(-count, 0))

    def as_one(values: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(values, options.axes, last)
        return moved.reshape(*moved.shape[:moved.ndim - count], math.prod(moved.shape[moved.ndim - count:]))

    shape = jnp.moveaxis(x, options.axes, last).shape
    mask = None if where is None else as_one(jnp.broadcast_to(where, x.shape))
    weights, stats = _softmax(_Options((-1,), options.rule, options.hold_beta, options.return_stats), as_one(x), mask)
    return jnp.moveaxis(weights.reshape(shape), last, options.axes), stats


@jax.custom_vjp
def _softmax(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    results = _call(options, x, where, save=False)
    return results["out"], results.get("stats")


def _forward(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[tuple[jax.Array, Any], Any]:
    results = _call(options, x, where, save=True)
    return (results["out"], results.get("stats")), (options, x, where, results["saved"])


def _backward(kept: Any, cotangents: Any) -> tuple[None, jax.Array, None]:
    options, x, where, saved = kept
    dout, _ = cotangents
    results = call("whet_softmax_backward", {"x": x, "dout": dout, "where": where, "saved": saved},
                   {"dx": (x.shape, x.dtype)}, axis=options.axes[0], rule=options.rule, hold_beta=options.hold_beta)
    return None, results["dx"], None


_softmax.defvjp(_forward, _backward)


def _call(options: _Options, x: jax.Array, where: jax.Array | None, save: bool) -> dict[str, jax.Array]:
    axis, = options.axes
    rows = tuple(size for i, size in enumerate(x.shape) if i != x.ndim + axis)
    results = {"out": (x.shape, x.dtype)}
    if save:
        results["saved"] = saved_type(rows)
    if options.return_stats:
        results["stats"] = stats_type(rows)
    return call("whet_softmax", {"x": x, "where": where}, results, axis=axis, rule=options.rule)
