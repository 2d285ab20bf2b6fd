"""F.scaled_dot_product_attention with a rule. No n by n matrix is ever stored, neither forward nor backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from whet._arguments import Window, count, flag, window_sides
from whet.attention import Extras
from whet.rules import RuleLike, rule_names
from whet.stats import Stats
from whet.torch import _attention_operators
from whet.torch._attention_operators import Operands
from whet.torch._tensors import (FLOATS, by_addresses, check, check_device, check_mask, skips_dispatcher, stats_buffer,
                                 transforming, wants_gradient, with_file_read)
from whet.torch.normalizers import Entmax, NormalizerLike, alpha_of, name_and_alpha

_INTEGERS = (torch.int64, torch.int32)


class _Options(TypedDict, total=False):
    rule: RuleLike | Sequence[RuleLike]
    normalizer: NormalizerLike
    softcap: float | None
    sinks: Tensor | None
    window: Window
    align: str
    lengths: Tensor | Sequence[int] | None
    query_starts: Tensor | Sequence[int] | None
    key_starts: Tensor | Sequence[int] | None
    query_scale: Tensor | None
    hold_beta: bool


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              return_stats: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              return_stats: Literal[True], **options: Unpack[_Options]) -> tuple[Tensor, Stats]: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              return_stats: bool, **options: Unpack[_Options]) -> Tensor | tuple[Tensor, Stats]: ...
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              return_stats: bool = False, weight_rows: Tensor | Sequence[Sequence[int]] | None = None,
              top_k: int = 0, column_sums: bool = False, **options: Unpack[_Options]) -> Any: ...
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: float | Tensor | None = None, enable_gqa: bool = False, *,
              rule: RuleLike | Sequence[RuleLike] = None, normalizer: NormalizerLike = "softmax",
              softcap: float | None = 0.0, sinks: Tensor | None = None, window: Window = None, align: str = "start",
              lengths: Tensor | Sequence[int] | None = None, query_starts: Tensor | Sequence[int] | None = None,
              key_starts: Tensor | Sequence[int] | None = None, query_scale: Tensor | None = None,
              hold_beta: bool = False, return_stats: bool = False,
              weight_rows: Tensor | Sequence[Sequence[int]] | None = None, top_k: int = 0,
              column_sums: bool = False) -> Any:
    """softmax(beta x) value with x = scale query key^T, row by row, beta chosen by a rule.

    The signature of torch.nn.functional.scaled_dot_product_attention, plus keywords. H query heads, N queries, M keys,
    D and E the sizes of a key and of a value (1 to 1024). A row is what one query of one head sees.

    Args:
        query, key, value: (..., H, N, D), (..., H, M, D), (..., H, M, E), of any strides and one dtype: float32,
            float64, bfloat16 or float16. Leading dimensions broadcast; there may be none.
        attn_mask: broadcast to (..., H, N, M). Boolean: True takes part. Floats are added to the logits, -inf hides;
            they have a gradient. A CausalBias of torch.nn.attention.bias is the mask it stands for.
        dropout_p: each weight becomes 0 with this probability, and is divided by 1 - dropout_p otherwise. As in torch it
            acts whenever it is above 0; torch.manual_seed makes it repeatable.
        is_causal: hide keys after the query's position. May be given together with attn_mask.
        scale: default 1 / sqrt(D). A tensor without dimensions (a scale that is learned) multiplies `query`, and has a
            gradient.
        enable_gqa: key and value may have fewer heads than query, each a number that H is a multiple of.
        rule: a rule or its name (see whet.rules), or a list with one per query head. Default: none, beta = 1.
        normalizer: what turns a row of logits into weights, by its name, or an Entmax, whose alpha may be learned, one
            for all heads or one per head. Default: softmax.
        softcap: c tanh(x / c) before attn_mask is added; 0 or None: none.
        sinks: (H), one logit per head that takes weight and has no value. It has a gradient.
        window: hide keys further than this from the query's position; a pair is (before, after), None or
            -1 for no limit.
        align: the position of query i: "start", key i, as torch counts; "end", so that the last query is at the last
            key, as in decoding with a cache.
        lengths: integers, one per batch entry or one per row: only the first keys exist.
        query_starts, key_starts: integers 0, ..., N and 0, ..., M, as FlashAttention's cu_seqlens: sequences packed
            one after the other into a batch of one. Queries see the keys of their own sequence.
        query_scale: broadcast to (..., H, N), multiplies scale, and has a gradient.
        hold_beta: gradients count beta as a constant. By default they go through the rule, as in the published code.
        return_stats: also return the Stats of all rows, (..., H, N).
        weight_rows: (R, 3) integers, batch, head, query of rows: also return their weights.
        top_k: also return this many heaviest keys of each row, heaviest first.
        column_sums: also return the weight that each key receives, summed over queries.

    Returns:
        The output (..., H, N, E); ``(output, stats)`` with return_stats. With any of weight_rows, top_k and
        column_sums, whet.Extras come last: weights (R, M), top_keys and top_weights (..., H, N, top_k; key -1 where a
        row has fewer), column_sums (..., H, M). They have no gradient. A row that sees no key gives 0, where torch
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
    given = query, key, value, attn_mask, sinks, lengths, scale, query_starts, key_starts, query_scale, weight_rows,\
        alpha_of(normalizer)
    if has_torch_function_variadic(*given):
        return handle_torch_function(
            attention, given, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule,
            normalizer=normalizer, softcap=softcap, sinks=sinks, window=window, align=align, lengths=lengths,
            query_starts=query_starts, key_starts=key_starts, query_scale=query_scale, hold_beta=hold_beta,
            return_stats=return_stats, weight_rows=weight_rows, top_k=top_k, column_sums=column_sums)
    check_matrices(query=query, key=key, value=value)
    if isinstance(scale, Tensor):
        query, scale = query * _factor(scale), 1.0
    axes = max(query.dim(), key.dim(), value.dim())
    query, key, value, batch = four_axes(query, key, value, flag(enable_gqa, "enable_gqa"))
    mask = bias = None
    if attn_mask is not None:
        check_mask(attn_mask, "attn_mask", (torch.bool, *FLOATS))
        attn_mask = _side(attn_mask, batch, query.shape[0])
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    if sinks is not None:
        check(sinks, "sinks")
    if query_scale is not None:
        check(query_scale, "query_scale")
        query_scale = _row_factors(query_scale, batch, query.shape[:3])
    operands = Operands(query, key, value, mask, bias, sinks, integers(lengths, "lengths"),
                        integers(query_starts, "query_starts"), integers(key_starts, "key_starts"),
                        query_scale=query_scale)
    outputs = Outputs(_row_indices(weight_rows), count(top_k, "top_k"), flag(column_sums, "column_sums"))
    out, stats, extras = attend(operands, outputs, return_stats=flag(return_stats, "return_stats"), rule=rule,
                                normalizer=normalizer, scale=scale, causal=flag(is_causal, "is_causal"), align=align,
                                window=window, softcap=softcap, hold_beta=flag(hold_beta, "hold_beta"),
                                dropout=_probability(dropout_p))
    if axes != 4 or len(batch) != 1:
        out, stats = (with_batch(result, batch, axes) for result in (out, stats))
        extras = {name: extra if name == "weights" else with_batch(extra, batch, axes)
                  for name, extra in extras.items()}
    results = (out, Stats(*stats.unbind(-1))) if return_stats else (out,)
    if extras:
        results += (Extras(**extras),)
    return results if len(results) > 1 else out


class Outputs(NamedTuple):
    """Which optional outputs to compute."""

    weight_rows: Tensor | None = None
    top_k: int = 0
    column_sums: bool = False


_NO_OUTPUTS = Outputs()


def attend(operands: Operands, outputs: Outputs = _NO_OUTPUTS, *, return_stats: bool,
           rule: RuleLike | Sequence[RuleLike], normalizer: NormalizerLike, scale: float | None, causal: bool,
           align: str = "start", window: Window = None, softcap: float | None = 0.0,
           hold_beta: bool = False, dropout: float = 0.0) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Attention over tensors of four axes, with a mask and a bias: the output, a buffer of stats or None, and the
    optional outputs by name."""
    name, alpha = name_and_alpha(normalizer)
    if alpha is not None:
        if alpha.numel() != 1 or alpha.dim() > 1:
            return _by_head(operands, outputs, alpha, return_stats=return_stats, rule=rule, scale=scale, causal=causal,
                            align=align, window=window, softcap=softcap, hold_beta=hold_beta, dropout=dropout)
        operands = operands._replace(alpha=alpha)
    if torch.is_autocast_enabled("cpu"):
        operands = operands._replace(**{name: autocast(getattr(operands, name))
                                        for name in ("query", "key", "value", "bias")})
    if operands.query_scale is not None:
        operands = operands._replace(query_scale=_side_dtype(operands.query_scale, operands.query.dtype))
    if dropout > 0:
        operands = operands._replace(dropout_seed=torch.randint(2**63 - 1, (1,)))
    values = (_rules(rule, operands.query.shape[1]), name, None if scale is None else _number(scale, "scale"),
              causal, _alignment(align), *window_sides(window, "window"),
              0.0 if softcap is None else _number(softcap, "softcap"), hold_beta, dropout)
    # Fewer are quicker: small calls feel it.
    options: dict[str, Any] = {} if values == _DEFAULTS else {
        name: value for name, value, default in zip(_OPTIONS, values, _DEFAULTS) if value != default}
    weight_rows, top_k, column_sums = outputs
    extras_wanted = weight_rows is not None or top_k > 0 or column_sums
    if skips_dispatcher((*operands, weight_rows)):
        stats = stats_buffer(operands.query.shape[:3], True, operands.query) if return_stats else None
        written = by_addresses(stats=stats) if return_stats else {}
        buffers: dict[str, Tensor] = {}
        if extras_wanted:
            buffers = _attention_operators.output_buffers(operands, *outputs)
            written |= _attention_operators.written(buffers, weight_rows, top_k)
        return _attention_operators.forward(operands, written, **options), stats, buffers
    check_device(query=operands.query, key=operands.key, value=operands.value, sinks=operands.sinks,
                 attn_mask=operands.mask if operands.bias is None else operands.bias, lengths=operands.lengths,
                 query_scale=operands.query_scale)
    with_saved = transforming() or wants_gradient(operands)
    out, stats, _ = _attention_operators.attention(*operands, with_stats=return_stats, with_saved=with_saved, **options)
    extras = {}
    if extras_wanted:
        extras = _attention_operators.attention_outputs(weight_rows, operands, top_k=top_k,
                                                        column_sums=column_sums, **options)
    return out, stats, extras


def _by_head(operands: Operands, outputs: Outputs, alpha: Tensor, *, return_stats: bool,
             rule: RuleLike | Sequence[RuleLike], **options: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Attention with one alpha per head: a call takes one, so there is one for each."""
    batch, heads, queries, _ = operands.query.shape
    if alpha.shape != (heads,):
        raise ValueError(f"alpha: its shape is {tuple(alpha.shape)}, must be () or one per query head, ({heads},)")
    if outputs.weight_rows is not None:
        raise ValueError("weight_rows: can't be given with one alpha per head")
    rules = _rules(rule, heads).split(";")

    def split(tensor: Tensor | None, axis: int = 1) -> Sequence[Any]:
        """By query head; key heads and what heads share as often as it is read."""
        if tensor is None:
            return (None,) * heads
        parts = tensor.split(1, axis)
        return [parts[head * len(parts) // heads] for head in range(heads)]

    lengths = operands.lengths
    if lengths is not None and lengths.numel() != batch:
        lengths = lengths.reshape(batch, heads, queries)
    per_row = lengths is not None and lengths.dim() == 3
    found = []
    for head, (query, key, value, mask, bias, query_scale, sink, length) in enumerate(zip(
            *(split(tensor) for tensor in (*operands[:5], operands.query_scale)), split(operands.sinks, 0),
            split(lengths) if per_row else (lengths,) * heads)):
        one = operands._replace(query=query, key=key, value=value, mask=mask, bias=bias, query_scale=query_scale,
                                sinks=sink, lengths=length.reshape(-1).contiguous() if per_row else length)
        found.append(attend(one, outputs, return_stats=return_stats, rule=rules[head % len(rules)],
                            normalizer=Entmax(alpha[head]), **options))
    out = torch.cat([out.transpose(1, 2) for out, *_ in found], 2).transpose(1, 2)  # lies as (B, N, H, E)
    stats = torch.cat([stats for _, stats, _ in found], 1) if return_stats else None
    return out, stats, {name: torch.cat([extras[name] for *_, extras in found], 1) for name in found[0][2]}


_OPTIONS = ("rule", "normalizer", "scale", "causal", "align", "window_left", "window_right", "softcap", "hold_beta",
            "dropout")
_DEFAULTS = ("none", "softmax", None, False, "start", -1, -1, 0.0, False, 0.0)


def _rules(rule: RuleLike | Sequence[RuleLike], heads: int) -> str:
    """As the operators take them: one name, or one per head joined by ";"."""
    names = rule_names(rule)
    if not isinstance(names, list):
        return with_file_read(names or "none")
    if len(names) != heads:
        raise ValueError(f"rule: {len(names)} given, must be one per query head, {heads}")
    return ";".join(with_file_read(name) for name in names)


def check_matrices(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check(tensor, name)
        if tensor.dim() < 2:
            raise ValueError(f"{name}: has {tensor.dim()} dimensions, must have at least 2")


def _causal(bias: Any, query: Tensor, key: Tensor, is_causal: bool, align: str, window: Window,
            lengths: Any) -> tuple[Tensor | None, bool, str]:
    """A CausalBias as attn_mask, is_causal and align; as a mask where window or lengths count from another end."""
    if is_causal:
        raise ValueError("is_causal: is True, must be False if attn_mask is a CausalBias, as in torch")
    check_matrices(query=query, key=key)
    sizes = query.shape[-2], key.shape[-2]
    if (bias.seq_len_q, bias.seq_len_kv) != sizes:
        raise ValueError(f"attn_mask: is a CausalBias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys, must be "
                         f"for {sizes[0]} and {sizes[1]}")
    from_which = "start" if bias.variant.name == "UPPER_LEFT" else "end"
    if from_which == align == "start" or (lengths is None and (window is None or from_which == align)):
        return None, True, from_which
    offset = 0 if from_which == "start" else sizes[1] - sizes[0]
    return torch.ones(sizes, dtype=torch.bool, device=query.device).tril(offset), False, align


def integers(values: Any, name: str) -> Any:
    """A tensor or list of integers as the operators take them, in one axis; None stays None."""
    return None if values is None else _tensor(values, name).to(torch.int64).reshape(-1).contiguous()


def _row_indices(rows: Any) -> Any:
    if rows is None:
        return None
    rows = _tensor(rows, "weight_rows")
    if rows.dim() != 2 or rows.shape[1] != 3:
        raise ValueError(f"weight_rows: its shape is {tuple(rows.shape)}, must be (R, 3): batch, head, query of each "
                         "row")
    return rows.to(torch.int64).contiguous()


def _tensor(values: Any, name: str) -> Tensor:
    if isinstance(values, (list, tuple)):
        try:
            values = torch.as_tensor(values, dtype=None if values else torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: {error}") from None
    check(values, name, _INTEGERS)
    return values


def _row_factors(factor: Tensor, batch: tuple[int, ...], rows: Sequence[int]) -> Tensor:
    """query_scale with three axes, still broadcast where it was; `rows` is (B, H, N)."""
    sides = factor[(None,) * (3 - factor.dim())] if factor.dim() < 3 else factor
    each_or_one = sides.dim() == 3 and all(size in (1, whole) for size, whole in zip(sides.shape, rows))
    if each_or_one and (len(batch) == 1 or sides.shape[0] == 1):
        return sides
    whole = (*batch, *rows[1:])
    try:
        return factor.expand(whole).reshape(*rows)
    except RuntimeError:
        raise ValueError(f"query_scale: its shape is {tuple(factor.shape)}, must broadcast to that of query without "
                         f"its last dimension, {whole}") from None


def _side_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the queries or, if it has another, that of the arithmetic."""
    return tensor if tensor.dtype == dtype else tensor.to(torch.float64 if dtype == torch.float64 else torch.float32)


def _factor(scale: Tensor) -> Tensor:
    """A scale that is a tensor."""
    check(scale, "scale", (*FLOATS, *_INTEGERS))
    check_device(scale=scale)
    if scale.dim() > 0:
        raise ValueError(f"scale: its shape is {tuple(scale.shape)}, must have no dimensions")
    return scale


def autocast(tensor: Tensor | None) -> Any:
    """What torch's autocast does with the arguments of scaled_dot_product_attention."""
    if tensor is None or tensor.dtype in (torch.bool, torch.float64):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def four_axes(query: Tensor, key: Tensor, value: Tensor,
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


def with_batch(result: Tensor | None, batch: tuple[int, ...], axes: int) -> Any:
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


def _probability(dropout_p: Any) -> float:
    dropout_p = _number(dropout_p, "dropout_p")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: is {dropout_p}, must be 0 to 1")
    return dropout_p


def _number(value: Any, name: str) -> Any:
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return value
    raise TypeError(f"{name}: is a {type(value).__name__}, must be a number")
