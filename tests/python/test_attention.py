"""whet.attention against the oracle."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import whet


def inputs(rng, batch=2, heads=4, key_heads=2, queries=5, keys=9, size=8, value_size=6, dtype=np.float64):
    return tuple((2 * rng.normal(size=shape)).astype(dtype) for shape in (
        (batch, heads, queries, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)))


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("causal", [False, True])
def test_rules_with_grouped_heads(rng, rule, causal):
    q, k, v = inputs(rng)
    expected, _ = oracle.attention(q, k, v, rule, is_causal=causal)
    np.testing.assert_allclose(whet.attention(q, k, v, rule=rule, is_causal=causal), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_element_types(rng, dtype):
    q, k, v = inputs(rng, dtype=dtype)
    out = whet.attention(q, k, v, rule="paper")
    expected, _ = oracle.attention(*(a.astype(np.float64) for a in (q, k, v)), "paper")
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-5 if dtype == np.float32 else 3e-2)


@pytest.mark.parametrize("queries", [1, 9])
def test_large_heads(rng, queries):
    q, k, v = inputs(rng, queries=queries, size=576, value_size=512)
    expected, _ = oracle.attention(q, k, v, "paper")
    np.testing.assert_allclose(whet.attention(q, k, v, rule="paper"), expected, atol=1e-10)


@pytest.mark.parametrize("options", [
    {"is_causal": True, "align": "end"}, {"window": (2, 1)}, {"window": (3, -1), "is_causal": True, "align": "end"},
    {"scale": 0.7}, {"softcap": 3.0}, {"lengths": [9, 4]}, {"lengths": [0, 9], "is_causal": True, "align": "end"},
    {"rule": ["paper", "none", "fixed:2", "ssmax:0.5"]}])
def test_options(rng, options):
    q, k, v = inputs(rng)
    expected, _ = oracle.attention(q, k, v, **options)
    np.testing.assert_allclose(whet.attention(q, k, v, **options), expected, atol=1e-12)


def test_none_is_no_limit(rng):
    q, k, v = inputs(rng)
    np.testing.assert_array_equal(whet.attention(q, k, v, softcap=None), whet.attention(q, k, v))
    for window in [(2, None), (None, 1), (None, None)]:
        limits = tuple(-1 if side is None else side for side in window)
        np.testing.assert_array_equal(whet.attention(q, k, v, window=window), whet.attention(q, k, v, window=limits))


def test_scale_as_an_array(rng):
    q, k, v = inputs(rng)
    np.testing.assert_array_equal(whet.attention(q, k, v, scale=np.array(0.5)), whet.attention(q, k, v, scale=0.5))


def test_a_window_of_one_number_has_two_sides(rng):
    q, k, v = inputs(rng)
    np.testing.assert_array_equal(whet.attention(q, k, v, window=2), whet.attention(q, k, v, window=(2, 2)))


@pytest.mark.parametrize("shape", [(2, 4, 5, 9), (1, 4, 1, 9), (5, 9), (9,)])
def test_mask_and_bias_broadcast(rng, shape):
    q, k, v = inputs(rng)
    mask, bias = rng.random(shape) < 0.7, rng.normal(size=shape)
    expected, _ = oracle.attention(q, k, v, "paper", mask=mask, bias=bias)
    np.testing.assert_allclose(whet.attention(q, k, v, rule="paper", mask=mask, bias=bias), expected, atol=1e-10)


def test_sinks_and_query_scale(rng):
    q, k, v = inputs(rng)
    sinks, query_scale = rng.normal(size=4), 1 + rng.random(size=(2, 4, 5))
    expected, _ = oracle.attention(q, k, v, sinks=sinks, query_scale=query_scale)
    np.testing.assert_allclose(whet.attention(q, k, v, sinks=sinks, query_scale=query_scale), expected, atol=1e-12)
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    np.testing.assert_allclose(whet.attention(q, k, v, sinks=list(sinks), query_scale=query_scale.tolist()),
                               expected, atol=1e-5)


def test_packed_sequences(rng):
    q, k, v = inputs(rng, batch=1)
    out = whet.attention(q, k, v, query_starts=[0, 2, 5], key_starts=[0, 4, 9], rule="paper")
    for queries, keys in [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 9))]:
        expected, _ = oracle.attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], "paper")
        np.testing.assert_allclose(out[:, :, queries], expected, atol=1e-10)


def test_fewer_axes(rng):
    q, k, v = inputs(rng, batch=1)
    whole, stats = whet.attention(q, k, v, rule="paper", is_causal=True, return_stats=True)
    three, stats3 = whet.attention(q[0], k[0], v[0], rule="paper", is_causal=True, return_stats=True)
    np.testing.assert_array_equal(three, whole[0])
    np.testing.assert_array_equal(stats3.beta, stats.beta[0])
    one = whet.attention(q[:, :1], k[:, :1], v[:, :1])
    np.testing.assert_array_equal(whet.attention(q[0, 0], k[0, 0], v[0, 0]), one[0, 0])


def test_optional_outputs(rng):
    q, k, v = inputs(rng)
    _, weights = oracle.attention(q, k, v, "paper", is_causal=True)
    rows = [(0, 0, 0), (1, 3, 4), (1, 2, 2)]
    out, stats, extras = whet.attention(q, k, v, rule="paper", is_causal=True, return_stats=True, weight_rows=rows,
                                        top_k=2, column_sums=True, tile_counts=True)
    np.testing.assert_array_equal(out, whet.attention(q, k, v, rule="paper", is_causal=True))
    np.testing.assert_allclose(extras.weights, [weights[row] for row in rows], atol=1e-10)
    np.testing.assert_allclose(extras.column_sums, weights.sum(2), atol=1e-10)
    np.testing.assert_array_equal(extras.top_keys[..., 0], weights.argmax(-1))
    np.testing.assert_array_equal(extras.top_keys[:, :, 0, 1], -1)
    np.testing.assert_allclose(extras.top_weights[..., 0], weights.max(-1), atol=1e-6)
    np.testing.assert_allclose(stats.sharp_peak, weights.max(-1), atol=1e-10)
    assert stats.count.shape == (2, 4, 5) and extras.tile_counts.tiles > 0

    out, extras = whet.attention(q, k, v, top_k=1)
    assert extras.weights is None and extras.top_keys.shape == (2, 4, 5, 1)


def test_layouts_without_copies(rng):
    """(B, N, H, D) in memory, keys reversed, and a part of larger arrays: the same bits as contiguous."""
    q, k, v = inputs(rng, dtype=np.float32)
    expected = whet.attention(q, k, v, rule="paper")
    q = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    k = np.ascontiguousarray(k[:, :, ::-1])[:, :, ::-1]
    v = np.pad(v, ((0, 0), (0, 0), (0, 0), (2, 3)))[..., 2:-3]
    out = np.empty((2, 5, 4, 6), np.float32)
    result = whet.attention(q, k, v, rule="paper", out=out.swapaxes(1, 2))
    assert np.shares_memory(result, out)
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)


@pytest.mark.parametrize("rule", ["none", "paper", "ssmax:0.7"])
def test_backward(rng, rule):
    """Against differences of the oracle, in directions drawn at random."""
    q, k, v = inputs(rng, batch=1, heads=2, key_heads=1, queries=3, keys=5)
    bias, sinks, dout = rng.normal(size=(3, 5)), rng.normal(size=2), rng.normal(size=(1, 2, 3, 6))
    query_scale = rng.normal(size=(2, 1))
    given = [q, k, v, bias, sinks, query_scale]

    def loss(q, k, v, bias, sinks, query_scale):
        return (oracle.attention(q, k, v, rule, bias=bias, sinks=sinks, query_scale=query_scale, is_causal=True)[0]
                * dout).sum()

    given_too = {"rule": rule, "bias": bias, "sinks": sinks, "query_scale": query_scale, "is_causal": True}
    for saved in (None, whet.attention(q, k, v, return_saved=True, **given_too)[1]):
        gradients = whet.attention_backward(q, k, v, dout, saved=saved, **given_too)
        assert gradients.dparameter is None
        for i, gradient in enumerate(gradients[:6]):
            assert gradient.shape == given[i].shape
            step = 1e-6 * rng.normal(size=given[i].shape)
            below, above = ([a - s * step if j == i else a for j, a in enumerate(given)] for s in (1, -1))
            assert (gradient * step).sum() == pytest.approx((loss(*above) - loss(*below)) / 2, rel=1e-4, abs=1e-12)


def test_backward_without_bias_and_sinks(rng):
    q, k, v = inputs(rng)
    gradients = whet.attention_backward(q, k, v, np.ones((2, 4, 5, 6)), rule="paper", hold_beta=True)
    assert gradients.dbias is None and gradients.dsinks is None and gradients.dquery_scale is None
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("shape", [(2, 4, 5), (4, 1), (5,), ()])
def test_gradient_of_a_query_scale_of_zero(rng, shape):
    q, k, v = inputs(rng)
    dout, scale, step = rng.normal(size=(2, 4, 5, 6)), np.zeros(shape), rng.normal(size=shape)
    gradient = whet.attention_backward(q, k, v, dout, rule="paper", query_scale=scale).dquery_scale
    above, below = (whet.attention(q, k, v, rule="paper", query_scale=scale + s * step) for s in (1e-5, -1e-5))
    assert gradient.shape == shape
    assert (gradient * step).sum() == pytest.approx(((above - below) * dout).sum() / 2e-5, rel=1e-6)
    # A list has no dtype of its own, and 16 bits may have a scale in 32.
    narrow = [a.astype(np.float16) for a in (q, k, v, dout)]
    found = whet.attention_backward(*narrow, rule="paper", query_scale=scale.tolist()).dquery_scale
    assert found.dtype == np.float32 and found.shape == shape
    np.testing.assert_allclose(found, gradient, atol=2e-2 * np.abs(gradient).max())


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"keys": 0}])
def test_zero_sizes(rng, sizes):
    q, k, v = inputs(rng, **sizes)
    out, stats = whet.attention(q, k, v, rule="paper", return_stats=True)
    assert out.shape == (*q.shape[:3], 6) and np.all(out == 0) and stats.beta.shape == q.shape[:3]


def test_rows_that_see_nothing_give_zero(rng):
    q, k, v = inputs(rng)
    k[:, :, 3:], v[:, :, 3:] = np.nan, np.inf
    out = whet.attention(q, k, v, mask=np.arange(9) < 3, rule="paper")
    assert np.all(np.isfinite(out))
    assert np.all(whet.attention(q, k, v, mask=False) == 0)
