"""Linear attention of whet beside torch. Import after timing.prepare_process().

Peers: SDPA, which is another function, as the time of a softmax; and linear attention as people write it in torch:
in full by the sum of all phi(k) v, causal by the running sum of these (which holds D x E numbers per query) and
by the masked square of all products. whet is verified against float64 on sampled queries, torch against
whet, both within 1e-4 of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import elu, scaled_dot_product_attention

from bench.attention.reference import Inputs, Shape, plain
from bench.attention.results import Comparison, Results
from bench.report import Section
from bench.timing import MIN_ROUNDS, Contender, OtherLoad, progress, verified_timings
from bench.whet_c import Whet

LINEAR, SDPA = "whet linear_attention", "torch SDPA"
SUMS, RUNNING, SQUARE = "torch, sums over keys", "torch, running sums", "torch, masked square"
BOUND = 1e-4
SAMPLED_QUERIES = 32
RUNNING_QUERIES = 2048  # the running sums of 8 heads are 256 MiB there


def _phi(x: torch.Tensor) -> torch.Tensor:
    return elu(x) + 1


def _by_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = _phi(q), _phi(k)
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))


def _by_running_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = _phi(q), _phi(k)
    states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)
    return (q.unsqueeze(-2) @ states).squeeze(-2) / (q * k.cumsum(-2)).sum(-1, keepdim=True)


def _by_square(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    a = (_phi(q) @ _phi(k).transpose(-1, -2)).tril_()
    return (a @ v) / a.sum(-1, keepdim=True)


def _truth(inputs: Inputs, queries: np.ndarray) -> np.ndarray:
    """Of these queries of the first head."""

    def phi(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    a = phi(inputs.q[0, 0, queries]) @ phi(inputs.k[0, 0]).T
    a *= np.arange(inputs.shape.keys) < inputs.shape.visible[queries, None]
    return (a @ inputs.v[0, 0].astype(np.float64)) / a.sum(axis=1, keepdims=True)


def _contenders(whet: Whet, shape: Shape) -> list[Contender]:
    inputs = plain(shape)
    out = np.empty_like(inputs.q)
    call = whet.linear_attention(*inputs.arrays, out, causal=shape.causal)
    allowed = BOUND * float(np.abs(inputs.v).max())
    queries = np.arange(0, shape.queries, max(1, shape.queries // SAMPLED_QUERIES))

    def verify() -> float:
        out.fill(np.nan)
        call()
        return float(np.abs(out[0, 0, queries] - _truth(inputs, queries)).max()) / allowed

    tensors = [torch.from_numpy(array) for array in inputs.arrays]

    def peer(name: str, function: Callable[..., torch.Tensor]) -> Contender:
        def share() -> float:
            call()
            return float(np.abs(function(*tensors).numpy() - out).max()) / allowed

        return Contender(name, lambda: function(*tensors), share)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=shape.causal)

    # Another function: there is nothing to verify it against here.
    contenders = [Contender(LINEAR, call, verify), Contender(SDPA, sdpa, lambda: 0.0)]
    if not shape.causal:
        contenders.append(peer(SUMS, _by_sums))
    else:
        contenders.append(peer(SQUARE, _by_square))
        if shape.queries <= RUNNING_QUERIES:
            contenders.append(peer(RUNNING, _by_running_sums))
    return contenders


def linear(whet: Whet, shapes: Sequence[Shape]) -> Section:
    bars = [
        Comparison(f"{LINEAR} / {peer}, most", LINEAR, peer, 1.0)
        for peer in (SDPA, SUMS, RUNNING, SQUARE)
    ]
    # The two products with the state of D x E numbers.
    flops = lambda shape, _: 4.0 * shape.heads * shape.queries * shape.size**2  # noqa: E731
    results = Results(SDPA, bars, amount=flops)
    with OtherLoad() as load, torch.no_grad():
        for shape in shapes:
            progress(f"linear attention, {shape}")
            results.timings[shape] = verified_timings(_contenders(whet, shape), MIN_ROUNDS)
    note = "float32, one thread. GFLOP/s count the two products with a state of D × D numbers."
    return results.section("Linear attention", note, load)
