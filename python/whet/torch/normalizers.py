"""Normalizers with a parameter that is learned."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from whet.torch._tensors import check, check_device


class Entmax(NamedTuple):
    """The normalizer entmax:alpha, for the argument `normalizer` of softmax and attention.

    Between softmax (towards alpha = 1) and sparsemax (alpha = 2), and beyond up to 4. As a tensor, alpha has a gradient:
    that of Correia, Niculae and Martins (2019), who learn one per head.

    Args:
        alpha: a number, or a tensor of one element; in attention also (H), one per query head. Above 1, at most 4.

    Reverse mode only: alpha has no tangent in forward mode. A tensor that compilers see stays one: its value is read
    when the program runs.

    >>> import torch
    >>> from whet.torch import Entmax, softmax
    >>> x, alpha = torch.tensor([2.0, 1.5, 0.1, -1.0]), torch.tensor(1.5, requires_grad=True)
    >>> weights = softmax(x, normalizer=Entmax(alpha))
    >>> weights.detach()
    tensor([0.6740, 0.3260, 0.0000, 0.0000])
    >>> weights[0].backward()
    >>> alpha.grad
    tensor(0.1239)
    """

    alpha: float | Tensor


# What softmax and attention take.
NormalizerLike = str | Entmax


def name_and_alpha(normalizer: NormalizerLike) -> tuple[str, Any]:
    """The name as operators take it; and alpha if it is a tensor, which they take the parameter from."""
    if not isinstance(normalizer, Entmax):
        return normalizer, None
    alpha = normalizer.alpha
    if not isinstance(alpha, Tensor):
        return f"entmax:{alpha}", None
    check(alpha, "alpha")
    check_device(alpha=alpha)
    return "entmax", alpha


def alpha_of(normalizer: Any) -> Any:
    """alpha if it is a tensor, else None."""
    return normalizer.alpha if isinstance(normalizer, Entmax) and isinstance(normalizer.alpha, Tensor) else None


def check_single(alpha: Tensor | None) -> None:
    if alpha is not None and alpha.numel() != 1:
        raise ValueError(f"alpha: its shape is {tuple(alpha.shape)}, must have one element")
