"""Which shapes bench.attention takes, and beside whom. Import after timing.prepare_process()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.attention.contenders import COMPILE, EAGER, NONE
from bench.attention.reference import Shape


def full(queries: int, size: int = 64) -> Shape:
    return Shape(queries, queries, size)


def few_heads(queries: int, heads: int) -> Shape:
    return Shape(queries, queries, heads=heads, key_heads=heads)


def causal(queries: int, heads: int = 8, key_heads: int = 8) -> Shape:
    return Shape(queries, queries, heads=heads, key_heads=key_heads, causal=True)


@dataclass(frozen=True)
class Plan:
    """Shapes of each section. More contenders cost minutes, so not every shape has all of them."""

    basic: Sequence[Shape]  # whet and SDPA alone
    rules: Sequence[Shape]  # and whet's target rule and the blocked torch loop
    frameworks: Sequence[Shape]  # and everything else
    flat: Sequence[Shape]
    training: Sequence[tuple[Shape, Sequence[str]]]  # and contenders beside whet paper and SDPA
    threads: Sequence[Shape]
    busy: Sequence[Shape]
    normalizers: Sequence[Shape]
    linear: Sequence[Shape]
    sharp: Shape
    memory_queries: int
    long_queries: int


FULL = Plan(
    basic=(full(8192), full(2048, 128), full(4096, 128)),
    rules=(
        *(full(1024), full(4096), full(1024, 128)),
        *(causal(512), causal(2048), causal(4096), causal(2048, 9, 3)),
    ),
    frameworks=(full(512), full(2048), full(512, 128), causal(1024)),
    flat=(full(2048), full(2048, 128)),
    training=(
        (full(512), (NONE, COMPILE, EAGER)),
        (full(1024), (NONE, COMPILE, EAGER)),
        (full(2048), (NONE, COMPILE)),
        (full(4096), ()),
        (causal(2048), (NONE,)),
    ),
    threads=(full(1024), full(2048), full(4096), causal(2048)),
    busy=(full(1024), full(2048)),
    normalizers=(few_heads(2048, 4), few_heads(8192, 1)),
    linear=(full(2048), full(8192), causal(2048), causal(8192)),
    sharp=full(4096),
    memory_queries=4096,
    long_queries=131072,
)

QUICK = Plan(
    basic=(full(4096), full(1024, 128), causal(4096), causal(2048, 9, 3)),
    rules=(full(2048), causal(1024)),
    frameworks=(full(512),),
    flat=(full(2048),),
    training=((full(512), (NONE, COMPILE)), (full(2048), ())),
    threads=(full(1024), full(2048)),
    busy=(full(1024),),
    normalizers=(few_heads(2048, 1),),
    linear=(full(2048), causal(2048)),
    sharp=full(2048),
    memory_queries=1024,
    long_queries=16384,
)

DECODE = tuple(Shape(1, keys, heads=9, key_heads=3) for keys in (8192, 131072))
