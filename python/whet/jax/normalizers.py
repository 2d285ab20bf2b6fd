"""Normalizers with a parameter that is learned."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from whet import _core
from whet.jax._ffi import ENTMAX, array


class Entmax(NamedTuple):
    """The normalizer entmax:alpha, for the argument `normalizer` of softmax and attention.

    Between softmax (towards alpha = 1) and sparsemax (alpha = 2), and beyond up to 4. As an array, alpha has a gradient:
    that of Correia, Niculae and Martins (2019), who learn one per head.

    Args:
        alpha: a number, or an array of one element; in attention also (N), one per query head. Above 1, at most 4.

    A number is part of the program, as in "entmax:1.3". The value of an array is read when the program runs: one out of
    range is a ValueError if it is known before, and otherwise an error of the running program that names alpha.

    >>> import jax, jax.numpy as jnp
    >>> from whet.jax import Entmax, softmax
    >>> x = jnp.array([2.0, 1.5, 0.1, -1.0])
    >>> weight = lambda alpha: softmax(x, normalizer=Entmax(alpha))[0]
    >>> [f"{result:.4f}" for result in jax.value_and_grad(weight)(1.5)]
    ['0.6740', '0.1239']
    """

    alpha: Any


# What softmax and attention take.
NormalizerLike = str | Entmax


def name_and_alpha(normalizer: NormalizerLike) -> tuple[str, jax.Array | None]:
    """The name as options have it; and alpha if it is an array, which kernels take the parameter from."""
    if not isinstance(normalizer, Entmax):
        return _core.normalizer_name(normalizer), None
    alpha = normalizer.alpha
    if isinstance(alpha, (int, float, np.number)):
        _check_range(np.float64(alpha))
        return _core.normalizer_name(f"entmax:{float(alpha)!r}"), None
    alpha = array(alpha, "alpha")
    if not jnp.issubdtype(alpha.dtype, jnp.floating):
        raise TypeError(f"alpha: its dtype is {alpha.dtype}, must be floats")
    if not isinstance(alpha, jax.core.Tracer):
        _check_range(np.asarray(alpha, np.float64))
    return ENTMAX, alpha.astype(jnp.promote_types(alpha.dtype, jnp.float32))


def _check_range(alpha: Any) -> None:
    wrong = alpha[~((alpha > 1) & (alpha <= 4))]
    if wrong.size > 0:
        raise ValueError(f"alpha: is {wrong[0]}, must be above 1 and at most 4")


def single(alpha: jax.Array | None) -> jax.Array | None:
    """alpha without axes."""
    if alpha is not None and alpha.size != 1:
        raise ValueError(f"alpha: its shape is {alpha.shape}, must have one element")
    return None if alpha is None else alpha.reshape(())


# ---- its derivative in forward mode


def alpha_slope(weights: jax.Array, alpha: jax.Array, axis: int) -> jax.Array:
    """The derivative of the weights of entmax to alpha, from the weights alone.

    With q = w^(2 - alpha), u = (alpha - 1) ln w and h = -phi(u) ln^2 w,

        dw/dalpha = q (h - sum q h / sum q),   phi(u) = (1 - e^u + u e^u) / u^2

    which is the formula of src/kernels/entmax/alpha_gradient-inl.h. It has no terms of the size of 1 / (alpha - 1)^2.
    """
    alpha = alpha.astype(weights.dtype)
    has_weight = weights != 0
    log = jnp.log(jnp.where(has_weight, weights, 1))
    q = jnp.where(has_weight, jnp.exp((2 - alpha) * log), 0)
    h = -_phi((alpha - 1) * log) * log**2
    total = jnp.sum(q, axis, keepdims=True)
    mean = jnp.sum(q * h, axis, keepdims=True) / jnp.where(total == 0, 1, total)
    return q * (h - mean)


# of u^0, u^1, ...: 1 / (k! (k + 2)), which is exact where |u| <= 1
_SERIES = 1 / (np.cumprod([1, *range(1, 18)]) * np.arange(2.0, 20.0))


def _phi(u: jax.Array) -> jax.Array:
    small = jnp.abs(u) <= 1
    series = jnp.polyval(jnp.asarray(_SERIES[::-1], u.dtype), jnp.where(small, u, 0))
    away = jnp.where(small, 1, u)
    return jnp.where(small, series, (1 - jnp.exp(away) + away * jnp.exp(away)) / away**2)
