"""results.json of kind "probe", its table for people and its page."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import whet
from whet.probe import analysis
from whet.probe.analysis import CLASSES, HORIZON_WEIGHT, THRESHOLDS, Sample
from whet.probe.measure import Plan
from whet.probe.models import Loaded
from whet.probe.prompts import Prompts

RESULTS = "results.json"
PAGE = "report.html"


def results(command: str, threads: int, loaded: Loaded, prompts: Prompts, plan: Plan,
            samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything that was found, as docs/results.md describes it."""
    return {"schema": "whet results", "version": 1, "kind": "probe",
            "provenance": {"command": command, "whet": whet.version(), "machine": processor(),
                           "target": whet.simd_target(), "threads": threads},
            "model": loaded.facts(),
            "prompts": {"kind": prompts.kind, "example": prompts.draw(min(plan.lengths), 0).text,
                        "per_length": plan.per_length, "seed": prompts.seed, "rows": plan.rows},
            "rule": plan.rule, "horizon_weight": HORIZON_WEIGHT, "thresholds": THRESHOLDS._asdict(),
            "lengths": [_rounded(length) for length in analysis.lengths_of(samples)], "heads": analysis.heads_of(samples)}


def _rounded(length: dict[str, Any]) -> dict[str, Any]:
    """Statistics to six digits, more than their errors leave: half the size of file and page."""
    short = np.vectorize(lambda value: float(f"{value:.6g}"), otypes=[np.float64])
    return {**length, "statistics": {name: {part: short(values) for part, values in parts.items()}
                                     for name, parts in length["statistics"].items()}}


def processor() -> str:
    """As the other kinds of results.json name it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(found: dict[str, Any], lines: int = 12) -> str:
    """For people: how many heads of each class, the mean by length, and the heads that matter, dispersing first."""
    model, heads = found["model"], found["heads"]
    counts = Counter(head["class"] for head in heads)
    named = [f"{counts[name]} {name}" for name in CLASSES if counts[name]]
    text = [f"{model['name']}: {len(heads)} heads in {model['layers']} layers: {', '.join(named)}", "",
            "  tokens  mean entropy  / ln n  largest weight  mean β", *map(_length_line, found["lengths"]), "",
            "  head     class       slope of entropy in ln n  entropy at {:<6} β      horizon".format(
                round(found["lengths"][-1]["tokens"]))]
    longest = found["lengths"][-1]["statistics"]
    shown = analysis.dispersing_first(heads)[:lines]
    text += [_head_line(head, longest) for head in shown]
    rest = len(heads) - len(shown)
    if rest:
        left = sum(head["class"] == "dispersing" for head in heads) - sum(h["class"] == "dispersing" for h in shown)
        text.append(f"  and {rest} more" + (f", {left} of them dispersing" if left > 0 else ""))
    return "\n".join(text)


def _length_line(length: dict[str, Any]) -> str:
    entropy, share, peak, beta = (np.mean(length["statistics"][name]["mean"])
                                  for name in ("entropy", "relative_entropy", "peak", "beta"))
    return f"  {length['tokens']:6.0f}  {entropy:12.2f}  {share:6.2f}  {peak:14.2f}  {beta:6.2f}"


def _head_line(head: dict[str, Any], longest: dict[str, Any]) -> str:
    at = head["layer"], head["head"]
    entropy, beta = (longest[name]["mean"][at] for name in ("entropy", "beta"))
    interval = f" ({head['low']:.2f} to {head['high']:.2f})"
    slope = f"{head['slope']:6.2f}{interval}" if math.isfinite(head["slope"]) else "     –"  # a single length has none
    horizon = f"{head['horizon']:,.0f}" if head["horizon"] < 1e7 else f"{head['horizon']:.0e}"
    return (f"  {head['layer']:>2}.{head['head']:<4}  {head['class']:<10}  {slope}".ljust(49)
            + f"{entropy:5.2f}             {beta:5.2f}  {horizon}")


def draw_page(folder: Path) -> str | None:
    """Has the `whet` command draw report.html. Gives what went wrong, or None."""
    command = _command()
    if command is None:
        return "the whet command isn't installed, which draws it"
    drawn = subprocess.run([command, "report", str(folder)], capture_output=True, text=True)
    if drawn.returncode != 0:
        return (drawn.stderr.strip().splitlines() or [f"whet report ended with {drawn.returncode}"])[-1]
    return None


def _command() -> str | None:
    """The native program: in the package where it is a wheel, otherwise on PATH."""
    inside = os.path.join(os.path.dirname(os.path.abspath(whet.__file__)), "bin", "whet")
    return inside if os.access(inside, os.X_OK) else shutil.which("whet")
