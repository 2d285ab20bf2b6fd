"""Variants by name, as the command line has them."""

from __future__ import annotations

import re
from typing import Any

import whet
from whet.clrs.errors import ClrsError
from whet.clrs.model import LEARNED, Sharpening


def variant(name: str, layers: tuple[int, ...] | None = None, heads: tuple[int, ...] | None = None) -> dict[str, Any]:
    """The fields of a recipe that a variant sets: softmax, a rule, a normalizer, or learned:KIND."""
    if name.startswith("learned:"):
        kind = name.removeprefix("learned:")
        if kind not in LEARNED[1:]:
            raise ClrsError(f"{name}: no length scale is called {kind!r}; there are {', '.join(LEARNED[1:])}")
        return {"learned": kind}
    return {"sharpening": sharpening(name, layers, heads)}


def sharpening(name: str, layers: tuple[int, ...] | None = None, heads: tuple[int, ...] | None = None) -> Sharpening:
    """A rule or a normalizer by name."""
    if name in ("softmax", "none"):
        return Sharpening()
    try:
        return Sharpening(whet.rule(name).name, "softmax", layers, heads)
    except (TypeError, ValueError) as error:
        known = error
    try:
        whet.softmax([0.0], normalizer=name)
    except (TypeError, ValueError):
        raise ClrsError(f"{name}: neither a normalizer nor a rule ({known})") from None
    return Sharpening("none", name, layers, heads)


def file_name(name: str) -> str:
    """A variant's name as part of a path."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
