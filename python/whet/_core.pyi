"""The extension: the public C++ headers, and nothing it allocates. Outputs are written into what is passed.

An Array is a NumPy array, or a tuple (address, dtype code, sizes, strides) whose memory the caller keeps alive.
Codes: 0 float32, 1 float64, 2 bfloat16, 3 float16, 4 bool, 5 int64. Sizes and strides are tuples; strides count
elements, None is contiguous. An option of None counts as not given. Rules go by name.

openmp_threads runs a call on the workers that find_openmp() found (on whet's own if none), as many as it is worth up to
this number.

Records are contiguous arrays of numbers: stats 12 float64 per row, states 6 int64 (the bits of a whet.STATE), and what
include/whet/shard.h exchanges: a RowScale has 2 float64, a WeighedRow 3, RowSums and GradientSums 5, a RowSlope 10. What
forward writes to `saved` and backward reads from it is contiguous too: of each row the first saved_size() of

    top         where y = x - top is measured from: the largest visible logit
    beta
    scale       1 / sum of exp(beta y), so that a weight is scale exp(beta y); 0 in a row without visible keys
    mean        of y under the weights
    slope       dbeta/dH over the sum of exp(y)
    plain_mean  of y under softmax(x)

in the type of the arithmetic: float64 for float64, float32 for all else.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray | tuple[int, int, tuple[int, ...], tuple[int, ...] | None]

MAX_HEAD_SIZE: int
_jax_api_minor: int  # of XLA's FFI; only if built with jaxlib

def softmax(in_: Array, out: Array, /, *, rule: str | None = None, normalizer: str | None = None, axis: int = -1,
            mask: Array | None = None, lengths: Array | None = None, stats: Array | None = None,
            saved: Array | None = None, threads: int = 0, openmp_threads: int | None = None) -> None: ...
def sharpen(in_: Array, out: Array, /, *, rule: str | None = None, normalizer: str | None = None, axis: int = -1,
            mask: Array | None = None, lengths: Array | None = None, stats: Array | None = None,
            threads: int = 0, openmp_threads: int | None = None) -> None: ...
def softmax_backward(in_: Array, dout: Array, din: Array, /, *, rule: str | None = None,
                     normalizer: str | None = None, axis: int = -1, mask: Array | None = None,
                     lengths: Array | None = None, saved: Array | None = None, dparameter: Array | None = None,
                     hold_beta: bool = False, threads: int = 0, openmp_threads: int | None = None) -> None: ...
def states(in_: Array, out: Array, /, *, axis: int = -1, mask: Array | None = None, lengths: Array | None = None,
           threads: int = 0) -> None: ...
def merge(a: Array, b: Array, out: Array) -> None: ...
def attention(q: Array, k: Array, v: Array, out: Array, *, rule: str | Sequence[str] | None = None,
              normalizer: str | None = None, scale: float | None = None, query_scale: Array | None = None,
              softcap: float = 0, bias: Array | None = None, mask: Array | None = None, sinks: Array | None = None,
              causal: bool = False, align: str = "start", window_left: int = -1, window_right: int = -1,
              lengths: Array | None = None, query_starts: Array | None = None, key_starts: Array | None = None,
              stats: Array | None = None, saved: Array | None = None, weight_rows: Array | None = None,
              weights: Array | None = None, top_k: int = 0, top_keys: Array | None = None,
              top_weights: Array | None = None, column_sums: Array | None = None, tile_counts: Array | None = None,
              dropout: float = 0, dropout_seed: int = 0, skip_epsilon: float | None = None, threads: int = 0,
              openmp_threads: int | None = None) -> None: ...
def attention_backward(q: Array, k: Array, v: Array, dout: Array, *, dq: Array | None = None,
                       dk: Array | None = None, dv: Array | None = None, dbias: Array | None = None,
                       dsinks: Array | None = None, dquery_scale: Array | None = None,
                       dparameter: Array | None = None, hold_beta: bool = False,
                       rule: str | Sequence[str] | None = None, normalizer: str | None = None,
                       scale: float | None = None, query_scale: Array | None = None, softcap: float = 0,
                       bias: Array | None = None, mask: Array | None = None, sinks: Array | None = None,
                       causal: bool = False, align: str = "start", window_left: int = -1, window_right: int = -1,
                       lengths: Array | None = None, query_starts: Array | None = None,
                       key_starts: Array | None = None, saved: Array | None = None, dropout: float = 0,
                       dropout_seed: int = 0, threads: int = 0, openmp_threads: int | None = None) -> None: ...
# The options of shards are those of attention, without rule, and first_key, all_keys, first_query, all_queries and logits.
def shard_states(q: Array, k: Array, out: Array, **options: Any) -> None: ...
def shard_sums(q: Array, k: Array, rows: Array, out: Array, **options: Any) -> None: ...
def shard_attention(q: Array, k: Array, v: Array, rows: Array, out: Array, mass: Array, **options: Any) -> None: ...
def shard_gradient_sums(q: Array, k: Array, v: Array, dout: Array, rows: Array, out: Array, **options: Any) -> None: ...
def shard_backward(q: Array, k: Array, v: Array, dout: Array, rows: Array, **options: Any) -> None: ...
def betas_move(betas: Array, rule: str | None, hold_beta: bool) -> bool: ...
def row_slopes(states: Array, rows: Array, mass: Array, sums: Array, out: Array, rule: str | None,
               hold_beta: bool) -> None: ...

class BetaSearches:
    def __init__(self, rule: str, states: Array) -> None: ...
    def betas(self, out: Array) -> bool: ...
    def absorb(self, sums: Array) -> None: ...

def linear_attention(q: Array, k: Array, v: Array, out: Array, *, causal: bool = False, lengths: Array | None = None,
                     threads: int = 0, openmp_threads: int | None = None) -> None: ...
def linear_attention_backward(q: Array, k: Array, v: Array, dout: Array, *, dq: Array | None = None,
                              dk: Array | None = None, dv: Array | None = None, causal: bool = False,
                              lengths: Array | None = None, threads: int = 0,
                              openmp_threads: int | None = None) -> None: ...
def saved_size(rule: str | Sequence[str] | None, normalizer: str | None) -> int: ...
def rule_parts(name: str | None) -> tuple[str, str, tuple[Any, ...]]: ...
def normalizer_name(name: str) -> str: ...
def betas(states: Array, out: Array, rule: str | None) -> None: ...
def find_openmp(path: str) -> bool: ...
def version() -> str: ...
def get_num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def simd_target() -> str: ...
def simd_targets() -> list[str]: ...
