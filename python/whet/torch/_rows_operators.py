"""The operators whet::softmax and whet::softmax_backward: what compilers, exporters and autograd of torch see.

`dim` is 0 or more, `where` has as many axes as `input`. The second result of whet::softmax is a buffer of stats,
(rows, 12), the third what whet::softmax_backward would otherwise find again, (rows, saved_size) in the type of the
arithmetic; both are (rows, 0) unless with_stats and with_saved ask for them. `alpha` is the parameter of the normalizer
"entmax" as a tensor of one element; the second result of whet::softmax_backward is the gradient to it by row, without
elements unless with_dalpha asks for it.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from whet import _core
from whet._normalizers import ignores_shifts, is_symmetric
from whet.rules import rule as rule_of
from whet.torch._operators import define, of_backward, one_by_one, recorded, register, transformed
from whet.torch._tensors import (by_address, by_addresses, call, if_any, mapped_first, parameter_buffer, saved_buffer,
                                 skips_dispatcher, stats_buffer, tracing, transforming, with_parameter)

# The extension's names for the arguments of whet.torch.softmax.
_NAMES = {"in": "input", "mask": "where", "axis": "dim", "dout": "grad"}

_OPTIONS = 'int dim=-1, str rule="none", str normalizer="softmax", bool hold_beta=False'
define("whet::softmax", f"(Tensor input, Tensor? where=None, Tensor? alpha=None, *, {_OPTIONS}, bool with_stats=False, "
       "bool with_saved=False) -> (Tensor, Tensor, Tensor)")
define("whet::softmax_backward",
       f"(Tensor dout, Tensor input, Tensor? where=None, Tensor? saved=None, Tensor? alpha=None, *, {_OPTIONS}, "
       "bool with_dalpha=False) -> (Tensor, Tensor)")


def forward(input: Tensor, where: Tensor | None, out: Tensor, stats: Tensor | None = None,
            saved: Tensor | None = None, alpha: Tensor | None = None, *, dim: int, rule: str = "none",
            normalizer: str = "softmax", **_: Any) -> None:
    call(_core.softmax, _NAMES, by_address(input), by_address(out), axis=dim, rule=rule,
         normalizer=with_parameter(normalizer, alpha), **by_addresses(mask=where, stats=stats, saved=saved))


def softmax(input: Tensor, where: Tensor | None, alpha: Tensor | None = None, **options: Any) -> Any:
    """The operator; recorded by an autograd.Function unless torch traces: that is quicker, and what torch.func needs."""
    if tracing():
        return torch.ops.whet.softmax(input, where, alpha, **options)
    return (_Softmax if transforming() else _RecordedSoftmax).apply(input, where, alpha, options)


def softmax_backward(*tensors: Any, **options: Any) -> Tensor:
    """The gradient to the logits alone."""
    dinput, _ = _gradients(*tensors, **options)
    return dinput


def _gradients(dout: Tensor, input: Tensor, where: Tensor | None, saved: Tensor | None, alpha: Tensor | None = None,
               **options: Any) -> Any:
    tensors = dout, input, where, saved, alpha
    if skips_dispatcher(tensors):
        return _softmax_backward(*tensors, **options)
    if tracing():
        return torch.ops.whet.softmax_backward(*tensors, **options)
    return _SoftmaxBackward.apply(*tensors, options)


def rows_of(input: Tensor, dim: int) -> tuple[int, ...]:
    return (*input.shape[:dim], *input.shape[dim + 1 :])


def _contiguous_like(input: Tensor) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _softmax(input: Tensor, where: Tensor | None = None, alpha: Tensor | None = None,
             **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, stats, saved = _softmax_shapes(input, where, **options)
    forward(input, where, out, if_any(stats), if_any(saved), alpha, **options)
    return out, stats, saved


def _softmax_shapes(input: Tensor, where: Tensor | None = None, alpha: Tensor | None = None, *, dim: int,
                    with_stats: bool = False, with_saved: bool = False,
                    **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_of(input, dim)
    return (_contiguous_like(input), stats_buffer(rows, with_stats, input),
            saved_buffer(rows, with_saved, input, **options))


def _softmax_backward(dout: Tensor, input: Tensor, where: Tensor | None = None, saved: Tensor | None = None,
                      alpha: Tensor | None = None, *, dim: int, normalizer: str = "softmax", with_dalpha: bool = False,
                      **options: Any) -> tuple[Tensor, Tensor]:
    dinput, saved = _contiguous_like(input), if_any(saved)
    dalpha = parameter_buffer(rows_of(input, dim), with_dalpha, input)
    call(_core.softmax_backward, _NAMES, by_address(input), by_address(dout), by_address(dinput), axis=dim,
         normalizer=with_parameter(normalizer, alpha),
         **by_addresses(mask=where, saved=saved, dparameter=dalpha if with_dalpha else None), **options)
    return dinput, dalpha


def _softmax_backward_shapes(dout: Tensor, input: Tensor, where: Tensor | None = None, saved: Tensor | None = None,
                             alpha: Tensor | None = None, *, dim: int, with_dalpha: bool = False,
                             **options: Any) -> tuple[Tensor, Tensor]:
    return _contiguous_like(input), parameter_buffer(rows_of(input, dim), with_dalpha, input)


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keeps what both directions of differentiation need; of whet::softmax, and of whet::beta, which has no alpha."""
    input, where, *alpha, options = inputs
    _, stats, saved = output
    ctx.save_for_backward(input, where, saved, *alpha)
    ctx.save_for_forward(input, where, saved, *alpha)
    ctx.options = of_backward(options)
    ctx.mark_non_differentiable(stats, saved)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Any, ...]:
    if dout is None:
        return None, None, None, None
    with_dalpha = any(ctx.needs_input_grad[2:3])  # torch leaves out what has its default
    dinput, dalpha = _gradients(dout, *ctx.saved_tensors, **ctx.options, with_dalpha=with_dalpha)
    return dinput, None, summed(dalpha, ctx.saved_tensors[3]) if with_dalpha else None, None


def summed(rows: Tensor, alpha: Tensor) -> Tensor:
    """The gradient to alpha from that of each row."""
    return rows.sum().to(alpha.dtype).reshape(alpha.shape)


def no_tangent_of(dalpha: Tensor | None) -> None:
    if dalpha is not None:
        raise ValueError("alpha: can't be differentiated in forward mode")


def _tangent(ctx: Any, tangent: Tensor | None, dwhere: None, dalpha: Tensor | None,
             *_: None) -> tuple[Tensor | None, None, None]:
    no_tangent_of(dalpha)
    if tangent is None:
        return None, None, None
    return tangent_of_weights(tangent, *ctx.saved_tensors, **ctx.options), None, None


def tangent_of_weights(tangent: Tensor, input: Tensor, where: Tensor | None, saved: Tensor | None,
                       alpha: Tensor | None = None, *, hold_beta: bool = False, **options: Any) -> Tensor:
    """The derivative of the weights along `tangent`, from gradients.

    Weights are a function of beta x, and d(beta x) = beta (dx + x dlnbeta). At a fixed beta the matrix of derivatives is
    symmetric, since the weights are themselves the gradient of a function of the logits: the derivative along a
    direction is what backward gives for it.
    """
    if not is_symmetric(options.get("normalizer", "softmax")):
        raise ValueError(f"normalizer: {options['normalizer']} can't be differentiated in forward mode")
    if input.dtype in (torch.bfloat16, torch.float16):  # in the type of the arithmetic, since differences are taken
        wide = tangent_of_weights(tangent.float(), input.float(), where, saved, alpha, hold_beta=hold_beta, **options)
        return wide.to(input.dtype)
    tangent = tangent.masked_fill(hidden_keys(input, where), 0.0)
    if not hold_beta and rule_of(options["rule"]).adaptive:
        along = (log_beta_gradient(input, where, saved, alpha, **options) * tangent).sum(options["dim"], keepdim=True)
        tangent = tangent + measured_logits(input, where, options["dim"], options.get("normalizer", "softmax")) * along
    return softmax_backward(tangent, input, where, saved, alpha, hold_beta=True, **options)


def log_beta_gradient(input: Tensor, where: Tensor | None, saved: Tensor | None, alpha: Tensor | None = None,
                      **options: Any) -> Tensor:
    """d ln beta / dx. With y = x - max, or x where the maximum matters, the gradients of <y, w> through beta and at a
    fixed beta differ by this times <y, the latter>."""
    y = measured_logits(input, where, options["dim"], options.get("normalizer", "softmax"))
    held = softmax_backward(y, input, where, saved, alpha, hold_beta=True, **options)
    through = softmax_backward(y, input, where, saved, alpha, **options)
    product = (held * y).sum(options["dim"], keepdim=True)
    return torch.where(product == 0, 0.0, (through - held) / product)


def hidden_keys(input: Tensor, where: Tensor | None) -> Tensor:
    hidden = input == -torch.inf
    return hidden if where is None else hidden | ~where


def measured_logits(input: Tensor, where: Tensor | None, dim: int, normalizer: str) -> Tensor:
    """The logits from their maximum if the normalizer ignores what is added to all, 0 for hidden keys."""
    if ignores_shifts(normalizer):
        return below_max(input, where, dim)
    return input.masked_fill(hidden_keys(input, where), 0.0)


def below_max(input: Tensor, where: Tensor | None, dim: int) -> Tensor:
    """input - max, 0 for hidden keys."""
    if input.shape[dim] == 0:
        return input
    hidden = hidden_keys(input, where)
    highest = input.detach().masked_fill(hidden, -torch.inf).amax(dim, keepdim=True)
    return (input - highest).masked_fill(hidden, 0.0)


def _no_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("whet.torch.softmax can be differentiated once: its gradient has no gradient of its own")


def _softmax_mapped(info: Any, in_dims: tuple[Any, ...], input: Tensor, where: Tensor | None = None,
                    alpha: Tensor | None = None, *, dim: int, **options: Any) -> Any:
    if in_dims[2:] and in_dims[2] is not None:
        return one_by_one(softmax, info.batch_size, in_dims, (input, where, alpha), {"dim": dim, **options})
    input, where = all_mapped_first(info, in_dims[:2], input, where)
    return softmax(input, where, alpha, dim=dim + 1, **options), (0, 0, 0)


def _softmax_backward_mapped(info: Any, in_dims: tuple[Any, ...], dout: Tensor, input: Tensor,
                             where: Tensor | None = None, saved: Tensor | None = None, alpha: Tensor | None = None, *,
                             dim: int, **options: Any) -> Any:
    if in_dims[4:] and in_dims[4] is not None:
        return one_by_one(_gradients, info.batch_size, in_dims, (dout, input, where, saved, alpha),
                          {"dim": dim, **options})
    dout, input, where, saved = all_mapped_first(info, in_dims[:4], dout, input, where, saved)
    dinput, dalpha = _gradients(dout, input, where, saved, alpha, dim=dim + 1, **options)
    return (dinput, dalpha), (0, 0 if options.get("with_dalpha") else None)


def all_mapped_first(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor | None) -> list[Any]:
    return [mapped_first(tensor, axis, info.batch_size) for tensor, axis in zip_longest(tensors, in_dims)]


register("whet::softmax", _softmax, _softmax_shapes, _gradient, _softmax_mapped, setup)
register("whet::softmax_backward", _softmax_backward, _softmax_backward_shapes, _no_second_gradient,
         _softmax_backward_mapped)


def _run(*tensors: Any, **options: Any) -> Any:
    return (_softmax if skips_dispatcher(tensors) else torch.ops.whet.softmax)(*tensors, **options)


_Softmax = transformed("Softmax", _run, _gradient, _softmax_mapped, setup, _tangent)
_RecordedSoftmax = recorded("Softmax", _run, _gradient, setup)
_SoftmaxBackward = transformed("SoftmaxBackward", torch.ops.whet.softmax_backward, _no_second_gradient,
                               _softmax_backward_mapped)
