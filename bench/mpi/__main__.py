"""Strong and weak scaling of whet::mpi on 1, 2 and 4 ranks: python -m bench.mpi --build DIR [--keys N].

Every rank has one thread. Outputs are compared with whet::attention before anything is timed; a round is as long as on the
slowest rank, and a number is the median of five. The last table is what `whet scale` says of two ranks, given the speed of
one process and of messages as they were measured here. More ranks than processors share them, and wait by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.report import table
from bench.timing import progress

RANKS = (1, 2, 4)
HEADS, SIZE = 4, 64


def main() -> int:
    parser = argparse.ArgumentParser(description="scaling of whet::mpi on 1, 2 and 4 ranks")
    parser.add_argument("--build", type=Path, required=True, help="folder of a release build with MPI")
    parser.add_argument("--keys", type=int, default=16384)
    options = parser.parse_args()
    found = [line for ranks in RANKS for line in _measure(options.build, ranks, options.keys)]
    print(f"# Attention on MPI ranks\n\n{HEADS} heads of {SIZE}, {options.keys:,} keys and as many queries (decoding: "
          f"one query of 32 heads; weak: {options.keys // 4:,} queries, and as many keys per rank), float32, a thread per "
          f"rank, {len(os.sched_getaffinity(0))} processors\n")
    print(_times(found))
    print()
    print(_predictions(options.build, found, options.keys))
    return 0


def _measure(build: Path, ranks: int, keys: int) -> list[dict[str, Any]]:
    progress(f"{ranks} ranks")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    bind = "core" if ranks <= len(os.sched_getaffinity(0)) else "none"
    command = ["mpirun", "--oversubscribe", "--bind-to", bind, *root, "-n", str(ranks), build / "bin/bench_mpi", str(keys)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _seconds(found: list[dict[str, Any]], **wanted: Any) -> float:
    return next(line["seconds"] for line in found if all(line.get(name) == value for name, value in wanted.items()))


def _times(found: list[dict[str, Any]]) -> str:
    rows = []
    for case in ("forward", "forward + backward", "decoding", "weak"):
        for rule in ("none", "paper"):
            alone = _seconds(found, case=case, rule=rule, scheme="one process")
            for scheme in ("in place", "ring"):
                if case == "decoding" and scheme == "ring":
                    continue
                times = [_seconds(found, case=case, rule=rule, scheme=scheme, ranks=ranks) for ranks in RANKS]
                shown = [f"{alone * 1e3:.2f}", *(f"{time * 1e3:.2f} ({alone / time:.2f})" for time in times)]
                rows.append((f"{case}, {scheme}, {rule}", *shown))
    heads = ("ms (speed-up over one process)", "whet::attention", *(f"{ranks} ranks" for ranks in RANKS))
    return table(heads, rows)


def _predictions(build: Path, found: list[dict[str, Any]], keys: int) -> str:
    alone = _seconds(found, case="forward", rule="none", scheme="one process")
    flops = 4 * HEADS * SIZE * float(keys) ** 2 / alone
    latency = _seconds(found, case="message", bytes=8, ranks=2)
    bandwidth = (8 << 20) / _seconds(found, case="message", bytes=8 << 20, ranks=2)
    command = [build / "bin/whet", "scale", "--json", "--tokens", keys, "--ranks", 2, "--heads", HEADS, "--key-heads", HEADS,
               "--head-size", SIZE, "--element-bytes", 4, "--flops", flops, "--latency", latency, "--bandwidth", bandwidth]
    scale = json.loads(subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout)
    rows = []
    for rule, kind in (("none", "none"), ("paper", "state")):
        for scheme in ("in place", "ring"):
            predicted = next(line["seconds"] for line in scale["forward"]
                             if (line["scheme"], line["rule"]) == (scheme, kind))
            measured = _seconds(found, case="forward", rule=rule, scheme=scheme, ranks=2)
            rows.append((f"forward, {scheme}, {rule}", f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}",
                         f"{measured / predicted:.2f}"))
    return (f"`whet scale` for two ranks, with {flops / 1e9:.0f} Gflop/s of one process, {bandwidth / 1e9:.2f} GB/s and "
            f"{latency * 1e6:.2f} µs per message:\n\n"
            + table(("ms", "predicted", "measured", "measured / predicted"), rows))


if __name__ == "__main__":
    sys.exit(main())
