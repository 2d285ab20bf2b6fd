"""whet's C ABI (include/whet/c_api.h) on NumPy arrays, through ctypes.

Every array argument is used in place through its address and strides, never copied.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import (
    POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p,
)  # fmt: skip
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

STATS_FIELDS = (
    "count", "max", "log_sum_exp", "entropy", "varentropy",
    "spread", "peak", "beta", "sharp_entropy", "sharp_peak",
    "support", "threshold",
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


class _Sized(ctypes.Structure):
    """A struct that begins with its size; 0 is the default of all else."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class _Execution(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("threads", c_int32),
        ("executor_threads", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("executor_run", c_void_p),
        ("executor_context", c_void_p),
    ]


class _SoftmaxOptions(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rule", c_char_p),
        ("normalizer", c_char_p),
        ("mask", POINTER(_View)),
        ("lengths", c_void_p),
        ("axis_from_last", c_int32),
        ("reserved", c_int32),
    ]


class _StatesOptions(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("mask", POINTER(_View)),
        ("lengths", c_void_p),
        ("axis_from_last", c_int32),
        ("reserved", c_int32),
    ]


class _SoftmaxOutputs(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("stats", c_void_p),
        ("stats_size", c_size_t),
        ("saved", POINTER(_View)),
    ]


class _BackwardOptions(_Sized):
    """Of softmax and of attention alike."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("hold_beta", c_int32),
        ("reserved", c_int32),
        ("saved", POINTER(_View)),
    ]


class _AttentionOptions(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rule", c_char_p),
        ("head_rules", POINTER(c_char_p)),
        ("normalizer", c_char_p),
        ("has_scale", c_int32),
        ("has_skip_epsilon", c_int32),
        ("has_window_left", c_int32),
        ("has_window_right", c_int32),
        ("scale", c_double),
        ("skip_epsilon", c_double),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("softcap", c_double),
        ("query_scale", POINTER(_View)),
        ("bias", POINTER(_View)),
        ("mask", POINTER(_View)),
        ("sinks", POINTER(_View)),
        ("causal", c_int32),
        ("align_end", c_int32),
        ("lengths", c_void_p),
        ("lengths_count", c_size_t),
        ("query_starts", c_void_p),
        ("key_starts", c_void_p),
        ("starts_count", c_size_t),
        ("dropout", c_double),
        ("dropout_seed", c_uint64),
    ]


class _AttentionOutputs(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("stats", c_void_p),
        ("stats_size", c_size_t),
        ("saved", POINTER(_View)),
        ("weight_rows", c_void_p),
        ("weight_rows_count", c_size_t),
        ("weights", POINTER(_View)),
        ("top_k", c_int64),
        ("top_keys", c_void_p),
        ("top_weights", c_void_p),
        ("column_sums", c_void_p),
        ("tile_counts", c_void_p),
    ]


class _LinearAttentionOptions(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("causal", c_int32),
        ("reserved", c_int32),
        ("lengths", c_void_p),
        ("lengths_count", c_size_t),
    ]


class _AttentionGradients(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("dq", POINTER(_View)),
        ("dk", POINTER(_View)),
        ("dv", POINTER(_View)),
        ("dbias", POINTER(_View)),
        ("dsinks", POINTER(_View)),
        ("dquery_scale", POINTER(_View)),
    ]


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


def _address(array: np.ndarray | None, dtype: DTypeLike, name: str) -> int | None:
    if array is None:
        return None
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise WhetError(f"{name} must be a contiguous array of {np.dtype(dtype)}")
    return array.ctypes.data


def _stats(stats: np.ndarray | None) -> dict[str, Any]:
    return {"stats": _address(stats, np.float64, "stats"), "stats_size": 8 * len(STATS_FIELDS)}


def _pointer(array: np.ndarray | None) -> Any:
    return None if array is None else ctypes.pointer(_view(array))


def _row_options(
    mask: np.ndarray | None = None, lengths: np.ndarray | None = None
) -> dict[str, Any]:
    return {
        "mask": _pointer(mask),
        "lengths": _address(lengths, np.int64, "lengths"),
    }


def _softmax_options(
    rule: str = "none", normalizer: str = "softmax", **options: Any
) -> _SoftmaxOptions:
    names = {"rule": rule.encode(), "normalizer": normalizer.encode()}
    return _SoftmaxOptions(**names, **_row_options(**options))


def _attention_options(
    rule: str = "none",
    normalizer: str = "softmax",
    causal: bool = False,
    skip_epsilon: float = SKIP_EPSILON,
) -> _AttentionOptions:
    return _AttentionOptions(
        rule=rule.encode(),
        normalizer=normalizer.encode(),
        causal=causal,
        has_skip_epsilon=1,
        skip_epsilon=skip_epsilon,
    )


def _softmax_outputs(
    stats: np.ndarray | None = None, saved: np.ndarray | None = None
) -> _SoftmaxOutputs:
    return _SoftmaxOutputs(saved=_pointer(saved), **_stats(stats))


def _attention_outputs(
    stats: np.ndarray | None = None,
    saved: np.ndarray | None = None,
    tile_counts: np.ndarray | None = None,
) -> _AttentionOutputs:
    counts = _address(tile_counts, np.int64, "tile_counts")
    return _AttentionOutputs(saved=_pointer(saved), tile_counts=counts, **_stats(stats))


def _backward_options(
    saved: np.ndarray | None = None, hold_beta: bool = False
) -> _BackwardOptions:
    return _BackwardOptions(hold_beta=hold_beta, saved=_pointer(saved))


def _gradients(arrays: dict[str, np.ndarray]) -> _AttentionGradients:
    return _AttentionGradients(**{n: ctypes.pointer(_view(a)) for n, a in arrays.items()})


def _taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """These of the options, which lose them."""
    return {name: options.pop(name) for name in names if name in options}


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

    Rows run along the last axis. Keyword options of softmax, sharpen and backward: rule and
    normalizer (names), mask, lengths, saved (a new_saved() array), threads, stats of all but backward
    and hold_beta of it; of states: mask, lengths, threads; of attention and attention_backward: rule,
    normalizer, causal, skip_epsilon, saved, threads, stats and tile_counts of attention, hold_beta of
    the other; of linear_attention: causal, threads.
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

    def new_saved(self, rows: int, rule: str, normalizer: str = "softmax") -> np.ndarray:
        """Memory for what forward saves of so many rows for backward; float32."""
        size = c_int64()
        names = (rule.encode(), normalizer.encode())
        self._check(self._c.whet_saved_size(*names, byref(size)))
        return np.empty((rows, size.value), np.float32)

    def softmax(self, x: np.ndarray, out: np.ndarray, **options: Any) -> Call:
        return self._forward(self._c.whet_softmax, (x, out), options)

    def sharpen(self, p: np.ndarray, out: np.ndarray, **options: Any) -> Call:
        return self._forward(self._c.whet_sharpen, (p, out), options)

    def backward(self, x: np.ndarray, dout: np.ndarray, din: np.ndarray, **options: Any) -> Call:
        rest = dict(options)
        execution = _Execution(**_taken(rest, "threads"))
        backward = _backward_options(**_taken(rest, "saved", "hold_beta"))
        structs = (_softmax_options(**rest), backward, execution)
        return self._call(self._c.whet_softmax_backward, (x, dout, din), structs, options)

    def states(self, x: np.ndarray, out: np.ndarray, **options: Any) -> Call:
        """`out`: one ROW_STATE per row."""
        rest = dict(options)
        execution = _Execution(**_taken(rest, "threads"))
        settings = _StatesOptions(**_row_options(**rest))
        address = c_void_p(_address(out, ROW_STATE, "out"))
        arguments = (byref(_view(x)), address, byref(settings), byref(execution))
        return Call(self, self._c.whet_states, arguments, (x, out, options))

    def attention(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, **options: Any
    ) -> Call:
        structs = self._attention_structs(options)
        return self._call(self._c.whet_attention, (q, k, v, out), structs, options)

    def linear_attention(
        self,
        *arrays: np.ndarray,
        causal: bool = False,
        threads: int = 1,
    ) -> Call:
        """`arrays`: q, k, v, out."""
        structs = (_LinearAttentionOptions(causal=causal), _Execution(threads=threads))
        return self._call(self._c.whet_linear_attention, arrays, structs, ())

    def attention_workspace(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
    ) -> int:
        """Bytes that one such call allocates."""
        size = c_size_t()
        views = (byref(_view(array)) for array in (q, k, v))
        structs = map(byref, self._attention_structs(options))
        self._check(self._c.whet_attention_workspace(*views, *structs, byref(size)))
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
        """`gradients`: what is computed by name (dq, dk, dv), and where it goes."""
        structs = self._attention_backward_structs(gradients, options)
        function = self._c.whet_attention_backward
        return self._call(function, (q, k, v, dout), structs, (gradients, options))

    def attention_backward_workspace(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        gradients: dict[str, np.ndarray],
        **options: Any,
    ) -> int:
        size = c_size_t()
        views = (byref(_view(array)) for array in (q, k, v))
        structs = map(byref, self._attention_backward_structs(gradients, options))
        self._check(self._c.whet_attention_backward_workspace(*views, *structs, byref(size)))
        return size.value

    def _forward(self, function: Callable[..., int], arrays: tuple, options: dict) -> Call:
        rest = dict(options)
        execution = _Execution(**_taken(rest, "threads"))
        outputs = _softmax_outputs(**_taken(rest, "stats", "saved"))
        return self._call(function, arrays, (_softmax_options(**rest), outputs, execution), options)

    def _attention_structs(self, options: dict) -> tuple[ctypes.Structure, ...]:
        rest = dict(options)
        execution = _Execution(**_taken(rest, "threads"))
        outputs = _attention_outputs(**_taken(rest, "stats", "saved", "tile_counts"))
        return _attention_options(**rest), outputs, execution

    def _attention_backward_structs(
        self, gradients: dict[str, np.ndarray], options: dict
    ) -> tuple[ctypes.Structure, ...]:
        rest = dict(options)
        execution = _Execution(**_taken(rest, "threads"))
        backward = _backward_options(**_taken(rest, "saved", "hold_beta"))
        return _gradients(gradients), _attention_options(**rest), backward, execution

    def _call(
        self, function: Callable[..., int], arrays: tuple, structs: tuple, keep: Any
    ) -> Call:
        arguments = (*(byref(_view(array)) for array in arrays), *map(byref, structs))
        return Call(self, function, arguments, (arrays, keep))

    def _check(self, status: int) -> None:
        if status:
            raise WhetError(self.last_error())
