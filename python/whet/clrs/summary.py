"""Means over runs with their intervals, and paired tests between variants on the same problems.

Runs of one variant that differ in their seed are its samples: problems of one run share its weights, so that the interval
of several runs is Student's t over their means. Of a single run it is that of its problems (Wilson's for shares), which
says nothing of other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.clrs.evaluation import Piece
from whet.probe.intervals import Interval, mean_interval, p_value, share_interval, standard_error

TRAINED = "as trained"


class Result(NamedTuple):
    """One evaluated run: what `whet clrs report` compares."""

    name: str
    variant: str
    seed: int
    hints: bool
    trained_sizes: dict[str, list[int]]  # by algorithm
    pieces: Sequence[Piece]
    at_test: Any  # the Sharpening that the run has by itself


def reduced(found: dict[str, Any]) -> dict[str, Any]:
    """What a run found in one piece without its single problems: all that several runs together are made of."""
    tokens = mean_interval(_shares(found, "tokens"))
    kept: dict[str, Any] = {name: found[name] for name in ("forced", "errors", "baselines")}
    kept |= {name: np.mean(found[name], axis=-1).round(5).tolist() for name in ("entropy", "sharp_entropy") if name in found}
    return {"problems": len(found["exact"]), "exact": _mean(found, "exact"), "tokens": round(_mean(found, "tokens"), 6),
            "tokens_low": _short(tokens.low), "tokens_high": _short(tokens.high), **kept}


def is_reduced(found: dict[str, Any]) -> bool:
    return "problems" in found


def tasks(results: Sequence[Result]) -> list[dict[str, Any]]:
    """`tasks` of results.json: one entry per algorithm, with every size and variant."""
    algorithms = dict.fromkeys(piece.algorithm for result in results for piece in result.pieces)
    return [_task(algorithm, results) for algorithm in algorithms]


def _task(algorithm: str, results: Sequence[Result]) -> dict[str, Any]:
    own = [result for result in results if algorithm in result.trained_sizes]
    sizes = sorted({piece.size for result in own for piece in result.pieces if piece.algorithm == algorithm})
    return {"algorithm": algorithm, "hints": own[0].hints, "trained_sizes": own[0].trained_sizes[algorithm],
            "sizes": [_size(algorithm, size, own) for size in sizes]}


def _size(algorithm: str, size: int, results: Sequence[Result]) -> dict[str, Any]:
    groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for result in results:
        for piece in result.pieces:
            if (piece.algorithm, piece.size) == (algorithm, size):
                setting = TRAINED if piece.setting == result.at_test else piece.setting.name
                groups.setdefault((result.variant, setting), {})[result.seed] = piece.found
    base = groups.get(("softmax", TRAINED))
    first = next(iter(next(iter(groups.values())).values()))
    return {"size": size, "problems": _problems(first), **first["baselines"],
            "variants": [{"variant": variant, "setting": setting, **_measured(found), **_against(found, base)}
                         for (variant, setting), found in sorted(groups.items(), key=lambda one: one[0][0] != "softmax")]}


def _measured(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    runs = list(found.values())
    exact, tokens = (np.array([_mean(run, name) for run in runs]) for name in ("exact", "tokens"))
    if len(runs) > 1:
        intervals = mean_interval(exact), mean_interval(tokens)
    else:
        (run,), problems = runs, _problems(runs[0])
        intervals = (share_interval(round(exact[0] * problems), problems),
                     Interval(tokens[0], run["tokens_low"], run["tokens_high"]) if is_reduced(run)
                     else mean_interval(_shares(run, "tokens")))
    layers: dict[str, Any] = {name: np.mean([_by_layer(run, name) for run in runs], axis=0).round(5).tolist()
                              for name in ("entropy", "sharp_entropy") if name in runs[0]}
    parts = min(len(run["errors"]) for run in runs)
    return {"runs": len(runs), "exact": _rounded(intervals[0]), "tokens": _rounded(intervals[1]._replace(
        mean=float(tokens.mean()))), "forced": round(float(np.mean([run["forced"] for run in runs])), 5),
            "errors": np.mean([run["errors"][:parts] for run in runs], axis=0).round(5).tolist(), **layers}


def _against(found: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]] | None) -> dict[str, Any]:
    """Paired with plain softmax of the same seeds on the same problems; nothing for softmax itself."""
    shared = sorted(found.keys() & base.keys()) if base is not None and base is not found else []
    if base is None or not shared:
        return {}
    if len(shared) == 1 and any(is_reduced(one[shared[0]]) for one in (found, base)):
        return {}  # the problems of one run are its samples, and they are gone
    return {"against_softmax": {name: paired([_shares(found[seed], name) for seed in shared],
                                             [_shares(base[seed], name) for seed in shared])
                                for name in ("exact", "tokens")}}


def paired(these: Sequence[np.ndarray], those: Sequence[np.ndarray]) -> dict[str, float]:
    """The mean difference, its 95 % interval and the p-value of the two-sided t-test.

    Args:
        these, those: of each run, one share per problem, in the same order. Samples are the runs; the problems if there is
            one run.
    """
    differences = [this - that for this, that in zip(these, those)]
    samples = differences[0] if len(differences) == 1 else np.array([one.mean() for one in differences])
    interval, error = mean_interval(samples), float(standard_error(samples, 0))
    always = float(interval.mean == 0)  # where all differences are the same
    p = p_value(interval.mean / error, samples.size - 1) if error > 0 or math.isnan(error) else always
    return {"difference": round(interval.mean, 5), "low": _short(interval.low), "high": _short(interval.high),
            "p": float(f"{p:.3g}")}


def _problems(run: dict[str, Any]) -> int:
    return run["problems"] if is_reduced(run) else len(run["exact"])


def _by_layer(run: dict[str, Any], name: str) -> Any:
    return run[name] if is_reduced(run) else np.mean(run[name], axis=-1)


def _shares(run: dict[str, Any], name: str) -> np.ndarray:
    """One number per problem; their mean where that is all there is."""
    if is_reduced(run):
        return np.array([run[name]])
    if name == "exact":
        return np.array([one == "1" for one in run["exact"]], np.float64)
    return np.array(run["right"], np.float64) / np.array(run["tokens"])


def _mean(run: dict[str, Any], name: str) -> float:
    if name == "exact" or is_reduced(run):
        return float(_shares(run, name).mean())
    return sum(run["right"]) / sum(run["tokens"])


def _rounded(interval: Interval) -> dict[str, float]:
    return {name: _short(value) for name, value in interval._asdict().items()}


def _short(value: float) -> float:
    return round(value, 5)
