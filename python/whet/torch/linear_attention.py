"""Linear attention for torch: time linear in the number of queries and keys, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from whet._arguments import flag
from whet.torch import _linear_attention_operators
from whet.torch._tensors import check_device, skips_dispatcher
from whet.torch.attention import autocast, check_matrices, four_axes, integers, with_batch


def linear_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False, *,
                     lengths: Tensor | Sequence[int] | None = None) -> Tensor:
    """Linear attention as of Katharopoulos et al. 2020, "Transformers are RNNs": with phi(x) = elu(x) + 1, element by
    element, and a_ij = phi(query_i) . phi(key_j), the output of query i is the sum of a_ij value_j over the sum of a_ij.

    H query heads, N queries, M keys, D and E the sizes of a key and of a value (1 to 1024). As in the paper there is no
    scale: 1 / sqrt(D) isn't applied. It trains, compiles, exports and vmaps; it has no forward mode.

    Args:
        query, key, value: (..., H, N, D), (..., H, M, D), (..., H, M, E), of any strides and one dtype: float32,
            float64, bfloat16 or float16. Leading dimensions broadcast; there may be none.
        is_causal: query i sees keys 0 to i.
        enable_gqa: key and value may have fewer heads than query, each a number that H is a multiple of.
        lengths: integers, one per batch entry: only the first keys exist.

    Returns:
        The output (..., H, N, E). A query that sees no key gives 0. In memory it lies as (..., N, H, E): joining the
        heads copies nothing.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import torch
    >>> from whet.torch import linear_attention
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    >>> out = linear_attention(q, k, v, is_causal=True)
    >>> torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    """
    given = query, key, value, lengths
    if has_torch_function_variadic(*given):
        return handle_torch_function(linear_attention, given, query, key, value, is_causal, enable_gqa,
                                     lengths=lengths)
    check_matrices(query=query, key=key, value=value)
    axes = max(query.dim(), key.dim(), value.dim())
    query, key, value, batch = four_axes(query, key, value, flag(enable_gqa, "enable_gqa"))
    if torch.is_autocast_enabled("cpu"):
        query, key, value = autocast(query), autocast(key), autocast(value)
    operands = query, key, value, integers(lengths, "lengths")
    causal = flag(is_causal, "is_causal")
    if skips_dispatcher(operands):
        out = _linear_attention_operators.forward(*operands, causal=causal)
    else:
        check_device(query=query, key=key, value=value, lengths=operands[3])
        out = _linear_attention_operators.linear_attention(*operands, causal=causal)
    return out if axes == 4 and len(batch) == 1 else with_batch(out, batch, axes)
