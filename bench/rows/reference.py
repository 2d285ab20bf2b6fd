"""The data of bench.rows, the rule in float64, and how far a contender may be from it.

All bounds are relative to the float64 weight w_i of a key, with y = x - max(x), n keys per row:

- whet: the contract of its documentation, 1e-6 (1 + |beta y_i|) at the beta in its stats.
- A framework in plain float32: 1e-6 (1 + 2 max|beta x|) for rounded logits and n 2^-24 / 8 for the
  sum (eight lanes; the one that holds a peak drops every term below half a unit of it).
- The same with the rule, whose published code takes ln(p + 1e-9). That lowers H by at most
  sum_i p_i 1e-9 / p_i = n 1e-9, and the sum of H rounds by about 4 sqrt(n) 2^-24 ln n: dH in all.
  The polynomial is at most 2.54 steep where it exceeds 1, and d ln w_i / d beta =
  y_i - sum_j w_j y_j, so a weight may move by 2.54 dH |y_i - sum_j w_j y_j| more.

Gradients are absolute: a bound times (1 + |beta y_i|) beta max|dout|; 1e-6 is whet's documented
bound, 1e-4 covers the frameworks' sums and their ln(p + 1e-9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)  # highest power first
GATE = 0.5
STEEPEST = 2.54
WHET_GRADIENT_BOUND, PEER_GRADIENT_BOUND = 1e-6, 1e-4
TINY = 1e-30  # whet's weights below are only bound to within this


def sharp_rows(rows: int, keys: int) -> np.ndarray:
    """Gaussian logits whose width differs from row to row so that beta is mostly above 1.2.

    n Gaussian logits of width s have an entropy of ln n - s^2 / 2, and about one nat more at these
    widths because the largest of finitely many is not that large.
    """
    random = np.random.default_rng(rows * keys)
    entropy = np.linspace(1.2, 3.4, rows + 2)[1:-1, None]
    width = np.sqrt(2 * (math.log(keys) - entropy))
    return (random.standard_normal((rows, keys)) * width).astype(np.float32)


def peaked_rows(rows: int, keys: int) -> np.ndarray:
    """One key a row holds nearly all the weight: the rule leaves beta = 1."""
    random = np.random.default_rng(rows * keys + 1)
    x = random.standard_normal((rows, keys)).astype(np.float32)
    x[np.arange(rows), random.integers(keys, size=rows)] = math.log(keys) + 6
    return x


@dataclass(frozen=True)
class Reference:
    """float64 truth about the rows of x."""

    x: np.ndarray

    @cached_property
    def y(self) -> np.ndarray:
        x = self.x.astype(np.float64)
        return x - x.max(axis=1, keepdims=True)

    @cached_property
    def entropy(self) -> np.ndarray:
        return self.entropy_at(np.ones(len(self.x)))

    @cached_property
    def beta(self) -> np.ndarray:
        """Of the paper's rule."""
        polynomial = np.polyval(COEFFICIENTS, self.entropy)
        return np.where(self.entropy > GATE, np.maximum(1, polynomial), 1)

    @cached_property
    def slope(self) -> np.ndarray:
        """d beta / d entropy of the paper's rule; 0 on the constant side of a kink."""
        slope = np.polyval(np.polyder(COEFFICIENTS), self.entropy)
        return np.where(self.beta > 1, slope, 0)

    def weights(self, beta: np.ndarray) -> np.ndarray:
        e = np.exp(beta[:, None] * self.y)
        return e / e.sum(axis=1, keepdims=True)

    def entropy_at(self, beta: np.ndarray) -> np.ndarray:
        by = beta[:, None] * self.y
        e = np.exp(by)
        z = e.sum(axis=1)
        return np.log(z) - np.einsum("rk,rk->r", e, by) / z

    def gradient(self, dout: np.ndarray) -> np.ndarray:
        """Of sum(dout * softmax(beta x)) with respect to x, through the paper's rule."""
        p, w = self.weights(np.ones(len(self.x))), self.weights(self.beta)
        mean = np.einsum("rk,rk->r", w, dout)[:, None]
        s = w * (dout - mean)
        through = np.einsum("rk,rk->r", self.y, s) * self.slope
        mean_y = np.einsum("rk,rk->r", p, self.y)[:, None]
        return self.beta[:, None] * s - through[:, None] * p * (self.y - mean_y)


def _share(found: np.ndarray, truth: np.ndarray, tolerance: np.ndarray) -> float:
    return float(np.max(np.abs(found - truth) / tolerance))


def whet_share(reference: Reference, rule: str, out: np.ndarray, beta: np.ndarray) -> float:
    """Error of whet's weights and of the beta it reported, as a share of what is allowed."""
    truth = reference.weights(beta)
    relative = 1e-6 * (1 + np.abs(beta[:, None] * reference.y))
    weights = _share(out, truth, np.where(truth >= TINY, relative * truth, TINY))
    sums = float(np.max(np.abs(out.sum(axis=1, dtype=np.float64) - 1)) / 1e-6)
    return max(weights, sums, _beta_share(reference, rule, beta))


def _beta_share(reference: Reference, rule: str, beta: np.ndarray) -> float:
    if rule.startswith("target-entropy:"):
        target = float(rule.split(":")[1])
        wide = reference.entropy > target  # elsewhere beta is 1, and the entropy below the target
        residual = np.where(wide, reference.entropy_at(beta) - target, beta - 1)
        return float(np.max(np.abs(residual)) / 2e-6)
    truth = reference.beta if rule == "paper" else np.ones_like(beta)
    entropy = 1e-6 * max(1.0, math.log(reference.x.shape[1]))
    return _share(beta, truth, 2.0**-22 * truth + 3 * entropy)


def peer_share(reference: Reference, adaptive: bool, out: np.ndarray) -> float:
    """The same for a framework's plain softmax or its paper rule."""
    keys = reference.x.shape[1]
    beta = reference.beta if adaptive else np.ones(len(reference.x))
    truth = reference.weights(beta)
    largest = np.abs(beta[:, None] * reference.x).max(axis=1, keepdims=True)
    relative = 1e-6 * (1 + 2 * largest) + keys * 2.0**-24 / 8
    if adaptive:
        entropy = keys * 1e-9 + 4 * math.sqrt(keys) * 2.0**-24 * math.log(keys)
        mean = np.einsum("rk,rk->r", truth, reference.y)[:, None]
        relative = relative + STEEPEST * entropy * np.abs(reference.y - mean)
    return _share(out, truth, relative * truth + TINY)


def gradient_share(
    reference: Reference, dout: np.ndarray, truth: np.ndarray, din: np.ndarray, bound: float
) -> float:
    """Error of a gradient as a share of `bound` (1 + |beta y|) beta max|dout|."""
    beta = reference.beta[:, None]
    largest = np.abs(dout).max(axis=1, keepdims=True)
    tolerance = bound * (1 + np.abs(beta * reference.y)) * beta * largest
    return _share(din, truth, tolerance)
