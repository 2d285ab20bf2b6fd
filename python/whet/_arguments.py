"""What every function does with its arguments before the extension sees them. No array is copied here, but for
lists and integers, which have to become floats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# One number for both sides, or (before, after); None is no limit.
Window = int | tuple[int | None, int | None] | None


def call(function: Callable[..., None], names: Mapping[str, str], *arguments: Any, **options: Any) -> None:
    """Calls into the extension; its errors come out with the names that arguments have here."""
    try:
        function(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    # A name is at the start, or is what an argument is compared with.
    pattern = rf"(^|\bof |\boverlaps )({'|'.join(names)})\b"
    text = str(error)
    return type(error)(re.sub(pattern, lambda match: match[1] + names[match[2]], text) if names else text)


def array(values: Any, name: str) -> np.ndarray:
    """np.asarray whose errors name the argument. Masked arrays are refused."""
    if type(values) is np.ndarray:
        return values
    check_unmasked(values, name)
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    except RuntimeError as error:  # a tensor that won't be an array
        raise TypeError(f"{name}: {error}") from None


def check_unmasked(values: Any, name: str) -> None:
    """A TypeError for a masked array, alone or in a list: np.asarray would drop its mask."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name}: is a masked array, must be a plain one: give np.ma.getdata({name}), and say which "
                        "keys are visible with where or mask")
    if isinstance(values, (list, tuple)):
        for one in values:
            check_unmasked(one, name)


def floats(values: Any, name: str) -> np.ndarray:
    """An array; integers and booleans become float64, as in SciPy."""
    values = array(values, name)
    return values.astype(np.float64) if values.dtype.kind in "iub" else values


def integers(values: Any, name: str) -> Any:
    """A contiguous array of int64, or None."""
    if values is None:
        return None
    values = array(values, name)
    if values.dtype.kind not in "iu" and values.size > 0:
        raise TypeError(f"{name}: its dtype is {values.dtype}, must be integers")
    return np.ascontiguousarray(values, dtype=np.int64)


def integer(value: Any, name: str) -> int:
    if type(value) is int:
        return value
    try:
        return value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name}: is a {type(value).__name__}, must be an integer") from None


def count(value: Any, name: str) -> int:
    value = integer(value, name)
    if not 0 <= value < 2**31:
        raise ValueError(f"{name}: is {value}, must be 0 or more and below 2^31")
    return value


def window_sides(window: Any, name: str) -> tuple[int, int]:
    """How far a window reaches to either side: one number for both, or a pair; -1, as for None, is no limit."""
    before, after = window if isinstance(window, (tuple, list)) and len(window) == 2 else (window, window)
    return -1 if before is None else integer(before, name), -1 if after is None else integer(after, name)


def flag(value: Any, name: str) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: is a {type(value).__name__}, must be True or False")


def booleans(values: Any, axes: int, name: str) -> np.ndarray | None:
    """A mask with this many axes, or None."""
    if values is None:
        return None
    values = array(values, name)
    if values.dtype.kind != "b":
        raise TypeError(f"{name}: its dtype is {values.dtype}, must be bool")
    return with_axes(values, axes, name)


def with_axes(values: np.ndarray, axes: int, name: str) -> np.ndarray:
    """The same array with axes of size 1 in front, as broadcasting adds them."""
    if values.ndim == axes:
        return values
    if values.ndim > axes:
        raise ValueError(f"{name}: has {values.ndim} axes, must have at most {axes}")
    return values[(None,) * (axes - values.ndim)]


def four_axes(**arrays: np.ndarray) -> list[np.ndarray]:
    """Views of these arrays with the axes that all of them lack in front."""
    if all(isinstance(given, np.ndarray) and given.ndim == 4 for given in arrays.values()):
        return list(arrays.values())
    (first, leader), *_ = arrays.items()
    for name, given in arrays.items():
        if not isinstance(given, np.ndarray):
            raise TypeError(f"{name}: is a {type(given).__name__}, must be a NumPy array")
        if not 2 <= given.ndim <= 4:
            raise ValueError(f"{name}: has {given.ndim} axes, must have 2 to 4")
        if given.ndim != leader.ndim:
            raise ValueError(f"{name}: has {given.ndim} axes, must have as many as {first}, {leader.ndim}")
    return [with_axes(given, 4, name) for name, given in arrays.items()]
