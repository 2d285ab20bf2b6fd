"""Tensors as the extension takes them, and when they may go there without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from whet import _core
from whet._arguments import renamed
from whet.stats import Stats

# torch's OpenMP workers spin for a while after each operator, and would compete with other threads for their cores: calls
# run on the same workers. Where torch has no such runtime they run on whet's own.
_core.find_openmp(torch._C.__file__)

# The extension's numbers for element types.
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4, torch.int64: 5}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

STATS = len(Stats._fields)  # numbers per row
BETA = 1  # where it is among those that forward saves for backward
ENTMAX = "entmax"  # the name of a normalizer whose parameter is a tensor


# Classes whose values aren't the elements they hold, and what to give instead.
_REFUSED = {
    "CausalBias": " of values",
    "DTensor": "; give {0}.to_local()",
    "MaskedTensor": "; give {0}.get_data(), and its mask as where or attn_mask",
}


def by_address(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor as the extension takes it. The caller keeps it alive during the call: give no temporary."""
    return tensor.data_ptr(), _CODES[tensor.dtype], tensor.shape, tensor.stride()


def by_addresses(**tensors: Tensor | None) -> dict[str, tuple[Any, ...]]:
    """The same for keywords, without those that are None."""
    return {name: by_address(tensor) for name, tensor in tensors.items() if tensor is not None}


def call(function: Callable[..., None], names: Mapping[str, str], *arguments: Any, **options: Any) -> None:
    """Calls into the extension, on as many threads as torch's operators use."""
    try:  # as _arguments.call does: a small call feels its options packed once more
        function(*arguments, openmp_threads=torch.get_num_threads(), **options)
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def with_file_read(rule: str) -> str:
    """The name of a rule, with its coefficients in place of the file that holds them: backward may run after the file
    has changed. Compilers can't trace that: what they make reads the file when it runs."""
    if rule.startswith("polynomial:") and not torch.compiler.is_compiling():
        return _core.rule_parts(rule)[1]
    return rule


def check(tensor: Any, name: str, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """A TypeError that names the argument, unless it is a strided tensor of one of these dtypes."""
    if type(tensor) is Tensor and tensor.dtype in dtypes and tensor.layout is torch.strided and not tensor.is_nested:
        return
    if not isinstance(tensor, Tensor) or type(tensor).__name__ in _REFUSED:
        instead = _REFUSED.get(type(tensor).__name__, "")
        raise TypeError(f"{name}: is a {type(tensor).__name__}, must be a Tensor{instead.format(name)}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else _text(tensor.layout)
        raise TypeError(f"{name}: is {layout}, must be a strided tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: its dtype is {_text(tensor.dtype)}, must be {' or '.join(map(_text, dtypes))}")


def check_device(**tensors: Tensor | None) -> None:
    """A ValueError that names the argument, unless it is on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name}: is on the device {tensor.device}; whet works on the CPU, so give {name}.cpu()")


def check_mask(mask: Any, name: str, dtypes: Sequence[torch.dtype]) -> None:
    """The same as check, for a mask. A class of masks may stand for values that it doesn't hold: if it has a
    __torch_function__, and that left the call to us, they aren't known."""
    check(mask, name, dtypes)
    if type(mask) is Tensor:
        return
    own, default = (getattr(kind.__torch_function__, "__func__", None) for kind in (type(mask), Tensor))
    if own not in (None, default):
        raise TypeError(f"{name}: is a {type(mask).__name__}, whose __torch_function__ doesn't handle this function; "
                        f"if it holds its values, give {name}.as_subclass(torch.Tensor)")


def _text(name: torch.dtype | torch.layout) -> str:
    return str(name).removeprefix("torch.").removeprefix("_")


def _plain_keys() -> frozenset[int]:
    with torch.inference_mode():
        inference = torch.empty(0)
    return frozenset(_keys(tensor).raw_repr() for tensor in (torch.empty(0), inference))


# What torch has no public name for. In a version without one of these every call goes through torch's dispatcher:
# slower, with the same results.
try:
    _keys = torch._C._dispatch_keys
    _modes = torch._C._len_torch_dispatch_stack
    _tracing_state = torch._C._get_tracing_state
    _functorch_is_active = torch._C._are_functorch_transforms_active
    _ = forward_ad._current_level
    # A tensor that is anything but memory on the CPU (fake, batched, lazily negated, of another library, ...) has more
    # dispatch keys than these.
    _PLAIN = _plain_keys()
    KNOWS_WHEN_TO_SKIP = True
except (AttributeError, TypeError):
    KNOWS_WHEN_TO_SKIP = False


def tracing() -> bool:
    """Whether something records torch's operators as they are called: a compiler, an exporter, a trace."""
    if not KNOWS_WHEN_TO_SKIP:
        return torch.compiler.is_compiling() or torch.jit.is_tracing()
    return torch.compiler.is_compiling() or _modes() > 0 or _tracing_state() is not None


def transforming() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is, or may be, active."""
    return not KNOWS_WHEN_TO_SKIP or _functorch_is_active() or forward_ad._current_level >= 0


def skips_dispatcher(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call may go past torch's dispatcher: nothing records, traces or transforms it. Saves most of the time
    of a small call."""
    if tracing() or transforming():
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (_keys(tensor).raw_repr() not in _PLAIN or (recording and tensor.requires_grad)):
            return False
    return True


def wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def stats_buffer(rows: Sequence[int], with_stats: bool, like: Tensor) -> Tensor:
    """A buffer for the stats of these rows; without elements if they aren't wanted, since an operator has to return
    something."""
    return like.new_empty((*rows, STATS if with_stats else 0), dtype=torch.float64)


def saved_buffer(rows: Sequence[int], with_saved: bool, like: Tensor, rule: str | Sequence[str] = "none",
                 normalizer: str = "softmax", **_: Any) -> Tensor:
    """The same for what backward needs of them, in the type of the arithmetic."""
    name = normalizer if normalizer != ENTMAX else "entmax:2"  # as many for every parameter
    size = _core.saved_size(rule, name) if with_saved else 0
    return like.new_empty((*rows, size), dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


def with_parameter(normalizer: str, alpha: Tensor | None) -> str:
    """The whole name of a normalizer whose parameter is in a tensor of one element."""
    return normalizer if alpha is None else f"{normalizer}:{alpha.item()!r}"


def parameter_buffer(rows: Sequence[int], wanted: bool, like: Tensor) -> Tensor:
    """A buffer for the gradient to that parameter, one per row; without elements if it isn't wanted."""
    return like.new_empty(rows if wanted else (0,), dtype=torch.float64)


def if_any(buffer: Tensor | None) -> Tensor | None:
    """Such a buffer as one block of memory, None without elements per row: hooks on saved tensors and vmap may have
    moved it."""
    return buffer.contiguous() if buffer is not None and buffer.shape[-1] > 0 else None


def mapped_first(tensor: Tensor | None, axis: int | None, size: int) -> Any:
    """For vmap: the tensor with the mapped axis in front, whether it has one or is the same for all."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
