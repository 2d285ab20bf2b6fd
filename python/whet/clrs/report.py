"""results.json of kind "clrs", its table for people and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import whet
from whet.clrs import summary
from whet.clrs.evaluation import Piece
from whet.clrs.files import METRICS, read_lines
from whet.clrs.summary import TRAINED, Result
from whet.clrs.training import Run
from whet.probe.files import write_json
from whet.probe.report import PAGE, RESULTS, draw_page, processor

__all__ = ["PAGE", "RESULTS", "result_of", "results", "run_facts", "table", "write", "write_json"]


def result_of(run: Run, pieces: Sequence[Piece]) -> Result:
    sizes = {algorithm: run.recipe.trained_sizes(algorithm) for algorithm in run.recipe.algorithms}
    return Result(run.folder.name, run.recipe.variant, run.recipe.seed, run.recipe.hints, sizes, pieces, run.recipe.at_test)


def run_facts(run: Run) -> dict[str, Any]:
    """`runs[i]` of results.json."""
    lines = read_lines(run.folder / METRICS)
    return {"name": run.folder.name, "variant": run.recipe.variant, "seed": run.recipe.seed, "step": run.step,
            "parameters": run.model.count(), "recipe": run.recipe.settings(),
            "metrics": [[line["step"], round(line["loss"], 5), round(line["accuracy"], 5)] for line in lines]}


def results(command: str, threads: int, facts: Sequence[dict[str, Any]], evaluated: Sequence[Result]) -> dict[str, Any]:
    """Everything that was found, as docs/results.md describes it. `facts` are run_facts of each run."""
    return {"schema": "whet results", "version": 1, "kind": "clrs",
            "provenance": {"command": command, "whet": whet.version(), "machine": processor(),
                           "target": whet.simd_target(), "threads": threads},
            "runs": list(facts), "tasks": summary.tasks(evaluated)}


def table(found: dict[str, Any], most: int = 12) -> str:
    """For people: exact matches and right tokens in percent, by size and variant; trained sizes have a star."""
    return "\n\n".join(_task_table(task, most) for task in found["tasks"])


def _task_table(task: dict[str, Any], most: int) -> str:
    sizes = _chosen(task["sizes"], most)
    names = list(dict.fromkeys((one["variant"], one["setting"]) for size in sizes for one in size["variants"]))
    titles = [variant if setting == TRAINED else f"{variant}, {setting} at test" for variant, setting in names]
    wide = max(map(len, [*titles, "another's answer"]))
    head = " ".join(f"{size['size']}{'*' if size['size'] in task['trained_sizes'] else ''}".rjust(7) for size in sizes)
    name = task["algorithm"] + " with hints" * task["hints"]
    lines = [f"{name}: exact matches / right tokens, %; * trained sizes", "", f"  {'size'.ljust(wide)} {head}"]
    for (variant, setting), title in zip(names, titles):
        found = [next((one for one in size["variants"] if (one["variant"], one["setting"]) == (variant, setting)), None)
                 for size in sizes]
        cells = ["" if one is None else _percent(one["exact"]["mean"], one["tokens"]["mean"]) for one in found]
        lines.append(f"  {title.ljust(wide)} {' '.join(cell.rjust(7) for cell in cells)}")
    for name, title in (("chance", "another's answer"), ("copy", "copy the input")):
        cells = [_percent(size[name]["exact"], size[name]["tokens"]) for size in sizes]
        lines.append(f"  {title.ljust(wide)} {' '.join(cell.rjust(7) for cell in cells)}")
    return "\n".join(lines)


def _percent(exact: float, tokens: float) -> str:
    return f"{100 * exact:.0f}/{100 * tokens:.0f}"


def _chosen(sizes: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many; those where most was measured (--with-sizes) and, of the others, the first and the last."""
    least = min(len(size["variants"]) for size in sizes)
    kept = [size for size in sizes if len(size["variants"]) > least]
    if len(kept) > most - 2:
        return _spread(sizes, most)
    others = _spread([size for size in sizes if len(size["variants"]) == least], most - len(kept))
    return sorted([*kept, *others], key=lambda size: int(size["size"]))


def _spread(sizes: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many, the first and the last among them."""
    if len(sizes) <= most:
        return sizes
    return [sizes[round(number * (len(sizes) - 1) / (most - 1))] for number in range(most)]


def write(folder: Path, found: dict[str, Any]) -> str | None:
    """Writes results.json and has the page drawn. Gives what went wrong with the page, or None."""
    write_json(folder / RESULTS, found)
    return draw_page(folder)
