"""Statistics of rows, and what of them backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whet import _core


class Stats(NamedTuple):
    """What a row was like, and what its rule made of it: twelve float64 arrays, one element per row.

    The first seven describe the row at inverse temperature 1; ``beta`` is what the rule chose, the last four
    are of the weights at that beta: their entropy, the largest, ``support``, how many visible keys have weight, and
    ``threshold``, the logit below which keys have none (-inf where all have; a key at it has weight with top-k and hard
    only). Entropies are in nats. A row without visible keys has 0 everywhere, but ``max``, ``log_sum_exp`` and
    ``threshold`` -inf and ``beta`` 1.

    >>> import whet
    >>> _, stats = whet.softmax([0.0, 0.0, 0.0, 5.0], rule="fixed:2", return_stats=True)
    >>> print(int(stats.count), float(stats.spread), float(stats.beta), f"{float(stats.sharp_peak):.4f}")
    4 5.0 2.0 0.9999
    >>> _, stats = whet.softmax([2.0, 1.5, 0.1, -1.0], normalizer="sparsemax", return_stats=True)
    >>> print(int(stats.support), float(stats.threshold))
    2 1.25
    """

    count: Any
    max: Any
    log_sum_exp: Any
    entropy: Any
    varentropy: Any
    spread: Any
    peak: Any
    beta: Any
    sharp_entropy: Any
    sharp_peak: Any
    support: Any
    threshold: Any


def stats_buffer(rows: tuple[int, ...]) -> np.ndarray:
    """A buffer for the stats of these rows, as the extension writes them."""
    return np.empty((*rows, len(Stats._fields)))


def stats_of(buffer: np.ndarray) -> Stats:
    """Names for the columns of a buffer; nothing is copied."""
    return Stats(*(buffer[..., i] for i in range(len(Stats._fields))))


def saved_buffer(rows: tuple[int, ...], like: np.ndarray, rule: str | Sequence[str] | None,
                 normalizer: str) -> np.ndarray:
    """A buffer for what backward would otherwise find again, in the type of the arithmetic."""
    dtype = np.float64 if like.dtype == np.float64 else np.float32
    return np.empty((*rows, _core.saved_size(rule, normalizer)), dtype)
