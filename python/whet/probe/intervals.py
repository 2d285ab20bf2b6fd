"""Means with their uncertainty: 95 % intervals by Student's t, since prompts and pieces of text are few."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """An estimate and its 95 % interval; low and high are NaN where one sample says nothing of the spread."""

    mean: float
    low: float
    high: float


def mean_interval(samples: np.ndarray) -> Interval:
    """The mean of independent samples. The interval takes them for normal: rough for fewer than five."""
    samples = np.asarray(samples, np.float64)
    mean = float(samples.mean()) if samples.size else math.nan
    half = t_quantile(samples.size - 1) * float(standard_error(samples, axis=0)) if samples.size > 1 else math.nan
    return Interval(mean, mean - half, mean + half)


def standard_error(samples: np.ndarray, axis: int) -> np.ndarray:
    """Of the mean along an axis; NaN for a single sample."""
    count = samples.shape[axis]
    if count < 2:
        return np.full(np.delete(samples.shape, axis), np.nan)
    return samples.std(axis=axis, ddof=1) / math.sqrt(count)


def share_interval(hits: int, trials: int) -> Interval:
    """The share of hits with Wilson's interval, which stays inside 0 to 1 and says something at both ends."""
    if trials == 0:
        return Interval(math.nan, math.nan, math.nan)
    z, share = 1.959963984540054, hits / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


class Line(NamedTuple):
    """Least squares: slopes and their 95 % intervals, one per column of y."""

    slope: np.ndarray
    low: np.ndarray
    high: np.ndarray


def fit_line(x: np.ndarray, y: np.ndarray) -> Line:
    """Slopes of y (samples, ...) against x (samples).

    The interval is that of ordinary least squares, with samples - 2 degrees of freedom: it takes the line for true and
    the residuals for independent and of one size. Where entropy bends against ln n the residuals are not noise alone,
    and the interval is wider than repeated prompts would show. NaN with fewer than two different x; interval NaN with
    fewer than three samples.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    nothing = np.full(y.shape[1:], np.nan)
    if np.unique(x).size < 2:
        return Line(nothing, nothing, nothing)
    centred = x - x.mean()
    scatter = float(centred @ centred)
    slope = np.tensordot(centred, y, axes=(0, 0)) / scatter
    if x.size < 3:
        return Line(slope, nothing, nothing)
    fitted = y.mean(axis=0) + np.multiply.outer(centred, slope)
    variance = ((y - fitted) ** 2).sum(axis=0) / (x.size - 2)
    half = t_quantile(x.size - 2) * np.sqrt(variance / scatter)
    return Line(slope, slope - half, slope + half)


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that a Student variable of this many degrees of freedom stays within, to both sides.

    By bisection on the distribution, to 1e-12 relative.

    >>> from whet.probe.intervals import t_quantile
    >>> round(t_quantile(1), 3), round(t_quantile(10), 3)
    (12.706, 2.228)
    """
    if freedom < 1:
        return math.nan
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| <= t), by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2 == 1
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def p_value(t: float, freedom: int) -> float:
    """How likely a Student variable of this many degrees of freedom is as far from 0 as t, to either side."""
    return max(0.0, 1 - _within(abs(t), freedom)) if freedom >= 1 and math.isfinite(t) else math.nan
