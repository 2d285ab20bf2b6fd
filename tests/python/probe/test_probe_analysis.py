"""Means, slopes, intervals, horizons and classes against NumPy, tables of Student's t and made-up heads."""

import math

import numpy as np
import pytest
from whet.probe.analysis import STATISTICS, THRESHOLDS, Sample, class_of, dispersing_first, heads_of, lengths_of
from whet.probe.intervals import fit_line, mean_interval, share_interval, t_quantile


def samples(rng, slope, noise=0.05, shape=(2, 3), lengths=(64, 128, 256, 512), per_length=4):
    """Heads whose entropy is 1 + slope ln n, plus noise; all else is constant."""
    made = []
    for length in lengths:
        for _ in range(per_length):
            tokens = length + int(rng.integers(-2, 3))
            statistics = {name: np.full(shape, 0.1) for name in STATISTICS}
            statistics["entropy"] = 1 + slope * math.log(tokens) + noise * rng.normal(size=shape)
            statistics["spread"] = np.full(shape, 6.0)
            made.append(Sample(length, tokens, statistics))
    return made


# Two-sided 95 % and 99 %, from printed tables.
@pytest.mark.parametrize("freedom, expected", [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814),
                                               (30, 2.04227), (120, 1.97993)])
def test_quantiles_of_t(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-5)


def test_other_quantiles_of_t():
    assert t_quantile(4, 0.99) == pytest.approx(4.60409, abs=1e-5)
    assert t_quantile(7, 0.99) == pytest.approx(3.49948, abs=1e-5)
    assert math.isnan(t_quantile(0))


def test_lines_against_numpy(rng):
    x = rng.normal(size=20)
    y = 3 + 2 * x[:, None, None] * np.array([[1, -1]]) + rng.normal(size=(20, 1, 2))
    line = fit_line(x, y)
    for at in np.ndindex(1, 2):
        (slope, _), covariance = np.polyfit(x, y[(slice(None), *at)], 1, cov=True)  # scaled by n - 2
        half = 2.100922 * math.sqrt(covariance[0, 0])
        assert line.slope[at] == pytest.approx(slope, rel=1e-10)
        assert (line.low[at], line.high[at]) == pytest.approx((slope - half, slope + half), rel=1e-6)


def test_intervals_hold_the_truth_as_often_as_they_say(rng):
    slope = np.full((40, 25), 0.3)
    heads = heads_of(samples(rng, slope, shape=slope.shape))
    held = np.mean([head["low"] <= 0.3 <= head["high"] for head in heads])
    assert 0.92 < held < 0.98
    means = [mean_interval(rng.normal(size=4)) for _ in range(1000)]
    assert 0.93 < np.mean([mean.low <= 0 <= mean.high for mean in means]) < 0.97


def test_lines_that_say_nothing():
    assert np.isnan(fit_line(np.array([1.0, 1.0]), np.zeros((2, 3))).slope).all()
    line = fit_line(np.array([1.0, 2.0]), np.array([[1.0], [3.0]]))
    assert line.slope[0] == 2 and np.isnan(line.low[0])
    assert math.isnan(mean_interval(np.array([1.0])).low)


def test_shares():
    assert share_interval(0, 10).low == 0 and share_interval(0, 10).high == pytest.approx(0.27753, abs=1e-5)
    assert share_interval(5, 10)[1:] == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_means_and_errors(rng):
    made = samples(rng, 0.5, lengths=(64, 32))
    first, second = lengths_of(made)
    group = [sample for sample in made if sample.length == 32]
    values = np.stack([sample.statistics["entropy"] for sample in group])
    assert first["tokens"] == np.mean([sample.tokens for sample in group]) < second["tokens"]
    assert first["prompts"] == 4
    np.testing.assert_allclose(first["statistics"]["entropy"]["mean"], values.mean(0), rtol=1e-14)
    np.testing.assert_allclose(first["statistics"]["entropy"]["error"], values.std(0, ddof=1) / 2, rtol=1e-14)
    single = lengths_of(samples(rng, 0.5, per_length=1))[0]["statistics"]["entropy"]
    assert np.isnan(single["error"]).all() and np.isfinite(single["mean"]).all()


def test_heads(rng):
    slope = np.array([[0.8, 0.0, 0.15], [-0.3, 0.25, 0.5]])
    made = samples(rng, slope, noise=0.01)
    for sample in made:
        sample.statistics["first"][1, 2] = 0.7
        sample.statistics["relative_entropy"][0, 0] = 0.95
    heads = heads_of(made)
    assert [head["class"] for head in heads] == ["uniform", "sharp", "sharp", "sharp", "dispersing", "sink"]
    assert [(head["layer"], head["head"]) for head in heads] == list(np.ndindex(2, 3))
    np.testing.assert_allclose([head["slope"] for head in heads], slope.ravel(), atol=0.02)
    assert heads[0]["horizon"] == pytest.approx(1 + math.exp(6))
    assert dispersing_first(heads)[0]["head"] == 1 and dispersing_first(heads)[1]["class"] == "uniform"


def test_thresholds():
    assert class_of(0.5, 0.95, 1, 1, THRESHOLDS) == "sink"
    assert class_of(0.49, 0.9, 1, 1, THRESHOLDS) == "uniform"
    assert class_of(0.1, 0.5, 0.2, 0.01, THRESHOLDS) == "dispersing"
    assert class_of(0.1, 0.5, 0.2, 0.0, THRESHOLDS) == "sharp"
    assert class_of(0.1, 0.5, 0.19, 0.1, THRESHOLDS) == "sharp"
    assert class_of(math.nan, math.nan, math.nan, math.nan, THRESHOLDS) == "sharp"
