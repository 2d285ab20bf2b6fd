"""The contenders of bench.rows. Import after timing.prepare_process()."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch

from bench.rows.peers import compiled_torch_rule, jax_rule, to_numpy, torch_rule
from bench.rows.reference import (
    PEER_GRADIENT_BOUND,
    WHET_GRADIENT_BOUND,
    Reference,
    gradient_share,
    peer_share,
    whet_share,
)
from bench.timing import Contender
from bench.whet_c import STATS_FIELDS, Whet

PLAIN = "torch.softmax(out=)"
EAGER, COMPILE, JAX = "paper, torch eager", "paper, torch.compile", "paper, jax.jit"
WHET_BACKWARD, WHET_BOTH = "whet backward, saved rows", "whet forward + backward"
TORCH_BACKWARD, TORCH_BOTH = "torch autograd, backward", "torch autograd, forward + backward"


def _new_stats(reference: Reference) -> np.ndarray:
    return np.empty((len(reference.x), len(STATS_FIELDS)))


def _whet(
    whet: Whet,
    reference: Reference,
    out: np.ndarray,
    rule: str,
    threads: int = 1,
    name: str = "",
    stats: np.ndarray | None = None,
) -> Contender:
    x = reference.x
    call = whet.softmax(x, out, rule=rule, threads=threads, stats=stats)

    def verify() -> float:
        reported = _new_stats(reference)
        whet.softmax(x, out, rule=rule, threads=threads, stats=reported)()
        out.fill(np.nan)
        call()
        return whet_share(reference, rule, out, reported[:, STATS_FIELDS.index("beta")])

    return Contender(name or f"whet {rule}", call, verify, threads)


def _torch_softmax(
    reference: Reference, out: np.ndarray, name: str = PLAIN, threads: int = 1
) -> Contender:
    x, out_torch = torch.from_numpy(reference.x), torch.from_numpy(out)

    def call() -> object:
        return torch.softmax(x, dim=-1, out=out_torch)

    def verify() -> float:
        out.fill(np.nan)
        call()
        return peer_share(reference, False, out)

    return Contender(name, call, verify, threads, setup=lambda: torch.set_num_threads(threads))


def _peer(
    name: str,
    reference: Reference,
    call: Callable[[], torch.Tensor | jax.Array],
    adaptive: bool = True,
) -> Contender:
    return Contender(name, call, lambda: peer_share(reference, adaptive, to_numpy(call())))


def forward_contenders(whet: Whet, reference: Reference, rules: Sequence[str]) -> list[Contender]:
    """One thread; all that write into a given array share it. Run under torch.no_grad()."""
    out = np.empty_like(reference.x)
    x, x_jax = torch.from_numpy(reference.x), jax.device_put(reference.x)
    compiled = compiled_torch_rule()
    stats = _new_stats(reference)
    return [
        _torch_softmax(reference, out),
        _peer("torch.softmax, new result", reference, lambda: torch.softmax(x, -1), adaptive=False),
        *(_whet(whet, reference, out, rule) for rule in rules),
        _whet(whet, reference, out, "paper", name="whet paper, with stats", stats=stats),
        _peer(EAGER, reference, lambda: torch_rule(x)),
        _peer(COMPILE, reference, lambda: compiled(x)),
        _peer(JAX, reference, lambda: jax_rule(x_jax).block_until_ready()),
    ]


def thread_contenders(whet: Whet, reference: Reference) -> list[Contender]:
    """Each with one and with two threads; the name ends in the number."""
    out = np.empty_like(reference.x)
    contenders = []
    for threads in (1, 2):
        contenders.append(_torch_softmax(reference, out, f"{PLAIN}, {threads}", threads))
        for rule in ("none", "paper"):
            name = f"whet {rule}, {threads}"
            contenders.append(_whet(whet, reference, out, rule, threads, name))
    return contenders


def backward_contenders(whet: Whet, reference: Reference) -> list[Contender]:
    """Through the paper's rule, one thread."""
    dout = np.random.default_rng(0).standard_normal(reference.x.shape, dtype=np.float32)
    truth = reference.gradient(dout)
    contenders = []
    for name, call in _whet_backward(whet, reference, dout).items():
        verify = _gradient_check(reference, dout, truth, call, WHET_GRADIENT_BOUND)
        contenders.append(Contender(name, call, verify))
    for name, call in _torch_backward(reference, dout).items():
        verify = _gradient_check(reference, dout, truth, call, PEER_GRADIENT_BOUND)
        contenders.append(Contender(name, call, verify))
    return contenders


def _gradient_check(
    reference: Reference,
    dout: np.ndarray,
    truth: np.ndarray,
    call: Callable[[], np.ndarray],
    bound: float,
) -> Callable[[], float]:
    return lambda: gradient_share(reference, dout, truth, call(), bound)


def _whet_backward(
    whet: Whet, reference: Reference, dout: np.ndarray
) -> dict[str, Callable[[], np.ndarray]]:
    x, out, din = reference.x, np.empty_like(dout), np.empty_like(dout)
    saved = whet.new_saved(x[..., 0].size, "paper")
    forward = whet.softmax(x, out, rule="paper", threads=1, saved=saved)
    from_saved = whet.backward(x, dout, din, rule="paper", threads=1, saved=saved)
    alone = whet.backward(x, dout, din, rule="paper", threads=1)
    forward()

    def backward() -> np.ndarray:
        from_saved()
        return din

    def backward_alone() -> np.ndarray:
        alone()
        return din

    def both() -> np.ndarray:
        forward()
        from_saved()
        return din

    return {WHET_BACKWARD: backward, "whet backward, alone": backward_alone, WHET_BOTH: both}


def _torch_backward(reference: Reference, dout: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    x, dout_torch = torch.from_numpy(reference.x).requires_grad_(), torch.from_numpy(dout)
    result = torch_rule(x)

    def backward() -> np.ndarray:
        return torch.autograd.grad(result, x, dout_torch, retain_graph=True)[0].numpy()

    def both() -> np.ndarray:
        return torch.autograd.grad(torch_rule(x), x, dout_torch)[0].numpy()

    return {TORCH_BACKWARD: backward, TORCH_BOTH: both}
