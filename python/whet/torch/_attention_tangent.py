"""Forward-mode differentiation of attention. Unlike everything else here it stores weights: a matrix of queries by keys
for each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet._normalizers import ignores_sinks, is_symmetric
from whet.rules import rule as rule_of
from whet.torch._rows_operators import log_beta_gradient, measured_logits, no_tangent_of, softmax, softmax_backward
from whet.torch._tensors import BETA

if TYPE_CHECKING:
    from whet.torch._attention_operators import Operands


def attention_tangent(given: Operands, along: Operands, saved: Tensor, *, rule: str = "none",
                      normalizer: str = "softmax", hold_beta: bool = False, **options: Any) -> Tensor:
    """The derivative of the output along tangents of the operands, each None where there is none."""
    if given.dropout_seed is not None:
        raise ValueError("dropout_p: must be 0 in forward mode, which can't tell which weights were dropped")
    if not is_symmetric(normalizer):
        raise ValueError(f"normalizer: {normalizer} can't be differentiated in forward mode")
    no_tangent_of(along.alpha)
    dtype = given.query.dtype
    given, along = (type(given)(*map(_in_arithmetic, tensors)) for tensors in (given, along))
    given, along = _with_scaled_query(given, along)
    groups = given.query.shape[1] // max(given.key.shape[1], 1)
    logits, dlogits = _logits(given, along, groups, **options)
    visible = visible_keys(given, **options).expand(logits.shape)
    if not ignores_sinks(normalizer):
        logits, dlogits, visible = _with_sinks(logits, dlogits, visible, given.sinks, along.sinks)
    dlogits = dlogits.masked_fill(~visible, 0.0)

    # Weights are a function of u = beta x, and du = beta (dx + x dlnbeta).
    beta, keys = saved[..., BETA : BETA + 1].to(logits.dtype), given.key.shape[2]
    y = measured_logits(logits, visible, 3, normalizer)
    if not hold_beta:
        slope = _log_beta_gradients(logits, visible, rule.split(";"), normalizer, given.alpha)
        slope = slope.masked_fill(visible[..., :keys].sum(-1, keepdim=True) <= 1, 0.0)
        dlogits = dlogits + y * (slope * dlogits).sum(-1, keepdim=True)
    u, du = (beta * y).masked_fill(~visible, -torch.inf), beta * dlogits
    weights, *_ = softmax(u, None, given.alpha, dim=3, rule="none", normalizer=normalizer)
    dweights = softmax_backward(du, u, None, None, given.alpha, dim=3, rule="none", normalizer=normalizer)

    out = dweights[..., :keys] @ given.value.repeat_interleave(groups, 1)
    if along.value is not None:
        out = out + weights[..., :keys] @ along.value.repeat_interleave(groups, 1)
    return out.to(dtype)


def _in_arithmetic(tensor: Tensor | None) -> Tensor | None:
    """16 bits as float32."""
    return tensor.float() if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _with_scaled_query(given: Operands, along: Operands) -> tuple[Operands, Operands]:
    """Without query_scale: as part of the query, where its tangent is one more."""
    if given.query_scale is None:
        return given, along
    scale, parts = given.query_scale.unsqueeze(-1), []
    if along.query is not None:
        parts.append(along.query * scale)
    if along.query_scale is not None:
        parts.append(given.query * along.query_scale.unsqueeze(-1))
    return (given._replace(query=given.query * scale, query_scale=None),
            along._replace(query=sum(parts) if parts else None, query_scale=None))


def _logits(given: Operands, along: Operands, groups: int, scale: float | None = None, softcap: float = 0.0,
            **_: Any) -> tuple[Tensor, Tensor]:
    """The logits of all keys, hidden ones too, and their derivative."""
    scale = given.query.shape[3] ** -0.5 if scale is None else scale
    key = given.key.repeat_interleave(groups, 1).mT
    logits = scale * (given.query @ key)
    dlogits = torch.zeros_like(logits)
    if along.query is not None:
        dlogits = dlogits + scale * (along.query @ key)
    if along.key is not None:
        dlogits = dlogits + scale * (given.query @ along.key.repeat_interleave(groups, 1).mT)
    if softcap:
        capped = torch.tanh(logits / softcap)
        logits, dlogits = softcap * capped, dlogits * (1 - capped**2)
    if given.bias is not None:
        logits = logits + given.bias
    if along.bias is not None:
        dlogits = dlogits + along.bias
    return logits, dlogits


def visible_keys(given: Operands, causal: bool = False, align: str = "start", window_left: int = -1,
                 window_right: int = -1, **_: Any) -> Tensor:
    """Which keys a query sees, as far as it doesn't depend on logits: broadcast to (B, H, N, M)."""
    (batch, heads, queries, _), keys = given.query.shape, given.key.shape[2]
    query = torch.arange(queries, device=given.query.device)[:, None]
    key = torch.arange(keys, device=given.query.device)
    from_end = align == "end"
    if given.query_starts is not None:
        sequence = _sequence_of(query, given.query_starts)
        visible = sequence == _sequence_of(key, given.key_starts)
        position = query - given.query_starts[sequence] + given.key_starts[sequence]
        if from_end:
            position = position + (given.key_starts.diff() - given.query_starts.diff())[sequence]
    elif given.lengths is not None:
        per_entry = given.lengths.numel() == batch
        length = given.lengths.view(batch, *((1, 1, 1) if per_entry else (heads, queries, 1)))
        visible = key < length
        position = query + ((length if per_entry else keys) - queries if from_end else 0)
    else:
        visible = torch.ones_like(key, dtype=torch.bool)
        position = query + (keys - queries if from_end else 0)
    if causal:
        visible = visible & (key <= position)
    if window_left >= 0:
        visible = visible & (key >= position - window_left)
    if window_right >= 0:
        visible = visible & (key <= position + window_right)
    return visible if given.mask is None else visible & given.mask


def _sequence_of(index: Tensor, starts: Tensor) -> Tensor:
    """The packed sequence that each index is in."""
    return torch.searchsorted(starts, index, right=True) - 1


def _with_sinks(logits: Tensor, dlogits: Tensor, visible: Tensor, sinks: Tensor | None,
                dsinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A sink is one more key, which rows that see no other ignore."""
    visible = visible & (logits != -torch.inf)
    if sinks is None:
        return logits, dlogits, visible

    def with_sink(values: Tensor, last: Tensor) -> Tensor:
        return torch.cat([values, last.to(values.dtype).view(1, -1, 1, 1).expand(*values.shape[:3], 1)], -1)

    dsinks = torch.zeros_like(sinks) if dsinks is None else dsinks
    seen = visible.any(-1, keepdim=True) & (sinks != -torch.inf).view(1, -1, 1, 1)
    return with_sink(logits, sinks), with_sink(dlogits, dsinks), torch.cat([visible, seen], -1)


def _log_beta_gradients(logits: Tensor, visible: Tensor, rules: list[str], normalizer: str,
                        alpha: Tensor | None) -> Tensor:
    """d ln beta / dx of each row; there is one rule, or one per head."""
    def of(logits: Tensor, visible: Tensor, rule: str) -> Tensor:
        if not rule_of(rule).adaptive:
            return torch.zeros_like(logits)
        return log_beta_gradient(logits, visible, None, alpha, dim=3, rule=rule, normalizer=normalizer)

    if len(rules) == 1:
        return of(logits, visible, rules[0])
    heads = zip(logits.split(1, 1), visible.split(1, 1), rules)
    return torch.cat([of(*head) for head in heads], 1)
