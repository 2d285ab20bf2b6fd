"""Memory that one call needs beyond its arguments: the growth of this process's peak.

    python -m bench.rows.memory CONTENDER LIBRARY ROWS KEYS THREADS

prints bytes. CONTENDER: a rule of whet, torch-softmax or torch-rule. A process of its own for each
figure, so that no earlier call's memory is used again.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.whet_c import Whet

ROOT = Path(__file__).resolve().parents[2]
COUNTING_ERROR = 256 << 10  # bytes; the kernel adds up a process's pages in batches


def extra_bytes(contender: str, library: Path, shape: tuple[int, int], threads: int) -> int:
    """Runs this file for one contender."""
    command = [sys.executable, "-m", "bench.rows.memory", contender, library, *shape, threads]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, cwd=ROOT)
    return int(done.stdout)


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def peak_growth(call: Callable[[], object]) -> int:
    ctypes.CDLL(None).malloc_trim(0)  # or the call could live on what start-up left behind
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use now
    before = _peak_bytes()
    call()
    return _peak_bytes() - before


def _call(
    contender: str, library: str, x: np.ndarray, out: np.ndarray, threads: int
) -> Callable[[], object]:
    if not contender.startswith("torch"):
        return Whet(library).softmax(x, out, rule=contender, threads=threads)
    import torch  # here only: whet is measured in a process without it

    from bench.rows.peers import torch_rule

    torch.set_num_threads(threads)
    x_torch, out_torch = torch.from_numpy(x), torch.from_numpy(out)
    if contender == "torch-softmax":
        return lambda: torch.softmax(x_torch, -1, out=out_torch)
    return lambda: torch_rule(x_torch)


def main() -> None:
    contender, library = sys.argv[1:3]
    rows, keys, threads = map(int, sys.argv[3:])
    x = np.random.default_rng(0).standard_normal((rows, keys), dtype=np.float32)
    out = np.ones_like(x)
    small = np.ones((64, 1024), np.float32)  # its call starts threads and loads code
    _call(contender, library, small, np.ones_like(small), threads)()
    print(peak_growth(_call(contender, library, x, out, threads)))


if __name__ == "__main__":
    main()
