"""Rules as values."""

import copy
import pickle

import numpy as np
import oracle
import pytest
import whet

ALL = [whet.NoRule(), whet.Paper(), whet.Fixed(1.5), whet.LogLength(16), whet.LogLength(16, 0.9), whet.SSMax(0.4),
       whet.TargetEntropy(0.2), whet.TargetPeak(0.9), whet.Polynomial([0.25, 1.0], gate=0.1, hold=3.5),
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
    assert [rule.name for rule in ALL[:8]] == ["none", "paper", "fixed:1.5", "log-length:16", "log-length:16,0.9",
                                               "ssmax:0.4", "target-entropy:0.2", "target-peak:0.9"]
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
    lambda: whet.TargetEntropy(0), lambda: whet.TargetPeak(1), lambda: whet.Polynomial([]),
    lambda: whet.Polynomial([1.0] * 9), lambda: whet.rule("sharp"), lambda: whet.rule("fixed"),
    lambda: whet.rule("")])
def test_bad_rules(make):
    with pytest.raises(ValueError, match="must be|not a rule|rules are"):
        make()


@pytest.mark.parametrize("rule", [3, b"paper", ["paper"], whet.Paper])
def test_what_is_no_rule(rule):
    with pytest.raises(TypeError, match="rule: "):
        whet.softmax([1.0, 2.0], rule=rule)


def test_beta_of_states_needs_more_for_targets():
    with pytest.raises(ValueError):
        whet.TargetPeak(0.5).beta(whet.states([1.0, 2.0]))
