"""What bench.rows measures, one function a section. Import after timing.prepare_process()."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.report import Bar, Section
from bench.rows import normalizers
from bench.rows.contenders import (
    COMPILE,
    EAGER,
    JAX,
    PLAIN,
    TORCH_BACKWARD,
    TORCH_BOTH,
    WHET_BACKWARD,
    WHET_BOTH,
    backward_contenders,
    forward_contenders,
    thread_contenders,
)
from bench.rows.memory import COUNTING_ERROR, extra_bytes
from bench.rows.reference import Reference, peaked_rows, sharp_rows
from bench.timing import (
    IDLE,
    BenchmarkError,
    OtherLoad,
    Timing,
    busy_neighbour,
    progress,
    ratio,
    verified_timings,
)
from bench.whet_c import Whet

PAPER, NONE = "whet paper", "whet none"
TARGETS = (0.1, 0.5, 1.0, 2.0)
TARGET_FRACTIONS = (0.9, 0.5, 0.1)  # of the mean entropy
THREADED_ELEMENTS = 4 << 20
ONE_AND_TWO = [(f"{name}, 1", f"{name}, 2") for name in (NONE, PAPER)]
MEMORY_RULES = ("none", "paper", "target-entropy:0.5")
# The last two have rows so long that the error of counting doesn't matter.
MEMORY_CASES = (((1, 131072), 1), ((8, 131072), 2), ((1, 1 << 23), 1), ((4, 1 << 22), 2))

Shape = tuple[int, int]


@dataclass(frozen=True)
class Setting:
    whet: Whet
    library: Path
    shapes: Sequence[Shape]
    rounds: int
    cpus: Sequence[int]


class Results:
    """Timings of one section by shape, bars of single shapes, and the table they make."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._timings: dict[Shape, dict[str, Timing]] = {}
        self._bars: dict[tuple[Shape, str], Bar] = {}

    def add(self, shape: Shape, timings: dict[str, Timing]) -> None:
        self._timings[shape] = timings

    def bar(self, shape: Shape, name: str, bar: Bar) -> None:
        self._bars[shape, name] = bar

    def median_ratio(self, a: str, b: str) -> float:
        return median(ratio(timings, a, b) for timings in self._timings.values())

    def worst(self, text: str, part_of_name: str = "") -> Bar:
        """The bars of single shapes, as one."""
        bars = [bar for (_, name), bar in self._bars.items() if part_of_name in name]
        worst = max if bars[0].at_most else min
        return Bar(text, worst(bar.value for bar in bars), bars[0].limit, bars[0].at_most)

    def section(
        self, setting: Setting, title: str, note: str, load: OtherLoad, bars: Sequence[Bar]
    ) -> Section:
        every = [t for timings in self._timings.values() for t in timings.values()]
        cpu_share = max(t.cpu_share for t in every if t.threads == 1)
        faults = max(t.faults for t in every)
        note += (
            f" One-thread contenders used at most {cpu_share:.2f} CPU seconds per second; calls had"
            f" at most {faults:.0f} page faults on average; other programs kept"
            f" {load.processors:.2f} processors busy."
        )
        headers = (
            *("shape", "contender", "target", "threads", "ns/element", "quartiles"),
            *(f"× {self._base}", "bar", ""),
        )
        rows = self._rows(setting.whet.target())
        timings = {_text(shape): list(named.values()) for shape, named in self._timings.items()}
        return Section(title, note, headers, rows, bars, timings)

    def _rows(self, target: str) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for shape, timings in self._timings.items():
            scale = 1e9 / math.prod(shape)
            for timing in timings.values():
                low, high = timing.quartiles
                bar = self._bars.get((shape, timing.name))
                rows.append(
                    (
                        _text(shape),
                        timing.name,
                        target if timing.name.startswith("whet") else "",
                        str(timing.threads),
                        f"{timing.median * scale:.3f}",
                        f"{low * scale:.3f}–{high * scale:.3f}",
                        f"{ratio(timings, timing.name, self._base):.2f}",
                        f"{bar.value:.2f} {bar.text} {bar.limit_text}" if bar else "",
                        bar.verdict if bar else "",
                    )
                )
        return rows


def _text(shape: Shape) -> str:
    return f"{shape[0]}×{shape[1]}"


def _forward(setting: Setting, reference: Reference, rules: Sequence[str]) -> dict[str, Timing]:
    with torch.no_grad():
        contenders = forward_contenders(setting.whet, reference, rules)
        return verified_timings(contenders, setting.rounds)


def sharp(setting: Setting) -> Section:
    results, notes = Results(PLAIN), ["float32, one thread"]
    with OtherLoad() as load:
        for shape in setting.shapes:
            progress(f"softmax, rows that the rule sharpens, {_text(shape)}")
            reference = Reference(sharp_rows(*shape))
            notes.append(_beta_note(shape, reference))
            mean = float(reference.entropy.mean())
            targets = [*TARGETS, *(fraction * mean for fraction in TARGET_FRACTIONS)]
            rules = [f"target-entropy:{target:.4g}" for target in targets]
            timings = _forward(setting, reference, ["none", "paper", *rules])
            results.add(shape, timings)
            paper = ratio(timings, PAPER, PLAIN)
            results.bar(shape, PAPER, Bar(f"× {PLAIN}", paper, 0.95, at_most=True))
            for name in (f"whet {rule}" for rule in rules):
                value = ratio(timings, name, NONE)
                results.bar(shape, name, Bar(f"× {NONE}", value, 4, at_most=True))
    title, note = "Softmax, rows that the paper's rule sharpens", "; ".join(notes) + "."
    return results.section(setting, title, note, load, _sharp_bars(results))


def _beta_note(shape: Shape, reference: Reference) -> str:
    share = float(np.mean(reference.beta > 1.2))
    if share < 0.9:
        raise BenchmarkError(f"{_text(shape)}: only {share:.0%} of rows have beta > 1.2")
    return f"{_text(shape)}: mean β {reference.beta.mean():.2f}, {share:.0%} of rows above 1.2"


def _sharp_bars(results: Results) -> list[Bar]:
    middle = results.median_ratio
    return [
        Bar(f"{PAPER} × {PLAIN}, median over shapes", middle(PAPER, PLAIN), 0.80, at_most=True),
        results.worst(f"{PAPER} × {PLAIN}, worst shape", PAPER),
        Bar(f"{EAGER} × {PAPER}, median over shapes", middle(EAGER, PAPER), 5, at_most=False),
        Bar(f"{COMPILE} × {PAPER}, median over shapes", middle(COMPILE, PAPER), 4.5, at_most=False),
        Bar(f"{JAX} × {PAPER}, median over shapes", middle(JAX, PAPER), 3.5, at_most=False),
        Bar(f"{NONE} × {PLAIN}, median over shapes", middle(NONE, PLAIN), 0.50, at_most=True),
        results.worst(f"whet target-entropy × {NONE}, worst shape and target", "target-entropy"),
    ]


def peaked(setting: Setting) -> Section:
    results = Results(PLAIN)
    with OtherLoad() as load:
        for shape in setting.shapes:
            progress(f"softmax, rows with beta = 1, {_text(shape)}")
            reference = Reference(peaked_rows(*shape))
            if np.any(reference.beta != 1):
                raise BenchmarkError(f"{_text(shape)}: the rule sharpens the peaked rows")
            rules = ["none", "paper", "target-entropy:0.1"]
            results.add(shape, _forward(setting, reference, rules))
    title, note = "Softmax, rows already sharp (β = 1)", "float32, one thread."
    return results.section(setting, title, note, load, [])


def backward(setting: Setting) -> Section:
    results = Results(TORCH_BACKWARD)
    with OtherLoad() as load:
        for shape in setting.shapes:
            progress(f"backward, {_text(shape)}")
            contenders = backward_contenders(setting.whet, Reference(sharp_rows(*shape)))
            results.add(shape, verified_timings(contenders, setting.rounds))
    bars = [
        Bar(f"{peer} × {ours}, median over shapes", results.median_ratio(peer, ours), 3, False)
        for peer, ours in ((TORCH_BACKWARD, WHET_BACKWARD), (TORCH_BOTH, WHET_BOTH))
    ]
    note = "float32, one thread, through the paper's rule; autograd on the rule in torch eager."
    return results.section(setting, "Softmax backward", note, load, bars)


def two_threads(setting: Setting) -> Section:
    with OtherLoad() as load:
        results = Results(f"{PLAIN}, 1")
        for shape, timings in _threaded(setting, "two threads"):
            results.add(shape, timings)
            for one, two in ONE_AND_TWO:
                value = ratio(timings, one, two)
                results.bar(shape, two, Bar("× as fast as one", value, 1.8, at_most=False))
    if load.processors > IDLE:
        progress(f"the machine was not idle: others kept {load.processors:.2f} processors busy")
    bars = [results.worst("two threads: times as fast as one, worst")]
    return results.section(setting, "Two threads, idle machine", "float32.", load, bars)


def busy(setting: Setting) -> Section:
    with OtherLoad() as load, busy_neighbour(setting.cpus[-1]):
        results = Results(f"{PLAIN}, 1")
        for shape, timings in _threaded(setting, "two threads beside a busy neighbour"):
            results.add(shape, timings)
            for one, two in ONE_AND_TWO:
                value = ratio(timings, two, one)
                results.bar(shape, two, Bar("× the time of one", value, 1.1, at_most=True))
    bars = [results.worst("two threads beside a busy neighbour × the time of one, worst")]
    note = "float32. A process of this benchmark (counted below) keeps one of two processors busy."
    return results.section(setting, "Two threads beside a busy neighbour", note, load, bars)


def _threaded(setting: Setting, text: str) -> Iterator[tuple[Shape, dict[str, Timing]]]:
    for shape in setting.shapes:
        if math.prod(shape) >= THREADED_ELEMENTS:
            progress(f"{text}, {_text(shape)}")
            contenders = thread_contenders(setting.whet, Reference(sharp_rows(*shape)))
            # Long enough to span many turns of the scheduler.
            yield shape, verified_timings(contenders, setting.rounds, min_seconds=0.050)


def memory(setting: Setting) -> Section:
    rows, worst = [], 0.0
    for shape, threads in MEMORY_CASES:
        progress(f"memory, {_text(shape)}, threads: {threads}")
        allowed = shape[1] * 4 * threads
        peers = ("torch-softmax", "torch-rule") if threads == 1 else ()
        for contender in (*MEMORY_RULES, *peers):
            extra = extra_bytes(contender, setting.library, shape, threads)
            if contender in MEMORY_RULES:
                worst = max(worst, (extra - COUNTING_ERROR) / allowed)
            row = (_text(shape), contender, threads, f"{extra / 1024:.0f}", f"{allowed / 1024:.0f}")
            rows.append(row)
    bar = Bar("extra memory of whet / one row per thread, worst", worst, 1, at_most=True)
    headers = ("shape", "contender", "threads", "extra KiB", "one row per thread, KiB")
    note = (
        "Growth of a new process's peak in its first call of that size, good to about 256 KiB"
        " (the bar allows for that)."
    )
    return Section("Memory of a call beyond its arguments", note, headers, rows, [bar], {})


def all_normalizers(setting: Setting) -> Section:
    return normalizers.forward(setting.whet, setting.shapes, setting.rounds)


def normalizers_backward(setting: Setting) -> Section:
    return normalizers.backward(setting.whet, setting.shapes[:3], setting.rounds)


ALL = (sharp, peaked, backward, all_normalizers, normalizers_backward, two_threads, busy, memory)
