"""A decoder-only transformer whose attention is whet's: RMSNorm, rotary positions or none, SwiGLU, one embedding for input
and output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whet
from whet.clrs.errors import ClrsError
from whet.torch import LengthScale, attention

POSITIONS = ("rotary", "none", "mix")
ATTENTIONS = ("whet", "sdpa", "eager")
LEARNED = ("none", "log-power", "ssmax")
_ROTARY_BASE = 10000.0
_HIDDEN = -1e4  # of eager attention: finite, also after a rule has multiplied it
# Of the waves that numbers begin as: cycles per unit of the slowest and of the fastest, which tells 0.001 apart, and how
# much larger they are than what other tokens begin as.
_SLOWEST, _FASTEST, _WAVE_SIZE = 0.25, 500.0, 3.0
_LINES = 4  # of a problem that are told apart: its name, its inputs, what is asked for, the answer


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder and what its attention has that is learned."""

    vocabulary: int
    width: int = 96
    layers: int = 3
    heads: int = 3
    hidden: int = 256  # of SwiGLU
    positions: str = "none"  # mix: rotary in the first half of the heads of each layer, none in the others
    learned: str = "none"  # a length scale per head
    breaks: tuple[int, ...] = ()  # tokens that end a line. If there are any, every token knows which line it is on

    def check(self) -> None:
        """ClrsError that names what is wrong."""
        for name in ("vocabulary", "width", "layers", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise ClrsError(f"{name}: is {getattr(self, name)}, must be at least 1")
        if self.width % self.heads or (self.positions != "none" and self.width // self.heads % 2):
            raise ClrsError(f"width: is {self.width}, must be a multiple of heads, {self.heads}, and of twice that with "
                            "rotary positions")
        for name, known in (("positions", POSITIONS), ("learned", LEARNED)):
            if getattr(self, name) not in known:
                raise ClrsError(f"{name}: is {getattr(self, name)!r}, must be one of {', '.join(known)}")

    def settings(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sharpening:
    """A rule and a normalizer, in all heads or in chosen ones; the others have plain softmax."""

    rule: str = "none"
    normalizer: str = "softmax"
    layers: tuple[int, ...] | None = None  # None: all
    heads: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """As tables and results call it."""
        parts = [self.rule] if self.normalizer == "softmax" else [self.normalizer]
        if self.normalizer != "softmax" and self.rule != "none":
            parts.append(f"with {self.rule}")
        if self.rule == "none" and self.normalizer == "softmax":
            return "softmax"
        for word, chosen in (("layer", self.layers), ("head", self.heads)):
            if chosen is not None:
                parts.append(f"in {word}{'s' * (len(chosen) != 1)} {','.join(map(str, chosen))}")
        return " ".join(parts)

    @property
    def plain(self) -> bool:
        return self.rule == "none" and self.normalizer == "softmax"

    def check(self, shape: Shape) -> None:
        """ClrsError that names what is wrong."""
        try:
            whet.rule(self.rule)
            whet.softmax([0.0], normalizer=self.normalizer)
        except (TypeError, ValueError) as error:
            raise ClrsError(str(error)) from None
        for name, chosen, count in (("layers", self.layers, shape.layers), ("heads", self.heads, shape.heads)):
            if chosen is not None and not all(0 <= one < count for one in chosen):
                raise ClrsError(f"{name}: are {','.join(map(str, chosen))}, must be from 0 to {count - 1}")

    def of_layer(self, layer: int) -> Sharpening:
        """What one layer has of it."""
        return self if self.layers is None or layer in self.layers else Sharpening()

    def settings(self) -> dict[str, Any]:
        return {"rule": self.rule, "normalizer": self.normalizer,
                "layers": None if self.layers is None else list(self.layers),
                "heads": None if self.heads is None else list(self.heads)}

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Sharpening:
        layers, heads = (None if settings[name] is None else tuple(settings[name]) for name in ("layers", "heads"))
        return cls(settings["rule"], settings["normalizer"], layers, heads)


class Cache(NamedTuple):
    """Keys and values of the tokens so far: (B, H, T, D) per layer, of which each sequence has `lengths`; their lines."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor  # (B)
    lines: Tensor  # (B, T)


class Decoder(nn.Module):
    """B sequences, N tokens, H heads of size D.

    Args:
        shape: its sizes.
        sharpening: the rule and normalizer of its heads; `sharpening` may be set anew at any time.
        attention: "whet"; "sdpa" (torch's, plain softmax) or "eager" (matrices in torch, softmax or the paper's rule) for
            comparisons.
    """

    def __init__(self, shape: Shape, sharpening: Sharpening | None = None, attention: str = "whet") -> None:
        super().__init__()
        shape.check()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        if shape.breaks:
            self.line = nn.Parameter(torch.empty(_LINES, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = attention
        self.sharpening = sharpening or Sharpening()
        self._reset_parameters()

    @property
    def sharpening(self) -> Sharpening:
        return self._sharpening

    @sharpening.setter
    def sharpening(self, value: Sharpening) -> None:
        value.check(self.shape)
        if self.attention != "whet" and not (value.plain or (self.attention, value) == ("eager", Sharpening("paper"))):
            raise ClrsError(f"attention: is {self.attention!r}, which has no {value.name}; must be 'whet'")
        self._sharpening = value
        for number, block in enumerate(self.blocks):
            cast(Block, block).attention.choose(value.of_layer(number), self.attention)

    def _reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name in ("embedding.weight", "line"):
                nn.init.normal_(parameter, std=self.shape.width**-0.5)
            elif parameter.dim() == 2:
                depth = math.sqrt(2 * self.shape.layers) if name.endswith(("outward.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 / depth)

    def begin_as_waves(self, values: Mapping[int, float]) -> None:
        """Gives tokens embeddings in the order of their values: sines and cosines of many wavelengths. From there on they
        are learned like the others."""
        if not values:
            return
        pairs = self.shape.width // 2
        cycles = torch.logspace(math.log10(_SLOWEST), math.log10(_FASTEST), pairs)
        angles = 2 * math.pi * torch.tensor(list(values.values()))[:, None] * cycles
        waves = torch.cat([angles.sin(), angles.cos()], 1) * (_WAVE_SIZE * math.sqrt(2 / self.shape.width))
        with torch.no_grad():
            self.embedding.weight[list(values), :2 * pairs] = waves

    def forward(self, tokens: Tensor, rows: Tensor | None = None, cache: Cache | None = None,
                stats: list[Any] | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: (B, N). Without a cache sequences begin at the first; padding follows what counts, which never sees it.
            rows: (R) numbers of rows of the flattened (B N) whose logits are wanted. Default: all.
            cache: the tokens come after those in it, and their keys, values and lines go into it. N = 1, or the cache is
                empty.
            stats: is given the whet Stats of each layer.

        Returns:
            (B, N, vocabulary), or (R, vocabulary).
        """
        start = None if cache is None or tokens.shape[1] > 1 else cache.lengths
        angles = _angles(self.shape, tokens.shape[1], start)
        x = self.embedding(tokens)
        if self.shape.breaks:
            x = x + self.line[self._lines(tokens, cache, start).clamp(max=_LINES - 1)]
        for number, block in enumerate(self.blocks):
            kept = None if cache is None else (cache.keys[number], cache.values[number], start)
            x = block(x, angles, kept, stats)
        x = self.norm(x if rows is None else x.flatten(0, 1)[rows])
        return F.linear(x, self.embedding.weight)

    def _lines(self, tokens: Tensor, cache: Cache | None, start: Tensor | None) -> Tensor:
        """How many breaks there are up to each token, itself included."""
        lines = torch.stack([tokens == one for one in self.shape.breaks]).any(0).cumsum(1)
        if cache is None:
            return lines
        if start is None:
            cache.lines[:, :lines.shape[1]] = lines
        else:
            row = torch.arange(len(lines))
            lines += cache.lines[row, start - 1][:, None]
            cache.lines[row, start] = lines[:, 0]
        return lines

    def empty_cache(self, batch: int, most: int) -> Cache:
        """For sequences of up to `most` tokens; `lengths` are to be set once the first tokens are in it."""
        size = (batch, self.shape.heads, most, self.shape.width // self.shape.heads)
        keys, values = ([torch.zeros(size) for _ in range(self.shape.layers)] for _ in range(2))
        lengths, lines = (torch.zeros(sizes, dtype=torch.int64) for sizes in ((batch,), (batch, most)))
        return Cache(keys, values, lengths, lines)

    def count(self) -> int:
        """How many parameters it has."""
        return sum(parameter.numel() for parameter in self.parameters())


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = SelfAttention(shape)
        self.hidden_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)  # gate and value
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Any, kept: Any, stats: list[Any] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, kept, stats)
        gate, value = self.up(self.hidden_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class SelfAttention(nn.Module):
    """Causal attention with a rule, a normalizer or a learned scale in all heads or in some."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.rotated = {"rotary": shape.heads, "none": 0, "mix": (shape.heads + 1) // 2}[shape.positions]
        self.inward = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.outward = nn.Linear(shape.width, shape.width, bias=False)
        self.scale = None if shape.learned == "none" else LengthScale(shape.heads, shape.learned)
        self.choose(Sharpening(), "whet")

    def choose(self, sharpening: Sharpening, attention: str) -> None:
        self._sharpening, self._attention = sharpening, attention
        chosen = range(self.heads) if sharpening.heads is None else sharpening.heads
        self._rules = [sharpening.rule if head in chosen else "none" for head in range(self.heads)]
        self._apart = sharpening.normalizer != "softmax" and len(chosen) < self.heads
        self._chosen = sorted(chosen)

    def forward(self, x: Tensor, angles: Any, kept: Any, stats: list[Any] | None) -> Tensor:
        q, k, v = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if angles is not None:
            q, k = (_rotated(part, angles, self.rotated) for part in (q, k))
        lengths = None
        if kept is not None:
            keys, values, start = kept
            if start is None:
                keys[:, :, :k.shape[2]], values[:, :, :v.shape[2]] = k, v
            else:
                row = torch.arange(len(start))
                keys[row, :, start], values[row, :, start] = k[:, :, 0], v[:, :, 0]
                k, v, lengths = keys, values, start + 1
        return self.outward(self._attend(q, k, v, lengths, stats).transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, stats: list[Any] | None) -> Tensor:
        if self._attention != "whet":
            return _in_torch(q, k, v, lengths, self._attention, self._sharpening.rule)
        scale = None
        if self.scale is not None:
            seen = torch.arange(1, q.shape[2] + 1) if lengths is None else lengths[:, None]
            scale = self.scale(seen)
        options: dict[str, Any] = {"is_causal": lengths is None, "lengths": lengths, "return_stats": stats is not None}
        if self._apart:
            out, found = self._two_calls(q, k, v, scale, options)
        else:
            normalizer = self._sharpening.normalizer
            rule = self._rules[0] if len(set(self._rules)) == 1 else self._rules
            found = attention(q, k, v, rule=rule, normalizer=normalizer, query_scale=scale, **options)
            out = found[0] if stats is not None else found
            found = found[1] if stats is not None else None
        if stats is not None:
            stats.append(found)
        return out

    def _two_calls(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None,
                   options: dict[str, Any]) -> tuple[Tensor, Any]:
        """Another normalizer in some heads: a call takes one."""
        others = [head for head in range(self.heads) if head not in self._chosen]
        order = torch.tensor([*self._chosen, *others]).argsort()
        parts = []
        for heads, rule, normalizer in ((self._chosen, self._sharpening.rule, self._sharpening.normalizer),
                                        (others, "none", "softmax")):
            part = None if scale is None else scale[..., heads, :]
            parts.append(attention(q[:, heads], k[:, heads], v[:, heads], rule=rule, normalizer=normalizer,
                                   query_scale=part, **options))
        if not options["return_stats"]:
            return torch.cat(parts, 1)[:, order], None
        outs, stats = zip(*parts)
        joined = type(stats[0])(*(torch.cat(fields, 1)[:, order] for fields in zip(*stats)))
        return torch.cat(outs, 1)[:, order], joined


def _in_torch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, attention: str, rule: str) -> Tensor:
    """What people do without whet."""
    n, m = q.shape[2], k.shape[2]
    if attention == "sdpa":
        mask = None if lengths is None else (torch.arange(m) < lengths[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=lengths is None)
    visible = torch.ones(n, m, dtype=torch.bool).tril() if lengths is None else \
        (torch.arange(m) < lengths[:, None])[:, None, None]
    logits = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~visible, _HIDDEN)
    weights = torch.softmax(logits, -1)
    if rule == "paper":
        weights = torch.softmax(logits * _paper_beta(weights), -1)
    return weights @ v


def _paper_beta(weights: Tensor) -> Tensor:
    """The published rule: a polynomial of each row's entropy above half a nat, never below 1."""
    entropy = -(weights * (weights + 1e-9).log()).sum(-1, keepdim=True)  # as published: a weight of 0 has a gradient
    beta = torch.zeros_like(entropy)
    for coefficient in (-0.037, 0.481, -2.3, 4.917, -1.791):
        beta = beta * entropy + coefficient
    return torch.where(entropy > 0.5, beta.clamp(min=1.0), 1.0)


def _angles(shape: Shape, count: int, start: Tensor | None) -> Any:
    """cos and sin of every position and pair, (N, D) or (B, 1, 1, D); None without rotary positions."""
    if shape.positions == "none":
        return None
    size = shape.width // shape.heads
    speed = _ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    position = torch.arange(count, dtype=torch.float32) if start is None else start[:, None, None].float()
    angle = position[..., None] * speed
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor], heads: int) -> Tensor:
    """x with the first heads turned by their positions."""
    cos, sin = angles
    part = x[:, :heads]
    low, high = part.chunk(2, -1)
    turned = part * cos + torch.cat([-high, low], -1) * sin
    return turned if heads == x.shape[1] else torch.cat([turned, x[:, heads:]], 1)


def per_layer(sharpening: Sharpening, layers: int) -> list[Sharpening]:
    """The same in one layer at a time."""
    return [replace(sharpening, layers=(layer,)) for layer in range(layers)]
