"""The attention function that models call, by the name "whet"."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from whet.rules import RuleLike
from whet.stats import Stats
from whet.torch import attention
from whet.torch.normalizers import NormalizerLike

NAME = "whet"
ATTRIBUTE = "_whet"  # of an attention module: its Layer

# Arguments that models hand to every attention function and that change nothing here: positions are in query and key,
# windows in the mask, and the rest is about other outputs of the model or its loss.
_WITHOUT_EFFECT = frozenset({
    "cache_position", "deterministic", "head_mask", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
    "position_ids", "return_dict", "sliding_window", "token_type_ids", "use_cache",
})


class Collector(Protocol):
    """What keeps statistics of the rows of a call."""

    def add(self, layer: int, call: Call, stats: Stats) -> None: ...


class Layer:
    """What one attention module of a model does: set by enable(), and by collect() for as long as it lasts."""

    def __init__(self, index: int, rule: RuleLike | list[RuleLike] = None, normalizer: NormalizerLike = "softmax",
                 heads: list[int] | None = None, query_scale: Tensor | None = None) -> None:
        self.index = index
        self.rule = rule
        self.normalizer = normalizer
        self.heads = heads  # that the normalizer is for; None: all
        self.query_scale = query_scale  # (layers, heads)
        self.collector: Collector | None = None


class Call:
    """The arguments of one call, as whet.torch.attention takes them."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
                 scale: float | None, softcap: float, sinks: Tensor | None, dropout: float,
                 starts: dict[str, Tensor], layer: Layer) -> None:
        self.query, self.key, self.value, self.mask, self.causal = query, key, value, mask, causal
        self.scale, self.softcap, self.sinks, self.dropout, self.starts = scale, softcap, sinks, dropout, starts
        self.normalizer = layer.normalizer
        self.heads = None if layer.normalizer == "softmax" else layer.heads  # that it is for
        self.query_scale = None if layer.query_scale is None else layer.query_scale[layer.index][:, None]

    def attend(self, layer: Layer, return_stats: bool) -> tuple[Tensor, Any]:
        """The output (B, H, N, D) and, if asked for, the stats of all rows."""
        if layer.heads is None or layer.normalizer == "softmax":
            return self._part(slice(None), layer.rule, layer.normalizer, return_stats)
        # A call has one normalizer: the heads that have another get a call of their own.
        count = self.query.shape[1]
        rest = [head for head in range(count) if head not in layer.heads]
        rules = layer.rule if isinstance(layer.rule, list) else [layer.rule] * count
        parts = [self._part(heads, [rules[head] for head in heads], normalizer, return_stats)
                 for heads, normalizer in ((layer.heads, layer.normalizer), (rest, "softmax")) if heads]
        order = torch.tensor(layer.heads + rest).argsort()
        out = torch.cat([part for part, _ in parts], 1)[:, order]
        stats = Stats(*(torch.cat(fields, 1)[:, order] for fields in zip(*(stats for _, stats in parts)))) \
            if return_stats else None
        return out, stats

    def stats_under(self, rule: RuleLike, rows: slice) -> Stats:
        """The stats of these rows if all heads had this rule and softmax."""
        query, mask, causal, factor = self.query, self.mask, self.causal, self.query_scale
        sees_all = mask is not None or not causal or query.shape[2] == self.key.shape[2]  # that its mask leaves it
        if rows == slice(-1, None) and sees_all and not self.starts:  # the last query needs no others' company
            query, causal = query[:, :, -1:], False
            mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, -1:]
            rows = slice(None)
        options: dict[str, Any] = dict(rule=rule, softcap=self.softcap, sinks=self.sinks, query_scale=factor,
                                       return_stats=True, **self.starts)
        _, stats = attention(query, self.key, self.value, mask, 0.0, causal, self.scale, True, **options)
        return Stats(*(field[:, :, rows] for field in stats))

    def _part(self, heads: slice | list[int], rule: RuleLike | list[RuleLike], normalizer: NormalizerLike,
              return_stats: bool) -> tuple[Tensor, Any]:
        query, key, value, mask, sinks, factor = \
            self.query, self.key, self.value, self.mask, self.sinks, self.query_scale
        if isinstance(heads, list):
            group = query.shape[1] // key.shape[1]
            key_heads = [head // group for head in heads]
            query, key, value = query[:, heads], key[:, key_heads], value[:, key_heads]
            mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
            sinks = None if sinks is None else sinks[heads]
            factor = None if factor is None else factor[heads]
        options: dict[str, Any] = dict(rule=rule, normalizer=normalizer, softcap=self.softcap, sinks=sinks,
                                       query_scale=factor, return_stats=return_stats, **self.starts)
        result: Any = attention(query, key, value, mask, self.dropout, self.causal, self.scale, True, **options)
        return result if return_stats else (result, None)


def forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
            scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
            softcap: float | None = None, s_aux: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
            cu_seq_lens_k: Tensor | None = None, **features: Any) -> tuple[Tensor, None]:
    """What transformers calls: query (B, H, N, D), key and value (B, H or fewer, M, D); gives (B, N, H, D)."""
    for name, feature in features.items():
        if feature is not None and name not in _WITHOUT_EFFECT:
            raise NotImplementedError(
                f"{name}: {type(module).__name__} passes it to its attention, and whet's doesn't know it; "
                "whet.transformers.disable(model) brings back the model's own attention")
    layer: Layer = getattr(module, ATTRIBUTE, None) or Layer(getattr(module, "layer_idx", None) or 0)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # Without a mask, query i stands at key i: a static cache has room behind the last. One query sees all keys.
    causal = bool(query.shape[2] > 1 and attention_mask is None and is_causal)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        hidden = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
        attention_mask = attention_mask.masked_fill(hidden, -torch.inf)
    starts = {} if cu_seq_lens_q is None or cu_seq_lens_k is None else \
        dict(query_starts=cu_seq_lens_q, key_starts=cu_seq_lens_k)
    if s_aux is not None:
        s_aux = s_aux.to(query.dtype)
    call = Call(query, key, value, attention_mask, causal, scaling, softcap or 0.0, s_aux, dropout, starts, layer)
    collecting = layer.collector is not None
    out, stats = call.attend(layer, collecting)
    if collecting:
        _record(layer, call, stats)
    return out.transpose(1, 2).contiguous(), None  # copies nothing: so it lies in memory


@torch.compiler.disable  # a compiled program can't keep what it computed: this part stays outside of it
def _record(layer: Layer, call: Call, stats: Stats) -> None:
    # Gradient checkpointing computes a layer again inside backward: those rows are recorded already.
    if layer.collector is not None and torch._C._current_graph_task_id() == -1:
        with torch.no_grad():
            layer.collector.add(layer.index, call, stats)


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, sdpa_mask)  # a name without one would get no mask at all, padding or not
