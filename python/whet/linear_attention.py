"""Linear attention: time linear in the number of queries and keys, without logits and without a softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet._arguments import call, check_unmasked, floats, four_axes, integers


class LinearAttentionGradients(NamedTuple):
    """Gradients in the shapes and dtypes of what they belong to."""

    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray


def linear_attention(query: Any, key: Any, value: Any, *, is_causal: bool = False, lengths: Any = None,
                     threads: int = 0, out: np.ndarray | None = None) -> np.ndarray:
    """Linear attention as of Katharopoulos et al. 2020, "Transformers are RNNs": with phi(x) = elu(x) + 1, element by
    element, and a_ij = phi(query_i) . phi(key_j), the output of query i is the sum of a_ij value_j over the sum of a_ij.

    B batch, H query heads, K key heads (H a multiple of K: query head h reads key head h // (H // K)), N queries,
    M keys, D and E the sizes of a key and of a value (1 to 1024). As in the paper there is no scale: 1 / sqrt(D) isn't
    applied.

    Args:
        query, key, value: (B, H, N, D), (B, K, M, D), (B, K, M, E), of any strides and one dtype: float32, float64,
            float16 or bfloat16. Without batch (3 axes), or without batch and heads (2 axes), if all three are.
        is_causal: query i sees keys 0 to i.
        lengths: integers, one per batch entry: only the first keys exist.
        threads: 0 is whet.get_num_threads(). Bits don't depend on it.
        out: where to write, (B, H, N, E). Default: a new array.

    Returns:
        The output, (B, H, N, E). A query that sees no key gives 0.

    Raises:
        TypeError, ValueError: naming the argument; nothing was written.

    >>> import numpy as np, whet
    >>> q, k = np.zeros((2, 3, 4))
    >>> whet.linear_attention(q, k, np.arange(6.0).reshape(3, 2), is_causal=True)
    array([[0., 1.],
           [1., 2.],
           [2., 3.]])
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    check_unmasked(out, "out")
    if out is None:
        out = np.empty((*query.shape[:-1], *value.shape[-1:]), query.dtype)
    call(_core.linear_attention, _NAMES, *four_axes(query=query, key=key, value=value, out=out), causal=is_causal,
         lengths=integers(lengths, "lengths"), threads=threads)
    return out


def linear_attention_backward(query: Any, key: Any, value: Any, dout: Any, *, is_causal: bool = False,
                              lengths: Any = None, threads: int = 0) -> LinearAttentionGradients:
    """The gradients of linear_attention from what it was given and dout = dL/dout, (B, H, N, E).

    >>> import numpy as np, whet
    >>> q, k = np.zeros((2, 3, 4))
    >>> whet.linear_attention_backward(q, k, np.arange(6.0).reshape(3, 2), np.ones((3, 2)), is_causal=True).dvalue[2]
    array([0.33333333, 0.33333333])
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    dout = floats(dout, "dout")
    gradients = LinearAttentionGradients(*(np.empty_like(one, subok=False) for one in (query, key, value)))
    dq, dk, dv = four_axes(dquery=gradients.dquery, dkey=gradients.dkey, dvalue=gradients.dvalue)
    call(_core.linear_attention_backward, _NAMES, *four_axes(query=query, key=key, value=value, dout=dout), dq=dq,
         dk=dk, dv=dv, causal=is_causal, lengths=integers(lengths, "lengths"), threads=threads)
    return gradients


# The extension's names for this module's arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "dq": "dquery", "dk": "dkey", "dv": "dvalue"}
