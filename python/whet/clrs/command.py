"""`whet-clrs`: does a decoder that is trained with a rule hold up at sizes it never saw?"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.clrs import data, options
from whet.clrs.errors import ClrsError
from whet.clrs.workers import Joined, Published, Workers
from whet.probe import program

if TYPE_CHECKING:
    from whet.clrs.loop import Step
    from whet.clrs.model import Sharpening
    from whet.clrs.training import Recipe

NAME = "whet-clrs"

_DESCRIPTION = """\
Trains a small decoder on the textual algorithms of CLRS-Text, its attention sharpened by a rule in training, at test or
both, and measures exact matches by size: at sizes it was trained on and beyond them.
"""

_EPILOG = """\
A killed training or evaluation goes on where it was when the same line is run again. Under torchrun, train and finetune
use all of its processes.

examples:
  whet-clrs --quick                                          a few minutes, ending in a page
  whet-clrs train --out runs/softmax-0                       insertion_sort at the published sizes, plain softmax
  whet-clrs train --out runs/paper-0 --variant paper         the paper's rule in all heads
  whet-clrs eval runs/softmax-0 --with paper --with log-length:32 --per-layer
  whet-clrs sweep --out sweep --variants softmax,paper,learned:log-power,entmax15 --seeds 0-4
  whet-clrs report sweep --out results/clrs
  whet-clrs generate --algorithm all --split val --out val.jsonl
  whet-clrs finetune --model smollm2 --rule paper --out runs/smollm2
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    program.run(NAME, _main, arguments)


def _main(arguments: Sequence[str]) -> None:
    parser = options.parser(NAME, _DESCRIPTION, _EPILOG)
    chosen = parser.parse_args(arguments)
    chosen.line = program.line_of(NAME, arguments)
    if chosen.quick == (chosen.command is not None):
        parser.error("give a command, or --quick; whet-clrs --help lists them")
    if chosen.quick:
        from whet.clrs.quick import quick

        quick(chosen.out, chosen.line)
    else:
        _COMMANDS[chosen.command](chosen)


def _generate(chosen: argparse.Namespace) -> None:
    names = _algorithms(chosen.algorithm)
    if chosen.split:
        if chosen.sizes:
            raise ClrsError("--split has its own sizes, samples and seeds; leave out --sizes")
        found = data.tables(chosen.split)
        jobs = [Published([(name, size, seed) for size in found.sizes[name] for seed in found.seeds], found.samples,
                          chosen.hints) for name in names]
    else:
        jobs = [Published([(name, size, chosen.seed) for size in chosen.sizes or [16]], chosen.samples, chosen.hints)
                for name in names]
    if chosen.out is None:
        for line in _lines(jobs, chosen.hints):
            print(line)
    else:
        _write_lines(chosen.out, _lines(jobs, chosen.hints))


def _lines(jobs: Sequence[Published], hints: bool) -> Iterable[str]:
    with Workers(Joined(list(jobs))) as found:
        wanted = (one for job in jobs for one in job.wanted)
        for (_, _, seed), problems in zip(wanted, found):
            for problem in problems:
                yield data.example_line(problem, seed, hints)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    """All of them, or nothing under this name."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        unfinished.replace(path)
    except OSError as error:
        raise ClrsError(f"{path}: can't be written ({error.strerror}); give another --out") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _train(chosen: argparse.Namespace) -> None:
    from whet.clrs import variants
    from whet.clrs.training import train

    program.set_threads(chosen.threads)
    layers, heads = (None if one is None else tuple(one) for one in (chosen.layers_with, chosen.heads_with))
    recipe = recipe_of(chosen, chosen.seed, variants.variant(chosen.variant, layers, heads), chosen.when)
    progress = program.Progress(silent=int(os.environ.get("RANK", "0")) > 0)
    train(chosen.out, recipe, chosen.workers, steps_shown(progress))
    progress.done()
    progress.say(f"{chosen.out} holds the run; {NAME} eval {chosen.out} measures it")


def recipe_of(chosen: argparse.Namespace, seed: int, variant: dict[str, Any], when: str = "both") -> Recipe:
    """The recipe that options of `train` and `sweep` describe."""
    from whet.clrs.training import Recipe

    shared = {name: getattr(chosen, name) for name in ("hints", "tokens", "width", "layers", "heads", "hidden", "positions",
                                                       "embedding", "attention", "dtype", "batch", "steps", "rate",
                                                       "warmup", "weight_decay", "clip")}
    return Recipe(algorithms=tuple(_algorithms(chosen.algorithm)), sizes=tuple(chosen.sizes), seed=seed, when=when, **shared,
                  **variant)


def steps_shown(progress: program.Progress, name: str = "") -> Any:
    """A listener of a training that says how it goes."""
    def show(step: Step) -> None:
        left = f"{name}step {step.step:,} of {step.steps:,}: loss {step.loss:.4f}, {100 * step.accuracy:.2f} % of tokens"
        progress.step(f"{left}, {step.tokens_per_second:,.0f} tokens/s")

    return show


def _eval(chosen: argparse.Namespace) -> None:
    from whet.clrs import report, training
    from whet.clrs.evaluation import evaluate
    from whet.clrs.sweep import remember

    threads = program.set_threads(chosen.threads)
    run = training.load(chosen.run)
    progress = program.Progress()
    plan = plan_of(chosen, run.recipe)
    pieces = evaluate(run, plan, chosen.workers, pieces_shown(progress))
    remember(run, plan)
    progress.done()
    found = report.results(chosen.line, threads, [report.run_facts(run)], [report.result_of(run, pieces)])
    conclude(chosen.run, found, chosen.json, progress)


def plan_of(chosen: argparse.Namespace, recipe: Recipe) -> Any:
    """What options of `eval` and `sweep` ask for."""
    from whet.clrs.evaluation import Plan

    others_at = None if chosen.with_sizes is None else sorted(set(chosen.with_sizes) & set(chosen.eval_sizes))
    return Plan(chosen.eval_sizes, settings_of(recipe, chosen.added, chosen.per_layer), samples=chosen.samples,
                others_at=others_at)


def settings_of(recipe: Recipe, added: Sequence[str], per_layer: bool) -> list[Sharpening]:
    """What a run of this recipe has at test, then others in its place."""
    from whet.clrs import model, variants

    found = [recipe.at_test]
    for name in added:
        other = variants.sharpening(name)
        found += [other, *(model.per_layer(other, recipe.layers) if per_layer and not other.plain else [])]
    return list(dict.fromkeys(found))


def pieces_shown(progress: program.Progress, name: str = "") -> Any:
    """A listener of an evaluation that says how it goes."""
    def show(done: int, all: int, piece: Any) -> None:
        from whet.clrs.evaluation import shares

        exact = shares(piece.found)["exact"]
        progress.step(f"{name}{done} of {all}: {piece.algorithm} of {piece.size}, {piece.setting.name}: "
                      f"{100 * exact:.1f} % exact")

    return show


def conclude(folder: Path, found: dict[str, Any], as_json: bool, progress: program.Progress) -> None:
    """Writes results and page, prints the table."""
    from whet.clrs import report

    problem = report.write(folder, found)
    if as_json:
        print((folder / report.RESULTS).read_text(encoding="utf-8"), end="")
    else:
        print(report.table(found))
    shown = f"{folder / report.PAGE} shows them" if problem is None else f"no page: {problem}"
    progress.say(f"\n{folder / report.RESULTS} has the numbers, {shown}")


def _sweep(chosen: argparse.Namespace) -> None:
    from whet.clrs.sweep import sweep

    sweep(chosen)


def _report(chosen: argparse.Namespace) -> None:
    from whet.clrs import files, report
    from whet.clrs.sweep import evaluated

    runs, found = evaluated(chosen.runs)
    results = report.results(chosen.line, 1, runs, found)
    files.make_folder(chosen.out)
    conclude(chosen.out, results, chosen.json, program.Progress())


def _finetune(chosen: argparse.Namespace) -> None:
    from whet.clrs.finetune import finetune

    chosen.algorithm = _algorithms(chosen.algorithm)
    finetune(chosen)


def _algorithms(names: Sequence[str]) -> list[str]:
    found = list(data.algorithms()) if list(names) == ["all"] else list(dict.fromkeys(names))
    data.check_algorithms(found)
    return found


_COMMANDS = {"generate": _generate, "train": _train, "eval": _eval, "sweep": _sweep, "report": _report,
             "finetune": _finetune}

if __name__ == "__main__":
    main(sys.argv[1:])
