// Sharpening probabilities: the same as softmax of their logarithms.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
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

// ln(p / max p): rounding them to double costs less than rounding ln p would, where p are nearly equal.
template <typename T>
oracle::Row logarithms(const std::vector<T>& p) {
  const long double largest = *std::max_element(p.begin(), p.end());
  std::vector<double> x;
  for (T value : p) x.push_back(static_cast<double>(std::log(static_cast<long double>(value) / largest)));
  return oracle::Row(x);
}

template <typename T>
std::vector<T> softmax_of(const std::vector<T>& x, const Rule& rule = {}) {
  std::vector<T> w(x.size());
  const Dims sizes = {static_cast<std::int64_t>(x.size())};
  softmax(ConstView(x.data(), sizes), View(w.data(), sizes), {.rule = rule});
  return w;
}

template <typename T>
std::vector<T> sharpen_of(const std::vector<T>& p, const Rule& rule, RowStats* stats = nullptr) {
  std::vector<T> w(p.size(), T{7});
  const Dims sizes = {static_cast<std::int64_t>(p.size())};
  sharpen(ConstView(p.data(), sizes), View(w.data(), sizes), {.rule = rule},
          {.stats = stats ? std::span(stats, 1) : std::span<RowStats>{}});
  return w;
}

template <typename T>
void expect_sharpen_contract(const std::vector<T>& p, const RuleCase& rule) {
  using Real = typename Contract<T>::Real;
  RowStats stats{};
  const std::vector<T> w = sharpen_of(p, rule.rule, &stats);
  const oracle::Row row = logarithms(p);
  expect_weights<T>(row, stats.beta, w);
  expect_sharpen_stats<T>(row, std::log(Real{*std::max_element(p.begin(), p.end())}), rule.plain, stats);
}

template <typename T>
void check_every_kind_and_rule() {
  for_each_target([] {
    Random random(1);
    for (std::size_t n : Sizes{1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 257, 2049}) {
      for (RowKind kind : kRowKinds) {
        const std::vector<T> p = softmax_of(make_row<T>(kind, n, random));
        for (const RuleCase& rule : rule_cases()) {
          SCOPED_TRACE(describe(n, kind, rule.rule));
          expect_sharpen_contract<T>(p, rule);
        }
      }
    }
  });
}

TEST(Sharpen, MeetsTheContractInF32) { check_every_kind_and_rule<float>(); }

TEST(Sharpen, MeetsTheContractInF64) { check_every_kind_and_rule<double>(); }

TEST(Sharpen, OfSoftmaxIsSoftmaxWithTheRule) {
  for_each_target([] {
    Random random(2);
    for (std::size_t n : Sizes{2, 9, 64, 300}) {
      for (double sd : {0.5, 2.0, 5.0}) {
        const std::vector<double> x = gaussian_row<double>(random, n, sd);
        const std::vector<double> p = softmax_of(x);
        for (const RuleCase& rule : rule_cases()) {
          const std::vector<double> direct = softmax_of(x, rule.rule);
          const std::vector<double> sharpened = sharpen_of(p, rule.rule);
          // Both meet their target within the residual; otherwise both are exact to rounding.
          const double bound = rule.rule.needs_search()
                                   ? 2 * residual_bound<double>(rule.plain, static_cast<double>(n))
                                   : 1e-11;
          for (std::size_t i = 0; i < n; ++i) {
            ASSERT_NEAR(sharpened[i], direct[i], bound)
                << "n " << n << ", key " << i << ", rule " << rule.rule.name();
          }
        }
      }
    }
  });
}

TEST(Sharpen, TakesProbabilitiesThatDontSumToOne) {
  for_each_target([] {
    Random random(3);
    for (float scale : {0.9F, 1.001F, 1.1F, 8.0F}) {
      std::vector<float> p = softmax_of(gaussian_row<float>(random, 40));
      for (float& value : p) value *= scale;
      for (const RuleCase& rule : rule_cases()) {
        SCOPED_TRACE("scale " + std::to_string(scale) + ", rule " + rule.rule.name());
        expect_sharpen_contract<float>(p, rule);
      }
    }
  });
}

TEST(Sharpen, ZerosStayZero) {
  for_each_target([] {
    Random random(4);
    std::vector<float> p = softmax_of(gaussian_row<float>(random, 50));
    for (std::size_t i = 0; i < 50; i += 4) p[i] = i % 8 ? -0.0F : 0.0F;
    for (const RuleCase& rule : rule_cases()) {
      const std::vector<float> w = sharpen_of(p, rule.rule);
      for (std::size_t i = 0; i < 50; i += 4) EXPECT_EQ(w[i], 0) << i << ", rule " << rule.rule.name();
    }
  });
}

TEST(Sharpen, OfOnlyZerosIsZero) {
  for (const RuleCase& rule : rule_cases()) {
    RowStats stats{};
    EXPECT_EQ(sharpen_of(std::vector<float>(9, 0.0F), rule.rule, &stats), std::vector<float>(9, 0.0F));
    EXPECT_EQ(stats.count, 0);
    EXPECT_EQ(stats.entropy, 0);
    EXPECT_EQ(stats.beta, 1);
    EXPECT_EQ(stats.log_sum_exp, -kInfinity);
  }
}

TEST(Sharpen, OfOneProbabilityIsOne) {
  for (const RuleCase& rule : rule_cases()) {
    EXPECT_EQ(sharpen_of(std::vector<float>{0, 0.3F, 0}, rule.rule), (std::vector<float>{0, 1, 0}));
  }
}

TEST(Sharpen, OfEqualProbabilitiesIsExactlyOneOverCount) {
  for_each_target([] {
    for (std::size_t n : Sizes{2, 3, 100, 3000}) {
      const std::vector<float> p(n, 1 / static_cast<float>(n));
      for (const RuleCase& rule : rule_cases()) {
        EXPECT_EQ(sharpen_of(p, rule.rule), p) << n << ", rule " << rule.rule.name();
      }
    }
  });
}

TEST(Sharpen, NegativeNaNAndInfinityBreakTheirOwnRowOnly) {
  for_each_target([] {
    Random random(5);
    for (double poison : {-0.1, -1e-30, kNaN, kInfinity, -kInfinity}) {
      for (const RuleCase& rule : rule_cases()) {
        SCOPED_TRACE("poison " + std::to_string(poison) + ", rule " + rule.rule.name());
        std::vector<float> p;
        for (int row = 0; row < 3; ++row) {
          const std::vector<float> one = softmax_of(gaussian_row<float>(random, 20));
          p.insert(p.end(), one.begin(), one.end());
        }
        std::vector<float> clean(60), w(60);
        std::vector<RowStats> stats(3);
        sharpen(ConstView(p.data(), {3, 20}), View(clean.data(), {3, 20}), {.rule = rule.rule});
        p[27] = static_cast<float>(poison);
        sharpen(ConstView(p.data(), {3, 20}), View(w.data(), {3, 20}), {.rule = rule.rule},
                {.stats = std::span(stats)});
        for (std::size_t i = 0; i < 60; ++i) {
          if (i / 20 == 1) {
            EXPECT_TRUE(std::isnan(w[i])) << i;
          } else {
            EXPECT_EQ(w[i], clean[i]) << i;
          }
        }
        EXPECT_TRUE(std::isnan(stats[1].entropy));
        EXPECT_TRUE(std::isnan(stats[1].beta));
      }
    }
  });
}

TEST(Sharpen, InPlaceGivesTheSameBits) {
  for_each_target([] {
    Random random(6);
    for (const RuleCase& rule : rule_cases()) {
      std::vector<float> p = softmax_of(gaussian_row<float>(random, 70));
      const std::vector<float> w = sharpen_of(p, rule.rule);
      sharpen(ConstView(p.data(), {70}), View(p.data(), {70}), {.rule = rule.rule});
      EXPECT_EQ(p, w) << rule.rule.name();
    }
  });
}

TEST(Sharpen, TakesMasksAndLengths) {
  for_each_target([] {
    Random random(7);
    const std::vector<float> p = softmax_of(gaussian_row<float>(random, 12));
    bool flags[12];
    for (std::size_t i = 0; i < 12; ++i) flags[i] = i != 2 && i != 5;
    const std::int64_t length[] = {9};
    for (const RuleCase& rule : rule_cases()) {
      SCOPED_TRACE(rule.rule.name());
      std::vector<float> w(12);
      RowStats stats{};
      sharpen(ConstView(p.data(), {12}), View(w.data(), {12}),
              {.rule = rule.rule, .mask = {flags, {12}}, .lengths = length}, {.stats = std::span(&stats, 1)});
      oracle::Row row = logarithms(p);
      for (std::size_t i = 0; i < 12; ++i) row.flags[i] = flags[i] && i < 9;
      expect_weights<float>(row, stats.beta, w);
      EXPECT_EQ(stats.count, 7);
    }
  });
}

TEST(Sharpen, TakesAnyStridesAndTypes) {
  for_each_target([] {
    Random random(8);
    Tensor<double> in({3, 11}, {1, -3}, 0.25);
    Tensor<double> out({3, 11}, {-30, 2}, -77);
    for (double& value : in.buffer) value = std::exp(gaussian(random));
    std::vector<RowStats> stats(3);
    sharpen(in.view(), out.view(), {.rule = Rule::paper()}, {.stats = std::span(stats)});
    for (std::int64_t r = 0; r < 3; ++r) {
      expect_weights<double>(logarithms(in.row(1, r)), stats[static_cast<std::size_t>(r)].beta,
                             out.row(1, r));
    }
    std::vector<f16> p, w(33);
    std::vector<float> p32;
    for (float value : softmax_of(gaussian_row<float>(random, 33))) {
      p.push_back(to_storage(value, f16{}));
      p32.push_back(to_float(p.back()));
    }
    sharpen(ConstView(p.data(), {33}), View(w.data(), {33}), {.rule = Rule::paper()});
    const std::vector<float> w32 = sharpen_of(p32, Rule::paper());
    for (std::size_t i = 0; i < 33; ++i) EXPECT_EQ(w[i].bits, to_storage(w32[i], f16{}).bits) << i;
  });
}

}  // namespace
}  // namespace whet
