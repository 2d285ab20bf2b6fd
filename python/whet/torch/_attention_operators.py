"""The operators whet::attention, whet::attention_backward and whet::attention_outputs: what compilers, exporters and
autograd of torch see.

B batch, H query heads, K key heads, N queries, M keys, D and E the sizes of a key and of a value: see Operands. `rule`
is one name, or one per query head joined by ";". The second result of whet::attention is a buffer of stats,
(B, H, N, 12), the third what whet::attention_backward would otherwise find again, (B, H, N, saved_size) in the type of
the arithmetic; both are (B, H, N, 0) unless with_stats and with_saved ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whet import _core
from whet.torch import _attention_tangent
from whet.torch._operators import define, of_backward, one_by_one, recorded, register, transformed
from whet.torch._rows_operators import summed
from whet.torch._tensors import (by_address, by_addresses, call, if_any, mapped_first, parameter_buffer, saved_buffer,
                                 skips_dispatcher, stats_buffer, tracing, transforming, with_parameter)

# The extension's names for the arguments of whet.torch.attention.
_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal",
          "window_left": "window", "window_right": "window", "head_rules": "rule", "dout": "grad",
          "dropout": "dropout_p"}


class Operands(NamedTuple):
    """The tensors of a call."""

    query: Any  # (B, H, N, D)
    key: Any  # (B, K, M, D)
    value: Any  # (B, K, M, E)
    mask: Any = None  # boolean, four axes, broadcast to (B, H, N, M); True is visible
    bias: Any = None  # the same in floats
    sinks: Any = None  # (H)
    lengths: Any = None  # int64, contiguous, as are:
    query_starts: Any = None
    key_starts: Any = None
    dropout_seed: Any = None  # int64, one element: a tensor, so that compiled programs draw another every time
    query_scale: Any = None  # floats, three axes, broadcast to (B, H, N); here, where programs exported before lack it
    alpha: Any = None  # one element: the parameter of the normalizer "entmax"


class Gradients(NamedTuple):
    """Of the operands that have one; also which of them are wanted."""

    query: Any = False
    key: Any = False
    value: Any = False
    bias: Any = False
    sinks: Any = False
    query_scale: Any = False
    alpha: Any = False  # by row, (B, H, N), float64


_OPERANDS = ("Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? bias=None, Tensor? sinks=None, "
             "Tensor? lengths=None, Tensor? query_starts=None, Tensor? key_starts=None, Tensor? dropout_seed=None, "
             "Tensor? query_scale=None, Tensor? alpha=None")
_OPTIONS = ('str rule="none", str normalizer="softmax", float? scale=None, bool causal=False, str align="start", '
            "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, bool hold_beta=False, float dropout=0.0")

define("whet::attention", f"({_OPERANDS}, *, bool with_stats=False, {_OPTIONS}, bool with_saved=False) -> "
       "(Tensor, Tensor, Tensor)")

# `wanted` are Gradients; those that aren't have no elements.
define("whet::attention_backward", f"(Tensor dout, Tensor? saved, {_OPERANDS}, *, bool[] wanted, {_OPTIONS}) -> "
       "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")

# weights (R, M), top_keys and top_weights (B, H, N, top_k), column_sums (B, H, M); no elements where not asked for.
define("whet::attention_outputs", f"(Tensor? weight_rows, {_OPERANDS}, *, SymInt top_k=0, bool column_sums=False, "
       f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)")


def forward(operands: Operands, outputs: dict[str, Any], *, hold_beta: bool = False, **options: Any) -> Tensor:
    query, key, value, *_ = operands
    out = _output(query, value)
    call(_core.attention, _NAMES, by_address(query), by_address(key), by_address(value), by_address(out), **outputs,
         **_sides(operands), **_with_names(operands, options))
    return out


def _sides(operands: Operands) -> dict[str, Any]:
    """All but query, key and value, as the extension takes them."""
    sides = {name: by_address(tensor) for name, tensor in zip(_SIDES, operands[3:-1]) if tensor is not None}
    if operands.dropout_seed is not None:
        sides["dropout_seed"] = operands.dropout_seed.item()
    return sides


_SIDES = Operands._fields[3:-1]


def _with_names(operands: Operands, options: dict[str, Any]) -> dict[str, Any]:
    """Options as the extension takes them: rules as a list, the parameter of the normalizer in its name."""
    options = _with_rules(options)
    if operands.alpha is None:
        return options
    return {**options, "normalizer": with_parameter(options["normalizer"], operands.alpha)}


def _with_rules(options: dict[str, Any]) -> dict[str, Any]:
    rule = options.get("rule", "none")
    return {**options, "rule": rule.split(";")} if ";" in rule else options


def _output(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, rows, _ = query.shape
    return heads_inside((batch, heads, rows, value.shape[3]), query)


def heads_inside(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty (B, H, N, E) that lies as (B, N, H, E), as models split and join heads: joining copies nothing."""
    batch, heads, rows, size = shape
    return like.new_empty_strided((batch, heads, rows, size), (rows * heads * size, size, heads * size, 1))


# ---- attention


def attention(*operands: Tensor | None, **options: Any) -> Any:
    """The operator; recorded by an autograd.Function unless torch traces: that is quicker, and what torch.func needs."""
    if tracing():
        return torch.ops.whet.attention(*operands, **options)
    return (_Attention if transforming() else _RecordedAttention).apply(*operands, options)


def _attention(*operands: Tensor | None, with_stats: bool = False, with_saved: bool = False,
               **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = Operands(*operands)
    stats, saved = _row_buffers(given.query, with_stats, with_saved, options)
    return forward(given, by_addresses(stats=if_any(stats), saved=if_any(saved)), **options), stats, saved


def _attention_shapes(*operands: Tensor | None, with_stats: bool = False, with_saved: bool = False,
                      **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, *_ = Operands(*operands)
    return _output(query, value), *_row_buffers(query, with_stats, with_saved, options)


def _row_buffers(query: Tensor, with_stats: bool, with_saved: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    rows = query.shape[:3]
    return stats_buffer(rows, with_stats, query), saved_buffer(rows, with_saved, query, **_with_rules(options))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *operands, options = inputs
    _, stats, saved = output
    ctx.save_for_backward(saved, *operands)
    ctx.save_for_forward(saved, *operands)
    ctx.options = of_backward(options)
    ctx.mark_non_differentiable(stats, saved)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Any, ...]:
    gradients = Operands(None, None, None)
    if dout is not None:
        needed = dict(zip(Operands._fields, ctx.needs_input_grad))
        wanted = Gradients(**{name: needed.get(name, False) for name in Gradients._fields})
        found = attention_backward(dout, *ctx.saved_tensors, wanted=list(wanted), **ctx.options)
        gradients = gradients._replace(**{name: gradient for name, gradient, want
                                          in zip(Gradients._fields, found, wanted) if want})
        if wanted.alpha:
            gradients = gradients._replace(alpha=summed(gradients.alpha, ctx.saved_tensors[-1]))
    return *gradients, None


def _tangent(ctx: Any, *tangents: Any) -> tuple[Tensor, None, None]:
    *tangents_of_operands, _ = tangents
    saved, *operands = ctx.saved_tensors
    given, along = Operands(*operands), Operands(*tangents_of_operands)
    return _attention_tangent.attention_tangent(given, along, saved, **ctx.options), None, None


def _attention_mapped(info: Any, in_dims: tuple[Any, ...], *operands: Tensor | None, **options: Any) -> Any:
    given, axes = Operands(*operands), Operands(*in_dims)
    if _are_shared(given, axes):
        return one_by_one(attention, info.batch_size, axes, given, options)
    results = attention(*_all_folded(info.batch_size, axes, given), **options)
    return tuple(result.unflatten(0, (info.batch_size, -1)) for result in results), (0, 0, 0)


# ---- its gradient


def attention_backward(dout: Tensor, saved: Tensor | None, *operands: Tensor | None, **options: Any) -> Any:
    if skips_dispatcher((dout, saved, *operands)):
        return _attention_backward(dout, saved, *operands, **options)
    if tracing():
        return torch.ops.whet.attention_backward(dout, saved, *operands, **options)
    return _AttentionBackward.apply(dout, saved, *operands, options)


def _attention_backward(dout: Tensor, saved: Tensor | None, *operands: Tensor | None, wanted: Sequence[bool],
                        **options: Any) -> tuple[Tensor, ...]:
    given, saved = _integers_contiguous(Operands(*operands)), if_any(saved)
    gradients = _empty_gradients(given, wanted)
    names = Gradients(query="dq", key="dk", value="dv", bias="dbias", sinks="dsinks",
                      query_scale="dquery_scale", alpha="dparameter")
    written = {name: by_address(gradient) for name, gradient, want in zip(names, gradients, wanted) if want}
    call(_core.attention_backward, _NAMES, by_address(given.query), by_address(given.key), by_address(given.value),
         by_address(dout), **by_addresses(saved=saved), **written, **_sides(given), **_with_names(given, options))
    return tuple(gradients)


def _integers_contiguous(operands: Operands) -> Operands:
    """As they were, unless hooks on saved tensors moved them."""
    integers = {name: getattr(operands, name) for name in ("lengths", "query_starts", "key_starts")}
    return operands._replace(**{name: values.contiguous() for name, values in integers.items() if values is not None})


def _attention_backward_shapes(dout: Tensor, saved: Tensor | None, *operands: Tensor | None, wanted: Sequence[bool],
                               **options: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_gradients(Operands(*operands), wanted))


def _empty_gradients(operands: Operands, wanted: Sequence[bool]) -> Gradients:
    """A buffer for each gradient that is wanted, without elements where one isn't."""
    def empty(name: str, want: bool) -> Tensor:
        if not want:
            return operands.query.new_empty(0)
        if name == "alpha":
            return parameter_buffer(operands.query.shape[:3], True, operands.query)
        given: Tensor = getattr(operands, name)
        if name in ("query", "key", "value"):
            return heads_inside(given.shape, given)
        return torch.empty_like(given, memory_format=torch.contiguous_format)

    # Programs exported before an operand had a gradient want fewer.
    return Gradients(*(empty(name, want) for name, want in zip(Gradients._fields, Gradients(*wanted))))


def _no_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("whet.torch.attention can be differentiated once: its gradient has no gradient of its own")


def _attention_backward_mapped(info: Any, in_dims: tuple[Any, ...], dout: Tensor, saved: Tensor | None,
                               *operands: Tensor | None, **options: Any) -> Any:
    dout_axis, saved_axis, *axes_of_operands = in_dims
    given, axes, wanted = Operands(*operands), Operands(*axes_of_operands), Gradients(*options["wanted"])
    if wanted.bias or wanted.sinks or wanted.query_scale or _are_shared(given, axes):
        return one_by_one(attention_backward, info.batch_size, (dout_axis, saved_axis, *axes), (dout, saved, *given),
                          options)
    size, batch = info.batch_size, batch_of(given.query, axes.query)
    results = attention_backward(folded(dout, dout_axis, size, batch), folded(saved, saved_axis, size, batch),
                                 *_all_folded(size, axes, given), **options)
    unfolded = (result.unflatten(0, (size, -1)) if want else result for result, want in zip(results, wanted))
    return tuple(unfolded), tuple(0 if want else None for want in wanted)


# ---- vmap


def batch_of(query: Tensor, axis: int | None) -> int:
    return query.shape[0] if axis is None else query.movedim(axis, 0).shape[1]


def _are_shared(given: Operands, axes: Operands) -> bool:
    """Whether something varies that all of a batch share, or tells rows apart by their numbers in it."""
    varies = axes.sinks is not None or axes.alpha is not None
    return varies or given.query_starts is not None or given.dropout_seed is not None


def _all_folded(size: int, axes: Operands, given: Operands) -> Operands:
    """With the mapped axis folded into the batch; sinks and alpha, which all share, as they are."""
    batch = batch_of(given.query, axes.query)
    operands = Operands(*(folded(tensor, axis, size, batch) for tensor, axis in zip(given, axes)))
    return operands._replace(sinks=given.sinks, alpha=given.alpha)


def folded(tensor: Tensor | None, axis: int | None, size: int, batch: int) -> Any:
    """The mapped axis and the batch as one axis."""
    mapped = mapped_first(tensor, axis, size)
    if mapped is None or mapped.dim() < 2:
        return mapped
    if mapped.dim() >= 4 and mapped.shape[1] != batch:  # a mask, bias or query_scale that all of the batch share
        mapped = mapped.expand(size, batch, *mapped.shape[2:])
    return mapped.flatten(0, 1).contiguous() if mapped.dim() == 2 else mapped.flatten(0, 1)


# ---- optional outputs


def output_buffers(operands: Operands, weight_rows: Tensor | None, top_k: int, column_sums: bool) -> dict[str, Tensor]:
    """By the names that the extension has for them."""
    (batch, heads, queries, _), keys = operands.query.shape, operands.key.shape[2]
    empty, buffers = operands.query.new_empty, {}
    if weight_rows is not None:
        buffers["weights"] = empty((weight_rows.shape[0], keys))
    if top_k > 0:
        buffers["top_keys"] = empty((batch, heads, queries, top_k), dtype=torch.int64)
        buffers["top_weights"] = empty((batch, heads, queries, top_k), dtype=torch.float32)
    if column_sums:
        buffers["column_sums"] = empty((batch, heads, keys), dtype=torch.float64)
    return buffers


_OUTPUTS = ("weights", "top_keys", "top_weights", "column_sums")


def attention_outputs(weight_rows: Tensor | None, operands: Operands, *, top_k: int, column_sums: bool,
                      **options: Any) -> dict[str, Tensor]:
    """The optional outputs that are asked for, through the dispatcher."""
    detached = (None if tensor is None else tensor.detach() for tensor in operands)
    found = torch.ops.whet.attention_outputs(weight_rows, *detached, top_k=top_k, column_sums=column_sums, **options)
    asked = {"weights": weight_rows is not None, "top_keys": top_k > 0, "top_weights": top_k > 0,
             "column_sums": column_sums}
    return {name: tensor for name, tensor in zip(_OUTPUTS, found) if asked[name]}


def written(buffers: dict[str, Tensor], weight_rows: Tensor | None, top_k: int) -> dict[str, Any]:
    """The extension's keywords for these buffers."""
    return {**by_addresses(weight_rows=weight_rows, **buffers), **({"top_k": top_k} if top_k > 0 else {})}


def _attention_outputs(weight_rows: Tensor | None, *operands: Tensor | None, top_k: int = 0, column_sums: bool = False,
                       **options: Any) -> tuple[Tensor, ...]:
    given = Operands(*operands)
    buffers = output_buffers(given, weight_rows, top_k, column_sums)
    forward(given, written(buffers, weight_rows, top_k), **options)
    return tuple(buffers.get(name, given.query.new_empty(0)) for name in _OUTPUTS)


def _attention_outputs_shapes(weight_rows: Tensor | None, *operands: Tensor | None, top_k: int = 0,
                              column_sums: bool = False, **options: Any) -> tuple[Tensor, ...]:
    given = Operands(*operands)
    buffers = output_buffers(given, weight_rows, top_k, column_sums)
    return tuple(buffers.get(name, given.query.new_empty(0)) for name in _OUTPUTS)


def _attention_outputs_mapped(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor | None, **options: Any) -> Any:
    return one_by_one(torch.ops.whet.attention_outputs, info.batch_size, in_dims, tensors, options)


def _no_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("the optional outputs of whet.torch.attention have no gradient")


register("whet::attention", _attention, _attention_shapes, _gradient, _attention_mapped, _setup)
register("whet::attention_backward", _attention_backward, _attention_backward_shapes, _no_second_gradient,
         _attention_backward_mapped)
register("whet::attention_outputs", _attention_outputs, _attention_outputs_shapes, _no_gradient,
         _attention_outputs_mapped)


def _run(*operands: Tensor | None, **options: Any) -> Any:
    return (_attention if skips_dispatcher(operands) else torch.ops.whet.attention)(*operands, **options)


_Attention = transformed("Attention", _run, _gradient, _attention_mapped, _setup, _tangent)
_RecordedAttention = recorded("Attention", _run, _gradient, _setup)
_AttentionBackward = transformed("AttentionBackward", torch.ops.whet.attention_backward, _no_second_gradient,
                                 _attention_backward_mapped)
