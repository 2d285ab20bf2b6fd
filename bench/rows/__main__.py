"""Row functions of whet beside what people use: python -m bench.rows [options].

Every contender is verified against float64 (bounds: reference.py), then timed interleaved
(timing.py). Speed bars are printed as ok or missed; only --strict makes a miss an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.command import main
from bench.report import Section
from bench.whet_c import Whet

SHAPES = ((4096, 1024), (512, 8192), (64, 65536), (8, 131072), (1, 131072), (32, 49152))
QUICK_SHAPES = ((4096, 1024), (64, 65536), (1, 131072))


def sections_of(
    whet: Whet, library: Path, quick: bool, cpus: Sequence[int]
) -> list[partial[Section]]:
    from bench.rows import sections  # imports torch and jax, which read the environment once

    setting = sections.Setting(
        whet=whet,
        library=library,
        shapes=QUICK_SHAPES if quick else SHAPES,
        rounds=7 if quick else 21,
        cpus=cpus,
    )
    return [partial(run, setting) for run in sections.ALL]


if __name__ == "__main__":
    main("bench.rows", "row functions", "three shapes, seven rounds", sections_of)
