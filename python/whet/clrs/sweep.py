"""Variants and seeds, each run in a folder of its own: a sweep goes on in pieces, and several may work on one.

    NAME-SEED/       the run
    NAME-SEED.json   what was found of it, once it is evaluated; then the folder isn't needed any more
    results.json, report.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whet.clrs import command, files, report, summary, training, variants
from whet.clrs.errors import ClrsError
from whet.clrs.evaluation import Piece, Plan, evaluate, stored
from whet.clrs.model import Sharpening
from whet.clrs.summary import Result
from whet.clrs.training import Recipe, Run
from whet.probe import program

MEASURED = "evaluated.json"  # what of a run was evaluated
FORMAT = "whet clrs evaluated run 1"


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
        if _is_finished(member, command.plan_of(chosen, member.recipe)):
            continue
        files.make_folder(member.folder)
        with files.locked(member.folder, ".sweep") as alone:
            if alone:
                _work(member, chosen, progress, f"run {number + 1} of {len(found)}, {member.folder.name}: ")
            busy += not alone
    progress.done()
    if busy:
        progress.say(f"other processes work on {busy} of {len(found)} runs; run the same line again for their results")
    facts, results = evaluated([chosen.out])
    command.conclude(chosen.out, report.results(chosen.line, threads, facts, results), False, progress)


def _work(member: Member, chosen: argparse.Namespace, progress: program.Progress, name: str) -> None:
    training.train(member.folder, member.recipe, chosen.workers, command.steps_shown(progress, name))
    run = training.load(member.folder)
    plan = command.plan_of(chosen, run.recipe)
    pieces = evaluate(run, plan, chosen.workers, command.pieces_shown(progress, name))
    remember(run, plan)
    _write_file(_file_of(member), run, plan, pieces)


def remember(run: Run, plan: Plan) -> None:
    """Which plan the folder has all pieces of, for `report`."""
    files.write_bytes(run.folder / MEASURED, json.dumps(_plan_settings(plan)).encode() + b"\n")


def _plan_settings(plan: Plan) -> dict[str, Any]:
    return {"sizes": list(plan.sizes), "settings": [one.settings() for one in plan.settings], "seeds": list(plan.seeds),
            "samples": plan.samples, "others_at": None if plan.others_at is None else list(plan.others_at)}


# ---- the small file of a finished run, which stands for its folder


def _file_of(member: Member) -> Path:
    return member.folder.with_name(f"{member.folder.name}.json")


def _write_file(path: Path, run: Run, plan: Plan, pieces: Sequence[Piece]) -> None:
    found = [{"algorithm": piece.algorithm, "size": piece.size, "setting": piece.setting.settings(),
              "found": summary.reduced(piece.found)} for piece in pieces]
    sizes = {algorithm: run.recipe.trained_sizes(algorithm) for algorithm in run.recipe.algorithms}
    content = {"format": FORMAT, "facts": report.run_facts(run), "trained_sizes": sizes, "plan": _plan_settings(plan),
               "pieces": found}
    files.write_bytes(path, json.dumps(content, separators=(",", ":")).encode() + b"\n")


def _read_file(path: Path) -> dict[str, Any] | None:
    """None for any other file."""
    found = files.read_json(path)
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def _is_finished(member: Member, plan: Plan) -> bool:
    """Whether its file is there, of the same recipe and plan."""
    found = _read_file(_file_of(member))
    settings = json.loads(json.dumps(member.recipe.settings()))
    return found is not None and found["facts"]["recipe"] == settings and found["plan"] == _plan_settings(plan)


def _result_of_file(path: Path, found: dict[str, Any]) -> Result:
    try:
        recipe = Recipe.of(found["facts"]["recipe"], path)
        pieces = [Piece(one["algorithm"], one["size"], Sharpening.of(one["setting"]), one["found"])
                  for one in found["pieces"]]
        return Result(path.stem, recipe.variant, recipe.seed, recipe.hints, found["trained_sizes"], pieces, recipe.at_test)
    except (KeyError, TypeError) as error:
        raise ClrsError(f"{path}: is damaged ({error}); make it again with {command.NAME} sweep") from None


def evaluated(folders: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Result]]:
    """The runs that lie in these folders, as files or folders of their own, or that they are: their facts, and what was
    measured of each."""
    facts, results = [], []
    for folder in folders:
        read = {path: found for path in sorted(folder.glob("*.json")) if (found := _read_file(path)) is not None}
        for path, found in read.items():
            facts.append(found["facts"])
            results.append(_result_of_file(path, found))
        known = {path.stem for path in read}
        own = [folder] if (folder / files.CONFIG).exists() else \
            sorted(path.parent for path in folder.glob(f"*/{MEASURED}") if path.parent.name not in known)
        if not own and not read:
            raise ClrsError(f"{folder}: holds no evaluated run; train one, then run {command.NAME} eval")
        for one in own:
            run = training.load(one)
            facts.append(report.run_facts(run))
            results.append(report.result_of(run, _pieces(run)))
    return facts, results


def _pieces(run: Run) -> list[Piece]:
    plan = files.read_json(run.folder / MEASURED)
    if not isinstance(plan, dict):
        raise ClrsError(f"{run.folder}: isn't evaluated; run {command.NAME} eval {run.folder} first")
    settings = [Sharpening.of(one) for one in plan["settings"]]
    wanted = Plan(plan["sizes"], settings, plan["seeds"], plan["samples"], plan.get("others_at"))
    found = stored(run, wanted)
    if found is None:
        raise ClrsError(f"{run.folder}: its evaluation is incomplete; run {command.NAME} eval {run.folder} again")
    return found
