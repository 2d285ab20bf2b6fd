"""Public functions as a typed program calls them. mypy --strict checks it (make lint-python); it never runs."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import torch

import whet
import whet.jax
import whet.torch


def rows(x: np.ndarray, chosen: bool) -> None:
    assert_type(whet.softmax(x), np.ndarray)
    assert_type(whet.softmax(x, axis=0, rule="paper", where=x > 0, return_stats=False), np.ndarray)
    assert_type(whet.softmax(x, rule=whet.TargetEntropy(0.2), return_stats=True), tuple[np.ndarray, whet.Stats])
    assert_type(whet.softmax(x, return_stats=chosen), np.ndarray | tuple[np.ndarray, whet.Stats])
    assert_type(whet.sharpen(x, return_stats=True), tuple[np.ndarray, whet.Stats])
    assert_type(whet.softmax_backward(x, x, stats=whet.softmax(x, return_stats=True)[1]), np.ndarray)
    assert_type(whet.merge(whet.states(x), whet.states(x)), np.ndarray)
    assert_type(whet.rule("paper").beta(whet.states(x)), np.ndarray)
    whet.softmax(x, rule=3)  # type: ignore[call-overload]


def heads(q: np.ndarray) -> None:
    assert_type(whet.attention(q, q, q, causal=True, window=(2, None), softcap=None), np.ndarray)
    assert_type(whet.attention(q, q, q, rule=["none", whet.Paper()], return_stats=True),
                tuple[np.ndarray, whet.Stats])
    assert_type(whet.attention(q, q, q, top_k=3), Any)
    assert_type(whet.attention_backward(q, q, q, q).dq, np.ndarray)
    whet.attention(q, q, q, causl=True)  # type: ignore[call-overload]


def of_torch(x: torch.Tensor, chosen: bool) -> None:
    assert_type(whet.torch.softmax(x, dim=-1, rule="paper"), torch.Tensor)
    assert_type(whet.torch.softmax(x, return_stats=True), tuple[torch.Tensor, whet.Stats])
    assert_type(whet.torch.attention(x, x, x, None, 0.0, True, scale=x.sum(), window=(2, None)), torch.Tensor)
    assert_type(whet.torch.attention(x, x, x, lengths=[3, 4], return_stats=True), tuple[torch.Tensor, whet.Stats])
    assert_type(whet.torch.attention(x, x, x, return_stats=chosen), torch.Tensor | tuple[torch.Tensor, whet.Stats])
    whet.torch.attention(x, x, x, window="3")  # type: ignore[call-overload]


def of_jax(x: jax.Array) -> None:
    assert_type(whet.jax.softmax(x, axis=(0, 1), where=x > 0), jax.Array)
    assert_type(whet.jax.softmax(jnp.zeros(3), rule="paper", return_stats=True), tuple[jax.Array, whet.Stats])
    assert_type(whet.jax.attention(x, x, x, is_causal=True, local_window_size=(2, None)), jax.Array)
    assert_type(whet.jax.attention(x, x, x, return_stats=True), tuple[jax.Array, whet.Stats])
    whet.jax.softmax(x, hold_beta="yes")  # type: ignore[call-overload]
