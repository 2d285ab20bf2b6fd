"""whet through NumPy and JAX, beside JAX's own functions: python -m bench.python.jax_calls [--quick] [--strict].

What a small call costs, and whether the kernels keep their speed behind XLA's FFI. One thread each; every contender is
verified against float64, then timed interleaved (timing.py). Needs the package whet, installed or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np

from bench.report import Bar, bar_table, table
from bench.timing import (BenchmarkError, Contender, OtherLoad, Timing, machine_facts, prepare_process, progress, ratio,
                    verified_timings)

CPUS = prepare_process()  # before jax is imported

import jax
import jax.numpy as jnp
import whet
import whet.jax

JAX = "jax.nn, jit"
TOLERANCE = 1e-5


def call_of(function: Callable, *arrays: jax.Array) -> Callable[[], object]:
    return lambda: jax.block_until_ready(function(*arrays))


def contender(name: str, call: Callable[[], object], expected: np.ndarray) -> Contender:
    def verify() -> float:
        return float(np.abs(np.asarray(call(), np.float64) - expected).max() / TOLERANCE)

    return Contender(name, call, verify)


def reference(rows: np.ndarray, rule: str) -> np.ndarray:
    return whet.softmax(rows.astype(np.float64), rule=rule)


def row_contenders(rows: int, keys: int) -> list[Contender]:
    x = np.random.default_rng(0).normal(size=(rows, keys)).astype(np.float32)
    on_device = jnp.asarray(x)
    plain = reference(x, "none")
    paper = jax.jit(lambda x: whet.jax.softmax(x, rule="paper"))
    return [contender(JAX, call_of(jax.jit(jax.nn.softmax), on_device), plain),
            contender("whet.jax none, jit", call_of(jax.jit(whet.jax.softmax), on_device), plain),
            contender("whet.jax paper, jit", call_of(paper, on_device), reference(x, "paper")),
            contender("jax.nn, no jit", call_of(jax.nn.softmax, on_device), plain),
            contender("whet.jax none, no jit", call_of(whet.jax.softmax, on_device), plain),
            contender("whet none (NumPy)", lambda: whet.softmax(x), plain)]


def attention_contenders(queries: int, heads: int, size: int, gradient: bool) -> list[Contender]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, queries, heads, size)).astype(np.float32) for _ in range(3))
    on_device = [jnp.asarray(a) for a in (q, k, v)]
    first = [a.swapaxes(1, 2).astype(np.float64) for a in (q, k, v)]

    def made(name: str, function: Callable, rule: str) -> Contender:
        if not gradient:
            expected = whet.attention(*first, rule=rule).swapaxes(1, 2)
            return contender(name, call_of(jax.jit(function), *on_device), expected)
        # The first of the three is what is compared.
        slope = jax.jit(jax.grad(lambda q, k, v: function(q, k, v).sum(), (0, 1, 2)))
        expected = whet.attention_backward(*first, np.ones_like(first[0]), rule=rule).dquery.swapaxes(1, 2)
        compared = contender(name, lambda: slope(*on_device)[0], expected)
        return Contender(name, call_of(slope, *on_device), compared.verify)

    return [made(JAX, jax.nn.dot_product_attention, "none"),
            made("whet.jax none, jit", whet.jax.attention, "none"),
            made("whet.jax paper, jit", lambda *a: whet.jax.attention(*a, rule="paper"), "paper")]


def rows_of(shape: str, timings: dict[str, Timing]) -> list[tuple[str, ...]]:
    rows = []
    for name, timing in timings.items():
        low, high = timing.quartiles
        rows.append((shape, name, f"{1e6 * timing.median:.2f}", f"{1e6 * low:.2f}..{1e6 * high:.2f}",
                     f"{ratio(timings, name, JAX):.2f}", f"{timing.error_share:.2f}"))
    return rows


def bars_of(results: dict[str, dict[str, Timing]]) -> list[Bar]:
    small, rows, heads = results["1 x 16"], results["64 x 65536"], results["8 heads x 1024, size 64"]
    return [Bar("NumPy, 1 x 16, microseconds per call", 1e6 * small["whet none (NumPy)"].median, 10, True),
            Bar("whet.jax none / jax.nn, 64 x 65536", ratio(rows, "whet.jax none, jit", JAX), 1, True),
            Bar("whet.jax paper / jax.nn (plain), 64 x 65536", ratio(rows, "whet.jax paper, jit", JAX), 1, True),
            Bar("whet.jax none / jax.nn, attention", ratio(heads, "whet.jax none, jit", JAX), 1, True),
            Bar("whet.jax paper / jax.nn (plain), attention", ratio(heads, "whet.jax paper, jit", JAX), 1, True)]


def measure(rounds: int) -> dict[str, dict[str, Timing]]:
    cases = {"1 x 16": lambda: row_contenders(1, 16), "64 x 65536": lambda: row_contenders(64, 65536),
             "8 heads x 1024, size 64": lambda: attention_contenders(1024, 8, 64, gradient=False),
             "its gradient": lambda: attention_contenders(1024, 8, 64, gradient=True)}
    results = {}
    for shape, contenders in cases.items():
        progress(shape)
        results[shape] = verified_timings(contenders(), rounds)
    return results


def run(options: argparse.Namespace) -> int:
    whet.set_num_threads(1)
    facts = machine_facts(CPUS) | {"whet": f"{whet.version()}, target {whet.simd_target()}"}
    with OtherLoad() as load:
        results = measure(7 if options.quick else 21)
    facts["busy with others"] = f"{load.processors:.2f} processors"
    print("\n# Calls through JAX and NumPy\n")
    print("\n".join(f"- {name}: {fact}" for name, fact in facts.items()), end="\n\n")
    headers = ("shape", "contender", "median, µs", "quartiles", f"× {JAX}", "error / tolerance")
    rows = [row for shape, timings in results.items() for row in rows_of(shape, timings)]
    print(table(headers, rows, left=2), end="\n\n")
    bars = bars_of(results)
    print(bar_table(bars))
    return 1 if options.strict and not all(bar.reached for bar in bars) else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="whet through NumPy and JAX beside JAX's own functions")
    parser.add_argument("--quick", action="store_true", help="seven rounds")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BenchmarkError as error:
        sys.exit(f"bench.python.jax_calls: {error}")
