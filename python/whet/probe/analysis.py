"""From the statistics of each prompt to what is said of each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.horizon import horizon
from whet.probe.intervals import fit_line, standard_error

STATISTICS = ("entropy", "relative_entropy", "peak", "first", "spread", "beta", "sharp_entropy", "sharp_peak")
CLASSES = ("dispersing", "sharp", "sink", "uniform")
HORIZON_WEIGHT = 0.5


class Thresholds(NamedTuple):
    """What a head must reach to be of a class, in this order; what reaches none of them is sharp."""

    sink: float = 0.5  # weight on the first key
    uniform: float = 0.9  # entropy / ln n
    dispersing: float = 0.2  # slope of entropy against ln n, with its interval above 0


THRESHOLDS = Thresholds()


class Sample(NamedTuple):
    """What one prompt gave."""

    length: int  # tokens asked for
    tokens: int  # tokens it has
    statistics: dict[str, np.ndarray]  # by name, (layers, heads)


def lengths_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """`lengths` of results.json: mean and standard error over the prompts of each length."""
    entries = []
    for length in sorted({sample.length for sample in samples}):
        group = [sample for sample in samples if sample.length == length]
        statistics = {}
        for name in STATISTICS:
            values = np.stack([sample.statistics[name] for sample in group])
            statistics[name] = {"mean": values.mean(axis=0), "error": standard_error(values, axis=0)}
        entries.append({"tokens": float(np.mean([sample.tokens for sample in group])), "prompts": len(group),
                        "statistics": statistics})
    return entries


def heads_of(samples: Sequence[Sample], thresholds: Thresholds = THRESHOLDS) -> list[dict[str, Any]]:
    """`heads` of results.json: class, growth of the entropy and horizon, layer by layer.

    The slope is that of the entropy against ln(tokens) over all prompts of all lengths. The horizon, the number of
    keys beyond which the head can give none more than half of its weight, is that of the mean spread at the longest
    length; class by `class_of`, from the means there.
    """
    line = fit_line(np.log([sample.tokens for sample in samples]),
                    np.stack([sample.statistics["entropy"] for sample in samples]))
    longest = lengths_of(samples)[-1]["statistics"]
    first, share, spread = (longest[name]["mean"] for name in ("first", "relative_entropy", "spread"))
    # A NaN in the logits leaves NaN here; the head is then sharp by none of the tests and its horizon null.
    reach = np.where(spread >= 0, horizon(np.maximum(np.nan_to_num(spread), 0.0), HORIZON_WEIGHT), np.nan)
    heads = []
    for layer, head in np.ndindex(first.shape):
        at = layer, head
        heads.append({"layer": layer, "head": head,
                      "class": class_of(float(first[at]), float(share[at]), float(line.slope[at]), float(line.low[at]),
                                        thresholds),
                      "slope": float(line.slope[at]), "low": float(line.low[at]), "high": float(line.high[at]),
                      "horizon": float(reach[at])})
    return heads


def class_of(first: float, share: float, slope: float, low: float, thresholds: Thresholds) -> str:
    """sink: keeps its weight on the first key; uniform: looks at everything alike; dispersing: its entropy grows with
    ln n; sharp: none of these.

    `first` is the weight on the first key and `share` the entropy as a part of ln n, at the longest length.
    """
    if first >= thresholds.sink:
        return "sink"
    if share >= thresholds.uniform:
        return "uniform"
    return "dispersing" if slope >= thresholds.dispersing and low > 0 else "sharp"


def dispersing_first(heads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dispersing heads first, the steepest of each class first."""
    def order(head: dict[str, Any]) -> tuple[bool, float]:
        return head["class"] != "dispersing", -head["slope"] if math.isfinite(head["slope"]) else math.inf

    return sorted(heads, key=order)
