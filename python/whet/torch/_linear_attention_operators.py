"""The operators whet::linear_attention and whet::linear_attention_backward: what compilers, exporters and autograd of
torch see.

query (B, H, N, D), key (B, K, M, D), value (B, K, M, E); lengths (B), int64 and contiguous. Nothing but these is kept
for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whet import _core
from whet.torch._attention_operators import batch_of, folded, heads_inside
from whet.torch._operators import define, recorded, register, transformed
from whet.torch._tensors import by_address, by_addresses, call, skips_dispatcher, tracing, transforming

# The extension's names for the arguments of whet.torch.linear_attention.
_NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "dout": "grad"}

_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? lengths=None"

define("whet::linear_attention", f"({_OPERANDS}, *, bool causal=False) -> Tensor")

# `wanted`: of query, key and value; those that aren't have no elements.
define("whet::linear_attention_backward", f"(Tensor dout, {_OPERANDS}, *, bool[] wanted, bool causal=False) -> "
       "(Tensor, Tensor, Tensor)")


# ---- linear_attention


def linear_attention(*operands: Tensor | None, **options: Any) -> Any:
    """The operator; recorded by an autograd.Function unless torch traces: that is quicker, and what torch.func needs."""
    if tracing():
        return torch.ops.whet.linear_attention(*operands, **options)
    return (_LinearAttention if transforming() else _RecordedLinearAttention).apply(*operands, options)


def forward(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, causal: bool = False) -> Tensor:
    out = _output(query, value)
    call(_core.linear_attention, _NAMES, by_address(query), by_address(key), by_address(value), by_address(out),
         causal=causal, **by_addresses(lengths=lengths))
    return out


def _output(query: Tensor, value: Tensor) -> Tensor:
    return heads_inside((*query.shape[:3], value.shape[3]), query)


def _shapes(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, causal: bool = False) -> Tensor:
    return _output(query, value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, options = inputs
    ctx.save_for_backward(*operands)
    ctx.options = options


def _gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = linear_attention_backward(dout, *ctx.saved_tensors, wanted=wanted, **ctx.options)
    return *(gradient if want else None for gradient, want in zip(found, wanted)), None, None


def _mapped(info: Any, in_dims: tuple[Any, ...], *operands: Any, **options: Any) -> Any:
    result = linear_attention(*_all_folded(info.batch_size, in_dims, operands), **options)
    return result.unflatten(0, (info.batch_size, -1)), 0


# ---- its gradient


def linear_attention_backward(dout: Tensor, *operands: Any, **options: Any) -> Any:
    if skips_dispatcher((dout, *operands)):
        return _backward(dout, *operands, **options)
    if tracing():
        return torch.ops.whet.linear_attention_backward(dout, *operands, **options)
    return _LinearAttentionBackward.apply(dout, *operands, options)


def _backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, *,
              wanted: Sequence[bool], causal: bool = False) -> tuple[Tensor, ...]:
    gradients = _empty_gradients(query, key, value, wanted)
    written = {name: by_address(gradient) for name, gradient, want in zip(("dq", "dk", "dv"), gradients, wanted)
               if want}
    # Hooks on saved tensors may have moved the lengths.
    lengths = None if lengths is None else lengths.contiguous()
    call(_core.linear_attention_backward, _NAMES, by_address(query), by_address(key), by_address(value),
         by_address(dout), causal=causal, **by_addresses(lengths=lengths), **written)
    return gradients


def _backward_shapes(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, *,
                     wanted: Sequence[bool], causal: bool = False) -> tuple[Tensor, ...]:
    return _empty_gradients(query, key, value, wanted)


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """A buffer for each gradient that is wanted, without elements where one isn't."""
    return tuple(heads_inside(given.shape, given) if want else given.new_empty(0)
                 for given, want in zip((query, key, value), wanted))


def _no_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("whet.torch.linear_attention can be differentiated once: its gradient has no gradient of its "
                       "own")


def _backward_mapped(info: Any, in_dims: tuple[Any, ...], dout: Tensor, *operands: Any, **options: Any) -> Any:
    size, wanted = info.batch_size, options["wanted"]
    results = linear_attention_backward(*_all_folded(size, in_dims[1:], operands, (dout, in_dims[0])), **options)
    unfolded = (result.unflatten(0, (size, -1)) if want else result for result, want in zip(results, wanted))
    return tuple(unfolded), tuple(0 if want else None for want in wanted)


def _all_folded(size: int, axes: tuple[Any, ...], operands: tuple[Any, ...], *first: tuple[Any, Any]) -> list[Any]:
    """With the mapped axis folded into the batch, of tensors that come first, too."""
    batch = batch_of(operands[0], axes[0])
    return [folded(tensor, axis, size, batch) for tensor, axis in (*first, *zip(operands, axes))]


register("whet::linear_attention", forward, _shapes, _gradient, _mapped, _setup)
register("whet::linear_attention_backward", _backward, _backward_shapes, _no_second_gradient, _backward_mapped)


def _run(*operands: Any, **options: Any) -> Any:
    return (forward if skips_dispatcher(operands) else torch.ops.whet.linear_attention)(*operands, **options)


_LinearAttention = transformed("LinearAttention", _run, _gradient, _mapped, _setup)
_RecordedLinearAttention = recorded("LinearAttention", _run, _gradient, _setup)
_LinearAttentionBackward = transformed("LinearAttentionBackward", torch.ops.whet.linear_attention_backward,
                                       _no_second_gradient, _backward_mapped)
