"""The normalizers in float64, as docs/normalizers.md defines them, and their gradients.

Rows are logits s (rows, keys). whet's weights may be off by 1e-6 (3 max w + 2 (1 + |s|) w), which its
tests assert too; its gradients by 1e-5 of the largest |dL/dw| of a row. The entmax package is in plain float32
and, for its bisection, steps until float32 ends: 1e-4 of the largest weight or gradient.
"""

from __future__ import annotations

import numpy as np

ENTMAX = ("sparsemax", "entmax15", "entmax:1.5", "entmax:1.3")
OTHERS = ("top-k:32", "hard", "sigmoid", "relu", "softpick")
NORMALIZERS = (*ENTMAX, *OTHERS)
WHET_GRADIENT_BOUND, PEER_BOUND = 1e-5, 1e-4
_BISECTIONS = 60


def _alpha(name: str) -> float:
    return {"sparsemax": 2.0, "entmax15": 1.5}.get(name) or float(name.split(":")[1])


def is_entmax(name: str) -> bool:
    return name in ("sparsemax", "entmax15") or name.startswith("entmax:")


def _powers(s: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights of entmax, and their derivative dw/ds at a fixed threshold."""
    power = 1 / (alpha - 1)
    scaled = (alpha - 1) * (s - s.max(axis=-1, keepdims=True))
    low = np.full((*s.shape[:-1], 1), -1.0)
    high = np.zeros_like(low)
    near = np.maximum(scaled + 1, 0)  # v at the lowest threshold
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = (np.maximum(near - 1 - middle, 0) ** power).sum(axis=-1, keepdims=True)
        low, high = np.where(total > 1, middle, low), np.where(total > 1, high, middle)
    v = np.maximum(scaled - low, 0)
    w = v**power
    slope = np.where(v > 0, v, 1) ** (power - 1) * (v > 0)
    return w / w.sum(axis=-1, keepdims=True), slope


def _softmax(s: np.ndarray, stays: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max(axis=-1, keepdims=True)) * stays
    return e / e.sum(axis=-1, keepdims=True)


def _kth_largest(s: np.ndarray, k: int) -> np.ndarray:
    k = min(k, s.shape[-1])
    return np.partition(s, -k, axis=-1)[..., -k, None]


def weights(name: str, s: np.ndarray) -> np.ndarray:
    s = s.astype(np.float64)
    if is_entmax(name):
        return _powers(s, _alpha(name))[0]
    if name == "softmax":
        return _softmax(s, np.ones_like(s))
    if name.startswith("top-k:"):
        return _softmax(s, s >= _kth_largest(s, int(name.split(":")[1])))
    if name == "hard":
        return _softmax(s, s == s.max(axis=-1, keepdims=True))
    keys = s.shape[-1]
    if name == "sigmoid":
        return 1 / (1 + keys * np.exp(-s))
    if name == "relu":
        return np.maximum(s, 0) / keys
    if name == "softpick":
        excess = np.expm1(s)
        z = np.abs(excess).sum(axis=-1, keepdims=True)
        return np.maximum(excess, 0) / np.where(z == 0, 1, z)
    raise ValueError(f"{name} has no definition here")


def gradient(name: str, s: np.ndarray, dw: np.ndarray) -> np.ndarray:
    """dL/ds from dL/dw."""
    s, dw = s.astype(np.float64), dw.astype(np.float64)
    w = weights(name, s)
    if is_entmax(name):
        slope = _powers(s, _alpha(name))[1]
        mean = (slope * dw).sum(axis=-1, keepdims=True) / slope.sum(axis=-1, keepdims=True)
        return slope * (dw - mean)
    if name == "softmax" or name.startswith("top-k:"):
        return w * (dw - (w * dw).sum(axis=-1, keepdims=True))
    if name == "hard":
        return np.zeros_like(s)
    if name == "sigmoid":
        return w * (1 - w) * dw
    if name == "relu":
        return (s > 0) * dw / s.shape[-1]
    if name == "softpick":
        z = np.abs(np.expm1(s)).sum(axis=-1, keepdims=True)
        return np.exp(s) / z * ((s > 0) * dw - np.sign(s) * (w * dw).sum(axis=-1, keepdims=True))
    raise ValueError(f"{name} has no definition here")


def whet_share(s: np.ndarray, found: np.ndarray, truth: np.ndarray) -> float:
    """Error of whet's weights as a share of what is allowed."""
    largest = truth.max(axis=-1, keepdims=True)
    top = s.astype(np.float64).max(axis=-1, keepdims=True)
    allowed = 1e-6 * (3 * largest + 2 * (1 + np.abs(top) + np.abs(s - top)) * truth) + 1e-30
    return float(np.max(np.abs(found - truth) / allowed))


def peer_share(found: np.ndarray, truth: np.ndarray) -> float:
    largest = np.abs(truth).max(axis=-1, keepdims=True)
    return float(np.max(np.abs(found - truth) / (PEER_BOUND * largest)))


def gradient_share(found: np.ndarray, truth: np.ndarray, dw: np.ndarray) -> float:
    largest = np.abs(dw).max(axis=-1, keepdims=True)
    return float(np.max(np.abs(found - truth) / (WHET_GRADIENT_BOUND * largest)))
