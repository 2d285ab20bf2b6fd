"""whet through its torch door, beside torch's own: python -m bench.python.torch_calls [--quick] [--strict].

Needs torch and the package whet in the running interpreter. Overhead is what a call costs on inputs too small to cost
anything; the ratios are the ones of bench.rows and bench.attention, called the way a model calls. Every contender
is compared with torch in float64 before it is timed; rounds are interleaved (timing.py). One thread each.

The last two parts alternate operators of torch and whet, as a model does, on two threads: attention right after an
operator of torch, whose workers then still spin, and a decoder layer with whet's attention beside the same on SDPA.
What has a rule is compared there with itself in float64.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from bench.report import Bar, bar_table, table
from bench.timing import BenchmarkError, Contender, Timing, prepare_process, progress, ratio, verified_timings

if TYPE_CHECKING:
    from torch import Tensor

CALL_BAR = 25.0  # microseconds
RATIO_BAR = 1.0  # a rule costs no more than torch's plain function
THREADS_BAR = 1.8  # two threads against one
BOUND = 1e-5  # of the largest expected value


def main() -> int:
    parser = argparse.ArgumentParser(description="whet.torch beside torch")
    parser.add_argument("--quick", action="store_true", help="seven rounds instead of 21")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    prepare_process()

    import torch  # reads the environment once
    import whet

    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"# Calls through torch\n\ntorch {version('torch')}, whet {whet.version()}, target {whet.simd_target()}, "
          "one thread unless said\n")
    rounds = 7 if options.quick else 21
    bars = [*_small_calls(rounds), *_rows(rounds), *_attention(rounds), *_after_an_operator(rounds), *_decoder(rounds)]
    print(bar_table(bars))
    return 1 if options.strict and not all(bar.reached for bar in bars) else 0


def _contender(name: str, call: Callable[[], object], expected: Sequence[Tensor], threads: int = 1,
               setup: Callable[[], object] = lambda: None) -> Contender:
    """`call` gives a tensor or several, of which each must be near the expected one."""
    import torch

    def verify() -> float:
        found = call()
        found = [found] if isinstance(found, torch.Tensor) else found
        errors = ((f.detach().double() - e).abs().max() / (BOUND * e.abs().max()) for f, e in zip(found, expected))
        return float(max(errors))

    return Contender(name, call, verify, threads, setup)


def _plain_only(contender: Contender) -> Contender:
    """A rule gives other values than torch does; the tests compare them with an oracle."""
    return Contender(contender.name, contender.call, lambda: 0.0)


def _measured(title: str, contenders: Sequence[Contender], rounds: int, unit: float, name: str,
              min_seconds: float = 0.05) -> dict[str, Timing]:
    progress(title)
    timings = verified_timings(contenders, rounds, min_seconds)
    first = contenders[0].name
    rows = [(t.name, f"{t.median / unit:.2f}", " to ".join(f"{q / unit:.2f}" for q in t.quartiles),
             f"{ratio(timings, t.name, first):.2f}") for t in timings.values()]
    print(f"{title}\n\n{table(('call', f'median {name}', 'quartiles', f'/ {first}'), rows)}\n")
    return timings


def _small_calls(rounds: int) -> list[Bar]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from whet.torch import attention, softmax

    x, q = torch.randn(1, 16), torch.randn(1, 2, 4, 8)
    y, p = x.clone().requires_grad_(), q.clone().requires_grad_()
    soft, sdpa = torch.softmax(x.double(), -1), scaled_dot_product_attention(*(q.double(),) * 3)
    rows = [
        _contender("torch.softmax", lambda: torch.softmax(x, -1), [soft]),
        _contender("softmax", lambda: softmax(x), [soft]),
        _plain_only(_contender("softmax, paper", lambda: softmax(x, rule="paper"), [soft])),
        _plain_only(_contender("softmax, paper, stats", lambda: softmax(x, rule="paper", return_stats=True), [soft])),
        _contender("softmax, recording", lambda: softmax(y), [soft]),
        _contender("the operator whet::softmax", lambda: torch.ops.whet.softmax(x, dim=1)[0], [soft]),
    ]
    heads = [
        _contender("F.scaled_dot_product_attention", lambda: scaled_dot_product_attention(q, q, q), [sdpa]),
        _contender("attention", lambda: attention(q, q, q), [sdpa]),
        _plain_only(_contender("attention, paper, causal", lambda: attention(q, q, q, is_causal=True, rule="paper"),
                               [sdpa])),
        _contender("attention, recording", lambda: attention(p, p, p), [sdpa]),
    ]
    of_rows = _measured("A call on one row of 16 logits", rows, rounds, 1e-6, "µs")
    of_heads = _measured("A call on 2 heads of 4 queries and keys, d 8", heads, rounds, 1e-6, "µs")
    return [Bar(f"{name}, µs per call", timings[name].median * 1e6, CALL_BAR, at_most=True)
            for timings, name in ((of_rows, "softmax"), (of_rows, "softmax, paper"), (of_heads, "attention"),
                                  (of_heads, "attention, paper, causal"))]


def _rows(rounds: int) -> list[Bar]:
    import torch
    from whet.torch import softmax

    x = torch.randn(64, 65536)
    expected = [torch.softmax(x.double(), -1)]
    timings = _measured("64 rows of 65,536 logits", [
        _contender("torch.softmax", lambda: torch.softmax(x, -1), expected),
        _contender("softmax", lambda: softmax(x), expected),
        _plain_only(_contender("softmax, paper", lambda: softmax(x, rule="paper"), expected)),
    ], rounds, 1e-3, "ms")
    return [Bar("rows: softmax, paper / torch.softmax", ratio(timings, "softmax, paper", "torch.softmax"), RATIO_BAR,
                at_most=True)]


def _attention(rounds: int) -> list[Bar]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from whet.torch import attention

    given = [torch.randn(1, 8, 1024, 64) for _ in range(3)]
    dout = torch.randn(1, 8, 1024, 64)
    recorded = [t.clone().requires_grad_() for t in given]

    def both(function: Callable[..., Tensor], tensors: Sequence[Tensor], dout: Tensor, **options: str) -> list[Tensor]:
        out = function(*tensors, **options)
        return [out.detach(), *torch.autograd.grad(out, tensors, dout)]

    expected = both(sdpa, [t.double().requires_grad_() for t in given], dout.double())
    forward = _measured("Attention, 8 × 1024, d 64: forward", [
        _contender("torch SDPA", lambda: sdpa(*given), expected[:1]),
        _contender("attention", lambda: attention(*given), expected[:1]),
        _plain_only(_contender("attention, paper", lambda: attention(*given, rule="paper"), expected[:1])),
    ], rounds, 1e-3, "ms")
    training = _measured("Attention, 8 × 1024, d 64: forward and backward", [
        _contender("torch SDPA", lambda: both(sdpa, recorded, dout), expected),
        _contender("attention", lambda: both(attention, recorded, dout), expected),
        _plain_only(_contender("attention, paper", lambda: both(attention, recorded, dout, rule="paper"), expected)),
    ], rounds, 1e-3, "ms")
    return [Bar(f"attention, {text}: {name} / torch SDPA", ratio(timings, name, "torch SDPA"), RATIO_BAR, at_most=True)
            for text, timings in (("forward", forward), ("forward and backward", training))
            for name in ("attention", "attention, paper")]


def _after_an_operator(rounds: int) -> list[Bar]:
    """Each call is timed alone, right after a product of torch on as many threads."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from whet.torch import attention

    def product(threads: int, x: Tensor) -> None:
        torch.set_num_threads(threads)
        time.sleep(0.05)  # the workers of an earlier contender sleep by now
        x @ x.T

    bars = []
    for keys in (512, 1024, 4096):
        given = [torch.randn(1, 8, keys, 64) for _ in range(3)]
        exact = [t.double() for t in given]
        plain, paper = sdpa(*exact), attention(*exact, rule="paper")
        x = torch.randn(512, 512)
        contenders = []
        for threads in (1, 2):
            setup = functools.partial(product, threads, x)
            contenders += [
                _contender(f"torch SDPA, threads {threads}", functools.partial(sdpa, *given), [plain], threads, setup),
                _contender(f"attention, threads {threads}", functools.partial(attention, *given), [plain], threads,
                           setup),
                _contender(f"attention, paper, threads {threads}", functools.partial(attention, *given, rule="paper"),
                           [paper], threads, setup)]
        title = f"Attention right after an operator of torch, 8 × {keys}, d 64"
        timings = _measured(title, contenders, 2 * rounds, 1e-3, "ms", min_seconds=0)
        bars.append(Bar(f"8 × {keys} after an operator of torch: two threads against one",
                        ratio(timings, "attention, paper, threads 1", "attention, paper, threads 2"), THREADS_BAR,
                        at_most=False))
    torch.set_num_threads(1)
    return bars


def _decoder(rounds: int) -> list[Bar]:
    """A layer of 8 heads of 64 on two threads, with SDPA and with whet's attention."""
    import torch
    from bench.python.decoder import DecoderLayer
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from whet.torch import attention

    torch.set_num_threads(2)
    torch.manual_seed(0)
    layer = DecoderLayer(heads=8, head_size=64)
    functions = {"torch SDPA": sdpa, "attention": attention, "attention, paper": functools.partial(attention, rule="paper")}

    def forward(layer: DecoderLayer, function: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [layer(x, function)]

    def training(layer: DecoderLayer, function: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
        out = layer(x, function)
        return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, *layer.parameters()])]

    bars = []
    for tokens in (512, 1024, 4096):
        x = torch.randn(1, tokens, 512, requires_grad=True)
        for text, run in (("forward", forward), ("forward and backward", training)):
            reference = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
            contenders = [_contender(name, functools.partial(run, layer, function, x),
                                     run(reference[0], function, reference[1]), threads=2)
                          for name, function in functions.items()]
            timings = _measured(f"Decoder layer, {tokens} tokens, two threads: {text}", contenders, rounds, 1e-3, "ms")
            bars.append(Bar(f"decoder layer, {tokens} tokens, {text}: attention, paper / torch SDPA",
                            ratio(timings, "attention, paper", "torch SDPA"), RATIO_BAR, at_most=True))
    torch.set_num_threads(1)
    return bars


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"bench.python.torch_calls: {error}")
