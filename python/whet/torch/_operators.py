"""How an operator of this package is registered with torch, and how eager calls that torch must see reach it.

Operators take tensors by position and options by keyword. All but the first tensors have defaults, and so have all
options: an argument that is added later doesn't break programs that were exported before.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function


def define(name: str, schema: str) -> None:
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))


def register(name: str, kernel: Callable, shapes: Callable, gradient: Callable, mapped: Callable,
             setup: Callable | None = None) -> None:
    """The parts of an operator: its kernel, the shapes of its results, its gradient, itself under vmap."""
    torch.library.impl(name, "CPU", kernel)
    torch.library.register_fake(name, shapes)
    torch.library.register_autograd(name, gradient, setup_context=setup and _with_keywords(setup))
    torch.library.register_vmap(name, mapped)


def _with_keywords(setup: Callable) -> Callable:
    """The form that torch.library calls where an operator has keyword-only arguments."""
    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        setup(ctx, (*inputs, keyword_only_inputs), output)

    return setup_context


def of_backward(options: dict[str, Any]) -> dict[str, Any]:
    """The options of an operator that its backward has too."""
    return {name: value for name, value in options.items() if name not in ("with_stats", "with_saved")}


def _no_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def transformed(name: str, run: Callable, gradient: Callable, mapped: Callable, setup: Callable = _no_setup,
                tangent: Callable | None = None) -> type[Function]:
    """An autograd.Function in the form that torch.func and forward mode need. Its last argument is a dictionary, the
    operator's options."""
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        (*tensors, options), (*axes, _) = arguments, in_dims
        return mapped(info, tuple(axes), *tensors, **options)

    more = {} if tangent is None else {"jvp": tangent}
    return _function(name, forward=_with_options(run), setup_context=setup, backward=gradient, vmap=vmap, **more)


def recorded(name: str, run: Callable, gradient: Callable, setup: Callable) -> type[Function]:
    """The same in the form that torch.func doesn't take, and that costs half."""
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = _with_options(run)(*arguments)
        setup(ctx, arguments, output)
        return output

    return _function(name, forward=forward, backward=gradient)


def _with_options(run: Callable) -> Callable:
    def forward(*arguments: Any) -> Any:
        *tensors, options = arguments
        return run(*tensors, **options)

    return forward


def _function(name: str, **methods: Callable) -> type[Function]:
    return types.new_class(name, (Function,), exec_body=lambda body: body.update(
        {key: staticmethod(method) for key, method in methods.items()}))


def one_by_one(operator: Callable, size: int, in_dims: tuple[Any, ...], tensors: tuple[Any, ...],
               options: dict[str, Any]) -> Any:
    """For vmap: what has no form of its own for many at once, one mapped index after the other."""
    def at(i: int) -> list[Any]:
        return [given.select(axis, i) if isinstance(axis, int) else given for given, axis in zip(tensors, in_dims)]

    results = [operator(*at(i), **options) for i in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])
