"""How often a run answers right, at every size and under any rule: each piece is kept in the run's folder as it is known.

    exact    share of problems whose final field, answered greedily, is the reference's
    tokens   share of the reference's tokens that the greedy answer has at their place
    forced   share of tokens that are most likely after the right ones before them
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from whet.clrs import files
from whet.clrs.data import VAL_SAMPLES, VAL_SEEDS, Problem, final_field
from whet.clrs.decoding import greedy, padded
from whet.clrs.model import Decoder, Sharpening
from whet.clrs.tokens import Tokens
from whet.clrs.training import Run
from whet.clrs.workers import Published, Workers

FOLDER = "evaluation"
POSITIONS = 64  # longer answers are cut into as many parts
_MOST_TOKENS = 32768  # of one forward pass


class Plan(NamedTuple):
    """What is measured."""

    sizes: Sequence[int]
    settings: Sequence[Sharpening]  # the first at every size
    seeds: Sequence[int] = VAL_SEEDS
    samples: int = VAL_SAMPLES  # of each size and seed
    others_at: Sequence[int] | None = None  # sizes at which the other settings are measured. None: all

    def settings_at(self, size: int) -> Sequence[Sharpening]:
        return self.settings if self.others_at is None or size in self.others_at else self.settings[:1]

    def pieces(self, algorithms: Sequence[str]) -> list[tuple[str, int, Sharpening]]:
        """All that there is to measure, in order."""
        return [(algorithm, size, setting) for algorithm in algorithms for size in self.sizes
                for setting in self.settings_at(size)]


class Piece(NamedTuple):
    """What is known of one algorithm and size under one setting."""

    algorithm: str
    size: int
    setting: Sharpening
    found: dict[str, Any]


def evaluate(run: Run, plan: Plan, workers: int = 1,
             progress: Callable[[int, int, Piece], None] = lambda done, all, piece: None) -> list[Piece]:
    """Every piece of the plan, from the folder where it is there already."""
    known = {key: _stored(run, plan, *key) for key in plan.pieces(run.recipe.algorithms)}
    places = list(dict.fromkeys((algorithm, size) for algorithm, size, _ in known))
    missing = list(dict.fromkeys((algorithm, size) for (algorithm, size, _), found in known.items() if found is None))
    problems = _problems(run, plan, missing, workers)
    pieces = []
    for place in places:
        made = next(problems) if place in missing else []
        for setting in plan.settings_at(place[1]):
            found = known[(*place, setting)]
            if found is None:
                found = measure(run.model, run.tokens, made, setting)
                _store(run, plan, *place, setting, found)
            pieces.append(Piece(*place, setting, found))
            progress(len(pieces), len(known), pieces[-1])
    return pieces


def stored(run: Run, plan: Plan) -> list[Piece] | None:
    """Every piece of the plan if the folder has all of them."""
    wanted = plan.pieces(run.recipe.algorithms)
    pieces = [Piece(*key, found) for key in wanted if (found := _stored(run, plan, *key)) is not None]
    return pieces if len(pieces) == len(wanted) else None


def measure(model: Decoder, tokens: Tokens, problems: Sequence[Problem], setting: Sharpening) -> dict[str, Any]:
    """What a model makes of problems under one setting. The model is left with the one it had."""
    before, model.sharpening = model.sharpening, setting
    try:
        references = [tokens.encode(problem.answer) for problem in problems]
        questions = [tokens.encode(problem.question) for problem in problems]
        longest = max(len(question) + len(answer) for question, answer in zip(questions, references))
        at_once = max(1, min(VAL_SAMPLES, _MOST_TOKENS // longest))
        answers: list[list[int]] = []
        forced = _Forced(model)
        for start in range(0, len(problems), at_once):
            part = slice(start, start + at_once)
            answers += greedy(model, questions[part], max(map(len, references[part])), tokens.end)
            forced.add(questions[part], references[part])
        exact = [is_exact(tokens.decode(answer), problem) for answer, problem in zip(answers, problems)]
        return {**scored(exact, answers, references), **forced.found(), "baselines": baselines(tokens, problems)}
    finally:
        model.sharpening = before


def is_exact(answer: str, problem: Problem) -> bool:
    """Whether the final field is right, and the answer ended."""
    return answer.endswith("\n\n") and final_field(answer) == problem.final


def scored(exact: Sequence[bool], answers: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Per problem whether it is exact and how many tokens are right; the share that is wrong by place in the answer."""
    longest = max(map(len, references))
    parts = min(longest, POSITIONS)
    wrong, all = np.zeros(parts), np.zeros(parts)
    right = []
    for answer, reference in zip(answers, references):
        same = np.zeros(len(reference), bool)
        common = min(len(answer), len(reference))
        same[:common] = np.equal(answer[:common], reference[:common])
        place = np.arange(len(reference)) * parts // longest
        np.add.at(all, place, 1)
        np.add.at(wrong, place, ~same)
        right.append(int(same.sum()))
    return {"exact": "".join(str(int(one)) for one in exact), "right": right, "tokens": [len(one) for one in references],
            "errors": [round(share, 5) for share in (wrong / all).tolist()]}


class _Forced:
    """What a model says after the right tokens, and the entropy of the rows that say it."""

    def __init__(self, model: Decoder) -> None:
        self._model, self._right, self._rows = model, 0, 0
        self._sums: dict[str, Any] = {"entropy": 0.0, "sharp_entropy": 0.0}

    @torch.no_grad()
    def add(self, questions: Sequence[list[int]], references: Sequence[list[int]]) -> None:
        tokens, ends = padded([question + answer for question, answer in zip(questions, references)])
        begins = torch.tensor([len(question) for question in questions])
        place = torch.arange(1, tokens.shape[1])
        wanted = (place >= begins[:, None]) & (place < ends[:, None])
        stats: list[Any] | None = [] if self._model.attention == "whet" else None
        logits = self._model(tokens[:, :-1], wanted.flatten().nonzero()[:, 0], stats=stats)
        self._right += int((logits.argmax(-1) == tokens[:, 1:][wanted]).sum())
        self._rows += int(wanted.sum())
        for name in self._sums if stats else ():
            rows = torch.stack([getattr(one, name) for one in stats or ()])  # (layers, B, heads, N)
            self._sums[name] = self._sums[name] + (rows * wanted[:, None]).sum((1, 3))

    def found(self) -> dict[str, Any]:
        means = {name: [[round(one, 5) for one in layer] for layer in (total / self._rows).tolist()]
                 for name, total in self._sums.items() if isinstance(total, torch.Tensor)}
        return {"forced": self._right / self._rows, **means}


def baselines(tokens: Tokens, problems: Sequence[Problem]) -> dict[str, dict[str, float]]:
    """Shares that can be had without an algorithm: by the answer of another problem, and by the question's first list."""
    references = [tokens.encode(problem.answer) for problem in problems]
    lists = [re.search(r"\[[^\[\]]*\]", problem.question) for problem in problems]
    answers = {"chance": [problem.answer for problem in (*problems[1:], problems[0])],
               "copy": [(found[0] if found else "") + "\n\n" for found in lists]}
    return {name: shares(scored([is_exact(answer, problem) for answer, problem in zip(given, problems)],
                                [tokens.encode(answer) for answer in given], references))
            for name, given in answers.items()}


def shares(found: dict[str, Any]) -> dict[str, float]:
    """Exact matches and right tokens as shares."""
    return {"exact": found["exact"].count("1") / len(found["exact"]), "tokens": sum(found["right"]) / sum(found["tokens"])}


def _problems(run: Run, plan: Plan, places: Sequence[tuple[str, int]], workers: int) -> Iterator[list[Problem]]:
    """The problems of each place, all seeds together; made ahead."""
    wanted = [(algorithm, size, seed) for algorithm, size in places for seed in plan.seeds]
    if not wanted:
        return
    with Workers(Published(wanted, plan.samples, run.recipe.hints), workers) as made:
        parts = iter(made)
        for _ in places:
            problems = [problem for _ in plan.seeds for problem in next(parts)]
            yield problems


def _path(run: Run, plan: Plan, algorithm: str, size: int, setting: Sharpening) -> Any:
    key = json.dumps([setting.settings(), run.fingerprint, list(plan.seeds), plan.samples, run.recipe.hints])
    return run.folder / FOLDER / f"{algorithm}-{size}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _stored(run: Run, plan: Plan, algorithm: str, size: int, setting: Sharpening) -> dict[str, Any] | None:
    """What was measured before; None if nothing was, or the file is damaged."""
    found = files.read_json(_path(run, plan, algorithm, size, setting))
    problems = len(plan.seeds) * plan.samples
    whole = isinstance(found, dict) and isinstance(found.get("exact"), str) and len(found["exact"]) == problems
    return found if whole else None


def _store(run: Run, plan: Plan, algorithm: str, size: int, setting: Sharpening, found: dict[str, Any]) -> None:
    path = _path(run, plan, algorithm, size, setting)
    files.make_folder(path.parent)
    files.write_bytes(path, json.dumps(found, separators=(",", ":")).encode() + b"\n")
