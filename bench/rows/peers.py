"""Softmax and the paper's rule (its Figure 4) as users of torch and JAX have them.

Import after timing.prepare_process(): both frameworks read their number of threads once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bench.rows.reference import COEFFICIENTS, GATE

torch.set_num_threads(1)
# Run on the caller's thread, as torch and whet do, instead of handing each call to another one.
jax.config.update("jax_cpu_enable_async_dispatch", False)


def torch_rule(x: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(x, dim=-1)
    entropy = -(p * torch.log(p + 1e-9)).sum(dim=-1, keepdim=True)
    polynomial = torch.zeros_like(entropy)
    for coefficient in COEFFICIENTS:
        polynomial = polynomial * entropy + coefficient
    beta = torch.where(entropy > GATE, polynomial.clamp(min=1.0), 1.0)
    return torch.softmax(x * beta, dim=-1)


@jax.jit
def jax_rule(x: jax.Array) -> jax.Array:
    p = jax.nn.softmax(x, axis=-1)
    entropy = -jnp.sum(p * jnp.log(p + 1e-9), axis=-1, keepdims=True)
    polynomial = jnp.polyval(jnp.array(COEFFICIENTS, dtype=x.dtype), entropy)
    beta = jnp.where(entropy > GATE, jnp.maximum(polynomial, 1.0), 1.0)
    return jax.nn.softmax(x * beta, axis=-1)


def compiled_torch_rule() -> Callable[[torch.Tensor], torch.Tensor]:
    """For one shape: code for a fixed shape is the fastest torch.compile gives."""
    torch.compiler.reset()
    return torch.compile(torch_rule, fullgraph=True, dynamic=False)


def to_numpy(result: torch.Tensor | jax.Array) -> np.ndarray:
    return result.detach().numpy() if isinstance(result, torch.Tensor) else np.asarray(result)
