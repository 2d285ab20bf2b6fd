"""The operator whet::beta: the beta that a rule chooses for each row, with its derivative. The other results are those
of whet::softmax: buffers of stats, and of what backward needs.

What is built of torch's own operations and this one, such as log_softmax, has its derivatives from torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.rules import rule as rule_of
from whet.torch._operators import define, register, transformed
from whet.torch._rows_operators import all_mapped_first, forward, log_beta_gradient, rows_of, setup
from whet.torch._tensors import BETA, if_any, saved_buffer, stats_buffer, tracing

define("whet::beta", '(Tensor input, Tensor? where=None, *, int dim=-1, str rule="none", bool with_stats=False) -> '
       "(Tensor, Tensor, Tensor)")


def beta(input: Tensor, where: Tensor | None, **options: Any) -> Any:
    """beta of each row, in the dtype of `input`, and the two buffers."""
    if tracing():
        return torch.ops.whet.beta(input, where, **options)
    return _Beta.apply(input, where, options)


def _beta(input: Tensor, where: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    found, stats, saved = _beta_shapes(input, where, **options)
    forward(input, where, torch.empty_like(input), if_any(stats), saved, **options)
    return found.copy_(saved[..., BETA]), stats, saved


def _beta_shapes(input: Tensor, where: Tensor | None = None, *, dim: int, with_stats: bool = False,
                 **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_of(input, dim)
    return input.new_empty(rows), stats_buffer(rows, with_stats, input), saved_buffer(rows, True, input, **options)


def _slope(ctx: Any) -> Tensor | None:
    """dbeta/dx."""
    if not rule_of(ctx.options["rule"]).adaptive:
        return None
    input, where, saved = ctx.saved_tensors
    slope = log_beta_gradient(input, where, saved, **ctx.options)
    return slope * saved[..., BETA].to(slope.dtype).unsqueeze(ctx.options["dim"])


def _gradient(ctx: Any, dbeta: Tensor | None, *_: None) -> tuple[Any, ...]:
    slope = _slope(ctx)
    if dbeta is None or slope is None:
        return None, None, None
    return dbeta.unsqueeze(ctx.options["dim"]) * slope, None, None


def _tangent(ctx: Any, tangent: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
    slope = _slope(ctx)
    if tangent is None or slope is None:
        input, _, saved = ctx.saved_tensors
        return torch.zeros_like(saved[..., BETA], dtype=input.dtype), None, None
    return (slope * tangent).sum(ctx.options["dim"]), None, None


def _mapped(info: Any, in_dims: tuple[Any, ...], input: Tensor, where: Tensor | None = None, *, dim: int,
            **options: Any) -> Any:
    input, where = all_mapped_first(info, in_dims, input, where)
    return beta(input, where, dim=dim + 1, **options), (0, 0, 0)


register("whet::beta", _beta, _beta_shapes, _gradient, _mapped, setup)

_Beta = transformed("Beta", torch.ops.whet.beta, _gradient, _mapped, setup, _tangent)
