"""What forward mode must know of a normalizer, by its name."""

from __future__ import annotations


def ignores_shifts(normalizer: str) -> bool:
    """True if adding a number to all logits of a row changes no weight: they may be measured from their maximum."""
    return normalizer not in ("sigmoid", "relu", "softpick")


def ignores_sinks(normalizer: str) -> bool:
    """True if the weight of a key doesn't depend on other keys, so that a sink changes nothing."""
    return normalizer in ("sigmoid", "relu")


def is_symmetric(normalizer: str) -> bool:
    """True if the derivatives of the weights with respect to the logits are a symmetric matrix."""
    return normalizer != "softpick"
