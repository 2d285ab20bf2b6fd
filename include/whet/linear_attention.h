// Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs") and its gradient: time linear in the
// number of queries and keys, without logits and without a softmax.
//
// Shapes as in attention.h: B batch, H query heads, K key heads (H a multiple of K; query head h reads key
// head h / (H / K)), N queries, M keys, D and E the sizes of a key and of a value (1..kMaxHeadSize).
//     q (B, H, N, D)   k (B, K, M, D)   v (B, K, M, E)   out (B, H, N, E)
//
// With phi(x) = elu(x) + 1, element by element, which is x + 1 for x > 0 and e^x otherwise:
//     out_i = sum_j a_ij v_j / sum_j a_ij,   a_ij = <phi(q_i), phi(k_j)>
// over the keys j that query i sees: all, those below the length of the batch entry, and with `causal` those
// with j <= i (counted from the start, as attention's Align::start: queries at M and after see every key, and
// keys at N and after are seen by nobody). As in the paper there is no scale: 1 / sqrt(D) isn't applied, and
// scale q before the call if it should be.
//
// A query without visible keys gives output and gradients 0, and so does one whose a_ij all underflow to 0:
// f32 has phi(x) = 0 below x = -70, f64 below -708. NaN and infinities reach the queries that see them and no
// others: with `causal` never an earlier one, and backward no key that the query doesn't see. Keys beyond a
// length aren't read.
//
// Views have any strides; q, k, v, out (and gradients) share one element type: f32, f64, bf16 or f16.
// 16-bit types compute in f32. Outputs overlap nothing (Error).
//
// Accuracy, f32: the largest error of a call is at most twice that of a plain, unblocked f32 evaluation of
// the formula above, which has all a_ij, plus (4 + sqrt(D) + X) 2^-24 max|v|, X = max(|q|, |k|). (Sums over
// keys come before the product with a query, so numerator and denominator round the product of size D apart
// from each other; and where the target has no fused multiply-add, e^x is off by |x| roundings.) Gradients:
// the same, with the place of max|v| taken by the largest of their sums with every term positive; the terms
// cancel, to 0 where one key has all of the weight. 16-bit: the same for the arithmetic on the rounded
// inputs, then rounded. f64: the same with 2^-53. The same bits for every number of threads.
#ifndef WHET_LINEAR_ATTENTION_H_
#define WHET_LINEAR_ATTENTION_H_

#include <whet/attention.h>
#include <whet/export.h>
#include <whet/runtime.h>
#include <whet/view.h>

#include <cstdint>
#include <span>

namespace whet {

// The problem: what is computed. The same for linear_attention and linear_attention_backward.
struct LinearAttentionOptions {
  bool causal = false;                      // query i sees keys 0..i only
  std::span<const std::int64_t> lengths{};  // one per batch entry, 0..M: only the first keys exist
};

// out_i = sum_j <phi(q_i), phi(k_j)> v_j / sum_j <phi(q_i), phi(k_j)> with phi(x) = elu(x) + 1; overwrites
// `out` (B, H, N, E). q (B, H, N, D), k (B, K, M, D), v (B, K, M, E) and `out` share one element type and
// have any strides. `out` may not overlap anything else. No scale is applied. A batch entry and key head is
// one task of one thread. The call allocates once, about D E + 64 (3 D + 2 E + 64) numbers per thread;
// execution.workspace isn't used.
// Error, naming the argument, for any that doesn't fit; nothing is written then.
WHET_API void linear_attention(ConstView q, ConstView k, ConstView v, View out,
                               const LinearAttentionOptions& options = {}, const Execution& execution = {});

// Outputs of linear_attention_backward; those without data are not computed. Overwritten, never added to.
struct LinearAttentionGradients {
  View dq{};  // as q
  View dk{};  // as k
  View dv{};  // as v
};

// The gradients from dout = dL/dout (as out) and what linear_attention was given: q, k, v and options. At
// x = 0 phi has the derivative 1. Nothing written may overlap anything else. Memory is that of the forward
// call about three times, and with `causal` two numbers per query of the heads that share a key head.
// Error, naming the argument, for any that doesn't fit; nothing is written then.
WHET_API void linear_attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                                        const LinearAttentionGradients& gradients,
                                        const LinearAttentionOptions& options = {},
                                        const Execution& execution = {});

}  // namespace whet

#endif  // WHET_LINEAR_ATTENTION_H_
