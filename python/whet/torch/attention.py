"""F.scaled_dot_product_attention with a rule. No n by n matrix is ever stored, neither forward nor backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from whet._arguments import Window, flag, window_sides
from whet.rules import RuleLike, rule_names
from whet.stats import Stats
from whet.torch import _attention_operators
from whet.torch._tensors import (FLOATS, check, check_device, check_mask, goes_directly, settled, stats_buffer,
                                 wants_gradient)

_INTEGERS = (torch.int64, torch.int32)


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              rule: RuleLike | Sequence[RuleLike] = None, softcap: float | None = 0.0, sinks: Tensor | None = None,
              window: Window = None, align: str = "start", lengths: Tensor | Sequence[int] | None = None,
              hold_beta: bool = False, return_stats: Literal[False] = False) -> Tensor: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              rule: RuleLike | Sequence[RuleLike] = None, softcap: float | None = 0.0, sinks: Tensor | None = None,
              window: Window = None, align: str = "start", lengths: Tensor | Sequence[int] | None = None,
              hold_beta: bool = False, return_stats: Literal[True]) -> tuple[Tensor, Stats]: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              rule: RuleLike | Sequence[RuleLike] = None, softcap: float | None = 0.0, sinks: Tensor | None = None,
              window: Window = None, align: str = "start", lengths: Tensor | Sequence[int] | None = None,
              hold_beta: bool = False, return_stats: bool) -> Tensor | tuple[Tensor, Stats]: ...
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              rule: RuleLike | Sequence[RuleLike] = None, softcap: float | None = 0.0, sinks: Tensor | None = None,
              window: Window = None, align: str = "start", lengths: Tensor | Sequence[int] | None = None,
              hold_beta: bool = False, return_stats: bool = False) -> Any:
    """softmax(beta x) value with x = scale query key^T, row by row, beta chosen by a rule.

    The signature of torch.nn.functional.scaled_dot_product_attention, plus keywords. H query heads, N queries, M keys,
    D and E the sizes of a key and of a value (1 to 1024). A row is what one query of one head sees.

    Args:
        query, key, value: (..., H, N, D), (..., H, M, D), (..., H, M, E), of any strides and one dtype: float32,
            float64, bfloat16 or float16. Leading dimensions broadcast; there may be none.
        attn_mask: broadcast to (..., H, N, M). Boolean: True takes part. Floats are added to the logits, -inf hides;
            they have a gradient. A CausalBias of torch.nn.attention.bias is the mask it stands for.
        dropout_p: must be 0. Dropout acts on stored weights, and none are stored.
        is_causal: hide keys after the query's place. May be given together with attn_mask.
        scale: default 1 / sqrt(D). A tensor without dimensions (a scale that is learned) multiplies `query`, and has a
            gradient.
        enable_gqa: key and value may have fewer heads than query, each a number that H is a multiple of.
        rule: a rule or its name (see whet.rules), or a list with one a query head. Default: none, beta = 1.
        softcap: c tanh(x / c) before attn_mask is added; 0 or None: none.
        sinks: (H), a logit of its own per head that takes weight and has no value. It has a gradient.
        window: hide keys further than this from the query's place; a pair is (before, after), None or
            -1 for no limit.
        align: the place of query i: "start", key i, as torch counts; "end", so that the last query stands at the
            last key, as in decoding with a cache.
        lengths: integers, one a batch entry or one a row: only the first keys exist.
        hold_beta: gradients count beta as a constant. By default they go through the rule, as in the published code.
        return_stats: also return the Stats of all rows, (..., H, N).

    Returns:
        The output (..., H, N, E); ``(output, stats)`` with return_stats. A row that sees no key gives 0, where torch
        may give NaN. In memory the output lies as (..., N, H, E): joining the heads copies nothing. The stats are
        float64 tensors through which no gradient flows.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import torch
    >>> from whet.torch import attention
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    >>> out, stats = attention(q, k, v, is_causal=True, rule="paper", return_stats=True)
    >>> out.shape, stats.count[0, 1]
    (torch.Size([1, 2, 5, 8]), tensor([1., 2., 3., 4., 5.], dtype=torch.float64))
    """
    if type(attn_mask).__name__ == "CausalBias":  # by name, since its module brings torch's compiler along
        attn_mask, is_causal, align = _causal(attn_mask, query, key, is_causal, align, window, lengths)
    given = query, key, value, attn_mask, sinks, lengths, scale
    if has_torch_function_variadic(*given):
        return handle_torch_function(
            attention, given, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule,
            softcap=softcap, sinks=sinks, window=window, align=align, lengths=lengths, hold_beta=hold_beta,
            return_stats=return_stats)
    lengths = _listed(lengths)
    _check(query, key, value, attn_mask, sinks, lengths)
    if dropout_p != 0:
        raise ValueError(f"dropout_p: is {dropout_p}, must be 0: dropout acts on stored weights, and none are stored")
    if isinstance(scale, Tensor):
        query, scale = query * _factor(scale), 1.0
    axes = max(tensor.dim() for tensor in (query, key, value))
    query, key, value, batch = _four_axes(query, key, value, flag(enable_gqa, "enable_gqa"))
    mask = bias = None
    if attn_mask is not None:
        attn_mask = _side(attn_mask, batch, query.shape[0])
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    if lengths is not None:
        lengths = lengths.to(torch.int64).reshape(-1).contiguous()
    out, stats = attend(query, key, value, mask, bias, sinks, lengths, return_stats=flag(return_stats, "return_stats"),
                        rule=rule, scale=scale, causal=flag(is_causal, "is_causal"), align=align, window=window,
                        softcap=softcap, hold_beta=hold_beta)
    if axes != 4 or len(batch) != 1:
        out, stats = (_with_batch(result, batch, axes) for result in (out, stats))
    return (out, Stats(*stats.unbind(-1))) if return_stats else out


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
           lengths: Tensor | None, *, return_stats: bool, rule: RuleLike | Sequence[RuleLike], scale: float | None,
           causal: bool, align: str = "start", window: Window = None, softcap: float | None = 0.0,
           hold_beta: bool = False) -> tuple[Tensor, Any]:
    """Attention over tensors of four axes, with a mask and a bias; the output and a buffer of stats, or None."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value, bias = map(_autocast, (query, key, value, bias))
    names = rule_names(rule)
    if isinstance(names, list) and len(names) != query.shape[1]:
        raise ValueError(f"rule: {len(names)} given, must be one a query head, {query.shape[1]}")
    before, after = window_sides(window, "window")
    options = ([settled(name) for name in names] if isinstance(names, list) else [settled(names or "none")],
               None if scale is None else _number(scale, "scale"), causal, _alignment(align), before, after,
               0.0 if softcap is None else _number(softcap, "softcap"))
    tensors = (query, key, value, mask, bias, sinks, lengths)
    if goes_directly(tensors):
        stats = stats_buffer(query.shape[:3], True, query) if return_stats else None
        return _attention_operators.forward(query, key, value, tensors[3:], stats, options), stats
    check_device(query=query, key=key, value=value, attn_mask=mask if bias is None else bias, sinks=sinks,
                 lengths=lengths)
    return _attention_operators.attention(*tensors, return_stats or wants_gradient(tensors), *options,
                                          flag(hold_beta, "hold_beta"))


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None,
           lengths: Tensor | None) -> None:
    _check_matrices(query=query, key=key, value=value)
    if attn_mask is not None:
        check_mask(attn_mask, "attn_mask", (torch.bool, *FLOATS))
    if sinks is not None:
        check(sinks, "sinks")
    if lengths is not None:
        check(lengths, "lengths", _INTEGERS)


def _check_matrices(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check(tensor, name)
        if tensor.dim() < 2:
            raise ValueError(f"{name}: has {tensor.dim()} dimensions, must have at least 2")


def _causal(bias: Any, query: Tensor, key: Tensor, is_causal: bool, align: str, window: Window,
            lengths: Any) -> tuple[Tensor | None, bool, str]:
    """A CausalBias as attn_mask, is_causal and align; as a mask where window or lengths count from another place."""
    if is_causal:
        raise ValueError("is_causal: is True, must be False if attn_mask is a CausalBias, as in torch")
    _check_matrices(query=query, key=key)
    sizes = query.shape[-2], key.shape[-2]
    if (bias.seq_len_q, bias.seq_len_kv) != sizes:
        raise ValueError(f"attn_mask: is a CausalBias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys, must be "
                         f"for {sizes[0]} and {sizes[1]}")
    place = "start" if bias.variant.name == "UPPER_LEFT" else "end"
    if place == align == "start" or (lengths is None and (window is None or place == align)):
        return None, True, place
    offset = 0 if place == "start" else sizes[1] - sizes[0]
    return torch.ones(sizes, dtype=torch.bool, device=query.device).tril(offset), False, align


def _listed(lengths: Any) -> Any:
    """Lengths given as a list, as a tensor."""
    if not isinstance(lengths, (list, tuple)):
        return lengths
    try:
        return torch.as_tensor(lengths, dtype=None if lengths else torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"lengths: {error}") from None


def _factor(scale: Tensor) -> Tensor:
    """A scale that is a tensor."""
    check(scale, "scale", (*FLOATS, *_INTEGERS))
    check_device(scale=scale)
    if scale.dim() > 0:
        raise ValueError(f"scale: its shape is {tuple(scale.shape)}, must have no dimensions")
    return scale


def _autocast(tensor: Tensor | None) -> Any:
    """What torch's autocast does with the arguments of scaled_dot_product_attention."""
    if tensor is None or tensor.dtype in (torch.bool, torch.float64):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _four_axes(query: Tensor, key: Tensor, value: Tensor,
               grouped: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """The three as (B, heads, rows, size), and the dimensions that B stands for. Views where that can be."""
    if query.dim() == key.dim() == value.dim() == 4:
        q, k, v = query.shape, key.shape, value.shape
        if q[0] == k[0] == v[0] and k[1] == v[1] and (grouped or q[1] == k[1]):
            return query, key, value, q[:1]
    query, key, value = (tensor.unsqueeze(0) if tensor.dim() == 2 else tensor for tensor in (query, key, value))
    if grouped and key.shape[-3] != value.shape[-3]:
        query, key, value = _same_heads(query, key, value)
    given = query, key, value
    shapes = [tensor.shape[: -3 if grouped else -2] for tensor in given]
    try:
        batch = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
        raise ValueError(f"key: the leading dimensions of query, key and value don't broadcast ({sizes})"
                         + ("" if grouped else "; fewer key than query heads need enable_gqa=True")) from None
    heads = None if grouped else batch[-1]
    batch = batch if grouped else batch[:-1]
    query, key, value = (_one_batch(tensor, batch, heads) for tensor in given)
    return query, key, value, batch


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value repeated to as many heads as both can have: grouped, they may have different numbers in torch."""
    heads = query.shape[-3]
    for tensor, name in ((key, "key"), (value, "value")):
        if tensor.shape[-3] == 0 or heads % tensor.shape[-3] != 0:
            raise ValueError(f"{name}: has {tensor.shape[-3]} heads, must have a divisor of those of query, {heads}")
    both = math.lcm(key.shape[-3], value.shape[-3])
    return query, key.repeat_interleave(both // key.shape[-3], -3), value.repeat_interleave(both // value.shape[-3], -3)


def _one_batch(tensor: Tensor, batch: tuple[int, ...], heads: int | None) -> Tensor:
    heads = tensor.shape[-3] if heads is None or tensor.shape[-3] == heads else heads
    size = (heads, *tensor.shape[-2:])
    return tensor.expand(*batch, *size).reshape(math.prod(batch), *size)


def _with_batch(result: Tensor | None, batch: tuple[int, ...], axes: int) -> Any:
    """The leading dimensions that the caller gave, instead of one."""
    if result is None:
        return None
    result = result.reshape(*batch, *result.shape[1:])
    return result.squeeze(0) if axes == 2 and result.dim() == 3 else result


def _side(attn_mask: Tensor, batch: tuple[int, ...], size: int) -> Tensor:
    """The mask with four axes, still broadcast where it was."""
    axes = len(batch) + 3
    if attn_mask.dim() > axes:
        raise ValueError(f"attn_mask: has {attn_mask.dim()} dimensions, must have at most {axes}")
    if attn_mask.dim() < max(axes, 4):
        attn_mask = attn_mask[(None,) * (max(axes, 4) - attn_mask.dim())]
    if attn_mask.dim() == 4:
        return attn_mask
    rest = attn_mask.shape[-3:]
    if all(length == 1 for length in attn_mask.shape[:-3]):
        return attn_mask.reshape(1, *rest)
    try:
        return attn_mask.expand(*batch, *rest).reshape(size, *rest)
    except RuntimeError:
        raise ValueError(f"attn_mask: its shape is {tuple(attn_mask.shape)}, must broadcast to {batch} and the heads, "
                         "queries and keys") from None


def _alignment(align: str) -> str:
    if align not in ("start", "end"):
        raise ValueError(f"align: is {align!r}, must be 'start' or 'end'")
    return align


def _number(value: Any, name: str) -> Any:
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return value
    raise TypeError(f"{name}: is a {type(value).__name__}, must be a number")
