"""Softmax over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from whet import _core
from whet._arguments import flag, integer
from whet._normalizers import ignores_shifts, is_symmetric
from whet.jax._ffi import (array, beta_of, call, check_bool, check_broadcasts, check_float, saved_type, stats_of,
                           stats_type, varying_alike, with_axes)
from whet.jax._linear import linear_call
from whet.rules import NoRule, Rule, RuleLike
from whet.rules import rule as rule_of
from whet.stats import Stats


class _Keywords(TypedDict, total=False):
    rule: RuleLike
    hold_beta: bool


@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, normalizer: str = "softmax",
            return_stats: Literal[False] = False, **options: Unpack[_Keywords]) -> jax.Array: ...
@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, normalizer: str = "softmax",
            return_stats: Literal[True], **options: Unpack[_Keywords]) -> tuple[jax.Array, Stats]: ...
@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, normalizer: str = "softmax",
            return_stats: bool, **options: Unpack[_Keywords]) -> jax.Array | tuple[jax.Array, Stats]: ...
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
            normalizer: str = "softmax", hold_beta: bool = False, return_stats: bool = False) -> Any:
    """jax.nn.softmax with the inverse temperature of each row chosen by a rule.

    Args:
        x: logits: float32, float64, bfloat16 or float16 (16 bits compute in float32). Integers, and
            booleans if `where` is given, become floats as in jax.nn.softmax. -inf hides a key.
        axis: the axis a row runs along; several, or None for all, make one row of all their elements.
        where: boolean, broadcast to x; False hides a key.
        rule: a rule or its name (see whet.rules). Default: none, beta = 1.
        normalizer: what turns a row of logits into weights, by its name. Default: softmax.
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
    x, where = _checked(x, where)
    options = _Options(_axes(axis, x.ndim), rule_of(rule), _core.normalizer_name(normalizer), flag(hold_beta, "hold_beta"),
                       flag(return_stats, "return_stats"))
    weights, stats = _jitted(options, x, where)
    return (weights, stats) if return_stats else weights


@overload
def log_softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *,
                return_stats: Literal[False] = False, **options: Unpack[_Keywords]) -> jax.Array: ...
@overload
def log_softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, return_stats: Literal[True],
                **options: Unpack[_Keywords]) -> tuple[jax.Array, Stats]: ...
@overload
def log_softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, return_stats: bool,
                **options: Unpack[_Keywords]) -> jax.Array | tuple[jax.Array, Stats]: ...
def log_softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
                hold_beta: bool = False, return_stats: bool = False) -> Any:
    """The logarithm of softmax, finite also where a weight is too small for a float.

    Arguments are those of softmax. Hidden keys have -inf and gradient 0, and so has every key of a row that sees
    nothing.

    >>> import jax.numpy as jnp
    >>> from whet.jax import log_softmax
    >>> log_softmax(jnp.array([0.0, -1000.0]), rule="fixed:2").tolist()
    [0.0, -2000.0]
    """
    x, where = _checked(x, where)
    options = _Options(_axes(axis, x.ndim), rule_of(rule), "softmax", flag(hold_beta, "hold_beta"),
                       flag(return_stats, "return_stats"))
    logs, stats = _jitted_log(options, x, where)
    return (logs, stats) if return_stats else logs


def _checked(x: Any, where: Any) -> tuple[jax.Array, jax.Array | None]:
    x = _as_float(array(x, "x"), where is not None)
    check_float(x, "x")
    if where is not None:
        where = array(where, "where")
        check_bool(where, "where")
        where = with_axes(where, x.ndim, "where")
        check_broadcasts(where, x.shape, "where")
    return x, where


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
    rule: Rule
    normalizer: str
    hold_beta: bool
    return_stats: bool

    @property
    def axis(self) -> int:
        axis, = self.axes
        return axis

    @property
    def beta_is_constant(self) -> bool:
        return self.hold_beta or not self.rule.adaptive

    def attributes(self) -> dict[str, Any]:
        return {"axis": self.axis, "rule": self.rule.name, "normalizer": self.normalizer}


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
    return _over_axes(_softmax, options, x, where)


@jax.jit
def _jitted_log(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    return _over_axes(_log_softmax, options, x, where)


def _over_axes(function: Any, options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    """A function of rows along one axis; several axes become one, the last, and are themselves again in the result."""
    x, where = varying_alike(x, where)
    count = len(options.axes)
    if count == 1:
        result, stats = function(options, x, where)
    else:
        last = tuple(range(-count, 0))

        def as_one(values: jax.Array) -> jax.Array:
            moved = jnp.moveaxis(values, options.axes, last)
            return moved.reshape(*moved.shape[:moved.ndim - count], math.prod(moved.shape[moved.ndim - count:]))

        shape = jnp.moveaxis(x, options.axes, last).shape
        mask = None if where is None else as_one(jnp.broadcast_to(where, x.shape))
        result, stats = function(replace(options, axes=(-1,)), as_one(x), mask)
        result = jnp.moveaxis(result.reshape(shape), last, options.axes)
    return result, None if stats is None else stats_of(jax.lax.stop_gradient(stats))


# ---- softmax


@jax.custom_jvp
def _softmax(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    results = _call(options, x, where, save=False)
    return results["out"], results.get("stats")


@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
    options, x, where = primals
    _, dx, _ = tangents
    results = _call(options, x, where, save=True)
    out, stats = results["out"], results.get("stats")
    dout = linear_call(partial(_tangent, options), partial(_gradient, options), (x, where, results["saved"]), dx)
    return (out, stats), (dout, jax.tree.map(jnp.zeros_like, stats))


def _gradient(options: _Options, residuals: Any, dout: jax.Array) -> jax.Array:
    x, where, saved = residuals
    results = call("whet_softmax_backward", {"x": x, "dout": dout, "where": where, "saved": saved},
                   {"dx": (x.shape, x.dtype)}, hold_beta=options.hold_beta, **options.attributes())
    return results["dx"]


def _tangent(options: _Options, residuals: Any, dx: jax.Array) -> jax.Array:
    """The derivative of the weights along dx, from gradients.

    Weights are a function of beta x, and d(beta x) = beta (dx + x dlnbeta). At a fixed beta the matrix of derivatives is
    symmetric, since the weights are themselves the gradient of a function of the logits: the derivative along a
    direction is what backward gives for it.
    """
    x, where, saved = residuals
    if x.dtype in (jnp.bfloat16, jnp.float16):  # in the type of the arithmetic, since differences are taken
        wide = _tangent(options, (x.astype(jnp.float32), where, saved), dx.astype(jnp.float32))
        return wide.astype(x.dtype)
    dx = jnp.where(visible_keys(x, where), dx, 0)
    if not options.beta_is_constant:
        along = jnp.sum(log_beta_gradient(options, residuals) * dx, options.axis, keepdims=True)
        dx = dx + measured_logits(x, where, options.axis, options.normalizer) * along
    if is_symmetric(options.normalizer):
        return _gradient(replace(options, hold_beta=True), residuals, dx)
    beta = jnp.expand_dims(_beta(options, x, where)[0], options.axis)
    return _softpick_tangent(beta * x, beta * dx, visible_keys(x, where), options.axis)


def _softpick_tangent(s: jax.Array, ds: jax.Array, visible: jax.Array, axis: int) -> jax.Array:
    """w = max(0, e^s - 1) / Z, Z = sum |e^s - 1|:  dw = ([s > 0] e^s ds - w sum sign(s) e^s ds) / Z"""
    s = jnp.where(visible, s, 0)  # e^0 - 1 is 0
    top = jnp.maximum(jnp.max(s, axis, keepdims=True, initial=0), 0)
    e, one = jnp.exp(s - top), jnp.exp(-top)
    z = jnp.sum(jnp.abs(e - one), axis, keepdims=True)
    scale = jnp.where(z == 0, 0, 1 / jnp.where(z == 0, 1, z))
    weights = jnp.maximum(0, e - one) * scale
    slopes = e * ds * scale
    return jnp.where(s > 0, slopes, 0) - weights * jnp.sum(jnp.sign(s) * slopes, axis, keepdims=True)


def log_beta_gradient(options: _Options, residuals: Any) -> jax.Array:
    """d ln beta / dx. With y = x - max, or x where the maximum matters, the gradients of <y, w> through beta and at a
    fixed beta differ by this times <y, the latter>."""
    x, where, _ = residuals
    y = measured_logits(x, where, options.axis, options.normalizer)
    through, held = (_gradient(replace(options, hold_beta=hold), residuals, y) for hold in (False, True))
    product = jnp.sum(held * y, options.axis, keepdims=True)
    return jnp.where(product == 0, 0, (through - held) / jnp.where(product == 0, 1, product))


def beta_slope(rule: Rule, normalizer: str, x: jax.Array, where: jax.Array | None) -> jax.Array:
    """d ln beta / dx of rows along the last axis."""
    if not rule.adaptive:
        return jnp.zeros_like(x)
    return log_beta_gradient(_Options((-1,), rule, normalizer, False, False), (x, where, None))


def weights_and_tangent(x: jax.Array, dx: jax.Array, normalizer: str) -> tuple[jax.Array, jax.Array]:
    """The weights of rows along the last axis, without a rule, and their derivative along dx."""
    options = _Options((-1,), NoRule(), normalizer, False, False)
    return _call(options, x, None, save=False)["out"], _tangent(options, (x, None, None), dx)


def visible_keys(x: jax.Array, where: jax.Array | None) -> jax.Array:
    visible = x != -jnp.inf
    return visible if where is None else visible & where


def measured_logits(x: jax.Array, where: jax.Array | None, axis: int, normalizer: str) -> jax.Array:
    """The logits from their maximum if the normalizer ignores what is added to all, 0 for hidden keys."""
    return below_max(x, where, axis) if ignores_shifts(normalizer) else jnp.where(visible_keys(x, where), x, 0)


def below_max(x: jax.Array, where: jax.Array | None, axis: int) -> jax.Array:
    """x - max, 0 for hidden keys. The maximum counts as a constant: what is added to a whole row changes no weight."""
    visible = visible_keys(x, where)
    highest = jnp.max(jax.lax.stop_gradient(x), axis, where=visible, initial=-jnp.inf, keepdims=True)
    return jnp.where(visible, jnp.where(visible, x, 0) - jnp.where(jnp.isneginf(highest), 0, highest), 0)


def _call(options: _Options, x: jax.Array, where: jax.Array | None, save: bool) -> dict[str, jax.Array]:
    rows = tuple(size for i, size in enumerate(x.shape) if i != x.ndim + options.axis)
    results = {"out": (x.shape, x.dtype)}
    if save:
        results["saved"] = saved_type(rows, options.rule.name, options.normalizer, x.dtype)
    if options.return_stats:
        results["stats"] = stats_type(rows)
    return call("whet_softmax", {"x": x, "where": where}, results, **options.attributes())


# ---- log_softmax


def _log_softmax(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    logits = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    beta, stats = _beta(options, logits, where)
    y = jnp.expand_dims(beta, options.axis) * below_max(logits, where, options.axis)
    visible = visible_keys(x, where)
    z = jnp.sum(jnp.where(visible, jnp.exp(y), 0), options.axis, keepdims=True)
    logs = y - jnp.log(jnp.where(z == 0, 1, z))  # 0 in a row that sees nothing
    return jnp.where(visible, logs, -jnp.inf).astype(x.dtype), stats


@jax.custom_jvp
def _beta(options: _Options, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, Any]:
    """beta of each row, in x's dtype, and the stats if they are asked for."""
    results = _call(options, x, where, save=True)
    return beta_of(results["saved"]), results.get("stats")


@_beta.defjvp
def _beta_jvp(primals: Any, tangents: Any) -> Any:
    options, x, where = primals
    _, dx, _ = tangents
    results = _call(options, x, where, save=True)
    saved, stats = results["saved"], results.get("stats")
    beta = beta_of(saved)
    if options.beta_is_constant:
        dbeta = jnp.zeros_like(beta)
    else:
        slope = jnp.expand_dims(beta, options.axis) * log_beta_gradient(options, (x, where, saved))
        dbeta = jnp.sum(slope * jnp.where(visible_keys(x, where), dx, 0), options.axis)
    return (beta, stats), (dbeta, jax.tree.map(jnp.zeros_like, stats))
