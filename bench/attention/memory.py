"""Memory that calls need beyond their arguments and results, and one call on a very long input.

    python -m bench.attention.memory train CONTENDER LIBRARY QUERIES
    python -m bench.attention.memory long LIBRARY QUERIES

print JSON: {"extra_bytes": ...}, and a Long. A process of its own for each figure, so that no
earlier call's memory is used again. CONTENDER: whet, torch-sdpa or torch-compile.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.attention.reference import Inputs, Reference, Shape, sharpened
from bench.rows.memory import peak_growth
from bench.whet_c import STATS_FIELDS, Whet

ROOT = Path(__file__).resolve().parents[2]
SHORT_QUERIES = 8192
SHORT_CALLS = 7


def training_bytes(contender: str, library: Path, queries: int) -> int:
    """Forward and backward, 8 heads of 64, one thread."""
    return _run("train", contender, library, queries)["extra_bytes"]


@dataclass(frozen=True)
class Long:
    """One head of causal attention, d 64, rule paper, one thread."""

    queries: int
    error_share: float  # of what is allowed
    sharpened: float  # share of rows with beta > 1.2
    seconds: float
    short_seconds: list[float]  # of SHORT_QUERIES, before and after
    extra_bytes: int
    workspace: int

    @property
    def rate(self) -> float:
        """GFLOP/s"""
        return long_shape(self.queries).flops / self.seconds / 1e9

    @property
    def short_rate(self) -> float:
        return long_shape(SHORT_QUERIES).flops / statistics.median(self.short_seconds) / 1e9


def long_shape(queries: int) -> Shape:
    return Shape(queries, queries, heads=1, key_heads=1, causal=True)


def long_run(library: Path, queries: int) -> Long:
    return Long(**_run("long", library, queries))


def _run(*arguments: object) -> dict:
    command = [sys.executable, "-m", "bench.attention.memory", *(str(a) for a in arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return json.loads(done.stdout)


def whet_training(
    whet: Whet, inputs: Inputs, dout: np.ndarray, rule: str, normalizer: str = "softmax"
) -> tuple[Callable[[], object], dict[str, np.ndarray]]:
    """Forward that saves rows and backward from them as one call, and where the gradients go."""
    out = np.empty_like(inputs.q)
    gradients = {f"d{name}": np.empty_like(a) for name, a in zip("qkv", inputs.arrays, strict=True)}
    saved = whet.new_saved(inputs.q[..., 0].size, rule, normalizer)
    names = {"rule": rule, "normalizer": normalizer}
    options = {**names, "causal": inputs.shape.causal, "threads": 1, "saved": saved}
    forward = whet.attention(*inputs.arrays, out, **options)
    backward = whet.attention_backward(*inputs.arrays, dout, gradients, **options)

    def call() -> None:
        forward()
        backward()

    return call, gradients


def _training(
    contender: str, library: str, inputs: Inputs, dout: np.ndarray
) -> Callable[[], object]:
    """Allocates all that it needs when it is called."""
    if contender == "whet":
        whet = Whet(library)
        return lambda: whet_training(whet, inputs, dout, "paper")[0]()
    import torch  # here only: whet is measured in a process without it

    from bench.attention.peers import Peers

    torch.set_num_threads(1)
    peers = Peers(inputs)
    attention = peers.sdpa if contender == "torch-sdpa" else peers.compiled()
    return peers.gradients(attention, dout)


def _train(contender: str, library: str, queries: int) -> dict:
    inputs = sharpened(Shape(queries, queries))
    call = _training(contender, library, inputs, np.ones_like(inputs.q))
    call()  # starts threads, loads and compiles code
    results = 4 * inputs.q.nbytes  # out, dq, dk, dv
    return {"extra_bytes": peak_growth(call) - results}


def _long(library: str, queries: int) -> dict:
    whet = Whet(library)
    options = {"rule": "paper", "causal": True, "threads": 1}
    small = sharpened(long_shape(SHORT_QUERIES))
    small_call = whet.attention(*small.arrays, np.empty_like(small.q), **options)
    small_call()
    before = [_seconds(small_call) for _ in range(SHORT_CALLS)]
    inputs = sharpened(long_shape(queries))
    out = np.ones_like(inputs.q)
    stats = np.ones((queries, len(STATS_FIELDS)))
    call = whet.attention(*inputs.arrays, out, stats=stats, **options)
    seconds: list[float] = []
    extra = peak_growth(lambda: seconds.append(_seconds(call)))
    after = [_seconds(small_call) for _ in range(SHORT_CALLS)]
    beta = stats[:, STATS_FIELDS.index("beta")]
    long = Long(
        queries=queries,
        error_share=Reference(inputs).whet_share("paper", out, beta),
        sharpened=float(np.mean(beta > 1.2)),
        seconds=seconds[0],
        short_seconds=before + after,
        extra_bytes=extra,
        workspace=whet.attention_workspace(*inputs.arrays, **options),
    )
    return asdict(long)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    if sys.argv[1] == "train":
        contender, library, queries = sys.argv[2:]
        result = _train(contender, library, int(queries))
    else:
        library, queries = sys.argv[2:]
        result = _long(library, int(queries))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
