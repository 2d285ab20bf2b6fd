"""whet.jax.linear_attention against the formula in jax.numpy, and under JAX's transforms."""

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
import whet
from whet.jax import linear_attention

B, T, S, N, K, H, E = 2, 70, 67, 4, 2, 8, 5


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(dtype=jnp.float32, queries=T, keys=S):
    shapes = (B, queries, N, H), (B, keys, K, H), (B, keys, K, E)
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def formula(q, k, v, is_causal=False, key_value_seq_lengths=None):
    k, v = (jnp.repeat(x, N // K, 2) for x in (k, v))
    a = jnp.einsum("btnh,bsnh->bnts", jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, precision="highest")
    if is_causal:
        a = jnp.tril(a)
    if key_value_seq_lengths is not None:
        a = jnp.where(jnp.arange(k.shape[1]) < key_value_seq_lengths[:, None, None, None], a, 0)
    return jnp.einsum("bnts,bsne->btne", a / a.sum(-1, keepdims=True), v, precision="highest")


def close(a, b, tolerance=5e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


CASES = {"plain": {}, "causal": {"is_causal": True}, "lengths": {"key_value_seq_lengths": jnp.array([3, 66])},
         "both": {"is_causal": True, "key_value_seq_lengths": jnp.array([3, 66])}}


@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives(case):
    arrays, along = qkv(), tuple(normal(*x.shape, seed=9) for x in qkv())
    c = normal(B, T, N, E, seed=5)
    results = []
    for function in (linear_attention, formula):
        def out(*given):
            return function(*given, **CASES[case])

        results.append((out(*arrays), jax.jit(jax.grad(lambda *given: (out(*given) * c).sum(), (0, 1, 2)))(*arrays),
                        jax.jvp(out, arrays, along)[1]))
    for got, expected in zip(*map(jax.tree.leaves, results)):
        close(got, expected, 2e-5)


def test_some_gradients_only():
    q, k, v = qkv()
    together = jax.grad(lambda q, k, v: linear_attention(q, k, v, is_causal=True).sum(), (0, 1, 2))(q, k, v)
    alone = jax.grad(lambda v: linear_attention(q, k, v, is_causal=True).sum())(v)
    np.testing.assert_array_equal(alone, together[2])


def test_is_that_of_numpy():
    q, k, v = qkv()
    expected = whet.linear_attention(*(np.asarray(x).swapaxes(1, 2) for x in (q, k, v)), is_causal=True)
    np.testing.assert_array_equal(linear_attention(q, k, v, is_causal=True), expected.swapaxes(1, 2))
    np.testing.assert_array_equal(linear_attention(q[0], k[0], v[0], is_causal=True), expected[0].swapaxes(0, 1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_element_types(dtype):
    q, k, v = qkv(dtype)
    out = linear_attention(q, k, v)
    assert out.dtype == dtype
    close(out, formula(*(x.astype(jnp.float32) for x in (q, k, v))), 2e-2)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, 0), (None, 2, None)])
def test_vmap(in_axes):
    arrays = [x if axis is None else jnp.stack([x, x + 1], axis) for x, axis in zip(qkv(queries=5, keys=6), in_axes)]

    def gradients(*given):
        return jax.grad(lambda *x: jnp.square(linear_attention(*x, is_causal=True)).sum(), (0, 1, 2))(*given)

    for function in (linear_attention, gradients):
        together = jax.vmap(function, in_axes)(*arrays)
        for i in range(2):
            alone = function(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arrays, in_axes)))
            jax.tree.map(lambda all_, one: close(all_[i], one), together, alone)


@pytest.mark.parametrize("name, wrong", [
    ("query", {"query": "text"}), ("query", {"query": jnp.zeros((B, T, N, H), jnp.int32)}),
    ("key", {"key": jnp.zeros((B, S, K, H + 1))}), ("value", {"value": jnp.zeros((B, S + 1, K, E))}),
    ("key_value_seq_lengths", {"key_value_seq_lengths": jnp.zeros(3, int)}), ("is_causal", {"is_causal": 1})])
def test_errors_name_the_argument(name, wrong):
    query, key, value = qkv()
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        linear_attention(**{"query": query, "key": key, "value": value, **wrong})
