"""Attention as users of torch and JAX have it: fused and plain, or with the paper's rule.

Import after timing.prepare_process(). Key heads are repeated for the query heads of a group before
anything is timed, except where a function takes groups itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.attention.reference import HIDDEN, Inputs, Shape
from bench.rows.peers import jax_rule, torch_rule
from bench.rows.reference import COEFFICIENTS, GATE
from bench.timing import progress

BLOCKS = (16, 32, 64, 128, 256)  # rows the hand-blocked loop may take at once
TRIAL_ROWS = 256

Rule = Callable[[torch.Tensor], torch.Tensor]


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The same memory."""
    if array.dtype.name == "bfloat16":  # NumPy has no such type: torch doesn't know ml_dtypes'
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def lean_rule(x: torch.Tensor) -> torch.Tensor:
    """The rule as somebody would write it who counts passes: no logarithm per key, x overwritten."""
    p = torch.softmax(x, dim=-1)
    log_sum_exp = x.amax(dim=-1) - p.amax(dim=-1).log()
    entropy = (log_sum_exp - torch.linalg.vecdot(p, x)).unsqueeze(-1)
    polynomial = torch.zeros_like(entropy)
    for coefficient in COEFFICIENTS:
        polynomial = polynomial * entropy + coefficient
    beta = torch.where(entropy > GATE, polynomial.clamp(min=1.0), 1.0)
    return torch.softmax(x.mul_(beta), dim=-1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None
) -> torch.Tensor:
    x = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    if hidden is not None:
        x = x.masked_fill(hidden, -math.inf)
    return torch_rule(x) @ v


@jax.jit
def _jax_attention(q: jax.Array, k: jax.Array, v: jax.Array, hidden: jax.Array | None) -> jax.Array:
    x = (q / math.sqrt(q.shape[-1])) @ jnp.swapaxes(k, -1, -2)
    if hidden is not None:
        x = jnp.where(hidden, -jnp.inf, x)
    return jax_rule(x) @ v


@dataclass(frozen=True)
class _Loop:
    """The rule over some rows of one head or of all heads at a time."""

    rule: Rule
    block: int
    heads: int

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, start: int = 0
    ) -> torch.Tensor:
        """Rows from `start` on; the others are left as they are."""
        out, kt = torch.empty_like(q), k.transpose(-1, -2)
        queries, keys = q.shape[-2], k.shape[-2]
        q = q / math.sqrt(q.shape[-1])
        for h in range(0, q.shape[1], self.heads):
            heads = slice(h, h + self.heads)
            for i in range(start, queries, self.block):
                rows = slice(i, min(i + self.block, queries))
                end = min(rows.stop, keys) if causal else keys
                x = q[:, heads, rows] @ kt[:, heads, :, :end]
                if causal and end > i:
                    hidden = torch.ones(rows.stop - i, end - i, dtype=torch.bool).triu_(1)
                    x[..., i:].masked_fill_(hidden, HIDDEN)  # finite: lean_rule takes p x
                out[:, heads, rows] = self.rule(x) @ v[:, heads, :end]
        return out


class Peers:
    """Calls on one problem's arrays; each gives (1, H, N, D). A new one forgets compiled code."""

    def __init__(self, inputs: Inputs) -> None:
        torch.compiler.reset()  # or it would begin to compile for any shape, which is slower code
        self._shape = inputs.shape
        self._arrays = inputs.arrays
        self.q, self.k, self.v = (to_torch(array) for array in inputs.arrays)

    @cached_property
    def _repeated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = self._shape.group
        if group == 1:
            return self.q, self.k, self.v
        return self.q, self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1)

    @cached_property
    def _hidden(self) -> torch.Tensor | None:
        return torch.from_numpy(_hidden(self._shape)) if self._shape.causal else None

    def sdpa(self) -> torch.Tensor:
        return scaled_dot_product_attention(
            *(self.q, self.k, self.v),
            is_causal=self._shape.causal,
            enable_gqa=self._shape.group > 1,
        )

    def sdpa_folded(self) -> torch.Tensor:
        """For one query: the heads of a group as queries of one head, so no key is repeated."""
        shape = self._shape
        q = self.q.view(1, shape.key_heads, shape.group, shape.size)
        return scaled_dot_product_attention(q, self.k, self.v).view(1, shape.heads, 1, shape.size)

    def flex(self) -> Callable[[], torch.Tensor]:
        shape = self._shape
        compiled = _compile(flex_attention)
        sizes = (None, None, shape.queries, shape.keys)
        blocks = create_block_mask(_causal, *sizes, device="cpu") if shape.causal else None
        return lambda: compiled(
            *(self.q, self.k, self.v), block_mask=blocks, enable_gqa=shape.group > 1
        )

    def eager(self) -> torch.Tensor:
        return _attention(*self._repeated, self._hidden)

    def compiled(self) -> Callable[[], torch.Tensor]:
        function = _compile(_attention)
        return lambda: function(*self._repeated, self._hidden)

    def jax(self) -> Callable[[], jax.Array]:
        group = self._shape.group
        arrays = (a if i == 0 else a.repeat(group, 1) for i, a in enumerate(self._arrays))
        arguments = [jax.device_put(array) for array in arrays]
        hidden = jax.device_put(_hidden(self._shape)) if self._shape.causal else None
        return lambda: _jax_attention(*arguments, hidden).block_until_ready()

    def blocked(self, rule: Rule) -> Callable[[], torch.Tensor]:
        """The loop with the block that is fastest on the last rows of this problem."""
        arguments = (*self._repeated, self._shape.causal)
        start = max(0, self._shape.queries - TRIAL_ROWS)
        loops = [_Loop(rule, b, h) for b in BLOCKS for h in (1, self._shape.heads)]
        seconds = [min(_seconds(loop, *arguments, start) for _ in range(3)) for loop in loops]
        best = loops[int(np.argmin(seconds))]
        progress(
            f"  {rule.__name__} in blocks: {best.block} rows of {best.heads} head(s) at a time"
        )
        return lambda: best(*arguments)

    def gradients(
        self, attention: Callable[[], torch.Tensor], dout: np.ndarray
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Forward and backward: dq, dk, dv. From here on every call records what that needs."""
        arguments, above = (self.q, self.k, self.v), to_torch(dout)
        for tensor in arguments:
            tensor.requires_grad_()
        return lambda: torch.autograd.grad(attention(), arguments, above)


def _compile(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For one shape: code for a fixed shape is the fastest torch.compile gives."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def _hidden(shape: Shape) -> np.ndarray:
    return np.arange(shape.keys) >= shape.visible[:, None]


def _causal(_batch: object, _head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start
