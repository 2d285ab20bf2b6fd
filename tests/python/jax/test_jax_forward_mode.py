"""Forward mode against reverse mode, and log_softmax, which is built of both."""

from functools import partial

import numpy as np
import oracle
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
import whet
from whet.jax import attention, log_softmax, softmax

STARTS = {"query_starts": jnp.array([0, 2, 5]), "key_starts": jnp.array([0, 1, 6])}
OPTIONS = {
    "plain": {}, "causal": {"is_causal": True}, "capped": {"softcap": 2.0, "local_window_size": (3, 1)},
    "lengths": {"query_seq_lengths": jnp.array([5, 3]), "key_value_seq_lengths": jnp.array([4, 6])},
    "heads": {"rule": ["paper", "target-peak:0.7"]}, "held": {"hold_beta": True}, "scale": {"scale": 0.7},
    "mask": {"mask": jnp.asarray(np.random.default_rng(1).random((5, 6)) < 0.8)},
    "no key, one key": {"mask": jnp.arange(6) < jnp.arange(5)[:, None], "sinks": jnp.array([0.3, -0.2])},
    "hard": {"normalizer": "hard"},
    "packed": STARTS, "packed causal": {**STARTS, "is_causal": True, "local_window_size": (2, None)},
}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def check_against_reverse_mode(function, *given, tolerance=2e-4):
    """<u, J t> from either side, for t and u drawn at random."""
    along = tuple(normal(*x.shape, seed=10 + i) for i, x in enumerate(given))
    out, tangent = jax.jvp(function, given, along)
    np.testing.assert_allclose(out, function(*given), rtol=1e-6, atol=1e-6)
    u = normal(*out.shape, seed=20)
    _, pull = jax.vjp(function, *given)
    expected = sum(float((gradient * t).sum()) for gradient, t in zip(pull(u), along))
    np.testing.assert_allclose(float((tangent * u).sum()), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_rows(function, rule):
    where = jnp.array([True, True, False, True, True, True])
    # Logarithms that are searched for differ in what the search leaves: 1e-6 of a target.
    check = partial(check_against_reverse_mode, tolerance=2e-3 if rule.startswith("target") else 2e-4)
    check(partial(function, axis=0, rule=rule), normal(6, 3))
    check(lambda x: jnp.where(where, function(x, where=where, rule=rule), 0), normal(2, 6))
    check(partial(function, axis=(0, 2), rule=rule, hold_beta=True), normal(2, 3, 4))


@pytest.mark.parametrize("rule", ["none", "paper", "ssmax:0.7"])
def test_attention(rule):
    check_against_reverse_mode(
        lambda q, k, v, bias, sinks: attention(q, k, v, bias, rule=rule, sinks=sinks), normal(2, 5, 4, 8),
        normal(2, 6, 2, 8, seed=1), normal(2, 6, 2, 3, seed=2), normal(1, 4, 5, 6, seed=3), normal(4, seed=4))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    batch = 1 if "query_starts" in options else 2
    given = normal(batch, 5, 2, 8), normal(batch, 6, 2, 8, seed=1), normal(batch, 6, 2, 3, seed=2)
    function = lambda q, k, v: attention(q, k, v, **{"rule": "paper", **options})
    check_against_reverse_mode(function, *given, tolerance=1e-3)
    check_against_reverse_mode(lambda k: function(given[0], k, given[2]), given[1], tolerance=1e-3)


def test_jacfwd_under_jit_and_vmap():
    x = normal(3, 6)
    for function in (softmax, log_softmax):
        row = partial(function, rule="paper")
        forward, reverse = (jax.jit(jax.vmap(jacobian(row)))(x) for jacobian in (jax.jacfwd, jax.jacrev))
        np.testing.assert_allclose(forward, reverse, atol=2e-5)
    q = normal(3, 1, 2, 1, 4)
    heads = lambda q: attention(q, q, q, rule="paper", is_causal=True)
    forward, reverse = (jax.jit(jax.vmap(jacobian(heads)))(q) for jacobian in (jax.jacfwd, jax.jacrev))
    np.testing.assert_allclose(forward, reverse, atol=2e-5)


def test_linearize_and_16_bits():
    x = normal(2, 50).astype(jnp.bfloat16)
    _, linear = jax.linearize(partial(softmax, rule="paper"), x)
    assert linear(jnp.ones_like(x)).dtype == jnp.bfloat16 and jnp.isfinite(linear(x)).all()
    q = normal(1, 3, 2, 8).astype(jnp.float16)
    _, tangent = jax.jvp(lambda q: attention(q, q, q, rule="paper"), (q,), (q,))
    assert tangent.dtype == jnp.float16 and jnp.isfinite(tangent).all()
    wide = jnp.asarray(q, jnp.float32)
    _, expected = jax.jvp(lambda q: attention(q, q, q, rule="paper"), (wide,), (wide,))
    np.testing.assert_allclose(np.asarray(tangent, np.float32), expected, rtol=5e-3, atol=5e-3)


# ---- log_softmax


@pytest.mark.parametrize("rule", oracle.RULES)
def test_log_softmax(rule):
    x = normal(3, 4, 7).at[0, 0, 2].set(-jnp.inf)
    where = jnp.arange(7) != 3
    logs, stats = log_softmax(x, rule=rule, where=where, return_stats=True)
    expected = whet.log_softmax(np.asarray(x), rule=rule, where=np.asarray(where))
    np.testing.assert_allclose(logs, expected, rtol=1e-4, atol=2e-5)
    assert stats.beta.shape == (3, 4)
    np.testing.assert_allclose(log_softmax(x, axis=None), jax.nn.log_softmax(x, axis=None), rtol=1e-5, atol=1e-5)


def test_logarithms_of_rows_that_see_nothing():
    x = jnp.full((2, 3), -jnp.inf)
    assert (log_softmax(x, rule="paper") == -jnp.inf).all()
    gradient = jax.grad(lambda x: jnp.where(jnp.isinf(x), 0, log_softmax(x, rule="paper")).sum())(x)
    assert (gradient == 0).all()
    assert log_softmax(jnp.float32([0, -300]), rule="fixed:3")[1] == -900


def test_gradient_of_log_softmax():
    x, dout = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    for options in ({}, {"hold_beta": True}):
        found = jax.grad(lambda x: (log_softmax(x, rule="paper", **options) * dout).sum())(x)
        expected = whet.log_softmax_backward(x, dout, rule="paper", **options)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# ---- packed sequences, scales of queries, optional outputs


def arrays(*shape):
    return [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(3)]


def test_packed_sequences_and_query_scale():
    q, k, v = arrays(1, 5, 2, 8)
    scale = np.random.default_rng(5).random((1, 5, 2)).astype(np.float32)
    options = {"query_starts": [0, 2, 5], "key_starts": [0, 1, 5], "rule": "paper", "is_causal": True}
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    expected = whet.attention(*heads_first, query_scale=scale.swapaxes(1, 2), **options).swapaxes(1, 2)
    np.testing.assert_allclose(attention(q, k, v, query_scale=scale, **options), expected, atol=2e-6)
    many = jax.vmap(lambda q: attention(q, k, v, query_scale=scale, **options))(jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(many[0], expected, atol=2e-6)
    with pytest.raises(ValueError, match="^query_scale: its shape"):
        attention(q, k, v, query_scale=np.ones((1, 5, 3)))
    with pytest.raises(TypeError, match="^query_starts: its dtype"):
        attention(q, k, v, query_starts=[0.0, 5.0], key_starts=[0, 5])


@pytest.mark.parametrize("shape", [(2, 5, 4), (5, 1), (4,), ()])
def test_gradient_of_query_scale(shape):
    q, k, v, s = normal(2, 5, 4, 8), normal(2, 6, 2, 8, seed=1), normal(2, 6, 2, 3, seed=2), normal(*shape, seed=3)
    function = lambda q, k, v, s: attention(q, k, v, rule="paper", is_causal=True, softcap=3.0, query_scale=s)
    check_against_reverse_mode(function, q, k, v, s)
    check_against_reverse_mode(lambda s: function(q, k, v, s), s)
    check_against_reverse_mode(lambda v: function(q, k, v, s), v)
    product = lambda q, k, v, s: attention(q * jnp.broadcast_to(s, (2, 5, 4))[..., None], k, v, rule="paper",
                                           is_causal=True, softcap=3.0)
    for scale in (s, jnp.zeros_like(s)):
        found, expected = (jax.jit(jax.grad(lambda *a: (of(*a) ** 2).sum(), (0, 3)))(q, k, v, scale)
                           for of in (function, product))
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_gradient_of_query_scale_under_vmap(in_axes):
    q, s = (normal(*((3, *own) if axis == 0 else own)) for own, axis in zip([(2, 5, 4, 8), (5, 4)], in_axes))
    k = normal(2, 6, 2, 8, seed=1)
    gradients = jax.grad(lambda q, s: (attention(q, k, k, rule="paper", query_scale=s) ** 2).sum(), (0, 1))
    found = jax.vmap(gradients, in_axes)(q, s)
    for i in range(3):
        expected = gradients(*(x if axis is None else x[i] for x, axis in zip((q, s), in_axes)))
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours[i], theirs, rtol=1e-5, atol=1e-6)


def test_gradient_of_query_scale_against_differences():
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        q, k, s = (jnp.asarray(rng.normal(size=shape)) for shape in ((1, 5, 2, 4), (1, 6, 2, 4), (1, 5, 2)))
        loss = lambda s: (attention(q, k, k, rule="paper", is_causal=True, query_scale=s, query_starts=[0, 2, 5],
                                    key_starts=[0, 3, 6]) ** 2).sum()
        gradient, step = jax.grad(loss)(s), 1e-5 * rng.normal(size=s.shape)
        np.testing.assert_allclose((gradient * step).sum(), (loss(s + step) - loss(s - step)) / 2, rtol=1e-6)


def test_gradient_of_query_scale_in_16_bits():
    q, s = normal(1, 5, 2, 8).astype(jnp.bfloat16), normal(1, 5, 2, seed=3)
    loss = lambda q, s: attention(q, q, q, rule="paper", query_scale=s).astype(jnp.float32).sum()
    for dtype in (jnp.bfloat16, jnp.float32):
        found = jax.grad(loss, 1)(q, s.astype(dtype))
        expected = jax.grad(loss, 1)(q.astype(jnp.float32), s.astype(dtype).astype(jnp.float32))
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2e-2, atol=2e-2)


def test_optional_outputs():
    q, k, v = arrays(2, 5, 2, 8)
    out, stats, extras = attention(q, k, v, rule="paper", is_causal=True, return_stats=True, top_k=2, column_sums=True)
    assert stats.beta.shape == (2, 5, 2)
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    _, expected = whet.attention(*heads_first, rule="paper", is_causal=True, top_k=2, column_sums=True)
    for name in ("top_keys", "top_weights", "column_sums"):
        np.testing.assert_allclose(getattr(extras, name), getattr(expected, name).swapaxes(1, 2), atol=1e-6)
    assert extras.top_keys.shape == (2, 5, 2, 2) and extras.column_sums.shape == (2, 5, 2)
    np.testing.assert_array_equal(out, attention(q, k, v, rule="paper", is_causal=True))
    gradient = jax.grad(lambda q: attention(q, k, v, top_k=1, column_sums=True)[0].sum())(q)
    np.testing.assert_array_equal(gradient, jax.grad(lambda q: attention(q, k, v).sum())(q))
    many = jax.vmap(lambda q: attention(q, k, v, top_k=2)[1].top_keys)(jnp.stack([q, q]))
    assert many.shape == (2, 2, 5, 2, 2)


def test_normalizers_go_by_name():
    x, (q, k, v) = normal(2, 5), arrays(1, 5, 2, 8)
    np.testing.assert_array_equal(softmax(x, normalizer="softmax"), softmax(x))
    hard = jax.jit(partial(softmax, normalizer="hard"))
    np.testing.assert_array_equal(hard(x), jax.nn.one_hot(x.argmax(-1), 5))
    assert (jax.grad(lambda x: hard(x)[:, 0].sum())(x) == 0).all() and (jax.jvp(hard, (x,), (x,))[1] == 0).all()
    dq, dv = jax.grad(lambda q, v: attention(q, k, v, normalizer="hard").sum(), (0, 1))(q, v)
    assert (dq == 0).all() and dv.sum() == dv.size
    with pytest.raises(ValueError, match="^normalizer.*softmax"):
        softmax(x, normalizer="softest")
    with pytest.raises(ValueError, match="^normalizer.*softmax"):
        attention(q, k, v, normalizer="softest")
