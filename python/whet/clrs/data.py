"""Problems of CLRS-Text, made by the official generator: the published ones, and an endless stream for training.

    published   as the package's own script: one generator per algorithm, size and seed, its samples in order
    training    batch i of a seed is a function of both numbers alone, so that any number of workers makes the same batches
                and a run goes on from any step. Its generators are seeded with lists, which no published one is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.clrs.errors import ClrsError, one_line
from whet.clrs.official import official, tables

DECIMALS = 3  # numbers of inputs are cut to as many
TRAIN_SIZES = (4, 5, 10, 11, 12, 15, 19, 23, 28, 31)
VAL_SEEDS = (3, 14, 35, 81, 94)
VAL_SAMPLES = 125
_TRAINING = 0x636c7273  # begins the seeds of training


class Problem(NamedTuple):
    """One question, which ends with a line break, and its answer, which ends with two."""

    algorithm: str
    size: int
    question: str
    answer: str

    @property
    def final(self) -> str:
        """The last field of the answer: what counts."""
        return final_field(self.answer)


class Source(NamedTuple):
    """What batches are drawn from: each has problems of one algorithm and one size."""

    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]  # empty: the published training sizes of each algorithm
    hints: bool
    batch: int
    seed: int


def final_field(answer: str) -> str:
    return answer.rsplit(" | ", 1)[-1].strip()


def algorithms() -> tuple[str, ...]:
    """All thirty, by name."""
    return tuple(sorted(tables("train").sizes))


def check_algorithms(names: Sequence[str]) -> None:
    known = algorithms()
    for name in names:
        if name not in known:
            raise ClrsError(f"{name}: no algorithm of CLRS-Text; there are {', '.join(known)}")


def published(algorithm: str, size: int, seed: int, samples: int, hints: bool = False,
              decimals: int | None = DECIMALS) -> Iterator[Problem]:
    """The first samples of the published generator of this algorithm, size and seed."""
    check_algorithms([algorithm])
    sampler = _sampler(algorithm, size, seed, decimals)
    for _ in range(samples):
        yield _next(sampler, algorithm, size, hints)


def split(name: str, algorithms: Sequence[str], hints: bool) -> Iterator[tuple[int, Problem]]:
    """Seed and problem of all of a published split, in the order of the package's script."""
    found = tables(name)
    for algorithm in algorithms:
        for size in found.sizes[algorithm]:
            for seed in found.seeds:
                for problem in published(algorithm, size, seed, found.samples, hints):
                    yield seed, problem


def training_batch(source: Source, number: int) -> list[Problem]:
    """Batch `number` of the endless stream."""
    choice = np.random.RandomState([_TRAINING, source.seed, number])
    algorithm = source.algorithms[choice.randint(len(source.algorithms))]
    sizes = source.sizes or tables_train()[algorithm]
    size = int(sizes[choice.randint(len(sizes))])
    sampler = _sampler(algorithm, size, None, DECIMALS)
    sampler._rng = choice
    return [_next(sampler, algorithm, size, source.hints) for _ in range(source.batch)]


def example_line(problem: Problem, seed: int, hints: bool) -> str:
    """A problem as one line of JSON, with the fields of the package's own generator and its seed."""
    return json.dumps({"text": problem.question + problem.answer, "question": problem.question, "answer": problem.answer,
                       "algo_name": problem.algorithm, "length": problem.size, "use_hints": hints, "seed": seed})


_train_sizes: dict[str, list[int]] = {}


def tables_train() -> dict[str, list[int]]:
    if not _train_sizes:
        _train_sizes.update(tables("train").sizes)
    return _train_sizes


def _sampler(algorithm: str, size: int, seed: int | None, decimals: int | None) -> Any:
    return official().samplers.build_sampler(algorithm, seed=seed, num_samples=-1, length=size, track_max_steps=False,
                                             truncate_decimals=decimals)[0]


def _next(sampler: Any, algorithm: str, size: int, hints: bool) -> Problem:
    try:
        text = official().text.format_clrs_example(algorithm, sampler.next(batch_size=1), use_hints=hints)
    except (ValueError, IndexError, AssertionError, TypeError, ZeroDivisionError, KeyError) as error:
        raise ClrsError(f"size {size}: the generator makes no {algorithm} of this size ({one_line(error, 80)}); give sizes "
                        "from 4 on") from None
    return Problem(algorithm, size, *text)
