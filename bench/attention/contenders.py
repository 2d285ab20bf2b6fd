"""The contenders of bench.attention. Import after timing.prepare_process()."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch

from bench.attention.memory import whet_training
from bench.attention.peers import Peers, lean_rule
from bench.attention.reference import (
    Inputs,
    Reference,
    peer_share,
    whet_gradient_share,
)
from bench.rows.peers import torch_rule
from bench.timing import BenchmarkError, Contender
from bench.whet_c import SKIP_EPSILON, STATS_FIELDS, Call, Whet

TARGET_RULE = "target-entropy:0.2"
NONE, PAPER, TARGET = "whet none", "whet paper", f"whet {TARGET_RULE}"
SDPA, FOLDED, FLEX = "torch SDPA", "torch SDPA, group as queries", "FlexAttention"
BLOCKED, LEAN = "paper, blocked torch loop", "paper, blocked torch loop, lean"
EAGER, COMPILE, JAX = "paper, torch eager", "paper, torch.compile", "paper, jax.jit"

Result = torch.Tensor | jax.Array


class Problem:
    """Inputs, an output that all who write into a given array share, and whet's results."""

    def __init__(self, whet: Whet, inputs: Inputs) -> None:
        self._whet = whet
        self.inputs = inputs
        self.peers = Peers(inputs)
        self.out = np.empty_like(inputs.q)
        self._reference = Reference(inputs)
        self._results: dict[str, np.ndarray] = {}
        self._stats: dict[str, np.ndarray] = {}
        self.skipped = 0.0  # share of tiles, rule paper

    def call(self, rule: str, threads: int = 1, **options: object) -> Call:
        causal = self.inputs.shape.causal
        arrays = (*self.inputs.arrays, self.out)
        return self._whet.attention(*arrays, rule=rule, causal=causal, threads=threads, **options)

    def result(self, rule: str) -> np.ndarray:
        """whet's whole output, with one thread and with stats."""
        if rule not in self._results:
            stats = np.empty((self.inputs.q[..., 0].size, len(STATS_FIELDS)))
            tiles = np.zeros(2, np.int64)
            self.call(rule, stats=stats, tile_counts=tiles)()
            self._results[rule], self._stats[rule] = self.out.copy(), stats
            if rule == "paper":
                self.skipped = float(tiles[1] / tiles[0])
        return self._results[rule]

    def stats(self, rule: str, field: str) -> np.ndarray:
        self.result(rule)
        return self._stats[rule][:, STATS_FIELDS.index(field)]

    def whet(
        self, rule: str, threads: int = 1, name: str = "", skip_epsilon: float = SKIP_EPSILON
    ) -> Contender:
        call = self.call(rule, threads, skip_epsilon=skip_epsilon)

        def verify() -> float:
            expected = self.result(rule)
            self.out.fill(np.nan)
            call()
            if skip_epsilon == SKIP_EPSILON and not np.array_equal(self.out, expected):
                raise BenchmarkError(f"{name or rule}: other bits than with one thread and stats")
            return self._reference.whet_share(rule, self.out, self.stats(rule, "beta"))

        return Contender(name or f"whet {rule}", call, verify, threads, _settle)

    def peer(
        self, name: str, call: Callable[[], Result], rule: str = "paper", threads: int = 1
    ) -> Contender:
        def verify() -> float:
            largest = float(np.abs(self.inputs.v.astype(np.float32)).max())
            return peer_share(to_numpy(call()), self.result(rule), largest)

        return Contender(name, call, verify, threads, lambda: _settle(threads))

    def sdpa(self, threads: int = 1, name: str = SDPA) -> Contender:
        return self.peer(name, self.peers.sdpa, "none", threads)


def _settle(torch_threads: int = 1) -> None:
    if torch.get_num_threads() > 1:
        time.sleep(0.25)  # OpenMP's threads spin for a while, also beside the next contender
    torch.set_num_threads(torch_threads)


def to_numpy(result: Result) -> np.ndarray:
    if isinstance(result, torch.Tensor):
        result = result.detach().float()  # NumPy has no bf16
    return np.asarray(result)


def basic_contenders(problem: Problem) -> list[Contender]:
    return [problem.sdpa(), problem.whet("none"), problem.whet("paper")]


def rule_contenders(problem: Problem) -> list[Contender]:
    """What is affordable for all but the longest inputs."""
    blocked = problem.peers.blocked(torch_rule)
    return [problem.whet(TARGET_RULE), problem.peer(BLOCKED, blocked)]


def framework_contenders(problem: Problem) -> list[Contender]:
    """What needs compiling, or room for all weights."""
    peers = problem.peers
    return [
        problem.peer(LEAN, peers.blocked(lean_rule)),
        problem.peer(EAGER, peers.eager),
        problem.peer(COMPILE, peers.compiled()),
        problem.peer(JAX, peers.jax()),
        problem.peer(FLEX, peers.flex(), "none"),
    ]


def threaded(name: str, threads: int) -> str:
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def thread_contenders(problem: Problem) -> list[Contender]:
    contenders = []
    for threads in (1, 2):
        contenders.append(problem.sdpa(threads, threaded(SDPA, threads)))
        contenders.append(problem.whet("paper", threads, threaded(PAPER, threads)))
    return contenders


def decode_contenders(problem: Problem, half: Problem) -> list[Contender]:
    """`half`: the same in bf16."""
    contenders = thread_contenders(problem)
    for at, dtype in ((problem, ""), (half, ", bf16")):
        folded = at.peers.sdpa_folded
        for threads in (1, 2):
            name = threaded(FOLDED + dtype, threads)
            contenders.append(at.peer(name, folded, "none", threads))
            if dtype:
                contenders.append(at.whet("paper", threads, threaded(PAPER + dtype, threads)))
    contenders.append(problem.whet("none", 1, threaded(NONE, 1)))
    return contenders


class Training:
    """Forward that saves rows, then backward from them: dq, dk, dv."""

    def __init__(self, whet: Whet, inputs: Inputs) -> None:
        self._whet = whet
        self._inputs = inputs
        self._peers = Peers(inputs)
        random = np.random.default_rng(0)
        self._dout = random.standard_normal(inputs.q.shape, dtype=np.float32)

    def whet(self, rule: str) -> Contender:
        call, gradients = whet_training(self._whet, self._inputs, self._dout, rule)

        def verify() -> float:
            for gradient in gradients.values():
                gradient.fill(np.nan)
            call()
            return whet_gradient_share(self._inputs, self._dout, rule, gradients)

        return Contender(f"whet {rule}", call, verify)

    def peer(self, name: str, attention: Callable[[], torch.Tensor], rule: str) -> Contender:
        call = self._peers.gradients(attention, self._dout)

        def verify() -> float:
            run, ours = whet_training(self._whet, self._inputs, self._dout, rule)
            run()
            pairs = zip(call(), ours.values(), strict=True)
            return max(peer_share(to_numpy(a), b, float(np.abs(b).max())) for a, b in pairs)

        return Contender(name, call, verify, setup=_settle)

    def contenders(self, names: Sequence[str]) -> list[Contender]:
        """whet paper, SDPA and those named."""
        peers = self._peers
        every = {
            PAPER: lambda: self.whet("paper"),
            NONE: lambda: self.whet("none"),
            SDPA: lambda: self.peer(SDPA, peers.sdpa, "none"),
            COMPILE: lambda: self.peer(COMPILE, peers.compiled(), "paper"),
            EAGER: lambda: self.peer(EAGER, peers.eager, "paper"),
        }
        return [make() for name, make in every.items() if name in (PAPER, SDPA, *names)]
