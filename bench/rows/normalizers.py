"""Rows of every normalizer beside whet's plain softmax, torch.softmax and PyPI's entmax package.

Import after timing.prepare_process(). Peers that take hundreds of times as long run on fewer rows, and
ratios are of times per element. What is verified are those rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import entmax
import numpy as np
import torch

from bench.normalizers import (
    ENTMAX,
    NORMALIZERS,
    gradient,
    gradient_share,
    peer_share,
    weights,
    whet_share,
)
from bench.report import Bar, Section
from bench.timing import MIN_ROUNDS, Contender, OtherLoad, Timing, progress, ratio, verified_timings
from bench.whet_c import Whet

PLAIN, TORCH = "whet softmax", "torch.softmax(out=)"
DEVIATIONS = (1, 3, 8)
PEER_ELEMENTS = 1 << 17
ROUNDS = 9
TIMES_PLAIN = 2
# What the package calls it, and how many times as long as whet it may be expected to take at least.
PEERS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], float]] = {
    "sparsemax": ("entmax.sparsemax", lambda x: entmax.sparsemax(x, -1), 100),
    "entmax15": ("entmax.entmax15", lambda x: entmax.entmax15(x, -1), 120),
    "entmax:1.5": ("entmax.entmax_bisect, 1.5", lambda x: entmax.entmax_bisect(x, 1.5, -1), 400),
    "entmax:1.3": ("entmax.entmax_bisect, 1.3", lambda x: entmax.entmax_bisect(x, 1.3, -1), 0),
}

Shape = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """Gaussian rows, some of which the slow peers get."""

    shape: Shape
    deviation: float

    def __str__(self) -> str:
        return f"{self.shape[0]}×{self.shape[1]}, σ {self.deviation:g}"

    @property
    def few(self) -> int:
        return min(self.shape[0], max(1, PEER_ELEMENTS // self.shape[1]))

    def rows(self) -> np.ndarray:
        random = np.random.default_rng([*self.shape, int(self.deviation)])
        return random.standard_normal(self.shape, dtype=np.float32) * np.float32(self.deviation)


@dataclass(frozen=True)
class Times:
    """Of one case; `rows`: those that each contender got."""

    case: Case
    timings: dict[str, Timing]
    rows: dict[str, int]

    def per_element(self, name: str) -> float:
        """Nanoseconds."""
        return self.timings[name].median * 1e9 / (self.rows[name] * self.case.shape[1])

    def times(self, a: str, b: str) -> float:
        return ratio(self.timings, a, b) * self.rows[b] / self.rows[a]


def _name(normalizer: str) -> str:
    return f"whet {normalizer}"


def _whet(whet: Whet, case: Case, x: np.ndarray, out: np.ndarray, normalizer: str) -> Contender:
    call = whet.softmax(x, out, normalizer=normalizer, threads=1)

    def verify() -> float:
        out.fill(np.nan)
        call()
        s = x[: case.few]
        return whet_share(s, out[: case.few], weights(normalizer, s))

    return Contender(_name(normalizer), call, verify)


def _torch_softmax(case: Case, x: np.ndarray, out: np.ndarray) -> Contender:
    x_torch, out_torch = torch.from_numpy(x), torch.from_numpy(out)

    def call() -> object:
        return torch.softmax(x_torch, dim=-1, out=out_torch)

    def verify() -> float:
        call()
        return peer_share(out[: case.few], weights("softmax", x[: case.few]))

    return Contender(TORCH, call, verify)


def _peer(x: np.ndarray, normalizer: str) -> Contender:
    name, function, _ = PEERS[normalizer]
    few = torch.from_numpy(x)

    def call() -> torch.Tensor:
        return function(few)

    return Contender(name, call, lambda: peer_share(call().numpy(), weights(normalizer, x)))


def _forward(whet: Whet, case: Case, rounds: int) -> Times:
    x = case.rows()
    out = np.empty_like(x)
    whole = [_torch_softmax(case, x, out)]
    whole += [_whet(whet, case, x, out, name) for name in ("softmax", *NORMALIZERS)]
    peers = [_peer(x[: case.few], name) for name in PEERS]
    with torch.no_grad():
        timings = verified_timings([*whole, *peers], rounds)
    rows = dict.fromkeys((c.name for c in whole), case.shape[0])
    return Times(case, timings, rows | dict.fromkeys((c.name for c in peers), case.few))


def _whet_backward(
    whet: Whet, case: Case, x: np.ndarray, dout: np.ndarray, normalizer: str
) -> Contender:
    out, din = np.empty_like(x), np.empty_like(x)
    saved = whet.new_saved(len(x), "none", normalizer)
    whet.softmax(x, out, normalizer=normalizer, threads=1, saved=saved)()
    call = whet.backward(x, dout, din, normalizer=normalizer, threads=1, saved=saved)

    def verify() -> float:
        din.fill(np.nan)
        call()
        few = slice(case.few)
        return gradient_share(din[few], gradient(normalizer, x[few], dout[few]), dout[few])

    return Contender(_name(normalizer), call, verify)


def _peer_backward(x: np.ndarray, dout: np.ndarray, normalizer: str) -> Contender:
    name, function, _ = PEERS[normalizer]
    x_torch, dout_torch = torch.from_numpy(x.copy()).requires_grad_(), torch.from_numpy(dout)
    result = function(x_torch)

    def call() -> torch.Tensor:
        return torch.autograd.grad(result, x_torch, dout_torch, retain_graph=True)[0]

    def verify() -> float:
        # What lies within rounding of the threshold may be in or out.
        found, truth = call().numpy(), gradient(normalizer, x, dout)
        share = np.abs(found - truth) / np.abs(dout).max(axis=-1, keepdims=True)
        return float(np.quantile(share, 0.999) / 1e-2)

    return Contender(name, call, verify)


def _backward(whet: Whet, case: Case, rounds: int) -> Times:
    x = case.rows()
    dout = np.random.default_rng(0).standard_normal(x.shape, dtype=np.float32)
    few = slice(case.few)
    whole = [_whet_backward(whet, case, x, dout, name) for name in ("softmax", *NORMALIZERS)]
    peers = [_peer_backward(x[few], dout[few], name) for name in PEERS]
    timings = verified_timings([*whole, *peers], rounds)
    rows = dict.fromkeys((c.name for c in whole), case.shape[0])
    return Times(case, timings, rows | dict.fromkeys((c.name for c in peers), case.few))


def _cells(times: Times) -> Iterator[tuple[str, ...]]:
    for name, timing in times.timings.items():
        yield (
            str(times.case),
            name,
            str(times.rows[name]),
            f"{times.per_element(name):.3f}",
            f"{times.times(name, PLAIN):.2f}",
            f"{timing.error_share:.2f}",
        )


def _section(title: str, note: str, every: Sequence[Times], load: OtherLoad, bars: list[Bar]) -> Section:
    note += f" Other programs kept {load.processors:.2f} processors busy."
    headers = ("shape", "contender", "rows", "ns/element", f"× {PLAIN}", "error / allowed")
    cells = [row for times in every for row in _cells(times)]
    timings = {str(times.case): list(times.timings.values()) for times in every}
    return Section(title, note, headers, cells, bars, timings)


def _peer_bars(every: Sequence[Times], text: str = "") -> Iterator[Bar]:
    for normalizer, (peer, _, limit) in PEERS.items():
        least = min(times.times(peer, _name(normalizer)) for times in every)
        yield Bar(f"{peer} / {_name(normalizer)}{text}, least", least, limit, at_most=False)


def forward(whet: Whet, shapes: Sequence[Shape], rounds: int) -> Section:
    every = []
    with OtherLoad() as load:
        for case in (Case(shape, deviation) for shape in shapes for deviation in DEVIATIONS):
            progress(f"normalizers, {case}")
            every.append(_forward(whet, case, max(MIN_ROUNDS, min(rounds, ROUNDS))))
    bars = list(_peer_bars(every))
    for name in ENTMAX[:3]:
        worst = max(times.times(_name(name), PLAIN) for times in every)
        bars.append(Bar(f"{_name(name)} / {PLAIN}, most", worst, TIMES_PLAIN, at_most=True))
    note = (
        f"float32, one thread, Gaussian rows of standard deviation σ. The entmax package gets at most"
        f" {PEER_ELEMENTS} elements. Medians over all shapes, times {PLAIN}: {_medians(every)}."
    )
    return _section("Normalizers", note, every, load, bars)


def _medians(every: Sequence[Times]) -> str:
    names = (TORCH, *map(_name, NORMALIZERS))
    found = ((name, median(times.times(name, PLAIN) for times in every)) for name in names)
    return ", ".join(f"{name} {value:.2f}" for name, value in found)


def backward(whet: Whet, shapes: Sequence[Shape], rounds: int) -> Section:
    every = []
    with OtherLoad() as load:
        for case in (Case(shape, 3) for shape in shapes):
            progress(f"normalizers, backward, {case}")
            every.append(_backward(whet, case, max(MIN_ROUNDS, min(rounds, ROUNDS))))
    note = (
        "float32, one thread, from saved rows; autograd of the entmax package, backward alone. Medians"
        f" over all shapes, times {PLAIN}:"
        f" {', '.join(f'{n} {median(t.times(_name(n), PLAIN) for t in every):.2f}' for n in NORMALIZERS)}."
    )
    return _section("Normalizers, backward", note, every, load, [])
