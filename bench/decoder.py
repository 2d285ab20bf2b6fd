"""Training a small decoder with whet's attention beside torch's: python -m bench.decoder [--quick] [--strict].

The model of `whet clrs train` (4 layers of width 96 with 3 heads, float32, one thread), the whole training step: forward,
loss of every token, backward, clipping, AdamW. Contenders differ in their attention only: torch's
scaled_dot_product_attention with plain softmax, whet's with plain softmax and with the paper's rule, and that rule in eager
torch. Before anything is timed, losses and gradients of each are compared with those of its own formula in eager torch;
rounds are interleaved (timing.py).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from bench.report import Bar, bar_table, table
from bench.timing import MIN_ROUNDS, BenchmarkError, Contender, OtherLoad, prepare_process, progress, ratio, verified_timings

if TYPE_CHECKING:
    from whet.clrs.model import Decoder

LENGTHS = (256, 512, 1024, 2048)
TOKENS = 4096  # of a step
SDPA_BAR = 1.0  # tokens/s of whet against torch's, both plain
EAGER_BAR = 1.5  # tokens/s of the paper's rule, whet against eager torch
BOUND = 2e-3  # of the largest gradient of a parameter
VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN = 1104, 96, 4, 3, 256
CONTENDERS = {"sdpa, plain": ("sdpa", "none"), "whet, plain": ("whet", "none"), "whet, paper": ("whet", "paper"),
              "eager, paper": ("eager", "paper")}


def main() -> int:
    parser = argparse.ArgumentParser(description="training a small decoder with whet's attention beside torch's")
    parser.add_argument("--quick", action="store_true", help="lengths 256 and 1,024")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    prepare_process()

    import torch
    import whet

    torch.set_num_threads(1)
    print(f"# Training a decoder\n\n{LAYERS} layers of width {WIDTH} with {HEADS} heads, float32, one thread, {TOKENS:,} "
          f"tokens per step; torch {version('torch')}, whet {whet.version()}, target {whet.simd_target()}\n")
    with OtherLoad() as other:
        bars = [bar for length in (LENGTHS[::2] if options.quick else LENGTHS) for bar in _length(length)]
    print(f"Other programs kept {other.processors:.2f} processors busy.\n\n{bar_table(bars)}")
    return 1 if options.strict and not all(bar.reached for bar in bars) else 0


def _length(length: int) -> list[Bar]:
    import torch

    progress(f"length {length:,}")
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (TOKENS // length, length + 1))
    expected = {rule: _gradients(_decoder("eager", rule), tokens) for rule in ("none", "paper")}
    contenders = []
    for name, (attention, rule) in CONTENDERS.items():
        model = _decoder(attention, rule)
        contenders.append(Contender(name, _step(copy.deepcopy(model), tokens),
                                    lambda model=model, rule=rule: _error(_gradients(model, tokens), expected[rule])))
    timings = verified_timings(contenders, MIN_ROUNDS)
    rows = [(t.name, f"{TOKENS / t.median:,.0f}", " to ".join(f"{TOKENS / q:,.0f}" for q in reversed(t.quartiles)),
             f"{ratio(timings, 'sdpa, plain', t.name):.2f}") for t in timings.values()]
    print(f"Length {length:,}\n\n{table(('attention', 'tokens/s', 'quartiles', '/ sdpa, plain'), rows)}\n")
    pairs = (("whet, plain", "sdpa, plain", SDPA_BAR), ("whet, paper", "sdpa, plain", SDPA_BAR),
             ("whet, paper", "eager, paper", EAGER_BAR))
    return [Bar(f"{length:,}: tokens/s of {ours} / {theirs}", ratio(timings, theirs, ours), bar, at_most=False)
            for ours, theirs, bar in pairs]


def _decoder(attention: str, rule: str) -> Decoder:
    import torch
    from whet.clrs.model import Decoder, Shape, Sharpening

    torch.manual_seed(1)
    return Decoder(Shape(VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN), Sharpening(rule), attention)


def _loss(model: Decoder, tokens: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _step(model: Decoder, tokens: Any) -> Callable[[], None]:
    """A whole training step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _gradients(model: Decoder, tokens: Any) -> list[Any]:
    model.zero_grad()
    loss = _loss(model, tokens)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def _error(found: list[Any], expected: list[Any]) -> float:
    """The largest difference, as a share of the tolerance."""
    return max(float((one - other).abs().max() / (BOUND * other.abs().max())) for one, other in zip(found, expected))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"bench.decoder: {error}")
