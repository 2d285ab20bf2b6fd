"""Verified, interleaved timing, and what a reader needs to know of the machine it ran on.

A contender is verified before it is timed. Then rounds follow in which every contender runs once,
in an order that rotates, so that a slow second of the machine hits all of them; ratios are taken
within a round and the median over rounds is reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

MIN_ROUNDS = 7
clock = time.perf_counter  # bench.command's --cpu-time changes it
IDLE = 0.1  # processors that others may keep busy on an idle machine
MAX_CPU_SHARE = 1.2  # CPU seconds per second of a contender with one thread; JAX has one more that waits beside it


class BenchmarkError(Exception):
    """A contender is wrong, or did not run as it says: no timing would mean anything."""


def progress(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def prepare_process() -> list[int]:
    """Two processors, one thread for every peer, a heap that keeps freed memory.

    Call before torch or jax is imported: they read these variables once. Returns the processors.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
        os.environ[name] = "1"  # XLA sizes its pool by NPROC
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Otherwise a framework that allocates its results pays for fresh pages now and then (the rule
    # in torch eager then took four times as long); kept memory shows each peer at its best.
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, 32 << 20)
    libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    cpus = _cores(sorted(os.sched_getaffinity(0)))[:2]
    os.sched_setaffinity(0, cpus)
    return cpus


def _cores(cpus: Sequence[int]) -> list[int]:
    """One processor of each core: hardware siblings would pass for a second core."""
    first: dict[str, int] = {}
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(first.values())


@dataclass(frozen=True)
class Contender:
    name: str
    call: Callable[[], object]
    verify: Callable[[], float]  # runs it; its error as a share of the tolerance, at most 1
    threads: int = 1
    setup: Callable[[], object] = lambda: None  # untimed, before each round


@dataclass
class Timing:
    name: str
    threads: int
    error_share: float
    repetitions: int
    seconds: list[float] = field(default_factory=list)  # one call's, one entry per round
    cpu_share: float = 0.0  # CPU seconds of this process per second
    faults: float = 0.0  # page faults per call

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        return _quartiles(self.seconds)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def ratio(timings: dict[str, Timing], a: str, b: str) -> float:
    """Median over rounds of time(a) / time(b)."""
    pairs = zip(timings[a].seconds, timings[b].seconds, strict=True)
    return statistics.median(x / y for x, y in pairs)


def verified_timings(
    contenders: Sequence[Contender], rounds: int, min_seconds: float = 0.010
) -> dict[str, Timing]:
    """Verifies all, then times all, interleaved."""
    if rounds < MIN_ROUNDS:
        raise BenchmarkError(f"{rounds} rounds; at least {MIN_ROUNDS} are needed")
    timings = {c.name: _verified(c, min_seconds) for c in contenders}
    for contender in contenders:  # once more in turn: the heap grows to what all of them need
        contender.setup()
        contender.call()
    usage = {c.name: _Usage() for c in contenders}
    for number in range(rounds):
        shift = number % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            timing = timings[contender.name]
            contender.setup()
            with usage[contender.name]:
                start = clock()
                for _ in range(timing.repetitions):
                    contender.call()
                elapsed = clock() - start
            timing.seconds.append(elapsed / timing.repetitions)
    for timing in timings.values():
        timing.cpu_share = usage[timing.name].cpu / usage[timing.name].wall
        timing.faults = usage[timing.name].faults / (timing.repetitions * rounds)
        if timing.threads == 1 and timing.cpu_share > MAX_CPU_SHARE:
            raise BenchmarkError(
                f"{timing.name} used {timing.cpu_share:.2f} CPU seconds per second with one thread"
            )
    return timings


def _verified(contender: Contender, min_seconds: float) -> Timing:
    contender.setup()
    share = contender.verify()
    if not share <= 1:  # also NaN
        raise BenchmarkError(f"{contender.name}: error is {share:.3g} times its tolerance")
    contender.call()
    start = clock()
    contender.call()
    elapsed = clock() - start
    repetitions = max(1, math.ceil(min_seconds / elapsed))
    return Timing(contender.name, contender.threads, share, repetitions)


class _Usage:
    """Sums CPU time, wall time and page faults of this process over `with` blocks."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self.faults = 0

    def __enter__(self) -> None:
        self._start = (time.process_time(), time.perf_counter(), _page_faults())

    def __exit__(self, *_: object) -> None:
        cpu, wall, faults = self._start
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall
        self.faults += _page_faults() - faults


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def busy_neighbour(cpu: int) -> Iterator[None]:
    """A process of its own that keeps one processor busy; it also ends when this one dies."""
    spin = (
        "import os, sys\n"
        "os.sched_setaffinity(0, [int(sys.argv[1])])\n"
        "while os.getppid() == int(sys.argv[2]):\n"
        "    for _ in range(100_000): pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", spin, str(cpu), str(os.getpid())])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


class OtherLoad:
    """Processors that other programs (a neighbour of ours included) kept busy in a `with` block."""

    def __enter__(self) -> OtherLoad:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        machine, own, wall = (b - a for a, b in zip(self._start, self._now(), strict=True))
        self.processors = max(0.0, machine - own) / wall

    @staticmethod
    def _now() -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _wait, irq, softirq = (int(f) for f in fields[:7])
        busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.perf_counter()


def machine_facts(cpus: Sequence[int]) -> dict[str, str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "numpy"))
    load = os.getloadavg()
    return {
        "CPU": _cpu_model(),
        "processors": f"{os.cpu_count()}, this run on {', '.join(map(str, cpus))}",
        "caches": _caches(cpus[0]),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {packages}",
        "load average at start": f"{load[0]:.2f} {load[1]:.2f} {load[2]:.2f}",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _caches(cpu: int) -> str:
    found = []
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        level, kind, size = ((index / f).read_text().strip() for f in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"
