"""Modules: torch.nn.Softmax and torch.nn.MultiheadAttention with a rule, and a scale of queries that is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whet.rules import Rule, RuleLike, rule as rule_of
from whet.stats import Stats
from whet.torch._attention_operators import Operands
from whet.torch._tensors import FLOATS, check_mask
from whet.torch.attention import attend
from whet.torch.normalizers import Entmax, NormalizerLike, alpha_of
from whet.torch.rows import softmax


class Softmax(nn.Module):
    """torch.nn.Softmax with a rule: whet.torch.softmax as a module.

    If `normalizer` is an Entmax whose alpha is a Parameter, that is the module's parameter `alpha`.

    >>> import torch
    >>> from whet.torch import Softmax
    >>> Softmax(rule="target-entropy:0.2")
    Softmax(dim=-1, rule='target-entropy:0.2')
    """

    def __init__(self, dim: int = -1, rule: RuleLike = None, *, normalizer: NormalizerLike = "softmax",
                 hold_beta: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.rule = rule_of(rule)
        self.normalizer = normalizer
        self.alpha = _parameter(normalizer)
        self.hold_beta = hold_beta

    def forward(self, input: Tensor, where: Tensor | None = None) -> Tensor:
        return softmax(input, self.dim, rule=self.rule, normalizer=self.normalizer, where=where,
                       hold_beta=self.hold_beta)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {_rule_repr(self.rule, self.normalizer)}"


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with a rule. A state_dict of one loads into the other.

    Constructor and forward take what torch's take, plus:

    Args:
        rule: a rule or its name (see whet.rules), or a list with one per head. Default: none, as torch computes.
        normalizer: what turns a row of logits into weights, by its name, or an Entmax. If the alpha of that is a
            Parameter, it is the module's parameter `alpha`. Default: softmax.
        hold_beta: gradients count beta as a constant.

    Unlike torch's, `need_weights` is False unless asked for: weights are a matrix of queries by keys for each head,
    which nothing else here ever stores. Asked for, they are computed beside the output, at the cost of torch.softmax
    over all of them. The output is the same either way.

    `dropout` acts on weights in training, as in torch; those that are returned are as they were before. Rows whose keys
    are all masked give 0 where torch gives NaN.

    >>> import torch
    >>> from whet.torch import MultiheadAttention
    >>> heads = MultiheadAttention(8, 2, batch_first=True, rule="paper")
    >>> x = torch.randn(3, 5, 8)
    >>> out, _, stats = heads(x, x, x, is_causal=True, return_stats=True)
    >>> out.shape, stats.entropy.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 2, 5]))
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
                 add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
                 vdim: int | None = None, batch_first: bool = False, device: Any = None, dtype: Any = None, *,
                 rule: RuleLike | Sequence[RuleLike] = None, normalizer: NormalizerLike = "softmax",
                 hold_beta: bool = False) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
                         device, dtype)
        self.rule: Rule | list[Rule]
        if isinstance(rule, str) or not isinstance(rule, Sequence):
            self.rule = rule_of(rule)
        elif len(rule) == num_heads:
            self.rule = [rule_of(one) for one in rule]
        else:
            raise ValueError(f"rule: {len(rule)} given, must be one per head, {num_heads}")
        self.normalizer = normalizer
        self.alpha = _parameter(normalizer)
        self.hold_beta = hold_beta

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # torch's encoder layers compute attention themselves, past this module and its rule, if they find True here.
        self._qkv_same_embed_dim = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = False, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False, *, return_stats: bool = False) -> Any:
        """Attention of `query` over `key` and `value`, with projections before and after.

        B batch, N queries, M keys.

        Args:
            query, key, value: (B, N or M, size) if batch_first, else (N or M, B, size); or without batch.
            key_padding_mask: (B, M), or (M) without batch: True hides a key, floats are added.
            need_weights: also return the weights.
            attn_mask: (N, M) or (B * heads, N, M): True hides (the other way round than in whet.torch.attention),
                floats are added.
            average_attn_weights: weights averaged over heads.
            is_causal: hide keys after the query's position. attn_mask is then taken for that mask and not read; it
                needn't be given.
            return_stats: also return the Stats of all rows, (B, heads, N).

        Returns:
            ``(output, weights)``, weights (B, N, M), or (B, heads, N, M) if not averaged, or None unless needed;
            ``(output, weights, stats)`` with return_stats.
        """
        for mask, name in ((attn_mask, "attn_mask"), (key_padding_mask, "key_padding_mask")):
            if mask is not None:
                check_mask(mask, name, (torch.bool, *FLOATS))
        batched = query.dim() == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        q, k, v = self._heads(query, key, value)

        # Keys beyond those given, of add_bias_kv and add_zero_attn, have no position: every query sees them.
        extra = k.shape[2] - key.shape[1]
        causal = is_causal and extra == 0
        if is_causal:
            attn_mask = None if causal else _after(query.shape[1], key.shape[1], query.device)
        mask, bias = _mask_and_bias(attn_mask, key_padding_mask, q, extra)
        out, stats, _ = attend(Operands(q, k, v, mask, bias), return_stats=return_stats, rule=self.rule,
                               normalizer=self.normalizer, scale=None, causal=causal, hold_beta=self.hold_beta,
                               dropout=self.dropout if self.training else 0.0)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out if self.batch_first or not batched else out.transpose(0, 1)
        weights = None
        if need_weights:
            weights = self._weights(q, k, mask, bias, causal)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            out, weights, stats = (_first(x) for x in (out, weights, stats))
        return (out, weights, Stats(*stats.unbind(-1))) if return_stats else (out, weights)

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The three projected, with the keys and values that the module adds, as (B, heads, N or M, size)."""
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, more.expand(x.shape[0], 1, -1)], dim=1)
                    for x, more in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return tuple(x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor:
        logits = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        logits = logits if bias is None else logits + bias
        if causal:
            seen = ~_after(q.shape[2], k.shape[2], q.device)
            mask = seen if mask is None else mask & seen
        alpha = alpha_of(self.normalizer)
        one_alpha = alpha is None or alpha.numel() == 1
        if isinstance(self.rule, Rule) and one_alpha:
            return softmax(logits, rule=self.rule, normalizer=self.normalizer, where=mask, hold_beta=self.hold_beta)
        mask = None if mask is None else mask.expand(logits.shape)
        rules = [self.rule] * self.num_heads if isinstance(self.rule, Rule) else self.rule
        normalizers = [self.normalizer if one_alpha else Entmax(alpha[head]) for head in range(self.num_heads)]
        return torch.stack([
            softmax(logits[:, head], rule=rule, normalizer=normalizer,
                    where=None if mask is None else mask[:, head], hold_beta=self.hold_beta)
            for head, (rule, normalizer) in enumerate(zip(rules, normalizers))], dim=1)

    def extra_repr(self) -> str:
        chosen = _rule_repr(self.rule, self.normalizer)
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}, {chosen}"


class LengthScale(nn.Module):
    """A scale of queries, learned per head, as a function of how many keys n each query sees.

    ============= ============================ =====================================================
    kind          scale                        learned
    ============= ============================ =====================================================
    ``log-power`` delta + beta (ln n)^gamma    ``delta``, ``beta``, ``gamma``, as in ASEntmax
    ``ssmax``     s ln n                       ``s``
    ============= ============================ =====================================================

    These are the rules of the same names (see whet.rules) with parameters that have gradients. As with them, queries
    that see one key or none have the scale 1. A rule multiplies whole logits, a scale of queries only what the
    products with keys give: where there is a soft-cap, a bias or a sink, the two differ.

    Args:
        heads: how many heads.
        kind: ``log-power`` or ``ssmax``.
        init: what all heads start from, in the order of the table. Default: 1, 0, 1 for log-power, so that the scale
            is 1 before training; 1 / ln 1024 for ssmax, so that it is 1 for a query that sees 1,024 keys.
        device, dtype: of the parameters.

    >>> import torch
    >>> from whet.torch import LengthScale, attention
    >>> scale = LengthScale(4)
    >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()  # (B, heads, N, size)
    >>> n = torch.arange(1, 11)                          # under a causal mask, query i sees i + 1 keys
    >>> out = attention(q * scale(n)[..., None], k, v, is_causal=True)
    >>> torch.equal(out, attention(q, k, v, is_causal=True, query_scale=scale(n)))
    True
    """

    def __init__(self, heads: int, kind: str = "log-power", *, init: float | Sequence[float] | None = None,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        if kind not in _LEARNED:
            raise ValueError(f"kind: is {kind!r}, must be one of {', '.join(_LEARNED)}")
        names = _LEARNED[kind]
        if init is None:
            init = tuple(names.values())
        self.init = tuple(init) if isinstance(init, Sequence) else (init,)
        if len(self.init) != len(names):
            raise ValueError(f"init: {len(self.init)} given, must be {len(names)} for {kind}: {', '.join(names)}")
        self.heads = heads
        self.kind = kind
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(heads, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, value in zip(_LEARNED[self.kind], self.init):
            nn.init.constant_(getattr(self, name), value)

    def forward(self, n: Tensor) -> Tensor:
        """The scale of each head and query.

        Args:
            n: (N) or (B, N), how many keys each query sees.

        Returns:
            (heads, N) or (B, heads, N), in the dtype of the parameters.
        """
        if n.dim() == 0:
            raise ValueError("n: has no dimensions, must be (N) or (B, N)")
        parameters = [getattr(self, name).unsqueeze(-1) for name in _LEARNED[self.kind]]
        dtype = parameters[0].dtype
        n = n.unsqueeze(-2)
        # Of 2 and more only, also where it isn't used: a power of ln 1 = 0 may have no finite gradient. A count has no
        # exact value in 16 bits.
        log = n.clamp(min=2).to(torch.promote_types(dtype, torch.float32)).log()
        if self.kind == "ssmax":
            scale = parameters[0] * log
        else:
            delta, beta, gamma = parameters
            scale = delta + beta * log**gamma
        return torch.where(n > 1, scale, 1.0).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.heads}, kind={self.kind!r}"


# What is learned by each kind of LengthScale, with its initial value.
_LEARNED = {"log-power": {"delta": 1.0, "beta": 0.0, "gamma": 1.0}, "ssmax": {"s": 1 / math.log(1024)}}


def _first(x: Tensor | None) -> Any:
    """Without the batch of one."""
    return None if x is None else x.squeeze(0)


def _parameter(normalizer: NormalizerLike) -> nn.Parameter | None:
    """The alpha that a module learns."""
    alpha = alpha_of(normalizer)
    return alpha if isinstance(alpha, nn.Parameter) else None


def _rule_repr(rule: Rule | list[Rule], normalizer: NormalizerLike) -> str:
    names = [one.name for one in rule] if isinstance(rule, list) else rule.name
    return f"rule={names!r}" + ("" if normalizer == "softmax" else f", normalizer={normalizer!r}")


def _after(queries: int, keys: int, device: torch.device) -> Tensor:
    """What torch.nn means by a causal mask: True where a key comes after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)


def _mask_and_bias(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor,
                   extra: int) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as attention takes them: a boolean mask, True visible, and a bias to add. Nothing of N by M is made,
    unless both are floats."""
    batch, heads = q.shape[:2]
    mask = bias = None
    if attn_mask is not None:
        attn_mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, heads))
        mask, bias = _visible_or_added(attn_mask, q.dtype, extra)
    if key_padding_mask is not None:
        seen, added = _visible_or_added(key_padding_mask.reshape(batch, 1, 1, -1), q.dtype, extra)
        if mask is not None and seen is not None:
            # Two boolean masks: the small one becomes a bias.
            added = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
            seen = None
        mask = seen if mask is None else mask
        bias = added if bias is None else bias if added is None else bias + added
    return mask, bias


def _visible_or_added(hiding: Tensor, dtype: torch.dtype, extra: int) -> tuple[Tensor | None, Tensor | None]:
    """A mask of torch.nn, where True hides, as (visible, None) or (None, bias); extra keys are visible."""
    if hiding.dtype == torch.bool:
        return F.pad(~hiding, (0, extra), value=True), None
    return None, F.pad(hiding.to(dtype), (0, extra))
