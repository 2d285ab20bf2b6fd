"""Several processes that train one model, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whet.clrs.errors import ClrsError

T = TypeVar("T")


class Group:
    """The processes of this training: one, or as many as torchrun started. Use it with `with`."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))

    def __enter__(self) -> Group:
        if self.size > 1:
            dist.init_process_group("gloo")
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def rows(self, batch: int) -> slice:
        """Which rows of a batch are this process's."""
        if batch % self.size:
            raise ClrsError(f"batch: is {batch}, must be a multiple of the {self.size} processes")
        return slice(self.rank, None, self.size)

    def after_first(self, make: Callable[[], T]) -> T:
        """What `make` gives, called by the first process before all others."""
        made = make() if self.rank == 0 else None
        if self.size > 1:
            dist.barrier()
        return make() if made is None else made

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over processes."""
        return model if self.size == 1 else nn.parallel.DistributedDataParallel(model)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over processes."""
        if self.size == 1:
            return values
        total: Tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()
