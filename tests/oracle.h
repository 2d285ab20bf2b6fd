// The oracle: one row of softmax with a rule, its statistics and its gradient, in plain scalar code.
//
// Shares nothing with the kernels: every sum runs over the row in key order, every quantity is
// recomputed from the row at the beta in question, and target rules are solved by bisection. The
// scalar type is double for checking f32 kernels and long double for checking f64 ones; sums are
// compensated (Neumaier), so that the oracle's own error never matters.
//
// Notation, over the visible keys of a row: y_i = x_i - max, w = softmax(beta x), p = softmax(x),
//     z = sum e^(beta y_i)     t = sum e^(beta y_i) y_i     u = sum e^(beta y_i) y_i^2
#ifndef WHET_TESTS_ORACLE_H_
#define WHET_TESTS_ORACLE_H_

#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace whet::oracle {

// A key is visible if its flag says so and its logit isn't -inf. `sink_last`: the last entry is a sink, a
// logit without a key that counts everywhere but in count and min. Logits are double, except those that
// attention computes for checking f64 kernels.
template <typename X>
struct BasicRow {
  std::vector<X> x;
  std::vector<bool> flags;
  bool sink_last = false;

  BasicRow() = default;
  explicit BasicRow(std::vector<X> logits) : x(std::move(logits)), flags(x.size(), true) {}
  BasicRow(std::vector<X> logits, std::vector<bool> visible_flags)
      : x(std::move(logits)), flags(std::move(visible_flags)) {}

  std::size_t size() const { return x.size(); }
  bool visible(std::size_t i) const { return flags[i] && x[i] != -std::numeric_limits<X>::infinity(); }
  bool is_key(std::size_t i) const { return !(sink_last && i + 1 == x.size()); }
};
using Row = BasicRow<double>;

struct Rule {
  whet::Rule::Kind kind = whet::Rule::Kind::none;
  double parameter = 1;                   // b, s of ssmax, n0, d, h or w
  double factor = 1;                      // s of log_length and llama4, b of log_power
  std::vector<double> coefficients = {};  // highest power first
  double gate = 0.5;
  double hold = std::numeric_limits<double>::infinity();
  double exponent = 1;  // g of log_power
};

inline const std::vector<double>& paper_coefficients() {
  static const std::vector<double> coefficients = {-0.037, 0.481, -2.3, 4.917, -1.791};
  return coefficients;
}

template <typename Real>
class Sum {
 public:
  void add(Real value) {
    const Real next = sum_ + value;
    if (std::isfinite(next)) {
      lost_ += std::abs(sum_) >= std::abs(value) ? (sum_ - next) + value : (value - next) + sum_;
    }
    sum_ = next;
  }
  Real value() const { return sum_ + lost_; }

 private:
  Real sum_ = 0;
  Real lost_ = 0;
};

// A weight of 0 times an infinite y counts as 0.
template <typename Real>
Real times(Real weight, Real y) {
  return weight == 0 ? Real{0} : weight * y;
}

template <typename Real>
struct State {
  std::int64_t count = 0;
  Real min = std::numeric_limits<Real>::infinity();
  Real max = -std::numeric_limits<Real>::infinity();
  Real z = 0;
  Real t = 0;
  Real u = 0;
};

template <typename Real, typename X>
State<Real> state(const BasicRow<X>& row, Real beta = 1) {
  State<Real> s;
  bool broken = false;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    const Real x = row.x[i];
    broken = broken || std::isnan(x) || x == std::numeric_limits<Real>::infinity();
    s.max = std::max(s.max, x);
    if (!row.is_key(i)) continue;
    ++s.count;
    s.min = std::min(s.min, x);
  }
  if (broken) {
    s.min = s.max = s.z = s.t = s.u = std::numeric_limits<Real>::quiet_NaN();
    return s;
  }
  Sum<Real> z, t, u;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    const Real y = Real{row.x[i]} - s.max;
    const Real e = std::exp(beta * y);
    z.add(e);
    t.add(times(e, y));
    u.add(times(e, y * y));
  }
  s.z = z.value();
  s.t = t.value();
  s.u = u.value();
  return s;
}

template <typename Real>
bool is_broken(const State<Real>& s) {
  return std::isnan(s.z);
}

template <typename Real, typename X>
Real entropy(const BasicRow<X>& row, Real beta = 1) {
  const State<Real> s = state(row, beta);
  return s.count == 0 ? Real{0} : std::log(s.z) - beta * s.t / s.z;
}

template <typename Real, typename X>
Real peak(const BasicRow<X>& row, Real beta = 1) {
  const State<Real> s = state(row, beta);
  return s.count == 0 ? Real{0} : 1 / s.z;
}

template <typename Real, typename X>
Real log_sum_exp(const BasicRow<X>& row) {
  const State<Real> s = state<Real>(row);
  return s.count == 0 ? -std::numeric_limits<Real>::infinity() : s.max + std::log(s.z);
}

// Weights at beta; 0 for keys that aren't visible, NaN everywhere if a visible logit is NaN or +inf.
template <typename Real, typename X>
std::vector<Real> weights(const BasicRow<X>& row, Real beta) {
  std::vector<Real> w(row.size(), Real{0});
  const State<Real> s = state(row, beta);
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (is_broken(s)) w[i] = std::numeric_limits<Real>::quiet_NaN();
    if (!is_broken(s) && row.visible(i)) w[i] = std::exp(beta * (Real{row.x[i]} - s.max)) / s.z;
  }
  return w;
}

// mean = sum w_i y_i and variance = sum w_i (y_i - mean)^2. At beta = 1 the variance is the varentropy.
template <typename Real>
struct Moments {
  Real mean = 0;
  Real variance = 0;
};

template <typename Real, typename X>
Moments<Real> moments(const BasicRow<X>& row, Real beta = 1) {
  const State<Real> s = state(row, beta);
  if (s.count == 0) return {};
  Moments<Real> m;
  m.mean = s.t / s.z;
  Sum<Real> variance;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    const Real y = Real{row.x[i]} - s.max;
    variance.add(times(std::exp(beta * y) / s.z, (y - m.mean) * (y - m.mean)));
  }
  m.variance = variance.value();
  return m;
}

// Number of visible entries that share the maximum, and the distance to the next distinct value below.
template <typename Real>
struct Top {
  std::int64_t ties = 0;
  Real gap = std::numeric_limits<Real>::infinity();
};

template <typename Real, typename X>
Top<Real> top(const BasicRow<X>& row) {
  Real max = -std::numeric_limits<Real>::infinity();
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (row.visible(i)) max = std::max(max, Real{row.x[i]});
  }
  Top<Real> found;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    if (Real{row.x[i]} == max) {
      ++found.ties;
    } else {
      found.gap = std::min(found.gap, max - Real{row.x[i]});
    }
  }
  return found;
}

template <typename Real>
Real polynomial(const std::vector<double>& coefficients, Real h) {
  Real sum = 0;
  for (std::size_t k = 0; k < coefficients.size(); ++k) {
    sum += static_cast<Real>(coefficients[k]) * std::pow(h, static_cast<Real>(coefficients.size() - 1 - k));
  }
  return sum;
}

template <typename Real>
Real polynomial_slope(const std::vector<double>& coefficients, Real h) {
  Real sum = 0;
  for (std::size_t k = 0; k + 1 < coefficients.size(); ++k) {
    const Real power = static_cast<Real>(coefficients.size() - 1 - k);
    sum += static_cast<Real>(coefficients[k]) * power * std::pow(h, power - 1);
  }
  return sum;
}

// What a target rule meets on a row.
enum class Target { already_met, solvable, unreachable };

template <typename Real, typename X>
Target target_of(const BasicRow<X>& row, const Rule& rule) {
  const Top<Real> at_top = top<Real>(row);
  const Real ties = static_cast<Real>(at_top.ties);
  const Real target = rule.parameter;
  if (std::isinf(at_top.gap)) return Target::already_met;  // all equal
  if (rule.kind == whet::Rule::Kind::target_entropy) {
    if (entropy<Real>(row) <= target) return Target::already_met;
    return target <= std::log(ties) ? Target::unreachable : Target::solvable;
  }
  if (peak<Real>(row) >= target) return Target::already_met;
  return target >= 1 / ties ? Target::unreachable : Target::solvable;
}

// So large that only entries that share the maximum keep weight in f32.
template <typename Real, typename X>
Real hard_beta(const BasicRow<X>& row) {
  Real entries = 0;
  for (std::size_t i = 0; i < row.size(); ++i) entries += row.visible(i) ? Real{1} : Real{0};
  const Real hard = (std::log(entries) + 24 * std::log(Real{2})) / top<Real>(row).gap;
  return std::clamp(hard, Real{1}, std::ldexp(Real{1}, 60));
}

// Distance from the target at beta, positive while beta is too small.
template <typename Real, typename X>
Real shortfall(const BasicRow<X>& row, const Rule& rule, Real beta) {
  if (rule.kind == whet::Rule::Kind::target_entropy) return entropy(row, beta) - Real{rule.parameter};
  return Real{rule.parameter} - peak(row, beta);
}

template <typename Real, typename X>
Real solve(const BasicRow<X>& row, const Rule& rule) {
  const Real limit = std::ldexp(Real{1}, 60);
  Real low = 1;
  Real high = 2;
  while (high < limit && shortfall(row, rule, high) > 0) {
    low = high;
    high *= 2;
  }
  if (shortfall(row, rule, high) > 0) return limit;
  for (int step = 0; step < 80; ++step) {
    const Real middle = low + (high - low) / 2;
    (shortfall(row, rule, middle) > 0 ? low : high) = middle;
  }
  return low + (high - low) / 2;
}

template <typename Real, typename X>
Real beta(const BasicRow<X>& row, const Rule& rule) {
  using Kind = whet::Rule::Kind;
  const State<Real> s = state<Real>(row);
  if (is_broken(s)) return std::numeric_limits<Real>::quiet_NaN();
  if (s.count <= 1) return 1;
  const Real log_count = std::log(static_cast<Real>(s.count));
  const Real parameter = rule.parameter;
  Real b = 1;
  switch (rule.kind) {
    case Kind::none:
      break;
    case Kind::fixed:
      b = parameter;
      break;
    case Kind::paper:
    case Kind::polynomial: {
      const Real h = entropy<Real>(row);
      if (h > Real{rule.gate}) {
        b = std::max(Real{1}, polynomial(rule.coefficients, std::min(h, Real{rule.hold})));
      }
      break;
    }
    case Kind::log_length:
      b = std::max(Real{1}, Real{rule.factor} * log_count / std::log(parameter));
      break;
    case Kind::ssmax:
      b = parameter * log_count;
      break;
    case Kind::log_power:
      b = parameter + Real{rule.factor} * std::exp(Real{rule.exponent} * std::log(log_count));
      break;
    case Kind::llama4:
      b = 1 + Real{rule.factor} *
                  std::log(static_cast<Real>(s.count / static_cast<std::int64_t>(rule.parameter) + 1));
      break;
    case Kind::target_entropy:
    case Kind::target_peak: {
      const Target target = target_of<Real>(row, rule);
      if (target == Target::solvable) b = solve<Real>(row, rule);
      if (target == Target::unreachable) b = hard_beta<Real>(row);
      break;
    }
  }
  return std::clamp(b, std::ldexp(Real{1}, -60), std::ldexp(Real{1}, 60));
}

inline bool of_entropy(const Rule& rule) {
  return rule.kind == whet::Rule::Kind::paper || rule.kind == whet::Rule::Kind::polynomial;
}

inline bool solves(const Rule& rule) {
  return rule.kind == whet::Rule::Kind::target_entropy || rule.kind == whet::Rule::Kind::target_peak;
}

// Whether beta moves with the logits here. On the constant side of a kink it doesn't.
template <typename Real, typename X>
bool moves(const BasicRow<X>& row, const Rule& rule) {
  if (state<Real>(row).count <= 1) return false;
  if (solves(rule)) return target_of<Real>(row, rule) == Target::solvable;
  if (!of_entropy(rule)) return false;
  const Real h = entropy<Real>(row);
  return h > Real{rule.gate} && h < Real{rule.hold} && polynomial(rule.coefficients, h) > 1;
}

// d beta / dx_i.
template <typename Real, typename X>
std::vector<Real> beta_gradient(const BasicRow<X>& row, const Rule& rule, Real beta) {
  using Kind = whet::Rule::Kind;
  std::vector<Real> d(row.size(), Real{0});
  if (!moves<Real>(row, rule)) return d;
  const State<Real> s = state<Real>(row);

  if (of_entropy(rule)) {
    const Real slope = polynomial_slope(rule.coefficients, entropy<Real>(row));
    const std::vector<Real> p = weights(row, Real{1});
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row.visible(i)) d[i] = slope * -times(p[i], Real{row.x[i]} - s.max - s.t / s.z);
    }
    return d;
  }

  const std::vector<Real> w = weights(row, beta);
  const Moments<Real> m = moments(row, beta);
  const Real ties = static_cast<Real>(top<Real>(row).ties);
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    const Real y = Real{row.x[i]} - s.max;
    if (rule.kind == Kind::target_entropy) {
      d[i] = -beta * times(w[i], y - m.mean) / m.variance;
    } else {
      // The peak of several equal maxima moves with their mean: each has an even share of t.
      d[i] = beta * (w[i] - (y == 0 ? 1 / ties : Real{0})) / std::abs(m.mean);
    }
  }
  return d;
}

// dL/dx from g = dL/dw. `through_rule`: beta depends on x; else it counts as a constant.
template <typename Real, typename X>
std::vector<Real> gradient(const BasicRow<X>& row, const std::vector<X>& g, const Rule& rule,
                           bool through_rule, Real beta) {
  std::vector<Real> dx(row.size(), Real{0});
  const State<Real> state_at_1 = state<Real>(row);
  if (is_broken(state_at_1)) {
    dx.assign(row.size(), std::numeric_limits<Real>::quiet_NaN());
    return dx;
  }
  const std::vector<Real> w = weights(row, beta);
  Sum<Real> sum_d;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (row.visible(i)) sum_d.add(w[i] * Real{g[i]});
  }
  const Real d = sum_d.value();
  std::vector<Real> s(row.size(), Real{0});
  Sum<Real> sum_b;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    s[i] = w[i] * (Real{g[i]} - d);
    sum_b.add(times(s[i], Real{row.x[i]} - state_at_1.max));
  }
  for (std::size_t i = 0; i < row.size(); ++i) dx[i] = beta * s[i];
  if (!through_rule) return dx;
  const std::vector<Real> dbeta = beta_gradient(row, rule, beta);
  for (std::size_t i = 0; i < row.size(); ++i) dx[i] += sum_b.value() * dbeta[i];
  return dx;
}

}  // namespace whet::oracle

#endif  // WHET_TESTS_ORACLE_H_
