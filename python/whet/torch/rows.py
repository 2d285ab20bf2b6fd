"""torch.softmax with a rule."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from whet._arguments import flag, integer
from whet.rules import RuleLike, rule_name
from whet.stats import Stats
from whet.torch import _rows_operators
from whet.torch._tensors import check, check_device, check_mask, goes_directly, settled, stats_buffer, wants_gradient


@overload
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, rule: RuleLike = None,
            where: Tensor | None = None, hold_beta: bool = False, return_stats: Literal[False] = False) -> Tensor: ...
@overload
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, rule: RuleLike = None,
            where: Tensor | None = None, hold_beta: bool = False,
            return_stats: Literal[True]) -> tuple[Tensor, Stats]: ...
@overload
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, rule: RuleLike = None,
            where: Tensor | None = None, hold_beta: bool = False,
            return_stats: bool) -> Tensor | tuple[Tensor, Stats]: ...
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, rule: RuleLike = None,
            where: Tensor | None = None, hold_beta: bool = False, return_stats: bool = False) -> Any:
    """softmax(beta input) along a dimension, with the beta of each row chosen by a rule.

    Args:
        input: logits, up to 8 dimensions, of any strides: float32, float64, bfloat16 or float16 (16 bits compute in
            float32). -inf hides a key.
        dim: the dimension a row runs along.
        dtype: convert `input` to it first, as torch.softmax does.
        rule: a rule or its name (see whet.rules). Default: none, beta = 1.
        where: boolean, broadcast to `input`; False hides a key.
        hold_beta: the gradient counts beta as a constant. By default it goes through the rule, as in the published
            code.
        return_stats: also return the Stats of all rows, in the shape of `input` without `dim`.

    Returns:
        The weights, contiguous, in the shape and dtype of `input`; ``(weights, stats)`` with return_stats. Hidden keys
        have weight 0, and so has every key of a row that sees nothing, where torch.softmax gives NaN. The stats are
        float64 tensors through which no gradient flows.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import torch
    >>> from whet.torch import softmax
    >>> softmax(torch.tensor([[0.0, 1.0, 2.0]]), rule="fixed:2")
    tensor([[0.0159, 0.1173, 0.8668]])
    """
    if has_torch_function_variadic(input, where):
        return handle_torch_function(softmax, (input, where), input, dim, dtype, rule=rule, where=where,
                                     hold_beta=hold_beta, return_stats=return_stats)
    if dtype is not None and isinstance(input, Tensor):
        input = input.to(dtype)
    check(input, "input")
    hold_beta, return_stats = flag(hold_beta, "hold_beta"), flag(return_stats, "return_stats")
    if input.dim() == 0:
        return _of_a_number(input, dim, rule, where, hold_beta, return_stats)
    dim = _place(dim, input.dim())
    where = _with_axes(where, input)
    name = settled(rule_name(rule) or "none")
    if goes_directly((input, where)):
        stats: Any = stats_buffer(_rows_operators.rows_of(input, dim), True, input) if return_stats else None
        out = _rows_operators.forward(input, dim, name, where, stats)
    else:
        check_device(input=input, where=where)
        with_stats = return_stats or wants_gradient((input,))
        out, stats = _rows_operators.softmax(input, dim, name, where, with_stats, hold_beta)
    return (out, Stats(*stats.unbind(-1))) if return_stats else out


def _of_a_number(input: Tensor, dim: int, rule: RuleLike, where: Tensor | None, hold_beta: bool,
                 return_stats: bool) -> Any:
    """A tensor without dimensions is a row of one key, as in torch.softmax."""
    _place(dim, 1)
    result: Any = softmax(input.unsqueeze(0), 0, rule=rule, where=where, hold_beta=hold_beta, return_stats=return_stats)
    return (result[0].squeeze(0), result[1]) if return_stats else result.squeeze(0)


def _place(dim: int, axes: int) -> int:
    dim = dim if type(dim) is int else integer(dim, "dim")
    if not -axes <= dim < axes:
        raise ValueError(f"dim: is {dim}, must be {-axes} to {axes - 1}")
    return dim % axes


def _with_axes(where: Tensor | None, input: Tensor) -> Tensor | None:
    if where is None:
        return None
    check_mask(where, "where", (torch.bool,))
    missing = input.dim() - where.dim()
    if missing < 0:
        raise ValueError(f"where: has {where.dim()} dimensions, must have at most {input.dim()}")
    return where[(None,) * missing] if missing else where
