"""The paper's head beside JAX: python -m bench.training --whet build/release/bin/whet [options].

One core and one thread each, from initial weights and from a trained head, whose sets need less of a backward pass.
JAX must first come to the losses and gradients the command kept; then all are timed interleaved (timing.py). JAX gets
its batches ready-made, whet draws its own within what is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Bar, bar_table, table
from bench.timing import BenchmarkError, OtherLoad, Timing, machine_facts, prepare_process, progress, ratio

CPUS = prepare_process()[:1]  # before jax is imported, and one core for all
os.sched_setaffinity(0, CPUS)

import jax
import jax.numpy as jnp
from bench.training import max_retrieval_jax as peer

ROOT = Path(__file__).resolve().parents[2]
WHET, PLAIN, FOLDED = "whet", "JAX, straightforward", "JAX, folded"
FORMS = {PLAIN: peer.straightforward, FOLDED: peer.folded}
LOSS_TOLERANCE = 1e-4  # of each of the 100 losses, against JAX in float64
FLOAT_TOLERANCE = 2e-3  # of JAX's own losses in float32: its rounding grows where the loss falls fast
GRADIENT_TOLERANCE = 1e-4  # of each tensor, relative to its norm
SCORE_TOLERANCE = 1e-3  # between the two forms at the size of the evaluation
BATCHES = (1, 2, 4, 8)  # sets that JAX may evaluate at once


@dataclass(frozen=True)
class Command:
    """whet bench train, from initial weights or those of a run."""

    path: Path
    run: Path | None
    quick: bool

    def __call__(self, *more: str) -> dict:
        line = [str(self.path), "bench", "train", "--json", *more]
        line += ["--quick"] if self.quick else []
        line += ["--run", str(self.run)] if self.run else []
        return json.loads(checked(line))

    def keep(self) -> tuple[dict, peer.Kept]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "steps.safetensors"
            return self("--keep", str(file)), peer.load(file)


def checked(line: Sequence[str]) -> str:
    result = subprocess.run(line, capture_output=True, text=True)
    if result.returncode != 0:
        raise BenchmarkError(result.stderr.strip() or f"{line[0]} ended with {result.returncode}")
    return result.stdout


# ---- verifying


def verify_whet(kept: peer.Kept) -> float:
    """whet's losses against JAX in float64, as a share of the tolerance."""
    with jax.enable_x64(True):
        exact = peer.in_float64(kept)
        losses = np.asarray(peer.Training(exact, peer.straightforward).run(peer.on_device(exact.batches)))
    worst = float(np.abs(losses - kept.losses).max())
    progress(f"{WHET}: {len(losses)} losses within {worst:.1e} of JAX in float64")
    return share_of(WHET, worst / LOSS_TOLERANCE)


def verify_steps(kept: peer.Kept, name: str, training: peer.Training, batches: Sequence) -> float:
    """The larger of the two errors as a share of its tolerance. Compiles the step for every size on the way."""
    losses = np.asarray(training.run(batches), np.float64)
    worst = float(np.abs(losses - kept.losses).max())
    gradient = peer.first_gradient(kept, FORMS[name])
    # The gradient of k's bias is 0 but for rounding: it adds the same to every logit of a set.
    errors = {n: peer.relative_error(g, kept.gradient[n]) for n, g in gradient.items() if n != "k.bias"}
    tensor = max(errors, key=errors.__getitem__)
    progress(f"{name}: {len(losses)} losses within {worst:.1e}, gradients within {errors[tensor]:.1e} ({tensor})")
    return share_of(name, max(worst / FLOAT_TOLERANCE, errors[tensor] / GRADIENT_TOLERANCE))


def share_of(name: str, share: float) -> float:
    if not share <= 1:  # also NaN
        raise BenchmarkError(f"{name}: error is {share:.3g} times its tolerance")
    return share


# ---- evaluation in JAX


class Evaluation:
    """One form on ready-made sets, as many at once as is fastest."""

    def __init__(self, scores: peer.Scores, p: peer.Parameters, items: int) -> None:
        self._p = {name: jnp.asarray(t) for name, t in p.items()}
        self._correct = jax.jit(lambda p, x, c, q, t: jnp.sum(jnp.argmax(scores(p, x, c, q), -1) == t))
        self._scores = jax.jit(scores)
        self._data = {sets: self._sets(sets, items) for sets in BATCHES}
        self.sets = min(BATCHES, key=self._trial)

    @staticmethod
    def _sets(sets: int, items: int) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(1)
        priorities = rng.random((sets, items), np.float32)
        classes = rng.integers(0, peer.CLASSES, (sets, items), np.int32)
        targets = np.take_along_axis(classes, priorities.argmax(1)[:, None], 1)[:, 0]
        return tuple(jnp.asarray(a) for a in (priorities, classes, rng.random(sets, np.float32), targets))

    def _trial(self, sets: int) -> float:
        self.seconds_a_set(sets, 1)  # compiles
        return min(self.seconds_a_set(sets, 1) for _ in range(3))

    def scores(self) -> np.ndarray:
        return np.asarray(self._scores(self._p, *self._data[max(BATCHES)][:3]))

    def seconds_a_set(self, sets: int, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            found = self._correct(self._p, *self._data[sets])
        jax.block_until_ready(found)
        return (time.perf_counter() - start) / (calls * sets)

    def run(self) -> float:
        return self.seconds_a_set(self.sets, max(1, max(BATCHES) // self.sets))


# ---- timing


def timed_steps(training: peer.Training, batches: Sequence) -> float:
    """Seconds per step."""
    training.restart()
    start = time.perf_counter()
    training.run(batches)
    return (time.perf_counter() - start) / len(batches)


@dataclass
class Results:
    start: str
    items: int  # of a set of the evaluation
    steps: dict[str, Timing]
    evaluation: dict[str, Timing]


def measure(command: Command, rounds: int) -> Results:
    start = "a trained head" if command.run else "initial weights"
    progress(f"{start}: verifying")
    report, kept = command.keep()
    batches = peer.on_device(kept.batches)
    items = report["evaluation"][-1]["items"]
    steps, evaluation = {WHET: Timing(WHET, 1, verify_whet(kept), 1)}, {WHET: Timing(WHET, 1, 0, 1)}
    jobs: dict[str, Callable[[], None]] = {}

    def run_whet() -> None:
        report = command()
        steps[WHET].seconds.append(1 / report["steps_per_second"])
        evaluation[WHET].seconds.append(1 / report["evaluation"][-1]["sets_per_second"])

    def run_jax(name: str, training: peer.Training, sets: Evaluation) -> None:
        steps[name].seconds.append(timed_steps(training, batches))
        evaluation[name].seconds.append(sets.run())

    jobs[WHET] = run_whet
    scores = {}
    for name, form in FORMS.items():
        training = peer.Training(kept, form)
        sets = Evaluation(form, kept.before, items)
        steps[name] = Timing(name, 1, verify_steps(kept, name, training, batches), len(batches))
        scores[name] = sets.scores()
        share = share_of(name, float(np.abs(scores[name] - scores[PLAIN]).max()) / SCORE_TOLERANCE)
        evaluation[name] = Timing(name, 1, share, sets.sets)
        jobs[name] = partial(run_jax, name, training, sets)
    progress(f"{start}: {rounds} rounds")
    names = list(jobs)
    for number in range(rounds):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            jobs[name]()
    return Results(start, items, steps, evaluation)


# ---- the report


def rows_of(results: Results) -> list[tuple[str, ...]]:
    rows = []
    for what, timings in ((f"steps from {results.start}", results.steps),
                          (f"sets of {results.items:,} items, {results.start}", results.evaluation)):
        for name, timing in timings.items():
            low, high = timing.quartiles
            error = "" if timing.error_share == 0 else f"{timing.error_share:.2f}"
            rows.append((what, name, f"{1 / timing.median:.1f}", f"{1 / high:.1f}..{1 / low:.1f}",
                         f"{ratio(timings, name, WHET):.2f}", error))
    return rows


def bars_of(results: Results) -> list[Bar]:
    return [Bar(f"{PLAIN} / whet, a step from {results.start}", ratio(results.steps, PLAIN, WHET), 3, False),
            Bar(f"{FOLDED} / whet, a step from {results.start}", ratio(results.steps, FOLDED, WHET), 1.4, False),
            Bar(f"{PLAIN} / whet, a set of {results.items:,} items, {results.start}",
                ratio(results.evaluation, PLAIN, WHET), 4, False)]


def trained_run(path: Path, folder: str) -> Path:
    progress("training a head: 3000 steps")
    run = Path(folder) / "run"
    checked([str(path), "train", str(run), "--steps", "3000"])
    return run


def run(options: argparse.Namespace) -> int:
    whet = options.whet.resolve()
    facts = machine_facts(CPUS)
    with OtherLoad() as load, tempfile.TemporaryDirectory() as folder:
        trained = options.run or trained_run(whet, folder)
        rounds = 3 if options.quick else 11
        results = [measure(Command(whet, start, options.quick), rounds) for start in (None, trained)]
    facts["busy with others, whet's own runs included"] = f"{load.processors:.2f} processors"
    print("# Training the paper's head\n")
    print("\n".join(f"- {name}: {fact}" for name, fact in facts.items()), end="\n\n")
    headers = ("what", "contender", "per second", "quartiles", "time, × whet", "error / tolerance")
    print(table(headers, [row for result in results for row in rows_of(result)], left=2), end="\n\n")
    bars = [bar for result in results for bar in bars_of(result)]
    print(bar_table(bars))
    return 1 if options.strict and not all(bar.reached for bar in bars) else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="training and evaluating the paper's head beside JAX")
    parser.add_argument("--whet", type=Path, metavar="FILE", default=ROOT / "build/release/bin/whet")
    parser.add_argument("--run", type=Path, metavar="DIR", help="a trained head (default: trains one, 3000 steps)")
    parser.add_argument("--quick", action="store_true", help="three rounds, evaluation at 1,024 items")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (BenchmarkError, OSError) as error:
        sys.exit(f"bench.training: {error}")
