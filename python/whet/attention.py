"""Exact attention whose softmax may have a rule. No n by n matrix is ever stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np

from whet import _core
from whet._arguments import (Window, array, booleans, call, check_unmasked, count, flag, floats, four_axes,
                             integers, window_sides, with_axes)
from whet.rules import RuleLike, rule_names
from whet.stats import Stats, saved_buffer, stats_buffer, stats_of


class TileCounts(NamedTuple):
    """Tiles of a call, groups of rows by ranges of keys, and how many of them were certain not to matter. Fit for
    ratios; the size of a tile may differ between versions."""

    tiles: int
    skipped: int


class Extras(NamedTuple):
    """Optional outputs of attention; None where they weren't asked for.

    >>> import numpy as np, whet
    >>> q = np.eye(3)
    >>> _, extras = whet.attention(q, q, q, top_k=1)
    >>> extras.top_keys[:, 0]
    array([0, 1, 2])
    """

    weights: Any = None
    top_keys: Any = None
    top_weights: Any = None
    column_sums: Any = None
    tile_counts: TileCounts | None = None


class AttentionGradients(NamedTuple):
    """Gradients in the shapes and dtypes of what they belong to; dbias, dsinks and dquery_scale None if what they belong
    to wasn't given. dparameter, None unless asked for, is the gradient to A of ``entmax:A``, float64, one per row,
    (B, H, N): their sum is dL/dA."""

    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None
    dquery_scale: np.ndarray | None = None
    dparameter: np.ndarray | None = None


class AttentionOptions(TypedDict, total=False):
    """What attention and attention_backward take beside the arrays that both name."""

    rule: RuleLike | Sequence[RuleLike]
    normalizer: str
    scale: float | None
    is_causal: bool
    align: str
    window: Window
    mask: Any
    lengths: Any
    query_starts: Any
    key_starts: Any
    softcap: float | None
    query_scale: Any
    dropout_p: float
    dropout_seed: int
    threads: int


@overload
def attention(query: Any, key: Any, value: Any, *, bias: Any = None, sinks: Any = None,
              skip_epsilon: float | None = None, out: np.ndarray | None = None, return_stats: Literal[False] = False,
              **options: Unpack[AttentionOptions]) -> np.ndarray: ...
@overload
def attention(query: Any, key: Any, value: Any, *, bias: Any = None, sinks: Any = None,
              skip_epsilon: float | None = None, out: np.ndarray | None = None, return_stats: Literal[True],
              **options: Unpack[AttentionOptions]) -> tuple[np.ndarray, Stats]: ...
@overload
def attention(query: Any, key: Any, value: Any, *, bias: Any = None, sinks: Any = None,
              skip_epsilon: float | None = None, out: np.ndarray | None = None, return_stats: bool = False,
              return_saved: bool = False, weight_rows: Any = None, top_k: int = 0, column_sums: bool = False,
              tile_counts: bool = False, **options: Unpack[AttentionOptions]) -> Any: ...
def attention(query: Any, key: Any, value: Any, *, rule: RuleLike | Sequence[RuleLike] = None,
              normalizer: str = "softmax", scale: float | None = None, is_causal: bool = False, align: str = "start",
              window: Window = None, mask: Any = None, bias: Any = None, lengths: Any = None,
              query_starts: Any = None, key_starts: Any = None, softcap: float | None = 0.0, sinks: Any = None,
              query_scale: Any = None, dropout_p: float = 0.0, dropout_seed: int = 0,
              skip_epsilon: float | None = None, threads: int = 0, out: np.ndarray | None = None,
              return_stats: bool = False, return_saved: bool = False, weight_rows: Any = None, top_k: int = 0,
              column_sums: bool = False, tile_counts: bool = False) -> Any:
    """softmax(beta x) value with x = scale query key^T, row by row, beta chosen by a rule.

    B batch, H query heads, K key heads (H a multiple of K: query head h reads key head h // (H // K)), N queries,
    M keys, D and E the sizes of a key and of a value (1 to 1024). A row is what one query of one head sees.

    Args:
        query, key, value: (B, H, N, D), (B, K, M, D), (B, K, M, E), of any strides and one dtype: float32, float64,
            float16 or bfloat16. Without batch (3 axes), or without batch and heads (2 axes), if all three are.
        rule: a rule or its name, or a list with one per query head.
        normalizer: what turns a row of logits into weights, by its name. Default: softmax.
        scale: default 1 / sqrt(D).
        is_causal: hide keys after the query's position.
        align: the position of query i: "start", key i; "end", so that the last query is at the last key.
        window: hide keys further than this from the query's position; a pair is (before, after), None or
            -1 for no limit.
        mask: boolean, broadcast to (B, H, N, M); False hides.
        bias: broadcast to (B, H, N, M), added to the logits; -inf hides.
        lengths: integers, one per batch entry or one per row: only the first keys exist.
        query_starts, key_starts: packed sequences (B = 1): 0, ..., N and 0, ..., M. Queries see their own sequence.
        softcap: c tanh(x / c) before the bias; 0 or None: none.
        sinks: (H), one logit per head that takes weight and has no value.
        query_scale: broadcast to (B, H, N), multiplies scale.
        dropout_p: each weight becomes 0 with this probability, and is divided by 1 - dropout_p otherwise.
        dropout_seed: which weights those are; give attention_backward the same.
        skip_epsilon: tiles whose weights together are certain to be below it are skipped; default 2^-24, 0: none are.
        threads: 0 is whet.get_num_threads(). Bits don't depend on it.
        out: where to write, (B, H, N, E). Default: a new array.
        return_stats: also return the Stats of all rows, (B, H, N).
        return_saved: also return what attention_backward would otherwise find again: 3 to 6 numbers per row.
        weight_rows: (R, 3) integers, batch, head, query of rows: also return their weights.
        top_k: also return this many heaviest keys of each row, heaviest first.
        column_sums: also return the weight that each key receives, summed over queries.
        tile_counts: also return how many tiles were computed and skipped.

    Returns:
        The output; ``(output, stats)`` with return_stats, and with return_saved the saved numbers after them. With any
        of weight_rows, top_k, column_sums and tile_counts, Extras come last: weights (R, M), top_keys and top_weights
        (B, H, N, top_k; key -1 where a row has fewer), column_sums (B, H, M), tile_counts.

    Raises:
        TypeError, ValueError: naming the argument; nothing was written.

    >>> import numpy as np, whet
    >>> q = k = 4 * np.eye(8, dtype=np.float32).reshape(1, 2, 4, 8)
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 2, 4, 1)
    >>> whet.attention(q, k, v, is_causal=True).shape
    (1, 2, 4, 1)
    >>> o, stats = whet.attention(q, k, v, is_causal=True, rule="paper", return_stats=True)
    >>> stats.count[0, 1]
    array([1., 2., 3., 4.])
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    rows = query.shape[:-1]
    check_unmasked(out, "out")
    if out is None:
        out = np.empty((*rows, *value.shape[-1:]), query.dtype)
    stats = stats_buffer(rows) if flag(return_stats, "return_stats") else None
    outputs = _outputs(query, key, weight_rows, top_k, column_sums, tile_counts)
    options = _options(query, rule=rule, normalizer=normalizer, scale=scale, is_causal=is_causal, align=align,
                       window=window, mask=mask, bias=bias, lengths=lengths, query_starts=query_starts,
                       key_starts=key_starts, softcap=softcap, sinks=sinks, query_scale=query_scale,
                       dropout_p=dropout_p, dropout_seed=dropout_seed, threads=threads)
    saved = None
    if flag(return_saved, "return_saved"):
        saved = saved_buffer(rows, query, options.get("rule"), normalizer)
    call(_core.attention, _NAMES, *four_axes(query=query, key=key, value=value, out=out), stats=stats, saved=saved,
         skip_epsilon=skip_epsilon, **options, **outputs)

    results = (out,) if stats is None else (out, stats_of(stats))
    if saved is not None:
        results += (saved,)
    if outputs:
        results += (_extras(outputs),)
    return results if len(results) > 1 else out


def attention_backward(query: Any, key: Any, value: Any, dout: Any, *, saved: np.ndarray | None = None,
                       hold_beta: bool = False, bias: Any = None, sinks: Any = None, return_dparameter: bool = False,
                       **options: Unpack[AttentionOptions]) -> AttentionGradients:
    """The gradients of attention from what it was given and dout = dL/dout, (B, H, N, E).

    Args:
        query, key, value, bias, sinks, options: what attention was given, without skip_epsilon and optional outputs.
        saved: what attention returned with return_saved; otherwise it is found again.
        hold_beta: True counts beta as a constant. By default the gradient goes through the rule, as in the published
            code.
        return_dparameter: also find the gradient to the parameter of the normalizer, the A of ``entmax:A``.

    >>> import numpy as np, whet
    >>> q, k, v = np.ones((3, 2, 2)), np.eye(2)[None].repeat(3, 0), np.arange(12.0).reshape(3, 2, 2)
    >>> whet.attention_backward(q, k, v, np.ones((3, 2, 2)), is_causal=True).dvalue[0]
    array([[1.5, 1.5],
           [0.5, 0.5]])
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    dout = floats(dout, "dout")
    given = _options(query, bias=bias, sinks=sinks, **options)
    dq, dk, dv = (np.empty_like(one, subok=False) for one in (query, key, value))
    gradients = AttentionGradients(dq, dk, dv, *(_like_if_given(given.get(name))
                                                 for name in ("bias", "sinks", "query_scale")))
    dq, dk, dv = four_axes(dquery=gradients.dquery, dkey=gradients.dkey, dvalue=gradients.dvalue)
    dparameter = np.empty(query.shape[:-1]) if flag(return_dparameter, "return_dparameter") else None
    call(_core.attention_backward, _NAMES, *four_axes(query=query, key=key, value=value, dout=dout), dq=dq, dk=dk,
         dv=dv, dparameter=dparameter, dbias=gradients.dbias, dsinks=gradients.dsinks, dquery_scale=gradients.dquery_scale,
         saved=None if saved is None else array(saved, "saved"), hold_beta=hold_beta, **given)
    return gradients._replace(dparameter=dparameter, dbias=_shaped(gradients.dbias, bias),
                              dquery_scale=_shaped(gradients.dquery_scale, options.get("query_scale")))


# The extension's names for this module's arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "window_left": "window",
          "window_right": "window", "head_rules": "rule", "dropout": "dropout_p", "dq": "dquery", "dk": "dkey",
          "dv": "dvalue"}


def _options(query: np.ndarray, *, bias: Any, sinks: Any, rule: RuleLike | Sequence[RuleLike] = None,
             normalizer: str = "softmax", scale: float | None = None, is_causal: bool = False, align: str = "start",
             window: Window = None, mask: Any = None, lengths: Any = None, query_starts: Any = None,
             key_starts: Any = None, softcap: float | None = 0.0, query_scale: Any = None, dropout_p: float = 0.0,
             dropout_seed: int = 0, threads: int = 0) -> dict[str, Any]:
    """What forward and backward have in common, as the extension takes it."""
    before, after = (None, None) if window is None else window_sides(window, "window")
    options = dict(rule=rule_names(rule), normalizer=normalizer, scale=scale, causal=is_causal, align=align,
                   window_left=before, window_right=after, mask=booleans(mask, 4, "mask"),
                   bias=_side(bias, query, 4, "bias"), lengths=integers(lengths, "lengths"),
                   query_starts=integers(query_starts, "query_starts"), key_starts=integers(key_starts, "key_starts"),
                   softcap=softcap, sinks=_side(sinks, query, 1, "sinks"),
                   query_scale=_side(query_scale, query, 3, "query_scale"), dropout=dropout_p,
                   dropout_seed=dropout_seed, threads=threads)
    # Fewer are quicker: small calls feel it.
    return {name: value for name, value in options.items() if value is not None}


def _side(values: Any, query: np.ndarray, axes: int, name: str) -> np.ndarray | None:
    """A side array of floats; numbers and lists, which have no dtype of their own, take that of the arithmetic."""
    if values is None:
        return None
    given = floats(values, name)
    dtype = getattr(values, "dtype", None)
    if given.dtype.kind == "f" if dtype is None else dtype.kind in "iub":
        given = given.astype(np.float64 if query.dtype == np.float64 else np.float32)
    return with_axes(given, axes, name)


def _outputs(query: np.ndarray, key: np.ndarray, weight_rows: Any, top_k: int, column_sums: bool,
             tile_counts: bool) -> dict[str, Any]:
    """Buffers for the optional outputs, as the extension takes them."""
    outputs: dict[str, Any] = {}
    keys = key.shape[-2:-1]
    if weight_rows is not None:
        rows = integers(weight_rows, "weight_rows")
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ValueError(f"weight_rows: its shape is {rows.shape}, must be (R, 3): batch, head, query of each row")
        outputs.update(weight_rows=rows, weights=np.empty((rows.shape[0], *keys), query.dtype))
    top_k = count(top_k, "top_k")
    if top_k > 0:
        shape = (*query.shape[:-1], top_k)
        outputs.update(top_k=top_k, top_keys=np.empty(shape, np.int64), top_weights=np.empty(shape, np.float32))
    if flag(column_sums, "column_sums"):
        outputs.update(column_sums=np.empty((*query.shape[:-2], *keys)))
    if flag(tile_counts, "tile_counts"):
        outputs.update(tile_counts=np.zeros(2, np.int64))
    return outputs


def _extras(outputs: dict[str, Any]) -> Extras:
    found = {name: values for name, values in outputs.items() if name in Extras._fields}
    if "tile_counts" in found:
        found["tile_counts"] = TileCounts(*found["tile_counts"].tolist())
    return Extras(**found)


def _shaped(gradient: np.ndarray | None, given: Any) -> np.ndarray | None:
    """In the shape of what it is the gradient of, which may have had fewer axes."""
    return None if gradient is None else gradient.reshape(np.shape(given))


def _like_if_given(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else np.empty_like(values, subok=False)
