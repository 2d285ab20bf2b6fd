"""The operator whet::beta: the beta that a rule chooses for each row, with its derivative, and the rows' stats.

What is built of torch's own operations and this one, such as log_softmax, has its derivatives from torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.rules import rule as rule_of
from whet.stats import Stats
from whet.torch._operators import define, register, transformed
from whet.torch._rows_operators import all_mapped_first, forward, log_beta_gradient, rows_of
from whet.torch._tensors import stats_buffer, tracing

define("whet::beta", '(Tensor input, Tensor? where=None, *, int dim=-1, str rule="none") -> (Tensor, Tensor)')

_BETA = Stats._fields.index("beta")


def beta(input: Tensor, where: Tensor | None, **options: Any) -> Any:
    """beta of each row, in the dtype of `input`, and a buffer of stats."""
    if tracing():
        return torch.ops.whet.beta(input, where, **options)
    return _Beta.apply(input, where, options)


def _beta(input: Tensor, where: Tensor | None = None, *, dim: int, **options: Any) -> tuple[Tensor, Tensor]:
    stats = stats_buffer(rows_of(input, dim), True, input)
    forward(input, where, stats, torch.empty_like(input), dim=dim, **options)
    return stats[..., _BETA].to(input.dtype, copy=True), stats


def _beta_shapes(input: Tensor, where: Tensor | None = None, *, dim: int, **options: Any) -> tuple[Tensor, Tensor]:
    stats = stats_buffer(rows_of(input, dim), True, input)
    return stats.new_empty(stats.shape[:-1], dtype=input.dtype), stats


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, where, ctx.options = inputs
    _, stats = output
    ctx.save_for_backward(input, where, stats)
    ctx.save_for_forward(input, where, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _slope(ctx: Any) -> Tensor | None:
    """dbeta/dx."""
    if not rule_of(ctx.options["rule"]).adaptive:
        return None
    input, where, stats = ctx.saved_tensors
    slope = log_beta_gradient(input, where, stats, **ctx.options)
    return slope * stats[..., _BETA].to(slope.dtype).unsqueeze(ctx.options["dim"])


def _gradient(ctx: Any, dbeta: Tensor | None, _: None) -> tuple[Any, ...]:
    slope = _slope(ctx)
    if dbeta is None or slope is None:
        return None, None, None
    return dbeta.unsqueeze(ctx.options["dim"]) * slope, None, None


def _tangent(ctx: Any, tangent: Tensor | None, *_: None) -> tuple[Tensor | None, None]:
    slope = _slope(ctx)
    if tangent is None or slope is None:
        input, _, stats = ctx.saved_tensors
        return torch.zeros_like(stats[..., _BETA], dtype=input.dtype), None
    return (slope * tangent).sum(ctx.options["dim"]), None


def _mapped(info: Any, in_dims: tuple[Any, ...], input: Tensor, where: Tensor | None = None, *, dim: int,
            **options: Any) -> Any:
    input, where = all_mapped_first(info, in_dims, input, where)
    return beta(input, where, dim=dim + 1, **options), (0, 0)


register("whet::beta", _beta, _beta_shapes, _gradient, _mapped, _setup)

_Beta = transformed("Beta", torch.ops.whet.beta, _gradient, _mapped, _setup, _tangent)
