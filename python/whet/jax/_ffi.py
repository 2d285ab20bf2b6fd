"""The way into the extension: XLA calls its handlers, without Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from whet import _core
from whet.stats import Stats

if not hasattr(_core, "_jax_handlers"):
    raise ImportError("this build of whet has no whet.jax: it was made without jaxlib; install jaxlib, then whet again")


def _check_version() -> None:
    """XLA refuses handlers made for a newer FFI than its own, and JAX then has no CPU at all: better to stop here."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", header.read_text() if header.is_file() else "")
    if minor and int(minor[1]) < _core._jax_api_minor:
        raise ImportError(f"this build of whet.jax needs version 0.{_core._jax_api_minor} of XLA's FFI, and that of "
                          f"jaxlib {jax.lib.__version__} is 0.{minor[1]}: install a newer jax, or build whet with this "
                          "jaxlib")


def _register(handlers: Mapping[str, Any]) -> None:
    refuse = handlers["whet_refuse"]
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
        for platform in ("CUDA", "ROCM"):
            jax.ffi.register_ffi_target(name, refuse, platform=platform)


_check_version()
_register(_core._jax_handlers())

ENTMAX = "entmax"  # the name of a normalizer whose parameter is an operand, alpha

Results = Mapping[str, tuple[tuple[int, ...], Any]]


def call(target: str, operands: Mapping[str, Any], results: Results, **attributes: Any) -> dict[str, jax.Array]:
    """Calls a handler with the operands that aren't None. `results` are shapes and dtypes by name."""
    given = {name: array for name, array in operands.items() if array is not None}
    first = next(iter(given.values()))
    types = [_varying_as(first, shape, dtype) for shape, dtype in results.values()]
    outputs = jax.ffi.ffi_call(target, types, vmap_method="expand_dims")(
        *given.values(), operands=",".join(given), results=",".join(results), **attributes)
    return dict(zip(results, outputs))


def _varying_as(operand: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Within shard_map, a result varies over the axes of the mesh that the operands vary over."""
    axes = varying(operand)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    given = jax.typeof(operand)
    if not hasattr(given, "manual_axis_type"):
        return jax.ShapeDtypeStruct(shape, dtype, vma=axes)  # type: ignore[call-arg]
    mesh = jax.sharding.NamedSharding(given.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh, manual_axis_type=given.manual_axis_type)


def varying(operand: Any) -> frozenset[str]:
    """The axes of a mesh that an array varies over; before 0.10 JAX had another name for them."""
    given = jax.typeof(operand)
    return given.manual_axis_type.varying if hasattr(given, "manual_axis_type") else given.vma


def _made_varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The same array, which now counts as varying over these axes too; before 0.9 JAX called that pvary."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # type: ignore[attr-defined]


def varying_alike(*arrays: Any) -> list[Any]:
    """Within shard_map, a call wants all its arrays to vary over the same axes of the mesh. None stays None."""
    axes = [frozenset[str]() if array is None else varying(array) for array in arrays]
    every = frozenset[str]().union(*axes)
    return [array if array is None or have == every else _made_varying(array, tuple(every - have))
            for array, have in zip(arrays, axes)]


# ---- differentiation


def perturbed(along: Any, names: Sequence[str]) -> dict[str, jax.Array]:
    """Those of the named tangents of operands that aren't zero."""
    return {name: tangent for name, tangent in along._asdict().items()
            if name in names and tangent is not None and not isinstance(tangent, SymbolicZero)}


# ---- results per row


def saved_type(rows: tuple[int, ...], rule: str | list[str], normalizer: str,
               dtype: Any) -> tuple[tuple[int, ...], Any]:
    """What backward reads beside the operands, in the type of the arithmetic. `rule` may be a list, one per head."""
    name = normalizer if normalizer != ENTMAX else "entmax:2"  # as many for every parameter
    return (*rows, _core.saved_size(rule, name)), jnp.promote_types(dtype, jnp.float32)


def beta_of(saved: jax.Array) -> jax.Array:
    """beta of each row; 1 in one that sees nothing or holds NaN."""
    return saved[..., 1]


def stats_type(rows: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
    """What people see: float64 if JAX has it, else rounded to float32."""
    return (*rows, len(Stats._fields)), jax.dtypes.canonicalize_dtype(np.float64)


def stats_of(columns: jax.Array) -> Stats:
    return Stats(*jnp.moveaxis(columns, -1, 0))


# ---- arguments

FLOATS = (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)


def array(values: Any, name: str) -> jax.Array:
    if isinstance(values, jax.Array):  # or a tracer; asking JAX would take longer than a small call
        return values
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def check_float(values: jax.Array, name: str) -> None:
    if values.dtype not in FLOATS:
        raise TypeError(f"{name}: its dtype is {values.dtype}, must be float32, float64, bfloat16 or float16")


def check_bool(values: jax.Array, name: str) -> None:
    if values.dtype != jnp.bool_:
        raise TypeError(f"{name}: its dtype is {values.dtype}, must be bool")


def with_axes(values: jax.Array, axes: int, name: str) -> jax.Array:
    """With axes of size 1 in front, as broadcasting adds them."""
    if values.ndim > axes:
        raise ValueError(f"{name}: has {values.ndim} axes, must have at most {axes}")
    return jnp.expand_dims(values, tuple(range(axes - values.ndim))) if values.ndim < axes else values


def check_broadcasts(values: jax.Array, shape: tuple[int, ...], name: str) -> None:
    if any(size not in (1, full) for size, full in zip(values.shape, shape)):
        raise ValueError(f"{name}: its shape is {values.shape}, must broadcast to {shape}")
