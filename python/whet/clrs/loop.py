"""The steps of a training, in one process or several. A killed one goes on to the same losses.

    checkpoint.safetensors   what is trained, AdamW's moments, the steps done
    metrics.jsonl            one line every METRICS_EVERY steps: step, and means of loss, accuracy of tokens, gradient norm

Metrics are written before their checkpoint, and what is ahead of it is dropped when a training goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.clrs import files
from whet.clrs.distributed import Group
from whet.clrs.errors import ClrsError

METRICS_EVERY = 50
CHECKPOINT_EVERY = 500


class Schedule(NamedTuple):
    """How weights are changed."""

    steps: int
    rate: float
    warmup: int
    weight_decay: float
    clip: float

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine to zero."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * 0.5 * (1 + math.cos(math.pi * share))


class Forward(NamedTuple):
    """What a batch gives in one process: logits and targets of its own answer tokens."""

    logits: Tensor  # (R, vocabulary)
    targets: Tensor  # (R)
    answers: int  # answer tokens of all processes
    tokens: int  # tokens of all processes


class Step(NamedTuple):
    """What a progress listener is told."""

    step: int
    steps: int
    loss: float
    accuracy: float
    tokens_per_second: float


class Loop:
    """One process's part of a training.

    Args:
        folder: where checkpoint and metrics are; an earlier checkpoint is gone on from.
        model: its parameters that require gradients are trained.
        forward: of the model, wrapped for several processes, and a batch.
    """

    def __init__(self, folder: Path, model: nn.Module, schedule: Schedule, group: Group,
                 forward: Callable[[nn.Module, Any], Forward]) -> None:
        self._folder, self._schedule, self._group, self._forward = folder, schedule, group, forward
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        matrices = [one for one in self._trained.values() if one.dim() >= 2]
        others = [one for one in self._trained.values() if one.dim() < 2]
        self._optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": schedule.weight_decay},
                                             {"params": others, "weight_decay": 0.0}], lr=schedule.rate,
                                            betas=(0.9, 0.98), fused=True)
        self._metrics: list[dict[str, Any]] = []
        self._since = _Means()
        self.step = 0
        if group.rank == 0:
            files.remove_leftovers(folder)
        if (folder / files.CHECKPOINT).exists():
            self._resume()
        self._model = group.wrap(model)

    def run(self, batches: Iterable[Any], progress: Callable[[Step], None]) -> None:
        """Steps until all are done. What `progress` throws ends it."""
        self._save()  # a folder that can't be written should be known before the work
        start, tokens = time.monotonic(), 0
        steps = self._schedule.steps
        for batch in batches:
            tokens += self._take_step(batch)
            last = self.step == steps
            if self.step % METRICS_EVERY == 0 or last:
                loss, accuracy = self._line()
            if self.step % CHECKPOINT_EVERY == 0 or last:
                self._save()
            if self.step % METRICS_EVERY == 0 or last:
                progress(Step(self.step, steps, loss, accuracy, tokens / (time.monotonic() - start)))
            if last:
                return

    def _take_step(self, batch: Any) -> int:
        """Changes the weights once; how many tokens that took."""
        for one in self._optimizer.param_groups:
            one["lr"] = self._schedule.rate_at(self.step)
        logits, targets, answers, tokens = self._forward(self._model, batch)
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / answers
        self._optimizer.zero_grad(set_to_none=True)
        (loss * self._group.size).backward()  # gradients are averaged over processes
        norm = float(nn.utils.clip_grad_norm_(self._trained.values(), self._schedule.clip))
        if not math.isfinite(norm):
            raise ClrsError(f"{self._folder}: the loss is no longer finite at step {self.step}; try a lower --rate")
        self._optimizer.step()
        self.step += 1
        right = int((logits.detach().argmax(-1) == targets).sum())
        self._since.add(float(loss.detach()), right / answers, norm / self._group.size)
        return tokens

    def _line(self) -> tuple[float, float]:
        """Means since the line before, over all processes."""
        loss, accuracy, norm = self._group.sum(self._since.means())
        self._since = _Means()
        self._metrics.append({"step": self.step, "loss": loss, "accuracy": accuracy, "norm": norm})
        return loss, accuracy

    def _save(self) -> None:
        if self._group.rank > 0:
            return
        text = "".join(json.dumps(line) + "\n" for line in self._metrics)
        files.write_bytes(self._folder / files.METRICS, text.encode())
        tensors: dict[str, Tensor] = {f"model.{name}": one for name, one in self._trained.items()}
        for name, one in self._trained.items():
            state = self._optimizer.state.get(one, {})
            tensors |= {f"{part}.{name}": state.get(part, torch.zeros_like(one)) for part in ("exp_avg", "exp_avg_sq")}
        files.write_checkpoint(self._folder / files.CHECKPOINT, tensors, {"step": self.step})

    def _resume(self) -> None:
        path = self._folder / files.CHECKPOINT
        tensors, facts = files.read_checkpoint(path)
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            files.check_tensors(self._trained, files.of_kind(tensors, kind), path)
        self.step = facts["step"]
        self._metrics = [line for line in files.read_lines(self._folder / files.METRICS) if line["step"] <= self.step]
        with torch.no_grad():
            for name, one in self._trained.items():
                one.copy_(tensors[f"model.{name}"])
                self._optimizer.state[one] = {"step": torch.tensor(float(self.step)),
                                              **{part: tensors[f"{part}.{name}"] for part in ("exp_avg", "exp_avg_sq")}}


class _Means:
    """Of what a line of metrics has the means."""

    def __init__(self) -> None:
        self._sums, self._steps = [0.0, 0.0, 0.0], 0

    def add(self, *values: float) -> None:
        self._sums = [total + value for total, value in zip(self._sums, values)]
        self._steps += 1

    def means(self) -> list[float]:
        return [total / self._steps for total in self._sums]
