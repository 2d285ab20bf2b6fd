"""Shards together are attention over all keys, forward and backward, for any cuts."""

import doctest
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import whet
from whet import shards

CLOSE = dict(rtol=1e-3, atol=1e-4)  # a search ends within 1e-6 of its target
RULES = ["none", "paper", "log-length:8", "target-entropy:0.7", "target-peak:0.6", ["none", "paper", "target-peak:0.6", "paper"]]
CUTS = {"one": [0, 41], "two": [0, 30, 41], "three": [0, 7, 8, 41], "empty": [0, 0, 25, 25, 41]}


def drawn(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


class Problem:
    def __init__(self, n=9, m=41, batch=2, heads=4, key_heads=2, d=5, e=3, dtype=np.float32):
        self.q, self.k, self.v, self.g = (drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(
            [(batch, heads, n, d), (batch, key_heads, m, d), (batch, key_heads, m, e), (batch, heads, n, e)]))

    def gather(self, cuts, rule=None, hold_beta=False, keep_logits=False, **options):
        """Output and gradients of shards, as a caller with a transport of their own finds them."""
        q, g, m = self.q, self.g, self.k.shape[2]
        every = []
        for first, end in pairwise(cuts):
            own = {name: given[..., first:end] if name in ("mask", "bias") and given.shape[-1] > 1 else given
                   for name, given in options.items()}
            logits = np.empty((*q.shape[:3], end - first), np.float32) if keep_logits else None
            every.append((self.k[:, :, first:end], self.v[:, :, first:end],
                          dict(own, first_key=first, all_keys=m, logits=logits)))
        merged = reduce(whet.merge, [shards.states(q, k, **given) for k, _, given in every])
        search, steps = shards.Search(merged, rule), 0
        while not search.done:
            search.absorb(sum(shards.sums(q, k, search.rows, **given) for k, _, given in every))
            steps += 1
            assert steps < 100
        rows = search.rows
        if options.get("normalizer", "hard") not in ("softmax", "hard"):
            rows = self.thresholds(merged, rows, every, options["normalizer"])
        outs, masses = zip(*(shards.attention(q, k, v, rows, **given) for k, v, given in every))
        out, mass = shards.merge_outputs(outs, masses, np.float64), sum(masses)
        for _, _, given in every:
            given.pop("logits")
        if shards.beta_moves(rows, rule, hold_beta=hold_beta):
            sums = sum(shards.gradient_sums(q, k, v, g, rows, **given) for k, v, given in every)
        else:
            sums = shards.output_sums(out, g, mass)
        lines = shards.slopes(merged, rows, mass, sums, rule, hold_beta=hold_beta)
        found = [shards.backward(q, k, v, g, lines, **given) for k, v, given in every]
        added = {name: sum(getattr(one, name) for one in found) for name in ("dquery", "dsinks", "dquery_scale")
                 if getattr(found[0], name) is not None}
        joined = {name: np.concatenate([getattr(one, name) for one in found], 2) for name in ("dkey", "dvalue")}
        if "bias" in options:
            columns = [one.dbias for one in found]
            joined["dbias"] = sum(columns) if options["bias"].shape[-1] == 1 else np.concatenate(columns, -1)
        return out.astype(q.dtype), {**added, **joined}

    def thresholds(self, merged, rows, every, normalizer):
        search, steps = shards.ThresholdSearch(merged, rows, normalizer, self.q.dtype), 0
        while not search.done:
            search.absorb(sum(shards.threshold_sums(self.q, k, search.rows, **given) for k, _, given in every))
            steps += 1
            assert steps < 20
        return search.rows

    def check(self, cuts, rule=None, hold_beta=False, keep_logits=False, close=None, **options):
        close = close or CLOSE
        out, found = self.gather(cuts, rule, hold_beta, keep_logits, **options)
        np.testing.assert_allclose(out, whet.attention(self.q, self.k, self.v, rule=rule, **options), **close)
        whole = whet.attention_backward(self.q, self.k, self.v, self.g, rule=rule, hold_beta=hold_beta, **options)
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, getattr(whole, name), err_msg=name, **close)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_every_rule_and_cut(rule, cuts):
    Problem().check(cuts, rule)


@pytest.mark.parametrize("options", [
    dict(is_causal=True, align="end"), dict(is_causal=True, softcap=2.0), dict(window=(9, 5), scale=0.3),
    dict(normalizer="hard"), dict(lengths=np.array([13, 0])), dict(mask=drawn(1, 1, 9, 41, seed=5) > -0.5),
    dict(bias=drawn(1, 4, 9, 41, seed=6)), dict(bias=drawn(4, 9, 1, seed=6)),
    dict(sinks=drawn(4, seed=7), query_scale=abs(drawn(4, 9, seed=8))), dict(dropout_p=0.3, dropout_seed=7)],
    ids=lambda options: "+".join(options))
@pytest.mark.parametrize("rule", ["none", "paper", "target-peak:0.6"])
def test_every_option(options, rule):
    Problem().check(CUTS["empty"], rule, **options)


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax15", "entmax:1.3"])
@pytest.mark.parametrize("options", [
    dict(), dict(keep_logits=True), dict(hold_beta=True), dict(sinks=drawn(4, seed=7), is_causal=True),
    dict(mask=drawn(1, 1, 9, 41, seed=5) > -0.5), dict(lengths=np.array([13, 0]))], ids=lambda options: "+".join(options))
@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.7"])
def test_thresholds(normalizer, options, rule):
    Problem().check(CUTS["empty"], rule, normalizer=normalizer, **options)
    if rule != "target-entropy:0.7" and not options.get("keep_logits"):
        exact = Problem(dtype=np.float64)
        given = {name: value.astype(np.float64) if name == "sinks" else value for name, value in options.items()}
        exact.check(CUTS["three"], rule, normalizer=normalizer, close=dict(rtol=1e-9, atol=1e-11), **given)


def test_a_beta_that_is_held():
    Problem().check(CUTS["three"], "paper", hold_beta=True)


@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.7"])
def test_logits_that_are_kept_change_no_bit(rule):
    problem = Problem(n=40)
    kept, again = (problem.gather(CUTS["three"], rule, keep_logits=keep) for keep in (True, False))
    np.testing.assert_array_equal(kept[0], again[0])
    problem.check(CUTS["two"], rule, keep_logits=True)


def test_other_dtypes():
    Problem(dtype=np.float64).check(CUTS["three"], "paper", close=dict(rtol=1e-9, atol=1e-11))
    Problem(dtype=np.float16).check(CUTS["three"], "paper", close=dict(rtol=1e-2, atol=1e-2))


def test_some_of_the_queries():
    problem, cuts = Problem(n=30), CUTS["two"]
    whole = problem.gather(cuts, "paper", is_causal=True)[0]
    part = Problem(n=30)
    part.q, part.g = part.q[:, :, 10:17], part.g[:, :, 10:17]
    found = part.gather(cuts, "paper", is_causal=True, first_query=10, all_queries=30)[0]
    np.testing.assert_allclose(found, whole[:, :, 10:17], **CLOSE)


def test_fewer_axes():
    q, k, v = (drawn(7, 4, seed=seed) for seed in range(3))
    states = [shards.states(q, k[cut], first_key=cut.start, all_keys=7) for cut in (slice(0, 3), slice(3, 7))]
    rows = shards.Search(whet.merge(*states), ["paper"]).rows
    outs, masses = zip(*(shards.attention(q, k[cut], v[cut], rows, first_key=cut.start, all_keys=7)
                         for cut in (slice(0, 3), slice(3, 7))))
    np.testing.assert_allclose(shards.merge_outputs(outs, masses), whet.attention(q, k, v, rule="paper"), **CLOSE)


def test_rows_that_see_nothing():
    q, k = drawn(2, 4), drawn(0, 4)
    rows = shards.Search(shards.states(q, k, first_key=0, all_keys=0), "target-peak:0.9").rows
    np.testing.assert_array_equal(rows[:, 1:], [[1, 0, 0]] * 2)
    out, mass = shards.attention(q, k, k, rows, first_key=0, all_keys=0)
    np.testing.assert_array_equal(shards.merge_outputs([out], [mass]), 0)


WHOLE = dict(first_key=0, all_keys=6)


@pytest.mark.parametrize("call, text", [
    (lambda q, s, r: shards.states(q, q, all_keys=6), "first_key: not given"),
    (lambda q, s, r: shards.states(q, q, first_key=0), "all_keys: not given"),
    (lambda q, s, r: shards.states(q, q, first_key=3, all_keys=6), "first_key: "),
    (lambda q, s, r: shards.states(q, q, rule="paper", **WHOLE), "rule: isn't an option of a shard"),
    (lambda q, s, r: shards.states(q, q, normalizer="top-k:2", **WHOLE), "normalizer: "),
    (lambda q, s, r: shards.ThresholdSearch(s, r, "top-k:2"), "normalizer: is top-k:2, must be sparsemax"),
    (lambda q, s, r: shards.ThresholdSearch(s, r, "sparsemax").absorb(r), "sums: its shape is (6, 4), must be (6, 3)"),
    (lambda q, s, r: shards.threshold_sums(q, q, r, **WHOLE), "normalizer: is softmax, must be sparsemax"),
    (lambda q, s, r: shards.states(q, q[:, :2], **WHOLE), "key: "),
    (lambda q, s, r: shards.states(q, q, is_causal=1, **WHOLE), "is_causal: is a int"),
    (lambda q, s, r: shards.states(q, q, logits=np.empty((6, 5), np.float32), **WHOLE), "logits: "),
    (lambda q, s, r: shards.Search(r), "states: its dtype is float64, must be whet.STATE"),
    (lambda q, s, r: shards.Search(s, ["none"] * 2), "rule: 2 are given"),
    (lambda q, s, r: shards.Search(s, "target-peak:0.9").absorb(r), "sums: its shape is (6, 4), must be (6, 5)"),
    (lambda q, s, r: shards.sums(q, q, r[:5], **WHOLE), "rows: its shape is (5, 4), must be (6, 4)"),
    (lambda q, s, r: shards.attention(q, q, q, r.astype(np.float32), **WHOLE), "rows: its dtype is float32"),
    (lambda q, s, r: shards.merge_outputs([], []), "outs: none given"),
    (lambda q, s, r: shards.merge_outputs([q], []), "masses: 0 given"),
    (lambda q, s, r: shards.merge_outputs([q, q[1:]], [q[:, 0]] * 2), "outs: one has the shape (5, 4)"),
    (lambda q, s, r: shards.output_sums(q, q[1:], q[:, 0]), "dout: its shape is (5, 4)"),
    (lambda q, s, r: shards.slopes(s, r, q[:5, 0], np.zeros((6, 9))), "mass: its shape is (5,), must be (6,)"),
    (lambda q, s, r: shards.backward(q, q, q, q[1:], np.zeros((6, 13)), **WHOLE), "dout: "),
    (lambda q, s, r: shards.backward(q, q, q, q, np.zeros((6, 9)), **WHOLE), "slopes: its shape is (6, 9)"),
])
def test_wrong_arguments_are_refused_by_name(call, text):
    q = drawn(6, 4)
    states = shards.states(q, q, **WHOLE)
    rows = shards.Search(states).rows
    with pytest.raises((TypeError, ValueError)) as error:
        call(q, states, rows)
    assert str(error.value).startswith(text), str(error.value)


def test_examples_of_docstrings():
    assert doctest.testmod(shards).failed == 0
