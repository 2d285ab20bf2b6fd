#include "core/target_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace whet::core {
namespace {

Sums sums_at(const std::vector<double>& y, double beta) {
  Sums s;
  for (const double v : y) {
    const double e = std::exp(beta * v);
    s.z += e;
    s.t += e * v;
    s.u += e * v * v;
    s.v += e * v * v * v;
    s.w += e * v * v * v * v;
  }
  return s;
}

// Logits below their maximum, of many shapes: from all but equal to one clear winner.
std::vector<std::vector<double>> rows() {
  std::mt19937 generator(3);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::exponential_distribution<double> exponential;
  std::vector<std::vector<double>> result;
  for (const std::size_t n : {3U, 64U, 1024U, 16384U}) {
    for (const double width : {1e-3, 0.3, 3.0, 50.0}) {
      std::vector<double> a(n), b(n), c(n), two_levels(n, -width);
      for (auto& v : a) v = width * normal(generator);
      for (auto& v : b) v = width * uniform(generator);
      for (auto& v : c) v = width * exponential(generator);
      two_levels[0] = 0;
      for (auto* row : {&a, &b, &c, &two_levels}) {
        const double max = *std::max_element(row->begin(), row->end());
        for (auto& v : *row) v -= max;
        result.push_back(*row);
      }
    }
  }
  return result;
}

double f(const Rule& rule, const Sums& s, double beta) {
  return rule.kind() == Rule::Kind::target_entropy ? entropy_of(s, beta) : std::log(s.z);
}

TEST(TargetSearch, FindsEveryReachableTargetInFewSweeps) {
  int searches = 0, sweeps = 0;
  for (const auto& y : rows()) {
    const Sums one = sums_at(y, 1);
    for (const double fraction : {0.001, 0.03, 0.3, 0.6, 0.9, 0.999}) {
      const Rule by_entropy = Rule::target_entropy(std::max(1e-12, fraction * entropy_of(one, 1)));
      const Rule by_peak = Rule::target_peak(std::min(1 - 1e-9, std::pow(1 / one.z, fraction)));
      for (const Rule& rule : {by_entropy, by_peak}) {
        const double goal =
            rule.kind() == Rule::Kind::target_entropy ? rule.parameter() : -std::log(rule.parameter());
        TargetSearch search(rule, one, 1e-9, 0x1p-51);
        double beta = 1;
        while (!search.done()) {
          beta = search.proposal();
          ASSERT_GE(beta, 1);
          search.absorb(beta, sums_at(y, beta));
        }
        ASSERT_LE(search.sweeps(), 60) << rule.name() << " of " << y.size();
        if (f(rule, one, 1) > goal) {
          EXPECT_NEAR(f(rule, sums_at(y, beta), beta), goal, 1e-8) << rule.name();
        }
        sweeps += search.sweeps();
        ++searches;
      }
    }
  }
  EXPECT_LT(static_cast<double>(sweeps) / searches, 6) << "mean number of sweeps";
}

TEST(TargetSearch, StopsAtOnceIfTheRowIsSharpEnough) {
  const Sums one = sums_at({0, -20, -30}, 1);
  EXPECT_TRUE(TargetSearch(Rule::target_entropy(0.5), one, 1e-9, 0x1p-51).done());
  EXPECT_TRUE(TargetSearch(Rule::target_peak(0.9), one, 1e-9, 0x1p-51).done());
}

TEST(TargetSearch, EndsEvenWhenTheTargetIsOutOfReach) {
  const std::vector<double> y = {0, 0, -1};
  TargetSearch search(Rule::target_entropy(0.1), sums_at(y, 1), 1e-9, 0x1p-51);
  int sweeps = 0;
  while (!search.done() && ++sweeps < 1000) search.absorb(search.proposal(), sums_at(y, search.proposal()));
  EXPECT_LT(sweeps, 100);
}

TEST(TargetSearch, KnowsWhatTiesAllow) {
  EXPECT_FALSE(unreachable(Rule::target_entropy(0.1), 1));
  EXPECT_TRUE(unreachable(Rule::target_entropy(0.1), 2));
  EXPECT_TRUE(unreachable(Rule::target_entropy(std::log(2.0)), 2));
  EXPECT_FALSE(unreachable(Rule::target_entropy(0.7), 2));
  EXPECT_TRUE(unreachable(Rule::target_peak(0.5), 2));
  EXPECT_FALSE(unreachable(Rule::target_peak(0.49), 2));
}

TEST(TargetSearch, HardBetaLeavesTheTiesAlone) {
  EXPECT_EQ(hard_beta(5, std::numeric_limits<double>::infinity()), 1);  // all equal
  EXPECT_EQ(hard_beta(5, 1e-30), 0x1p60);
  EXPECT_EQ(hard_beta(5, 1e30), 1);
  EXPECT_LE(5 * std::exp(-hard_beta(5, 0.25) * 0.25), 0x1p-24 * 1.0001);
}

}  // namespace
}  // namespace whet::core
