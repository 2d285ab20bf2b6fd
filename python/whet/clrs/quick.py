"""`whet clrs --quick`: a few minutes that show what the long runs measure."""

from __future__ import annotations

from pathlib import Path

from whet.clrs import command, files, report, training
from whet.clrs.evaluation import Plan, evaluate
from whet.clrs.model import Sharpening
from whet.clrs.sweep import remember
from whet.clrs.training import Recipe
from whet.probe import program

RECIPE = Recipe(sizes=(4, 5, 6, 7, 8), width=64, heads=2, layers=2, hidden=128, batch=64, steps=2500, warmup=100)
VARIANTS = (Sharpening(), Sharpening("paper"))
ADDED = (Sharpening("paper"), Sharpening("log-length:16"))
SIZES = (4, 6, 8, 10, 12, 16, 24, 32)


def quick(out: Path, line: str) -> None:
    """Trains two small decoders to sort up to eight numbers, asks both for up to 32, and draws the page."""
    threads, progress = program.set_threads(None), program.Progress()
    facts, results = [], []
    for sharpening in VARIANTS:
        recipe = Recipe(**{**vars(RECIPE), "sharpening": sharpening})
        name = f"sorting with {sharpening.name}: "
        folder = out / sharpening.name
        training.train(folder, recipe, 1, command.steps_shown(progress, name))
        run = training.load(folder)
        settings = [recipe.at_test, *(ADDED if sharpening.plain else ())]
        plan = Plan(SIZES, settings, samples=20)
        pieces = evaluate(run, plan, 1, command.pieces_shown(progress, name))
        remember(run, plan)
        facts.append(report.run_facts(run))
        results.append(report.result_of(run, pieces))
    progress.done()
    files.make_folder(out)
    command.conclude(out, report.results(line, threads, facts, results), False, progress)
