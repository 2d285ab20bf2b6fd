"""Attention of whet beside what people use: python -m bench.attention [options].

whet is verified against float64, every peer against whet (bounds: reference.py), then all
are timed interleaved (timing.py). Speed bars are printed as ok or missed; only --strict makes a
miss an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.command import main
from bench.report import Section
from bench.whet_c import Whet


def sections_of(
    whet: Whet, library: Path, quick: bool, cpus: Sequence[int]
) -> list[partial[Section]]:
    from bench.attention import plan  # these import torch and jax, which read the environment once
    from bench.attention import sections

    setting = sections.Setting(
        whet=whet,
        library=library,
        plan=plan.QUICK if quick else plan.FULL,
        rounds=7 if quick else 15,
        cpus=cpus,
    )
    return [partial(run, setting) for run in sections.ALL]


if __name__ == "__main__":
    main("bench.attention", "attention", "few and smaller shapes: two minutes", sections_of)
