"""`whet clrs finetune`: a language model trained further on problems, sharpened through whet.transformers.

    config.json              what was asked for
    checkpoint.safetensors, metrics.jsonl
                             as whet.clrs.loop keeps them: with LoRA of its few weights only
    model/                   at the end: the adapter as peft saves it, or the whole model
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import whet.transformers
from whet.clrs import data, files
from whet.clrs.command import NAME, steps_shown
from whet.clrs.data import Problem, Source
from whet.clrs.decoding import padded
from whet.clrs.distributed import Group
from whet.clrs.errors import ClrsError, one_line
from whet.clrs.loop import Forward, Loop, Schedule, Step
from whet.clrs.workers import TextTraining, Workers
from whet.probe import models, program
from whet.probe.models import Loaded

FORMAT = "whet clrs fine-tuning 1"
MODEL = "model"
_INSTALL = "pip install 'whet[finetune]'"


class Tuning(NamedTuple):
    """Everything but the model that decides what a fine-tuning ends in."""

    algorithms: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    hints: bool = False
    rule: str = "none"
    lora: int = 8  # rank; 0: all weights
    batch: int = 8
    steps: int = 300
    rate: float = 5e-4
    seed: int = 0

    def schedule(self) -> Schedule:
        return Schedule(self.steps, self.rate, max(1, self.steps // 20), 0.0, 1.0)

    def source(self) -> Source:
        return Source(self.algorithms, self.sizes, self.hints, self.batch, self.seed)


def finetune(chosen: argparse.Namespace) -> None:
    """The command."""
    program.set_threads(chosen.threads)
    tuning = Tuning(tuple(chosen.algorithm), tuple(chosen.sizes), chosen.hints, chosen.rule, chosen.lora, chosen.batch,
                    chosen.steps, chosen.rate, chosen.seed)
    data.check_algorithms(tuning.algorithms)
    with Group() as group:
        progress = program.Progress(silent=group.rank > 0)
        progress.step(f"loading {chosen.model}")
        loaded = models.load(chosen.model, consent=program.consent(chosen.yes), say=progress.say)
        tune(chosen.out, loaded, tuning, group, chosen.workers, steps_shown(progress))
        progress.done()
        progress.say(f"{chosen.out / MODEL} holds the {'adapter' if tuning.lora else 'model'}")


def tune(folder: Path, loaded: Loaded, tuning: Tuning, group: Group, workers: int = 1,
         progress: Callable[[Step], None] = lambda step: None) -> nn.Module:
    """Trains until tuning.steps, from where the folder stands; the model."""
    group.rows(tuning.batch)
    facts = {**loaded.facts(), "weights": loaded.fingerprint()}  # before LoRA adds to it
    model = _trained(loaded, tuning)
    group.after_first(lambda: _prepare(folder, facts, tuning))
    with files.locked(folder, f".training-{group.rank}") as alone:
        if not alone:
            raise ClrsError(f"{folder}: another process trains there; give another --out")
        loop = Loop(folder, model, tuning.schedule(), group, _forward_of(loaded, group))
        if loop.step < tuning.steps:
            with Workers(TextTraining(tuning.source(), loop.step), workers) as batches:
                loop.run(batches, progress)
        if group.rank == 0:
            _save(folder / MODEL, model)
    return model


def _trained(loaded: Loaded, tuning: Tuning) -> nn.Module:
    """The model with its rule, and with gradients where they are wanted."""
    rule: Any = Path(tuning.rule) if tuning.rule.endswith(".json") else tuning.rule
    try:
        whet.transformers.enable(loaded.model, rule=rule)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ClrsError(f"--rule {tuning.rule}: {one_line(error)}") from None
    torch.manual_seed(tuning.seed)  # of LoRA's first weights
    if tuning.lora == 0:
        return loaded.model.train().requires_grad_(True)
    if importlib.util.find_spec("peft") is None:
        raise ClrsError(f"LoRA needs the Python package peft: run {_INSTALL}, or give --lora 0 to train all weights")
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=tuning.lora, lora_alpha=2 * tuning.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(loaded.model, adapter).train()


def _prepare(folder: Path, facts: dict[str, Any], tuning: Tuning) -> bool:
    """Makes the folder, or finds it to be of this fine-tuning."""
    files.make_folder(folder)
    path = folder / files.CONFIG
    wanted = {"format": FORMAT, "model": facts, **json.loads(json.dumps(tuning._asdict()))}
    if not path.exists():
        files.write_bytes(path, (json.dumps(wanted, indent=1) + "\n").encode())
        return True
    known = files.read_settings(path, FORMAT)
    for name, value in wanted.items():
        if known.get(name) != value:
            raise ClrsError(f"{folder}: holds a fine-tuning whose {name} is {known.get(name)!r} where this one has "
                            f"{value!r}; give another --out, or go on with {NAME} finetune as it was")
    return True


def _forward_of(loaded: Loaded, group: Group) -> Callable[[nn.Module, Sequence[Problem]], Forward]:
    """The forward pass of a list of problems. Padding follows what counts: a causal model never sees it."""
    keeps = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    def forward(model: nn.Module, problems: Sequence[Problem]) -> Forward:
        texts = [_encoded(loaded.tokenizer, problem) for problem in problems]
        answers = sum(len(answer) for _, answer in texts)
        mine = texts[group.rows(len(texts))]
        tokens, ends = padded([question + answer for question, answer in mine])
        begins = torch.tensor([len(question) for question, _ in mine])
        place = torch.arange(1, tokens.shape[1])
        wanted = (place >= begins[:, None]) & (place < ends[:, None])
        first = int(begins.min()) - 1  # of the rows whose logits are computed
        kept = {"logits_to_keep": torch.arange(first, tokens.shape[1] - 1)} if keeps else {}
        logits = model(input_ids=tokens[:, :-1], use_cache=False, **kept).logits
        logits = logits if keeps else logits[:, first:]
        return Forward(logits[wanted[:, first:]], tokens[:, 1:][wanted], answers,
                       sum(len(question) + len(answer) for question, answer in texts))

    return forward


def _encoded(tokenizer: Any, problem: Problem) -> tuple[list[int], list[int]]:
    return tokenizer(problem.question).input_ids, tokenizer(problem.answer, add_special_tokens=False).input_ids


def _save(folder: Path, model: Any) -> None:
    try:
        model.save_pretrained(folder)
    except OSError as error:
        raise ClrsError(f"{folder}: can't be written ({error.strerror or one_line(error)}); make room, and run the same "
                        "line again: the training itself is kept") from None
