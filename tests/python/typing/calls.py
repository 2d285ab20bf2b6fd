"""Every public function and class as a typed program calls it. mypy --strict checks it (make lint-python); it never
runs. tests/python/test_typing.py checks that none is missing."""

from pathlib import Path
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
    assert_type(whet.softmax(x, normalizer="softmax", out=x), np.ndarray)
    assert_type(whet.sharpen(x), np.ndarray)
    assert_type(whet.sharpen(x, return_stats=True), tuple[np.ndarray, whet.Stats])
    assert_type(whet.softmax(x, return_stats=chosen, return_saved=True), Any)
    assert_type(whet.softmax_backward(x, x, saved=x), np.ndarray)
    assert_type(whet.softmax_backward(x, x, normalizer="entmax:1.3", return_dparameter=True),
                tuple[np.ndarray, np.ndarray])
    assert_type(whet.log_softmax(x, rule="paper", out=x), np.ndarray)
    assert_type(whet.log_softmax(x, return_stats=True), tuple[np.ndarray, whet.Stats])
    assert_type(whet.log_softmax(x, return_stats=chosen), np.ndarray | tuple[np.ndarray, whet.Stats])
    assert_type(whet.log_softmax_backward(x, x, hold_beta=True), np.ndarray)
    assert_type(whet.merge(whet.states(x), whet.states(x).astype(whet.STATE)), np.ndarray)
    whet.softmax(x, rule=3)  # type: ignore[call-overload]
    whet.log_softmax(x, normalizer="softmax")  # type: ignore[call-overload]


def rules(x: np.ndarray, path: Path) -> None:
    every: list[whet.Rule] = [
        whet.NoRule(), whet.Paper(), whet.Fixed(2.0), whet.LogLength(16, 0.8), whet.SSMax(0.4), whet.LogPower(1, 0.5, 2.0),
        whet.Llama4(8192), whet.TargetEntropy(0.2), whet.TargetPeak(0.9), whet.Polynomial((0.3, 1.2), hold=4.0), whet.Polynomial.load(path)]
    names: list[whet.RuleLike] = ["paper", None, *every]
    assert_type([whet.rule(name).name for name in names], list[str])
    assert_type(whet.rule("paper").beta(whet.states(x)), np.ndarray)
    assert_type(whet.Paper().adaptive, bool)
    whet.Polynomial((0.3, 1.2)).save(path)


def heads(q: np.ndarray) -> None:
    assert_type(whet.attention(q, q, q, is_causal=True, window=(2, None), softcap=None), np.ndarray)
    assert_type(whet.attention(q, q, q, rule=["none", whet.Paper()], return_stats=True),
                tuple[np.ndarray, whet.Stats])
    assert_type(whet.attention(q, q, q, query_scale=2.0, query_starts=[0, 3], key_starts=[0, 3]), np.ndarray)
    assert_type(whet.attention(q, q, q, top_k=3, tile_counts=True), Any)
    assert_type(whet.attention(q, q, q, return_saved=True), Any)
    assert_type(whet.attention_backward(q, q, q, q, is_causal=True, bias=q, saved=q).dquery, np.ndarray)
    assert_type(whet.linear_attention(q, q, q, is_causal=True, lengths=[3]), np.ndarray)
    linear: whet.LinearAttentionGradients = whet.linear_attention_backward(q, q, q, q)
    assert_type(linear.dkey, np.ndarray)
    gradients: whet.AttentionGradients = whet.attention_backward(q, q, q, q, rule="paper")
    extras = whet.Extras(tile_counts=whet.TileCounts(2, 1))
    assert_type(whet.attention_backward(q, q, q, q, return_dparameter=True).dparameter, np.ndarray | None)
    assert_type((extras.tile_counts, gradients.dbias), tuple[whet.TileCounts | None, np.ndarray | None])
    whet.attention(q, q, q, is_causl=True)  # type: ignore[call-overload]
    whet.attention_backward(q, q, q, q, is_causl=True)  # type: ignore[call-arg]


def limits_and_runtime(x: np.ndarray) -> None:
    assert_type(whet.horizon(spread=whet.spread(x), weight=0.5), np.ndarray)
    assert_type(whet.largest_weight(keys=10, spread=3.0), np.ndarray)
    assert_type((whet.version(), whet.simd_target(), whet.simd_targets()), tuple[str, str, list[str]])
    whet.set_num_threads(whet.get_num_threads())


def of_torch(x: torch.Tensor, chosen: bool) -> None:
    assert_type(whet.torch.softmax(x, dim=-1, rule="paper", normalizer="softmax"), torch.Tensor)
    assert_type(whet.torch.softmax(x, return_stats=True), tuple[torch.Tensor, whet.Stats])
    assert_type(whet.torch.log_softmax(x, 0, torch.float32, rule="paper", out=x), torch.Tensor)
    assert_type(whet.torch.log_softmax(x, return_stats=True), tuple[torch.Tensor, whet.torch.Stats])
    assert_type(whet.torch.attention(x, x, x, None, 0.0, True, scale=x.sum(), window=(2, None)), torch.Tensor)
    assert_type(whet.torch.attention(x, x, x, lengths=[3, 4], return_stats=True), tuple[torch.Tensor, whet.Stats])
    assert_type(whet.torch.attention(x, x, x, return_stats=chosen), torch.Tensor | tuple[torch.Tensor, whet.Stats])
    assert_type(whet.torch.attention(x, x, x, query_starts=x, key_starts=[0, 3], query_scale=x), torch.Tensor)
    assert_type(whet.torch.attention(x, x, x, top_k=2, weight_rows=[[0, 0, 1]]), Any)
    assert_type(whet.torch.Extras().top_keys, Any)
    layers = whet.torch.Softmax(rule="paper"), whet.torch.MultiheadAttention(8, 2, rule=["paper", None])
    assert_type(layers, tuple[whet.torch.Softmax, whet.torch.MultiheadAttention])
    assert_type(whet.torch.softmax(x, normalizer=whet.torch.Entmax(1.3)), torch.Tensor)
    assert_type(whet.torch.attention(x, x, x, normalizer=whet.torch.Entmax(x), return_stats=True),
                tuple[torch.Tensor, whet.Stats])
    assert_type(whet.torch.LengthScale(2, "ssmax", init=0.4, dtype=torch.float64).heads, int)
    assert_type(whet.torch.LengthScale(2, init=(1, 0, 2.0)).forward(x), torch.Tensor)
    assert_type(whet.torch.linear_attention(x, x, x, True, lengths=[3]), torch.Tensor)
    whet.torch.attention(x, x, x, window="3")  # type: ignore[call-overload]


def of_jax(x: jax.Array, chosen: bool) -> None:
    assert_type(whet.jax.softmax(x, axis=(0, 1), where=x > 0, normalizer="softmax"), jax.Array)
    assert_type(whet.jax.softmax(jnp.zeros(3), rule="paper", return_stats=True), tuple[jax.Array, whet.Stats])
    assert_type(whet.jax.log_softmax(x, axis=None, rule="paper"), jax.Array)
    assert_type(whet.jax.log_softmax(x, return_stats=chosen), jax.Array | tuple[jax.Array, whet.Stats])
    assert_type(whet.jax.attention(x, x, x, is_causal=True, local_window_size=(2, None)), jax.Array)
    assert_type(whet.jax.attention(x, x, x, return_stats=True), tuple[jax.Array, whet.Stats])
    assert_type(whet.jax.attention(x, x, x, top_k=2), Any)
    assert_type(whet.jax.softmax(x, normalizer=whet.jax.Entmax(1.3)), jax.Array)
    assert_type(whet.jax.attention(x, x, x, normalizer=whet.jax.Entmax(x), return_stats=True),
                tuple[jax.Array, whet.Stats])
    assert_type(whet.jax.linear_attention(x, x, x, is_causal=True), jax.Array)
    whet.jax.softmax(x, hold_beta="yes")  # type: ignore[call-overload]
