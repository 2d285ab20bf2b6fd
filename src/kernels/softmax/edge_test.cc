// The edge cases every row function promises: what comes out of rows without keys, of one key, of
// equal keys, of NaN and infinities; and which arguments are refused before anything is written.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "targets.h"

namespace whet {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kFloatNaN = std::numeric_limits<float>::quiet_NaN();

// One row through every function; g is its upstream gradient.
template <typename T>
struct Everything {
  std::vector<T> weights;
  std::vector<T> gradient;
  RowStats stats;
  RowState state;
};

template <typename T>
Everything<T> run(const std::vector<T>& x, const std::vector<T>& g, const Rule& rule,
                  std::span<const std::int64_t> lengths = {}) {
  const Dims sizes = {static_cast<std::int64_t>(x.size())};
  Everything<T> all{std::vector<T>(x.size(), T{7}), std::vector<T>(x.size(), T{7}), {}, {}};
  softmax(ConstView(x.data(), sizes), View(all.weights.data(), sizes), {.rule = rule, .lengths = lengths},
          {.stats = std::span(&all.stats, 1)});
  softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(all.gradient.data(), sizes),
                   {.rule = rule, .lengths = lengths});
  states(ConstView(x.data(), sizes), std::span(&all.state, 1), {.lengths = lengths});
  return all;
}

template <typename Body>
void for_each_target_and_rule(const Body& body) {
  for_each_target([&] {
    for (const RuleCase& rule : rule_cases()) {
      SCOPED_TRACE("rule " + rule.rule.name());
      body(rule);
    }
  });
}

void expect_no_keys(const RowStats& stats) {
  EXPECT_EQ(stats.count, 0);
  EXPECT_EQ(stats.max, -kInfinity);
  EXPECT_EQ(stats.log_sum_exp, -kInfinity);
  EXPECT_EQ(stats.entropy, 0);
  EXPECT_EQ(stats.varentropy, 0);
  EXPECT_EQ(stats.spread, 0);
  EXPECT_EQ(stats.peak, 0);
  EXPECT_EQ(stats.beta, 1);
  EXPECT_EQ(stats.sharp_entropy, 0);
  EXPECT_EQ(stats.sharp_peak, 0);
  EXPECT_EQ(stats.support, 0);
  EXPECT_EQ(stats.threshold, -kInfinity);
}

void expect_no_keys(const RowState& state) {
  EXPECT_EQ(state.count, 0);
  EXPECT_EQ(state.min, kInfinity);
  EXPECT_EQ(state.max, -kInfinity);
  EXPECT_EQ(state.z, 0);
  EXPECT_EQ(state.t, 0);
  EXPECT_EQ(state.u, 0);
}

template <typename T>
void check_no_visible_keys(const RuleCase& rule) {
  for (std::size_t n : Sizes{1, 2, 9, 40, 2100}) {
    const std::vector<T> hidden(n, -static_cast<T>(kInfinity));
    const std::vector<T> g(n, static_cast<T>(kNaN));  // whatever comes back for keys that don't count
    const std::int64_t none[] = {0};
    for (const Everything<T>& all :
         {run<T>(hidden, g, rule.rule), run<T>(std::vector<T>(n, T{2}), g, rule.rule, none)}) {
      EXPECT_EQ(all.weights, std::vector<T>(n, T{0}));
      EXPECT_EQ(all.gradient, std::vector<T>(n, T{0}));
      expect_no_keys(all.stats);
      expect_no_keys(all.state);
    }
  }
}

TEST(SoftmaxEdge, NoVisibleKeysGiveZeros) {
  for_each_target_and_rule([](const RuleCase& rule) {
    check_no_visible_keys<float>(rule);
    check_no_visible_keys<double>(rule);
  });
}

TEST(SoftmaxEdge, RowsWithoutAnyKeysHaveStats) {
  for_each_target_and_rule([](const RuleCase& rule) {
    std::vector<RowStats> stats(3);
    std::vector<RowState> row_states(3);
    softmax(ConstView(static_cast<const float*>(nullptr), {3, 0}), View(static_cast<float*>(nullptr), {3, 0}),
            {.rule = rule.rule}, {.stats = std::span(stats)});
    states(ConstView(static_cast<const float*>(nullptr), {3, 0}), std::span(row_states));
    for (std::size_t row = 0; row < 3; ++row) {
      expect_no_keys(stats[row]);
      expect_no_keys(row_states[row]);
    }
  });
}

TEST(SoftmaxEdge, NoRowsAreNothingToDo) {
  const ConstView in(static_cast<const double*>(nullptr), {0, 5});
  const View out(static_cast<double*>(nullptr), {0, 5});
  EXPECT_NO_THROW(softmax(in, out));
  EXPECT_NO_THROW(sharpen(in, out));
  EXPECT_NO_THROW(softmax_backward(in, in, out));
  EXPECT_NO_THROW(states(in, {}));
  EXPECT_NO_THROW(
      softmax(ConstView(static_cast<const double*>(nullptr), {0}), View(static_cast<double*>(nullptr), {0})));
}

template <typename T>
void check_one_visible_key(const RuleCase& rule) {
  for (std::size_t n : Sizes{1, 2, 8, 33}) {
    for (double value : {0.0, -0.37, 9999.0, 3e38, -3e38}) {
      const std::size_t at = n / 2;
      std::vector<T> x(n, -static_cast<T>(kInfinity));
      x[at] = static_cast<T>(value);
      std::vector<T> expected(n, T{0});
      expected[at] = 1;
      const Everything<T> all = run<T>(x, std::vector<T>(n, T{3}), rule.rule);
      EXPECT_EQ(all.weights, expected);
      EXPECT_EQ(all.gradient, std::vector<T>(n, T{0}));
      EXPECT_EQ(all.stats.count, 1);
      EXPECT_EQ(all.stats.log_sum_exp, static_cast<double>(x[at]));
      EXPECT_EQ(all.stats.entropy, 0);
      EXPECT_EQ(all.stats.beta, 1);
      EXPECT_EQ(all.stats.sharp_entropy, 0);
      EXPECT_EQ(all.stats.peak, 1);
      EXPECT_EQ(all.stats.sharp_peak, 1);
    }
  }
}

TEST(SoftmaxEdge, OneVisibleKeyHasWeightOne) {
  for_each_target_and_rule([](const RuleCase& rule) {
    check_one_visible_key<float>(rule);
    check_one_visible_key<double>(rule);
  });
}

template <typename T>
void check_all_equal(const RuleCase& rule) {
  for (std::size_t n : Sizes{2, 3, 5, 8, 31, 100, 382, 2048, 2049, 5000}) {
    for (double value : {0.0, 0.7, -9999.0, 3e38}) {
      const std::vector<T> x(n, static_cast<T>(value));
      const Everything<T> all = run<T>(x, std::vector<T>(n, T{1}), rule.rule);
      const double count = static_cast<double>(n);
      EXPECT_EQ(all.weights, std::vector<T>(n, static_cast<T>(1 / count)));
      EXPECT_NEAR(all.stats.entropy, std::log(count), 1e-15 * std::log(count));
      EXPECT_EQ(all.stats.varentropy, 0);
      const double expected = oracle::beta<double>(oracle::Row(to_double(x)), rule.plain);
      EXPECT_NEAR(all.stats.beta, expected, 1e-13 * expected);
    }
  }
}

TEST(SoftmaxEdge, EqualLogitsHaveWeightsOfExactlyOneOverCount) {
  for_each_target_and_rule([](const RuleCase& rule) {
    check_all_equal<float>(rule);
    check_all_equal<double>(rule);
  });
}

TEST(SoftmaxEdge, EqualVisibleLogitsAmongHiddenOnes) {
  for_each_target_and_rule([](const RuleCase& rule) {
    std::vector<float> x(50, kMinusInfinity);
    for (std::size_t i = 0; i < 50; i += 7) x[i] = 1.5F;
    const Everything<float> all = run<float>(x, std::vector<float>(50, 1), rule.rule);
    for (std::size_t i = 0; i < 50; ++i) EXPECT_EQ(all.weights[i], i % 7 ? 0 : 0.125F);
  });
}

// Row 2 of five is broken; the others must be what they are without it, bit for bit.
template <typename T>
void check_broken_row(const Rule& rule, double poison, std::size_t n) {
  Random random(1);
  std::vector<T> x = gaussian_row<T>(random, 5 * n);
  const std::vector<T> g = gaussian_row<T>(random, 5 * n);
  const Dims sizes = {5, static_cast<std::int64_t>(n)};
  const auto run_all = [&](std::vector<T>& w, std::vector<T>& dx, std::vector<RowStats>& stats,
                           std::vector<RowState>& row_states) {
    softmax(ConstView(x.data(), sizes), View(w.data(), sizes), {.rule = rule}, {.stats = std::span(stats)});
    softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(dx.data(), sizes),
                     {.rule = rule});
    states(ConstView(x.data(), sizes), std::span(row_states));
  };
  std::vector<T> w(5 * n), dx(5 * n), clean_w(5 * n), clean_dx(5 * n);
  std::vector<RowStats> stats(5), clean_stats(5);
  std::vector<RowState> row_states(5), clean_states(5);
  run_all(clean_w, clean_dx, clean_stats, clean_states);
  x[2 * n + n / 3] = static_cast<T>(poison);
  run_all(w, dx, stats, row_states);
  for (std::size_t i = 0; i < 5 * n; ++i) {
    if (i / n == 2) {
      ASSERT_TRUE(std::isnan(w[i])) << i;
      ASSERT_TRUE(std::isnan(dx[i])) << i;
    } else {
      ASSERT_EQ(w[i], clean_w[i]) << i;
      ASSERT_EQ(dx[i], clean_dx[i]) << i;
    }
  }
  const RowStats& s = stats[2];
  for (double field : {s.max, s.log_sum_exp, s.entropy, s.varentropy, s.spread, s.peak, s.beta,
                       s.sharp_entropy, s.sharp_peak, s.support, s.threshold}) {
    EXPECT_TRUE(std::isnan(field));
  }
  const RowState& state = row_states[2];
  for (double field : {state.min, state.max, state.z, state.t, state.u}) EXPECT_TRUE(std::isnan(field));
  EXPECT_EQ(state.count, static_cast<std::int64_t>(n));
  for (std::size_t row : Sizes{0, 1, 3, 4}) EXPECT_EQ(stats[row].beta, clean_stats[row].beta);
}

TEST(SoftmaxEdge, NaNBreaksItsOwnRowOnly) {
  for_each_target_and_rule([](const RuleCase& rule) {
    for (std::size_t n : Sizes{1, 2, 7, 16, 33, 2100}) {
      check_broken_row<float>(rule.rule, kNaN, n);
      check_broken_row<double>(rule.rule, kNaN, n);
    }
  });
}

TEST(SoftmaxEdge, PlusInfinityBreaksItsOwnRowOnly) {
  for_each_target_and_rule([](const RuleCase& rule) {
    for (std::size_t n : Sizes{1, 2, 7, 16, 33, 2100}) {
      check_broken_row<float>(rule.rule, kInfinity, n);
      check_broken_row<double>(rule.rule, kInfinity, n);
    }
  });
}

TEST(SoftmaxEdge, HiddenNaNAndInfinityHaveNoEffect) {
  for_each_target_and_rule([](const RuleCase& rule) {
    Random random(2);
    std::vector<float> x = gaussian_row<float>(random, 40);
    const std::vector<float> g = gaussian_row<float>(random, 40);
    const std::int64_t length[] = {23};
    const Everything<float> clean = run<float>(x, g, rule.rule, length);
    std::vector<float> bad_g = g;
    for (std::size_t i = 23; i < 40; ++i) {
      x[i] = i % 2 ? kFloatNaN : -kMinusInfinity;
      bad_g[i] = kFloatNaN;
    }
    const Everything<float> poisoned = run<float>(x, bad_g, rule.rule, length);
    EXPECT_EQ(poisoned.weights, clean.weights);
    EXPECT_EQ(poisoned.gradient, clean.gradient);
    EXPECT_EQ(poisoned.stats.beta, clean.stats.beta);
  });
}

// The largest finite logits: differences overflow in f32 (3e38) and in f64 (1.5e308).
template <typename T>
void check_overflowing_differences(const RuleCase& rule, T big) {
  for (std::size_t n : Sizes{2, 3, 9, 40, 2100}) {
    std::vector<T> x(n, -big);
    x[n / 2] = big;
    x[0] = n > 2 ? T{0} : x[0];
    const Everything<T> all = run<T>(x, std::vector<T>(n, T{1}), rule.rule);
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_EQ(all.weights[i], i == n / 2 ? T{1} : T{0}) << i;
      EXPECT_NEAR(static_cast<double>(all.gradient[i]), 0, Contract<T>::gradient * all.stats.beta) << i;
    }
    EXPECT_EQ(all.stats.entropy, 0);
    EXPECT_EQ(all.stats.varentropy, 0);
    EXPECT_EQ(all.stats.peak, 1);
    EXPECT_TRUE(std::isfinite(all.stats.beta));
    EXPECT_EQ(all.state.z, 1);
    EXPECT_EQ(all.state.t, 0);
    EXPECT_EQ(all.state.u, 0);
    EXPECT_EQ(all.state.min, static_cast<double>(-big));
    EXPECT_EQ(all.state.max, static_cast<double>(big));
  }
}

TEST(SoftmaxEdge, DifferencesThatOverflowGiveFiniteWeights) {
  for_each_target_and_rule([](const RuleCase& rule) {
    check_overflowing_differences<float>(rule, 3e38F);
    check_overflowing_differences<double>(rule, 3e38);
    check_overflowing_differences<double>(rule, 1.5e308);
  });
}

// Targets that no beta reaches: never NaN, never endless, only the ties keep weight.
template <typename T>
void check_unreachable(const Rule& rule) {
  for (double gap : {1e-30, 1e-6, 0.5, 100.0}) {
    std::vector<T> x(100, static_cast<T>(-gap));
    x[10] = x[50] = x[90] = T{0};
    x[3] = static_cast<T>(-3 * gap);
    Random random(4);
    const Everything<T> all = run<T>(x, gaussian_row<T>(random, 100), rule);
    EXPECT_GE(all.stats.beta, 1);
    EXPECT_LE(all.stats.beta, 0x1p60);
    for (std::size_t i = 0; i < 100; ++i) {
      ASSERT_TRUE(std::isfinite(all.gradient[i]));
      if (gap * 0x1p60 < 100) continue;  // beta at its limit
      const double expected = i % 40 == 10 ? 1.0 / 3 : 0;
      ASSERT_NEAR(static_cast<double>(all.weights[i]), expected, 0x1p-24) << i << ", gap " << gap;
    }
  }
}

TEST(SoftmaxEdge, UnreachableTargetsGiveTheTiesAll) {
  for_each_target([] {
    for (const Rule& rule :
         {Rule::target_entropy(0.1), Rule::target_entropy(std::log(3.0)), Rule::target_peak(0.5),
          Rule::target_peak(0.999), Rule::target_entropy(1e-300)}) {
      SCOPED_TRACE(rule.name());
      check_unreachable<float>(rule);
      check_unreachable<double>(rule);
    }
  });
}

}  // namespace
}  // namespace whet
