// A row (the logits one query sees), its mergeable state, and the statistics of it that are optional outputs.
#ifndef WHET_ROW_H_
#define WHET_ROW_H_

#include <whet/export.h>
#include <whet/runtime.h>
#include <whet/view.h>

#include <cstdint>
#include <limits>
#include <span>

namespace whet {

// Everything about a row that crosses tiles, threads and ranks. With y_i = x_i - max over the
// visible keys (a masked key and a logit of -inf are the same thing: not visible):
//     z = sum e^y_i      t = sum e^y_i y_i      u = sum e^y_i y_i^2
// The default value is the state of no keys, the identity of merge(). A row that holds a visible
// NaN or +inf has NaN in every field but count.
struct RowState {
  std::int64_t count = 0;
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  double z = 0;
  double t = 0;
  double u = 0;
};

// The state of the keys of `a` and of `b` together. Associative and commutative up to rounding.
WHET_API RowState merge(const RowState& a, const RowState& b);

// All at inverse temperature 1. For the state of no keys: 0, except log-sum-exp, which is -inf.
WHET_API double row_log_sum_exp(const RowState& state);
WHET_API double row_entropy(const RowState& state);     // nats, >= 0
WHET_API double row_varentropy(const RowState& state);  // variance of ln p under p; -dH/dbeta
WHET_API double row_peak(const RowState& state);        // the largest weight
WHET_API double row_spread(const RowState& state);      // max - min

// Moments of a row at some beta: with y = x - max and e = exp(beta y), the sums of e, e y, e y^2, e y^3
// and e y^4; a function that fills only the first of them says so. At beta = 1, z, t and u are those of the
// state.
struct RowSums {
  double z = 0;
  double t = 0;
  double u = 0;
  double v = 0;
  double w = 0;
};

// Statistics of a row, in this order, all float64. The first seven at inverse temperature 1;
// `beta` is what the rule chose, and the last four are of the weights that the normalizer gives at that
// beta: entropy, largest weight, and
//
//   support    how many visible keys have weight, by the normalizer's formula: also one whose weight is too
//              small for a float counts
//   threshold  the logit that separates them: keys below it have no weight. Keys at it have weight with top-k
//              (where it is the K-th largest logit) and hard (the maximum), but not with sparsemax, entmax15
//              and entmax (max + tau / ((alpha - 1) beta) with the tau of normalizer.h for logits measured
//              from the maximum), relu and softpick (0). -inf where all keys have weight: softmax, sigmoid,
//              and top-k of no more than K keys
//
// A row without visible keys: 0, with max, log_sum_exp and threshold -inf and beta 1. A row with a visible
// NaN or +inf: NaN. A sink isn't a key, so it isn't in support.
struct RowStats {
  double count;
  double max;
  double log_sum_exp;
  double entropy;
  double varentropy;
  double spread;
  double peak;
  double beta;
  double sharp_entropy;
  double sharp_peak;
  double support;
  double threshold;
};

struct StatesOptions {
  int axis = -1;                            // the axis a row runs along; negative counts from the end
  ConstView mask{};                         // boolean, true = visible; sizes equal to `in`'s or 1
  std::span<const std::int64_t> lengths{};  // one per row: only its first keys are visible
};

// The state of every row of `in` (any element type, any strides); `out` holds one per row, rows in
// row-major order of the other axes. Every term of z, t and u is within 1e-6 (1 + |y|) relative
// (f64: 1e-13 (1 + |y|)). execution.workspace isn't used.
WHET_API void states(ConstView in, std::span<RowState> out, const StatesOptions& options = {},
                     const Execution& execution = {});

}  // namespace whet

#endif  // WHET_ROW_H_
