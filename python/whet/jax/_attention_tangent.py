"""Forward-mode differentiation of attention. Unlike everything else here it stores weights: a matrix of queries by keys
for each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from whet._normalizers import ignores_sinks
from whet.jax._ffi import beta_of
from whet.jax.rows import beta_slope, measured_logits, weights_and_tangent
from whet.rules import rule as rule_of

if TYPE_CHECKING:
    from whet.jax.attention import _Arrays, _Options


def attention_tangent(options: _Options, residuals: tuple[_Arrays, jax.Array],
                      along: dict[str, jax.Array]) -> jax.Array:
    """The derivative of the output along tangents of some operands."""
    arrays, saved = residuals
    beta = beta_of(saved)[..., None]
    out_dtype, alpha = arrays.query.dtype, arrays.alpha
    arrays, along = jax.tree.map(lambda x: x.astype(saved.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                                 (arrays, along))
    arrays, along = _with_scaled_query(arrays, along)
    keys, groups = arrays.key.shape[1], arrays.query.shape[2] // max(arrays.key.shape[2], 1)
    logits, dlogits = _logits(options, arrays, along, groups)
    visible = jnp.broadcast_to(_visible(options, arrays), logits.shape) & (logits != -jnp.inf)
    if arrays.sinks is not None and not ignores_sinks(options.normalizer):
        # One more key, which rows that see no other ignore.
        sinks, dsinks = arrays.sinks, along.get("sinks", jnp.zeros_like(arrays.sinks))
        seen = visible.any(-1, keepdims=True) & (sinks != -jnp.inf)[..., None, None]
        logits, dlogits = _with_last(logits, sinks[..., None, None]), _with_last(dlogits, dsinks[..., None, None])
        visible = _with_last(visible, seen)

    # Weights are a function of u = beta x, and du = beta (dx + x dlnbeta).
    dlogits = jnp.where(visible, dlogits, 0)
    y = measured_logits(logits, visible, -1, options.normalizer)
    if not options.hold_beta:
        count = jnp.sum(visible[..., :keys], -1, keepdims=True)  # beta of a row of one key is 1, whatever its sink
        slope = jnp.where(count <= 1, 0, _log_beta_gradients(options, alpha, logits, visible))
        dlogits = dlogits + y * jnp.sum(slope * dlogits, -1, keepdims=True)
    u = jnp.where(visible, beta * y, -jnp.inf)
    weights, dweights = weights_and_tangent(u, beta * dlogits, options.normalizer, alpha, along.get("alpha"))

    out = _weighed(dweights[..., :keys], arrays.value, groups)
    if "value" in along:
        out = out + _weighed(weights[..., :keys], along["value"], groups)
    return out.astype(out_dtype)


def _with_scaled_query(arrays: _Arrays, along: dict[str, jax.Array]) -> tuple[_Arrays, dict[str, jax.Array]]:
    """Without query_scale: as part of the query, where its tangent is one more."""
    if arrays.query_scale is None:
        return arrays, along
    scale, rest = arrays.query_scale[..., None], {**along}
    parts = [rest.pop("query") * scale] if "query" in rest else []
    if "query_scale" in rest:
        parts.append(arrays.query * rest.pop("query_scale")[..., None])
    if parts:
        rest["query"] = sum(parts[1:], parts[0])
    return arrays._replace(query=arrays.query * scale, query_scale=None), rest


def _logits(options: _Options, arrays: _Arrays, along: dict[str, jax.Array],
            groups: int) -> tuple[jax.Array, jax.Array]:
    """The logits of all keys, hidden ones too, and their derivative, (B, N, T, S)."""
    def product(query: jax.Array, key: jax.Array) -> jax.Array:
        return options.scale * jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, groups, 2), precision="highest")

    logits = product(arrays.query, arrays.key)
    dlogits = jnp.zeros_like(logits)
    if "query" in along:
        dlogits = dlogits + product(along["query"], arrays.key)
    if "key" in along:
        dlogits = dlogits + product(arrays.query, along["key"])
    if options.softcap:
        capped = jnp.tanh(logits / options.softcap)
        logits, dlogits = options.softcap * capped, dlogits * (1 - capped**2)
    if arrays.bias is not None:
        logits = logits + arrays.bias
    return logits, dlogits + along["bias"] if "bias" in along else dlogits


def _visible(options: _Options, arrays: _Arrays) -> jax.Array:
    """Which keys a query sees, as far as it doesn't depend on logits: broadcast to (B, N, T, S)."""
    query, key = jnp.arange(arrays.query.shape[1])[:, None], jnp.arange(arrays.key.shape[1])
    visible, position = jnp.ones_like(key, bool), query
    if arrays.query_starts is not None:
        (query_starts,), (key_starts,) = arrays.query_starts, arrays.key_starts
        of_query = jnp.searchsorted(query_starts, query, side="right") - 1
        visible = of_query == jnp.searchsorted(key_starts, key, side="right") - 1
        position = query - query_starts[of_query] + key_starts[of_query]
    if options.causal:
        visible = visible & (key <= position)
    if options.window_left >= 0:
        visible = visible & (key >= position - options.window_left)
    if options.window_right >= 0:
        visible = visible & (key <= position + options.window_right)
    for lengths, index in ((arrays.query_lengths, query), (arrays.key_lengths, key)):
        if lengths is not None:
            visible = visible & (index < lengths[:, None, None, None])
    return visible if arrays.mask is None else visible & arrays.mask


def _with_last(values: jax.Array, last: jax.Array) -> jax.Array:
    return jnp.concatenate([values, jnp.broadcast_to(last, (*values.shape[:3], 1))], -1)


def _log_beta_gradients(options: _Options, alpha: jax.Array | None, logits: jax.Array,
                        visible: jax.Array) -> jax.Array:
    """d ln beta / dx of each row; there is one rule, or one per head."""
    rules = [rule_of(name) for name in options.rules.split(";")]
    if len(rules) == 1:
        return beta_slope(rules[0], options.normalizer, alpha, logits, visible)
    heads = (slice(head, head + 1) for head in range(len(rules)))
    return jnp.concatenate([beta_slope(rule, options.normalizer, alpha, logits[:, head], visible[:, head])
                            for rule, head in zip(rules, heads)], 1)


def _weighed(weights: jax.Array, value: jax.Array, groups: int) -> jax.Array:
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(value, groups, 2), precision="highest")
