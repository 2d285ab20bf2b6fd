// The gradient of a row of softmax through its rule: sums over the row become the coefficients of one line.
#ifndef WHET_CORE_SLOPE_H_
#define WHET_CORE_SLOPE_H_

#include <whet/rule.h>

namespace whet::core {

// Sums of w g, w y g, w y and w y^2, where w are the weights, g = dL/dw, and y is measured from some mean.
struct BackwardSums {
  double wg = 0, wyg = 0, wy = 0, wyy = 0;
};

// dx = w (constant + g_factor g + y_factor (y - mean)) + p_factor e^y (y - plain_mean) - peak_share at the
// maximum.
struct BackwardLine {
  double constant = 0, g_factor = 0, y_factor = 0, p_factor = 0, peak_share = 0;
};

// dL/dbeta = B = sum y w (g - D).
inline double beta_slope(const BackwardSums& sums) { return sums.wyg - sums.wg * sums.wy; }

// beta = rule(H(x)),  dH/dx = -p (y - mean of y under p). `slope`: dbeta/dH over the sum of e^y.
inline void add_rule_of_entropy(double slope, const BackwardSums& sums, BackwardLine& line) {
  line.p_factor = -beta_slope(sums) * slope;
}

// A rule that solves for beta, which is reached: `ties` keys are at the maximum. `mean`: from where y of the
// sums is measured.
inline void add_rule_of_target(const Rule& rule, double beta, double mean, double ties,
                               const BackwardSums& sums, BackwardLine& line) {
  const double b = beta_slope(sums);
  if (rule.kind() == Rule::Kind::target_entropy) {
    // H(beta, x) = h:  dbeta/dx = -beta w (y - mean) / variance of y under w
    const double variance = sums.wyy - sums.wy * sums.wy;
    if (!(variance > 0)) return;
    line.y_factor = -b * beta / variance;
    line.constant -= line.y_factor * sums.wy;
  } else {
    // sum e^(beta y) = 1 / peak, y = x - max:  dbeta/dx = beta (w - [x = max] / ties) / -mean
    const double exact_mean = mean + sums.wy;
    if (!(exact_mean < 0)) return;
    line.constant += b * beta / -exact_mean;
    line.peak_share = b * beta / -exact_mean / ties;
  }
}

}  // namespace whet::core

#endif  // WHET_CORE_SLOPE_H_
