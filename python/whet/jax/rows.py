"""Softmax over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from whet._arguments import flag, integer
from whet._normalizers import ignores_shifts, is_symmetric
from whet.jax._ffi import (array, beta_of, call, check_bool, check_broadcasts, check_float, perturbed, saved_type,
                           stats_of, stats_type, varying_alike, with_axes)
from whet.jax._linear import linear_call
from whet.jax.normalizers import NormalizerLike, alpha_slope, name_and_alpha, single
from whet.rules import NoRule, Rule, RuleLike
from whet.rules import rule as rule_of
from whet.stats import Stats


class _Keywords(TypedDict, total=False):
    rule: RuleLike
    hold_beta: bool


@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, normalizer: NormalizerLike = "softmax",
            return_stats: Literal[False] = False, **options: Unpack[_Keywords]) -> jax.Array: ...
@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, normalizer: NormalizerLike = "softmax",
            return_stats: Literal[True], **options: Unpack[_Keywords]) -> tuple[jax.Array, Stats]: ...
@overload
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, normalizer: NormalizerLike = "softmax",
            return_stats: bool, **options: Unpack[_Keywords]) -> jax.Array | tuple[jax.Array, Stats]: ...
def softmax(x: Any, axis: int | Sequence[int] | None = -1, where: Any = None, *, rule: RuleLike = None,
            normalizer: NormalizerLike = "softmax", hold_beta: bool = False, return_stats: bool = False) -> Any:
    """jax.nn.softmax with the inverse temperature of each row chosen by a rule.

    Args:
        x: logits: float32, float64, bfloat16 or float16 (16 bits compute in float32). Integers, and
            booleans if `where` is given, become floats as in jax.nn.softmax. -inf hides a key.
        axis: the axis a row runs along; several, or None for all, make one row of all their elements.
        where: boolean, broadcast to x; False hides a key.
        rule: a rule or its name (see whet.rules). Default: none, beta = 1.
        normalizer: what turns a row of logits into weights, by its name, or an Entmax, whose alpha may be learned.
            Default: softmax.
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
    name, alpha = name_and_alpha(normalizer)
    options = _Options(_axes(axis, x.ndim), rule_of(rule), name, flag(hold_beta, "hold_beta"),
                       flag(return_stats, "return_stats"))
    weights, stats = _jitted(options, _Arrays(x, where, single(alpha)))
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
    logs, stats = _jitted_log(options, _Arrays(x, where))
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


class _Arrays(NamedTuple):
    """Operands by the names that the extension has for them; None where there is none."""

    x: Any
    where: Any = None
    alpha: Any = None  # without axes: the parameter of the normalizer "entmax"


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
def _jitted(options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any]:
    return _over_axes(_softmax, options, arrays)


@jax.jit
def _jitted_log(options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any]:
    return _over_axes(_log_softmax, options, arrays)


def _over_axes(function: Any, options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any]:
    """A function of rows along one axis; several axes become one, the last, and are themselves again in the result."""
    x, where, alpha = varying_alike(*arrays)
    count = len(options.axes)
    if count == 1:
        result, stats = function(options, _Arrays(x, where, alpha))
    else:
        last = tuple(range(-count, 0))

        def as_one(values: jax.Array) -> jax.Array:
            moved = jnp.moveaxis(values, options.axes, last)
            return moved.reshape(*moved.shape[:moved.ndim - count], math.prod(moved.shape[moved.ndim - count:]))

        shape = jnp.moveaxis(x, options.axes, last).shape
        mask = None if where is None else as_one(jnp.broadcast_to(where, x.shape))
        result, stats = function(replace(options, axes=(-1,)), _Arrays(as_one(x), mask, alpha))
        result = jnp.moveaxis(result.reshape(shape), last, options.axes)
    return result, None if stats is None else stats_of(jax.lax.stop_gradient(stats))


# ---- softmax


@jax.custom_jvp
def _softmax(options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any]:
    results = _call(options, arrays, save=False)
    return results["out"], results.get("stats")


# Symbolic zeros tell whether a gradient to alpha is wanted, which costs a sweep of its own.
@partial(_softmax.defjvp, symbolic_zeros=True)
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
    (options, arrays), (_, along) = primals, tangents
    results, along = _call(options, arrays, save=True), perturbed(along, ("x", "alpha"))
    out, stats = results["out"], results.get("stats")
    if along:
        dout = linear_call(partial(_tangent, options), partial(_gradients, options, tuple(along)),
                           (arrays, results["saved"]), along)
    else:
        dout = jnp.zeros_like(out)
    return (out, stats), (dout, jax.tree.map(jnp.zeros_like, stats))


def _gradients(options: _Options, names: tuple[str, ...], residuals: Any, dout: jax.Array) -> dict[str, jax.Array]:
    arrays, saved = residuals
    written = dict.fromkeys(("x", *names))  # the extension always writes dx
    shapes = {f"d{name}": (getattr(arrays, name).shape, getattr(arrays, name).dtype) for name in written}
    results = call("whet_softmax_backward", {**arrays._asdict(), "dout": dout, "saved": saved}, shapes,
                   hold_beta=options.hold_beta, **options.attributes())
    return {name: results[f"d{name}"] for name in names}


def _gradient(options: _Options, residuals: Any, dout: jax.Array) -> jax.Array:
    return _gradients(options, ("x",), residuals, dout)["x"]


def _tangent(options: _Options, residuals: tuple[_Arrays, jax.Array | None], along: dict[str, jax.Array]) -> jax.Array:
    """The derivative of the weights along tangents of x and alpha."""
    arrays, saved = residuals
    if arrays.x.dtype in (jnp.bfloat16, jnp.float16):  # in the type of the arithmetic, since differences are taken
        wide = arrays._replace(x=arrays.x.astype(jnp.float32))
        return _tangent(options, (wide, saved), {name: tangent.astype(jnp.float32)
                                                 for name, tangent in along.items()}).astype(arrays.x.dtype)
    tangent = jnp.zeros_like(arrays.x)
    if "x" in along:
        tangent = _tangent_along_x(options, residuals, along["x"])
    if "alpha" in along:
        weights = _call(replace(options, return_stats=False), arrays, save=False)["out"]
        tangent = tangent + alpha_slope(weights, arrays.alpha, options.axis) * along["alpha"].astype(weights.dtype)
    return tangent


def _tangent_along_x(options: _Options, residuals: tuple[_Arrays, jax.Array | None], dx: jax.Array) -> jax.Array:
    """The derivative of the weights along dx, from gradients.

    Weights are a function of beta x, and d(beta x) = beta (dx + x dlnbeta). At a fixed beta the matrix of derivatives is
    symmetric, since the weights are themselves the gradient of a function of the logits: the derivative along a
    direction is what backward gives for it.
    """
    arrays, _ = residuals
    x, where, _ = arrays
    dx = jnp.where(visible_keys(x, where), dx, 0)
    if not options.beta_is_constant:
        along = jnp.sum(log_beta_gradient(options, residuals) * dx, options.axis, keepdims=True)
        dx = dx + measured_logits(x, where, options.axis, options.normalizer) * along
    if is_symmetric(options.normalizer):
        return _gradient(replace(options, hold_beta=True), residuals, dx)
    beta = jnp.expand_dims(_beta(options, arrays)[0], options.axis)
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


def log_beta_gradient(options: _Options, residuals: tuple[_Arrays, jax.Array | None]) -> jax.Array:
    """d ln beta / dx. With y = x - max, or x where the maximum matters, the gradients of <y, w> through beta and at a
    fixed beta differ by this times <y, the latter>."""
    (x, where, _), _ = residuals
    y = measured_logits(x, where, options.axis, options.normalizer)
    through, held = (_gradient(replace(options, hold_beta=hold), residuals, y) for hold in (False, True))
    product = jnp.sum(held * y, options.axis, keepdims=True)
    return jnp.where(product == 0, 0, (through - held) / jnp.where(product == 0, 1, product))


# What forward mode of attention takes from here: rows along the last axis, alpha one number or None.


def beta_slope(rule: Rule, normalizer: str, alpha: jax.Array | None, x: jax.Array,
               where: jax.Array | None) -> jax.Array:
    """d ln beta / dx."""
    if not rule.adaptive:
        return jnp.zeros_like(x)
    return log_beta_gradient(_Options((-1,), rule, normalizer, False, False), (_Arrays(x, where, single(alpha)), None))


def weights_and_tangent(x: jax.Array, dx: jax.Array, normalizer: str, alpha: jax.Array | None,
                        dalpha: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The weights without a rule, and their derivative along dx and, unless it is None, dalpha."""
    options, arrays = _Options((-1,), NoRule(), normalizer, False, False), _Arrays(x, None, single(alpha))
    along = {"x": dx} if dalpha is None else {"x": dx, "alpha": dalpha.reshape(())}
    return _call(options, arrays, save=False)["out"], _tangent(options, (arrays, None), along)


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


def _call(options: _Options, arrays: _Arrays, save: bool) -> dict[str, jax.Array]:
    x = arrays.x
    rows = tuple(size for i, size in enumerate(x.shape) if i != x.ndim + options.axis)
    results = {"out": (x.shape, x.dtype)}
    if save:
        results["saved"] = saved_type(rows, options.rule.name, options.normalizer, x.dtype)
    if options.return_stats:
        results["stats"] = stats_type(rows)
    return call("whet_softmax", arrays._asdict(), results, **options.attributes())


# ---- log_softmax


def _log_softmax(options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any]:
    x, where, _ = arrays
    logits = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    beta, stats = _beta(options, _Arrays(logits, where))
    y = jnp.expand_dims(beta, options.axis) * below_max(logits, where, options.axis)
    visible = visible_keys(x, where)
    z = jnp.sum(jnp.where(visible, jnp.exp(y), 0), options.axis, keepdims=True)
    logs = y - jnp.log(jnp.where(z == 0, 1, z))  # 0 in a row that sees nothing
    return jnp.where(visible, logs, -jnp.inf).astype(x.dtype), stats


@jax.custom_jvp
def _beta(options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any]:
    """beta of each row, in x's dtype, and the stats if they are asked for."""
    results = _call(options, arrays, save=True)
    return beta_of(results["saved"]), results.get("stats")


@_beta.defjvp
def _beta_jvp(primals: Any, tangents: Any) -> Any:
    (options, arrays), (_, along) = primals, tangents
    results = _call(options, arrays, save=True)
    saved, stats = results["saved"], results.get("stats")
    beta = beta_of(saved)
    if options.beta_is_constant:
        dbeta = jnp.zeros_like(beta)
    else:
        slope = jnp.expand_dims(beta, options.axis) * log_beta_gradient(options, (arrays, saved))
        dbeta = jnp.sum(slope * jnp.where(visible_keys(arrays.x, arrays.where), along.x, 0), options.axis)
    return (beta, stats), (dbeta, jax.tree.map(jnp.zeros_like, stats))
