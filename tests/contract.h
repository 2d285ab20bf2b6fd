// The documented accuracy of the row functions, asserted for one row against the oracle.
#ifndef WHET_TESTS_CONTRACT_H_
#define WHET_TESTS_CONTRACT_H_

#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "cases.h"
#include "oracle.h"

namespace whet {

// Bounds as the headers state them. `tiny`: weights smaller than this are only within this.
template <typename T>
struct Contract;

template <>
struct Contract<float> {
  using Real = double;
  static constexpr double weight = 1e-6;
  static constexpr double tiny = 1e-30;
  static constexpr double entropy = 1e-6;
  static constexpr double sums = 1e-6;  // terms of z, t and u
  static constexpr double beta = 0x1p-22;
  static constexpr double gradient = 1e-6;
};

template <>
struct Contract<double> {
  using Real = long double;
  static constexpr double weight = 1e-13;
  static constexpr double tiny = 0x1p-1021;
  static constexpr double entropy = 1e-12;
  static constexpr double sums = 1e-13;
  static constexpr double beta = 0x1p-50;
  static constexpr double gradient = 1e-13;
};

// Half a unit in the last place of 1 of a 16-bit storage type; 0 for the types of the arithmetic.
inline double storage_unit(DType type) {
  return type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-11 : 0;
}
inline constexpr double kTinyF16 = 0x1p-25;  // half the distance of denormals

// What rounding to the storage type adds to a value of this size, which f16 may not hold at all.
template <typename Real>
Real storage_error(DType type, Real size) {
  if (type == DType::f16 && size > 65504) return std::numeric_limits<Real>::infinity();
  return size * static_cast<Real>(storage_unit(type)) + (type == DType::f16 ? Real{kTinyF16} : Real{0});
}

template <typename T>
double entropy_bound(double count) {
  return Contract<T>::entropy * std::max(1.0, std::log(count));
}

// By how much a target rule may miss its target.
template <typename T>
double residual_bound(const oracle::Rule& rule, double count) {
  return rule.kind == Rule::Kind::target_entropy ? std::max(2e-6, entropy_bound<T>(count)) : 2e-6;
}

// |value - expected| <= bound, with enough digits to see by how much it isn't.
template <typename Real>
bool expect_within(double value, Real expected, Real bound, const std::string& what) {
  if (std::abs(Real{value} - expected) <= bound) return true;
  ADD_FAILURE() << what << ": got " << testing::PrintToString(value) << ", expected "
                << static_cast<double>(expected) << ", off by " << static_cast<double>(Real{value} - expected)
                << ", allowed " << static_cast<double>(bound);
  return false;
}

// What z, t and u may be off by: every term e^y y^k by 1e-6 (1 + |y|) relative (f64: 1e-13), where e^y
// is smaller than `tiny` by `tiny` in place of e^y.
template <typename Real>
struct SumBounds {
  Real z = 0;
  Real t = 0;
  Real u = 0;
};

template <typename T>
SumBounds<typename Contract<T>::Real> sum_bounds(const oracle::Row& row) {
  using Real = typename Contract<T>::Real;
  const Real max = oracle::state<Real>(row).max;
  SumBounds<Real> bounds;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) continue;
    const Real y = Real{row.x[i]} - max;
    const Real e = std::exp(y);
    const Real off =
        e < Contract<T>::tiny ? Real{Contract<T>::tiny} : e * Contract<T>::sums * (1 + std::abs(y));
    bounds.z += off;
    bounds.t += off * std::abs(y);
    bounds.u += off * y * y;
  }
  return bounds;
}

template <typename T>
void expect_states_close(const oracle::Row& row, const RowState& got) {
  using Real = typename Contract<T>::Real;
  const oracle::State<Real> s = oracle::state<Real>(row);
  const SumBounds<Real> bounds = sum_bounds<T>(row);
  EXPECT_EQ(got.count, s.count);
  EXPECT_EQ(got.min, static_cast<double>(s.min));
  EXPECT_EQ(got.max, static_cast<double>(s.max));
  expect_within<Real>(got.z, s.z, bounds.z, "z");
  expect_within<Real>(got.t, s.t, bounds.t, "t");
  expect_within<Real>(got.u, s.u, bounds.u, "u");
}

// The statistics at beta = 1. The bound of varentropy follows from those of z, t and u, that of
// log-sum-exp from that of the largest weight, 1 / z.
template <typename T>
void expect_stats_close(const oracle::Row& row, const RowStats& got) {
  using Real = typename Contract<T>::Real;
  const oracle::State<Real> s = oracle::state<Real>(row);
  const double count = static_cast<double>(s.count);
  EXPECT_EQ(got.count, count);
  EXPECT_EQ(got.max, static_cast<double>(s.max));
  EXPECT_EQ(got.spread, static_cast<double>(s.max) - static_cast<double>(s.min));
  const Real rounding = std::abs(s.max) * std::numeric_limits<double>::epsilon();
  expect_within<Real>(got.log_sum_exp, oracle::log_sum_exp<Real>(row), Contract<T>::weight + rounding, "lse");
  expect_within<Real>(got.entropy, oracle::entropy<Real>(row), entropy_bound<T>(count), "entropy");
  const SumBounds<Real> bounds = sum_bounds<T>(row);
  const Real mean = std::abs(s.t / s.z);
  expect_within<Real>(got.varentropy, oracle::moments<Real>(row).variance,
                      (bounds.u + 2 * mean * bounds.t + 3 * s.u / s.z * bounds.z) / s.z, "varentropy");
  expect_within<Real>(got.peak, 1 / s.z, Contract<T>::weight / s.z, "peak");
}

template <typename T>
void expect_beta_of_target(const oracle::Row& row, const oracle::Rule& rule, double beta) {
  using Real = typename Contract<T>::Real;
  const oracle::Target target = oracle::target_of<Real>(row, rule);
  const Real shortfall = oracle::shortfall<Real>(row, rule, beta);
  const Real allowed = residual_bound<T>(rule, static_cast<double>(oracle::state<Real>(row).count));
  EXPECT_GE(beta, 1);
  if (target == oracle::Target::unreachable) {
    const Real hard = oracle::hard_beta<Real>(row);
    expect_within<Real>(beta, hard, Contract<T>::beta * hard, "beta of an unreachable target");
  } else if (target == oracle::Target::solvable) {
    expect_within<Real>(static_cast<double>(shortfall), 0, allowed, "residual of the target rule");
  } else if (beta != 1) {
    // Met already, by less than the kernel can tell.
    expect_within<Real>(static_cast<double>(shortfall), 0, allowed, "target met before sharpening");
  }
}

template <typename T>
void expect_beta(const oracle::Row& row, const oracle::Rule& rule, double beta) {
  using Real = typename Contract<T>::Real;
  const double count = static_cast<double>(oracle::state<Real>(row).count);
  if (count <= 1) {
    EXPECT_EQ(beta, 1);
    return;
  }
  const bool solves = rule.kind == Rule::Kind::target_entropy || rule.kind == Rule::Kind::target_peak;
  if (solves) {
    expect_beta_of_target<T>(row, rule, beta);
    return;
  }
  const Real expected = oracle::beta<Real>(row, rule);
  const bool of_entropy = rule.kind == Rule::Kind::paper || rule.kind == Rule::Kind::polynomial;
  expect_within<Real>(beta, expected,
                      Contract<T>::beta * expected + (of_entropy ? 3 * entropy_bound<T>(count) : 0), "beta");
}

// Weights at this beta, up to the first one that is wrong. `stored`: the type they were rounded to.
template <typename T>
void expect_weights(const oracle::Row& row, double beta, const std::vector<T>& got,
                    DType stored = DTypeOf<T>::value) {
  using Real = typename Contract<T>::Real;
  const oracle::State<Real> s = oracle::state<Real>(row);
  const std::vector<Real> w = oracle::weights<Real>(row, beta);
  ASSERT_EQ(got.size(), w.size());
  oracle::Sum<Real> sum, sum_bound;
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (!row.visible(i)) {
      ASSERT_EQ(got[i], T{0}) << "key " << i << " isn't visible";
      continue;
    }
    const Real relative = Contract<T>::weight * (1 + std::abs(Real{beta} * (Real{row.x[i]} - s.max)));
    Real bound = w[i] >= Contract<T>::tiny ? relative * w[i] : Real{Contract<T>::tiny};
    bound += storage_error(stored, w[i] + bound);
    if (!expect_within<Real>(got[i], w[i], bound, "weight of key " + std::to_string(i))) return;
    sum.add(got[i]);
    sum_bound.add(bound);
  }
  if (s.count == 0) return;
  const Real bound = stored == DType::f32 ? Real{1e-6} : sum_bound.value();
  expect_within<Real>(static_cast<double>(sum.value() - 1), 0, bound, "sum of weights minus 1");
}

// Statistics and beta of one row.
template <typename T>
void expect_row_stats(const oracle::Row& row, const oracle::Rule& rule, const RowStats& stats) {
  using Real = typename Contract<T>::Real;
  expect_stats_close<T>(row, stats);
  expect_beta<T>(row, rule, stats.beta);
  expect_within<Real>(stats.sharp_entropy, oracle::entropy<Real>(row, stats.beta),
                      entropy_bound<T>(stats.count), "sharp_entropy");
  const Real peak = oracle::peak<Real>(row, stats.beta);
  expect_within<Real>(stats.sharp_peak, peak, Contract<T>::weight * peak, "sharp_peak");
  EXPECT_EQ(stats.support, stats.count);
  EXPECT_EQ(stats.threshold, -std::numeric_limits<double>::infinity());
}

// Everything the contract says about one row of softmax.
template <typename T>
void expect_contract(const oracle::Row& row, const oracle::Rule& rule, const std::vector<T>& got,
                     const RowStats& stats) {
  using Real = typename Contract<T>::Real;
  expect_weights<T>(row, stats.beta, got);
  if (oracle::state<Real>(row).count > 0) expect_row_stats<T>(row, rule, stats);
}

// Statistics and beta of sharpen, where `row` holds ln(p / max p) and `log_max` is ln max p: logarithms are
// rounded, which the exact comparisons of softmax don't know.
template <typename T>
void expect_sharpen_stats(const oracle::Row& row, typename Contract<T>::Real log_max,
                          const oracle::Rule& rule, const RowStats& stats) {
  using Real = typename Contract<T>::Real;
  const oracle::State<Real> s = oracle::state<Real>(row);
  expect_beta<T>(row, rule, stats.beta);
  EXPECT_EQ(stats.count, static_cast<double>(s.count));
  const Real log_bound = Contract<T>::sums * (1 + std::abs(log_max));
  expect_within<Real>(stats.max, log_max, log_bound, "max");
  expect_within<Real>(stats.spread, s.max - s.min, Contract<T>::sums * (1 + s.max - s.min), "spread");
  expect_within<Real>(stats.entropy, oracle::entropy<Real>(row), entropy_bound<T>(stats.count), "entropy");
  expect_within<Real>(stats.log_sum_exp, log_max + oracle::log_sum_exp<Real>(row), log_bound, "log_sum_exp");
  expect_within<Real>(stats.peak, 1 / s.z, Contract<T>::weight / s.z, "peak");
}

// The documented bound of softmax_backward: 1e-6 (1 + |beta y|) of max|dout| per key and unit of beta (f64:
// 1e-13).
template <typename T>
void expect_gradient(const oracle::Row& row, const std::vector<double>& g, const oracle::Rule& rule,
                     BetaGradient mode, double beta, const std::vector<T>& got,
                     DType stored = DTypeOf<T>::value) {
  using Real = typename Contract<T>::Real;
  const std::vector<Real> expected =
      oracle::gradient<Real>(row, g, rule, mode == BetaGradient::through_rule, beta);
  const Real max = oracle::state<Real>(row).max;
  double largest = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (row.visible(i)) largest = std::max(largest, std::abs(g[i]));
  }
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (!row.visible(i)) {
      ASSERT_EQ(got[i], T{0}) << "key " << i << " isn't visible";
      continue;
    }
    const Real y = Real{row.x[i]} - max;
    Real bound = Contract<T>::gradient * (1 + std::abs(Real{beta} * y)) * largest * Real{beta};
    bound += storage_error(stored, std::abs(expected[i]) + bound);
    if (!expect_within<Real>(got[i], expected[i], bound, "gradient of key " + std::to_string(i))) return;
  }
}

}  // namespace whet

#endif  // WHET_TESTS_CONTRACT_H_
