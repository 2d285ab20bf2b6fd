"""whet.jax.attention beside jax.nn.dot_product_attention and the oracle."""

from functools import partial

import numpy as np
import oracle
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
import whet
from whet.jax import attention

B, T, S, N, K, H = 2, 9, 11, 4, 2, 8


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(dtype=jnp.float32, heads=N, keys=S):
    shapes = (B, T, heads, H), (B, keys, K, H), (B, keys, K, H)
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def close(a, b, tolerance=5e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


BIAS = normal(B, N, T, S, seed=3)
MASK = jnp.asarray(np.random.default_rng(4).random((B, N, T, S)) < 0.7).at[..., 0].set(True)
LENGTHS = {"query_seq_lengths": jnp.array([9, 5]), "key_value_seq_lengths": jnp.array([7, 11])}

# What is one keyword of JAX's function, and what are several.
CASES = {
    "plain": {}, "scale": {"scale": 0.7}, "causal": {"is_causal": True},
    "window": {"local_window_size": 3, "is_causal": True},
    "window pair": {"local_window_size": (8, 2)}, "bias": {"bias": BIAS}, "bias of a head": {"bias": BIAS[:1, :1]},
    "bias without batch": {"bias": BIAS[0]}, "bias of keys": {"bias": BIAS[:, :, :1]}, "mask": {"mask": MASK},
    "mask of keys": {"mask": MASK[:, :1, :1]}, "lengths": LENGTHS,
    "key lengths": {"key_value_seq_lengths": jnp.array([3, 100])},
    "query lengths": {"query_seq_lengths": jnp.array([0, 4])},
    "all": {"bias": BIAS, "mask": MASK[:1], "scale": 0.5, "is_causal": True, "local_window_size": (9, 0), **LENGTHS},
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    options = dict(CASES[case])
    bias = options.pop("bias", None)
    arrays = (*qkv(), bias)
    argnums = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    c = normal(B, T, N, H, seed=5)

    def both(function):
        def loss(*arrays):
            out = function(*arrays, **options)
            return (out * c).sum(), out
        return jax.jit(jax.grad(loss, argnums, has_aux=True))(*arrays)

    (ours, out), (theirs, expected) = both(attention), both(jax.nn.dot_product_attention)
    close(out, expected)
    for a, b in zip(ours, theirs):
        assert a.shape == b.shape and a.dtype == b.dtype
        close(a, b, 2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    arrays = qkv(dtype)
    close(attention(*arrays, is_causal=True), jax.nn.dot_product_attention(*arrays, is_causal=True), 2e-2)
    for bias in (BIAS, BIAS.astype(dtype)):
        close(attention(*arrays, bias), jax.nn.dot_product_attention(*arrays, bias), 2e-2)
        gradient = jax.grad(lambda bias: attention(*arrays, bias).astype(jnp.float32).sum())(bias)
        assert gradient.dtype == bias.dtype


def test_double_precision():
    """JAX's own takes the softmax in float32 even then; ours doesn't."""
    with jax.enable_x64(True):
        arrays = qkv(jnp.float64)
        out, stats = attention(*arrays, is_causal=True, rule="paper", return_stats=True)
        assert out.dtype == stats.beta.dtype == jnp.float64
        expected, _ = oracle.attention(*(a.swapaxes(1, 2) for a in arrays), "paper", is_causal=True)
        close(jnp.swapaxes(out, 1, 2), expected, 1e-12)


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_heads_and_no_batch(heads):
    q, k, v = qkv(heads=heads)
    close(attention(q, k, v), jax.nn.dot_product_attention(q, k, v))
    out, stats = attention(q[0], k[0], v[0], return_stats=True)
    close(out, jax.nn.dot_product_attention(q[0], k[0], v[0]))
    assert stats.beta.shape == (T, heads)


@pytest.mark.parametrize("size", [257, 512, 576])
def test_large_heads(size):
    """Above 256, for which the kernels are tuned."""
    q, k, v = (normal(1, n, heads, size, seed=n + heads) for n, heads in ((5, 4), (40, 2), (41, 2)))
    v = v[:, :40]
    close(attention(q, k, v), jax.nn.dot_product_attention(q, k, v), 1e-5)
    ours, theirs = (jax.grad(lambda *arrays, f=f: (f(*arrays, is_causal=True) ** 2).sum(), (0, 1, 2))(q, k, v)
                    for f in (attention, jax.nn.dot_product_attention))
    for found, expected in zip(ours, theirs):
        close(found, expected, 1e-4)


def test_none_is_no_limit():
    arrays = qkv()
    assert jnp.array_equal(attention(*arrays, softcap=None), attention(*arrays))
    assert jnp.array_equal(attention(*arrays, local_window_size=(None, None)), attention(*arrays))
    many = 1 << 20
    for window, limits in (((2, None), (2, many)), ((None, 1), (many, 1))):
        close(attention(*arrays, local_window_size=window), jax.nn.dot_product_attention(*arrays, local_window_size=limits))


def test_residual():
    arrays = qkv()
    (_, residual), (_, expected) = (f(*arrays, is_causal=True, return_residual=True)
                                    for f in (attention, jax.nn.dot_product_attention))
    close(residual, expected)
    _, residual, stats = attention(*arrays, rule="paper", return_residual=True, return_stats=True)
    close(residual, stats.log_sum_exp)


@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.5", ["none", "paper", "fixed:1.5", "log-length:4"]])
def test_rules_agree_with_the_oracle_and_with_numpy(rule):
    q, k, v = qkv()
    sinks = normal(N, seed=6)
    options = dict(rule=rule, softcap=2.0, scale=1.5)
    out, stats = attention(q, k, v, is_causal=True, bias=BIAS, sinks=sinks, return_stats=True, **options)
    first = [np.asarray(a.swapaxes(1, 2)) for a in (q, k, v)]
    sides = dict(is_causal=True, bias=np.asarray(BIAS), sinks=np.asarray(sinks))
    expected, _ = oracle.attention(*first, **sides, **options)
    close(out.swapaxes(1, 2), expected, 3e-5)
    same, numbers = whet.attention(*first, return_stats=True, **sides, **options)
    np.testing.assert_array_equal(out.swapaxes(1, 2), same)
    np.testing.assert_array_equal(stats.beta.swapaxes(1, 2), numbers.beta.astype(np.float32))


@pytest.mark.parametrize("hold_beta", [False, True])
def test_gradients_with_a_rule(hold_beta):
    """Beside the same in JAX, float64, with and without a stop."""
    with jax.enable_x64(True):
        q, k, v = qkv(jnp.float64, heads=K)
        sinks, bias = normal(K, seed=6, dtype=jnp.float64), BIAS[:1, :K].astype(jnp.float64)
        c = normal(B, T, K, H, seed=5, dtype=jnp.float64)

        def plain(q, k, v, bias, sinks):
            x = 3.0 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 / 3.0) + bias
            x = jnp.concatenate([x, jnp.broadcast_to(sinks[:, None, None], (*x.shape[:3], 1))], -1)
            p = jax.nn.softmax(x)
            beta = jnp.maximum(1.0, jnp.polyval(jnp.array(oracle.PAPER), -(p * jnp.log(p)).sum(-1, keepdims=True)))
            beta = jax.lax.stop_gradient(beta) if hold_beta else beta
            return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(beta * x)[..., :-1], v)

        def ours(q, k, v, bias, sinks):
            return attention(q, k, v, bias, sinks=sinks, softcap=3.0, rule="paper", hold_beta=hold_beta)

        arrays = (q, k, v, bias, sinks)
        close(ours(*arrays), plain(*arrays), 1e-12)
        gradients = [jax.jit(jax.grad(lambda *a, f=f: (f(*a) * c).sum(), tuple(range(5)))) for f in (ours, plain)]
        pairs = zip(*(gradient(*arrays) for gradient in gradients))
        for given, expected in pairs:
            close(given, expected, 1e-9)


EACH_ITS_OWN = ["none", "paper", "target-entropy:0.5", "target-peak:0.7"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("rule, size", [("none", 3), ("ssmax:0.4", 3), ("target-peak:0.7", 4), ("paper", 6),
                                        (["none", "fixed:2", "log-length:4", "ssmax:0.4"], 3),
                                        (["none", "target-entropy:0.5", "fixed:2", "none"], 4), (EACH_ITS_OWN, 6)])
def test_what_is_kept_for_backward(rule, size, dtype):
    """Beside the operands a few numbers per row, in the type of the arithmetic: of all heads as many as one needs."""
    with jax.enable_x64(True):
        arrays = qkv(dtype)
        for normalizer, numbers in (("softmax", size), ("hard", 3)):
            _, pull = jax.vjp(partial(attention, rule=rule, normalizer=normalizer), *arrays)
            kept = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull)}
            of_rows = (B, N, T, numbers), jnp.promote_types(dtype, jnp.float32)
            assert kept == {of_rows, *((given.shape, given.dtype) for given in arrays)}


@pytest.mark.parametrize("normalizer", ["softmax", "hard"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5", EACH_ITS_OWN], ids=str)
def test_gradients_are_those_that_keep_nothing(rule, dtype, normalizer):
    """NumPy's function finds everything about a row again: few rows, and many, of which one sees nothing."""
    q, k, v = qkv(dtype)
    sinks, c = normal(N, seed=6), normal(B, T, N, H, seed=5, dtype=dtype)
    mask = MASK.at[:, :, 1].set(False)
    for queries in (3, T):
        options = {"mask": mask[:, :, :queries], "rule": rule, "normalizer": normalizer}
        _, pull = jax.vjp(lambda *a: attention(*a[:3], sinks=a[3], **options), q[:, :queries], k, v, sinks)
        *given, dsinks = pull(c[:, :queries])
        first = [np.asarray(a.swapaxes(1, 2)) for a in (q[:, :queries], k, v, c[:, :queries])]
        sides = {"sinks": np.asarray(sinks), "mask": np.asarray(options.pop("mask"))}
        expected = whet.attention_backward(*first, **sides, **options)
        tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-4
        for ours, theirs in zip(given, (expected.dquery, expected.dkey, expected.dvalue)):
            close(ours.swapaxes(1, 2), theirs, tolerance)
        close(dsinks, expected.dsinks, tolerance)
        assert (given[0][:, 1] == 0).all()


def test_gradients_with_sinks_a_mask_and_a_rule_per_head():
    """Beside differences, along a direction drawn at random."""
    with jax.enable_x64(True):
        given = *qkv(jnp.float64), normal(N, seed=6, dtype=jnp.float64)
        along = [normal(*a.shape, seed=20 + i, dtype=jnp.float64) for i, a in enumerate(given)]
        c, step = normal(B, T, N, H, seed=5, dtype=jnp.float64), 1e-4

        def loss(*a):
            return (attention(*a[:3], sinks=a[3], mask=MASK, rule=EACH_ITS_OWN) * c).sum()

        slope = sum((d * t).sum() for d, t in zip(jax.grad(loss, (0, 1, 2, 3))(*given), along))
        up, down = (loss(*(a + s * t for a, t in zip(given, along))) for s in (step, -step))
        close(slope, (up - down) / (2 * step), 1e-3)


def test_a_learned_scale():
    arrays = qkv()
    ours, theirs = (jax.grad(lambda s, f=f: f(*arrays, scale=s)[..., 0].sum())
                    for f in (attention, jax.nn.dot_product_attention))
    close(ours(jnp.array(0.6)), theirs(jnp.array(0.6)), 5e-5)


def test_gradients_of_what_is_wanted_only():
    """A constant bias costs no gradient of its size."""
    arrays = qkv()
    text = str(jax.make_jaxpr(jax.grad(lambda q: attention(q, *arrays[1:], BIAS).sum()))(arrays[0]))
    assert "dquery" in text and "dkey" not in text and "dbias" not in text


# ---- edges


def test_rows_that_see_nothing():
    """JAX gives the mean of all values; a row without keys has output and gradients 0 here."""
    q, k, v = qkv()
    mask = jnp.ones((B, 1, T, S), bool).at[:, :, 3].set(False)
    out, stats = attention(q, k, v, mask=mask, rule="paper", return_stats=True)
    assert (out[:, 3] == 0).all() and (stats.count[:, 3] == 0).all() and (out[:, 2] != 0).all()
    gradients = jax.grad(lambda *a: attention(*a, mask=mask, rule="paper").sum(), (0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(g).all() for g in gradients) and (gradients[0][:, 3] == 0).all()


def test_not_finite():
    q, k, v = qkv()
    mask = jnp.ones((B, 1, 1, S), bool).at[..., 5].set(False)
    expected = attention(q, k, v, mask=mask)
    dirty = attention(q, k.at[:, 5].set(jnp.nan), v.at[:, 5].set(jnp.inf), mask=mask)
    np.testing.assert_array_equal(dirty, expected)
    bias = jnp.where(mask, 0.0, -jnp.inf)
    close(attention(q, k, v, bias), expected)
    gradients = jax.grad(lambda *a: attention(*a, bias, rule="paper").sum(), (0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert jnp.isnan(attention(q.at[0, 0, 0, 0].set(jnp.nan), k, v)).sum() == H


@pytest.mark.parametrize("queries, keys, batch", [(0, 3, 2), (3, 0, 2), (3, 3, 0), (0, 0, 1)])
def test_zero_sizes(queries, keys, batch):
    q, k = jnp.ones((batch, queries, 2, 4)), jnp.ones((batch, keys, 2, 4))
    bias, sinks = jnp.zeros((1, 1, queries, keys)), jnp.zeros(2)
    out, stats = attention(q, k, k, bias, sinks=sinks, rule="paper", return_stats=True)
    assert out.shape == q.shape and (out == 0).all() and stats.beta.shape == (batch, queries, 2)
    loss = lambda *a: attention(*a[:4], sinks=a[4], rule="paper").sum()
    gradients = jax.grad(loss, (0, 1, 2, 3, 4))(q, k, k, bias, sinks)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape, bias.shape, (2,)]
    assert all((g == 0).all() for g in gradients)


# ---- wrong arguments

Q, KEY = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32)


@pytest.mark.parametrize("kind, name, arguments", [
    (TypeError, "query", {"query": "text"}), (TypeError, "query", {"query": Q.astype(int)}),
    (ValueError, "query", {"query": Q[0, 0]}),
    (ValueError, "query", {"query": Q[:, :, :3]}), (ValueError, "key", {"key": KEY[0]}),
    (ValueError, "key", {"key": KEY[:1]}),
    (ValueError, "key", {"key": KEY[..., :4]}), (TypeError, "key", {"key": KEY.astype(np.float16)}),
    (ValueError, "value", {"value": KEY[:, :4]}),
    (ValueError, "value", {"value": np.zeros((2, 5, 2, 1025), np.float32)}),
    (ValueError, "bias", {"bias": np.zeros((3, 4), np.float32)}), (TypeError, "bias", {"bias": np.zeros((3, 5), bool)}),
    (ValueError, "bias", {"bias": np.zeros((1, 1, 1, 3, 5), np.float32)}),
    (TypeError, "mask", {"mask": np.zeros((3, 5))}),
    (ValueError, "mask", {"mask": np.ones((2, 5), bool)}), (TypeError, "scale", {"scale": "1"}),
    (ValueError, "scale", {"scale": np.inf}), (TypeError, "is_causal", {"is_causal": 1}),
    (TypeError, "query_seq_lengths", {"query_seq_lengths": [1.0, 2.0]}),
    (ValueError, "query_seq_lengths", {"query_seq_lengths": [1]}),
    (ValueError, "key_value_seq_lengths", {"key_value_seq_lengths": [1, 2, 3]}),
    (TypeError, "local_window_size", {"local_window_size": (1, 2, 3)}),
    (ValueError, "local_window_size", {"local_window_size": -1}),
    (ValueError, "implementation", {"implementation": "cudnn"}), (ValueError, "softcap", {"softcap": -1}),
    (ValueError, "softcap", {"softcap": 1e-45}),
    (ValueError, "sinks", {"sinks": np.zeros(3, np.float32)}), (TypeError, "sinks", {"sinks": [1, 2, 3, 4]}),
    (ValueError, "rule", {"rule": ["paper"]}),
    (ValueError, "rule", {"rule": "sharp"}), (TypeError, "rule", {"rule": 1}),
    (TypeError, "return_stats", {"return_stats": None}), (TypeError, "hold_beta", {"hold_beta": 0})])
def test_wrong_arguments(kind, name, arguments):
    with pytest.raises(kind) as caught:
        attention(**{"query": Q, "key": KEY, "value": KEY, **arguments})
    assert str(caught.value).startswith((f"{name}:", f"{name} ")), caught.value
