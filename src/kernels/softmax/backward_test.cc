// The gradient of softmax: against the oracle, against finite differences of the forward pass, and
// its promises about hidden keys, aliasing and layouts.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "targets.h"

namespace whet {
namespace {

constexpr BetaGradient kBoth[] = {BetaGradient::through_rule, BetaGradient::held};

template <typename T>
struct Problem {
  std::vector<T> x;
  std::vector<T> g;
  std::vector<bool> visible;
};

template <typename T>
Problem<T> make_problem(RowKind kind, std::size_t n, Random& random) {
  return {make_row<T>(kind, n, random), gaussian_row<T>(random, n), std::vector<bool>(n, true)};
}

template <typename T>
void check_gradient(const Problem<T>& problem, const RuleCase& rule) {
  const std::size_t n = problem.x.size();
  const Dims sizes = {static_cast<std::int64_t>(n)};
  const ConstView in(problem.x.data(), sizes);
  const ConstView dout(problem.g.data(), sizes);
  const std::unique_ptr<bool[]> flags = std::make_unique<bool[]>(n);
  std::copy(problem.visible.begin(), problem.visible.end(), flags.get());
  const ConstView mask(flags.get(), sizes);
  std::vector<T> w(n);
  RowStats stats{};
  const SavedRows saved(DTypeOf<T>::value, 1, saved_size(SoftmaxOptions{.rule = rule.rule}));
  softmax(in, View(w.data(), sizes), {.rule = rule.rule, .mask = mask},
          {.stats = std::span(&stats, 1), .saved = saved.view()});
  const oracle::Row row(to_double(problem.x), problem.visible);
  for (BetaGradient mode : kBoth) {
    SCOPED_TRACE(mode == BetaGradient::held ? "held" : "through the rule");
    std::vector<T> with_saved(n, T{7});
    std::vector<T> without(n, T{7});
    softmax_backward(in, dout, View(with_saved.data(), sizes), {.rule = rule.rule, .mask = mask},
                     {.beta_gradient = mode, .saved = saved.view()});
    softmax_backward(in, dout, View(without.data(), sizes), {.rule = rule.rule, .mask = mask},
                     {.beta_gradient = mode});
    expect_gradient<T>(row, to_double(problem.g), rule.plain, mode, stats.beta, with_saved);
    expect_gradient<T>(row, to_double(problem.g), rule.plain, mode, stats.beta, without);
  }
}

template <typename T>
void check_every_kind_and_rule(std::initializer_list<std::size_t> sizes) {
  for_each_target([&] {
    Random random(1);
    for (std::size_t n : sizes) {
      for (RowKind kind : kRowKinds) {
        const Problem<T> problem = make_problem<T>(kind, n, random);
        for (const RuleCase& rule : rule_cases()) {
          SCOPED_TRACE(describe(n, kind, rule.rule));
          check_gradient<T>(problem, rule);
        }
      }
    }
  });
}

TEST(SoftmaxGradient, EqualsTheOracleInF32) {
  check_every_kind_and_rule<float>({1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 97, 1031, 2049, 4099});
}

TEST(SoftmaxGradient, EqualsTheOracleInF64) {
  check_every_kind_and_rule<double>({1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 97, 521, 2049});
}

TEST(SoftmaxGradient, EqualsTheOracleForALongRow) {
  Random random(2);
  const Problem<float> problem = make_problem<float>(RowKind::gaussian, 131072, random);
  check_gradient<float>(problem, paper_case());
  check_gradient<float>(problem, {Rule::target_entropy(4), {Rule::Kind::target_entropy, 4}});
}

TEST(SoftmaxGradient, IsZeroForHiddenKeys) {
  for_each_target([] {
    Random random(3);
    for (std::size_t n : Sizes{5, 16, 50}) {
      Problem<float> problem = make_problem<float>(RowKind::gaussian, n, random);
      for (std::size_t i = 0; i < n; i += 3) {
        problem.visible[i] = false;
        problem.x[i] = static_cast<float>(kNaN);
        problem.g[i] = static_cast<float>(kInfinity);
      }
      problem.x[1] = -static_cast<float>(kInfinity);
      problem.g[1] = static_cast<float>(kNaN);
      for (const RuleCase& rule : rule_cases()) {
        SCOPED_TRACE("n " + std::to_string(n) + ", rule " + rule.rule.name());
        check_gradient<float>(problem, rule);
      }
    }
  });
}

// By length, mask or a logit of -inf; with and without what forward saved.
template <typename T>
void check_hidden_keys_of_broken_rows(const RuleCase& rule, double poison) {
  constexpr std::size_t kKeys = 40, kLength = 23;
  Random random(13);
  std::vector<T> x = gaussian_row<T>(random, kKeys), w(kKeys);
  const std::vector<T> g = gaussian_row<T>(random, kKeys);
  bool flags[kKeys];
  for (std::size_t i = 0; i < kKeys; ++i) flags[i] = i % 5 != 0;
  x[2] = static_cast<T>(poison);
  x[7] = -std::numeric_limits<T>::infinity();
  const std::int64_t length[] = {kLength};
  const Dims sizes = {kKeys};
  const SavedRows saved(DTypeOf<T>::value, 1, saved_size(SoftmaxOptions{.rule = rule.rule}));
  softmax(ConstView(x.data(), sizes), View(w.data(), sizes),
          {.rule = rule.rule, .mask = {flags, sizes}, .lengths = length}, {.saved = saved.view()});
  for (const bool given : {false, true}) {
    std::vector<T> dx(kKeys, T{7});
    softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(dx.data(), sizes),
                     {.rule = rule.rule, .mask = {flags, sizes}, .lengths = length},
                     {.saved = given ? saved.view() : View{}});
    for (std::size_t i = 0; i < kKeys; ++i) {
      const bool hidden = i >= kLength || !flags[i] || i == 7;
      EXPECT_TRUE(hidden ? dx[i] == T{0} : std::isnan(dx[i])) << "key " << i << ", " << dx[i];
      EXPECT_TRUE(i < kLength || w[i] == T{0}) << "key " << i << ", " << w[i];
    }
  }
}

TEST(SoftmaxGradient, IsZeroForHiddenKeysOfBrokenRows) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      for (const double poison : {kNaN, kInfinity}) {
        SCOPED_TRACE("poison " + std::to_string(poison) + ", rule " + rule.rule.name());
        check_hidden_keys_of_broken_rows<float>(rule, poison);
        check_hidden_keys_of_broken_rows<double>(rule, poison);
      }
    }
  });
}

TEST(SoftmaxGradient, IsZeroForRowsWithoutVisibleKeysAndNeverNaN) {
  for_each_target([] {
    Random random(4);
    const std::vector<double> x = gaussian_row<double>(random, 4 * 10);
    const std::vector<double> g = gaussian_row<double>(random, 4 * 10);
    const std::vector<std::int64_t> lengths = {0, 1, 7, 10};
    for (const RuleCase& rule : rule_cases()) {
      std::vector<RowStats> stats(4);
      const SavedRows saved(DType::f64, 4, saved_size(SoftmaxOptions{.rule = rule.rule}));
      std::vector<double> w(40), dx(40, 7);
      softmax(ConstView(x.data(), {4, 10}), View(w.data(), {4, 10}), {.rule = rule.rule, .lengths = lengths},
              {.stats = std::span(stats), .saved = saved.view()});
      softmax_backward(ConstView(x.data(), {4, 10}), ConstView(g.data(), {4, 10}), View(dx.data(), {4, 10}),
                       {.rule = rule.rule, .lengths = lengths}, {.saved = saved.view()});
      for (std::size_t r = 0; r < 4; ++r) {
        SCOPED_TRACE("row " + std::to_string(r) + ", rule " + rule.rule.name());
        const auto part = [&](const std::vector<double>& all) {
          const auto begin = all.begin() + static_cast<std::ptrdiff_t>(10 * r);
          return std::vector<double>(begin, begin + 10);
        };
        oracle::Row row(part(x));
        for (std::size_t i = 0; i < 10; ++i) row.flags[i] = static_cast<std::int64_t>(i) < lengths[r];
        expect_gradient<double>(row, part(g), rule.plain, BetaGradient::through_rule, stats[r].beta,
                                part(dx));
      }
    }
  });
}

// L(x) = sum g_i softmax(x)_i by the library's own f64 forward pass.
double loss(const std::vector<double>& x, const std::vector<double>& g, const Rule& rule) {
  std::vector<double> w(x.size());
  const Dims sizes = {static_cast<std::int64_t>(x.size())};
  softmax(ConstView(x.data(), sizes), View(w.data(), sizes), {.rule = rule});
  oracle::Sum<double> sum;
  for (std::size_t i = 0; i < x.size(); ++i) sum.add(w[i] * g[i]);
  return sum.value();
}

// Central differences of fourth order; `step` is long enough for the noise of forward to stay small.
template <typename Loss>
double difference(std::vector<double> x, std::size_t i, double step, const Loss& of) {
  const double at = x[i];
  const auto moved = [&](double by) {
    x[i] = at + by;
    return of(x);
  };
  return (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step);
}

TEST(SoftmaxGradient, ThroughTheRuleEqualsFiniteDifferencesOfForward) {
  for_each_target([] {
    Random random(5);
    for (std::size_t n : Sizes{2, 5, 12}) {
      for (double sd : {0.5, 1.5}) {
        const std::vector<double> x = gaussian_row<double>(random, n, sd);
        const std::vector<double> g = gaussian_row<double>(random, n);
        const Dims sizes = {static_cast<std::int64_t>(n)};
        for (const RuleCase& rule : rule_cases()) {
          std::vector<double> dx(n);
          softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(dx.data(), sizes),
                           {.rule = rule.rule});
          for (std::size_t i = 0; i < n; ++i) {
            const double expected =
                difference(x, i, 1e-3, [&](const std::vector<double>& at) { return loss(at, g, rule.rule); });
            EXPECT_NEAR(dx[i], expected, 1e-7) << "n " << n << ", key " << i << ", rule " << rule.rule.name();
          }
        }
      }
    }
  });
}

TEST(SoftmaxGradient, HeldEqualsFiniteDifferencesAtFixedBeta) {
  Random random(6);
  const std::vector<double> x = gaussian_row<double>(random, 12);
  const std::vector<double> g = gaussian_row<double>(random, 12);
  for (const RuleCase& rule : rule_cases()) {
    std::vector<double> w(12), dx(12);
    RowStats stats{};
    softmax(ConstView(x.data(), {12}), View(w.data(), {12}), {.rule = rule.rule},
            {.stats = std::span(&stats, 1)});
    softmax_backward(ConstView(x.data(), {12}), ConstView(g.data(), {12}), View(dx.data(), {12}),
                     {.rule = rule.rule}, {.beta_gradient = BetaGradient::held});
    const Rule fixed = Rule::fixed(stats.beta);
    for (std::size_t i = 0; i < 12; ++i) {
      const double expected =
          difference(x, i, 1e-3, [&](const std::vector<double>& at) { return loss(at, g, fixed); });
      EXPECT_NEAR(dx[i], expected, 1e-7) << "key " << i << ", rule " << rule.rule.name();
    }
  }
}

// The oracle itself, without the library: its gradient is that of its forward pass.
TEST(Oracle, GradientEqualsFiniteDifferencesOfItsOwnForward) {
  using Real = long double;
  Random random(7);
  for (const RuleCase& rule : rule_cases()) {
    oracle::Row row(to_double(gaussian_row<double>(random, 9)));
    row.flags[3] = false;
    row.x[5] = -kInfinity;
    const std::vector<double> g = gaussian_row<double>(random, 9);
    const std::vector<Real> dx =
        oracle::gradient<Real>(row, g, rule.plain, true, oracle::beta<Real>(row, rule.plain));
    for (std::size_t i = 0; i < 9; ++i) {
      if (!row.visible(i)) continue;
      const double expected = difference(row.x, i, 1e-4, [&](const std::vector<double>& at) {
        const oracle::Row moved(at, row.flags);
        const std::vector<Real> w = oracle::weights<Real>(moved, oracle::beta<Real>(moved, rule.plain));
        Real sum = 0;
        for (std::size_t k = 0; k < 9; ++k) sum += moved.visible(k) ? w[k] * Real{g[k]} : Real{0};
        return static_cast<double>(sum);
      });
      EXPECT_NEAR(static_cast<double>(dx[i]), expected, 1e-10) << rule.rule.name();
    }
  }
}

TEST(SoftmaxGradient, OfEqualMaximaIsShared) {
  const std::vector<double> x = {1, 1, 0, -1, 1};
  const std::vector<double> g = {0.3, -0.2, 0.9, 0.1, -0.4};
  const RuleCase rule = {Rule::target_peak(0.3), {Rule::Kind::target_peak, 0.3}};
  check_gradient<double>({x, g, std::vector<bool>(5, true)}, rule);
  check_gradient<float>({{1, 1, 0, -1, 1}, {0.3F, -0.2F, 0.9F, 0.1F, -0.4F}, std::vector<bool>(5, true)},
                        rule);
}

TEST(SoftmaxGradient, MayOverwriteItsInputs) {
  for_each_target([] {
    Random random(8);
    const Dims sizes = {3, 70};
    const std::vector<float> x = gaussian_row<float>(random, 210);
    const std::vector<float> g = gaussian_row<float>(random, 210);
    for (const RuleCase& rule : rule_cases()) {
      SCOPED_TRACE(rule.rule.name());
      std::vector<float> dx(210), over_g = g, over_x = x, both = x, square(210);
      const SoftmaxOptions options{.rule = rule.rule};
      softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(dx.data(), sizes),
                       options);
      softmax_backward(ConstView(x.data(), sizes), ConstView(over_g.data(), sizes),
                       View(over_g.data(), sizes), options);
      softmax_backward(ConstView(over_x.data(), sizes), ConstView(g.data(), sizes),
                       View(over_x.data(), sizes), options);
      EXPECT_EQ(over_g, dx);
      EXPECT_EQ(over_x, dx);
      softmax_backward(ConstView(x.data(), sizes), ConstView(x.data(), sizes), View(square.data(), sizes),
                       options);
      softmax_backward(ConstView(both.data(), sizes), ConstView(both.data(), sizes), View(both.data(), sizes),
                       options);
      EXPECT_EQ(both, square);
    }
  });
}

TEST(SoftmaxGradient, TakesAnyStrides) {
  for_each_target([] {
    Random random(9);
    Tensor<double> in({3, 23, 4}, {92, 4, 1}, 0);
    Tensor<double> dout({3, 23, 4}, {1, -12, 3}, 0);
    Tensor<double> din({3, 23, 4}, {-1000, 7, 200}, -77);
    for (double& value : in.buffer) value = gaussian(random);
    for (double& value : dout.buffer) value = gaussian(random);
    for (const RuleCase& rule : rule_cases()) {
      softmax_backward(in.view(), dout.view(), din.view(), {.rule = rule.rule, .axis = 1});
      for (std::int64_t r = 0; r < 12; ++r) {
        SCOPED_TRACE("row " + std::to_string(r) + ", rule " + rule.rule.name());
        const oracle::Row row(in.row(1, r));
        std::vector<double> w(23);
        RowStats stats{};
        softmax(ConstView(row.x.data(), {23}), View(w.data(), {23}), {.rule = rule.rule},
                {.stats = std::span(&stats, 1)});
        expect_gradient<double>(row, dout.row(1, r), rule.plain, BetaGradient::through_rule, stats.beta,
                                din.row(1, r));
      }
    }
    EXPECT_EQ(din.buffer.front(), -77);
    EXPECT_EQ(din.buffer.back(), -77);
  });
}

TEST(SoftmaxGradient, Of16BitsIsTheRoundedResultOfF32) {
  for_each_target([] {
    Random random(10);
    std::vector<bf16> x, g, dx(50);
    std::vector<float> x32, g32, dx32(50);
    for (int i = 0; i < 50; ++i) {
      x.push_back(to_storage(static_cast<float>(gaussian(random)), bf16{}));
      g.push_back(to_storage(static_cast<float>(gaussian(random)), bf16{}));
      x32.push_back(to_float(x.back()));
      g32.push_back(to_float(g.back()));
    }
    for (const RuleCase& rule : rule_cases()) {
      softmax_backward(ConstView(x.data(), {50}), ConstView(g.data(), {50}), View(dx.data(), {50}),
                       {.rule = rule.rule});
      softmax_backward(ConstView(x32.data(), {50}), ConstView(g32.data(), {50}), View(dx32.data(), {50}),
                       {.rule = rule.rule});
      for (std::size_t i = 0; i < 50; ++i) {
        EXPECT_EQ(dx[i].bits, to_storage(dx32[i], bf16{}).bits) << i << ", rule " << rule.rule.name();
      }
    }
  });
}

TEST(SoftmaxBackwardEdge, HiddenKeysGetZeroWhateverTheOthersGet) {
  for_each_target([] {
    const float inf = std::numeric_limits<float>::infinity();
    const float x[4] = {1, 2, -inf, 3};
    for (const float g : {inf, 3e38F, std::numeric_limits<float>::quiet_NaN()}) {
      const float dout[4] = {g, -g, g, g};
      float din[4];
      softmax_backward({x, {4}}, {dout, {4}}, {din, {4}}, {.rule = Rule::fixed(10)});
      EXPECT_EQ(din[2], 0) << g;
    }
  });
}

}  // namespace
}  // namespace whet
