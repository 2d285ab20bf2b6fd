"""Attention of whet beside what people use: python bench/attention.py [options].

whet is verified against float64, every peer against whet (bounds: attention_reference.py), then all
are timed interleaved (timing.py). Speed bars are printed as ok or missed; only --strict makes a
miss an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from command import main
from report import Section
from whet_c import Whet


def sections(
    whet: Whet, library: Path, quick: bool, cpus: Sequence[int]
) -> list[Callable[[], Section]]:
    import attention_plan  # these import torch and jax, which read the environment once
    import attention_sections

    setting = attention_sections.Setting(
        whet=whet,
        library=library,
        plan=attention_plan.QUICK if quick else attention_plan.FULL,
        rounds=7 if quick else 15,
        cpus=cpus,
    )
    return [partial(run, setting) for run in attention_sections.ALL]


if __name__ == "__main__":
    main("bench/attention.py", "attention", "few and smaller shapes: two minutes", sections)
