"""Attention. No n by n matrix is ever stored."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from whet import _core
from whet._arguments import Window, count, flag, integer, window_sides
from whet.attention import Extras
from whet.jax._attention_tangent import attention_tangent
from whet.jax._ffi import (array, call, check_bool, check_broadcasts, check_float, perturbed, saved_type, stats_of,
                           stats_type, varying_alike, with_axes)
from whet.jax._linear import linear_call
from whet.jax._shards import check_shards, sharded_attention
from whet.jax.normalizers import NormalizerLike, name_and_alpha
from whet.rules import RuleLike
from whet.rules import rule as rule_of
from whet.stats import Stats


class _Keywords(TypedDict, total=False):
    scale: Any
    is_causal: bool
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    local_window_size: Window
    implementation: str | None
    rule: RuleLike | Sequence[RuleLike]
    normalizer: NormalizerLike
    hold_beta: bool
    softcap: float | None
    sinks: Any
    query_scale: Any
    query_starts: Any
    key_starts: Any
    axis_name: Hashable


@overload
def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
              return_residual: Literal[False] = False, return_stats: Literal[False] = False,
              **options: Unpack[_Keywords]) -> jax.Array: ...
@overload
def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
              return_residual: Literal[False] = False, return_stats: Literal[True],
              **options: Unpack[_Keywords]) -> tuple[jax.Array, Stats]: ...
@overload
def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, return_residual: bool = False,
              return_stats: bool = False, top_k: int = 0, column_sums: bool = False,
              **options: Unpack[_Keywords]) -> Any: ...
def attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: Any = None,
              is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
              local_window_size: Window = None, implementation: str | None = None, return_residual: bool = False,
              rule: RuleLike | Sequence[RuleLike] = None, normalizer: NormalizerLike = "softmax",
              hold_beta: bool = False, softcap: float | None = 0.0, sinks: Any = None, query_scale: Any = None,
              query_starts: Any = None, key_starts: Any = None, return_stats: bool = False, top_k: int = 0,
              column_sums: bool = False, axis_name: Hashable = None) -> Any:
    """jax.nn.dot_product_attention with the inverse temperature of each row chosen by a rule.

    B batch, T queries, S keys, N query heads, K key heads (N a multiple of K), H and E the sizes of a key and of a
    value (1 to 1024). A row is what one query of one head sees.

    Args:
        query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, E), or all three without B; one dtype: float32,
            float64, bfloat16 or float16.
        bias: broadcast to (B, N, T, S), added to the logits; -inf hides.
        mask: boolean, broadcast to (B, N, T, S); False hides.
        scale: default 1 / sqrt(H). An array (a scale that is learned) multiplies the queries.
        is_causal: hide the keys after key i from query i.
        query_seq_lengths, key_value_seq_lengths: (B) integers: queries from there on have output 0, keys are hidden.
        local_window_size: hide keys further than this from the query's position; a pair is (before, after), None
            for no limit.
        implementation: None or "xla", accepted for compatibility with JAX; there is one.
        return_residual: also return the log-sum-exp of each row's logits, before the rule: (B, T, N), key's dtype.
        rule: a rule or its name (see whet.rules), or a list with one per query head. Default: none, beta = 1.
        normalizer: what turns a row of logits into weights, by its name, or an Entmax, whose alpha may be learned, one
            or one per query head. Default: softmax.
        hold_beta: gradients count beta as a constant. By default they go through the rule, as in the published code.
        softcap: c tanh(x / c) before the bias; 0 or None: none.
        sinks: (N), one logit per head that takes weight and has no value.
        query_scale: broadcast to (B, T, N), multiplies scale, and has a gradient.
        query_starts, key_starts: integers 0, ..., T and 0, ..., S, as FlashAttention's cu_seqlens: sequences packed
            one after the other into a batch of one. Queries see the keys of their own sequence.
        return_stats: also return the whet.Stats of all rows, (B, T, N): float64 with jax_enable_x64, else rounded to
            float32. No gradient flows through them.
        top_k: also return this many heaviest keys of each row, heaviest first.
        column_sums: also return the weight that each key receives, summed over queries.
        axis_name: within shard_map, an axis of the mesh (or a tuple of several) that the keys are cut along: key, value and
            the last axis of bias and mask are those of this device, in the order of devices; all else is the same on
            every device of that axis and counts all keys (is_causal, local_window_size, key_value_seq_lengths), and so
            is the output. Not with packed sequences or outputs beside the first; normalizers softmax and hard.

    Returns:
        The output, (B, T, N, E); then, if asked for, the residual; then, if asked for, the stats; then, with top_k or
        column_sums, whet.Extras: top_keys and top_weights (B, T, N, top_k; key -1 where a row has fewer), column_sums
        (B, S, N). A row that sees nothing has output and gradients 0 (JAX gives it the mean of all values). What hidden
        keys and values hold doesn't matter.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> from whet.jax import attention
    >>> q = k = 4 * jnp.eye(8).reshape(4, 2, 8)
    >>> v = jnp.arange(8.0).reshape(4, 2, 1)
    >>> out, stats = attention(q, k, v, is_causal=True, rule="paper", return_stats=True)
    >>> out.shape, stats.count[:, 1]
    ((4, 2, 1), Array([1., 2., 3., 4.], dtype=float32))
    """
    query, key, value = array(query, "query"), array(key, "key"), array(value, "value")
    batched = query.ndim == 4
    query, key, value = four_axes(query=query, key=key, value=value)
    check_heads(query, key, value)
    if isinstance(scale, jax.Array):
        if scale.ndim > 0:
            raise ValueError(f"scale: its shape is {scale.shape}, must be a number")
        query, scale = (query * scale).astype(query.dtype), 1.0
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation: is {implementation!r}, must be None or 'xla': whet.jax runs on CPUs")

    (batch, queries, heads, size), keys = query.shape, key.shape[1]
    logits = (batch, heads, queries, keys)
    normalizer_name, alpha = name_and_alpha(normalizer)
    arrays = _Arrays(
        query, key, value, _bias(bias, query.dtype, logits), _mask(mask, logits), _sinks(sinks, query.dtype, heads),
        lengths_of(query_seq_lengths, batch, "query_seq_lengths"),
        lengths_of(key_value_seq_lengths, batch, "key_value_seq_lengths"),
        _starts(query_starts, "query_starts"), _starts(key_starts, "key_starts"), _query_scale(query_scale, query),
        _alpha(alpha, heads))
    before, after = _window(local_window_size)
    return_stats, return_residual = flag(return_stats, "return_stats"), flag(return_residual, "return_residual")
    options = _Options(
        rules=_rules(rule, heads), normalizer=normalizer_name,
        scale=size**-0.5 if scale is None else _number(scale, "scale"), softcap=_softcap(softcap, query.dtype),
        causal=flag(is_causal, "is_causal"), window_left=before, window_right=after,
        hold_beta=flag(hold_beta, "hold_beta"), return_stats=return_stats or return_residual,
        top_k=count(top_k, "top_k"), column_sums=flag(column_sums, "column_sums"))
    if axis_name is not None:
        check_shards(axis_name, key, normalizer_name, return_stats=return_stats, return_residual=return_residual,
                     top_k=options.top_k, column_sums=options.column_sums, query_starts=query_starts, key_starts=key_starts)
        out = sharded_attention(options, axis_name, arrays)
        return out if batched else out[0]
    out, stats, extras = _jitted(options, arrays)

    if not batched:
        out, stats, extras = jax.tree.map(lambda values: values[0], (out, stats, extras))
    results = (out,)
    if return_residual:
        results += (stats.log_sum_exp.astype(key.dtype),)
    if return_stats:
        results += (stats,)
    if extras:
        results += (Extras(**extras),)
    return results if len(results) > 1 else out


class _Arrays(NamedTuple):
    """Operands by the names that the extension has for them; None where there is none."""

    query: Any
    key: Any
    value: Any
    bias: Any  # four axes
    mask: Any
    sinks: Any  # (1, N): an axis for the batch, so that vmap puts its own before it
    query_lengths: Any
    key_lengths: Any
    query_starts: Any  # (1, sequences + 1), as sinks
    key_starts: Any
    query_scale: Any  # three axes
    alpha: Any  # (1, 1): the parameter of the normalizer "entmax"; (1, N) until heads are taken one by one


_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "query_scale", "alpha")


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Options:
    rules: str  # one name, or one per query head joined by ";"
    normalizer: str
    scale: float
    softcap: float
    causal: bool
    window_left: int
    window_right: int
    hold_beta: bool
    return_stats: bool
    top_k: int
    column_sums: bool

    def attributes(self) -> dict[str, Any]:
        # JAX would make 32 bits of Python's own numbers.
        return {"rules": self.rules, "normalizer": self.normalizer, "scale": np.float64(self.scale),
                "softcap": np.float64(self.softcap), "causal": self.causal, "window_left": np.int64(self.window_left),
                "window_right": np.int64(self.window_right)}


@jax.jit
def _jitted(options: _Options, arrays: _Arrays) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    arrays = _Arrays(*varying_alike(*arrays))
    of_heads = arrays.alpha is not None and arrays.alpha.shape[1] != 1
    out, optional = (_by_head if of_heads else _attention)(options, arrays)
    # Rows are where their queries are: (B, T, N) instead of (B, N, T).
    optional = {name: jnp.swapaxes(jax.lax.stop_gradient(values), 1, 2) for name, values in optional.items()}
    stats = optional.pop("stats", None)
    return out, None if stats is None else stats_of(stats), optional


def _by_head(options: _Options, arrays: _Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Attention with one alpha per head: a call takes one, so there is one for each."""
    heads, rules = arrays.query.shape[2], options.rules.split(";")

    def of_head(name: str, head: int) -> Any:
        """What the head reads; key heads and what heads share as often as it is read."""
        values = getattr(arrays, name)
        if values is None or name not in _HEAD_AXES:
            return values
        axis = _HEAD_AXES[name]
        first = head * values.shape[axis] // heads
        return jax.lax.slice_in_dim(values, first, first + 1, axis=axis)

    found = [_attention(replace(options, rules=rules[head % len(rules)]),
                        _Arrays(*(of_head(name, head) for name in _Arrays._fields))) for head in range(heads)]
    out = jnp.concatenate([out for out, _ in found], 2)
    return out, {name: jnp.concatenate([optional[name] for _, optional in found], 1) for name in found[0][1]}


_HEAD_AXES = {"query": 2, "key": 2, "value": 2, "bias": 1, "mask": 1, "sinks": 1, "query_scale": 2, "alpha": 1}


@jax.custom_jvp
def _attention(options: _Options, arrays: _Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
    results = _call(options, arrays, save=False)
    return results.pop("out"), results


# Gradients that nobody wants cost work and, for a bias, memory: symbolic zeros tell.
@partial(_attention.defjvp, symbolic_zeros=True)
def _attention_jvp(primals: Any, tangents: Any) -> Any:
    (options, arrays), (_, along) = primals, tangents
    results, along = _call(options, arrays, save=True), perturbed(along, _DIFFERENTIABLE)
    out, saved = results.pop("out"), results.pop("saved")
    if along:
        dout = linear_call(partial(attention_tangent, options), partial(_gradients, options, tuple(along)),
                           (arrays, saved), along)
    else:
        dout = jnp.zeros_like(out)
    return (out, results), (dout, jax.tree.map(_no_tangent, results))


def _no_tangent(values: jax.Array) -> Any:
    integers = jnp.issubdtype(values.dtype, jnp.integer)
    return np.zeros(values.shape, jax.dtypes.float0) if integers else jnp.zeros_like(values)


def _gradients(options: _Options, names: tuple[str, ...], residuals: Any, dout: jax.Array) -> dict[str, jax.Array]:
    arrays, saved = residuals
    shapes = {f"d{name}": (getattr(arrays, name).shape, getattr(arrays, name).dtype) for name in names}
    results = call("whet_attention_backward", {**arrays._asdict(), "dout": dout, "saved": saved}, shapes,
                   hold_beta=options.hold_beta, **options.attributes())
    return {name: results[f"d{name}"] for name in names}


def _call(options: _Options, arrays: _Arrays, save: bool) -> dict[str, jax.Array]:
    batch, queries, heads, _ = arrays.query.shape
    rows = (batch, heads, queries)
    results: dict[str, Any] = {"out": ((batch, queries, heads, arrays.value.shape[-1]), arrays.query.dtype)}
    if save:
        rules = [name for name in options.rules.split(";") if name]  # none if there are no heads
        results["saved"] = saved_type(rows, rules, options.normalizer, arrays.query.dtype)
    if options.return_stats:
        results["stats"] = stats_type(rows)
    if options.top_k > 0:
        results["top_keys"] = (*rows, options.top_k), np.int32
        results["top_weights"] = (*rows, options.top_k), np.float32
    if options.column_sums:
        results["column_sums"] = (batch, heads, arrays.key.shape[1]), jax.dtypes.canonicalize_dtype(np.float64)
    return call("whet_attention", arrays._asdict(), results, **options.attributes())


# ---- arguments


def four_axes(**arrays: jax.Array) -> list[jax.Array]:
    first = next(iter(arrays.values()))
    for name, given in arrays.items():
        if given.ndim not in (3, 4):
            raise ValueError(f"{name}: has {given.ndim} axes, must have 3 or 4")
        if given.ndim != first.ndim:
            raise ValueError(f"{name}: has {given.ndim} axes, must have as many as query, {first.ndim}")
    return [with_axes(given, 4, name) for name, given in arrays.items()]


def check_heads(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    check_float(query, "query")
    for name, given in (("key", key), ("value", value)):
        if given.dtype != query.dtype:
            raise TypeError(f"{name}: its dtype is {given.dtype}, must be that of query, {query.dtype}")
        if given.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: its batch is {given.shape[0]}, must be that of query, {query.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key: its head size is {key.shape[3]}, must be that of query, {query.shape[3]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(f"value: its keys and heads are {value.shape[1:3]}, must be those of key, {key.shape[1:3]}")
    heads, key_heads = query.shape[2], key.shape[2]
    if (key_heads == 0 and heads != 0) or (key_heads and heads % key_heads):
        raise ValueError(f"query: has {heads} heads, must have a multiple of those of key, {key_heads}")
    for name, given in (("query", query), ("value", value)):
        if not 1 <= given.shape[3] <= _core.MAX_HEAD_SIZE:
            raise ValueError(f"{name}: its head size is {given.shape[3]}, must be 1 to {_core.MAX_HEAD_SIZE}")


def _bias(bias: Any, dtype: Any, logits: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    bias = array(bias, "bias")
    if not jnp.issubdtype(bias.dtype, jnp.floating) and not jnp.issubdtype(bias.dtype, jnp.integer):
        raise TypeError(f"bias: its dtype is {bias.dtype}, must be floats")
    bias = with_axes(_side(bias, dtype), 4, "bias")
    check_broadcasts(bias, logits, "bias")
    return bias


def _side(values: jax.Array, dtype: Any) -> jax.Array:
    """In the dtype of the queries or that of the arithmetic."""
    return values if values.dtype == dtype else values.astype(jnp.promote_types(dtype, jnp.float32))


def _mask(mask: Any, logits: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    mask = array(mask, "mask")
    check_bool(mask, "mask")
    mask = with_axes(mask, 4, "mask")
    check_broadcasts(mask, logits, "mask")
    return mask


def _sinks(sinks: Any, dtype: Any, heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = array(sinks, "sinks")
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks: its dtype is {sinks.dtype}, must be floats")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks: its shape is {sinks.shape}, must be one per query head, ({heads},)")
    return _side(sinks, dtype)[None]


def _query_scale(factor: Any, query: jax.Array) -> jax.Array | None:
    if factor is None:
        return None
    factor = array(factor, "query_scale")
    if not jnp.issubdtype(factor.dtype, jnp.floating) and not jnp.issubdtype(factor.dtype, jnp.integer):
        raise TypeError(f"query_scale: its dtype is {factor.dtype}, must be floats")
    factor = with_axes(_side(factor, query.dtype), 3, "query_scale")
    check_broadcasts(factor, query.shape[:-1], "query_scale")
    return factor


def _alpha(alpha: jax.Array | None, heads: int) -> jax.Array | None:
    if alpha is None:
        return None
    if alpha.shape not in ((), (1,), (heads,)):
        raise ValueError(f"alpha: its shape is {alpha.shape}, must be () or one per query head, ({heads},)")
    return alpha.reshape(1, -1) if alpha.size > 0 else jnp.full((1, 1), 2, alpha.dtype)  # without heads any will do


def lengths_of(lengths: Any, batch: int, name: str) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = array(lengths, name)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name}: its dtype is {lengths.dtype}, must be integers")
    if lengths.shape != (batch,):
        raise ValueError(f"{name}: its shape is {lengths.shape}, must be one per batch entry, ({batch},)")
    return jnp.clip(lengths, 0, 2**31 - 1).astype(jnp.int32)


def _starts(starts: Any, name: str) -> jax.Array | None:
    if starts is None:
        return None
    starts = array(starts, name)
    if not jnp.issubdtype(starts.dtype, jnp.integer):
        raise TypeError(f"{name}: its dtype is {starts.dtype}, must be integers")
    if starts.ndim != 1:
        raise ValueError(f"{name}: its shape is {starts.shape}, must have one axis")
    return starts.astype(jnp.int32)[None]


def _window(window: Window) -> tuple[int, int]:
    for side in window if isinstance(window, (tuple, list)) else (window,):
        if side is not None and integer(side, "local_window_size") < 0:
            raise ValueError(f"local_window_size: is {window}, must be 0 or more, or None for no limit")
    return window_sides(window, "local_window_size")


def _rules(rule: RuleLike | Sequence[RuleLike], heads: int) -> str:
    if isinstance(rule, str) or not isinstance(rule, Sequence):
        return rule_of(rule).name
    if len(rule) != heads:
        raise ValueError(f"rule: {len(rule)} are given, must be one or one per query head, {heads}")
    return ";".join(rule_of(one).name for one in rule)


def _number(value: Any, name: str) -> float:
    try:
        number = value.__float__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name}: is a {type(value).__name__}, must be a number") from None
    if not np.isfinite(number):
        raise ValueError(f"{name}: is {number}, must be finite")
    return number


def _softcap(softcap: Any, dtype: Any) -> float:
    number = 0.0 if softcap is None else _number(softcap, "softcap")
    least = float(np.finfo(np.float64 if dtype == np.float64 else np.float32).tiny)
    if number != 0 and number < least:
        raise ValueError(f"softcap: is {number}, must be 0 or None (none), or at least {least}")
    return number
