"""Statistics of a model's attention: every row as arrays, or summaries whose memory doesn't grow with the input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import whet
from whet.rules import RuleLike
from whet.stats import Stats
from whet.transformers._attention import ATTRIBUTE, Call
from whet.transformers._settings import attention_modules, enable, head_count, is_enabled

# What is kept of a row. The first four and spread are at inverse temperature 1, the others at the one the rule chose.
FIELDS = ("count", "entropy", "relative_entropy", "peak", "spread", "first", "beta", "sharp_entropy", "sharp_peak")

# Bins of the histograms: from, to, how many. What lies beyond counts in the outermost.
_BINS = {"count": (0.0, 2.0**20, 256), "entropy": (0.0, 16.0, 320), "relative_entropy": (0.0, 1.0, 200),
         "peak": (0.0, 1.0, 200), "spread": (0.0, 128.0, 256), "first": (0.0, 1.0, 200), "beta": (0.0, 16.0, 320),
         "sharp_entropy": (0.0, 16.0, 320), "sharp_peak": (0.0, 1.0, 200)}


class Rows:
    """The statistics of every row that a model's attention computed, or of those asked for.

    Each of ``FIELDS`` is an attribute: a float32 array [layer, batch, head, query]. ``layers`` has the numbers of the
    layers. ``count`` is how many keys a row sees; ``entropy`` in nats, ``relative_entropy`` divided by ln count,
    ``peak``, the largest weight, and ``spread``, largest minus smallest logit, are at inverse temperature 1; ``beta``
    is what the rule chose, ``sharp_entropy`` and ``sharp_peak`` are entropy and largest weight at that beta, and
    ``first`` the weight on the first key that a query of the call sees. Rows that see no key have NaN.

    Several calls of the model, as in generate(), are joined along the queries; so are those of a layer that a model runs
    several times in one call, as ALBERT does.
    """

    def __init__(self, layers: list[int], rows: slice, rule: RuleLike = None) -> None:
        self.layers = layers
        self._rows, self._rule = rows, rule
        self._pending = {layer: _Pending() for layer in layers}
        self._calls: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(self, layer: int, call: Call, stats: Stats) -> None:
        self._keep(layer, self._pending[layer].add(_known(call, stats, self._rows, self._rule)))

    def _keep(self, layer: int, found: Iterable[Tensor]) -> None:
        self._calls[layer] += [fields.to(torch.float32) for fields in found]

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for layer, pending in self._pending.items():
            self._keep(layer, pending.settle())
        if not any(self._calls.values()):
            raise RuntimeError("no rows yet: call the model inside the with block")
        field = FIELDS.index(name)
        try:
            return np.stack([torch.cat([call[field] for call in calls], -1).numpy()
                             for calls in self._calls.values() if calls])
        except (RuntimeError, ValueError):
            raise ValueError("calls with different numbers of sequences or layers can't be one array; collect each "
                             "alone, or summaries: collect(model, summary=True)") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *FIELDS]


class Summary:
    """Mean, deviation, extremes, histogram and quantiles of each of ``FIELDS`` over all rows, by layer and head.

    Rows that see no key don't count. Arrays are float64 [layer, head, ...]; ``layers`` has the numbers of the layers,
    ``rows`` how many rows there were, [layer, head].
    """

    def __init__(self, layers: list[int], heads: int, rows: slice, rule: RuleLike = None) -> None:
        self.layers = layers
        self._rows, self._rule = rows, rule
        self._pending = {layer: _Pending() for layer in layers}
        shape = (len(layers), heads, len(FIELDS))
        self._count = torch.zeros(shape, dtype=torch.float64)
        self._mean = torch.zeros(shape, dtype=torch.float64)
        self._squares = torch.zeros(shape, dtype=torch.float64)  # of differences from the mean
        self._least = torch.full(shape, math.inf, dtype=torch.float64)
        self._most = torch.full(shape, -math.inf, dtype=torch.float64)
        self._bins = [torch.zeros((len(layers), heads, _BINS[name][2]), dtype=torch.int64) for name in FIELDS]

    def add(self, layer: int, call: Call, stats: Stats) -> None:
        for fields in self._pending[layer].add(_known(call, stats, self._rows, self._rule)):
            self._join(layer, fields)

    def _settle(self) -> None:
        for layer, pending in self._pending.items():
            for fields in pending.settle():
                self._join(layer, fields)

    def _join(self, layer: int, fields: Tensor) -> None:
        values = fields.transpose(1, 2).flatten(2).to(torch.float64)  # field, head, row
        at = self.layers.index(layer)
        valid = ~values.isnan()
        values = values.nan_to_num(0.0, 0.0, 0.0)
        count = valid.sum(-1).T.to(torch.float64)  # head, field
        mean = (values * valid).sum(-1).T / count.clamp(min=1)
        squares = (((values - mean.T[..., None]) ** 2) * valid).sum(-1).T
        # Two samples joined (Chan, Golub and LeVeque).
        whole = self._count[at] + count
        difference = mean - self._mean[at]
        self._squares[at] += squares + difference**2 * self._count[at] * count / whole.clamp(min=1)
        self._mean[at] += difference * count / whole.clamp(min=1)
        self._count[at] = whole
        self._least[at] = torch.minimum(self._least[at], values.masked_fill(~valid, math.inf).amin(-1).T)
        self._most[at] = torch.maximum(self._most[at], values.masked_fill(~valid, -math.inf).amax(-1).T)
        heads = values.shape[1]
        for field, name in enumerate(FIELDS):
            low, high, bins = _BINS[name]
            index = ((values[field] - low) * (bins / (high - low))).long().clamp_(0, bins - 1)
            index += torch.arange(heads)[:, None] * bins
            self._bins[field][at] += torch.bincount(index[valid[field]], minlength=heads * bins).view(heads, bins)

    @property
    def rows(self) -> np.ndarray:
        self._settle()
        return self._count[..., 0].numpy().astype(np.int64)

    def mean(self, name: str) -> np.ndarray:
        self._settle()
        return self._where(self._mean[..., _field(name)])

    def std(self, name: str) -> np.ndarray:
        """With n, not n - 1, as NumPy has it."""
        field = _field(name)
        self._settle()
        return self._where((self._squares[..., field] / self._count[..., field].clamp(min=1)).sqrt())

    def min(self, name: str) -> np.ndarray:
        self._settle()
        return self._where(self._least[..., _field(name)])

    def max(self, name: str) -> np.ndarray:
        self._settle()
        return self._where(self._most[..., _field(name)])

    def histogram(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Counts [layer, head, bin] and the edges of the bins; what lies beyond counts in the outermost."""
        low, high, bins = _BINS[FIELDS[_field(name)]]
        self._settle()
        return self._bins[_field(name)].numpy().copy(), np.linspace(low, high, bins + 1)

    def quantile(self, name: str, q: float) -> np.ndarray:
        """From the histogram: right to the width of a bin, 0.05 nats for entropies and 4,096 keys for count."""
        if not 0 <= q <= 1:
            raise ValueError(f"q: is {q}, must be 0 to 1")
        counts, edges = self.histogram(name)
        summed = counts.cumsum(-1)
        wanted = q * summed[..., -1:]
        index = np.minimum((summed < wanted).sum(-1), counts.shape[-1] - 1)
        below = np.where(index > 0, np.take_along_axis(summed, np.maximum(index - 1, 0)[..., None], -1)[..., 0], 0)
        inside = np.maximum(np.take_along_axis(counts, index[..., None], -1)[..., 0], 1)
        found = edges[index] + (wanted[..., 0] - below) / inside * (edges[1] - edges[0])
        return np.clip(self._where(torch.from_numpy(found)), self.min(name), self.max(name))

    def _where(self, values: Tensor) -> np.ndarray:
        """NaN for heads without rows."""
        return np.where(self.rows > 0, values.numpy(), np.nan)


@overload
def collect(model: PreTrainedModel, *, rows: int | slice | None = None, rule: RuleLike = None,
            summary: Literal[False] = False) -> AbstractContextManager[Rows]: ...
@overload
def collect(model: PreTrainedModel, *, rows: int | slice | None = None, rule: RuleLike = None,
            summary: Literal[True]) -> AbstractContextManager[Summary]: ...
def collect(model: PreTrainedModel, *, rows: int | slice | None = None, rule: RuleLike = None,
            summary: bool = False) -> AbstractContextManager[Any]:
    """Statistics of the attention that a model computes inside the block.

    ``with collect(model) as stats: model(...)``. Under enable() they are those of its rule; a model that isn't enabled
    computes its attention with whet and no rule as long as the block lasts.

    Args:
        model: as of enable().
        rows: which queries of each call to keep, as Python indexes them: -1 for the last, a slice, or None for all.
        rule: ``beta``, ``sharp_entropy`` and ``sharp_peak`` as this rule would have them, with softmax, though it isn't
            applied: what the model computes stays as it is. Default: those of the attention that was computed.
        summary: mean, deviation, histogram and quantiles by layer and head instead of all rows: memory then doesn't
            grow with the input.

    Yields:
        Rows, or a Summary. In a program of torch.compile, collecting breaks the graph at every layer.
    """
    if isinstance(rows, int):
        rows = slice(rows, rows + 1 or None)
    elif rows is None:
        rows = slice(None)
    elif not isinstance(rows, slice):
        raise TypeError(f"rows: is a {type(rows).__name__}, must be an integer, a slice or None")
    name = None if rule is None else whet.rule(rule).name
    layers = sorted({index for index, _ in attention_modules(model)})
    collector = Summary(layers, head_count(model), rows, name) if summary else Rows(layers, rows, name)
    return _collecting(model, collector)


@contextmanager
def _collecting(model: PreTrainedModel, collector: Rows | Summary) -> Iterator[Rows | Summary]:
    enabled = None if is_enabled(model) else enable(model)
    before = [(module, getattr(module, ATTRIBUTE).collector) for _, module in attention_modules(model)]
    layers = [getattr(module, ATTRIBUTE) for module, _ in before]
    try:
        for module, _ in before:
            getattr(module, ATTRIBUTE).collector = collector
        yield collector
    finally:
        for module, previous in before:
            if (layer := getattr(module, ATTRIBUTE, None)) is not None:
                layer.collector = previous
        if enabled is not None and all(getattr(module, ATTRIBUTE, None) is layer
                                       for (module, _), layer in zip(before, layers)):  # else enable() was called inside
            enabled.__exit__()


def _field(name: str) -> int:
    if name not in FIELDS:
        raise ValueError(f"name: is {name!r}, must be one of {', '.join(FIELDS)}")
    return FIELDS.index(name)


class _Known(NamedTuple):
    """What a call leaves behind of the rows kept: all that their FIELDS are made of."""

    stats: Tensor  # (field of Stats, B, H, N)
    sharp: Tensor | None  # the same under the rule that is reported, if that isn't the one of the call
    logit: Tensor  # (B, H, N): of the first key that any query of the call sees
    seen: Tensor | None  # whether a row sees that key; None: all do
    sinks: bool
    normalizer: Any
    heads: list[int] | None  # that it is for, the others have softmax; None: all

    def goes_with(self, other: _Known) -> bool:
        """Whether both can be joined along N."""
        return (self.logit.shape[:2] == other.logit.shape[:2] and (self.sharp is None) == (other.sharp is None)
                and (self.seen is None) == (other.seen is None) and self.sinks == other.sinks
                and self.normalizer is other.normalizer and self.heads == other.heads)


class _Pending:
    """Rows of a layer whose FIELDS aren't computed yet: one token at a time, that would take as long as attention."""

    _MANY = 64

    def __init__(self) -> None:
        self._calls: list[_Known] = []
        self._rows = 0

    def add(self, known: _Known) -> list[Tensor]:
        """FIELDS of what can't wait any longer."""
        if known.logit.shape[-1] == 0:  # `rows` leaves none of this call
            return []
        ready = [] if not self._calls or known.goes_with(self._calls[-1]) else self.settle()
        self._calls.append(known)
        self._rows += known.logit.shape[-1]
        waits = self._rows < self._MANY and isinstance(known.normalizer, str)  # a learned one may be another later
        return ready if waits else [*ready, *self.settle()]

    def settle(self) -> list[Tensor]:
        """FIELDS of everything, (field, B, H, N); an empty list if there is nothing."""
        calls, self._calls, self._rows = self._calls, [], 0
        if len(calls) > 1:
            sharp = [call.sharp for call in calls if call.sharp is not None]
            seen = [call.seen for call in calls if call.seen is not None]
            calls = [calls[0]._replace(stats=torch.cat([call.stats for call in calls], -1),
                                       sharp=torch.cat(sharp, -1) if sharp else None,
                                       logit=torch.cat([call.logit for call in calls], -1),
                                       seen=torch.cat(seen, -1) if seen else None)]
        return [_fields(call) for call in calls]


def _known(call: Call, stats: Stats, rows: slice, rule: RuleLike) -> _Known:
    kept = torch.stack(stats)[..., rows]
    sharp = None if rule is None else torch.stack(call.stats_under(rule, rows))
    logit, seen = _first_logit(call, rows)
    return _Known(kept, sharp, logit, seen, call.sinks is not None, call.normalizer, call.heads)


def _fields(known: _Known) -> Tensor:
    """FIELDS of the rows kept, (field, B, H, N), NaN where a row sees no key."""
    kept = Stats(*known.stats)
    sharp = kept if known.sharp is None else Stats(*known.sharp)
    relative = kept.entropy / kept.count.clamp(min=2).log()
    found = torch.stack([kept.count, kept.entropy, relative, kept.peak, kept.spread, _first(known, kept), sharp.beta,
                         sharp.sharp_entropy, sharp.sharp_peak])
    return found.masked_fill(kept.count == 0, math.nan)


def _first(known: _Known, stats: Stats) -> Tensor:
    """The weight on the first key that any query of the call sees, from its logit and the stats of the rows: weights
    are a function of the logit, and the largest weight, that of the largest logit, gives its factor."""
    if known.sinks:  # which may be the largest logit of a row; peak is of the largest that has a key
        stats = stats._replace(max=stats.log_sum_exp + stats.peak.log())
    if known.heads is None:
        weight = _weight(known.logit, stats, known.normalizer)
    else:
        weight = _weight(known.logit, stats, "softmax")
        theirs = Stats(*(field[:, known.heads] for field in stats))
        weight[:, known.heads] = _weight(known.logit[:, known.heads], theirs, known.normalizer)
    return weight if known.seen is None else weight * known.seen


def _first_logit(call: Call, rows: slice) -> tuple[Tensor, Tensor | None]:
    """The logit of that key in each row kept, float64 (B, H, N), and whether the row sees it (None: all do)."""
    query, key, mask = call.query[:, :, rows], call.key, call.mask
    batch = len(query)
    if mask is None:
        keys, seen, bias = key[:, :, 0], None, None
        if call.starts:  # sequences packed one after the other: only the first has that key
            seen = (torch.arange(call.query.shape[2])[rows] < call.starts["query_starts"][1])[None, None]
    else:
        visible = mask if mask.dtype == torch.bool else mask > -torch.inf
        index = visible.any(-2).any(1).to(torch.int8).argmax(-1)  # (B or 1)
        index = index.expand(batch)
        keys = key[torch.arange(batch), :, index]
        at = index[:, None, None, None].expand(batch, mask.shape[1], mask.shape[2], 1)
        column = mask.expand(batch, -1, -1, -1).gather(-1, at)[..., rows, 0]
        seen, bias = (column, None) if mask.dtype == torch.bool else (column > -torch.inf, column)
    if query.dtype.itemsize == 2:
        query, keys = query.float(), keys.float()
    groups = query.unflatten(1, (key.shape[1], -1))
    logit = torch.matmul(groups, keys[:, :, None, :, None]).squeeze(-1).flatten(1, 2).to(torch.float64)
    logit = logit * (call.scale if call.scale is not None else query.shape[-1] ** -0.5)
    if call.query_scale is not None:
        logit = logit * call.query_scale
    if call.softcap:
        logit = call.softcap * (logit / call.softcap).tanh()
    if bias is not None:
        logit = logit + bias
    return logit, seen


def _weight(logit: Tensor, stats: Stats, normalizer: Any) -> Tensor:
    """The weight of a logit in rows of these stats, (B, H, N)."""
    if isinstance(normalizer, str):
        name, _, parameter = normalizer.partition(":")
    else:
        name, parameter = "entmax", torch.as_tensor(normalizer.alpha, dtype=torch.float64).reshape(-1, 1)
    below = (stats.beta * (logit - stats.max)).clamp(max=0.0).nan_to_num()
    if name in ("softmax", "top-k", "hard", "straight-through"):
        # The kernel rounded its logits otherwise: one that is the threshold may seem to be just below it.
        return stats.sharp_peak * below.exp() * (logit >= stats.threshold - 1e-5 * (1 + stats.max.abs()))
    if name in ("sparsemax", "entmax15", "entmax"):
        alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(name)
        if alpha is None:
            alpha = float(parameter) if isinstance(parameter, str) else parameter
        room = (stats.max - stats.threshold).clamp(min=1e-300)
        return stats.sharp_peak * (((logit - stats.threshold) / room).clamp(0, 1) ** (1 / (alpha - 1)))
    scaled = stats.beta * logit
    if name == "relu":
        return scaled.clamp(min=0) / stats.count.clamp(min=1)
    if name == "sigmoid":
        return torch.sigmoid(scaled - stats.count.clamp(min=1).log())
    most = (stats.beta * stats.max).clamp(min=1e-300)  # softpick
    return stats.sharp_peak * torch.where(scaled > 0, below.exp() * (-torch.expm1(-scaled)) / (-torch.expm1(-most)), 0.0)
