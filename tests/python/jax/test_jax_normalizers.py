"""Normalizers in JAX: gradients in both modes, jit and vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whet
from jax.test_util import check_grads
from whet.jax import attention, softmax

SMOOTH = ["sparsemax", "entmax15", "entmax:1.3", "top-k:3", "sigmoid", "relu", "softpick"]


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("rule", ["none", "paper"])
@pytest.mark.parametrize("name", SMOOTH)
def test_rows(x64, rng, name, rule):
    x = jnp.asarray(rng.normal(size=(4, 7)))
    function = jax.jit(lambda x: softmax(x, normalizer=name, rule=rule))
    np.testing.assert_allclose(function(x), whet.softmax(np.asarray(x), normalizer=name, rule=rule), atol=1e-12)
    np.testing.assert_allclose(jax.vmap(function)(x), function(x), atol=1e-12)
    check_grads(function, (x,), 1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SMOOTH)
def test_attention(x64, rng, name):
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 4))) for n in (3, 5, 5))
    check_grads(lambda q, k, v: attention(q, k, v, is_causal=True, normalizer=name), (q, k, v), 1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "entmax:1.3", "top-k:3", "relu"])
def test_stats(x64, rng, name):
    x = jnp.asarray(rng.normal(size=(4, 7)))
    weights, stats = jax.jit(lambda x: softmax(x, normalizer=name, return_stats=True))(x)
    _, expected = whet.softmax(np.asarray(x), normalizer=name, return_stats=True)
    np.testing.assert_array_equal(stats.support, (weights > 0).sum(-1))
    np.testing.assert_array_equal(stats.threshold, expected.threshold)
