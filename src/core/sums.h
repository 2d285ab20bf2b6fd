// What follows from the moments of a row.
#ifndef WHET_CORE_SUMS_H_
#define WHET_CORE_SUMS_H_

#include <whet/row.h>

#include <cmath>
#include <limits>

namespace whet::core {

using Sums = RowSums;

// Entropy of the weights e / z. -0 and rounding below 0 become 0; NaN stays.
inline double entropy_of(const Sums& s, double beta) {
  const double h = std::log(s.z) - beta * s.t / s.z;
  return h > 0 || std::isnan(h) ? h : 0;
}

// The stats of a row of softmax: `state` at inverse temperature 1, `sharp` at beta.
inline RowStats stats_of(const RowState& state, double beta, const Sums& sharp) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  if (std::isnan(state.z)) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, nan};
  }
  if (state.count == 0) return {0, -kInf, -kInf, 0, 0, 0, 0, 1, 0, 0, 0, -kInf};
  return {.count = static_cast<double>(state.count),
          .max = state.max,
          .log_sum_exp = row_log_sum_exp(state),
          .entropy = row_entropy(state),
          .varentropy = row_varentropy(state),
          .spread = row_spread(state),
          .peak = row_peak(state),
          .beta = beta,
          .sharp_entropy = entropy_of(sharp, beta),
          .sharp_peak = 1 / sharp.z,
          .support = static_cast<double>(state.count),
          .threshold = -kInf};
}

}  // namespace whet::core

#endif  // WHET_CORE_SUMS_H_
