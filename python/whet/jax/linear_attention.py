"""Linear attention: time linear in the number of queries and keys, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from whet._arguments import flag
from whet.jax._ffi import array, call, varying_alike
from whet.jax._linear import linear_call
from whet.jax.attention import check_heads, four_axes, lengths_of


def linear_attention(query: Any, key: Any, value: Any, *, is_causal: bool = False,
                     key_value_seq_lengths: Any = None) -> jax.Array:
    """Linear attention as of Katharopoulos et al. 2020, "Transformers are RNNs": with phi(x) = elu(x) + 1, element by
    element, and a_ij = phi(query_i) . phi(key_j), the output of query i is the sum of a_ij value_j over the sum of a_ij.

    B batch, T queries, S keys, N query heads, K key heads (N a multiple of K), H and E the sizes of a key and of a
    value (1 to 1024). As in the paper there is no scale: 1 / sqrt(H) isn't applied.

    Args:
        query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, E), or all three without B; one dtype: float32,
            float64, bfloat16 or float16.
        is_causal: query i sees keys 0 to i.
        key_value_seq_lengths: (B) integers: keys from there on are hidden.

    Returns:
        The output, (B, T, N, E). A query that sees no key gives 0.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> from whet.jax import linear_attention
    >>> q = k = jnp.zeros((3, 1, 4))
    >>> linear_attention(q, k, jnp.arange(3.0).reshape(3, 1, 1), is_causal=True).ravel()
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    query, key, value = array(query, "query"), array(key, "key"), array(value, "value")
    batched = query.ndim == 4
    query, key, value = four_axes(query=query, key=key, value=value)
    check_heads(query, key, value)
    lengths = lengths_of(key_value_seq_lengths, query.shape[0], "key_value_seq_lengths")
    out = _jitted(flag(is_causal, "is_causal"), _Arrays(query, key, value, lengths))
    return out if batched else out[0]


class _Arrays(NamedTuple):
    """Operands by the names that the extension has for them."""

    query: Any
    key: Any
    value: Any
    key_lengths: Any  # or None


@partial(jax.jit, static_argnums=0)
def _jitted(causal: bool, arrays: _Arrays) -> jax.Array:
    return _linear_attention(causal, _Arrays(*varying_alike(*arrays)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _linear_attention(causal: bool, arrays: _Arrays) -> jax.Array:
    batch, queries, heads, _ = arrays.query.shape
    shape = batch, queries, heads, arrays.value.shape[-1]
    return call("whet_linear_attention", arrays._asdict(), {"out": (shape, arrays.query.dtype)}, causal=causal)["out"]


# Gradients that nobody wants cost work: symbolic zeros tell.
@partial(_linear_attention.defjvp, symbolic_zeros=True)
def _jvp(causal: bool, primals: Any, tangents: Any) -> Any:
    (arrays,), (along,) = primals, tangents
    perturbed = {name: tangent for name, tangent in along._asdict().items()
                 if name != "key_lengths" and not isinstance(tangent, SymbolicZero)}
    out = _linear_attention(causal, arrays)
    if not perturbed:
        return out, jnp.zeros_like(out)
    return out, linear_call(partial(_tangent, causal), partial(_gradients, causal, tuple(perturbed)), arrays, perturbed)


def _gradients(causal: bool, names: tuple[str, ...], arrays: _Arrays, dout: jax.Array) -> dict[str, jax.Array]:
    shapes = {f"d{name}": (getattr(arrays, name).shape, getattr(arrays, name).dtype) for name in names}
    results = call("whet_linear_attention_backward", {**arrays._asdict(), "dout": dout}, shapes, causal=causal)
    return {name: results[f"d{name}"] for name in names}


def _tangent(causal: bool, arrays: _Arrays, along: dict[str, jax.Array]) -> jax.Array:
    """The derivative of the output along tangents of some operands. Unlike everything else here it stores weights: a
    matrix of queries by keys for each head."""
    dtype = arrays.query.dtype
    query, key, value = (given.astype(jnp.promote_types(dtype, jnp.float32)) for given in arrays[:3])
    groups = query.shape[2] // max(key.shape[2], 1)
    (phi_q, dphi_q), (phi_k, dphi_k) = (_features(given, along.get(name)) for name, given
                                        in (("query", query), ("key", key)))

    def products(q: jax.Array, k: jax.Array) -> jax.Array:
        of_all = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, groups, 2), precision="highest")
        return jnp.where(_visible(causal, arrays), of_all, 0)

    def weighed(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum("bnts,bsne->btne", weights, jnp.repeat(values, groups, 2), precision="highest")

    a, da = products(phi_q, phi_k), products(dphi_q, phi_k) + products(phi_q, dphi_k)
    sums = a.sum(-1, keepdims=True)
    inverse = jnp.where(sums == 0, 0, 1 / jnp.where(sums == 0, 1, sums))
    weights = a * inverse
    out = weighed((da - weights * da.sum(-1, keepdims=True)) * inverse, value)
    if "value" in along:
        out = out + weighed(weights, along["value"].astype(value.dtype))
    return out.astype(dtype)


def _features(x: jax.Array, along: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """phi(x) and its derivative along a tangent."""
    small = jnp.exp(jnp.minimum(x, 0))
    phi = jnp.where(x > 0, x + 1, small)
    return phi, jnp.zeros_like(x) if along is None else small * along.astype(x.dtype)


def _visible(causal: bool, arrays: _Arrays) -> jax.Array:
    """Broadcast to (B, N, T, S)."""
    query, key = jnp.arange(arrays.query.shape[1])[:, None], jnp.arange(arrays.key.shape[1])
    visible = key <= query if causal else jnp.ones_like(key, bool)
    return visible if arrays.key_lengths is None else visible & (key < arrays.key_lengths[:, None, None, None])
