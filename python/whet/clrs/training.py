"""Training of a decoder: a run is a folder, and a killed run goes on to the same loss curve.

    config.json              the recipe and the vocabulary
    checkpoint.safetensors, metrics.jsonl
                             as whet.clrs.loop keeps them

Batch i is a function of seed and i (whet.clrs.data). Under torchrun, of N processes each has every Nth row of a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from whet.clrs import files
from whet.clrs.data import Source, check_algorithms, tables_train
from whet.clrs.distributed import Group
from whet.clrs.errors import ClrsError
from whet.clrs.loop import Forward, Loop, Schedule, Step
from whet.clrs.model import Decoder, Shape, Sharpening
from whet.clrs.tokens import Tokens, vocabulary_of
from whet.clrs.workers import Batch, Published, Training, Workers

FORMAT = "whet clrs run 1"
WHEN = ("both", "train", "test")
DTYPES = ("float32", "bfloat16")
EMBEDDINGS = ("waves", "random")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run ends in."""

    algorithms: tuple[str, ...] = ("insertion_sort",)
    sizes: tuple[int, ...] = ()  # none: those of the published training data
    hints: bool = False
    tokens: str = "numbers"
    width: int = 96
    layers: int = 4
    heads: int = 3
    hidden: int = 256
    positions: str = "none"
    embedding: str = "waves"  # what numbers begin as: in their order, or "random"
    learned: str = "none"
    sharpening: Sharpening = field(default_factory=Sharpening)
    when: str = "both"
    attention: str = "whet"
    dtype: str = "float32"
    batch: int = 32
    steps: int = 6000
    rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def check(self) -> None:
        check_algorithms(self.algorithms)
        self._shape(1).check()
        self.sharpening.check(self._shape(1))
        for name, known in (("when", WHEN), ("dtype", DTYPES), ("embedding", EMBEDDINGS)):
            if getattr(self, name) not in known:
                raise ClrsError(f"{name}: is {getattr(self, name)!r}, must be one of {', '.join(known)}")
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ClrsError(f"{name}: is {getattr(self, name)}, must be at least 1")
        if any(size < 1 for size in self.sizes):
            raise ClrsError(f"sizes: have {min(self.sizes)}, must be at least 1")

    def shape(self, tokens: Tokens) -> Shape:
        return self._shape(len(tokens), tokens.breaks())

    def _shape(self, vocabulary: int, breaks: tuple[int, ...] = ()) -> Shape:
        return Shape(vocabulary, self.width, self.layers, self.heads, self.hidden, self.positions, self.learned, breaks)

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

    def schedule(self) -> Schedule:
        return Schedule(self.steps, self.rate, self.warmup, self.weight_decay, self.clip)

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "algorithms": list(self.algorithms), "sizes": list(self.sizes),
                "sharpening": self.sharpening.settings()}

    @classmethod
    def of(cls, settings: dict[str, Any], path: Path) -> Recipe:
        known = {one.name for one in fields(cls)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ClrsError(f"{path}: has the field {unknown[0]}, which this version doesn't know; use the one that made it")
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
    model = Decoder(recipe.shape(tokens), recipe.at_test, recipe.attention)
    weights = files.of_kind(tensors, "model")
    files.check_tensors(model.state_dict(), weights, path)
    model.load_state_dict(weights)
    return Run(folder, recipe, tokens, model.eval(), facts["step"], facts["checksum"][:16])


def train(folder: Path, recipe: Recipe, workers: int = 1, progress: Callable[[Step], None] = lambda step: None) -> None:
    """Trains until recipe.steps, from where the folder stands. What `progress` throws ends it; it can be gone on with."""
    with Group() as group:
        group.rows(recipe.batch)
        tokens = group.after_first(lambda: prepare(folder, recipe))
        with files.locked(folder, f".training-{group.rank}") as alone:
            if not alone:
                raise ClrsError(f"{folder}: another process trains there; give another --out")
            torch.manual_seed(recipe.seed)
            model = Decoder(recipe.shape(tokens), recipe.in_training, recipe.attention)
            if recipe.embedding == "waves":
                model.begin_as_waves(tokens.fractions())
            loop = Loop(folder, model, recipe.schedule(), group, forward_of(recipe, group))
            if loop.step < recipe.steps:
                with Workers(Training(recipe.source(), tokens.settings(), loop.step), workers) as batches:
                    loop.run(batches, progress)


def forward_of(recipe: Recipe, group: Group) -> Callable[[nn.Module, Batch], Forward]:
    """The forward pass of a batch, of which each process has its rows."""
    def forward(model: nn.Module, batch: Batch) -> Forward:
        mine = group.rows(len(batch.tokens))
        tokens = torch.from_numpy(batch.tokens[mine])
        place = torch.arange(1, tokens.shape[1])
        questions, ends = (torch.from_numpy(part[mine])[:, None] for part in (batch.questions, batch.ends))
        rows = ((place >= questions) & (place < ends)).flatten().nonzero()[:, 0]
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.dtype == "bfloat16"):
            logits = model(tokens[:, :-1], rows)
        return Forward(logits, tokens[:, 1:].flatten()[rows], int((batch.ends - batch.questions).sum()),
                       int(batch.ends.sum()))

    return forward


def _vocabulary(recipe: Recipe) -> Tokens:
    """From one problem of each algorithm."""
    wanted = [(name, min(recipe.trained_sizes(name)), 3) for name in recipe.algorithms]
    with Workers(Published(wanted, 1, recipe.hints)) as problems:
        texts = [one.question + one.answer for some in problems for one in some]
    return vocabulary_of(recipe.tokens, recipe.algorithms, texts)
