"""Attention over keys on two processes beside the same on one: python -m bench.sharded [--quick] [--strict].

Each process has a thread and a core of its own and half of the keys (whet.torch.distributed over gloo); one process alone
has all of them (whet.torch). Rounds alternate between both; a round of two processes is as long as the longer one. Results
are compared before anything is timed. "rule / none" is the time of the paper's rule over that of plain softmax, on two
processes both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Bar, bar_table, table
from bench.timing import prepare_process, progress

ROUNDS = 7
SPEEDUP, RULE, DECODE = 1.7, 1.05, 1.1
PROCESSES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description="attention over keys on two processes beside the same on one")
    parser.add_argument("--quick", action="store_true", help="4,096 keys instead of 16,384")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keys = 4096 if options.quick else 16384
    if options.rank is not None:
        _process(options.rank, options.store, keys)
        return 0
    cpus = prepare_process()
    if len(cpus) < PROCESSES:
        print(f"needs {PROCESSES} processors, has {len(cpus)}", file=sys.stderr)
        return 2
    found = _measure(cpus, keys, options.quick)
    rows = [(f"{name}, {rule}", f"{one * 1e3:.1f}", f"{two * 1e3:.1f}", f"{ratio:.2f}")
            for name, rule, one, two, ratio in found]
    print(f"# Keys on two processes\n\n4 heads of 64, {keys:,} keys and as many queries (decoding: one query of 32 heads), "
          f"float32\n\n{table(('', '1 process, ms', '2 processes, ms', 'speed-up'), rows)}\n")
    bars = _bars(found)
    print(bar_table(bars))
    return 1 if options.strict and not all(bar.reached for bar in bars) else 0


def _measure(cpus: list[int], keys: int, quick: bool) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "bench.sharded", *(["--quick"] if quick else []), "--store", f"{folder}/store"]
        started = [subprocess.Popen([*line, "--rank", str(rank)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
                                    preexec_fn=lambda cpu=cpu: os.sched_setaffinity(0, [cpu]))
                   for rank, cpu in enumerate(cpus[:PROCESSES])]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed")
    return json.loads(outputs[0])


def _bars(found: list[Any]) -> list[Bar]:
    by_name = {(name, rule): (one, two, ratio) for name, rule, one, two, ratio in found}
    bars = [Bar(f"{name}, {rule}: speed-up", by_name[name, rule][2], SPEEDUP, at_most=False)
            for name in ("forward", "forward + backward") for rule in ("none", "paper")]
    rule_costs = by_name["forward", "paper"][1] / by_name["forward", "none"][1]
    bars.append(Bar("forward: rule / none", rule_costs, RULE, at_most=True))
    bars += [Bar(f"decoding, {rule}: two processes / one", 1 / by_name["decoding", rule][2], DECODE, at_most=True)
             for rule in ("none", "paper")]
    return bars


def _process(rank: int, store: str, keys: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, PROCESSES), rank=rank, world_size=PROCESSES)
    cases = (("forward", 4, keys), ("forward + backward", 4, keys), ("decoding", 32, 1))
    found = [_case(rank, *case, keys, rule) for case in cases for rule in ("none", "paper")]
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()


def _case(rank: int, name: str, heads: int, queries: int, keys: int, rule: str) -> Any:
    import torch
    from whet.torch import attention as whole
    from whet.torch.distributed import attention

    if rank == 0:
        progress(f"{name}, {rule}")
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, rows, 64) for rows in (queries, keys, keys))
    own = slice(keys * rank // PROCESSES, keys * (rank + 1) // PROCESSES)
    shards = [key[:, :, own].contiguous(), value[:, :, own].contiguous()]
    if name == "forward + backward":
        for tensor in (query, key, value, *shards):
            tensor.requires_grad_()

    def one() -> Any:
        return _run(whole(query, key, value, rule=rule), name)

    def two() -> Any:
        return _run(attention(query, *shards, rule=rule), name)

    torch.testing.assert_close(two(), one(), rtol=1e-3, atol=1e-4)
    times = [(_timed(one if rank == 0 else None), _timed(two)) for _ in range(ROUNDS)]
    alone, together = ([pair[i] for pair in times] for i in (0, 1))
    return name, rule, statistics.median(alone), statistics.median(together), statistics.median(a / b for a, b in times)


def _run(out: Any, name: str) -> Any:
    if name == "forward + backward":
        out.sum().backward()
    return out.detach()


def _timed(function: Any) -> float:
    """Until the last process is done; None waits for the others."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    if function is not None:
        function()
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
