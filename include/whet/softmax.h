// Softmax over rows with an adaptive inverse temperature, its gradient, and sharpening of
// probabilities that another engine computed.
//
// Shared by the three functions:
//   - A view has 1..8 axes; a row runs along `axis`. Any strides, also negative ones; f32, f64, bf16
//     or f16, the same for all views of a call (16-bit types compute in f32).
//   - An output may be its input (same pointer and strides). Any other overlap is an Error.
//   - A key is visible if the mask is true, its index is below the row's length and its logit isn't
//     -inf. Other keys get weight and gradient 0. A row without visible keys is all 0. A visible NaN
//     or +inf makes its own row NaN and no other: all weights within the row's length, and the gradients
//     of its visible keys.
//   - The same call gives the same bits for every number of threads, and with or without stats. (A
//     target rule may stop at another beta within its tolerance when rows are strided, masked in place
//     or 16-bit.) One allocation at most per call, beside starting threads: never more than one row of
//     the arithmetic type for each thread, and none for contiguous f32 or f64 rows without a mask
//     (in place: unless a target rule).
//   - Accuracy, f32, |x| <= 1e4, rows up to 131,072 keys: weights at the beta in the stats within
//     1e-6 (1 + |beta y|) relative (y = x - max; weights below 1e-30 within 1e-30), entropy within
//     1e-6 max(1, ln n), rows sum to 1 within 1e-6. A target that a beta below 2^60 reaches is met within
//     2e-6 (peak) or 1e-6 max(2, ln n) (entropy, which one rounding of beta can move by 2e-6).
//     f64: weights 1e-13 (1 + |beta y|), entropy 1e-12 max(1, ln n). f32 weights below 2^-100 are 0;
//     f64 weights below 2^-1021 may be 0 or denormal.
#ifndef WHET_SOFTMAX_H_
#define WHET_SOFTMAX_H_

#include <whet/export.h>
#include <whet/normalizer.h>
#include <whet/row.h>
#include <whet/rule.h>
#include <whet/runtime.h>
#include <whet/view.h>

#include <cstdint>
#include <span>

namespace whet {

// The problem: what is computed. The same for softmax, sharpen and softmax_backward.
struct SoftmaxOptions {
  Rule rule{};                              // chooses beta of each row; default none: beta = 1
  Normalizer normalizer{};                  // turns a row of logits into weights; default softmax
  int axis = -1;                            // negative counts from the end
  ConstView mask{};                         // boolean, true = visible; as many axes as `in`, sizes equal or 1
  std::span<const std::int64_t> lengths{};  // one per row, 0..keys; rows in row-major order
};

// Optional outputs of softmax and sharpen, overwritten if given.
struct SoftmaxOutputs {
  std::span<RowStats> stats{};  // one per row
  // What softmax_backward would have to find again: saved_size(options) numbers per row, contiguous, in the
  // type of the arithmetic. Not of sharpen.
  View saved{};
};

// 3 for rules that don't look at the entropy, 4 for target rules, 6 for polynomials.
WHET_API std::int64_t saved_size(const SoftmaxOptions& options);

// out = softmax(beta in) along the axis, beta chosen per row by the rule. Overwrites `out`, which has the
// sizes and the element type of `in` and may be `in`. execution.workspace isn't used.
// Error, naming the argument, for any that doesn't fit; nothing is written then.
WHET_API void softmax(ConstView in, View out, const SoftmaxOptions& options = {},
                      const SoftmaxOutputs& outputs = {}, const Execution& execution = {});

// The same for a row given by its probabilities p >= 0 (sum near 1) instead of its logits:
// out = p^beta / sum p^beta. A probability of 0 is a key that isn't visible; a negative one makes
// its row NaN. stats count, spread, entropy, peak are those of p; max and log_sum_exp are of ln p.
WHET_API void sharpen(ConstView in, View out, const SoftmaxOptions& options = {},
                      const SoftmaxOutputs& outputs = {}, const Execution& execution = {});

enum class BetaGradient {
  through_rule,  // beta depends on the logits, as in the published code
  held           // beta counts as a constant
};

struct SoftmaxBackwardOptions {
  BetaGradient beta_gradient = BetaGradient::through_rule;
  ConstView saved{};  // what softmax wrote; empty: found again
  // If not empty, written: dL/dparameter of each row, rows in row-major order, where the parameter is the A
  // of entmax:A; their sum is dL/dA. Error for other normalizers. Within 2e-6 (1 + ln^2 n) max|dout|, n the
  // keys of the row (f64: 1e-12), also where A is near 1; above A = 2 the caveat of normalizer.h on keys at
  // tau.
  std::span<double> dparameter{};
};

// din = dL/din from dout = dL/dout and what softmax was given: `in` and options. Overwrites `din`, which may
// be `dout` or `in`. At a kink of the rule the derivative of the constant side is taken; an unreachable
// target counts as constant. Every key's error is at most 1e-6 (1 + |beta y|) beta max|dout|, y the
// key's own distance from the maximum. execution.workspace isn't used.
WHET_API void softmax_backward(ConstView in, ConstView dout, View din, const SoftmaxOptions& options = {},
                               const SoftmaxBackwardOptions& backward = {}, const Execution& execution = {});

}  // namespace whet

#endif  // WHET_SOFTMAX_H_
