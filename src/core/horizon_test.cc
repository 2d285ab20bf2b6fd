// Horizon, weight bounds, singular values: the formulas, that they hold for rows, and that they are reached.
#include <gtest/gtest.h>
#include <whet/error.h>
#include <whet/horizon.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases.h"

namespace whet {
namespace {

constexpr double kRounding = 1e-14;

void expect_refused(const std::function<void()>& call, const std::string& name) {
  try {
    call();
    ADD_FAILURE() << name << " was accepted";
  } catch (const Error& e) {
    EXPECT_TRUE(std::string(e.what()).starts_with(name + ": ")) << e.what();
  }
}

TEST(Horizon, HasTheValuesOfThePythonPackage) {
  EXPECT_NEAR(horizon(6, 0.5), 404.4287934927351, 1e-10);
  EXPECT_NEAR(horizon(6, 0.1), 1 + 9 * std::exp(6.0), 1e-9);
  EXPECT_NEAR(largest_weight(1000, 6), 0.28766437, 1e-8);
  EXPECT_EQ(horizon(0, 0.25), 4);
  EXPECT_EQ(horizon(6, 1), 1);
  EXPECT_EQ(largest_weight(1, 0), 1);
  EXPECT_EQ(largest_weight(8, 0), 0.125);
}

TEST(Horizon, IsLargestWeightTheOtherWayRound) {
  for (double spread : {0.0, 0.1, 5.0, 30.0}) {
    for (double weight : {0.001, 0.3, 0.99}) {
      for (double beta : {0.5, 1.0, 3.0}) {
        const double keys = horizon(spread, weight, beta);
        EXPECT_NEAR(largest_weight(keys, spread, beta), weight, 1e-12) << spread << " " << weight;
      }
    }
  }
}

TEST(Horizon, BetaMultipliesTheSpread) {
  EXPECT_EQ(horizon(2, 0.5, 3), horizon(6, 0.5));
  EXPECT_EQ(largest_weight(1000, 2, 3), largest_weight(1000, 6));
  EXPECT_EQ(paper_bounds(1000, 2, 3).lower, paper_bounds(1000, 6).lower);
  EXPECT_EQ(paper_bounds(1000, 2, 3).upper, paper_bounds(1000, 6).upper);
  EXPECT_NE(horizon(2, 0.5, 3), horizon(2, 0.5));
}

TEST(Horizon, OnlyTheWholeProductMayLeaveTheRange) {
  EXPECT_NEAR(horizon(710, 0.99) / (std::exp(700.0) * std::exp(10.0 + std::log(1 / 99.0))), 1, 1e-13);
  EXPECT_EQ(horizon(kInfinity, std::nextafter(1.0, 0.0)), kInfinity);
}

TEST(Horizon, InfinityIsAnAnswer) {
  EXPECT_EQ(horizon(1000, 0.5), kInfinity);
  EXPECT_EQ(horizon(kInfinity, 0.5), kInfinity);
  EXPECT_EQ(horizon(kInfinity, 1), 1);
  for (double finite : {6.0, 1000.0, 1e300}) {  // however large, endless keys leave nothing
    EXPECT_EQ(largest_weight(kInfinity, finite), 0);
    EXPECT_EQ(largest_weight(kInfinity, finite, 1e100), 0);
    EXPECT_EQ(paper_bounds(kInfinity, finite).lower, 0);
    EXPECT_EQ(paper_bounds(kInfinity, finite).upper, 0);
  }
  EXPECT_EQ(largest_weight(1e300, kInfinity), 1);
  EXPECT_EQ(largest_weight(kInfinity, kInfinity), 1);
  EXPECT_EQ(paper_bounds(kInfinity, kInfinity).lower, 0);
  EXPECT_EQ(paper_bounds(kInfinity, kInfinity).upper, 1);
}

TEST(Horizon, RefusesWhatHasNoMeaning) {
  for (double wrong : {-1.0, kNaN}) {
    expect_refused([&] { horizon(wrong, 0.5); }, "spread");
    expect_refused([&] { largest_weight(2, wrong); }, "spread");
    expect_refused([&] { paper_bounds(2, wrong); }, "spread");
  }
  for (double wrong : {0.0, -0.5, 1.5, kNaN}) expect_refused([&] { horizon(1, wrong); }, "weight");
  for (double wrong : {0.0, 0.5, -3.0, kNaN}) {
    expect_refused([&] { largest_weight(wrong, 1); }, "keys");
    expect_refused([&] { paper_bounds(wrong, 1); }, "keys");
  }
  for (double wrong : {0.0, -1.0, kInfinity, kNaN}) {
    expect_refused([&] { horizon(1, 0.5, wrong); }, "beta");
    expect_refused([&] { largest_weight(2, 1, wrong); }, "beta");
    expect_refused([&] { paper_bounds(2, 1, wrong); }, "beta");
  }
}

TEST(Bounds, HoldForEveryRow) {
  Random random(1);
  for (std::size_t n : Sizes{1, 2, 5, 100, 3000}) {
    for (double sd : {0.01, 1.0, 6.0}) {
      for (double beta : {1.0, 1.7}) {
        const oracle::Row row(to_double(gaussian_row<double>(random, n, sd)));
        const auto [low, high] = std::minmax_element(row.x.begin(), row.x.end());
        const double spread = *high - *low, keys = static_cast<double>(n);
        const double bound = largest_weight(keys, spread, beta);
        const WeightBounds paper = paper_bounds(keys, spread, beta);
        EXPECT_LE(bound, paper.upper * (1 + kRounding));
        double sum = 0;
        for (double x : row.x) sum += std::exp(beta * (x - *high));
        for (double x : row.x) {
          const double weight = std::exp(beta * (x - *high)) / sum;
          EXPECT_LE(weight, bound * (1 + kRounding));
          EXPECT_GE(weight, paper.lower * (1 - kRounding));
        }
      }
    }
  }
}

TEST(Bounds, LargestWeightIsReachedByOneKeyAboveAllOthers) {
  for (std::int64_t n : {2, 17, 5000}) {
    std::vector<double> x(static_cast<std::size_t>(n), -2.5), weights(x.size());
    x[x.size() / 2] = 3.5;
    softmax({x.data(), {n}}, {weights.data(), {n}});
    EXPECT_NEAR(weights[x.size() / 2], largest_weight(static_cast<double>(n), 6), 1e-12);
  }
}

TEST(Bounds, ThePapersAreTheLemma) {
  EXPECT_NEAR(paper_bounds(1000, 2).lower, std::exp(-2.0) / 1000, 1e-18);
  EXPECT_NEAR(paper_bounds(1000, 2).upper, std::exp(2.0) / 1000, 1e-16);
  EXPECT_EQ(paper_bounds(10, 6).upper, 1) << "e^6 / 10 is no weight";
  // With spread and many keys the two upper bounds meet; before, ours is tighter.
  EXPECT_NEAR(largest_weight(1e9, 2) / paper_bounds(1e9, 2).upper, 1, 1e-8);
  EXPECT_LT(largest_weight(1000, 6), 0.75 * paper_bounds(1000, 6).upper);
}

// ---- singular values

struct Matrix {
  std::int64_t rows, columns;
  std::vector<double> values;

  ConstView view() const { return {values.data(), {rows, columns}}; }
  double at(std::int64_t i, std::int64_t j) const {
    return values[static_cast<std::size_t>(i * columns + j)];
  }
};

Matrix gaussian_matrix(Random& random, std::int64_t rows, std::int64_t columns) {
  return {rows, columns,
          to_double(gaussian_row<double>(random, static_cast<std::size_t>(rows * columns), 1))};
}

// A lower bound of the largest singular value: |A v| / |v| after many steps of v = A^T A v.
long double power_iteration(const Matrix& a) {
  std::vector<long double> v(static_cast<std::size_t>(a.columns), 1), u(static_cast<std::size_t>(a.rows));
  const auto norm = [](const std::vector<long double>& x) {
    long double sum = 0;
    for (long double value : x) sum += value * value;
    return std::sqrt(sum);
  };
  long double gain = 0;
  for (int step = 0; step < 2000; ++step) {
    const long double length = norm(v);
    for (long double& value : v) value /= length;
    std::fill(u.begin(), u.end(), 0);
    for (std::int64_t i = 0; i < a.rows; ++i) {
      for (std::int64_t j = 0; j < a.columns; ++j) {
        u[static_cast<std::size_t>(i)] += a.at(i, j) * v[static_cast<std::size_t>(j)];
      }
    }
    gain = norm(u);
    std::fill(v.begin(), v.end(), 0);
    for (std::int64_t i = 0; i < a.rows; ++i) {
      for (std::int64_t j = 0; j < a.columns; ++j) {
        v[static_cast<std::size_t>(j)] += a.at(i, j) * u[static_cast<std::size_t>(i)];
      }
    }
  }
  return gain;
}

void expect_tight(double bound, long double exact) {
  EXPECT_GE(bound, exact);
  EXPECT_LE(bound, exact * (1 + 1e-9L));
}

TEST(LargestSingularValue, OfKnownMatrices) {
  const Matrix one{1, 1, {-3.5}};
  expect_tight(largest_singular_value(one.view()), 3.5L);
  const Matrix diagonal{3, 3, {0.5, 0, 0, 0, -4, 0, 0, 0, 3.999}};
  expect_tight(largest_singular_value(diagonal.view()), 4);
  const Matrix shear{2, 2, {1, 1, 0, 1}};  // its eigenvalues are 1
  expect_tight(largest_singular_value(shear.view()), (1 + std::sqrt(5.0L)) / 2);
  const Matrix rank_one{37, 11, std::vector<double>(407, 1)};
  expect_tight(largest_singular_value(rank_one.view()), std::sqrt(407.0L));
}

TEST(LargestSingularValue, WhereAllAreEqualAndNothingConverges) {
  Matrix hadamard{64, 64, std::vector<double>(4096)};
  for (unsigned i = 0; i < 64; ++i) {
    for (unsigned j = 0; j < 64; ++j)
      hadamard.values[i * 64 + j] = __builtin_popcount(i & j) % 2 == 0 ? 1 : -1;
  }
  expect_tight(largest_singular_value(hadamard.view()), 8);
  for (double gap : {1e-3, 1e-9, 1e-15}) {
    const Matrix close{2, 2, {1, 0, 0, 1 - gap}};
    expect_tight(largest_singular_value(close.view()), 1);
  }
}

TEST(LargestSingularValue, IsNeverBelowWhatPowerIterationFinds) {
  Random random(2);
  for (const auto& [rows, columns] : {std::pair{1, 9}, {5, 5}, {64, 16}, {16, 64}, {40, 41}}) {
    const Matrix a = gaussian_matrix(random, rows, columns);
    expect_tight(largest_singular_value(a.view()), power_iteration(a) * (1 - 1e-16L));
  }
}

TEST(LargestSingularValue, ReadsStridesAndFloats) {
  Random random(3);
  Matrix a = gaussian_matrix(random, 12, 20);
  const Matrix part{12, 5, [&] {
                      std::vector<double> values;
                      for (std::int64_t i = 0; i < 12; ++i) {
                        for (std::int64_t j = 15; j < 20; ++j) values.push_back(a.at(i, j));
                      }
                      return values;
                    }()};
  const double expected = largest_singular_value(part.view());
  EXPECT_EQ(largest_singular_value({a.values.data() + 15, {12, 5}, {20, 1}}), expected);
  EXPECT_EQ(largest_singular_value({a.values.data() + 15, {5, 12}, {1, 20}}), expected);
  EXPECT_NE(largest_singular_value({a.values.data(), {12, 5}, {20, 1}}), expected);

  std::vector<float> single(a.values.begin(), a.values.end());
  std::copy(single.begin(), single.end(), a.values.begin());
  EXPECT_EQ(largest_singular_value({single.data(), {12, 20}}), largest_singular_value(a.view()));
}

TEST(LargestSingularValue, OfEveryMagnitude) {
  for (double size : {5e-324, 1e-300, 1e-160, 1e160, 1e307}) {
    const Matrix a{2, 3, {size, 0, 0, 0, 0, size}};
    expect_tight(largest_singular_value(a.view()), size);
  }
  const Matrix mixed{2, 2, {1e200, 1e-200, 1e-200, 1e-200}};
  expect_tight(largest_singular_value(mixed.view()), 1e200);
  EXPECT_EQ(largest_singular_value(Matrix{3, 2, std::vector<double>(6, 0)}.view()), 0);
  EXPECT_EQ(largest_singular_value(Matrix{0, 5, {}}.view()), 0);
  EXPECT_EQ(largest_singular_value(Matrix{5, 0, {}}.view()), 0);
}

TEST(LargestSingularValue, RefusesWhatIsNoMatrix) {
  const std::vector<double> x = {1, 2, kNaN, kInfinity};
  const std::vector<bf16> half(4);
  expect_refused([&] { largest_singular_value({x.data(), {4}}); }, "matrix");
  expect_refused([&] { largest_singular_value({x.data(), {1, 2, 2}}); }, "matrix");
  expect_refused([&] { largest_singular_value({x.data(), {2, -1}}); }, "matrix");
  expect_refused([&] { largest_singular_value({x.data(), {1, 2}, {1}}); }, "matrix");
  expect_refused([&] { largest_singular_value({x.data(), {1, 3}}); }, "matrix");
  expect_refused([&] { largest_singular_value({x.data() + 3, {1, 1}}); }, "matrix");
  expect_refused([&] { largest_singular_value({half.data(), {2, 2}}); }, "matrix");
  expect_refused([&] { largest_singular_value({static_cast<const double*>(nullptr), {1, 1}}); }, "matrix");
}

// ---- the spread that weights allow

TEST(SpreadBound, IsReachedInOneDimension) {
  const double q = 3, bias = 0.5, y = 2, k = 1.25, x = 4, scale = 0.1;
  const double query = scale * (q * y + bias), highest = query * k * x, lowest = query * k * -x;
  const HeadNorms norms{
      .query_gain = q, .query_bias = bias, .query_input = y, .key_gain = k, .key_input = x, .scale = scale};
  EXPECT_NEAR(spread_bound(norms), highest - lowest, 1e-14);
}

TEST(SpreadBound, HoldsForRandomHeads) {
  Random random(4);
  constexpr std::int64_t kIn = 12, kOut = 5;
  for (int trial = 0; trial < 200; ++trial) {
    const Matrix q = gaussian_matrix(random, kOut, kIn), k = gaussian_matrix(random, kOut, kIn);
    const Matrix query_bias = gaussian_matrix(random, kOut, 1), key_bias = gaussian_matrix(random, kOut, 1);
    const Matrix y = gaussian_matrix(random, kIn, 1), keys = gaussian_matrix(random, 30, kIn);
    const auto norm = [](const double* v, std::int64_t n) {
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) sum += v[i] * v[i];
      return std::sqrt(sum);
    };
    double highest = -kInfinity, lowest = kInfinity, key_input = 0;
    for (std::int64_t key = 0; key < keys.rows; ++key) {
      double logit = 0;
      for (std::int64_t i = 0; i < kOut; ++i) {
        double a = query_bias.at(i, 0), b = 100 * key_bias.at(i, 0);
        for (std::int64_t j = 0; j < kIn; ++j) {
          a += q.at(i, j) * y.at(j, 0);
          b += k.at(i, j) * keys.at(key, j);
        }
        logit += 0.3 * a * b;
      }
      highest = std::max(highest, logit);
      lowest = std::min(lowest, logit);
      key_input = std::max(key_input, norm(&keys.values[static_cast<std::size_t>(key * kIn)], kIn));
    }
    const double bound = spread_bound({.query_gain = largest_singular_value(q.view()),
                                       .query_bias = norm(query_bias.values.data(), kOut),
                                       .query_input = norm(y.values.data(), kIn),
                                       .key_gain = largest_singular_value(k.view()),
                                       .key_input = key_input,
                                       .scale = 0.3});
    EXPECT_LE(highest - lowest, bound);
    EXPECT_GT(highest - lowest, bound / 50) << "so loose a bound would hide a factor left out of the logits";
  }
}

TEST(SpreadBound, OfNothingIsZeroWhateverElseIsHuge) {
  EXPECT_EQ(spread_bound({.query_gain = 1e200, .query_input = 1e200, .key_gain = 0, .key_input = 1}), 0);
  EXPECT_EQ(
      spread_bound({.query_gain = 1e200, .query_input = 1e200, .key_gain = 1, .key_input = 1, .scale = 0}),
      0);
  EXPECT_EQ(spread_bound({.query_gain = 0, .query_input = 1, .key_gain = 1e200, .key_input = 1e200}), 0);
  EXPECT_EQ(spread_bound({.query_gain = 1e200, .query_input = 1e200, .key_gain = 1, .key_input = 1}),
            kInfinity);
}

TEST(SpreadBound, OnlyTheWholeProductMayLeaveTheRange) {
  for (double tiny : {1e-200, 1e-300}) {
    const double huge = 1 / tiny;
    EXPECT_NEAR(spread_bound({.query_gain = tiny, .query_input = tiny, .key_gain = huge, .key_input = huge}),
                2, 1e-12);
    EXPECT_NEAR(spread_bound({.query_gain = huge, .query_input = huge, .key_gain = tiny, .key_input = tiny}),
                2, 1e-12);
    EXPECT_NEAR(
        spread_bound(
            {.query_gain = 1, .query_input = huge, .key_gain = huge, .key_input = tiny, .scale = tiny}),
        2, 1e-12);
  }
}

TEST(SpreadBound, RefusesNormsThatAreNone) {
  for (double wrong : {-1.0, kInfinity, kNaN}) {
    HeadNorms good{.query_gain = 1, .query_bias = 1, .query_input = 1, .key_gain = 1, .key_input = 1};
    const auto refuse = [&](double HeadNorms::*field, const char* name) {
      HeadNorms norms = good;
      norms.*field = wrong;
      expect_refused([&] { spread_bound(norms); }, name);
    };
    refuse(&HeadNorms::query_gain, "query_gain");
    refuse(&HeadNorms::query_bias, "query_bias");
    refuse(&HeadNorms::query_input, "query_input");
    refuse(&HeadNorms::key_gain, "key_gain");
    refuse(&HeadNorms::key_input, "key_input");
    refuse(&HeadNorms::scale, "scale");
  }
}

}  // namespace
}  // namespace whet
