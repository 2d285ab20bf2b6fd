"""Rules as values."""

import copy
import pickle

import numpy as np
import oracle
import pytest
import whet

ALL = [whet.NoRule(), whet.Paper(), whet.Fixed(1.5), whet.LogLength(16), whet.LogLength(16, 0.9), whet.SSMax(0.4),
       whet.LogPower(1, 0.5, 2), whet.Llama4(8192), whet.Llama4(8192, 0.2), whet.TargetEntropy(0.2), whet.TargetPeak(0.9),
       whet.Polynomial([0.25, 1.0], gate=0.1, hold=3.5),
       whet.Polynomial((-0.1, 2.0, 0.3))]


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_round_trips(rule):
    assert whet.rule(rule.name) == rule and whet.rule(rule) is rule
    assert hash(whet.rule(rule.name)) == hash(rule)
    assert eval(repr(rule), {**vars(whet), "inf": np.inf}) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule and copy.deepcopy(rule).name == rule.name


def test_different_rules_differ():
    assert len(set(ALL)) == len(ALL)


def test_names_are_those_of_the_command_line():
    assert [rule.name for rule in ALL[:11]] == ["none", "paper", "fixed:1.5", "log-length:16", "log-length:16,0.9",
                                               "ssmax:0.4", "log-power:1,0.5,2", "llama4:8192", "llama4:8192,0.2",
                                               "target-entropy:0.2", "target-peak:0.9"]
    for name in oracle.RULES:
        assert whet.rule(name).name == name
    assert whet.rule(None) == whet.NoRule()


def test_rules_are_frozen():
    with pytest.raises(AttributeError):
        whet.Fixed(2.0).value = 3.0


def test_files(tmp_path, rng):
    rule = whet.Polynomial([0.1, -0.3, 1.0 / 3], hold=5)
    rule.save(tmp_path / "rule")
    assert whet.Polynomial.load(tmp_path / "rule") == rule == whet.rule(f"polynomial:{tmp_path / 'rule'}")
    x = rng.normal(size=(3, 40))
    np.testing.assert_array_equal(whet.softmax(x, rule=rule), whet.softmax(x, rule=f"polynomial:{tmp_path / 'rule'}"))
    with pytest.raises(ValueError, match="can't be read"):
        whet.Polynomial.load(tmp_path / "missing")


@pytest.mark.parametrize("make", [
    lambda: whet.Fixed(0), lambda: whet.Fixed(float("nan")), lambda: whet.LogLength(1), lambda: whet.SSMax(-1),
    lambda: whet.LogPower(0, 0, 1), lambda: whet.LogPower(1, 1, -1), lambda: whet.LogPower(1, float("inf"), 1),
    lambda: whet.Llama4(0), lambda: whet.Llama4(10.5), lambda: whet.Llama4(16, 0), lambda: whet.TargetEntropy(0),
    lambda: whet.TargetPeak(1), lambda: whet.Polynomial([]), lambda: whet.rule("log-power:1,2"),
    lambda: whet.Polynomial([1.0] * 9), lambda: whet.rule("sharp"), lambda: whet.rule("fixed"),
    lambda: whet.rule("")])
def test_bad_rules(make):
    with pytest.raises(ValueError, match="must be|not a rule|rules are"):
        make()


@pytest.mark.parametrize("rule", [3, b"paper", ["paper"], whet.Paper])
def test_what_is_no_rule(rule):
    with pytest.raises(TypeError, match="rule: "):
        whet.softmax([1.0, 2.0], rule=rule)


@pytest.mark.parametrize("rule, count, beta", [
    ("llama4:8192,0.1", 2, 1), ("llama4:8192,0.1", 8191, 1), ("llama4:8192,0.1", 8192, 1 + 0.1 * np.log(2)),
    (whet.Llama4(8192), 16384, 1 + 0.1 * np.log(3)), ("llama4:8192", 1, 1),
    ("log-power:1,0.5,2", 100, 1 + 0.5 * np.log(100) ** 2), (whet.LogPower(0.25, 0, 2), 100, 0.25),
    ("log-power:0,0.4,1", 100, 0.4 * np.log(100)), (whet.LogPower(3, 1, 0), 1, 1), (whet.LogPower(3, 1, 0), 2, 4)])
def test_rules_of_the_length(rule, count, beta):
    x = np.zeros(count)
    np.testing.assert_allclose(whet.rule(rule).beta(whet.states(x)), beta, rtol=1e-14)
    np.testing.assert_allclose(whet.softmax(x, rule=rule, return_stats=True)[1].beta, beta, rtol=1e-14)


def test_beta_of_states_needs_more_for_targets():
    with pytest.raises(ValueError):
        whet.TargetPeak(0.5).beta(whet.states([1.0, 2.0]))
