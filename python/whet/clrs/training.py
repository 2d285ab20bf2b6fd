"""Training of a decoder: a run is a folder, and a killed run goes on to the same loss curve.

    config.json              the recipe and the vocabulary
    checkpoint.safetensors   weights and AdamW's moments, the steps done
    metrics.jsonl            one line every METRICS_EVERY steps: step, loss, accuracy of tokens, gradient norm

Batch i is a function of seed and i (whet.clrs.data). Metrics are written before their checkpoint, and what is ahead of it
is dropped when a run goes on. Under torchrun each process has every world-size-th row of each batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.clrs import files
from whet.clrs.data import Source, check_algorithms, tables_train
from whet.clrs.distributed import Group
from whet.clrs.errors import ClrsError
from whet.clrs.model import Decoder, Shape, Sharpening
from whet.clrs.tokens import Tokens, vocabulary_of
from whet.clrs.workers import Batch, Published, Training, Workers

FORMAT = "whet clrs run 1"
METRICS_EVERY = 50
CHECKPOINT_EVERY = 500
WHEN = ("both", "train", "test")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run ends in."""

    algorithms: tuple[str, ...] = ("insertion_sort",)
    sizes: tuple[int, ...] = ()  # none: those of the published training data
    hints: bool = False
    tokens: str = "numbers"
    width: int = 96
    layers: int = 3
    heads: int = 3
    hidden: int = 256
    positions: str = "none"
    learned: str = "none"
    sharpening: Sharpening = field(default_factory=Sharpening)
    when: str = "both"
    attention: str = "whet"
    dtype: str = "float32"
    batch: int = 32
    steps: int = 4000
    rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def check(self) -> None:
        check_algorithms(self.algorithms)
        self.shape(1).check()
        self.sharpening.check(self.shape(1))
        for name, known in (("when", WHEN), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ClrsError(f"{name}: is {getattr(self, name)!r}, must be one of {', '.join(known)}")
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ClrsError(f"{name}: is {getattr(self, name)}, must be at least 1")
        if any(size < 1 for size in self.sizes):
            raise ClrsError(f"sizes: have {min(self.sizes)}, must be at least 1")

    def shape(self, vocabulary: int) -> Shape:
        return Shape(vocabulary, self.width, self.layers, self.heads, self.hidden, self.positions, self.learned)

    def source(self) -> Source:
        return Source(self.algorithms, self.sizes, self.hints, self.batch, self.seed)

    def trained_sizes(self, algorithm: str) -> list[int]:
        return list(self.sizes or tables_train()[algorithm])

    @property
    def in_training(self) -> Sharpening:
        return self.sharpening if self.when != "test" else Sharpening()

    @property
    def at_test(self) -> Sharpening:
        return self.sharpening if self.when != "train" else Sharpening()

    @property
    def variant(self) -> str:
        """What tells runs of one comparison apart, but for the seed."""
        parts = [self.sharpening.name + ("" if self.when == "both" or self.sharpening.plain else f" ({self.when} only)")]
        parts += [f"learned {self.learned}"] if self.learned != "none" else []
        return " + ".join(part for part in parts if part != "softmax" or self.learned == "none")

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine to zero."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * 0.5 * (1 + math.cos(math.pi * share))

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "algorithms": list(self.algorithms), "sizes": list(self.sizes),
                "sharpening": self.sharpening.settings()}

    @classmethod
    def of(cls, settings: dict[str, Any], path: Path) -> Recipe:
        known = {one.name for one in fields(cls)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ClrsError(f"{path}: has the field {unknown[0]}, which this version doesn't know; use the version that made it")
        try:
            return cls(**{**settings, "algorithms": tuple(settings["algorithms"]), "sizes": tuple(settings["sizes"]),
                          "sharpening": Sharpening.of(settings["sharpening"])})
        except (KeyError, TypeError) as error:
            raise ClrsError(f"{path}: isn't a recipe ({error}); give the folder of a run that whet clrs made") from None


class Run(NamedTuple):
    """A run as its folder has it."""

    folder: Path
    recipe: Recipe
    tokens: Tokens
    model: Decoder
    step: int
    fingerprint: str  # other weights have another


class Step(NamedTuple):
    """What a progress listener is told."""

    step: int
    steps: int
    loss: float
    accuracy: float
    tokens_per_second: float


def prepare(folder: Path, recipe: Recipe) -> Tokens:
    """Makes the folder, or finds it to be of this recipe; its vocabulary."""
    recipe.check()
    files.make_folder(folder)
    path = folder / files.CONFIG
    if path.exists():
        known, tokens = read_config(folder)
        if known != recipe:
            name = next(one.name for one in fields(Recipe) if getattr(known, one.name) != getattr(recipe, one.name))
            raise ClrsError(f"{folder}: holds a run whose {name} is {getattr(known, name)!r} where this one has "
                            f"{getattr(recipe, name)!r}; give another --out")
        return tokens
    tokens = _vocabulary(recipe)
    content = {"format": FORMAT, "recipe": recipe.settings(), "tokens": tokens.settings()}
    files.write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())
    return tokens


def read_config(folder: Path) -> tuple[Recipe, Tokens]:
    path = folder / files.CONFIG
    found = files.read_settings(path, FORMAT)
    try:
        return Recipe.of(found["recipe"], path), Tokens.of(found["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ClrsError(f"{path}: is damaged ({error}); give the folder of a run that whet clrs made") from None


def load(folder: Path) -> Run:
    """A run, finished or not, with the rule it has at test."""
    recipe, tokens = read_config(folder)
    path = folder / files.CHECKPOINT
    tensors, facts = files.read_checkpoint(path)
    model = Decoder(recipe.shape(len(tokens)), recipe.at_test, recipe.attention)
    files.load_state(model, {name.removeprefix("model."): tensor for name, tensor in tensors.items()
                             if name.startswith("model.")}, path)
    return Run(folder, recipe, tokens, model.eval(), facts["step"], facts["checksum"][:16])


def train(folder: Path, recipe: Recipe, workers: int = 1, progress: Callable[[Step], None] = lambda step: None) -> None:
    """Trains until recipe.steps, from where the folder stands. What `progress` throws ends it; it can be gone on with."""
    with Group() as group:
        group.rows(recipe.batch)
        tokens = group.after_first(lambda: prepare(folder, recipe))
        with files.locked(folder, f".training-{group.rank}") as alone:
            if not alone:
                raise ClrsError(f"{folder}: another process trains there; give another --out")
            trainer = _Trainer(folder, recipe, tokens, group)
            if trainer.step < recipe.steps:
                with Workers(Training(recipe.source(), tokens.settings(), trainer.step), workers) as batches:
                    trainer.run(batches, progress)


class _Trainer:
    """One process's part of a training."""

    def __init__(self, folder: Path, recipe: Recipe, tokens: Tokens, group: Group) -> None:
        self._folder, self._recipe, self._group = folder, recipe, group
        torch.manual_seed(recipe.seed)
        self._model = Decoder(recipe.shape(len(tokens)), recipe.in_training, recipe.attention)
        matrices = [parameter for parameter in self._model.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in self._model.parameters() if parameter.dim() < 2]
        self._optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": recipe.weight_decay},
                                             {"params": others, "weight_decay": 0.0}], lr=recipe.rate, betas=(0.9, 0.98),
                                            fused=True)
        self._metrics: list[dict[str, Any]] = []
        self._since = _Sums()
        self.step = 0
        if (folder / files.CHECKPOINT).exists():
            self._resume()
        self._parallel = group.wrap(self._model)

    def run(self, batches: Workers, progress: Callable[[Step], None]) -> None:
        start, tokens = time.monotonic(), 0
        self._save()  # a folder that can't be written should be known before the work
        for batch in batches:
            tokens += int(batch.ends.sum())
            self._take_step(batch)
            if self.step % METRICS_EVERY == 0 or self.step == self._recipe.steps:
                loss, accuracy = self._line()
                progress(Step(self.step, self._recipe.steps, loss, accuracy, tokens / (time.monotonic() - start)))
            if self.step % CHECKPOINT_EVERY == 0 or self.step == self._recipe.steps:
                self._save()
            if self.step == self._recipe.steps:
                return

    def _take_step(self, batch: Batch) -> None:
        recipe = self._recipe
        for one in self._optimizer.param_groups:
            one["lr"] = recipe.rate_at(self.step)
        logits, targets = self._forward(batch)
        count = int((batch.ends - batch.questions).sum())  # of all processes
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / count
        self._optimizer.zero_grad(set_to_none=True)
        (loss * self._group.size).backward()  # gradients are averaged over processes
        norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), recipe.clip))
        if not math.isfinite(norm):
            raise ClrsError(f"{self._folder}: the loss is no longer finite at step {self.step}; try a lower --rate")
        self._optimizer.step()
        self.step += 1
        right = int((logits.argmax(-1) == targets).sum())
        self._since.add(float(loss.detach()), right / count, norm / self._group.size)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and targets of this process's answer tokens."""
        mine = self._group.rows(len(batch.tokens))
        tokens = torch.from_numpy(batch.tokens[mine])
        place = torch.arange(1, tokens.shape[1])
        questions, ends = (torch.from_numpy(part[mine])[:, None] for part in (batch.questions, batch.ends))
        rows = ((place >= questions) & (place < ends)).flatten().nonzero()[:, 0]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._recipe.dtype == "bfloat16"):
            logits = self._parallel(tokens[:, :-1], rows)
        return logits, tokens[:, 1:].flatten()[rows]

    def _line(self) -> tuple[float, float]:
        """Means since the line before, over all processes."""
        loss, accuracy, norm = self._group.sum(self._since.means())
        self._metrics.append({"step": self.step, "loss": loss, "accuracy": accuracy, "norm": norm})
        self._since = _Sums()
        return loss, accuracy

    def _save(self) -> None:
        if self._group.rank > 0:
            return
        text = "".join(json.dumps(line) + "\n" for line in self._metrics)
        files.write_bytes(self._folder / files.METRICS, text.encode())
        tensors = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            state = self._optimizer.state.get(parameter, {})
            for part in ("exp_avg", "exp_avg_sq"):
                tensors[f"{part}.{name}"] = state.get(part, torch.zeros_like(parameter))
        files.write_checkpoint(self._folder / files.CHECKPOINT, tensors, {"step": self.step})

    def _resume(self) -> None:
        path = self._folder / files.CHECKPOINT
        tensors, facts = files.read_checkpoint(path)
        files.load_state(self._model, {name.removeprefix("model."): tensor for name, tensor in tensors.items()
                                       if name.startswith("model.")}, path)
        self.step = facts["step"]
        self._metrics = [line for line in files.read_lines(self._folder / files.METRICS) if line["step"] <= self.step]
        for name, parameter in self._model.named_parameters():
            self._optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **{
                part: tensors[f"{part}.{name}"] for part in ("exp_avg", "exp_avg_sq")}}


class _Sums:
    """Of what a line of metrics has the means."""

    def __init__(self) -> None:
        self._sums, self._steps = [0.0, 0.0, 0.0], 0

    def add(self, *values: float) -> None:
        self._sums = [total + value for total, value in zip(self._sums, values)]
        self._steps += 1

    def means(self) -> list[float]:
        return [total / self._steps for total in self._sums]


def _vocabulary(recipe: Recipe) -> Tokens:
    """From one problem of each algorithm."""
    wanted = [(name, min(recipe.trained_sizes(name)), 3) for name in recipe.algorithms]
    with Workers(Published(wanted, 1, recipe.hints)) as problems:
        texts = [one.question + one.answer for some in problems for one in some]
    return vocabulary_of(recipe.tokens, recipe.algorithms, texts)
