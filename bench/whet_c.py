"""whet's C ABI (include/whet/c_api.h) on NumPy arrays, through ctypes.

Every array argument is used in place through its address and strides, never copied.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

STATS_FIELDS = (
    "count", "max", "log_sum_exp", "entropy", "varentropy",
    "spread", "peak", "beta", "sharp_entropy", "sharp_peak",
)  # fmt: skip

ROW_STATE = np.dtype(
    {
        "names": ("count", "min", "max", "z", "t", "u"),
        "formats": (np.int64, *[np.float64] * 5),
    }
)

_DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3, "bool": 4}  # bf16: ml_dtypes
SKIP_EPSILON = 2.0**-24  # whet's default


class WhetError(Exception):
    """The text of whet_last_error()."""


class _View(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("dims", c_int32),
        ("sizes", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
    ]


class _Rule(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("terms", c_int32), ("values", c_double * 12)]


class _Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rule", _Rule),
        ("axis", c_int32),
        ("threads", c_int32),
        ("hold_beta", c_int32),
        ("reserved", c_int32),
        ("mask", POINTER(_View)),
        ("lengths", POINTER(c_int64)),
        ("stats", POINTER(c_double)),
    ]


class _AttentionOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rule", _Rule),
        ("head_rules", POINTER(_Rule)),
        ("scale", c_double),
        ("softcap", c_double),
        ("skip_epsilon", c_double),
        ("query_scale", POINTER(_View)),
        ("bias", POINTER(_View)),
        ("mask", POINTER(_View)),
        ("sinks", POINTER(_View)),
        ("causal", c_int32),
        ("align_end", c_int32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("lengths", POINTER(c_int64)),
        ("lengths_count", c_size_t),
        ("query_starts", POINTER(c_int64)),
        ("key_starts", POINTER(c_int64)),
        ("starts_count", c_size_t),
        ("stats", c_void_p),
        ("weight_rows", POINTER(c_int64)),
        ("weight_rows_count", c_size_t),
        ("weights", POINTER(_View)),
        ("top_k", c_int64),
        ("top_keys", c_void_p),
        ("top_weights", c_void_p),
        ("column_sums", c_void_p),
        ("tile_counts", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("threads", c_int32),
        ("hold_beta", c_int32),
    ]


class _AttentionGradients(ctypes.Structure):
    _fields_ = [(name, POINTER(_View)) for name in ("dq", "dk", "dv", "dbias", "dsinks")]


def _view(array: np.ndarray) -> _View:
    if array.dtype.name not in _DTYPES:
        raise WhetError(f"dtype is {array.dtype}; it may be one of {', '.join(_DTYPES)}")
    indices = c_int64 * array.ndim
    strides = (stride // array.itemsize for stride in array.strides)
    return _View(
        array.ctypes.data,
        _DTYPES[array.dtype.name],
        array.ndim,
        indices(*array.shape),
        indices(*strides),
    )


def _address(array: np.ndarray, dtype: DTypeLike, name: str) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise WhetError(f"{name} must be a contiguous array of {np.dtype(dtype)}")
    return array.ctypes.data


def _gradients(arrays: dict[str, np.ndarray]) -> _AttentionGradients:
    return _AttentionGradients(**{n: ctypes.pointer(_view(a)) for n, a in arrays.items()})


class Call:
    """A C call with its arguments built once, so that a repeated call costs a microsecond or so."""

    def __init__(
        self, library: Whet, function: Callable[..., int], arguments: tuple, arrays: tuple
    ) -> None:
        self._library, self._function, self._arguments = library, function, arguments
        self._arrays = arrays  # the addresses in `arguments` stay valid as long as these live

    def __call__(self) -> None:
        if self._function(*self._arguments):
            raise WhetError(self._library.last_error())


class Whet:
    """libwhet. Its kernels return a Call; it runs when it is called.

    Keyword options of softmax, sharpen, backward and states: rule (a name), axis, threads,
    hold_beta, mask, lengths, stats; of attention and attention_backward: rule, causal,
    skip_epsilon, threads, hold_beta, stats, tile_counts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._c = ctypes.CDLL(os.fspath(path))
        for name in ("version", "last_error", "target", "targets"):
            getattr(self._c, f"whet_{name}").restype = c_char_p

    def version(self) -> str:
        return self._c.whet_version().decode()

    def last_error(self) -> str:
        return self._c.whet_last_error().decode()

    def target(self) -> str:
        name = self._c.whet_target()
        if name is None:
            raise WhetError(self.last_error())
        return name.decode()

    def targets(self) -> list[str]:
        return self._c.whet_targets().decode().split()

    def force_target(self, name: str) -> None:
        self._check(self._c.whet_force_target(name.encode()))

    def threads(self) -> int:
        return self._c.whet_threads()

    def set_threads(self, count: int) -> None:
        self._check(self._c.whet_set_threads(c_int(count)))

    def softmax(self, x: np.ndarray, out: np.ndarray, **options: Any) -> Call:
        return self._call(self._c.whet_softmax, (x, out), options)

    def sharpen(self, p: np.ndarray, out: np.ndarray, **options: Any) -> Call:
        return self._call(self._c.whet_sharpen, (p, out), options)

    def backward(self, x: np.ndarray, dout: np.ndarray, din: np.ndarray, **options: Any) -> Call:
        return self._call(self._c.whet_softmax_backward, (x, dout, din), options)

    def states(self, x: np.ndarray, out: np.ndarray, **options: Any) -> Call:
        """`out`: one ROW_STATE a row."""
        settings = self._options(**options)
        arguments = (byref(_view(x)), c_void_p(_address(out, ROW_STATE, "out")), byref(settings))
        return Call(self, self._c.whet_states, arguments, (x, out, options))

    def attention(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, **options: Any
    ) -> Call:
        arrays = (q, k, v, out)
        settings = self._attention_options(**options)
        arguments = (*(byref(_view(array)) for array in arrays), byref(settings))
        return Call(self, self._c.whet_attention, arguments, (arrays, options))

    def attention_workspace(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
    ) -> int:
        """Bytes that one such call allocates."""
        settings, size = self._attention_options(**options), c_size_t()
        views = (byref(_view(array)) for array in (q, k, v))
        self._check(self._c.whet_attention_workspace(*views, byref(settings), byref(size)))
        return size.value

    def attention_backward(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        dout: np.ndarray,
        gradients: dict[str, np.ndarray],
        **options: Any,
    ) -> Call:
        """`gradients`: what is wanted by name (dq, dk, dv), and where it goes."""
        arrays = (q, k, v, dout)
        settings = self._attention_options(**options)
        views = (byref(_view(array)) for array in arrays)
        arguments = (*views, byref(_gradients(gradients)), byref(settings))
        keep = (arrays, gradients, options)
        return Call(self, self._c.whet_attention_backward, arguments, keep)

    def attention_backward_workspace(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        gradients: dict[str, np.ndarray],
        **options: Any,
    ) -> int:
        settings, size = self._attention_options(**options), c_size_t()
        views = (byref(_view(array)) for array in (q, k, v))
        arguments = (*views, byref(_gradients(gradients)), byref(settings), byref(size))
        self._check(self._c.whet_attention_backward_workspace(*arguments))
        return size.value

    def _call(self, function: Callable[..., int], arrays: tuple, options: dict) -> Call:
        views = (byref(_view(array)) for array in arrays)
        settings = byref(self._options(**options))
        return Call(self, function, (*views, settings), (arrays, options))

    def _options(
        self,
        rule: str = "none",
        axis: int = -1,
        threads: int = 0,
        hold_beta: bool = False,
        mask: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        stats: np.ndarray | None = None,
    ) -> _Options:
        options = _Options(ctypes.sizeof(_Options), _Rule(), axis, threads, hold_beta)
        self._check(self._c.whet_rule_parse(rule.encode(), byref(options.rule)))
        if mask is not None:
            options.mask = ctypes.pointer(_view(mask))
        if lengths is not None:
            address = _address(lengths, np.int64, "lengths")
            options.lengths = ctypes.cast(address, POINTER(c_int64))
        if stats is not None:
            address = _address(stats, np.float64, "stats")
            options.stats = ctypes.cast(address, POINTER(c_double))
        return options

    def _attention_options(
        self,
        rule: str = "none",
        causal: bool = False,
        skip_epsilon: float = SKIP_EPSILON,
        threads: int = 0,
        hold_beta: bool = False,
        stats: np.ndarray | None = None,
        tile_counts: np.ndarray | None = None,
    ) -> _AttentionOptions:
        options = _AttentionOptions(
            struct_size=ctypes.sizeof(_AttentionOptions),
            skip_epsilon=skip_epsilon,
            causal=causal,
            window_left=-1,
            window_right=-1,
            threads=threads,
            hold_beta=hold_beta,
        )
        self._check(self._c.whet_rule_parse(rule.encode(), byref(options.rule)))
        if stats is not None:
            options.stats = _address(stats, np.float64, "stats")
        if tile_counts is not None:
            options.tile_counts = _address(tile_counts, np.int64, "tile_counts")
        return options

    def _check(self, status: int) -> None:
        if status:
            raise WhetError(self.last_error())
