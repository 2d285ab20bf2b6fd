"""Variants and seeds, each run in a folder of its own: a sweep goes on in pieces, and several may work on one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from whet.clrs import command, files, report, training, variants
from whet.clrs.errors import ClrsError
from whet.clrs.evaluation import Piece, Plan, evaluate, stored
from whet.clrs.model import Sharpening
from whet.clrs.summary import Result
from whet.clrs.training import Recipe, Run
from whet.probe import program

MEASURED = "evaluated.json"  # what of a run was evaluated


class Member(NamedTuple):
    """One run of a sweep."""

    folder: Path
    recipe: Recipe


def members(chosen: argparse.Namespace) -> list[Member]:
    """Seed by seed, so that all variants have their first soon."""
    found = []
    for seed in chosen.seeds:
        for name in chosen.variants:
            recipe = command.recipe_of(chosen, seed, variants.variant(name))
            found.append(Member(chosen.out / f"{variants.file_name(name)}-{seed}", recipe))
    return found


def sweep(chosen: argparse.Namespace) -> None:
    """Trains and evaluates what no one has or is at; then compares all that is there."""
    threads, progress = program.set_threads(chosen.threads), program.Progress()
    found = members(chosen)
    for member in found:
        member.recipe.check()
    files.make_folder(chosen.out)
    busy = 0
    for number, member in enumerate(found):
        files.make_folder(member.folder)
        with files.locked(member.folder, ".sweep") as alone:
            if alone:
                _work(member, chosen, progress, f"run {number + 1} of {len(found)}, {member.folder.name}: ")
            busy += not alone
    progress.done()
    if busy:
        progress.say(f"other processes work on {busy} of {len(found)} runs; run the same line again for their results")
    runs, results = evaluated([member.folder for member in found if (member.folder / MEASURED).exists()])
    command.conclude(chosen.out, report.results(chosen.line, threads, runs, results), False, progress)


def _work(member: Member, chosen: argparse.Namespace, progress: program.Progress, name: str) -> None:
    training.train(member.folder, member.recipe, chosen.workers, command.steps_shown(progress, name))
    run = training.load(member.folder)
    plan = command.plan_of(chosen, run)
    pieces = evaluate(run, plan, chosen.workers, command.pieces_shown(progress, name))
    remember(run, plan)
    found = report.results(chosen.line, program.set_threads(None), [run], [report.result_of(run, pieces)])
    report.write_json(member.folder / report.RESULTS, found)


def remember(run: Run, plan: Plan) -> None:
    """Which plan the folder has all pieces of, for `report`."""
    content = {"sizes": list(plan.sizes), "settings": [one.settings() for one in plan.settings], "seeds": list(plan.seeds),
               "samples": plan.samples}
    files.write_bytes(run.folder / MEASURED, json.dumps(content).encode() + b"\n")


def evaluated(folders: Sequence[Path]) -> tuple[list[Run], list[Result]]:
    """The runs that lie in these folders, or directly below them, with what was measured of each."""
    runs, results = [], []
    for folder in folders:
        own = [folder] if (folder / files.CONFIG).exists() else sorted(path.parent for path in folder.glob(f"*/{MEASURED}"))
        if not own:
            raise ClrsError(f"{folder}: holds no evaluated run; train one, then run {command.NAME} eval")
        for one in own:
            run = training.load(one)
            runs.append(run)
            results.append(report.result_of(run, _pieces(run)))
    return runs, results


def _pieces(run: Run) -> list[Piece]:
    plan = files.read_json(run.folder / MEASURED)
    if not isinstance(plan, dict):
        raise ClrsError(f"{run.folder}: isn't evaluated; run {command.NAME} eval {run.folder} first")
    settings = [Sharpening.of(one) for one in plan["settings"]]
    wanted = Plan(plan["sizes"], settings, plan["seeds"], plan["samples"])
    found = stored(run, wanted)
    if found is None:
        raise ClrsError(f"{run.folder}: its evaluation is incomplete; run {command.NAME} eval {run.folder} again")
    return found
