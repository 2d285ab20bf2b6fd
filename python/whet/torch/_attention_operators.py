"""The operators whet::attention and whet::attention_backward: what compilers, exporters and autograd of torch see.

They take every argument, in a fixed form. B batch, H query heads, K key heads, N queries, M keys, D and E the sizes of
a key and of a value: query (B, H, N, D), key (B, K, M, D), value (B, K, M, E), mask and bias with four axes, sinks (H),
lengths of int64 and contiguous, rule with one name or one per head. The second result of whet::attention is a buffer of
stats, (B, H, N, 10) or (B, H, N, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet import _core
from whet.torch._operators import recorded, register, transformed
from whet.torch._tensors import (call, door, goes_directly, mapped_first, saved_stats, stats_buffer, transforming,
                                 watched)

# The extension's words for the arguments of whet.torch.attention.
_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal",
          "window_left": "window", "window_right": "window", "head_rules": "rule", "dout": "grad"}

_SINKS = 5  # their place among the tensors
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? sinks, Tensor? lengths"
_OPTIONS = ("str[] rule, float? scale, bool causal, str align, SymInt window_left, SymInt window_right, "
            "float softcap, bool hold_beta")

torch.library.define(
    "whet::attention", f"({_INPUTS}, bool with_stats, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))

# `wanted` says for which of query, key, value, bias and sinks; the other gradients have no elements.
torch.library.define(
    "whet::attention_backward",
    f"(Tensor dout, {_INPUTS}, Tensor stats, bool[] wanted, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))


def _options(mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, lengths: Tensor | None,
             rule: Sequence[str], scale: float | None, causal: bool, align: str, window_left: int, window_right: int,
             softcap: float) -> dict[str, Any]:
    """What forward and backward have in common, as the extension takes it: fewer are quicker."""
    options: dict[str, Any] = {"rule": rule[0] if len(rule) == 1 else rule, "causal": causal}
    if mask is not None:
        options["mask"] = door(mask)
    if bias is not None:
        options["bias"] = door(bias)
    if sinks is not None:
        options["sinks"] = door(sinks)
    if lengths is not None:
        options["lengths"] = door(lengths)
    if scale is not None:
        options["scale"] = scale
    if align != "start":
        options["align"] = align
    if (window_left, window_right) != (-1, -1):
        options.update(window_left=window_left, window_right=window_right)
    if softcap:
        options["softcap"] = softcap
    return options


def _heads_inside(shape: Sequence[int], like: Tensor) -> Tensor:
    """Room for (B, H, N, E) that lies as (B, N, H, E), as models split and join heads: joining copies nothing."""
    batch, heads, rows, size = shape
    return like.new_empty_strided((batch, heads, rows, size), (rows * heads * size, size, heads * size, 1))


def forward(query: Tensor, key: Tensor, value: Tensor, sides: Sequence[Any], stats: Tensor | None,
            options: Sequence[Any]) -> Tensor:
    out = _heads_inside((*query.shape[:3], value.shape[3]), query)
    call(_core.attention, _NAMES, door(query), door(key), door(value), door(out), stats=door(stats),
         **_options(*sides, *options))
    return out


def attention(*arguments: Any) -> Any:
    """The operator, recorded by an autograd.Function where nobody watches: quicker, and what torch.func asks for."""
    if watched():
        return torch.ops.whet.attention(*arguments)
    return (_Attention if transforming() else _RecordedAttention).apply(*arguments)


def attention_backward(*arguments: Any) -> Any:
    if goes_directly(arguments[:9]):
        return _attention_backward(*arguments)
    return torch.ops.whet.attention_backward(*arguments) if watched() else _AttentionBackward.apply(*arguments)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None,
               sinks: Tensor | None, lengths: Tensor | None, with_stats: bool, *options: Any) -> tuple[Tensor, Tensor]:
    stats = stats_buffer(query.shape[:3], with_stats, query)
    *options, _ = options
    return forward(query, key, value, (mask, bias, sinks, lengths), saved_stats(stats), options), stats


def _attention_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None,
                      sinks: Tensor | None, lengths: Tensor | None, with_stats: bool,
                      *options: Any) -> tuple[Tensor, Tensor]:
    stats = stats_buffer(query.shape[:3], with_stats, query)
    return _heads_inside((*query.shape[:3], value.shape[3]), query), stats


def _gradients(query: Tensor, key: Tensor, value: Tensor, bias: Any, sinks: Any,
               wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Room for each gradient that is wanted, and for nothing where one isn't."""
    room = [_heads_inside(given.shape, given) if want else given.new_empty(0)
            for given, want in zip((query, key, value), wanted)]
    for given, want in zip((bias, sinks), wanted[3:]):
        room.append(torch.empty_like(given, memory_format=torch.contiguous_format) if want else query.new_empty(0))
    return tuple(room)


def _attention_backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                        bias: Tensor | None, sinks: Tensor | None, lengths: Tensor | None, stats: Tensor,
                        wanted: Sequence[bool], *options: Any) -> tuple[Tensor, ...]:
    gradients = _gradients(query, key, value, bias, sinks, wanted)
    asked = {name: door(gradient)
             for name, gradient, want in zip(("dq", "dk", "dv", "dbias", "dsinks"), gradients, wanted) if want}
    *options, hold_beta = options
    stats = stats.contiguous()  # as they were, unless hooks on saved tensors moved them
    lengths = lengths if lengths is None else lengths.contiguous()
    call(_core.attention_backward, _NAMES, door(query), door(key), door(value), door(dout),
         stats=door(saved_stats(stats)), hold_beta=hold_beta, **asked,
         **_options(mask, bias, sinks, lengths, *options))
    return gradients


def _attention_backward_shapes(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                               bias: Tensor | None, sinks: Tensor | None, lengths: Tensor | None, stats: Tensor,
                               wanted: Sequence[bool], *options: Any) -> tuple[Tensor, ...]:
    return _gradients(query, key, value, bias, sinks, wanted)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, (_, *ctx.options) = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, _: None) -> tuple[Any, ...]:
    nothing = (None,) * (8 + len(ctx.options))
    if dout is None:
        return nothing
    query, key, value, _, bias, sinks, _ = (ctx.needs_input_grad[i] for i in range(7))
    wanted = [query, key, value, bias, sinks]
    found = attention_backward(dout, *ctx.saved_tensors, wanted, *ctx.options)
    dq, dk, dv, dbias, dsinks = (gradient if want else None for gradient, want in zip(found, wanted))
    return dq, dk, dv, None, dbias, dsinks, *nothing[6:]


def _no_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("whet.torch.attention can be differentiated once: its gradient has no gradient of its own")


def _folded(tensor: Tensor | None, axis: int | None, size: int, batch: int) -> Any:
    """For vmap: the mapped axis and the batch as one axis."""
    mapped = mapped_first(tensor, axis, size)
    if mapped is None:
        return None
    if mapped.dim() == 5 and mapped.shape[1] != batch:  # a mask or bias that all of the batch share
        mapped = mapped.expand(size, batch, *mapped.shape[2:])
    return mapped.flatten(0, 1).contiguous() if mapped.dim() == 2 else mapped.flatten(0, 1)


def _one_by_one(operator: Any, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """For vmap: what can't be folded into the batch, one mapped index after the other."""
    def at(i: int) -> list[Any]:
        return [given.select(axis, i) if isinstance(axis, int) else given for given, axis in zip(arguments, in_dims)]

    results = [operator(*at(i)) for i in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])


def _attention_mapped(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    if in_dims[5] is not None:  # sinks belong to heads, not to the batch
        return _one_by_one(attention, info.batch_size, in_dims, arguments)
    tensors = _all_folded(info.batch_size, _batch_of(arguments[0], in_dims[0]), in_dims, arguments)
    results = attention(*tensors, *arguments[7:])
    return tuple(result.unflatten(0, (info.batch_size, -1)) for result in results), (0, 0)


def _attention_backward_mapped(info: Any, in_dims: tuple[Any, ...], dout: Tensor, *arguments: Any) -> Any:
    *_, dbias, dsinks = wanted = arguments[8]
    if dbias or dsinks or in_dims[6] is not None:  # gradients that a batch shares
        return _one_by_one(attention_backward, info.batch_size, in_dims, (dout, *arguments))
    batch = _batch_of(arguments[0], in_dims[1])
    tensors = _all_folded(info.batch_size, batch, in_dims[1:], arguments)
    dout = _folded(dout, in_dims[0], info.batch_size, batch)
    stats = _folded(arguments[7], in_dims[8], info.batch_size, batch).contiguous()
    results = attention_backward(dout, *tensors, stats, *arguments[8:])
    unfolded = (result.unflatten(0, (info.batch_size, -1)) if want else result
                for result, want in zip(results, wanted))
    return tuple(unfolded), tuple(0 if want else None for want in wanted)


def _batch_of(query: Tensor, axis: int | None) -> int:
    return query.shape[0] if axis is None else query.movedim(axis, 0).shape[1]


def _all_folded(size: int, batch: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Tensor | None]:
    """The seven tensors; sinks stay as they are."""
    return [tensor if place == _SINKS else _folded(tensor, axis, size, batch)
            for place, (tensor, axis) in enumerate(zip(arguments[:7], in_dims))]


register("whet::attention", _attention, _attention_shapes, _gradient, _attention_mapped, _setup)
register("whet::attention_backward", _attention_backward, _attention_backward_shapes, _no_second_gradient,
         _attention_backward_mapped)


def _run(*arguments: Any) -> Any:
    return (_attention if goes_directly(arguments[:7]) else torch.ops.whet.attention)(*arguments)


_Attention = transformed("Attention", _run, _gradient, _attention_mapped, _setup)
_RecordedAttention = recorded("Attention", _run, _gradient, _setup)
_AttentionBackward = transformed("AttentionBackward", torch.ops.whet.attention_backward, _no_second_gradient,
                                 _attention_backward_mapped)
