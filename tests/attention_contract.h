// The documented accuracy of attention, asserted against its oracle.
#ifndef WHET_TESTS_ATTENTION_CONTRACT_H_
#define WHET_TESTS_ATTENTION_CONTRACT_H_

#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_oracle.h"
#include "contract.h"

namespace whet {

// Half a unit in the last place of 1, of the arithmetic (float or double).
template <typename Arithmetic>
constexpr double unit() {
  return std::numeric_limits<Arithmetic>::epsilon() / 2;
}

// Of the finite ones: others are hidden, or their results are known to be not finite.
template <typename Real>
double largest(const std::vector<Real>& values) {
  double found = 0;
  for (Real value : values) {
    if (std::isfinite(value)) found = std::max(found, static_cast<double>(std::abs(value)));
  }
  return found;
}

// The largest |got - exact|. Where exact is NaN or infinite got must be the same, else: infinity.
template <typename Got, typename Real>
double largest_error(const std::vector<Got>& got, const std::vector<Real>& exact) {
  if (got.size() != exact.size()) return kInfinity;
  double found = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    const Real value = static_cast<Real>(got[n]);
    const bool same = value == exact[n] || (std::isnan(value) && std::isnan(exact[n]));
    const double error = same ? 0 : static_cast<double>(std::abs(value - exact[n]));
    found = std::max(found, std::isnan(error) ? kInfinity : error);
  }
  return found;
}

// Every |got - exact| at most `bound`, and half a unit of the storage type more.
template <typename Real>
bool expect_all_within(const std::vector<double>& got, const std::vector<Real>& exact, double bound,
                       DType type, const std::string& what) {
  EXPECT_EQ(got.size(), exact.size()) << what;
  for (std::size_t n = 0; n < got.size() && n < exact.size(); ++n) {
    const double error = largest_error(std::vector<double>{got[n]}, std::vector<Real>{exact[n]});
    const double size = static_cast<double>(std::abs(exact[n])) + bound;
    const double stored = size * storage_unit(type) + (type == DType::f16 ? kTinyF16 : 0);
    if (error <= (std::isnan(stored) ? 0 : bound + stored)) continue;
    ADD_FAILURE() << what << "[" << n << "]: got " << testing::PrintToString(got[n]) << ", expected "
                  << static_cast<double>(exact[n]) << ", off by " << error << ", allowed " << bound + stored;
    return false;
  }
  return true;
}

// The plain evaluation is a measure only while it agrees with the oracle: an error of its own, beyond this
// many units, would accept anything.
inline constexpr double kPlainUnits = 0x1p14;

// ---- Output ----

// The contract of attention.h: at most twice the largest error of the plain evaluation, and 4 units of the
// largest value (that many because skipped tiles may move an output by 2).
// An error of a logit moves an output beta times as much, so one row of a large beta would have the largest
// error of a call, in both evaluations, and by luck more in one or in the other. Errors are compared per unit
// of beta therefore; where all betas are 1 that is the contract word for word.
template <typename Arithmetic, typename Real>
void expect_output(const oracle::Attention& p, const oracle::Forward<Real>& exact,
                   const std::vector<double>& got, DType type) {
  const std::size_t size = static_cast<std::size_t>(p.E);
  ASSERT_EQ(got.size(), exact.out.size());
  const auto row_of = [&](const auto& all, std::size_t r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * size);
    return std::vector(begin, begin + static_cast<std::ptrdiff_t>(size));
  };
  const auto sharpness = [&](std::size_t r) { return std::max(1.0, static_cast<double>(exact.betas[r])); };
  const oracle::Forward<Arithmetic> plain = oracle::plain_forward<Arithmetic>(p, exact);
  double error = 0;
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    error = std::max(error, largest_error(row_of(plain.out, r), row_of(exact.out, r)) / sharpness(r));
  }
  ASSERT_LE(error, kPlainUnits * unit<Arithmetic>() * largest(p.v.values)) << "of the plain evaluation";
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    const double bound = 2 * error * sharpness(r) + 4 * unit<Arithmetic>() * largest(p.v.values);
    if (!expect_all_within(row_of(got, r), row_of(exact.out, r), bound, type,
                           "out of row " + std::to_string(r))) {
      return;
    }
  }
}

// ---- Statistics ----

// A kernel's logits aren't those of the oracle: it rounds the scaled query, D products and sums (in any
// order), tanh and the sum with the bias. Each logit is within
//     delta = unit ((D + 4) scale sum |q_d k_d| + 6 |x|),
// the classical bound of a dot product. What that moves the statistics by, to first order, and twice that for
// the higher ones (which needs beta delta << 1: `conditioned`):
//     max, log_sum_exp      delta              spread   2 delta
//     a weight              2 beta delta, relative
//     entropy at beta       beta delta sum w |beta (y - mean)|    (dH/dx_j = -beta w_j beta (y_j - mean))
//     varentropy            2 delta (V + sqrt V)                  (dV/dx_j = p_j ((y_j-mean)^2 - V + 2
//     (y_j-mean)))
// To this comes what contract.h allows for a row whose logits are given.
template <typename Real>
struct Perturbation {
  Real delta = 0;
  Real entropy = 0;        // at 1
  Real sharp_entropy = 0;  // at beta
  Real varentropy = 0;
  bool conditioned = true;
};

template <typename Arithmetic, typename Real>
Real logit_error(const oracle::AttentionRow<Real>& row, std::int64_t size) {
  Real delta = 0;
  for (std::size_t n = 0; n < row.count(); ++n) {
    delta = std::max(delta, static_cast<Real>(size + 4) * row.magnitudes[n] + 6 * std::abs(row.logits.x[n]));
  }
  return delta * unit<Arithmetic>();
}

template <typename Real>
Real entropy_slope(const oracle::BasicRow<Real>& row, Real beta) {
  const oracle::State<Real> s = oracle::state(row, beta);
  Real sum = 0;
  for (Real x : row.x) {
    const Real y = x - s.max;
    sum += beta * oracle::times(std::exp(beta * y) / s.z, std::abs(beta * (y - s.t / s.z)));
  }
  return sum;
}

template <typename Arithmetic, typename Real>
Perturbation<Real> perturbation_of(const oracle::AttentionRow<Real>& row, std::int64_t size, Real beta) {
  Perturbation<Real> moved;
  moved.delta = logit_error<Arithmetic>(row, size);
  moved.entropy = 2 * moved.delta * entropy_slope(row.logits, Real{1});
  moved.sharp_entropy = 2 * moved.delta * entropy_slope(row.logits, beta);
  const Real variance = oracle::moments<Real>(row.logits).variance;
  moved.varentropy = 4 * moved.delta * (variance + std::sqrt(variance));
  moved.conditioned = beta * moved.delta < 0.02L;
  return moved;
}

// A target rule: the residual at the reported beta. When several logits come closer to the maximum than
// logits are known, whether they tie is up to the kernel, and with that whether the target is reachable.
template <typename Arithmetic, typename Real>
void expect_target_beta(const oracle::AttentionRow<Real>& row, const oracle::Rule& rule, double beta,
                        const Perturbation<Real>& moved) {
  EXPECT_GE(beta, 1);
  EXPECT_LE(beta, 0x1p60);
  const oracle::Top<Real> top = oracle::top<Real>(row.logits);
  if (top.gap < 4 * moved.delta) return;
  const oracle::Target target = oracle::target_of<Real>(row.logits, rule);
  if (target == oracle::Target::unreachable) {
    const Real hard = oracle::hard_beta<Real>(row.logits);
    expect_within<Real>(beta, hard, hard * (Contract<Arithmetic>::beta + 4 * moved.delta / top.gap),
                        "beta of an unreachable target");
  } else if (moved.conditioned && (target == oracle::Target::solvable || beta != 1)) {
    const Real shortfall = oracle::shortfall<Real>(row.logits, rule, beta);
    const Real sensitivity = rule.kind == Rule::Kind::target_entropy
                                 ? moved.sharp_entropy
                                 : 4 * Real{beta} * moved.delta * oracle::peak<Real>(row.logits, beta);
    const Real allowed = residual_bound<Arithmetic>(rule, static_cast<double>(row.count()));
    expect_within<Real>(static_cast<double>(shortfall), 0, allowed + sensitivity, "residual of the target");
  }
}

template <typename Arithmetic, typename Real>
void expect_attention_beta(const oracle::AttentionRow<Real>& row, const oracle::Rule& rule, double beta,
                           const Perturbation<Real>& moved) {
  if (row.count() <= 1) {
    EXPECT_EQ(beta, 1);
  } else if (oracle::solves(rule)) {
    expect_target_beta<Arithmetic>(row, rule, beta, moved);
  } else {
    const Real expected = oracle::beta<Real>(row.logits, rule);
    const Real entropy = entropy_bound<Arithmetic>(static_cast<double>(row.count())) + moved.entropy;
    expect_within<Real>(beta, expected,
                        Contract<Arithmetic>::beta * expected + (oracle::of_entropy(rule) ? 3 * entropy : 0),
                        "beta");
  }
}

inline void expect_empty_stats(const RowStats& got) {
  EXPECT_EQ(got.max, -kInfinity);
  EXPECT_EQ(got.log_sum_exp, -kInfinity);
  EXPECT_EQ(got.threshold, -kInfinity);
  EXPECT_EQ(got.beta, 1);
  for (double field : {got.count, got.entropy, got.varentropy, got.spread, got.peak, got.sharp_entropy,
                       got.sharp_peak, got.support}) {
    EXPECT_EQ(field, 0);
  }
}

inline void expect_broken_stats(const RowStats& got) {
  for (double field : {got.max, got.log_sum_exp, got.entropy, got.varentropy, got.spread, got.peak, got.beta,
                       got.sharp_entropy, got.sharp_peak, got.support, got.threshold}) {
    EXPECT_TRUE(std::isnan(field)) << field;
  }
}

// The statistics of one row; `size` is D. What lies in skipped tiles isn't in sharp_entropy: a mass below
// `skipped` spread over n keys at most, which f64 can tell.
template <typename Arithmetic, typename Real>
void expect_attention_stats(const oracle::AttentionRow<Real>& row, std::int64_t size,
                            const oracle::Rule& rule, const RowStats& got, double skipped = 0) {
  if (row.count() == 0) return expect_empty_stats(got);
  if (oracle::is_broken(oracle::state<Real>(row.logits))) return expect_broken_stats(got);
  const Real beta = got.beta;
  const oracle::Stats<Real> exact = oracle::stats_of(row, beta);
  const Perturbation<Real> moved = perturbation_of<Arithmetic>(row, size, beta);
  expect_attention_beta<Arithmetic>(row, rule, got.beta, moved);

  EXPECT_EQ(got.count, static_cast<double>(exact.count));
  EXPECT_EQ(got.support, got.count);
  EXPECT_EQ(got.threshold, -kInfinity);
  const Real rounding = std::abs(exact.max) * std::numeric_limits<double>::epsilon();
  const Real known = Contract<Arithmetic>::weight;
  expect_within<Real>(got.max, exact.max, moved.delta + rounding, "max");
  expect_within<Real>(got.spread, exact.spread, 2 * moved.delta + rounding, "spread");
  expect_within<Real>(got.log_sum_exp, exact.log_sum_exp, moved.delta + known + rounding, "log_sum_exp");
  const Real entropy = entropy_bound<Arithmetic>(got.count + 1);
  expect_within<Real>(got.entropy, exact.entropy, entropy + moved.entropy, "entropy");

  oracle::Row near(std::vector<double>(row.logits.x.begin(), row.logits.x.end()));
  near.sink_last = row.logits.sink_last;
  const SumBounds<Real> sums = sum_bounds<Arithmetic>(near);
  const oracle::State<Real> s = oracle::state<Real>(row.logits);
  const Real varentropy = (sums.u + 2 * std::abs(s.t / s.z) * sums.t + 3 * s.u / s.z * sums.z) / s.z;
  expect_within<Real>(got.varentropy, exact.varentropy, varentropy + moved.varentropy, "varentropy");

  // A sink above all keys makes the largest weight of a key one of some y < 0.
  Real key_max = row.logits.x[0];
  for (std::size_t n = 0; n < row.count(); ++n) key_max = std::max(key_max, row.logits.x[n]);
  const Real y = s.max - key_max;
  expect_within<Real>(got.peak, exact.peak,
                      exact.peak * (known * (1 + y) + 4 * moved.delta) + Contract<Arithmetic>::tiny, "peak");
  if (!moved.conditioned) return;
  const Real unseen = skipped > 0 ? skipped * (2 + std::log(got.count / skipped)) : 0;
  expect_within<Real>(got.sharp_entropy, exact.sharp_entropy, entropy + moved.sharp_entropy + unseen,
                      "sharp_entropy");
  expect_within<Real>(got.sharp_peak, exact.sharp_peak,
                      exact.sharp_peak * (known * (1 + beta * y) + 4 * beta * moved.delta + 2 * skipped) +
                          Contract<Arithmetic>::tiny,
                      "sharp_peak");
}

// ---- Gradients ----

// What the terms of each gradient add up to when nothing cancels: the measure of their rounding.
template <typename Real>
oracle::Gradients<Real> magnitudes(oracle::Attention p, const oracle::Forward<Real>& f, bool through_rule) {
  const auto absolute = [](std::vector<double>& values) {
    for (double& value : values) value = std::abs(value);
  };
  for (oracle::Array* array : {&p.q, &p.k, &p.v, &p.dout, &p.query_scale}) absolute(array->values);
  oracle::Gradients<Real> g(p);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    oracle::AttentionRow<Real> row = f.rows[r];
    if (row.count() == 0) return;
    for (Real& slope : row.cap_slopes) slope = 2 - slope;  // 1 + tanh^2 where the slope is 1 - tanh^2
    const std::vector<Real> w = oracle::weights(row.logits, f.betas[r]);
    const std::vector<Real> dw = oracle::weight_gradients(p, b, h, i, row);
    const Real max = oracle::state<Real>(row.logits).max;
    Real mean = 0;
    for (std::size_t n = 0; n < w.size(); ++n) mean += w[n] * dw[n];
    std::vector<Real> dx(w.size());
    Real sum_b = 0;
    for (std::size_t n = 0; n < w.size(); ++n) {
      dx[n] = f.betas[r] * w[n] * (dw[n] + mean);
      sum_b += oracle::times(w[n], (max - row.logits.x[n]) * (dw[n] + mean));
    }
    const std::vector<Real> dbeta = oracle::beta_gradient(row.logits, p.rule(h), f.betas[r]);
    for (std::size_t n = 0; n < w.size() && through_rule; ++n) dx[n] += sum_b * std::abs(dbeta[n]);
    oracle::add_row(p, b, h, i, row, w, dx, g);
  });
  return g;
}

// How much more than the plain evaluation a gradient may be off: `times` its largest error, and `units` of
// the largest sum of magnitudes of its terms.
struct GradientBound {
  double times = 2;
  double units = 8;
};

// The gradients of the oracle beside the largest error allowed in each.
template <typename Arithmetic>
class ExpectedGradients {
 public:
  using Real = typename Contract<Arithmetic>::Real;

  ExpectedGradients(const oracle::Attention& p, const oracle::Forward<Real>& exact, bool through_rule,
                    const GradientBound& allowed = {})
      : p_(p), exact_(oracle::backward(p, exact, through_rule)) {
    const oracle::Gradients<Arithmetic> plain =
        oracle::plain_backward(p, oracle::plain_forward<Arithmetic>(p, exact), exact, through_rule);
    const oracle::Gradients<Real> sizes = magnitudes(p, exact, through_rule);
    double sharpest = 1;
    for (const Real beta : exact.betas) sharpest = std::max(sharpest, static_cast<double>(beta));
    const auto bound = [&](const auto& of_plain, const std::vector<Real>& of, const std::vector<Real>& size) {
      const double error = largest_error(of_plain, of);
      const double one = unit<Arithmetic>() * largest(size);
      // Smaller weights may be 0: in each of N rows one times dout, or times beta and the difference of two
      // <dout, v>.
      const double tiny = Contract<Arithmetic>::tiny * static_cast<double>(p.N) * largest(p.dout.values) *
                          (1 + 2 * sharpest * static_cast<double>(p.E) * largest(p.v.values));
      EXPECT_LE(error, kPlainUnits * one + tiny) << "of the plain evaluation";
      return allowed.times * error + allowed.units * one + tiny;
    };
    dq_ = bound(plain.dq, exact_.dq, sizes.dq);
    dk_ = bound(plain.dk, exact_.dk, sizes.dk);
    dv_ = bound(plain.dv, exact_.dv, sizes.dv);
    dsinks_ = bound(plain.dsinks, exact_.dsinks, sizes.dsinks);
    if (p.query_scale.given()) {
      const auto reduce = [&](const auto& full) {
        return oracle::reduced_rows(p, full, p.query_scale.sizes);
      };
      exact_.dquery_scale = reduce(exact_.dquery_scale);
      dquery_scale_ = bound(reduce(plain.dquery_scale), exact_.dquery_scale, reduce(sizes.dquery_scale));
    }
    if (!p.bias.given()) return;
    const auto reduce = [&](const auto& full) { return oracle::reduced(p, full, p.bias.sizes); };
    exact_.dbias = reduce(exact_.dbias);
    dbias_ = bound(reduce(plain.dbias), exact_.dbias, reduce(sizes.dbias));
  }

  // What a call wrote.
  void expect(AttentionCall& call) const { expect(call, call.gradients()); }

  // Those that were wanted.
  void expect(const AttentionCall& call, const AttentionGradients& wanted) const {
    expect(call.dq, wanted.dq, exact_.dq, dq_, "dq");
    expect(call.dk, wanted.dk, exact_.dk, dk_, "dk");
    expect(call.dv, wanted.dv, exact_.dv, dv_, "dv");
    if (p_.sinks.given()) expect(call.dsinks, wanted.dsinks, exact_.dsinks, dsinks_, "dsinks");
    if (p_.query_scale.given()) {
      expect(call.dquery_scale, wanted.dquery_scale, exact_.dquery_scale, dquery_scale_, "dquery_scale");
    }
    if (p_.bias.given()) expect(call.dbias, wanted.dbias, exact_.dbias, dbias_, "dbias");
  }

 private:
  void expect(const Placed& got, const View& wanted, const std::vector<Real>& exact, double bound,
              const char* name) const {
    if (wanted.data == nullptr) return;
    expect_all_within(got.values(), exact, bound, got.type(), name);
    EXPECT_TRUE(got.gaps_are_intact()) << name;
  }

  const oracle::Attention& p_;
  oracle::Gradients<Real> exact_;
  double dq_ = 0, dk_ = 0, dv_ = 0, dbias_ = 0, dsinks_ = 0, dquery_scale_ = 0;
};

}  // namespace whet

#endif  // WHET_TESTS_ATTENTION_CONTRACT_H_
