"""The decoder layer that bench.python.torch_calls times: torch's linear layers around an attention function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class DecoderLayer(nn.Module):
    """Normalization, causal attention, normalization, two linear layers; each half is added to its input."""

    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        size = heads * head_size
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(size), nn.LayerNorm(size)
        self.split, self.join = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.linear = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.split(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.linear(self.before_linear(x))
