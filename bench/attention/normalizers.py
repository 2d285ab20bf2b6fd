"""Attention of every normalizer beside the paper's rule. Import after timing.prepare_process().

Forward is verified on sampled queries of every head; the gradients of sampled queries too, and those of
keys and values where the shape is small enough to compute all weights in float64. Bounds: an output within 1e-5
of the largest value times the sum of its weights, if that is above 1 (those of sigmoid reach 120 here);
gradients within 1e-4 of the largest, since products of float32 round in another order. Not those of keys and
values under top-k: among thousands of rows one has its K-th logit within a rounding of the next, and another
key is taken than in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.attention.memory import whet_training
from bench.attention.reference import Inputs, Shape, plain, sharpened
from bench.normalizers import ENTMAX, NORMALIZERS, gradient, weights
from bench.report import Bar, Section
from bench.timing import MIN_ROUNDS, Contender, OtherLoad, Timing, progress, ratio, verified_timings
from bench.whet_c import Whet

PAPER = "whet paper"
INPUTS = {"σ 1": plain, "sharpened": sharpened}
TIMES_PAPER, FEW = 1.3, 0.1
SAMPLED_QUERIES = 32
OUTPUT_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
SMALL_WEIGHTS = 1 << 23  # so many in all: dk and dv are verified


@dataclass(frozen=True)
class Rows:
    """Sampled rows of one head in float64."""

    inputs: Inputs
    head: int
    queries: np.ndarray

    @cached_property
    def logits(self) -> np.ndarray:
        q = self.inputs.q[0, self.head, self.queries].astype(np.float64)
        return (q @ self.inputs.k[0, self.head].astype(np.float64).T) / np.sqrt(q.shape[-1])

    def weights(self, normalizer: str) -> np.ndarray:
        return weights(normalizer, self.logits)

    def output(self, normalizer: str) -> np.ndarray:
        return self.weights(normalizer) @ self.inputs.v[0, self.head].astype(np.float64)

    def dlogits(self, normalizer: str, dout: np.ndarray) -> np.ndarray:
        dw = dout[0, self.head, self.queries].astype(np.float64) @ self.inputs.v[0, self.head].T
        return gradient(normalizer, self.logits, dw)


class Problem:
    """One shape with one kind of inputs."""

    def __init__(self, whet: Whet, shape: Shape, kind: str) -> None:
        self._whet = whet
        self.inputs = INPUTS[kind](shape)
        self.out = np.empty_like(self.inputs.q)
        random = np.random.default_rng(0)
        self._dout = random.standard_normal(self.inputs.q.shape, dtype=np.float32)
        step = max(1, shape.queries // SAMPLED_QUERIES)
        self._rows = [Rows(self.inputs, h, np.arange(0, shape.queries, step)) for h in range(shape.heads)]

    def support(self, normalizer: str) -> float:
        """The mean share of keys with weight."""
        return float(np.mean([np.mean(rows.weights(normalizer) > 0) for rows in self._rows]))

    def forward(self, normalizer: str) -> Contender:
        call = self._whet.attention(*self.inputs.arrays, self.out, normalizer=normalizer, threads=1)

        def verify() -> float:
            self.out.fill(np.nan)
            call()
            largest = float(np.abs(self.inputs.v).max())
            shares = []
            for rows in self._rows:
                error = np.abs(self.out[0, rows.head, rows.queries] - rows.output(normalizer)).max(axis=1)
                total = np.maximum(1, rows.weights(normalizer).sum(axis=1))
                shares.append(float(np.max(error / (OUTPUT_BOUND * largest * total))))
            return max(shares)

        return Contender(f"whet {normalizer}", call, verify)

    def training(self, normalizer: str) -> Contender:
        call, found = whet_training(self._whet, self.inputs, self._dout, "none", normalizer)

        def verify() -> float:
            for array in found.values():
                array.fill(np.nan)
            call()
            return self._gradient_share(normalizer, found)

        return Contender(f"whet {normalizer}", call, verify)

    def _gradient_share(self, normalizer: str, found: dict[str, np.ndarray]) -> float:
        scale = 1 / np.sqrt(self.inputs.shape.size)
        k = self.inputs.k[0].astype(np.float64)
        pairs = [
            (found["dq"][0, r.head, r.queries], scale * r.dlogits(normalizer, self._dout) @ k[r.head])
            for r in self._rows
        ]
        shape = self.inputs.shape
        if shape.queries * shape.keys <= SMALL_WEIGHTS and not normalizer.startswith("top-k"):
            every = Rows(self.inputs, 0, np.arange(shape.queries))
            dx = every.dlogits(normalizer, self._dout)
            pairs.append((found["dk"][0, 0], scale * dx.T @ self.inputs.q[0, 0].astype(np.float64)))
            pairs.append((found["dv"][0, 0], every.weights(normalizer).T @ self._dout[0, 0]))
        shares = [
            float(np.abs(ours - truth).max() / (GRADIENT_BOUND * max(np.abs(truth).max(), 1e-3)))
            for ours, truth in pairs
        ]
        return max(shares)

    def paper(self, training: bool) -> Contender:
        """Verified in the sections on rules."""
        if training:
            call: Callable[[], object] = whet_training(self._whet, self.inputs, self._dout, "paper")[0]
        else:
            call = self._whet.attention(*self.inputs.arrays, self.out, rule="paper", threads=1)
        return Contender(PAPER, call, lambda: 0.0)


@dataclass(frozen=True)
class Times:
    shape: Shape
    kind: str
    timings: dict[str, Timing]
    support: dict[str, float]  # by contender: the mean share of keys with weight

    def ratios(self, names: Sequence[str], most_support: float = 1.0) -> list[float]:
        """Times that of the paper's rule."""
        return [
            ratio(self.timings, name, PAPER)
            for name in names
            if name in self.timings and self.support[name] <= most_support
        ]

    def cells(self) -> Iterator[tuple[str, ...]]:
        for name, timing in self.timings.items():
            low, high = timing.quartiles
            yield (
                f"{self.shape}, {self.kind}",
                name,
                f"{self.support[name]:.1%}" if name in self.support else "",
                f"{timing.median * 1e3:.2f}",
                f"{low * 1e3:.2f}–{high * 1e3:.2f}",
                f"{ratio(self.timings, name, PAPER):.2f}",
            )


def _measured(whet: Whet, shape: Shape, kind: str, names: Sequence[str], training: bool) -> Times:
    progress(f"normalizers{', forward + backward' if training else ''}, {shape}, {kind}")
    problem = Problem(whet, shape, kind)
    make = problem.training if training else problem.forward
    timings = verified_timings([problem.paper(training), *map(make, names)], MIN_ROUNDS)
    return Times(shape, kind, timings, {f"whet {name}": problem.support(name) for name in names})


def _section(title: str, note: str, every: Sequence[Times], load: OtherLoad, bars: list[Bar]) -> Section:
    note += f" Other programs kept {load.processors:.2f} processors busy."
    headers = ("heads × length", "contender", "keys with weight", "ms", "quartiles", f"× {PAPER}")
    cells = [row for times in every for row in times.cells()]
    timings = {f"{times.shape}, {times.kind}": list(times.timings.values()) for times in every}
    return Section(title, note, headers, cells, bars, timings)


NOTE = (
    "float32, one thread, against the paper's rule with softmax; logits of standard deviation 1, and those"
    " that the rule sharpens."
)


def forward(whet: Whet, shapes: Sequence[Shape]) -> Section:
    names = ("softmax", *NORMALIZERS)
    with OtherLoad() as load:
        every = [_measured(whet, shape, kind, names, False) for shape in shapes for kind in INPUTS]
    family, named = ([f"whet {name}" for name in some] for some in (ENTMAX, NORMALIZERS))
    few = [value for times in every for value in times.ratios(named, FEW)]
    bars = [
        Bar(f"entmax family / {PAPER}, most", _most(every, family), TIMES_PAPER, at_most=True),
        Bar(f"any normalizer / {PAPER}, most", _most(every, named), TIMES_PAPER, at_most=True),
        Bar(f"weight on under a tenth of the keys / {PAPER}, most", max(few), 1, at_most=True),
    ]
    return _section("Normalizers", NOTE, every, load, bars)


def training(whet: Whet, shapes: Sequence[Shape]) -> Section:
    names = ("softmax", *(name for name in NORMALIZERS if name != "hard"))
    with OtherLoad() as load:
        every = [_measured(whet, shape, kind, names, True) for shape in shapes for kind in INPUTS]
    text = f"forward + backward: entmax family / {PAPER}, most"
    most = _most(every, [f"whet {name}" for name in ENTMAX])
    bars = [Bar(text, most, TIMES_PAPER, at_most=True)]
    return _section("Normalizers, forward + backward", NOTE, every, load, bars)


def _most(every: Sequence[Times], names: Sequence[str]) -> float:
    return max(value for times in every for value in times.ratios(names))
