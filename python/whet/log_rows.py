"""The logarithm of softmax, and its gradient."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from whet._arguments import booleans, check_unmasked, flag, floats, integer, integers
from whet.rows import softmax, softmax_backward
from whet.rules import RuleLike
from whet.rules import rule as rule_of
from whet.stats import Stats


@overload
def log_softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, lengths: Any = None,
                out: np.ndarray | None = None, return_stats: Literal[False] = False,
                threads: int = 0) -> np.ndarray: ...
@overload
def log_softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, lengths: Any = None,
                out: np.ndarray | None = None, return_stats: Literal[True],
                threads: int = 0) -> tuple[np.ndarray, Stats]: ...
@overload
def log_softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, lengths: Any = None,
                out: np.ndarray | None = None, return_stats: bool,
                threads: int = 0) -> np.ndarray | tuple[np.ndarray, Stats]: ...
def log_softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, lengths: Any = None,
                out: np.ndarray | None = None, return_stats: bool = False, threads: int = 0) -> Any:
    """The logarithm of softmax, finite also where a weight is too small for a float: beta (x - max) - ln z.

    Arguments are those of softmax. Hidden keys have -inf, and so has every key of a row that sees nothing.

    >>> import whet
    >>> whet.log_softmax([0.0, -1000.0], rule="fixed:2")
    array([    0., -2000.])
    """
    x, axis = floats(x, "x"), integer(axis, "axis")
    _check_out(out, x)
    _, stats = softmax(x, axis, rule, where, lengths=lengths, return_stats=True, threads=threads)
    visible = _visible(x, axis, where, lengths)
    y = _below_max(x, visible, stats, axis)
    with np.errstate(divide="ignore"):  # a row that sees nothing has a largest weight of 0
        log_z = -np.log(stats.sharp_peak)
    logs = np.where(visible, _per_row(stats.beta, axis) * y - _per_row(log_z, axis), -np.inf)
    out = np.empty_like(x, subok=False) if out is None else out
    out[...] = logs
    return (out, stats) if flag(return_stats, "return_stats") else out


def log_softmax_backward(x: Any, dout: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *,
                         lengths: Any = None, hold_beta: bool = False, out: np.ndarray | None = None,
                         threads: int = 0) -> np.ndarray:
    """The gradient of log_softmax: dL/dx from x and dout = dL/dout.

    Arguments are those of softmax_backward. What `dout` holds for hidden keys doesn't matter.

    >>> import whet
    >>> whet.log_softmax_backward([0.0, 1.0], [1.0, 0.0]).round(3)
    array([ 0.731, -0.731])
    """
    x, dout, axis = floats(x, "x"), floats(dout, "dout"), integer(axis, "axis")
    if dout.shape != x.shape:
        raise ValueError(f"dout: its shape is {dout.shape}, must be that of x, {x.shape}")
    _check_out(out, x)
    options: dict[str, Any] = dict(axis=axis, rule=rule, where=where, lengths=lengths, threads=threads)
    logits = x if x.dtype == np.float64 else x.astype(np.float32)
    weights, stats = softmax(logits, return_stats=True, **options)
    visible = _visible(x, axis, where, lengths)
    y = _below_max(logits, visible, stats, axis)
    beta, g = _per_row(stats.beta, axis), np.where(visible, dout, 0.0)

    # d log w_i / dx_j = beta (1[i = j] - w_j) + (y_i - <w, y>) dbeta / dx_j
    dx = beta * (g - weights * g.sum(axis, keepdims=True))
    if not flag(hold_beta, "hold_beta") and rule_of(rule).adaptive:
        # The gradient of <y, w> without and with what goes through beta: they differ by Var_w(y) dbeta / dx.
        given = y.astype(logits.dtype)
        held = softmax_backward(logits, given, hold_beta=True, **options)
        through = softmax_backward(logits, given, **options)
        variance = (held * y).sum(axis, keepdims=True) / beta
        slope = (g * (y - (weights * y).sum(axis, keepdims=True))).sum(axis, keepdims=True)
        dx += np.divide(slope, variance, out=np.zeros_like(slope), where=variance != 0) * (through - held)
    out = np.empty_like(x, subok=False) if out is None else out
    out[...] = dx
    return out


def _check_out(out: Any, x: np.ndarray) -> None:
    if out is None:
        return
    check_unmasked(out, "out")
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: is a {type(out).__name__}, must be a NumPy array")
    if (out.shape, out.dtype) != (x.shape, x.dtype):
        raise ValueError(f"out: is {out.shape} of {out.dtype}, must be as x, {x.shape} of {x.dtype}")
    if not out.flags.writeable:
        raise ValueError("out: is read-only")


def _visible(x: np.ndarray, axis: int, where: Any, lengths: Any) -> np.ndarray:
    visible = x != -np.inf
    mask, lengths = booleans(where, x.ndim, "where"), integers(lengths, "lengths")
    if mask is not None:
        visible = visible & mask
    if lengths is not None:
        rows = x.shape[:axis] + x.shape[axis:][1:]
        before_end = np.arange(x.shape[axis]) < lengths.reshape(*rows, 1)
        visible = visible & np.moveaxis(before_end, -1, axis)
    return visible


def _below_max(x: np.ndarray, visible: np.ndarray, stats: Stats, axis: int) -> np.ndarray:
    """x - max in float64, 0 for hidden keys."""
    return np.subtract(x, _per_row(stats.max, axis), dtype=np.float64, where=visible, out=np.zeros(x.shape))


def _per_row(values: np.ndarray, axis: int) -> np.ndarray:
    return np.expand_dims(values, axis)
