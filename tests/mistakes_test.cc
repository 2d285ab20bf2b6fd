// Mistakes found in public re-implementations of adaptive softmax, one test each: every one of these
// would pass a casual look at the output.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cases.h"
#include "oracle.h"
#include "targets.h"

namespace whet {
namespace {

struct Result {
  std::vector<float> weights;
  std::vector<RowStats> stats;
};

Result run(const std::vector<float>& x, const Dims& sizes, const Rule& rule) {
  std::size_t rows = 1;
  for (std::size_t d = 0; d + 1 < sizes.size(); ++d) rows *= static_cast<std::size_t>(sizes[d]);
  Result result{std::vector<float>(x.size()), std::vector<RowStats>(rows)};
  softmax(ConstView(x.data(), sizes), View(result.weights.data(), sizes), {.rule = rule},
          {.stats = std::span(result.stats)});
  return result;
}

Result run(const std::vector<float>& x, const Rule& rule) {
  return run(x, {static_cast<std::int64_t>(x.size())}, rule);
}

std::vector<float> some_row(std::size_t n = 20, double sd = 1) {
  Random random(42);
  return gaussian_row<float>(random, n, sd);
}

TEST(Mistake, PolynomialWithItsPowersReversed) {
  const std::vector<float> x(30, 0.0F);
  const double h = std::log(30.0);
  std::vector<double> reversed = oracle::paper_coefficients();
  std::reverse(reversed.begin(), reversed.end());
  const double beta = run(x, Rule::paper()).stats[0].beta;
  EXPECT_NEAR(beta, oracle::polynomial(oracle::paper_coefficients(), h), 1e-5);
  EXPECT_GT(std::abs(beta - std::max(1.0, oracle::polynomial(reversed, h))), 0.5);
}

TEST(Mistake, BetaUsedAsTemperature) {
  const std::vector<float> x = some_row();
  const Result sharp = run(x, Rule::fixed(2));
  EXPECT_GT(sharp.stats[0].sharp_peak, sharp.stats[0].peak);
  EXPECT_LT(sharp.stats[0].sharp_entropy, sharp.stats[0].entropy);
  const std::vector<double> expected = oracle::weights<double>(oracle::Row(to_double(x)), 2);
  for (std::size_t i = 0; i < x.size(); ++i)
    EXPECT_NEAR(static_cast<double>(sharp.weights[i]), expected[i], 1e-6);
}

TEST(Mistake, EntropyInBits) {
  EXPECT_NEAR(run(std::vector<float>(8, 1.0F), Rule::paper()).stats[0].entropy, std::log(8.0), 1e-6);
}

TEST(Mistake, EntropySummedOverTheWholeBatch) {
  const std::vector<float> x = some_row(4 * 10);
  const Result batch = run(x, {4, 10}, Rule::paper());
  for (std::size_t row = 0; row < 4; ++row) {
    const auto begin = x.begin() + static_cast<std::ptrdiff_t>(10 * row);
    const Result alone = run(std::vector<float>(begin, begin + 10), Rule::paper());
    EXPECT_EQ(batch.stats[row].entropy, alone.stats[0].entropy);
    EXPECT_EQ(batch.stats[row].beta, alone.stats[0].beta);
  }
}

TEST(Mistake, MaskedPositionsCountedInNOrInEntropy) {
  const std::vector<float> x = some_row();
  std::vector<float> padded = x;
  padded.resize(1000, 0.5F);
  bool visible[1000] = {};
  std::fill(visible, visible + x.size(), true);
  for (const RuleCase& rule : rule_cases()) {
    std::vector<float> w(1000);
    RowStats stats{};
    softmax(ConstView(padded.data(), {1000}), View(w.data(), {1000}),
            {.rule = rule.rule, .mask = {visible, {1000}}}, {.stats = std::span(&stats, 1)});
    const RowStats alone = run(x, rule.rule).stats[0];
    EXPECT_EQ(stats.count, alone.count) << rule.rule.name();
    EXPECT_NEAR(stats.entropy, alone.entropy, 1e-6 * std::log(20.0)) << rule.rule.name();
    EXPECT_NEAR(stats.beta, alone.beta, 1e-4 * alone.beta) << rule.rule.name();
  }
}

TEST(Mistake, PLogPIsNaNWithMinusInfinity) {
  std::vector<float> x = some_row();
  x[3] = x[17] = -static_cast<float>(kInfinity);
  const Result result = run(x, Rule::paper());
  EXPECT_NEAR(result.stats[0].entropy, oracle::entropy<double>(oracle::Row(to_double(x))), 1e-5);
  for (float weight : result.weights) EXPECT_TRUE(std::isfinite(weight));
}

// Weights that underflow: e^y = 0 times y must be 0 in the entropy too.
TEST(Mistake, PLogPIsNaNWithUnderflow) {
  const Result result = run(some_row(50, 1000), Rule::paper());
  EXPECT_EQ(result.stats[0].entropy, 0);
  EXPECT_EQ(result.stats[0].beta, 1);
}

TEST(Mistake, EpsilonFlushedToZeroInHalfPrecision) {
  // ln(p + 1e-9) is -inf where p is 0 in f16, and 0 * -inf is NaN.
  std::vector<f16> x(6, to_storage(-200.0F, f16{}));
  x[1] = to_storage(3.0F, f16{});
  x[4] = to_storage(2.5F, f16{});
  std::vector<f16> w(6);
  RowStats stats{};
  softmax(ConstView(x.data(), {6}), View(w.data(), {6}), {.rule = Rule::paper()},
          {.stats = std::span(&stats, 1)});
  const oracle::Row row({-200, 3, -200, -200, 2.5, -200});
  EXPECT_NEAR(stats.entropy, oracle::entropy<double>(row), 1e-5);
  for (f16 weight : w) EXPECT_TRUE(std::isfinite(to_float(weight)));
}

TEST(Mistake, BetaTakenPerTensor) {
  std::vector<float> x(3 * 16, 0.0F);                     // row 0: H = ln 16
  for (std::size_t i = 0; i < 16; i += 4) x[16 + i] = 9;  // row 1: H = ln 4
  x[32] = 50;                                             // row 2: H = 0
  const Result result = run(x, {3, 16}, Rule::paper());
  for (std::size_t row = 0; row < 3; ++row) {
    const auto begin = x.begin() + static_cast<std::ptrdiff_t>(16 * row);
    const oracle::Row alone(to_double(std::vector<float>(begin, begin + 16)));
    EXPECT_NEAR(result.stats[row].beta, oracle::beta<double>(alone, paper_case().plain), 1e-5);
  }
  EXPECT_GT(std::abs(result.stats[0].beta - result.stats[1].beta), 0.1);
  EXPECT_EQ(result.stats[2].beta, 1);
}

// Whatever path a call takes, the rule is applied: plain, strided, masked, 16-bit, on every target.
TEST(Mistake, FusedPathIgnoresTheRule) {
  for_each_target([] {
    const std::vector<float> x = some_row(64);
    const Rule rule = Rule::fixed(3);
    const double expected = oracle::peak<double>(oracle::Row(to_double(x)), 3);
    const auto largest = [](const auto& w) {
      return static_cast<double>(*std::max_element(w.begin(), w.end()));
    };
    std::vector<float> w(64);
    softmax(ConstView(x.data(), {64}), View(w.data(), {64}), {.rule = rule});
    EXPECT_NEAR(largest(w), expected, 1e-6);
    softmax(ConstView(x.data(), {64, 1}), View(w.data(), {64, 1}), {.rule = rule, .axis = 0});
    EXPECT_NEAR(largest(w), expected, 1e-6);
    softmax(ConstView(x.data() + 63, {64}, {-1}), View(w.data(), {64}), {.rule = rule});
    EXPECT_NEAR(largest(w), expected, 1e-6);
    const bool visible = true;
    softmax(ConstView(x.data(), {64}), View(w.data(), {64}), {.rule = rule, .mask = {&visible, {1}}});
    EXPECT_NEAR(largest(w), expected, 1e-6);
    w = x;
    softmax(ConstView(w.data(), {64}), View(w.data(), {64}), {.rule = rule});
    EXPECT_NEAR(largest(w), expected, 1e-6);
    std::vector<bf16> half, half_w(64);
    for (float value : x) half.push_back(to_storage(value, bf16{}));
    softmax(ConstView(half.data(), {64}), View(half_w.data(), {64}), {.rule = rule});
    float half_largest = 0;
    for (bf16 value : half_w) half_largest = std::max(half_largest, to_float(value));
    EXPECT_NEAR(static_cast<double>(half_largest), expected, 0.05);
  });
}

// s ln n subtracted inside the exponent cancels in the quotient; s ln n must multiply the logits.
TEST(Mistake, SsmaxThatSubtractsInsideTheExponent) {
  const std::vector<float> x = some_row();
  const Result plain = run(x, Rule::none());
  const Result scaled = run(x, Rule::ssmax(0.8));
  const double beta = 0.8 * std::log(20.0);
  EXPECT_NEAR(scaled.stats[0].beta, beta, 1e-6);
  const std::vector<double> expected = oracle::weights<double>(oracle::Row(to_double(x)), beta);
  double moved = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(scaled.weights[i]), expected[i], 1e-5);
    moved += static_cast<double>(std::abs(scaled.weights[i] - plain.weights[i]));
  }
  EXPECT_GT(moved, 0.1);
}

// beta e^y / sum beta e^y is e^y / sum e^y.
TEST(Mistake, TemperatureAppliedAfterTheExponential) {
  const std::vector<float> x = some_row();
  const Result one = run(x, Rule::none());
  const Result three = run(x, Rule::fixed(3));
  for (std::size_t i = 1; i < x.size(); ++i) {
    const double ratio = std::log(static_cast<double>(one.weights[i] / one.weights[0]));
    const double sharpened = std::log(static_cast<double>(three.weights[i] / three.weights[0]));
    EXPECT_NEAR(sharpened, 3 * ratio, 1e-5 * (1 + std::abs(sharpened)));
  }
}

// A constant term beside the sum of e^y after the shift by the maximum depends on that maximum.
TEST(Mistake, OffByOneTermAfterTheMaxShift) {
  std::vector<float> x = some_row();
  for (float& value : x) value = std::round(value * 64) / 64;  // so that shifts by 512 are exact
  std::vector<float> low = x, high = x;
  for (std::size_t i = 0; i < x.size(); ++i) {
    low[i] -= 512;
    high[i] += 512;
  }
  for (const RuleCase& rule : rule_cases()) {
    const Result middle = run(x, rule.rule);
    float sum = 0;
    for (float weight : middle.weights) sum += weight;
    EXPECT_NEAR(sum, 1, 2e-6F);
    EXPECT_EQ(run(low, rule.rule).weights, middle.weights) << rule.rule.name();
    EXPECT_EQ(run(high, rule.rule).weights, middle.weights) << rule.rule.name();
  }
}

}  // namespace
}  // namespace whet
