"""The logarithm of softmax and its gradient against the oracle."""

import numpy as np
import oracle
import pytest
import whet


def expected_logs(x, rule, axis=-1, where=None):
    with np.errstate(divide="ignore"):
        return np.log(oracle.softmax(x, rule, axis, where))


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-10), (np.float32, 2e-5), (np.float16, 2e-2)])
def test_log_softmax(rng, rule, dtype, tolerance):
    tolerance = max(tolerance, 2e-5) if rule.startswith("target") else tolerance
    x = rng.normal(size=(4, 3, 7)).astype(dtype)
    for axis in (-1, 0):
        logs = whet.log_softmax(x, axis, rule)
        assert logs.dtype == dtype
        np.testing.assert_allclose(logs, expected_logs(x, rule, axis), rtol=tolerance, atol=tolerance)


def test_small_weights_keep_their_logarithm():
    logs, stats = whet.log_softmax(np.float32([0, -300, -1e4]), rule="fixed:3", return_stats=True)
    np.testing.assert_allclose(logs, [0, -900, -3e4], rtol=1e-6)
    assert stats.beta == 3 and np.all(whet.softmax(np.float32([0, -300, -1e4]), rule="fixed:3")[1:] == 0)


def test_hidden_keys(rng):
    x = rng.normal(size=(3, 6))
    x[0, 2] = -np.inf
    where = np.array([True, True, True, False, True, True])
    np.testing.assert_allclose(whet.log_softmax(x, rule="paper", where=where), expected_logs(x, "paper", -1, where))
    x[0, 3] = np.nan  # hidden
    logs = whet.log_softmax(x, rule="paper", where=where, lengths=[5, 0, 1])
    assert np.all(logs[0, [2, 3, 5]] == -np.inf) and np.all(np.isfinite(logs[0, [0, 1, 4]]))
    assert np.all(logs[1] == -np.inf) and np.array_equal(logs[2], [0, *[-np.inf] * 5])
    gradient = whet.log_softmax_backward(x, np.full((3, 6), np.nan), rule="paper", where=np.zeros(6, bool))
    assert np.all(gradient == 0)


def test_out(rng):
    x = rng.normal(size=(3, 5))
    logs = whet.log_softmax(x, rule="paper")
    out = np.empty_like(x)
    assert whet.log_softmax(x, rule="paper", out=out) is out
    np.testing.assert_array_equal(out, logs)
    np.testing.assert_array_equal(whet.log_softmax(x, rule="paper", out=x), logs)
    with pytest.raises(ValueError, match=r"^out: is \(3, 4\) of float64, must be as x, \(3, 5\) of float64"):
        whet.log_softmax(x, out=np.empty((3, 4)))
    with pytest.raises(TypeError, match="^out: is a list"):
        whet.log_softmax(x, out=[1.0])


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("axis", [0, -1])
def test_gradient(rng, rule, axis):
    """Against differences of the oracle, in a direction drawn at random."""
    x, dout = rng.normal(size=(5, 6)), rng.normal(size=(5, 6))
    where = np.ones((5, 6), bool)
    where[2, 1] = where[3, 3] = False
    gradient = whet.log_softmax_backward(x, dout, axis, rule, where)
    assert np.all(gradient[~where] == 0)
    step = (1e-4 if rule.startswith("target") else 1e-6) * rng.normal(size=x.shape)

    def loss(x):
        return (expected_logs(x, rule, axis, where) * dout)[where].sum()

    difference = (loss(x + step) - loss(x - step)) / 2
    assert (gradient * step).sum() == pytest.approx(difference, rel=1e-3 if rule.startswith("target") else 1e-5)


def test_beta_held(rng):
    x, dout = rng.normal(size=8), rng.normal(size=8)
    beta = float(whet.softmax(x, rule="paper", return_stats=True)[1].beta)
    held = whet.log_softmax_backward(x, dout, rule="paper", hold_beta=True)
    np.testing.assert_allclose(held, whet.log_softmax_backward(x, dout, rule=whet.Fixed(beta)), rtol=1e-9)
    assert not np.allclose(held, whet.log_softmax_backward(x, dout, rule="paper"), atol=1e-4)


def test_adaptive_rules_say_so():
    kinds = {whet.rule(rule).kind for rule in oracle.RULES if whet.rule(rule).adaptive}
    assert kinds == {"paper", "target-entropy", "target-peak", "polynomial"}


def test_normalizers_go_by_name(rng):
    x = rng.normal(size=(2, 5))
    np.testing.assert_array_equal(whet.softmax(x, normalizer="softmax"), whet.softmax(x))
    np.testing.assert_array_equal(whet.softmax([1.0, 3.0, 3.0], normalizer="hard"), [0, 0.5, 0.5])
    assert np.all(whet.softmax_backward(x, x, normalizer="hard") == 0)
    q = rng.normal(size=(1, 2, 3, 4))
    for call in (lambda name: whet.softmax(x, normalizer=name), lambda name: whet.attention(q, q, q, normalizer=name),
                 lambda name: whet.softmax_backward(x, x, normalizer=name)):
        with pytest.raises(ValueError, match="^normalizer.*softmax"):
            call("softest")
        with pytest.raises(TypeError, match="^normalizer: is a int"):
            call(3)
