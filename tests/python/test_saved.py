"""What forward saves of each row, and that backward finds the same from it as without."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import whet
from whet import _core

SIZES = {"none": 3, "fixed:1.5": 3, "log-length:4": 3, "ssmax:0.4": 3, "log-power:0.5,0.3,1.5": 3,
         "llama4:4": 3, "target-entropy:0.2": 4, "target-peak:0.9": 4,
         "paper": 6, "polynomial:0.3,1.2:gate=0.2:hold=2": 6}
# Of float64, of float32, and of gradients that are rounded to bfloat16.
CLOSE = {np.float64: 1e-11, np.float32: 2e-5, ml_dtypes.bfloat16: 1e-2}


def arithmetic(dtype):
    return np.float64 if dtype == np.float64 else np.float32


@pytest.mark.parametrize("rule", SIZES)
def test_size(rule):
    assert _core.saved_size(rule, "softmax") == _core.saved_size([rule], "softmax") == SIZES[rule]
    assert _core.saved_size(["none", rule], None) == SIZES[rule] and _core.saved_size(rule, "hard") == 3


def test_size_of_no_rule():
    assert _core.saved_size(None, None) == _core.saved_size([], "softmax") == 3
    for wrong in ((3, "softmax"), ("none", 3)):
        with pytest.raises(TypeError, match="^rule|^normalizer"):
            _core.saved_size(*wrong)


@pytest.mark.parametrize("rule", SIZES)
@pytest.mark.parametrize("dtype", CLOSE)
def test_rows(rng, dtype, rule):
    x = rng.normal(size=(2, 40, 3)).astype(dtype)
    where = rng.random((2, 40, 3)) < 0.8
    weights, stats, saved = whet.softmax(x, 1, rule, where, return_stats=True, return_saved=True)
    assert saved.shape == (2, 3, SIZES[rule]) and saved.dtype == arithmetic(dtype)
    assert np.array_equal(weights, whet.softmax(x, 1, rule, where)), "the same bits"
    top, beta, scale, *more = np.moveaxis(saved, -1, 0)
    close = {"rtol": 1e-11 if dtype == np.float64 else 5e-5}
    np.testing.assert_array_equal(top, stats.max)
    np.testing.assert_allclose(beta, stats.beta, **close)
    np.testing.assert_allclose(scale, stats.sharp_peak, **close)
    y = np.where(where, x.astype(np.float64), -np.inf) - np.expand_dims(stats.max, 1)
    e, plain = np.exp(np.expand_dims(stats.beta, 1) * y), np.exp(y)
    y = np.where(where, y, 0.0)
    np.testing.assert_allclose(1 / scale, e.sum(1), **close)
    if more:
        assert np.all(beta > 1)
        np.testing.assert_allclose(more[0], (e * y).sum(1) / e.sum(1), **close)
    if rule == "paper":
        np.testing.assert_allclose(more[1], np.polyval(np.polyder(oracle.PAPER), stats.entropy) / plain.sum(1),
                                   rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(more[2], (plain * y).sum(1) / plain.sum(1), **close)


@pytest.mark.parametrize("rule", SIZES)
def test_rows_that_see_nothing_and_rows_of_nan(rule):
    x = np.array([[-np.inf] * 3, [0.0, np.nan, 1.0], [0.0, 1.0, 2.0]])
    _, saved = whet.softmax(x, rule=rule, return_saved=True)
    assert np.all(saved[0] == [0, 1, 0, 0, 0, 0][: SIZES[rule]])
    assert np.isnan(saved[1, 2]) and np.all(np.isfinite(saved[2]))
    assert whet.softmax(np.empty((5, 0)), rule=rule, return_saved=True)[1][:, 2].tolist() == [0] * 5
    assert whet.softmax(np.empty((0, 5)), rule=rule, return_saved=True)[1].shape == (0, SIZES[rule])


def heads(rng, dtype, queries):
    return [rng.normal(size=shape).astype(dtype) for shape in ((2, 4, queries, 8), (2, 2, 9, 8), (2, 2, 9, 6))]


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("rule", [*SIZES, ["none", "paper", "target-peak:0.9", "ssmax:1"]], ids=str)
@pytest.mark.parametrize("dtype", CLOSE)
def test_attention(rng, dtype, rule, queries):
    q, k, v = heads(rng, dtype, queries)
    sinks = np.array([3.0, -1.0, -np.inf, 0.0])
    given = {"rule": rule, "sinks": sinks.astype(arithmetic(dtype)), "scale": 0.5}
    out, stats, saved = whet.attention(q, k, v, return_stats=True, return_saved=True, **given)
    assert saved.shape == (2, 4, queries, SIZES[rule] if isinstance(rule, str) else 6)
    assert saved.dtype == arithmetic(dtype) and np.array_equal(out, whet.attention(q, k, v, **given))
    top, beta, scale = np.moveaxis(saved[..., :3], -1, 0)
    close = {"rtol": 1e-11 if dtype == np.float64 else 1e-4}
    np.testing.assert_array_equal(top, stats.max)
    np.testing.assert_allclose(beta, stats.beta, **close)
    x = 0.5 * q.astype(np.float64) @ np.repeat(k.astype(np.float64), 2, 1).swapaxes(2, 3)
    x = np.append(x, np.broadcast_to(sinks[:, None, None], (2, 4, queries, 1)), -1)
    e = np.exp(stats.beta[..., None] * (x - stats.max[..., None]))
    np.testing.assert_allclose(1 / scale, e.sum(-1), **close)


# ---- gradients


def gradients_are_the_same(found, again, dtype, rule):
    """A target is met within 2e-6, and the search may end elsewhere."""
    close = max(CLOSE[dtype], 1e-4 if "target" in str(rule) else 0)
    for one, other in zip(found, again, strict=True):
        one, other = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(one, other, rtol=close, atol=close * max(1, np.abs(other).max()))


@pytest.mark.parametrize("options", [{}, {"hold_beta": True}, {"normalizer": "hard"}], ids=str)
@pytest.mark.parametrize("rule", SIZES)
@pytest.mark.parametrize("dtype", CLOSE)
def test_gradients_of_rows(rng, dtype, rule, options):
    x, dout = (rng.normal(size=(4, 30)).astype(dtype) for _ in range(2))
    x[1], x[2, 1:] = -np.inf, -np.inf
    for where in (None, rng.random((4, 30)) < 0.7):
        given = {"rule": rule, "where": where, "normalizer": options.get("normalizer", "softmax")}
        _, saved = whet.softmax(x, return_saved=True, **given)
        found, again = (whet.softmax_backward(x, dout, saved=s, **given | options) for s in (saved, None))
        assert np.all(found[1:3] == 0)
        gradients_are_the_same([found], [again], dtype, rule)


@pytest.mark.parametrize("normalizer", ["softmax", "hard"])
@pytest.mark.parametrize("rule", [*SIZES, ["none", "paper", "target-peak:0.9", "ssmax:1"]], ids=str)
@pytest.mark.parametrize("dtype", CLOSE)
def test_gradients_of_attention(rng, dtype, rule, normalizer):
    q, k, v = heads(rng, dtype, queries=20)  # fewer than 17 rows to a key head are found again
    bias, sinks = (rng.normal(size=shape).astype(arithmetic(dtype)) for shape in ((20, 9), 4))
    mask = rng.random((2, 1, 20, 9)) < 0.8
    mask[1, 0, 3] = False
    for more in ({}, {"sinks": sinks}, {"mask": mask, "is_causal": True}, {"mask": mask, "bias": bias, "sinks": sinks}):
        given = {"rule": rule, "normalizer": normalizer, **more}
        _, saved = whet.attention(q, k, v, return_saved=True, **given)
        dout = rng.normal(size=(2, 4, 20, 6)).astype(dtype)
        found, again = ([g for g in whet.attention_backward(q, k, v, dout, saved=s, **given) if g is not None]
                        for s in (saved, None))
        gradients_are_the_same(found, again, dtype, rule)


def test_it_is_read():
    """Backward believes what it is given: no weights, no gradient."""
    x = np.arange(6.0)
    assert np.any(whet.softmax_backward(x, x, rule="paper") != 0)
    assert np.all(whet.softmax_backward(x, x, rule="paper", saved=np.zeros(6)) == 0)


# ---- errors


def wrong_buffers(rows, size, dtype):
    """With the kind of error each gives."""
    other = np.float64 if dtype == np.float32 else np.float32
    return [(ValueError, np.empty((rows, size), other)), (ValueError, np.empty((rows, size), np.float16)),
            (TypeError, np.empty((rows, size), np.int64)), (ValueError, np.empty((rows, size + 1), dtype)),
            (ValueError, np.empty((rows + 1, size), dtype)), (ValueError, np.empty((size, rows), dtype).T),
            (ValueError, np.empty((rows, 2 * size), dtype)[:, ::2]), (TypeError, 3)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule, size", [("none", 3), ("target-peak:0.9", 4), ("paper", 6)])
def test_wrong_buffers(rng, dtype, rule, size):
    x = rng.normal(size=(2, 5)).astype(dtype)
    q = rng.normal(size=(1, 2, 3, 4)).astype(dtype)
    for kind, saved in wrong_buffers(2, size, dtype):
        for function, given in ((_core.softmax, (x,)), (_core.softmax_backward, (x, x))):
            with pytest.raises(kind, match="^saved"):
                function(*given, np.empty_like(x), rule=rule, saved=saved)
    for kind, saved in wrong_buffers(6, size, dtype):
        for function in (_core.attention, _core.attention_backward):
            with pytest.raises(kind, match="^saved"):
                function(q, q, q, np.empty_like(q), rule=rule, saved=saved)


def test_what_is_written_may_not_be_read_only_or_overlap(rng):
    x = rng.normal(size=(4, 6))
    saved = np.empty((4, 3))
    saved.flags.writeable = False
    for wrong in (saved, x[:2]):
        with pytest.raises(ValueError, match="^saved"):
            _core.softmax(x, np.empty_like(x), saved=wrong)
    with pytest.raises(ValueError, match="^saved"):
        _core.sharpen(np.full((4, 6), 1 / 6), np.empty((4, 6)), saved=np.empty((4, 3)))


def test_stats_are_no_longer_read(rng):
    x = rng.normal(size=(4, 6))
    with pytest.raises(TypeError, match="^stats"):
        _core.softmax_backward(x, x, np.empty_like(x), stats=np.empty((4, 12)))
