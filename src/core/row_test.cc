// The state of a row: its merge and what follows from it.
#include <gtest/gtest.h>
#include <whet/row.h>

#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "cases.h"
#include "oracle.h"

namespace whet {
namespace {

RowState state_of(const std::vector<double>& x) {
  const oracle::State<long double> s = oracle::state<long double>(oracle::Row(x));
  return {s.count,
          static_cast<double>(s.min),
          static_cast<double>(s.max),
          static_cast<double>(s.z),
          static_cast<double>(s.t),
          static_cast<double>(s.u)};
}

void expect_same(const RowState& a, const RowState& b) {
  EXPECT_EQ(a.count, b.count);
  EXPECT_EQ(a.min, b.min);
  EXPECT_EQ(a.max, b.max);
  EXPECT_EQ(a.z, b.z);
  EXPECT_EQ(a.t, b.t);
  EXPECT_EQ(a.u, b.u);
}

// One merge rounds a handful of times; t and u are sums of terms of one sign, so nothing cancels
// but d t in u, which is smaller than the other terms together.
void expect_close(const RowState& a, const RowState& b) {
  constexpr double kRounding = 1e-14;
  EXPECT_EQ(a.count, b.count);
  EXPECT_EQ(a.min, b.min);
  EXPECT_EQ(a.max, b.max);
  EXPECT_NEAR(a.z, b.z, kRounding * b.z);
  EXPECT_NEAR(a.t, b.t, kRounding * std::abs(b.t));
  EXPECT_NEAR(a.u, b.u, kRounding * b.u);
}

std::vector<double> random_keys(Random& random, std::size_t n, double sd = 3) {
  return to_double(gaussian_row<double>(random, n, sd));
}

std::vector<double> joined(std::vector<double> a, const std::vector<double>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(Merge, PartsGiveTheWhole) {
  Random random(1);
  for (std::size_t n : Sizes{1, 2, 7, 100}) {
    for (std::size_t m : Sizes{1, 3, 64}) {
      const std::vector<double> a = random_keys(random, n);
      const std::vector<double> b = random_keys(random, m);
      expect_close(merge(state_of(a), state_of(b)), state_of(joined(a, b)));
    }
  }
}

TEST(Merge, ManyPartsGiveTheWhole) {
  Random random(2);
  RowState merged;
  std::vector<double> all;
  for (int part = 0; part < 20; ++part) {
    const std::vector<double> keys = random_keys(random, 11, 1 + part);
    merged = merge(merged, state_of(keys));
    all = joined(all, keys);
  }
  expect_close(merged, state_of(all));
}

TEST(Merge, NoKeysAreTheIdentity) {
  Random random(3);
  const RowState a = state_of(random_keys(random, 9));
  expect_same(merge(a, RowState{}), a);
  expect_same(merge(RowState{}, a), a);
  expect_same(merge(RowState{}, RowState{}), RowState{});
}

TEST(Merge, IsCommutative) {
  Random random(4);
  for (int trial = 0; trial < 50; ++trial) {
    const RowState a = state_of(random_keys(random, 5));
    const RowState b = state_of(random_keys(random, 8));
    expect_close(merge(a, b), merge(b, a));
  }
}

TEST(Merge, IsAssociative) {
  Random random(5);
  for (int trial = 0; trial < 50; ++trial) {
    const RowState a = state_of(random_keys(random, 5, 0.1));
    const RowState b = state_of(random_keys(random, 8, 3));
    const RowState c = state_of(random_keys(random, 3, 10));
    expect_close(merge(merge(a, b), c), merge(a, merge(b, c)));
  }
}

TEST(Merge, OfEqualKeysIsExact) {
  const RowState two = merge(state_of({2.5}), state_of({2.5}));
  expect_same(two, {2, 2.5, 2.5, 2, 0, 0});
}

TEST(Merge, SurvivesDifferencesThatOverflow) {
  for (double big : {3e38, 1.5e308}) {
    const RowState whole = merge(state_of({-big, -big}), state_of({big}));
    expect_same(whole, {3, -big, big, 1, 0, 0});
    expect_same(merge(state_of({big}), state_of({-big, -big})), whole);
  }
}

TEST(Merge, OfAStateFromMinusInfinityOnlyChangesNothing) {
  const RowState nothing = state_of({-kInfinity, -kInfinity});
  expect_same(nothing, RowState{});
  expect_same(merge(nothing, state_of({3e38})), state_of({3e38}));
}

TEST(Merge, KeepsNaN) {
  const RowState broken = state_of({1, kNaN});
  for (const RowState& whole : {merge(broken, state_of({1, 2})), merge(state_of({1, 2}), broken),
                                merge(broken, RowState{}), merge(RowState{}, broken)}) {
    EXPECT_TRUE(std::isnan(whole.max));
    EXPECT_TRUE(std::isnan(whole.z));
    EXPECT_TRUE(std::isnan(row_entropy(whole)));
    EXPECT_TRUE(std::isnan(row_log_sum_exp(whole)));
  }
}

TEST(RowQuantities, EqualTheOracle) {
  Random random(6);
  for (RowKind kind : kRowKinds) {
    for (std::size_t n : Sizes{1, 2, 3, 17, 500}) {
      const oracle::Row row(to_double(make_row<double>(kind, n, random)));
      const RowState state = state_of(row.x);
      const oracle::State<long double> s = oracle::state<long double>(row);
      const double size = static_cast<double>(s.u / s.z);  // what U/Z - (T/Z)^2 cancels from
      const auto exact = [](long double value) { return static_cast<double>(value); };
      EXPECT_NEAR(row_log_sum_exp(state), exact(oracle::log_sum_exp<long double>(row)),
                  1e-15 * (std::abs(state.max) + 10));
      EXPECT_NEAR(row_entropy(state), exact(oracle::entropy<long double>(row)), 1e-14);
      EXPECT_NEAR(row_varentropy(state), exact(oracle::moments<long double>(row).variance), 1e-14 * size);
      EXPECT_NEAR(row_peak(state), exact(oracle::peak<long double>(row)), 1e-15);
      EXPECT_EQ(row_spread(state), exact(s.max) - exact(s.min));
    }
  }
}

TEST(RowQuantities, AreNeverNegative) {
  Random random(7);
  for (int trial = 0; trial < 1000; ++trial) {
    std::vector<double> x(40, -745.0);
    x[0] = gaussian(random);
    x[1] = x[0] - std::ldexp(1.0, -trial % 60);
    const RowState state = state_of(x);
    EXPECT_GE(row_entropy(state), 0);
    EXPECT_GE(row_varentropy(state), 0);
    EXPECT_GE(row_spread(state), 0);
  }
}

TEST(RowQuantities, OfNoKeys) {
  EXPECT_EQ(row_log_sum_exp({}), -kInfinity);
  EXPECT_EQ(row_entropy({}), 0);
  EXPECT_EQ(row_varentropy({}), 0);
  EXPECT_EQ(row_peak({}), 0);
  EXPECT_EQ(row_spread({}), 0);
}

TEST(RowQuantities, OfOneKey) {
  const RowState one = state_of({-4.25});
  EXPECT_EQ(row_log_sum_exp(one), -4.25);
  EXPECT_EQ(row_entropy(one), 0);
  EXPECT_EQ(row_varentropy(one), 0);
  EXPECT_EQ(row_peak(one), 1);
  EXPECT_EQ(row_spread(one), 0);
}

TEST(RowQuantities, OfEqualKeys) {
  const RowState equal = state_of(std::vector<double>(382, 1e4));
  EXPECT_EQ(row_entropy(equal), std::log(382.0));
  EXPECT_EQ(row_varentropy(equal), 0);
  EXPECT_EQ(row_peak(equal), 1.0 / 382);
}

TEST(RowQuantities, VarentropyIsMinusTheSlopeOfEntropyInBeta) {
  Random random(8);
  const oracle::Row row(random_keys(random, 30, 2));
  const long double step = 1e-5L;
  const long double slope =
      (oracle::entropy<long double>(row, 1 + step) - oracle::entropy<long double>(row, 1 - step)) /
      (2 * step);
  EXPECT_NEAR(row_varentropy(state_of(row.x)), static_cast<double>(-slope), 1e-8);
}

}  // namespace
}  // namespace whet
