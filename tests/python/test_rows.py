"""whet.softmax and its kin against the oracle."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import whet

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax(rng, rule, dtype):
    x = (3 * rng.normal(size=(7, 50))).astype(dtype)
    # A target is met within 1e-6 max(2, ln n), wherever beta then is.
    tolerance = 2e-5 if rule.startswith("target") else TOLERANCE[dtype]
    np.testing.assert_allclose(whet.softmax(x, rule=rule), oracle.softmax(x, rule), atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_softmax_in_16_bits(rng, dtype):
    x = (3 * rng.normal(size=(7, 50))).astype(dtype)
    weights = whet.softmax(x, rule="paper")
    assert weights.dtype == dtype
    np.testing.assert_allclose(weights.astype(np.float64), oracle.softmax(x.astype(np.float64), "paper"),
                               atol=TOLERANCE[np.dtype(dtype).name])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, np.int64(1)])
def test_axis(rng, axis):
    x = rng.normal(size=(3, 4, 5))
    weights, stats = whet.softmax(x, axis, "paper", return_stats=True)
    np.testing.assert_allclose(weights, oracle.softmax(x, "paper", axis=axis), atol=1e-12)
    assert all(field.shape == weights.sum(axis=axis).shape for field in stats)
    np.testing.assert_array_equal(stats.count, x.shape[axis])


@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (6,), ()])
def test_where_broadcasts_and_hides(rng, shape):
    x = rng.normal(size=(4, 6))
    where = rng.random(shape) < 0.6 if shape else np.True_
    weights = whet.softmax(x, rule="log-length:2", where=where)
    np.testing.assert_allclose(weights, oracle.softmax(x, "log-length:2", where=where), atol=1e-12)
    assert np.all(weights[np.broadcast_to(~where, x.shape)] == 0)


def test_lengths(rng):
    x = rng.normal(size=(3, 5))
    lengths = [5, 2, 0]
    expected = oracle.softmax(x, "paper", where=np.arange(5) < np.array(lengths)[:, None])
    np.testing.assert_allclose(whet.softmax(x, rule="paper", lengths=lengths), expected, atol=1e-12)


def test_lists_numbers_and_integers_become_float64():
    np.testing.assert_allclose(whet.softmax([0, 1, 2]), oracle.softmax([0.0, 1.0, 2.0]), atol=1e-12)
    assert whet.softmax(np.arange(3, dtype=np.int8)).dtype == np.float64
    assert whet.softmax(np.array([True, False])).dtype == np.float64


def test_rules_as_objects_and_names_agree(rng):
    x = rng.normal(size=(2, 30))
    np.testing.assert_array_equal(whet.softmax(x, rule=whet.Paper()), whet.softmax(x, rule="paper"))
    np.testing.assert_array_equal(whet.softmax(x, rule=None), whet.softmax(x, rule="none"))


def test_stats(rng):
    x = rng.normal(size=(4, 9, 20))
    weights, stats = whet.softmax(x, rule="paper", return_stats=True)
    plain = oracle.softmax(x)
    rows = x.reshape(-1, 20)
    assert type(stats) is whet.Stats and whet.Stats._fields[7] == "beta"
    assert all(field.shape == (4, 9) and field.dtype == np.float64 for field in stats)
    assert len({id(field.base) for field in stats}) == 1, "views into one buffer"
    np.testing.assert_array_equal(stats.max, x.max(-1))
    np.testing.assert_allclose(stats.log_sum_exp, np.log(np.exp(x).sum(-1)), rtol=1e-12)
    np.testing.assert_allclose(stats.entropy, -(plain * np.log(plain)).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(stats.peak, plain.max(-1), rtol=1e-12)
    np.testing.assert_allclose(stats.spread, x.max(-1) - x.min(-1), rtol=1e-12)
    np.testing.assert_allclose(stats.beta.ravel(), [oracle.beta_of("paper", row) for row in rows], rtol=1e-9)
    np.testing.assert_allclose(stats.sharp_peak, weights.max(-1), rtol=1e-12)


def test_rows_that_see_nothing():
    x = np.array([[-np.inf, -np.inf], [0.0, 1.0]])
    weights, stats = whet.softmax(x, rule="paper", return_stats=True)
    np.testing.assert_array_equal(weights[0], 0)
    assert stats.log_sum_exp[0] == -np.inf and stats.beta[0] == 1 and stats.count[0] == 0


def test_nan_stays_in_its_row(rng):
    x = rng.normal(size=(3, 5))
    x[1, 2] = np.nan
    weights = whet.softmax(x, rule="paper")
    assert np.all(np.isnan(weights[1])) and np.all(np.isfinite(weights[[0, 2]]))


def test_sharpen(rng):
    x = rng.normal(size=(3, 12))
    np.testing.assert_allclose(whet.sharpen(oracle.softmax(x), rule="paper"), oracle.softmax(x, "paper"), atol=1e-12)


@pytest.mark.parametrize("rule", oracle.RULES)
def test_softmax_backward(rng, rule):
    """Against differences of the function itself, which the tests above compare with the oracle."""
    x, dout = rng.normal(size=(2, 8)), rng.normal(size=(2, 8))
    _, saved = whet.softmax(x, rule=rule, return_saved=True)
    gradient = whet.softmax_backward(x, dout, rule=rule, saved=saved)
    np.testing.assert_allclose(whet.softmax_backward(x, dout, rule=rule), gradient, atol=1e-9)
    step = 1e-4 if rule.startswith("target") else 1e-6
    for at in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][at] -= step
        moved[1][at] += step
        below, above = (oracle.softmax(m, rule) for m in moved)
        assert gradient[at] == pytest.approx(((above - below) * dout).sum() / (2 * step), abs=2e-5)


def test_softmax_backward_may_hold_beta(rng):
    x, dout = rng.normal(size=(1, 30)), rng.normal(size=(1, 30))
    weights, stats = whet.softmax(x, rule="paper", return_stats=True)
    expected = stats.beta * weights * (dout - (weights * dout).sum())
    np.testing.assert_allclose(whet.softmax_backward(x, dout, rule="paper", hold_beta=True), expected, atol=1e-12)


def test_states_merge_to_the_state_of_the_whole(rng):
    x = rng.normal(size=(3, 100))
    parts = [whet.states(x[:, :30]), whet.states(x[:, 30:31]), whet.states(x[:, 31:])]
    whole, merged = whet.states(x), whet.merge(whet.merge(parts[0], parts[1]), parts[2])
    assert whole.dtype == whet.STATE and whole.shape == (3,)
    y = x - x.max(-1, keepdims=True)
    for name, expected in {"count": 100, "min": x.min(-1), "max": x.max(-1), "z": np.exp(y).sum(-1),
                           "t": (np.exp(y) * y).sum(-1), "u": (np.exp(y) * y**2).sum(-1)}.items():
        np.testing.assert_allclose(whole[name], expected, rtol=1e-12)
        np.testing.assert_allclose(merged[name], expected, rtol=1e-12)
    np.testing.assert_allclose(whet.Paper().beta(merged), [oracle.beta_of("paper", row) for row in x], rtol=1e-9)


def test_merge_broadcasts():
    merged = whet.merge(whet.states(np.zeros((3, 1, 5))), whet.states(np.zeros((2, 5))))
    assert merged.shape == (3, 2) and np.all(merged["count"] == 10)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_zero_sizes(shape):
    weights, stats = whet.softmax(np.empty(shape, np.float32), rule="paper", return_stats=True)
    assert weights.shape == shape and stats.beta.shape == shape[:-1]
    assert whet.states(np.empty(shape)).shape == shape[:-1]
    assert whet.softmax_backward(np.empty(shape), np.empty(shape)).shape == shape


def test_infinitely_many_keys():
    found = whet.largest_weight(np.inf, [6.0, 1000.0, 1e300, np.inf])
    np.testing.assert_array_equal(found, [0, 0, 0, 1])
    assert whet.largest_weight(1000, np.inf) == 1 and f"{whet.largest_weight(np.inf, 1000):.1f}" == "0.0"


def test_horizon_is_where_the_largest_weight_falls_to_w():
    keys = whet.horizon(5.69, 0.25)
    assert whet.largest_weight(keys, 5.69) == pytest.approx(0.25)
    n = int(keys)
    x = np.r_[5.69, np.zeros(n - 1)]
    assert whet.softmax(x).max() >= 0.25 > whet.softmax(np.append(x, 0.0)).max()
    np.testing.assert_array_equal(whet.spread([[1.0, 4.0, -np.inf], [-np.inf] * 3]), [3, 0])
    assert whet.spread([1.0, 4.0, 9.0], where=[True, True, False]) == 3
    assert whet.horizon(2000.0, 0.5) == np.inf and whet.horizon(2000.0, 1.0) == 1
