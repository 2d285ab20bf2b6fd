"""Exact attention whose softmax may have a rule. No n by n matrix is ever stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from whet import _core
from whet._arguments import (Window, booleans, call, check_unmasked, flag, floats, integer, integers, window_sides,
                             with_axes)
from whet.rules import RuleLike, rule_names
from whet.stats import Stats, buffer_of, stats_buffer, stats_of


class TileCounts(NamedTuple):
    """Work done and saved, in tiles of the library's own size; those skipped were certain not to matter."""

    tiles: int
    skipped: int


class Extras(NamedTuple):
    """What attention was asked for beside output and stats; None where it wasn't."""

    weights: np.ndarray | None = None
    top_keys: np.ndarray | None = None
    top_weights: np.ndarray | None = None
    column_sums: np.ndarray | None = None
    tile_counts: TileCounts | None = None


class AttentionGradients(NamedTuple):
    """Gradients in the shapes and dtypes of what they belong to; dbias and dsinks None if those weren't given."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None


@overload
def attention(q: Any, k: Any, v: Any, *, rule: RuleLike | Sequence[RuleLike] = None, scale: float | None = None,
              causal: bool = False, align: str = "start", window: Window = None, mask: Any = None, bias: Any = None,
              lengths: Any = None, query_starts: Any = None, key_starts: Any = None, softcap: float | None = 0.0,
              sinks: Any = None, query_scale: Any = None, skip_epsilon: float | None = None, threads: int = 0,
              out: np.ndarray | None = None, return_stats: Literal[False] = False, weight_rows: None = None,
              top_k: Literal[0] = 0, column_sums: Literal[False] = False,
              tile_counts: Literal[False] = False) -> np.ndarray: ...
@overload
def attention(q: Any, k: Any, v: Any, *, rule: RuleLike | Sequence[RuleLike] = None, scale: float | None = None,
              causal: bool = False, align: str = "start", window: Window = None, mask: Any = None, bias: Any = None,
              lengths: Any = None, query_starts: Any = None, key_starts: Any = None, softcap: float | None = 0.0,
              sinks: Any = None, query_scale: Any = None, skip_epsilon: float | None = None, threads: int = 0,
              out: np.ndarray | None = None, return_stats: Literal[True], weight_rows: None = None,
              top_k: Literal[0] = 0, column_sums: Literal[False] = False,
              tile_counts: Literal[False] = False) -> tuple[np.ndarray, Stats]: ...
@overload
def attention(q: Any, k: Any, v: Any, *, rule: RuleLike | Sequence[RuleLike] = None, scale: float | None = None,
              causal: bool = False, align: str = "start", window: Window = None, mask: Any = None, bias: Any = None,
              lengths: Any = None, query_starts: Any = None, key_starts: Any = None, softcap: float | None = 0.0,
              sinks: Any = None, query_scale: Any = None, skip_epsilon: float | None = None, threads: int = 0,
              out: np.ndarray | None = None, return_stats: bool = False, weight_rows: Any = None, top_k: int = 0,
              column_sums: bool = False, tile_counts: bool = False) -> Any: ...
def attention(q: Any, k: Any, v: Any, *, rule: RuleLike | Sequence[RuleLike] = None, scale: float | None = None,
              causal: bool = False, align: str = "start", window: Window = None,
              mask: Any = None, bias: Any = None, lengths: Any = None, query_starts: Any = None,
              key_starts: Any = None, softcap: float | None = 0.0, sinks: Any = None, query_scale: Any = None,
              skip_epsilon: float | None = None, threads: int = 0, out: np.ndarray | None = None,
              return_stats: bool = False, weight_rows: Any = None, top_k: int = 0, column_sums: bool = False,
              tile_counts: bool = False) -> Any:
    """softmax(beta x) v with x = scale q k^T, row by row, beta chosen by a rule.

    B batch, H query heads, K key heads (H a multiple of K: query head h reads key head h // (H // K)), N queries,
    M keys, D and E the sizes of a key and of a value (1 to 1024). A row is what one query of one head sees.

    Args:
        q, k, v: (B, H, N, D), (B, K, M, D), (B, K, M, E), of any strides and one dtype: float32, float64, float16 or
            bfloat16. Without batch (3 axes), or without batch and heads (2 axes), if all three are.
        rule: a rule or its name, or a list with one a query head.
        scale: default 1 / sqrt(D).
        causal: hide keys after the query's place.
        align: the place of query i: "start", key i; "end", so that the last query stands at the last key.
        window: hide keys further than this from the query's place; a pair is (before, after), None or
            -1 for no limit.
        mask: boolean, broadcast to (B, H, N, M); False hides.
        bias: broadcast to (B, H, N, M), added to the logits; -inf hides.
        lengths: integers, one a batch entry or one a row: only the first keys exist.
        query_starts, key_starts: packed sequences (B = 1): 0, ..., N and 0, ..., M. Queries see their own sequence.
        softcap: c tanh(x / c) before the bias; 0 or None: none.
        sinks: (H), a logit of its own per head that takes weight and has no value.
        query_scale: broadcast to (B, H, N), multiplies scale.
        skip_epsilon: tiles whose weights together are certain to be below it are skipped; default 2^-24, 0: none are.
        threads: 0 is whet.get_num_threads(). Bits don't depend on it.
        out: where to write, (B, H, N, E). Default: a new array.
        return_stats: also return the Stats of all rows, (B, H, N).
        weight_rows: (R, 3) integers, batch, head, query of rows whose weights are wanted.
        top_k: this many heaviest keys a row are wanted, heaviest first.
        column_sums: True if what each key receives over all queries is wanted.
        tile_counts: True if the work done and saved is.

    Returns:
        The output; ``(output, stats)`` with return_stats. If any of weight_rows, top_k, column_sums and tile_counts
        was asked for, Extras come last: weights (R, M), top_keys and top_weights (B, H, N, top_k; key -1 where a row
        has fewer), column_sums (B, H, M), tile_counts.

    Raises:
        TypeError, ValueError: naming the argument; nothing was written.

    >>> import numpy as np, whet
    >>> q = k = 4 * np.eye(8, dtype=np.float32).reshape(1, 2, 4, 8)
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 2, 4, 1)
    >>> whet.attention(q, k, v, causal=True).shape
    (1, 2, 4, 1)
    >>> o, stats = whet.attention(q, k, v, causal=True, rule="paper", return_stats=True)
    >>> stats.count[0, 1]
    array([1., 2., 3., 4.])
    """
    q, k, v = floats(q, "q"), floats(k, "k"), floats(v, "v")
    rows = q.shape[:-1]
    check_unmasked(out, "out")
    if out is None:
        out = np.empty((*rows, *v.shape[-1:]), q.dtype)
    stats = stats_buffer(rows) if flag(return_stats, "return_stats") else None
    wanted = _wanted(q, k, weight_rows, top_k, column_sums, tile_counts)
    options = _options(q, rule=rule, scale=scale, causal=causal, align=align, window=window, mask=mask, bias=bias,
                       lengths=lengths, query_starts=query_starts, key_starts=key_starts, softcap=softcap,
                       sinks=sinks, query_scale=query_scale, threads=threads)
    call(_core.attention, _NAMES, *_four_axes(q=q, k=k, v=v, out=out), stats=stats, skip_epsilon=skip_epsilon,
         **options, **wanted)

    results = (out,) if stats is None else (out, stats_of(stats))
    if wanted:
        results += (_extras(wanted),)
    return results if len(results) > 1 else out


def attention_backward(q: Any, k: Any, v: Any, dout: Any, *, stats: Stats | None = None, hold_beta: bool = False,
                       bias: Any = None, sinks: Any = None, **options: Any) -> AttentionGradients:
    """The gradients of attention from what it was given and dout = dL/dout, (B, H, N, E).

    Args:
        q, k, v, bias, sinks, options: what attention was given; not what it was asked for, nor skip_epsilon.
        stats: what attention returned, if it did; otherwise they are computed again.
        hold_beta: True counts beta as a constant. By default the gradient goes through the rule, as in the published
            code.

    >>> import numpy as np, whet
    >>> q, k, v = np.ones((3, 2, 2)), np.eye(2)[None].repeat(3, 0), np.arange(12.0).reshape(3, 2, 2)
    >>> whet.attention_backward(q, k, v, np.ones((3, 2, 2)), causal=True).dv[0]
    array([[1.5, 1.5],
           [0.5, 0.5]])
    """
    q, k, v, dout = floats(q, "q"), floats(k, "k"), floats(v, "v"), floats(dout, "dout")
    options = _options(q, bias=bias, sinks=sinks, **options)
    dq, dk, dv = (np.empty_like(given, subok=False) for given in (q, k, v))
    dbias, dsinks = _like_if_given(options.get("bias")), _like_if_given(options.get("sinks"))
    gradients = AttentionGradients(dq, dk, dv, dbias, dsinks)
    dq, dk, dv = _four_axes(dq=dq, dk=dk, dv=dv)
    call(_core.attention_backward, _NAMES, *_four_axes(q=q, k=k, v=v, dout=dout), dq=dq, dk=dk, dv=dv, dbias=dbias,
         dsinks=dsinks, stats=buffer_of(stats, q.shape[:-1]), hold_beta=hold_beta, **options)
    return gradients if dbias is None else gradients._replace(dbias=dbias.reshape(np.shape(bias)))


# The extension's words for this module's arguments.
_NAMES = {"window_left": "window", "window_right": "window", "head_rules": "rule"}


def _four_axes(**arrays: np.ndarray) -> list[np.ndarray]:
    """Views of these arrays with the axes that all of them lack in front."""
    if all(isinstance(given, np.ndarray) and given.ndim == 4 for given in arrays.values()):
        return list(arrays.values())
    (first, leader), *_ = arrays.items()
    for name, given in arrays.items():
        if not isinstance(given, np.ndarray):
            raise TypeError(f"{name}: is a {type(given).__name__}, must be a NumPy array")
        if not 2 <= given.ndim <= 4:
            raise ValueError(f"{name}: has {given.ndim} axes, must have 2 to 4")
        if given.ndim != leader.ndim:
            raise ValueError(f"{name}: has {given.ndim} axes, must have as many as {first}, {leader.ndim}")
    return [with_axes(given, 4, name) for name, given in arrays.items()]


def _options(q: np.ndarray, *, window: Window = None, rule: Any = None, mask: Any = None,
             bias: Any = None, lengths: Any = None, query_starts: Any = None, key_starts: Any = None,
             sinks: Any = None, query_scale: Any = None, scale: float | None = None, causal: bool = False,
             align: str = "start", softcap: float | None = 0.0, threads: int = 0) -> dict[str, Any]:
    """What forward and backward have in common, as the extension takes it."""
    before, after = (None, None) if window is None else window_sides(window, "window")
    options = dict(rule=rule_names(rule), scale=scale, causal=causal, align=align, window_left=before,
                   window_right=after, mask=booleans(mask, 4, "mask"), bias=_side(bias, q, 4, "bias"),
                   lengths=integers(lengths, "lengths"), query_starts=integers(query_starts, "query_starts"),
                   key_starts=integers(key_starts, "key_starts"), softcap=softcap,
                   sinks=_side(sinks, q, 1, "sinks"), query_scale=_side(query_scale, q, 3, "query_scale"),
                   threads=threads)
    # Fewer are quicker: small calls feel it.
    return {name: value for name, value in options.items() if value is not None}


def _side(values: Any, q: np.ndarray, axes: int, name: str) -> np.ndarray | None:
    """A side array of floats; numbers and lists, which have no dtype of their own, take that of the arithmetic."""
    if values is None:
        return None
    given = floats(values, name)
    dtype = getattr(values, "dtype", None)
    if given.dtype.kind == "f" if dtype is None else dtype.kind in "iub":
        given = given.astype(np.float64 if q.dtype == np.float64 else np.float32)
    return with_axes(given, axes, name)


def _wanted(q: np.ndarray, k: np.ndarray, weight_rows: Any, top_k: int, column_sums: bool,
            tile_counts: bool) -> dict[str, Any]:
    """Room for what was asked for, as the extension takes it."""
    wanted: dict[str, Any] = {}
    keys = k.shape[-2:-1]
    if weight_rows is not None:
        rows = integers(weight_rows, "weight_rows")
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ValueError(f"weight_rows: its shape is {rows.shape}, must be (R, 3): batch, head, query of each row")
        wanted.update(weight_rows=rows, weights=np.empty((rows.size // 3, *keys), q.dtype))
    top_k = integer(top_k, "top_k")
    if not 0 <= top_k < 2**31:
        raise ValueError(f"top_k: is {top_k}, must be 0 or more and below 2^31")
    if top_k > 0:
        places = (*q.shape[:-1], top_k)
        wanted.update(top_k=top_k, top_keys=np.empty(places, np.int64), top_weights=np.empty(places, np.float32))
    if flag(column_sums, "column_sums"):
        wanted.update(column_sums=np.empty((*q.shape[:-2], *keys)))
    if flag(tile_counts, "tile_counts"):
        wanted.update(tile_counts=np.zeros(2, np.int64))
    return wanted


def _extras(wanted: dict[str, Any]) -> Extras:
    found = {name: values for name, values in wanted.items() if name in Extras._fields}
    if "tile_counts" in found:
        found["tile_counts"] = TileCounts(*found["tile_counts"].tolist())
    return Extras(**found)


def _like_if_given(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else np.empty_like(values, subok=False)
