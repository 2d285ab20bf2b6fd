"""The function as published, beside ours: 10,000 random rows."""

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
from whet.jax import softmax

# Keys and rows: most rows are small, as masks and lengths make them smaller still.
SIZES = {1: 200, 2: 400, 3: 600, 7: 1500, 16: 2500, 33: 1500, 100: 1500, 382: 900, 1000: 600, 4096: 250, 20000: 40,
         131072: 10}


def published(x):
    """The polynomial in the entropy, whose logarithm is guarded by 1e-9, wherever that is above 0.5."""
    p = jax.nn.softmax(x)
    entropy = -jnp.sum(p * jnp.log(p + 1e-9), axis=-1, keepdims=True)
    polynomial = jnp.polyval(jnp.array([-0.037, 0.481, -2.3, 4.917, -1.791]), entropy)
    beta = jnp.where(entropy > 0.5, jnp.maximum(polynomial, 1.0), 1.0)
    return jax.nn.softmax(beta * x), beta


@pytest.mark.parametrize("keys", SIZES)
def test_the_published_function(keys):
    """Evaluated in float64: in float32 its product beta x alone is wrong by 1e-3 at an offset of 1e4.

    The guard lowers the entropy, each key's part of it by p ln(1 + 1e-9 / p) <= 1e-9; ours is within
    1e-6 max(1, ln n). No slope of the polynomial where it is above 1 is steeper than 3, and a beta that is off by d
    moves the weight of a key at y = x - max by the factor exp(d (y - mean of y)).
    """
    rows = SIZES[keys]
    rng = np.random.default_rng(keys)
    spread, offset = 10 ** rng.uniform(-2, 1.3, (rows, 1)), rng.uniform(-1e4, 1e4, (rows, 1))
    x = (spread * rng.normal(size=(rows, keys)) + np.where(rng.random((rows, 1)) < 0.5, offset, 0)).astype(np.float32)
    where = (np.arange(keys) < rng.integers(1, keys + 1, (rows, 1))) | (rng.random((rows, 1)) < 0.5)
    where &= (rng.random((rows, keys)) < 0.8) | (rng.random((rows, 1)) < 0.5)
    where[:, 0] |= ~where.any(1)

    ours, stats = softmax(x, where=where, rule="paper", return_stats=True)
    with jax.enable_x64(True):
        weights, beta = map(np.asarray, jax.jit(published)(jnp.where(where, x.astype(np.float64), -jnp.inf)))

    count = where.sum(1, keepdims=True)
    allowed = 2.0**-22 * beta + 3 * (1e-9 * count + 1e-6 * np.maximum(1, np.log(count)))
    assert np.all(np.abs(np.asarray(stats.beta)[:, None] - beta) <= allowed)
    y = np.where(where, x.astype(np.float64), np.nan)
    y = np.where(where, y - np.nanmax(y, 1, keepdims=True), 0.0)
    mean = (weights * y).sum(1, keepdims=True)
    relative = 1e-6 * (1 + np.abs(beta * y)) + np.expm1(allowed * (np.abs(y) + np.abs(mean)))
    assert np.all(np.abs(np.asarray(ours, np.float64) - weights) <= relative * weights + 1e-30)
    assert np.all(np.asarray(ours)[~where] == 0)


def test_ten_thousand_rows():
    assert sum(SIZES.values()) == 10_000
