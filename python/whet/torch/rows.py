"""torch.softmax and torch.log_softmax with a rule."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from whet._arguments import flag, integer
from whet.rules import RuleLike, rule_name
from whet.stats import Stats
from whet.torch import _beta_operator, _rows_operators
from whet.torch._tensors import (check, check_device, check_mask, skips_dispatcher, stats_buffer, wants_gradient,
                                 with_file_read)
from whet.torch.normalizers import NormalizerLike, alpha_of, check_single, name_and_alpha


class _Options(TypedDict, total=False):
    rule: RuleLike
    where: Tensor | None
    hold_beta: bool
    out: Tensor | None


@overload
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, normalizer: NormalizerLike = "softmax",
            return_stats: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, normalizer: NormalizerLike = "softmax",
            return_stats: Literal[True], **options: Unpack[_Options]) -> tuple[Tensor, Stats]: ...
@overload
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, normalizer: NormalizerLike = "softmax",
            return_stats: bool, **options: Unpack[_Options]) -> Tensor | tuple[Tensor, Stats]: ...
def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, rule: RuleLike = None,
            normalizer: NormalizerLike = "softmax", where: Tensor | None = None, hold_beta: bool = False,
            out: Tensor | None = None, return_stats: bool = False) -> Any:
    """softmax(beta input) along a dimension, with the beta of each row chosen by a rule.

    Args:
        input: logits, up to 8 dimensions, of any strides: float32, float64, bfloat16 or float16 (16 bits compute in
            float32). -inf hides a key.
        dim: the dimension a row runs along.
        dtype: convert `input` to it first, as torch.softmax does.
        rule: a rule or its name (see whet.rules). Default: none, beta = 1.
        normalizer: what turns a row of logits into weights, by its name, or an Entmax, whose alpha may be learned.
            Default: softmax.
        where: boolean, broadcast to `input`; False hides a key.
        hold_beta: the gradient counts beta as a constant. By default it goes through the rule, as in the published
            code.
        out: where to write, of the result's shape and dtype; as in torch, nothing may need a gradient then.
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
    given = input, where, alpha_of(normalizer)
    if has_torch_function_variadic(*given):
        return handle_torch_function(softmax, given, input, dim, dtype, rule=rule, normalizer=normalizer, where=where,
                                     hold_beta=hold_beta, out=out, return_stats=return_stats)
    if dtype is not None and isinstance(input, Tensor):
        input = input.to(dtype)
    check(input, "input")
    if out is not None:
        _check_out(out, input, alpha_of(normalizer))
    hold_beta, return_stats = flag(hold_beta, "hold_beta"), flag(return_stats, "return_stats")
    if input.dim() == 0:
        _position(dim, 1)
        return _of_a_number(softmax, input, return_stats, rule=rule, normalizer=normalizer, where=where, out=out)
    dim = _position(dim, input.dim())
    where = _with_axes(where, input)
    name, alpha = name_and_alpha(normalizer)
    check_single(alpha)
    options: dict[str, Any] = {"dim": dim, "rule": with_file_read(rule_name(rule) or "none"), "normalizer": name}
    stats: Any = None
    if skips_dispatcher((input, where, out, alpha)):
        if return_stats:
            stats = stats_buffer(_rows_operators.rows_of(input, dim), True, input)
        weights = torch.empty_like(input, memory_format=torch.contiguous_format) if out is None else out
        _rows_operators.forward(input, where, weights, stats, alpha=alpha, **options)
    else:
        check_device(input=input, where=where)
        weights, stats, _ = _rows_operators.softmax(input, where, alpha, hold_beta=hold_beta, with_stats=return_stats,
                                                    with_saved=wants_gradient((input, alpha)), **options)
        weights = weights if out is None else out.copy_(weights)
    return (weights, Stats(*stats.unbind(-1))) if return_stats else weights


@overload
def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *,
                return_stats: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, return_stats: Literal[True],
                **options: Unpack[_Options]) -> tuple[Tensor, Stats]: ...
@overload
def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, return_stats: bool,
                **options: Unpack[_Options]) -> Tensor | tuple[Tensor, Stats]: ...
def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, rule: RuleLike = None,
                where: Tensor | None = None, hold_beta: bool = False, out: Tensor | None = None,
                return_stats: bool = False) -> Any:
    """The logarithm of softmax, finite also where a weight is too small for a float.

    Arguments are those of softmax. Hidden keys have -inf and gradient 0, and so has every key of a row that sees
    nothing.

    >>> import torch
    >>> from whet.torch import log_softmax
    >>> log_softmax(torch.tensor([0.0, -1000.0]), rule="fixed:2")
    tensor([    0., -2000.])
    """
    if has_torch_function_variadic(input, where):
        return handle_torch_function(log_softmax, (input, where), input, dim, dtype, rule=rule, where=where,
                                     hold_beta=hold_beta, out=out, return_stats=return_stats)
    if dtype is not None and isinstance(input, Tensor):
        input = input.to(dtype)
    check(input, "input")
    if out is not None:
        _check_out(out, input)
    hold_beta, return_stats = flag(hold_beta, "hold_beta"), flag(return_stats, "return_stats")
    if input.dim() == 0:
        _position(dim, 1)
        return _of_a_number(log_softmax, input, return_stats, rule=rule, where=where, out=out)
    dim = _position(dim, input.dim())
    where = _with_axes(where, input)
    check_device(input=input, where=where)

    logits = input if input.dtype == torch.float64 else input.float()
    beta, stats, _ = _beta_operator.beta(logits.detach() if hold_beta else logits, where, dim=dim,
                                         rule=with_file_read(rule_name(rule) or "none"), with_stats=return_stats)
    hidden = _rows_operators.hidden_keys(logits, where)
    # The maximum may count as a constant: what is added to a whole row changes neither the result nor its derivatives.
    y = beta.unsqueeze(dim) * _rows_operators.below_max(logits, where, dim)
    logs = torch.log_softmax(y.masked_fill(hidden, -torch.inf), dim).masked_fill(hidden, -torch.inf).to(input.dtype)
    logs = logs if out is None else out.copy_(logs)
    return (logs, Stats(*stats.unbind(-1))) if return_stats else logs


def _of_a_number(function: Any, input: Tensor, return_stats: bool, out: Tensor | None, **options: Any) -> Any:
    """A tensor without dimensions is a row of one key, as in torch.softmax."""
    result: Any = function(input.unsqueeze(0), 0, return_stats=return_stats,
                           out=None if out is None else out.unsqueeze(0), **options)
    return (result[0].squeeze(0), result[1]) if return_stats else result.squeeze(0)


def _check_out(out: Tensor, input: Tensor, alpha: Tensor | None = None) -> None:
    check(out, "out")
    check_device(out=out)
    if (out.shape, out.dtype) != (input.shape, input.dtype):
        raise ValueError(f"out: is {tuple(out.shape)} of {out.dtype}, must be as the result, {tuple(input.shape)} of "
                         f"{input.dtype}")
    if wants_gradient((input, out, alpha)):
        raise ValueError("out: can't be given where a gradient is recorded, as in torch; use torch.no_grad()")


def _position(dim: int, axes: int) -> int:
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
