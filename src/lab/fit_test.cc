#include "lab/fit.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <whet/error.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "files/file.h"
#include "temporary_folder.h"

namespace whet::lab {
namespace {

namespace fs = std::filesystem;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::vector<double> random_row(std::size_t size, double scale, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<double> row(size);
  for (double& x : row) x = normal(random);
  return row;
}

std::size_t index_of_rank(const std::vector<double>& row, std::size_t rank) {
  std::vector<std::size_t> order(row.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return row[a] > row[b]; });
  return order[rank];
}

// ln of the weight that softmax(beta x) gives item j.
double log_weight(const std::vector<double>& row, std::size_t j, double beta) {
  const double top = *std::ranges::max_element(row);
  long double sum = 0;
  for (const double x : row) sum += std::exp(static_cast<long double>(beta) * (x - top));
  return static_cast<double>(static_cast<long double>(beta) * (row[j] - top) - std::log(sum));
}

long double expectation(const std::vector<double>& row, double beta) {
  const double top = *std::ranges::max_element(row);
  long double sum = 0, weighted = 0;
  for (const double x : row) {
    const long double e = std::exp(static_cast<long double>(beta) * (x - top));
    sum += e;
    weighted += e * x;
  }
  return weighted / sum;
}

TEST(BestBeta, NoOtherBetaOfAScanGivesMoreWeight) {
  for (const std::size_t size : {3U, 16U, 300U}) {
    for (const std::size_t rank : {std::size_t{1}, size / 4, size / 2, size - 1}) {
      for (const double scale : {0.01, 1.0, 50.0}) {
        const auto row = random_row(size, scale, static_cast<unsigned>(size + rank));
        const std::size_t item = index_of_rank(row, rank);
        const double best = log_weight(row, item, best_beta(row, item, 1e6));
        EXPECT_GE(best, log_weight(row, item, 0) - 1e-12);
        for (int step = 0; step < 2500; ++step) {
          const double beta = 1e-5 * std::pow(1.01, step);  // up to 6e5
          ASSERT_GE(best, log_weight(row, item, beta) - 1e-12) << size << ' ' << rank << ' ' << beta;
        }
      }
    }
  }
}

TEST(BestBeta, MeetsTheMeanAtTheDocumentedPrecision) {
  int inside = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    const std::size_t size = seed % 3 == 0 ? 16 : seed % 3 == 1 ? 512 : 16384;
    const auto row = random_row(size, std::pow(10.0, seed % 7) / 1e3, seed);
    const auto [low, high] = std::ranges::minmax(row);
    const std::size_t item = index_of_rank(row, 1 + seed % 5);
    const double beta = best_beta(row, item, 1e30);
    inside += beta > 0 && beta < 1e30;
    EXPECT_LE(std::abs(expectation(row, beta) - row[item]), 1e-12 * (high - low)) << seed;
  }
  EXPECT_EQ(inside, 60);
}

TEST(BestBeta, OfThreeItemsIsAsByHand) {
  // x = (0, -1, -3), item 1: e^-b (-1) + e^-3b (-3) = -(1 + e^-b + e^-3b), that is 2 e^-3b = 1.
  EXPECT_NEAR(best_beta(std::vector<double>{0, -1, -3}, 1, 100), std::log(2.0) / 3, 1e-13);
  EXPECT_NEAR(best_beta(std::vector<float>{5, 4, 2}, 1, 100), std::log(2.0) / 3, 1e-13);
}

TEST(BestBeta, IsZeroForAnItemNotAboveTheMean) {
  EXPECT_EQ(best_beta(std::vector<double>{3, 1, 2}, 1, 100), 0);
  EXPECT_EQ(best_beta(std::vector<double>{3, 1, 2}, 2, 100), 0);
  EXPECT_GT(best_beta(std::vector<double>{3, 1, 2.01}, 2, 100), 0);
}

TEST(BestBeta, IsTheLargestAllowedForTheMaximum) {
  EXPECT_EQ(best_beta(std::vector<double>{3, 1, 2}, 0, 100), 100);
  EXPECT_EQ(best_beta(std::vector<double>{3, 1, 3}, 2, 100), 100);
}

TEST(BestBeta, StopsAtTheLargestAllowed) {
  const std::vector<double> row{0, -1e-3, -1};  // its optimum is near e^-beta = 1e-3
  const double free = best_beta(row, 1, 1e6);
  EXPECT_GT(free, 5);
  EXPECT_EQ(best_beta(row, 1, 5), 5);
  EXPECT_NEAR(best_beta(row, 1, free * 2), free, 1e-9 * free);
}

TEST(BestBeta, HoldsForExtremeRows) {
  EXPECT_EQ(best_beta(std::vector<double>(5, 0.1), 3, 100), 0);
  EXPECT_EQ(best_beta(std::vector<double>{4}, 0, 100), 0);
  const double wide = best_beta(std::vector<double>{0, -1e307, -3e307}, 1, 1e300);
  EXPECT_NEAR(wide * 1e307, std::log(2.0) / 3, 1e-12);
  const double narrow = best_beta(std::vector<double>{0, -1e-290, -3e-290}, 1, 1e300);
  EXPECT_NEAR(narrow * 1e-290, std::log(2.0) / 3, 1e-12);
  // So close to the maximum that E_beta[x] = -(1e-200 + e^-beta) / 2 there.
  const std::vector<double> close{0, -1e-200, -1};
  EXPECT_NEAR(best_beta(close, 1, 1e9), std::log(1e200), 1e-9);
}

TEST(BestBeta, ErrorsNameTheArgument) {
  const std::vector<double> row{1, 2};
  EXPECT_EQ(error_of([&] { best_beta(row, 2, 9); }), "item: is 2, must be less than the row's length, 2");
  EXPECT_EQ(error_of([&] {
              best_beta(std::vector<double>{1, kNaN}, 0, 9);
            }),
            "logits: item 1 is nan, must be finite");
  EXPECT_EQ(error_of([&] {
              best_beta(std::vector<double>{-1.7e308, 1.7e308}, 0, 9);
            }),
            "logits: their spread overflows, must be finite");
  for (const double beta_max : {0.0, -1.0, kInfinity, kNaN}) {
    EXPECT_NE(error_of([&] { best_beta(row, 0, beta_max); }).find("beta_max: is"), std::string::npos);
  }
}

double value_at(const std::vector<double>& coefficients, double h) {
  double value = 0;
  for (const double c : coefficients) value = value * h + c;
  return value;
}

std::vector<FitPoint> points_of(const std::vector<double>& coefficients, double low, double high, int count) {
  std::vector<FitPoint> points;
  for (int i = 0; i < count; ++i) {
    const double h = low + (high - low) * i / (count - 1);
    points.push_back({h, value_at(coefficients, h)});
  }
  return points;
}

// numpy.polyfit of the same points is what the expected numbers are.
const std::vector<FitPoint> kScattered = {{0.5, 1.25}, {1, 1.75}, {1.5, 2.5}, {2, 2.25},
                                          {3, 3},      {4, 3.75}, {5, 3.5},   {6, 5}};

TEST(Fit, IsNumpysPolyfit) {
  const PolynomialFit fit = fit_polynomial(kScattered);
  const std::vector<double> expected{0.017344220522244023, -0.1779774575723319, 0.49270758505932727,
                                     0.35626424620416774, 1.0377190258596118};
  ASSERT_EQ(fit.coefficients.size(), 5U);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(fit.coefficients[i], expected[i], 1e-12) << i;
  EXPECT_NEAR(fit.rms_residual, 0.22959964301017596, 1e-13);
  EXPECT_NEAR(fit.r_squared, 0.9583478549567208, 1e-13);
  EXPECT_EQ(fit.points, 8U);
  EXPECT_EQ(fit.lowest_entropy, 0.5);
  EXPECT_EQ(fit.highest_entropy, 6);
}

TEST(Fit, OfDegreeOneIsALine) {
  const PolynomialFit fit = fit_polynomial(kScattered, 1);
  ASSERT_EQ(fit.coefficients.size(), 2U);
  EXPECT_NEAR(fit.coefficients[0], 0.5844748858447486, 1e-14);
  EXPECT_NEAR(fit.coefficients[1], 1.194634703196347, 1e-14);
  EXPECT_NEAR(fit.rms_residual, 0.3109264033666204, 1e-14);
  EXPECT_NEAR(fit.r_squared, 0.9236146344213315, 1e-14);
}

TEST(Fit, FindsThePapersPolynomialAgain) {
  const std::vector<double> paper{-0.037, 0.481, -2.3, 4.917, -1.791};
  const PolynomialFit fit = fit_polynomial(points_of(paper, 0.6, 5.9, 200));
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(fit.coefficients[i], paper[i], 1e-12) << i;
  EXPECT_LT(fit.rms_residual, 1e-13);
  EXPECT_NEAR(fit.r_squared, 1, 1e-13);
}

TEST(Fit, GoesThroughAsManyPointsAsCoefficients) {
  for (int degree = 1; degree <= 7; ++degree) {
    const auto points = std::span(kScattered).first(static_cast<std::size_t>(degree) + 1);
    const PolynomialFit fit = fit_polynomial(points, degree);
    for (const auto& p : points) {
      EXPECT_NEAR(value_at(fit.coefficients, p.entropy), p.best_beta, 1e-9) << degree;
    }
  }
}

TEST(Fit, StandsOnANarrowRangeFarFromZero) {
  std::vector<FitPoint> points;
  for (int i = 0; i <= 100; ++i) {
    const double h = 9 + i * 1e-3;
    points.push_back({h, 2 + 10 * (h - 9)});
  }
  const PolynomialFit fit = fit_polynomial(points);
  EXPECT_LT(fit.rms_residual, 1e-5);
  EXPECT_NEAR(value_at(fit.coefficients, 9.05), 2.5, 1e-5);
}

TEST(Fit, OfEqualBetasHasNoRSquared) {
  const PolynomialFit fit = fit_polynomial(points_of({0.1}, 1, 2, 20));
  EXPECT_TRUE(std::isnan(fit.r_squared));
  EXPECT_LT(fit.rms_residual, 1e-13);
}

TEST(Fit, IsLeftOutWhereEntropiesDetermineNone) {
  EXPECT_FALSE(fit_if_determined(std::vector<FitPoint>(60, {0, 3})));
  std::vector<FitPoint> close(60, {1, 3});
  for (std::size_t i = 0; i < 4; ++i) close[i].entropy += static_cast<double>(i) * 1e-3;
  EXPECT_FALSE(fit_if_determined(close));  // four different ones
  std::vector<FitPoint> tiny;
  for (int i = 0; i < 60; ++i) tiny.push_back({i * 1e-120, i % 7 + 1.0});
  EXPECT_FALSE(fit_if_determined(tiny));  // coefficients beyond double
  EXPECT_EQ(fit_if_determined(kScattered)->coefficients, fit_polynomial(kScattered).coefficients);
}

TEST(Fit, ErrorsNameTheArgument) {
  const std::vector<FitPoint> few(kScattered.begin(), kScattered.begin() + 4);
  EXPECT_EQ(error_of([&] { fit_polynomial(few); }),
            "points: there are 4, a polynomial of degree 4 needs at least 5");
  EXPECT_EQ(error_of([&] {
              fit_polynomial(std::vector<FitPoint>(9, {2, 3}));
            }),
            "points: have entropies from 2.000000 to 2.000000, a polynomial of degree 4 needs at least 5 "
            "different ones");
  auto repeated = few;
  repeated.insert(repeated.end(), few.begin(), few.end());
  EXPECT_EQ(error_of([&] { fit_polynomial(repeated); }),
            "points: have entropies from 0.500000 to 2.000000, a polynomial of degree 4 needs at least 5 "
            "different ones");
  for (const int degree : {-1, 0, 8}) {
    EXPECT_EQ(error_of([&] { fit_polynomial(kScattered, degree); }),
              "degree: is " + std::to_string(degree) + ", must be 1 to 7");
  }
  auto wrong = kScattered;
  wrong[3].best_beta = kNaN;
  EXPECT_EQ(error_of([&] { fit_polynomial(wrong); }),
            "points: best_beta of point 3 is nan, must be finite and 0 or more");
  wrong[2].entropy = -1;
  EXPECT_EQ(error_of([&] { fit_polynomial(wrong); }),
            "points: entropy of point 2 is -1.000000, must be finite and 0 or more");
}

RowState state_of_entropy(double h) {
  RowState state;
  state.count = 1000;
  state.min = state.max = 0;
  state.z = std::exp(h);
  return state;
}

TEST(FittedRule, IsNeverExtrapolated) {
  const PolynomialFit fit = fit_polynomial(std::span(kScattered).subspan(1));
  const Rule rule = fit.rule();
  EXPECT_EQ(rule.gate(), 1);
  EXPECT_EQ(rule.hold(), 6);
  EXPECT_EQ(rule.beta(state_of_entropy(0.99)), 1);
  EXPECT_NEAR(rule.beta(state_of_entropy(1.01)), value_at(fit.coefficients, 1.01), 1e-13);
  EXPECT_NEAR(rule.beta(state_of_entropy(3)), value_at(fit.coefficients, 3), 1e-13);
  EXPECT_NEAR(rule.beta(state_of_entropy(6.9)), value_at(fit.coefficients, 6), 1e-13);
}

class RuleFile : public TemporaryFolder {
 protected:
  void SetUp() override {
    TemporaryFolder::SetUp();
    path_ = path("rule.txt");
  }

  std::string path_;
};

TEST_F(RuleFile, ReadsBackBitForBit) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const auto noise = random_row(50, 0.1, seed);
    auto points = points_of({-0.037, 0.481, -2.3, 4.917, -1.791}, 0.9 + noise[0] / 3, 5.7, 50);
    for (std::size_t i = 0; i < points.size(); ++i)
      points[i].best_beta = std::abs(points[i].best_beta + noise[i]);
    const PolynomialFit fit = fit_polynomial(points, 1 + static_cast<int>(seed % 7));
    write_rule_file(path_, fit, "seed " + std::to_string(seed));
    EXPECT_EQ(Rule::load(path_), fit.rule()) << content_of(path_);
  }
}

TEST_F(RuleFile, HoldsTheCommentThenTheName) {
  const PolynomialFit fit{{0.25, 1}, 1.5, 4, 0, 1, 10};
  write_rule_file(path_, fit, "fitted on seed 3\nfixed:7\n");
  EXPECT_EQ(content_of(path_), "# fitted on seed 3\n# fixed:7\npolynomial:0.25,1:gate=1.5:hold=4\n");
  write_rule_file(path_, fit, "");
  EXPECT_EQ(content_of(path_), "polynomial:0.25,1:gate=1.5:hold=4\n");
}

TEST_F(RuleFile, FailsWithoutTouchingWhatIsThere) {
  const PolynomialFit fit{{0.25, 1}, 1.5, 4, 0, 1, 10};
  write_rule_file(path_, fit, "");
  const std::string before = content_of(path_);
  EXPECT_EQ(error_of([&] { write_rule_file(path_, fit, std::string(70000, 'x')); }).find("comment: "), 0U);
  EXPECT_THROW(write_rule_file(path_, PolynomialFit{}, ""), Error);
  EXPECT_THROW(write_rule_file(path_ + "/below", fit, ""), files::FileError);
  EXPECT_EQ(content_of(path_), before);
}

}  // namespace
}  // namespace whet::lab
