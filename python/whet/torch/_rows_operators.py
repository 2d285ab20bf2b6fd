"""The operators whet::softmax and whet::softmax_backward: what compilers, exporters and autograd of torch see.

They take every argument, in a fixed form: `dim` is 0 or more, `where` has as many axes as `input`. The second result of
whet::softmax is a buffer of stats, (rows, 10) or (rows, 0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet import _core
from whet.torch._operators import recorded, register, transformed
from whet.torch._tensors import (call, door, goes_directly, mapped_first, saved_stats, stats_buffer, transforming,
                                 watched)

# The extension's words for the arguments of whet.torch.softmax.
_NAMES = {"in": "input", "mask": "where", "axis": "dim", "dout": "grad"}


def forward(input: Tensor, dim: int, rule: str, where: Tensor | None, stats: Tensor | None) -> Tensor:
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    call(_core.softmax, _NAMES, door(input), door(out), axis=dim, rule=rule, mask=door(where), stats=door(stats))
    return out


def softmax(*arguments: Any) -> Any:
    """The operator, recorded by an autograd.Function where nobody watches: quicker, and what torch.func asks for."""
    if watched():
        return torch.ops.whet.softmax(*arguments)
    return (_Softmax if transforming() else _RecordedSoftmax).apply(*arguments)


def softmax_backward(*arguments: Any) -> Any:
    if goes_directly(arguments[:4]):
        return _softmax_backward(*arguments)
    return torch.ops.whet.softmax_backward(*arguments) if watched() else _SoftmaxBackward.apply(*arguments)


def rows_of(input: Tensor, dim: int) -> tuple[int, ...]:
    return (*input.shape[:dim], *input.shape[dim + 1 :])


torch.library.define(
    "whet::softmax",
    "(Tensor input, int dim, str rule, Tensor? where, bool with_stats, bool hold_beta) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))

torch.library.define(
    "whet::softmax_backward",
    "(Tensor dout, Tensor input, Tensor stats, Tensor? where, int dim, str rule, bool hold_beta) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))


def _softmax(input: Tensor, dim: int, rule: str, where: Tensor | None, with_stats: bool,
             hold_beta: bool) -> tuple[Tensor, Tensor]:
    stats = stats_buffer(rows_of(input, dim), with_stats, input)
    return forward(input, dim, rule, where, saved_stats(stats)), stats


def _softmax_shapes(input: Tensor, dim: int, rule: str, where: Tensor | None, with_stats: bool,
                    hold_beta: bool) -> tuple[Tensor, Tensor]:
    stats = stats_buffer(rows_of(input, dim), with_stats, input)
    return torch.empty_like(input, memory_format=torch.contiguous_format), stats


def _softmax_backward(dout: Tensor, input: Tensor, stats: Tensor, where: Tensor | None, dim: int, rule: str,
                      hold_beta: bool) -> Tensor:
    dinput = torch.empty_like(input, memory_format=torch.contiguous_format)
    stats = stats.contiguous()  # as it was, unless hooks on saved tensors moved it
    call(_core.softmax_backward, _NAMES, door(input), door(dout), door(dinput), axis=dim, rule=rule, mask=door(where),
         stats=door(saved_stats(stats)), hold_beta=hold_beta)
    return dinput


def _softmax_backward_shapes(dout: Tensor, input: Tensor, stats: Tensor, where: Tensor | None, dim: int, rule: str,
                             hold_beta: bool) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, dim, rule, where, _, hold_beta = inputs
    ctx.save_for_backward(input, output[1], where)
    ctx.options = dim, rule, hold_beta
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, _: None) -> tuple[Any, ...]:
    dinput = None if dout is None else softmax_backward(dout, *ctx.saved_tensors, *ctx.options)
    return dinput, None, None, None, None, None


def _no_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("whet.torch.softmax can be differentiated once: its gradient has no gradient of its own")


def _softmax_mapped(info: Any, in_dims: tuple[Any, ...], input: Tensor, dim: int, rule: str, where: Tensor | None,
                    with_stats: bool, hold_beta: bool) -> Any:
    input = mapped_first(input, in_dims[0], info.batch_size)
    where = mapped_first(where, in_dims[3], info.batch_size)
    return softmax(input, dim + 1, rule, where, with_stats, hold_beta), (0, 0)


def _softmax_backward_mapped(info: Any, in_dims: tuple[Any, ...], dout: Tensor, input: Tensor, stats: Tensor,
                             where: Tensor | None, dim: int, rule: str, hold_beta: bool) -> Any:
    tensors = (mapped_first(tensor, axis, info.batch_size)
               for tensor, axis in zip((dout, input, stats, where), in_dims))
    # Stats are read as one block, which a mapped axis may have been moved out of.
    dout, input, stats, where = tensors
    return softmax_backward(dout, input, stats.contiguous(), where, dim + 1, rule, hold_beta), 0


register("whet::softmax", _softmax, _softmax_shapes, _gradient, _softmax_mapped, _setup)
register("whet::softmax_backward", _softmax_backward, _softmax_backward_shapes, _no_second_gradient,
         _softmax_backward_mapped)


def _run(*arguments: Any) -> Any:
    return (_softmax if goes_directly((arguments[0], arguments[3])) else torch.ops.whet.softmax)(*arguments)


_Softmax = transformed("Softmax", _run, _gradient, _softmax_mapped, _setup)
_RecordedSoftmax = recorded("Softmax", _run, _gradient, _setup)
_SoftmaxBackward = transformed("SoftmaxBackward", torch.ops.whet.softmax_backward, _no_second_gradient,
                               _softmax_backward_mapped)
