"""Processes that make problems ahead of the one that trains or evaluates.

The generator imports JAX, and a process with JAX in it must not fork, so that it always runs in processes of its own,
started afresh. What a worker is asked for is a function of a number; workers take numbers in turn, and answers come
back in order. A worker is ahead by what fits into its pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from whet.clrs.data import Problem, Source, published, training_batch
from whet.clrs.errors import ClrsError
from whet.clrs.tokens import PADDING, Tokens


class Batch(NamedTuple):
    """Problems as numbers: each row is question and answer, then padding."""

    algorithm: str
    size: int
    tokens: np.ndarray  # (B, N), int64
    questions: np.ndarray  # (B): tokens of each question
    ends: np.ndarray  # (B): tokens of question and answer


class Training(NamedTuple):
    """The endless stream of training batches, from `first` on."""

    source: Source
    tokens: dict[str, Any]
    first: int

    def make(self, number: int) -> Any:
        return batch_of(training_batch(self.source, self.first + number), Tokens.of(self.tokens))

    def size(self) -> int | None:
        return None


class TextTraining(NamedTuple):
    """The same stream as problems."""

    source: Source
    first: int

    def make(self, number: int) -> list[Problem]:
        return training_batch(self.source, self.first + number)

    def size(self) -> int | None:
        return None


class Published(NamedTuple):
    """Lists of published problems, one per (algorithm, size, seed)."""

    wanted: list[tuple[str, int, int]]
    samples: int
    hints: bool

    def make(self, number: int) -> list[Problem]:
        return list(published(*self.wanted[number], self.samples, self.hints))

    def size(self) -> int | None:
        return len(self.wanted)


class Joined(NamedTuple):
    """The lists of several jobs, one after the other."""

    jobs: list[Published]

    def make(self, number: int) -> list[Problem]:
        for job in self.jobs:
            if number < len(job.wanted):
                return job.make(number)
            number -= len(job.wanted)
        raise IndexError(number)

    def size(self) -> int | None:
        return sum(len(job.wanted) for job in self.jobs)


def batch_of(problems: list[Problem], tokens: Tokens) -> Batch:
    rows = [(tokens.encode(problem.question), tokens.encode(problem.answer)) for problem in problems]
    ends = np.array([len(question) + len(answer) for question, answer in rows])
    table = np.full((len(rows), ends.max()), PADDING, np.int64)
    for row, (question, answer) in zip(table, rows):
        row[:len(question) + len(answer)] = question + answer
    questions = np.array([len(question) for question, _ in rows])
    return Batch(problems[0].algorithm, problems[0].size, table, questions, ends)


def _serve(job: Any, first: int, step: int, pipe: Any) -> None:
    """Sends what job.make says of first, first + step, ... until there are no more or nobody reads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    number, count = first, job.size()
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        try:
            while count is None or number < count:
                pipe.send(job.make(number))
                number += step
        except ClrsError as error:
            pipe.send(error)


class Workers:
    """The results of a job in order, made by other processes. Close it, or use it with `with`."""

    def __init__(self, job: Any, workers: int = 1) -> None:
        if workers < 1:
            raise ClrsError(f"workers: is {workers}, must be at least 1")
        context = multiprocessing.get_context("spawn")
        self._count = job.size()
        self._pipes, self._processes = [], []
        for first in range(workers if self._count is None else min(workers, max(1, self._count))):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(job, first, workers, writer), daemon=True)
            process.start()
            writer.close()
            self._pipes.append(reader)
            self._processes.append(process)

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while self._count is None or number < self._count:
            try:
                found = self._pipes[number % len(self._pipes)].recv()
            except (EOFError, ConnectionError):
                raise ClrsError("a process that makes problems ended (killed, or out of memory); run the same line again "
                                "with fewer --workers") from None
            if isinstance(found, ClrsError):
                raise found
            yield found
            number += 1

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
