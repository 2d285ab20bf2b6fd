"""One forward pass per prompt, with the statistics of attention, each kept in a folder as soon as it is known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.probe.analysis import STATISTICS, Sample
from whet.probe.errors import ProbeError, one_line
from whet.probe.files import make_folder, read_json, write_json
from whet.probe.models import Loaded
from whet.probe.prompts import Prompt, Prompts

CONFIG = "probe.json"
PIECES = "prompts"


class Plan(NamedTuple):
    """What is measured."""

    lengths: Sequence[int]
    per_length: int
    rule: str  # whose beta is reported; it isn't applied
    rows: str  # "last": of the query that answers; "all": means over all queries

    def items(self) -> Iterator[tuple[int, int]]:
        """Length and number of every prompt, shortest first: something is known soon."""
        for length in sorted(self.lengths):
            for index in range(self.per_length):
                yield length, index


class Store:
    """The folder of a probe: a small file per prompt, so that an interrupted probe goes on where it was.

    Lengths and how many prompts each has are no part of its config: more can be added.
    """

    def __init__(self, folder: Path, config: dict[str, Any], shape: tuple[int, int]) -> None:
        self._folder, self._shape = folder, shape
        make_folder(folder / PIECES)
        known = read_json(folder / CONFIG)
        if known is None:
            other = read_json(folder / "results.json")
            if isinstance(other, dict) and other.get("kind") != "probe":
                raise ProbeError(f"{folder}: holds results of another kind; give another --out")
            if any((folder / PIECES).glob("*.json")):
                raise ProbeError(f"{folder}: holds prompts of a probe whose {CONFIG} is lost; give another --out, or remove "
                                 "the folder")
            write_json(folder / CONFIG, config)
        elif known != config:
            self._refuse(known, config)

    def _refuse(self, known: Any, config: dict[str, Any]) -> None:
        known = known if isinstance(known, dict) else {}
        name = next((name for name in config if known.get(name) != config[name]), "format")
        raise ProbeError(f"{self._folder}: holds a probe whose {name.replace('_', ' ')} is {known.get(name)!r} where this "
                         f"one has {config.get(name)!r}; give another --out, or remove the folder")

    def get(self, length: int, index: int) -> Sample | None:
        """What was measured before; None if nothing was, or the file is damaged."""
        known = read_json(self._path(length, index))
        try:
            statistics = {name: np.array(known["statistics"][name], np.float64) for name in STATISTICS}
            if any(values.shape != self._shape for values in statistics.values()):
                return None
            return Sample(length, int(known["tokens"]), statistics)
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, sample: Sample, index: int) -> None:
        write_json(self._path(sample.length, index), {"tokens": sample.tokens, "statistics": sample.statistics})

    def _path(self, length: int, index: int) -> Path:
        return self._folder / PIECES / f"{length}-{index}.json"


def config_of(loaded: Loaded, prompts: Prompts, plan: Plan, dtype: str, text: str | None) -> dict[str, Any]:
    """What makes the numbers of one probe comparable."""
    return {"model": loaded.name, "weights": loaded.fingerprint(), "config": loaded.config_fingerprint(),
            "tokenizer": loaded.tokenizer_fingerprint(), "dtype": dtype, "prompts": prompts.kind,
            "text": None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16], "seed": prompts.seed,
            "rule": plan.rule, "rows": plan.rows}


def measure(loaded: Loaded, prompts: Prompts, plan: Plan, store: Store,
            progress: Callable[[int, int, Sample], None] = lambda done, all, sample: None) -> list[Sample]:
    """Every prompt of the plan, from the store where it is there already.

    Calls `progress` with how many of how many are done and the latest.
    """
    check_lengths(loaded, plan.lengths)
    items = list(plan.items())
    samples = []
    for length, index in items:
        sample = store.get(length, index)
        if sample is None:
            prompt = prompts.draw(length, index)
            sample = Sample(length, len(prompt.tokens), statistics_of(loaded, prompt, plan))
            store.put(sample, index)
        samples.append(sample)
        progress(len(samples), len(items), sample)
    return samples


def check_lengths(loaded: Loaded, lengths: Sequence[int]) -> None:
    """ProbeError for a length that the model has no positions for."""
    longest = max(lengths)
    if loaded.context is not None and longest > loaded.context and not loaded.reaches_beyond_context:
        raise ProbeError(f"{loaded.name}: has positions for {loaded.context} tokens where a length of {longest} is asked "
                         f"for; give --lengths up to {loaded.context}")


def statistics_of(loaded: Loaded, prompt: Prompt, plan: Plan) -> dict[str, np.ndarray]:
    """Statistics of the attention that the unchanged model pays, (layers, heads) each.

    beta, sharp_entropy and sharp_peak are what the plan's rule would make of the very same rows: it isn't applied, so
    later layers see what they always see.
    """
    import torch

    from whet.transformers import collect

    rows = -1 if plan.rows == "last" else None
    with refusals(loaded.name), torch.no_grad(), collect(loaded.model, rows=rows, rule=plan.rule) as stats:
        loaded.model(torch.tensor([prompt.tokens]), use_cache=False, **loaded.last_logits(1))
        if len(stats.entropy) != loaded.layers:
            raise ProbeError(f"{loaded.name}: has attention in {len(stats.entropy)} of its {loaded.layers} layers; give a "
                             "model that has it in all of them")
        # In float64 before the mean over rows.
        found = {name: np.asarray(getattr(stats, name), np.float64)[:, 0].mean(axis=-1) for name in STATISTICS}
        lost = np.argwhere(~np.isfinite(found["entropy"]))
        if len(lost):
            raise ProbeError(f"{loaded.name}: layer {lost[0][0]} gives NaN with {len(prompt.tokens)} tokens; its weights "
                             "aren't all numbers, or it needs --dtype float32")
        return found


class refusals:
    """Turns what a model or whet.transformers refuses into one sentence."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ProbeError) or not isinstance(error, Exception):
            return
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise ProbeError(f"{self._name}: needs more memory than there is; give shorter --lengths or --dtype "
                             "bfloat16") from None
        raise ProbeError(f"{self._name}: its attention can't be probed ({one_line(error)}); give a language model that "
                         "transformers runs with attention functions of its users") from None
