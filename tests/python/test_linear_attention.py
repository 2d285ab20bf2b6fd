"""whet.linear_attention against the quadratic formula in NumPy."""

import ml_dtypes
import numpy as np
import pytest
import whet


def inputs(rng, batch=2, heads=4, key_heads=2, queries=70, keys=70, size=8, value_size=6, dtype=np.float64):
    return tuple(rng.normal(size=shape).astype(dtype) for shape in (
        (batch, heads, queries, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)))


def formula(q, k, v, is_causal=False, lengths=None):
    """All weights at once."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    phi_q, phi_k = (np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (q, k))
    a = phi_q @ phi_k.swapaxes(-1, -2)
    visible = np.ones(a.shape[-2:], bool)
    if is_causal:
        visible = np.tril(visible)
    if lengths is not None:
        visible = visible & (np.arange(k.shape[2]) < np.reshape(lengths, (-1, 1, 1, 1)))
    a = np.where(visible, a, 0)
    sums = a.sum(-1, keepdims=True)
    return np.divide(a, sums, out=np.zeros_like(a), where=sums > 0) @ v


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"lengths": [0, 66]},
                                     {"is_causal": True, "lengths": [1, 70]}])
def test_against_the_formula(rng, options):
    q, k, v = inputs(rng)
    np.testing.assert_allclose(whet.linear_attention(q, k, v, **options), formula(q, k, v, **options), atol=1e-13)


@pytest.mark.parametrize("queries, keys", [(1, 100), (100, 1), (65, 130), (130, 65), (3, 0), (0, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sizes(rng, queries, keys, is_causal):
    q, k, v = inputs(rng, queries=queries, keys=keys)
    np.testing.assert_allclose(whet.linear_attention(q, k, v, is_causal=is_causal), formula(q, k, v, is_causal),
                               atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_element_types(rng, dtype):
    q, k, v = inputs(rng, dtype=dtype)
    out = whet.linear_attention(q, k, v, is_causal=True)
    assert out.dtype == dtype
    expected = formula(*(a.astype(np.float64) for a in (q, k, v)), is_causal=True)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-6 if dtype == np.float32 else 2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_finite_differences(rng, is_causal):
    given = [a.copy() for a in inputs(rng, batch=2, heads=2, key_heads=1, queries=66, keys=65, size=3, value_size=2)]
    options = {"is_causal": is_causal, "lengths": [65, 64]}
    dout = rng.normal(size=(2, 2, 66, 2))
    gradients = whet.linear_attention_backward(*given, dout, **options)
    for array, gradient in zip(given, gradients):
        assert gradient.shape == array.shape
        for index in rng.integers(0, array.size, 20):
            at, value, sums = np.unravel_index(index, array.shape), array.flat[index], []
            for step in (1e-6, -1e-6):
                array[at] = value + step
                sums.append((whet.linear_attention(*given, **options) * dout).sum())
            array[at] = value
            assert gradient[at] == pytest.approx((sums[0] - sums[1]) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("axes", [2, 3])
def test_fewer_axes(rng, axes):
    q, k, v = (a[(0,) * (4 - axes)] for a in inputs(rng, heads=2))
    out = whet.linear_attention(q, k, v)
    assert out.ndim == axes
    four = [a[(None,) * (4 - axes)] for a in (q, k, v)]
    np.testing.assert_array_equal(out.reshape(out.shape), whet.linear_attention(*four).reshape(out.shape))
    gradients = whet.linear_attention_backward(q, k, v, out)
    assert [g.shape for g in gradients] == [a.shape for a in (q, k, v)]


def test_strides_and_out(rng):
    q, k, v = inputs(rng)
    strided = [np.asfortranarray(a)[..., ::-1, ::-1] for a in (q, k, v)]
    out = np.full((70, 2, 4, 6), np.nan).transpose(1, 2, 0, 3)
    assert whet.linear_attention(*strided, is_causal=True, out=out) is out
    np.testing.assert_allclose(out, formula(*strided, is_causal=True), atol=1e-13)


def test_bits_do_not_depend_on_threads(rng):
    q, k, v = inputs(rng, dtype=np.float32)
    for is_causal in (False, True):
        one, two = (whet.linear_attention(q, k, v, is_causal=is_causal, threads=n) for n in (1, 2))
        np.testing.assert_array_equal(one, two)
        for a, b in zip(*(whet.linear_attention_backward(q, k, v, one, is_causal=is_causal, threads=n)
                          for n in (1, 2))):
            np.testing.assert_array_equal(a, b)


def test_nan_stays_behind(rng):
    q, k, v = inputs(rng)
    expected = whet.linear_attention(q, k, v, is_causal=True)
    k[:, :, 40, 3] = np.nan
    out = whet.linear_attention(q, k, v, is_causal=True)
    np.testing.assert_array_equal(out[:, :, :40], expected[:, :, :40])
    assert np.isnan(out[:, :, 40:]).all()


@pytest.mark.parametrize("name, wrong", [
    ("query", {"query": "text"}), ("key", {"key": np.zeros((2, 3, 70, 8))}), ("value", {"value": np.zeros((2, 2, 9, 6))}),
    ("key", {"key": np.zeros((2, 2, 70, 8), np.float32)}), ("lengths", {"lengths": [1]}),
    ("lengths", {"lengths": [71, 1]}), ("lengths", {"lengths": [0.5, 1]}), ("is_causal", {"is_causal": 3}),
    ("threads", {"threads": -1}), ("out", {"out": np.zeros((2, 4, 70, 7))}), ("out", {"out": [1]})])
def test_errors_name_the_argument(rng, name, wrong):
    q, k, v = inputs(rng)
    given = {"query": q, "key": k, "value": v, **wrong}
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        whet.linear_attention(**given)


def test_errors_of_backward_name_the_argument(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match="^dout"):
        whet.linear_attention_backward(q, k, v, q)
