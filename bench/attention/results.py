"""Timings of a section of bench.attention, and the table and the bars they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.attention.reference import Shape
from bench.report import Bar, Section
from bench.timing import OtherLoad, Timing, ratio


@dataclass(frozen=True)
class Comparison:
    """A bar on time(a) / time(b), in every shape it applies to."""

    text: str
    a: str
    b: str
    limit: float
    at_most: bool = True
    applies: Callable[[Shape], bool] = lambda _: True

    def bar(self, shape: Shape, timings: dict[str, Timing]) -> Bar | None:
        if self.a not in timings or self.b not in timings or not self.applies(shape):
            return None
        text = f"× {self.b}" if self.at_most else f"× as fast as {self.a}"
        return Bar(text, ratio(timings, self.a, self.b), self.limit, self.at_most)

    @property
    def row(self) -> str:
        """The contender that the bar is about."""
        return self.a if self.at_most else self.b


@dataclass
class Results:
    """By shape. `amount` is what `unit` counts, for a shape and a contender's name."""

    base: str
    comparisons: Sequence[Comparison]
    unit: str = "GFLOP/s"
    amount: Callable[[Shape, str], float] = lambda shape, _: shape.flops
    timings: dict[Shape, dict[str, Timing]] = field(default_factory=dict)

    def bars(self) -> list[Bar]:
        """The worst shape of each comparison."""
        worst = []
        for c in self.comparisons:
            found = [b for s, t in self.timings.items() if (b := c.bar(s, t)) is not None]
            if found:
                value = (max if c.at_most else min)(bar.value for bar in found)
                worst.append(Bar(c.text, value, c.limit, c.at_most))
        return worst

    def section(self, title: str, note: str, load: OtherLoad) -> Section:
        every = [t for timings in self.timings.values() for t in timings.values()]
        cpu_share = max(t.cpu_share for t in every if t.threads == 1)
        note += (
            f" One-thread contenders used at most {cpu_share:.2f} CPU seconds per second; other"
            f" programs kept {load.processors:.2f} processors busy."
        )
        headers = (
            *("heads × length", "contender", "threads", "ms", "quartiles", self.unit),
            *(f"× {self.base}", "bar", ""),
        )
        rows = [row for shape in self.timings for row in self._rows(shape)]
        timings = {str(shape): list(named.values()) for shape, named in self.timings.items()}
        return Section(title, note, headers, rows, self.bars(), timings)

    def _rows(self, shape: Shape) -> Iterator[tuple[str, ...]]:
        timings = self.timings[shape]
        for timing in timings.values():
            low, high = timing.quartiles
            about = [c.bar(shape, timings) for c in self.comparisons if c.row == timing.name]
            bars = [bar for bar in about if bar is not None]
            yield (
                str(shape),
                timing.name,
                str(timing.threads),
                f"{timing.median * 1e3:.3f}",
                f"{low * 1e3:.3f}–{high * 1e3:.3f}",
                f"{self.amount(shape, timing.name) / timing.median / 1e9:.1f}",
                f"{ratio(timings, timing.name, self.base):.2f}",
                "; ".join(f"{bar.value:.2f} {bar.text} {bar.limit_text}" for bar in bars),
                "; ".join(bar.verdict for bar in bars),
            )
