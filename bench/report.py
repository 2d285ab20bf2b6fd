"""Bars and tables of a benchmark, as Markdown padded so that a terminal shows it well, and as results.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from bench.timing import Timing


@dataclass(frozen=True)
class Bar:
    text: str
    value: float
    limit: float
    at_most: bool

    @property
    def reached(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def verdict(self) -> str:
        return "ok" if self.reached else "missed"

    @property
    def limit_text(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """The first `left` columns to the left, the others to the right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    padded = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in _columns(row, widths)]
        for row in cells
    ]
    rule = [":" + "-" * (w - 1) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))


def _columns(row: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))


def bar_table(bars: Sequence[Bar]) -> str:
    rows = [(bar.text, f"{bar.value:.2f}", bar.limit_text, bar.verdict) for bar in bars]
    return table(("bar", "reached", "asked", ""), rows)


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    bars: Sequence[Bar]
    timings: dict[str, list[Timing]]  # by shape


def document(title: str, facts: dict[str, str], sections: Sequence[Section], command: str) -> str:
    bars = [bar for section in sections for bar in section.bars]
    parts = [f"# {title}", f"`{command}`", "\n".join(f"- {name}: {fact}" for name, fact in facts.items())]
    parts.append(bar_table(bars))
    for section in sections:
        rows = table(section.headers, section.rows, left=2)
        parts += [f"## {section.title}", section.note, rows]
    return "\n\n".join(parts) + "\n"


def results(
    provenance: dict[str, object], facts: dict[str, str], sections: Sequence[Section]
) -> dict[str, object]:
    """As src/results/results.h has them, and the timings beside."""
    cells = [asdict(s) | {"rows": [[str(cell) for cell in row] for row in s.rows]} for s in sections]
    kind = {"schema": "whet results", "version": 1, "kind": "benchmark"}
    return kind | {"provenance": provenance, "facts": facts, "sections": cells}
