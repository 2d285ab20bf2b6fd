"""The data of bench.attention, attention in float64, and how far a contender may be from it.

- whet's output, on sampled rows of every head: the contract of its documentation. The largest error
  is at most twice that of a plain, unblocked evaluation in float32 (here NumPy's), plus
  4 2^-24 max|v|, plus 2 epsilon max|v| for skipped tiles. 16-bit: the same on the rounded inputs,
  and then rounding. A few ill-conditioned rows make the largest error, and in a sample whet's and
  NumPy's may fall on different ones: 2 2^-24 beta max|x| max|v| more for a row of logits x.
- The beta in its stats: within 1e-4 of the rule in float64. A target rule's beta is taken as it is,
  and the entropy it gives in float64 must be within 1e-5 + 64 2^-24 beta max|x| of the target, what
  rounded logits x may move it by.
- whet's gradients, one key head in full: twice the error of a plain float32 evaluation, plus
  16 2^-24 of the largest gradient.
- A framework: every element within 1e-4 max|v| (gradients: 1e-4 of the largest) of whet's. Their
  ln(p + 1e-9) alone moves beta by up to 2.54e-9 n. bf16: 2^-8 max|v|, since they round weights too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from bench.rows.reference import COEFFICIENTS, GATE
from bench.whet_c import SKIP_EPSILON

UNIT = 2.0**-24
BETA_BOUND = PEER_BOUND = 1e-4
SAMPLED_ROWS = 256
CHUNK_ROWS = 512  # rows whose weights the gradients hold at once
HIDDEN = -1e4  # as good as -inf to exp, and 0 times it is 0
NEAR = 2.5  # nats; see sharpened()
REACH = 32  # tokens; see falling()


@dataclass(frozen=True)
class Shape:
    queries: int
    keys: int
    size: int = 64  # of a key and of a value
    heads: int = 8
    key_heads: int = 8
    causal: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}/{self.key_heads}"
        length = f"{self.keys}" if self.queries == self.keys else f"{self.queries}×{self.keys}"
        return f"{heads} × {length}, d {self.size}" + (", causal" if self.causal else "")

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def visible(self) -> np.ndarray:
        """Keys each query sees; causal counts from the start."""
        every = np.full(self.queries, self.keys)
        return np.minimum(every, np.arange(self.queries) + 1) if self.causal else every

    @property
    def flops(self) -> float:
        """Of the two products, a multiplication and an addition each."""
        return 4.0 * self.heads * self.size * int(self.visible.sum())


@dataclass(frozen=True)
class Inputs:
    """q (1, H, N, D), k and v (1, K, M, D)."""

    shape: Shape
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v

    def in_bf16(self) -> Inputs:
        return Inputs(self.shape, *(array.astype(ml_dtypes.bfloat16) for array in self.arrays))


def plain(shape: Shape) -> Inputs:
    """Gaussian q, k, v: logits of width 1, an entropy of ln n - 1/2."""
    random = np.random.default_rng([shape.queries, shape.keys, shape.size, shape.heads])
    sizes = [(1, shape.heads, shape.queries, shape.size)]
    sizes += [(1, shape.key_heads, shape.keys, shape.size)] * 2
    return Inputs(shape, *(random.standard_normal(s, dtype=np.float32) for s in sizes))


def sharpened(shape: Shape) -> Inputs:
    """Queries as long as makes the rule act: rows of about 2.5 to 4 nats, where they have the keys.

    Over Gaussian keys the logits of a query are Gaussian, of a width that is the query's length
    over sqrt(D). n such logits of width s have an entropy of ln n - s^2 / 2, and at these widths
    about a nat more because the largest of finitely many is not that large.
    """
    inputs = plain(shape)
    width = np.sqrt(2 * np.maximum(np.log(shape.visible) - NEAR, 0.1))
    length = np.linalg.norm(inputs.q, axis=-1, keepdims=True)
    inputs.q[...] *= (math.sqrt(shape.size) * width)[:, None] / length
    return inputs


def falling(shape: Shape) -> Inputs:
    """Logits that fall as -(i - j)^2 / (2 REACH^2), plus Gaussian ones of width 1.

    Two of the D dimensions give the parabola: <(i, 1), (j, -j^2 / 2)> differs from -(i - j)^2 / 2
    by i^2 / 2, the same for a whole row. Places count from the middle to keep the terms small.
    """
    inputs = plain(shape)
    place = ((np.arange(shape.keys) - shape.keys / 2) / REACH).astype(np.float32)
    scale = math.sqrt(shape.size)
    inputs.q[..., 0], inputs.q[..., 1] = scale * place, scale
    inputs.k[..., 0], inputs.k[..., 1] = place, -(place**2) / 2
    return inputs


@dataclass(frozen=True)
class _Rows:
    """Rows of one head, in some precision: what their weights are made of."""

    y: np.ndarray  # logits less their maximum, hidden ones HIDDEN
    largest: np.ndarray  # visible logit of each row, without its sign

    @cached_property
    def p(self) -> np.ndarray:
        return self.weights(np.ones(len(self.y), self.y.dtype))

    def weights(self, beta: np.ndarray) -> np.ndarray:
        e = np.exp(beta[:, None] * self.y)
        return e / e.sum(axis=1, keepdims=True)

    def entropy(self, beta: np.ndarray) -> np.ndarray:
        by = beta[:, None] * self.y
        e = np.exp(by)
        z = e.sum(axis=1)
        return np.log(z) - np.einsum("rk,rk->r", e, by) / z

    def beta(self, rule: str) -> np.ndarray:
        ones = np.ones(len(self.y), self.y.dtype)
        if rule == "none":
            return ones
        entropy = self.entropy(ones)
        polynomial = np.polyval(COEFFICIENTS, entropy).astype(self.y.dtype)
        return np.where(entropy > GATE, np.maximum(ones, polynomial), ones)

    def slope(self, rule: str) -> np.ndarray:
        """d beta / d entropy, 0 on the constant side of a kink."""
        slope = np.polyval(np.polyder(COEFFICIENTS), self.entropy(np.ones(len(self.y))))
        return np.where(self.beta(rule) > 1, slope, 0).astype(self.y.dtype)


def _rows(inputs: Inputs, head: int, queries: np.ndarray, dtype: DTypeLike) -> _Rows:
    shape = inputs.shape
    q = inputs.q[0, head, queries].astype(dtype)
    k = inputs.k[0, head // shape.group].astype(dtype)
    x = (q @ k.T) * np.array(1 / math.sqrt(shape.size), dtype)
    hidden = np.arange(shape.keys) >= shape.visible[queries, None]
    largest = np.abs(np.where(hidden, 0, x)).max(axis=1)
    x[hidden] = -np.inf
    return _Rows(np.maximum(x - x.max(axis=1, keepdims=True), HIDDEN), largest)


class Reference:
    """float64 truth about sampled rows of every head."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        shape = inputs.shape
        random = np.random.default_rng(0)
        count = min(shape.queries, max(2, SAMPLED_ROWS // shape.heads))
        inner = random.choice(shape.queries, count, replace=False)
        inner[:2] = (0, shape.queries - 1)[: len(inner)]  # the first and the last always
        self._queries = np.sort(inner)
        self._heads = [_rows(inputs, h, self._queries, np.float64) for h in range(shape.heads)]
        self._largest = float(np.abs(inputs.v.astype(np.float32)).max())

    def whet_share(self, rule: str, out: np.ndarray, stats_beta: np.ndarray) -> float:
        """Error of whet's output and of the beta it reported, as a share of what is allowed."""
        shape = self._inputs.shape
        reported = stats_beta.reshape(shape.heads, shape.queries)[:, self._queries]
        target = rule.startswith("target-entropy:")
        errors, own, plain_error, size, shares = [], [], 0.0, 0.0, []
        for head, (rows, beta) in enumerate(zip(self._heads, reported, strict=True)):
            truth = self._output(rows, beta if target else rows.beta(rule), head)
            plain_rows = _rows(self._inputs, head, self._queries, np.float32)
            plain_beta = beta.astype(np.float32) if target else plain_rows.beta(rule)
            plain_out = self._output(plain_rows, plain_beta, head)
            found = out[0, head, self._queries].astype(np.float64)
            errors.append(np.abs(found - truth).max(axis=1))
            own.append(2 * UNIT * beta * rows.largest)
            plain_error = max(plain_error, float(np.abs(plain_out - truth).max()))
            size = max(size, float(np.abs(truth).max()))
            shares.append(_beta_share(rule, rows, beta))
        allowed = 2 * plain_error + (4 * UNIT + 2 * SKIP_EPSILON + np.array(own)) * self._largest
        if out.dtype == ml_dtypes.bfloat16:
            allowed += 2.0**-8 * size
        return max(float(np.max(np.array(errors) / allowed)), *shares)

    def _output(self, rows: _Rows, beta: np.ndarray, head: int) -> np.ndarray:
        v = self._inputs.v[0, head // self._inputs.shape.group].astype(rows.y.dtype)
        return rows.weights(beta) @ v


def _beta_share(rule: str, rows: _Rows, beta: np.ndarray) -> float:
    if not rule.startswith("target-entropy:"):
        return float(np.abs(beta - rows.beta(rule)).max() / BETA_BOUND)
    target = float(rule.split(":")[1])
    wide = rows.entropy(np.ones(len(beta))) > target  # elsewhere beta stays 1
    miss = np.where(wide, rows.entropy(beta) - target, beta - 1)
    return float(np.max(np.abs(miss) / (1e-5 + 64 * UNIT * beta * rows.largest)))


def gradients(
    inputs: Inputs, dout: np.ndarray, rule: str, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    """dq, dk, dv of the first key head and its query heads, evaluated plainly in `dtype`."""
    shape = inputs.shape
    scale = np.array(1 / math.sqrt(shape.size), dtype)
    k, v = inputs.k[0, 0].astype(dtype), inputs.v[0, 0].astype(dtype)
    dq = np.zeros((shape.group, shape.queries, shape.size), dtype)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for head in range(shape.group):
        for start in range(0, shape.queries, CHUNK_ROWS):
            queries = np.arange(start, min(start + CHUNK_ROWS, shape.queries))
            rows = _rows(inputs, head, queries, dtype)
            above = dout[0, head, queries].astype(dtype)
            w, dx = _weights_and_dlogits(rows, rule, above @ v.T)
            dq[head, queries] = scale * (dx @ k)
            dk += scale * (dx.T @ inputs.q[0, head, queries].astype(dtype))
            dv += w.T @ above
    return {"dq": dq, "dk": dk, "dv": dv}


def _weights_and_dlogits(rows: _Rows, rule: str, dw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    beta = rows.beta(rule)
    w = rows.weights(beta)
    s = w * (dw - np.einsum("rk,rk->r", w, dw)[:, None])
    dx = beta[:, None] * s
    if rule != "none":
        dbeta = np.einsum("rk,rk->r", rows.y, s) * rows.slope(rule)
        mean_y = np.einsum("rk,rk->r", rows.p, rows.y)[:, None]
        dx -= dbeta[:, None] * rows.p * (rows.y - mean_y)
    return w, dx


def whet_gradient_share(
    inputs: Inputs, dout: np.ndarray, rule: str, found: dict[str, np.ndarray]
) -> float:
    """Error of whet's gradients of the first key head as a share of what is allowed."""
    truth = gradients(inputs, dout, rule, np.float64)
    plainly = gradients(inputs, dout, rule, np.float32)
    heads = {"dq": inputs.shape.group, "dk": 1, "dv": 1}
    shares = []
    for name, exact in truth.items():
        ours = found[name][0, : heads[name]].reshape(exact.shape)
        allowed = 2 * np.abs(plainly[name] - exact).max() + 16 * UNIT * np.abs(exact).max()
        shares.append(float(np.abs(ours - exact).max() / allowed))
    return max(shares)


def peer_share(found: np.ndarray, ours: np.ndarray, largest: float) -> float:
    """Distance of a framework's array from whet's as a share of what is allowed."""
    distance = np.abs(np.asarray(found, np.float32) - np.asarray(ours, np.float32))
    bound = 2.0**-8 if ours.dtype == ml_dtypes.bfloat16 else PEER_BOUND
    return float(distance.max() / (bound * largest))
