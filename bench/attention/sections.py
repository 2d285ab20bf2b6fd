"""What bench.attention measures, one function a section.

Import after timing.prepare_process().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.attention import normalizers as normalizer_sections
from bench.attention.contenders import (
    BLOCKED,
    FOLDED,
    NONE,
    PAPER,
    SDPA,
    TARGET,
    Problem,
    Training,
    basic_contenders,
    decode_contenders,
    framework_contenders,
    rule_contenders,
    thread_contenders,
    threaded,
)
from bench.attention.linear import linear as linear_section
from bench.attention.memory import SHORT_QUERIES, long_run, long_shape, training_bytes
from bench.attention.plan import DECODE, Plan, full
from bench.attention.reference import REACH, Shape, falling, plain, sharpened
from bench.attention.results import Comparison, Results
from bench.report import Bar, Section
from bench.timing import (
    IDLE,
    MIN_ROUNDS,
    BenchmarkError,
    OtherLoad,
    busy_neighbour,
    progress,
    verified_timings,
)
from bench.whet_c import Whet

MIB = 1 << 20
LONG_CALL = 4e9  # operations, some 70 ms: enough for the fewest rounds
TRAINING_FLOPS = 3.5  # times those of forward: backward has five products
BOTH, NEVER = "forward + backward", f"{PAPER}, no tile skipped"


@dataclass(frozen=True)
class Setting:
    whet: Whet
    library: Path
    plan: Plan
    rounds: int
    cpus: Sequence[int]

    def rounds_of(self, shape: Shape) -> int:
        return MIN_ROUNDS if shape.flops > LONG_CALL else self.rounds


def _acts(problem: Problem) -> str:
    """What the rule does with these rows; an error if that isn't much."""
    beta, entropy = (problem.stats("paper", name) for name in ("beta", "entropy"))
    share = float(np.mean(beta > 1.2))
    if share < 0.9:
        raise BenchmarkError(f"{problem.inputs.shape}: only {share:.0%} of rows have beta > 1.2")
    low, middle, high = np.quantile(entropy, (0.1, 0.5, 0.9))
    return (
        f"{problem.inputs.shape}: entropy {low:.1f}–{middle:.1f}–{high:.1f} nats (10, 50, 90 %),"
        f" {share:.0%} of rows with β above 1.2, {problem.skipped:.1%} of tiles skipped"
    )


def _is_full(size: int) -> Callable[[Shape], bool]:
    return lambda shape: shape.size == size and not shape.causal


def _gains_from_none(shape: Shape) -> bool:
    return shape.size == 64 and shape.queries >= 2048


FORWARD_BARS = (
    Comparison(f"{PAPER} × {SDPA}, d 64 full", PAPER, SDPA, 1.0, applies=_is_full(64)),
    Comparison(f"the same, goal: {PAPER} × {SDPA}", PAPER, SDPA, 0.9, applies=_is_full(64)),
    Comparison(f"{PAPER} × {SDPA}, d 128 full", PAPER, SDPA, 1.05, applies=_is_full(128)),
    Comparison(
        *(f"{PAPER} × {SDPA}, d 64 causal", PAPER, SDPA, 0.8),
        applies=lambda shape: shape.causal and shape.group == 1,
    ),
    Comparison(
        *(f"{PAPER} × {SDPA}, 9/3 heads causal", PAPER, SDPA, 0.85),
        applies=lambda shape: shape.causal and shape.group > 1,
    ),
    Comparison(f"{NONE} × {PAPER}, d 64, n ≥ 2048", NONE, PAPER, 0.95, applies=_gains_from_none),
    Comparison(
        *(f"{NONE} × {PAPER}, elsewhere", NONE, PAPER, 1.0),
        applies=lambda shape: not _gains_from_none(shape),
    ),
    Comparison(
        *(f"{TARGET} × {PAPER}, d 64", TARGET, PAPER, 1.5),
        applies=lambda shape: shape.size == 64,
    ),
    Comparison(f"{PAPER} as fast as {BLOCKED}, times", BLOCKED, PAPER, 2.2, at_most=False),
)


def forward(setting: Setting) -> Section:
    plan = setting.plan
    results, notes = Results(SDPA, FORWARD_BARS), []
    with OtherLoad() as load, torch.no_grad():
        for shape in sorted((*plan.basic, *plan.rules, *plan.frameworks), key=_order):
            progress(f"forward, {shape}")
            problem = Problem(setting.whet, sharpened(shape))
            notes.append(_acts(problem))
            contenders = basic_contenders(problem)
            if shape not in plan.basic:
                contenders += rule_contenders(problem)
            if shape in plan.frameworks:
                contenders += framework_contenders(problem)
            results.timings[shape] = verified_timings(contenders, setting.rounds_of(shape))
    note = "float32, one thread. " + "; ".join(notes) + "."
    return results.section("Forward, rows that the paper's rule sharpens", note, load)


def _order(shape: Shape) -> tuple:
    return shape.group, shape.causal, shape.size, shape.queries


def flat(setting: Setting) -> Section:
    results = Results(SDPA, ())
    with OtherLoad() as load, torch.no_grad():
        for shape in setting.plan.flat:
            progress(f"forward, rows with beta = 1, {shape}")
            problem = Problem(setting.whet, plain(shape))
            if np.any(problem.stats("paper", "beta") != 1):
                raise BenchmarkError(f"{shape}: the rule sharpens rows of plain Gaussian q and k")
            contenders = basic_contenders(problem)
            results.timings[shape] = verified_timings(contenders, setting.rounds_of(shape))
    note = (
        "float32, one thread. Gaussian q and k: every row has an entropy above 5.945 nats, where"
        " the paper's rule leaves β = 1."
    )
    return results.section("Forward, rows that the rule leaves alone (β = 1)", note, load)


def training(setting: Setting) -> Section:
    bars = (Comparison(f"{PAPER} × {SDPA}, {BOTH}", PAPER, SDPA, 0.85),)
    results = Results(SDPA, bars, amount=lambda shape, _: TRAINING_FLOPS * shape.flops)
    with OtherLoad() as load:
        for shape, peers in setting.plan.training:
            progress(f"{BOTH}, {shape}")
            contenders = Training(setting.whet, sharpened(shape)).contenders(peers)
            results.timings[shape] = verified_timings(contenders, setting.rounds_of(shape))
    note = (
        "float32, one thread, through the rule; whet keeps the rows that its forward call saved."
        " FlexAttention has no backward on CPUs."
    )
    return results.section("Forward + backward", note, load)


def _decode_bars() -> Iterator[Comparison]:
    one, two = threaded(PAPER, 1), threaded(PAPER, 2)
    for sdpa in (SDPA, FOLDED):
        yield Comparison(f"decode: {PAPER} × {sdpa}", one, threaded(sdpa, 1), 0.25)
    yield Comparison("decode: two threads as fast as one, times", one, two, 1.6, at_most=False)
    yield Comparison(
        *("decode: bf16 as fast as f32, times", one, threaded(f"{PAPER}, bf16", 1), 1.6),
        at_most=False,
        applies=lambda shape: shape.keys >= 131072,
    )


def decode(setting: Setting) -> Section:
    results = Results(threaded(SDPA, 1), tuple(_decode_bars()), "GB/s", _decode_bytes)
    notes = []
    with OtherLoad() as load, torch.no_grad():
        for shape in DECODE:
            progress(f"decode, {shape}")
            inputs = sharpened(shape)
            problem = Problem(setting.whet, inputs)
            notes.append(_acts(problem))
            contenders = decode_contenders(problem, Problem(setting.whet, inputs.in_bf16()))
            results.timings[shape] = verified_timings(contenders, setting.rounds, 0.020)
    note = "One query. GB/s count keys and values once. " + "; ".join(notes) + "."
    return results.section("Decode", note, load)


def _decode_bytes(shape: Shape, name: str) -> float:
    return 2.0 * shape.key_heads * shape.keys * shape.size * (2 if "bf16" in name else 4)


def two_threads(setting: Setting) -> Section:
    one, two = threaded(PAPER, 1), threaded(PAPER, 2)
    text = "two threads as fast as one, times"
    results = Results(threaded(SDPA, 1), (Comparison(text, one, two, 1.85, at_most=False),))
    with OtherLoad() as load:
        _time_threads(setting, setting.plan.threads, "two threads", results)
    if load.processors > IDLE:
        progress(f"the machine was not idle: others kept {load.processors:.2f} processors busy")
    return results.section("Two threads, idle machine", "float32.", load)


def busy(setting: Setting) -> Section:
    one, two = threaded(PAPER, 1), threaded(PAPER, 2)
    text = "two threads beside a busy neighbour × the time of one"
    results = Results(threaded(SDPA, 1), (Comparison(text, two, one, 1.1),))
    with OtherLoad() as load, busy_neighbour(setting.cpus[-1]):
        _time_threads(setting, setting.plan.busy, "two threads beside a busy neighbour", results)
    note = "float32. A process of this benchmark (counted below) keeps one of two processors busy."
    return results.section("Two threads beside a busy neighbour", note, load)


def _time_threads(setting: Setting, shapes: Sequence[Shape], text: str, results: Results) -> None:
    with torch.no_grad():
        for shape in shapes:
            progress(f"{text}, {shape}")
            contenders = thread_contenders(Problem(setting.whet, sharpened(shape)))
            # Long enough to span many turns of the scheduler.
            timings = verified_timings(contenders, setting.rounds_of(shape), min_seconds=0.050)
            results.timings[shape] = timings


def skipping(setting: Setting) -> Section:
    shape = setting.plan.sharp
    progress(f"skipping, {shape}")
    text = "falling logits: time × that with no tile skipped"
    results = Results(SDPA, (Comparison(text, PAPER, NEVER, 0.75),))
    with OtherLoad() as load, torch.no_grad():
        problem = Problem(setting.whet, falling(shape))
        contenders = [
            problem.sdpa(),
            problem.whet("paper"),
            problem.whet("paper", name=NEVER, skip_epsilon=0.0),
        ]
        results.timings[shape] = verified_timings(contenders, setting.rounds_of(shape))
    note = (
        f"float32, one thread. Logits fall as -(i - j)² / (2·{REACH}²), plus Gaussian ones of width"
        f" 1: {problem.skipped:.1%} of tiles skipped at ε = 2⁻²⁴. A skipped tile saves its weights"
        " and its product with v, not its logits: about half of the work."
    )
    section = results.section("Certified skipping", note, load)
    tiles = Bar("falling logits: share of tiles skipped", problem.skipped, 0.5, at_most=False)
    return replace(section, bars=[tiles, *section.bars])


def long(setting: Setting) -> Section:
    queries = setting.plan.long_queries
    progress(f"one call on {long_shape(queries)}")
    run = long_run(setting.library, queries)
    if not run.error_share <= 1:
        raise BenchmarkError(f"{queries} tokens: error is {run.error_share:.3g} times its bound")
    extra = run.extra_bytes / MIB
    relative = run.rate / run.short_rate
    name = f"one head of {queries} causal tokens"
    bars = [
        Bar(f"{name}: GFLOP/s / those at {SHORT_QUERIES}", relative, 0.85, at_most=False),
        Bar(f"{name}: extra MiB", extra, 64, at_most=True),
    ]
    headers = ("heads × length", "contender", "s", "GFLOP/s", "extra MiB", "workspace MiB")
    figures = (f"{run.seconds:.2f}", f"{run.rate:.1f}", f"{extra:.1f}")
    rows = [
        (str(long_shape(queries)), PAPER, *figures, f"{run.workspace / MIB:.1f}"),
        (str(long_shape(SHORT_QUERIES)), PAPER, "", f"{run.short_rate:.1f}", "", ""),
    ]
    note = (
        "float32, one thread, with stats, in a process of its own: growth of its peak in that call,"
        f" and what the workspace query says. {run.sharpened:.0%} of rows with β above 1.2."
    )
    return Section("A long input", note, headers, rows, bars, {})


def memory(setting: Setting) -> Section:
    queries = setting.plan.memory_queries
    extra = {}
    for contender in ("whet", "torch-sdpa", "torch-compile"):
        progress(f"memory of {BOTH}, {contender}")
        extra[contender] = training_bytes(contender, setting.library, queries) / MIB
    share = extra["whet"] / extra["torch-compile"]
    text = f"{BOTH}: extra memory of whet / torch.compile's"
    rows = [(str(full(queries)), name, f"{mib:.1f}") for name, mib in extra.items()]
    note = (
        "Growth of a new process's peak in the second forward + backward, less out, dq, dk, dv."
        " whet's includes the saved rows it keeps in between. whet and torch.compile do the rule."
    )
    headers = ("heads × length", "contender", "extra MiB")
    title = "Memory of forward + backward beyond arguments and results"
    return Section(title, note, headers, rows, [Bar(text, share, 0.5, at_most=True)], {})


def normalizers(setting: Setting) -> Section:
    return normalizer_sections.forward(setting.whet, setting.plan.normalizers)


def normalizers_training(setting: Setting) -> Section:
    return normalizer_sections.training(setting.whet, setting.plan.normalizers)


def linear(setting: Setting) -> Section:
    return linear_section(setting.whet, setting.plan.linear)


ALL = (forward, flat, training, normalizers, normalizers_training, linear, memory, decode, two_threads, busy, skipping, long)
