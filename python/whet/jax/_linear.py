"""Linear functions whose transposes are given: forward mode applies the function, reverse mode its transpose.

jax.custom_derivatives.linear_call is that too, but can't be mapped by vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def linear_call(function: Callable, transpose: Callable, residuals: Any, arguments: Any) -> jax.Array:
    """function(residuals, arguments), an array that is linear in `arguments`.

    transpose(residuals, cotangent) gives the cotangents of `arguments`, in their structure.
    """
    leaves, tree = jax.tree.flatten(residuals)
    linear, linear_tree = jax.tree.flatten(arguments)

    def flat(*arrays: Any) -> list[jax.Array]:
        first, last = arrays[:len(leaves)], arrays[len(leaves):]
        return [function(jax.tree.unflatten(tree, first), jax.tree.unflatten(linear_tree, last))]

    def flat_transpose(*arrays: Any) -> list[jax.Array]:
        *first, cotangent = arrays
        return jax.tree.leaves(transpose(jax.tree.unflatten(tree, first), cotangent))

    result, = _linear_call_p.bind(*leaves, *linear, jaxpr=jax.make_jaxpr(flat)(*leaves, *linear),
                                  transpose=flat_transpose, residuals=len(leaves))
    return result


_linear_call_p = Primitive("whet_linear_call")
_linear_call_p.multiple_results = True


@_linear_call_p.def_impl
def _run(*arrays: Any, jaxpr: Any, **_: Any) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*arrays)


@_linear_call_p.def_abstract_eval
def _types(*arrays: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return jaxpr.out_avals


def _transposed(cotangents: Sequence[Any], *arrays: Any, transpose: Callable, residuals: int, **_: Any) -> list[Any]:
    cotangent, = cotangents
    if isinstance(cotangent, ad.Zero):
        return [None] * len(arrays)
    return [None] * residuals + transpose(*arrays[:residuals], cotangent)


def _mapped(arrays: Sequence[Any], axes: Sequence[int | None], *, jaxpr: Any, transpose: Callable,
            residuals: int) -> Any:
    """Arguments get the mapped axis even where they don't vary, so that their cotangents have it."""
    size = next(array.shape[axis] for array, axis in zip(arrays, axes) if axis is not None)

    def mapped_first(array: Any, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)

    of_residuals = tuple(axes[:residuals])
    linear = [mapped_first(array, axis) for array, axis in zip(arrays[residuals:], axes[residuals:])]
    every = [*arrays[:residuals], *linear]
    mapped = jax.vmap(jaxpr_as_fun(jaxpr), (*of_residuals, *(0,) * len(linear)))
    results = _linear_call_p.bind(*every, jaxpr=jax.make_jaxpr(mapped)(*every),
                                  transpose=jax.vmap(transpose, (*of_residuals, 0)), residuals=residuals)
    return results, (0,) * len(results)


ad.primitive_transposes[_linear_call_p] = _transposed
batching.primitive_batchers[_linear_call_p] = _mapped
mlir.register_lowering(_linear_call_p, mlir.lower_fun(_run, multiple_results=True))
