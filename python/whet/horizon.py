"""How far a head can stay sharp: what the spread of its logits allows, whatever the logits are.

The spread of a row is its largest minus its smallest visible logit. A softmax over n keys of spread d can give no key
more than 1 / (1 + (n - 1) e^-d): with more keys every weight must fall.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet._arguments import booleans, floats, with_axes


def spread(x: Any, axis: int = -1, where: Any = None) -> np.ndarray:
    """Largest minus smallest visible logit along an axis, as float64; 0 for a row that sees nothing.

    `where` is boolean and broadcasts to x; where it is False, and where x is -inf, a key isn't visible.

    >>> import whet
    >>> float(whet.spread([1.0, -2.0, 3.5]))
    5.5
    """
    x = with_axes(floats(x, "x"), 1, "x") if np.ndim(x) == 0 else floats(x, "x")
    x = x.astype(np.float64, copy=False)
    mask = booleans(where, x.ndim, "where")
    visible = x > -np.inf if mask is None else np.logical_and(x != -np.inf, mask)
    highest = np.max(x, axis=axis, where=visible | np.isnan(x), initial=-np.inf)
    lowest = np.min(x, axis=axis, where=visible | np.isnan(x), initial=np.inf)
    return np.where(highest < lowest, 0.0, highest - lowest)


def horizon(spread: Any, weight: Any) -> np.ndarray:
    """The number of keys beyond which a head of this spread can give no key more than this weight.

    1 + e^spread (1 / weight - 1). Shapes broadcast; spread >= 0, 0 < weight <= 1, else ValueError. With an inverse
    temperature beta the spread is beta times as large.

    >>> import whet
    >>> float(whet.horizon(spread=6.0, weight=0.5).round(1))
    404.4
    """
    spread, weight = _doubles(spread, "spread"), _doubles(weight, "weight")
    if not np.all(spread >= 0):
        raise ValueError("spread: must be 0 or more")
    if not np.all((weight > 0) & (weight <= 1)):
        raise ValueError("weight: must be above 0 and at most 1")
    # inf is a right answer: no number of keys is too many.
    with np.errstate(over="ignore", invalid="ignore"):
        return 1 + np.where(weight == 1, 0.0, np.exp(spread) * (1 / weight - 1))


def largest_weight(keys: Any, spread: Any) -> np.ndarray:
    """The largest weight that a softmax over this many keys of this spread can give any of them.

    1 / (1 + (keys - 1) e^-spread), the other way round of horizon. Shapes broadcast; keys >= 1, spread >= 0.
    Infinitely many keys leave 0, unless the spread is infinite too: 1.

    >>> import whet
    >>> float(whet.largest_weight(keys=1000, spread=6.0).round(3))
    0.288
    """
    keys, spread = _doubles(keys, "keys"), _doubles(spread, "spread")
    if not np.all(keys >= 1):
        raise ValueError("keys: must be 1 or more")
    if not np.all(spread >= 0):
        raise ValueError("spread: must be 0 or more")
    with np.errstate(invalid="ignore"):  # infinity times 0, where it isn't taken
        finite = 1 / (1 + (keys - 1) * np.exp(-spread))
    return np.where(np.isinf(keys), np.where(np.isinf(spread), 1.0, 0.0), finite)[()]


def _doubles(values: Any, name: str) -> np.ndarray:
    return floats(values, name).astype(np.float64, copy=False)
