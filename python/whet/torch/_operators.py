"""What an operator of this package gets from torch, and how eager calls that torch has to see reach it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function


def register(name: str, kernel: Callable, shapes: Callable, gradient: Callable, mapped: Callable,
             setup: Callable | None = None) -> None:
    """The parts of an operator: its kernel, the shapes of its results, its gradient, itself under vmap."""
    torch.library.impl(name, "CPU", kernel)
    torch.library.register_fake(name, shapes)
    torch.library.register_autograd(name, gradient, setup_context=setup)
    torch.library.register_vmap(name, mapped)


def _no_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def transformed(name: str, run: Callable, gradient: Callable, mapped: Callable,
                setup: Callable = _no_setup) -> type[Function]:
    """An autograd.Function as torch.func asks for it."""
    return _function(name, forward=run, setup_context=setup, backward=gradient, vmap=mapped)


def recorded(name: str, run: Callable, gradient: Callable, setup: Callable) -> type[Function]:
    """The same in the form that torch.func doesn't take, and that costs half."""
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run(*arguments)
        setup(ctx, arguments, output)
        return output

    return _function(name, forward=forward, backward=gradient)


def _function(name: str, **methods: Callable) -> type[Function]:
    return types.new_class(name, (Function,), exec_body=lambda body: body.update(
        {key: staticmethod(method) for key, method in methods.items()}))
