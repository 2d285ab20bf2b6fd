"""Functions over rows: the logits along one axis of an array."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from whet import _core
from whet._arguments import array, booleans, call, check_unmasked, flag, floats, integer, integers
from whet.rules import RuleLike, rule_name
from whet.stats import Stats, saved_buffer, stats_buffer, stats_of

# A row's state, everything of it that is needed to merge it with the rest of the row. With y = x - max:
# z = sum e^y, t = sum e^y y, u = sum e^y y^2.
STATE = np.dtype([("count", "i8"), ("min", "f8"), ("max", "f8"), ("z", "f8"), ("t", "f8"), ("u", "f8")])

# The extension's names for this module's arguments.
_OF_X = {"in": "x", "mask": "where"}
_OF_P = {"in": "p", "mask": "where"}
_OF_BACKWARD = {"in": "x", "din": "out", "mask": "where"}


@overload
def softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: Literal[False] = False,
            threads: int = 0) -> np.ndarray: ...
@overload
def softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: Literal[True],
            threads: int = 0) -> tuple[np.ndarray, Stats]: ...
@overload
def softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: bool,
            threads: int = 0) -> np.ndarray | tuple[np.ndarray, Stats]: ...
@overload
def softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: bool = False, return_saved: bool,
            threads: int = 0) -> Any: ...
def softmax(x: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: bool = False,
            return_saved: bool = False, threads: int = 0) -> Any:
    """softmax(beta x) along an axis, with the beta of each row chosen by a rule.

    Args:
        x: logits, 1 to 8 axes, of any strides: float32, float64, float16 or ml_dtypes' bfloat16 (16 bits compute in
            float32). Integers, booleans and lists become float64. -inf hides a key.
        axis: the axis a row runs along.
        rule: a rule or its name (see whet.rules). Default: none, beta = 1.
        where: boolean, broadcast to x; False hides a key.
        normalizer: what turns logits into weights, by its name. Default: softmax.
        lengths: integers, one per row (rows in row-major order): only the first keys of the row are visible.
        out: where to write, of x's shape and dtype; may be x itself. Default: a new array.
        return_stats: also return the Stats of all rows, in the shape of x without the axis.
        return_saved: also return what softmax_backward would otherwise find again: 3 to 6 numbers per row.
        threads: 0 is whet.get_num_threads(). Bits don't depend on it.

    Returns:
        The weights, in x's shape and dtype; ``(weights, stats)`` with return_stats, and with return_saved the saved
        numbers last. Hidden keys have weight 0, and so has every key of a row that sees nothing. A visible NaN or +inf
        makes its own row NaN and no other.

    Raises:
        TypeError, ValueError: naming the argument; nothing was written.

    >>> import whet
    >>> whet.softmax([[0.0, 1.0, 2.0]], rule="fixed:2").round(3)
    array([[0.016, 0.117, 0.867]])
    >>> weights, stats = whet.softmax([0.0] * 99 + [5.0], rule=whet.TargetEntropy(0.2), return_stats=True)
    >>> print(f"{stats.peak:.2f} became {weights[-1]:.2f} at beta {stats.beta:.2f}")
    0.60 became 0.98 at beta 1.69
    """
    x = floats(x, "x")
    return _forward(_core.softmax, _OF_X, x, axis, rule, where, normalizer, lengths, out, return_stats, threads,
                    return_saved)


@overload
def sharpen(p: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: Literal[False] = False,
            threads: int = 0) -> np.ndarray: ...
@overload
def sharpen(p: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: Literal[True],
            threads: int = 0) -> tuple[np.ndarray, Stats]: ...
@overload
def sharpen(p: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: bool,
            threads: int = 0) -> np.ndarray | tuple[np.ndarray, Stats]: ...
def sharpen(p: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *, normalizer: str = "softmax",
            lengths: Any = None, out: np.ndarray | None = None, return_stats: bool = False,
            threads: int = 0) -> Any:
    """softmax for rows given by their probabilities instead of their logits: p^beta / sum p^beta.

    `p` is 0 or more and sums to about 1 along the axis; 0 is a key that isn't visible, a negative one makes its row
    NaN. Everything else is as in softmax. In the stats, max and log_sum_exp are of ln p.

    >>> import whet
    >>> whet.sharpen([0.2, 0.3, 0.5], rule="fixed:2").round(3)
    array([0.105, 0.237, 0.658])
    """
    p = floats(p, "p")
    return _forward(_core.sharpen, _OF_P, p, axis, rule, where, normalizer, lengths, out, return_stats, threads)


@overload
def softmax_backward(x: Any, dout: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *,
                     normalizer: str = "softmax", lengths: Any = None, saved: np.ndarray | None = None,
                     hold_beta: bool = False, out: np.ndarray | None = None, threads: int = 0,
                     return_dparameter: Literal[False] = False) -> np.ndarray: ...
@overload
def softmax_backward(x: Any, dout: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *,
                     normalizer: str = "softmax", lengths: Any = None, saved: np.ndarray | None = None,
                     hold_beta: bool = False, out: np.ndarray | None = None, threads: int = 0,
                     return_dparameter: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...
def softmax_backward(x: Any, dout: Any, axis: int = -1, rule: RuleLike = None, where: Any = None, *,
                     normalizer: str = "softmax", lengths: Any = None, saved: np.ndarray | None = None,
                     hold_beta: bool = False, out: np.ndarray | None = None, threads: int = 0,
                     return_dparameter: bool = False) -> Any:
    """The gradient of softmax: dL/dx from x and dout = dL/dout.

    Args:
        x, axis, rule, where, normalizer, lengths: what softmax was given.
        dout: of x's shape and dtype.
        saved: what softmax returned with return_saved; otherwise it is found again.
        hold_beta: True counts beta as a constant. By default the gradient goes through the rule, as in the published
            code.
        out: where to write; may be `x` or `dout`.
        return_dparameter: also return the gradient to A of ``entmax:A``, float64, one per row: their sum is dL/dA.

    >>> import whet
    >>> whet.softmax_backward([0.0, 1.0], [1.0, 0.0]).round(3)
    array([ 0.197, -0.197])
    >>> dx, da = whet.softmax_backward([0.0, 0.4], [1.0, 0.0], normalizer="entmax:1.7", return_dparameter=True)
    >>> print(f"{da:.3f}")
    -0.115
    """
    x, dout = floats(x, "x"), floats(dout, "dout")
    axis = integer(axis, "axis")
    out = _output(x, out)
    dparameter = np.empty(_rows_of(x, axis)) if flag(return_dparameter, "return_dparameter") else None
    call(_core.softmax_backward, _OF_BACKWARD, x, dout, out, axis=axis, rule=rule_name(rule),
         normalizer=normalizer, mask=booleans(where, x.ndim, "where"), lengths=integers(lengths, "lengths"),
         saved=None if saved is None else array(saved, "saved"), hold_beta=hold_beta, threads=threads,
         dparameter=dparameter)
    return out if dparameter is None else (out, dparameter)


def states(x: Any, axis: int = -1, where: Any = None, *, lengths: Any = None, threads: int = 0) -> np.ndarray:
    """The state of every row: what of it must be kept to merge it with the rest of a longer row.

    Arguments are as in softmax. The result has the shape of x without the axis and the dtype whet.STATE, whose fields
    are count, min, max, z, t and u. The states of parts merge to the state of the whole, from which any rule but the two
    targets finds beta: keys may be kept in several files or on several machines.

    >>> import whet
    >>> whole = whet.merge(whet.states([0.0] * 60), whet.states([0.0] * 40))
    >>> int(whole["count"]), float(whole["z"]), float(whet.SSMax(0.5).beta(whole).round(3))
    (100, 100.0, 2.303)
    """
    x = floats(x, "x")
    axis = integer(axis, "axis")
    out = np.empty(_rows_of(x, axis), STATE)
    call(_core.states, _OF_X, x, _bits(out), axis=axis, mask=booleans(where, x.ndim, "where"),
         lengths=integers(lengths, "lengths"), threads=threads)
    return out


def merge(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The states of rows of which `a` and `b` are the states of two parts, element by element.

    Both have the dtype whet.STATE; shapes broadcast. Associative and commutative up to rounding.

    >>> import whet
    >>> float(whet.merge(whet.states([1.0]), whet.states([3.0, 2.0]))["max"])
    3.0
    """
    a, b = array(a, "a"), array(b, "b")
    for name, given in (("a", a), ("b", b)):
        if given.dtype != STATE:
            raise TypeError(f"{name}: its dtype is {given.dtype}, must be whet.STATE")
    try:
        a, b = np.broadcast_arrays(a, b)
    except ValueError:
        raise ValueError(f"b: its shape is {b.shape}, must broadcast with that of a, {a.shape}") from None
    out = np.empty(a.shape, STATE)
    call(_core.merge, {}, _bits(np.ascontiguousarray(a)), _bits(np.ascontiguousarray(b)), _bits(out))
    return out


def _forward(function: Any, names: dict[str, str], x: np.ndarray, axis: int, rule: RuleLike, where: Any,
             normalizer: str, lengths: Any, out: np.ndarray | None, return_stats: bool, threads: int,
             return_saved: bool = False) -> Any:
    out = _output(x, out)
    axis, name = integer(axis, "axis"), rule_name(rule)
    rows = _rows_of(x, axis)
    stats = stats_buffer(rows) if flag(return_stats, "return_stats") else None
    saved = saved_buffer(rows, x, name, normalizer) if flag(return_saved, "return_saved") else None
    call(function, names, x, out, axis=axis, rule=name, normalizer=normalizer, mask=booleans(where, x.ndim, "where"),
         lengths=integers(lengths, "lengths"), stats=stats, saved=saved, threads=threads)
    results: tuple[Any, ...] = (out,) if stats is None else (out, stats_of(stats))
    if saved is not None:
        results += (saved,)
    return results if len(results) > 1 else out


def _output(x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """The array to write to: the caller's, or a new one."""
    check_unmasked(out, "out")
    return np.empty_like(x, subok=False) if out is None else out


def _rows_of(x: np.ndarray, axis: int) -> tuple[int, ...]:
    """The shape of x without the axis. An axis that x doesn't have is for the extension to refuse."""
    return x.shape[:axis] + x.shape[axis:][1:]


def _bits(states: np.ndarray) -> np.ndarray:
    """States as the extension takes them: six times 64 bits each."""
    return states.reshape(-1).view(np.int64)
