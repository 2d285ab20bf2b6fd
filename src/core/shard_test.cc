// What joins shards without touching keys: sums, the search for beta, outputs.
#include <gtest/gtest.h>
#include <whet/error.h>
#include <whet/shard.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cases.h"
#include "core/sums.h"

namespace whet {
namespace {

constexpr float kCanary = -77;

RowSums sums_at(std::span<const double> y, double beta) {
  RowSums s;
  for (const double v : y) {
    const double e = std::exp(beta * v);
    s = add(s, {e, e * v, e * v * v, e * v * v * v, e * v * v * v * v});
  }
  return s;
}

RowState state_of(std::span<const double> y) {
  RowState state;
  for (const double v : y) state = merge(state, {1, v, v, 1, 0, 0});
  return state;
}

TEST(ShardSums, Add) {
  const RowSums sum = add(RowSums{1, 2, 3, 4, 5}, RowSums{10, 20, 30, 40, 50});
  EXPECT_EQ(sum.z, 11);
  EXPECT_EQ(sum.t, 22);
  EXPECT_EQ(sum.u, 33);
  EXPECT_EQ(sum.v, 44);
  EXPECT_EQ(sum.w, 55);
}

struct Outcome {
  double beta;
  int exchanges;
};

// The search over `y` (logits below their maximum) cut into three shards.
Outcome search_in_shards(const Rule& rule, const std::vector<double>& y) {
  BetaSearch search(rule, state_of(y));
  int exchanges = 0;
  while (!search.done() && exchanges < 1000) {
    if (exchanges == 0) {
      EXPECT_EQ(search.beta(), 1);
    }
    RowSums sums;
    const std::size_t third = y.size() / 3;
    for (const auto& [first, count] : {std::pair{std::size_t{0}, third}, std::pair{third, third},
                                       std::pair{2 * third, y.size() - 2 * third}}) {
      sums = add(sums, sums_at(std::span(y).subspan(first, count), search.beta()));
    }
    search.absorb(sums);
    ++exchanges;
  }
  return {search.beta(), exchanges};
}

std::vector<double> random_row(std::size_t keys, double width) {
  std::mt19937 generator(static_cast<unsigned>(keys));
  std::normal_distribution<double> normal;
  std::vector<double> y(keys);
  for (double& v : y) v = width * normal(generator);
  const double max = *std::ranges::max_element(y);
  for (double& v : y) v -= max;
  return y;
}

TEST(BetaSearch, MeetsReachableTargets) {
  for (const std::size_t keys : Sizes{2, 5, 64, 1000}) {
    for (const double width : {1e-6, 0.01, 1.0, 20.0}) {
      const std::vector<double> y = random_row(keys, width);
      for (const double target : {0.01, 0.3, 0.65}) {
        SCOPED_TRACE(std::to_string(keys) + " keys, width " + std::to_string(width));
        const auto reached = [&](const Rule& rule, auto measure) {
          const Outcome outcome = search_in_shards(rule, y);
          EXPECT_LE(outcome.exchanges, width < 1e-3 ? 40 : 20) << rule.name();
          EXPECT_GE(outcome.beta, 1) << rule.name();
          return measure(sums_at(y, outcome.beta), outcome.beta);
        };
        // A row that is sharp enough at 1 stays as it is.
        const RowSums one = sums_at(y, 1);
        const double entropy = reached(Rule::target_entropy(target), core::entropy_of);
        EXPECT_NEAR(entropy, std::min(target, core::entropy_of(one, 1)), 2e-6);
        const double peak =
            reached(Rule::target_peak(target), [](const RowSums& s, double) { return 1 / s.z; });
        EXPECT_NEAR(peak, std::max(target, 1 / one.z), 2e-6);
      }
    }
  }
}

TEST(BetaSearch, EndsAfterOneExchangeIfTheRowIsSharpEnough) {
  const Outcome outcome = search_in_shards(Rule::target_entropy(0.5), {0, -20, -30});
  EXPECT_EQ(outcome.beta, 1);
  EXPECT_EQ(outcome.exchanges, 1);
}

TEST(BetaSearch, IsDoneAtOnceWhereNothingIsToBeFound) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const RowState nothing, one{1, 3, 3, 1, 0, 0}, broken{5, nan, nan, nan, nan, nan};
  const RowState broken_sink{0, nan, nan, nan, nan, nan};  // without a visible key it doesn't count
  for (const RowState& state : {nothing, one, broken_sink}) {
    BetaSearch search(Rule::target_peak(0.9), state);
    EXPECT_TRUE(search.done());
    EXPECT_EQ(search.beta(), 1);
    search.absorb({});  // and stays so
    EXPECT_EQ(search.beta(), 1);
  }
  BetaSearch search(Rule::target_peak(0.9), broken);
  EXPECT_TRUE(search.done());
  EXPECT_TRUE(std::isnan(search.beta()));
}

TEST(BetaSearch, EqualLogitsKeepBetaOne) {
  EXPECT_EQ(search_in_shards(Rule::target_entropy(0.2), std::vector<double>(7)).beta, 1);
  EXPECT_EQ(search_in_shards(Rule::target_peak(0.9), std::vector<double>(7)).beta, 1);
}

TEST(BetaSearch, TiesAtTheMaximumGiveALargeBeta) {
  for (const double gap : {1e-30, 1e-17, 1e-3, 1.0, 30.0, 1e30}) {
    for (const Rule& rule : {Rule::target_entropy(0.2), Rule::target_entropy(std::log(3.0)),
                             Rule::target_peak(0.9), Rule::target_peak(1.0 / 3)}) {
      const Outcome outcome = search_in_shards(rule, {0, -gap, 0, -gap, 0});
      EXPECT_LE(outcome.beta, 0x1p60) << rule.name() << " gap " << gap;
      EXPECT_LE(outcome.exchanges, 60) << rule.name() << " gap " << gap;
      const bool hard = 2 * std::exp(-outcome.beta * gap) <= 2e-6;
      EXPECT_TRUE(hard || outcome.beta == 0x1p60) << rule.name() << " gap " << gap;
    }
  }
}

TEST(BetaSearch, MovesWithItsProgress) {
  const std::vector<double> y = random_row(50, 1);
  BetaSearch first(Rule::target_peak(0.9), state_of(y));
  first.absorb(sums_at(y, 1));
  const double beta = first.beta();
  BetaSearch second = std::move(first);
  EXPECT_EQ(second.beta(), beta);
  BetaSearch third(Rule::target_peak(0.1), RowState());
  third = std::move(second);
  EXPECT_EQ(third.beta(), beta);
}

// With the same bits, from every step of searches that meet their target, can't, or needn't begin.
TEST(BetaSearch, GoesOnFromItsState) {
  for (const std::vector<double>& y : {random_row(50, 1), random_row(50, 1e-6), {0, -1e-3, 0, -1e-3}, {0}}) {
    for (const Rule& rule : {Rule::target_entropy(0.2), Rule::target_peak(0.9)}) {
      BetaSearch whole(rule, state_of(y));
      BetaSearchState state = whole.state();
      for (int step = 0; !whole.done() && step < 100; ++step) {
        BetaSearch part(rule, state);
        EXPECT_FALSE(part.done());
        EXPECT_EQ(part.beta(), whole.beta());
        const RowSums sums = sums_at(y, whole.beta());
        whole.absorb(sums);
        part.absorb(sums);
        state = part.state();
      }
      const BetaSearch last(rule, state);
      EXPECT_TRUE(last.done());
      EXPECT_EQ(last.beta(), whole.beta());
    }
  }
}

TEST(BetaSearch, RefusesRulesThatNeedNoSearch) {
  for (const Rule& rule : {Rule::none(), Rule::paper(), Rule::ssmax(0.5)}) {
    try {
      BetaSearch search(rule, RowState());
      ADD_FAILURE() << "accepted " << rule.name();
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "rule: is " + rule.name() + ", must be target-entropy or target-peak");
    }
  }
}

// Two shards of B 1, H 2, N 2, E 3, masses 1 to 4 and 3 to 0.
struct Shards {
  std::vector<float> a{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  std::vector<double> b{12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1};
  std::vector<double> mass_a{1, 2, 3, 4}, mass_b{3, 2, 1, 0};
  std::vector<float> data = std::vector<float>(12, kCanary);
  std::vector<ConstView> outs{ConstView(a.data(), {1, 2, 2, 3}), ConstView(b.data(), {1, 2, 2, 3})};
  std::vector<std::span<const double>> masses{mass_a, mass_b};
  View out{data.data(), {1, 2, 2, 3}};
};

TEST(MergeOutputs, DividesSumsByMasses) {
  Shards s;
  merge_outputs(s.outs, s.masses, s.out);
  for (const float value : s.data) EXPECT_EQ(value, 13.0F / 4);
}

TEST(MergeOutputs, OneShardIsEnough) {
  Shards s;
  merge_outputs(std::span(s.outs).first(1), std::span(s.masses).first(1), s.out);
  EXPECT_EQ(s.data[5], 3);
  EXPECT_EQ(s.data[11], 3);
}

TEST(MergeOutputs, RowsWithoutMassAreZeroAndRowsOfNaNAreNaN) {
  Shards s;
  s.mass_a[1] = s.mass_b[1] = 0;
  s.mass_b[2] = std::numeric_limits<double>::quiet_NaN();
  s.b[3] = std::numeric_limits<double>::quiet_NaN();  // of the row without mass
  merge_outputs(s.outs, s.masses, s.out);
  EXPECT_EQ(s.data[0], 3.25F);
  EXPECT_EQ(s.data[3], 0);
  EXPECT_EQ(s.data[5], 0);
  EXPECT_TRUE(std::isnan(s.data[6]) && std::isnan(s.data[8]));
  EXPECT_EQ(s.data[9], 3.25F);
}

TEST(MergeOutputs, TakesAnyStrides) {
  Shards s;
  s.outs[0] = ConstView(s.a.data() + 11, {1, 2, 2, 3}, {0, -6, -3, -1});  // 12, 11, ..., 1
  s.mass_a = s.mass_b = {0.5, 0.5, 0.5, 0.5};
  std::vector<float> wide(24, kCanary);
  merge_outputs(s.outs, s.masses, View(wide.data(), {1, 2, 2, 3}, {24, 2, 12, 4}));
  for (std::int64_t head = 0; head < 2; ++head) {
    for (std::int64_t query = 0; query < 2; ++query) {
      for (std::int64_t e = 0; e < 3; ++e) {
        const auto at = static_cast<std::size_t>(head * 2 + query * 12 + e * 4);
        EXPECT_EQ(wide[at], static_cast<float>(24 - 2 * (head * 6 + query * 3 + e)));
      }
    }
  }
  EXPECT_EQ(std::ranges::count(wide, kCanary), 12);
}

TEST(MergeOutputs, EmptyOutputs) {
  const ConstView outs[] = {ConstView(static_cast<const float*>(nullptr), {1, 2, 0, 3})};
  const std::span<const double> masses[] = {{}};
  EXPECT_NO_THROW(merge_outputs(outs, masses, View(static_cast<float*>(nullptr), {1, 2, 0, 3})));
}

// Merges one row of `values` with mass 1 into an output of type T.
template <typename T>
std::vector<T> rounded(const std::vector<double>& values) {
  const auto size = static_cast<std::int64_t>(values.size());
  std::vector<T> result(values.size());
  const double one = 1;
  const ConstView outs[] = {ConstView(values.data(), {1, 1, 1, size})};
  const std::span<const double> masses[] = {std::span(&one, 1)};
  merge_outputs(outs, masses, View(result.data(), {1, 1, 1, size}));
  return result;
}

// Every finite number of the type, the midpoints between neighbours, and what lies just beside those.
template <typename T>
void expect_nearest_even(std::uint16_t infinity) {
  std::vector<double> exact, middle, below, above;
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const double x = static_cast<double>(to_float(T{bits}));
    // One beyond the largest finite number, infinity's midpoint is where the next one would be.
    const double previous = bits == 0 ? 0 : exact.back();
    const double next = bits + 1 < infinity
                            ? static_cast<double>(to_float(T{static_cast<std::uint16_t>(bits + 1)}))
                            : x + (x - previous);
    exact.push_back(x);
    middle.push_back((x + next) / 2);
    below.push_back(std::nextafter(middle.back(), 0.0));
    above.push_back(std::nextafter(middle.back(), kInfinity));
  }
  const auto at = rounded<T>(exact), half = rounded<T>(middle), less = rounded<T>(below),
             more = rounded<T>(above);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    ASSERT_EQ(at[i].bits, i);
    ASSERT_EQ(half[i].bits, i + i % 2) << middle[i];
    ASSERT_EQ(less[i].bits, i) << below[i];
    ASSERT_EQ(more[i].bits, i + 1) << above[i];
  }
  const auto special = rounded<T>({-1e-300, -kInfinity, kInfinity, -1.5, 1e300, kNaN});
  EXPECT_EQ(special[0].bits, 0x8000);
  EXPECT_EQ(special[1].bits, infinity | 0x8000);
  EXPECT_EQ(special[2].bits, infinity);
  EXPECT_EQ(to_float(special[3]), -1.5F);
  EXPECT_EQ(special[4].bits, infinity);
  EXPECT_TRUE(std::isnan(to_float(special[5])));
}

TEST(MergeOutputs, RoundsToTheNearestOfSixteenBits) {
  expect_nearest_even<bf16>(0x7F80);
  expect_nearest_even<f16>(0x7C00);
}

TEST(MergeOutputs, KeepsDoubles) {
  const std::vector<double> values = {1.0 / 3, -1e300, 5e-324};
  EXPECT_EQ(rounded<double>(values), values);
}

TEST(MergeOutputs, ErrorsNameTheArgument) {
  const auto error = [](auto bend) -> std::string {
    Shards s;
    bend(s);
    try {
      merge_outputs(s.outs, s.masses, s.out);
    } catch (const Error& e) {
      EXPECT_EQ(std::ranges::count(s.data, kCanary), 12) << e.what();
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(error([](Shards&) {}), "accepted");
  EXPECT_EQ(error([](Shards& s) { s.outs.clear(), s.masses.clear(); }),
            "outs: none given, must be one per shard");
  EXPECT_EQ(error([](Shards& s) { s.masses.pop_back(); }), "masses: 1 given, must be as many as outs, 2");
  EXPECT_EQ(error([](Shards& s) { s.mass_b.pop_back(), s.masses[1] = s.mass_b; }),
            "masses[1]: 3 given, must be one per row, 4");
  EXPECT_EQ(error([](Shards& s) {
              s.outs[1].sizes = {1, 2, 3, 2};
            }),
            "outs[1]: its sizes are (1, 2, 3, 2), must be (B, H, N, E) = (1, 2, 2, 3)");
  EXPECT_EQ(error([](Shards& s) { s.outs[0].dtype = DType::bf16; }),
            "outs[0]: its element type is bf16, must be f32 or f64");
  EXPECT_EQ(error([](Shards& s) { s.outs[0].data = nullptr; }), "outs[0]: its data is null");
  EXPECT_EQ(error([](Shards& s) { s.out.sizes = {4, 3}; }), "out: has 2 axes, must have 4, (B, H, N, E)");
  EXPECT_EQ(error([](Shards& s) { s.out.dtype = DType::boolean; }),
            "out: its element type is boolean, must be f32, f64, bf16 or f16");
  EXPECT_EQ(error([](Shards& s) {
              s.out.strides = {12, 6, 2, 1};
            }),
            "out: its strides (12, 6, 2, 1) may hold an element twice");
  EXPECT_EQ(error([](Shards& s) { s.out.data = s.a.data(); }), "out: overlaps outs[0]");
  EXPECT_EQ(
      error([](Shards& s) { s.masses[1] = std::span(reinterpret_cast<const double*>(s.data.data()), 4); }),
      "out: overlaps masses[1]");
}

}  // namespace
}  // namespace whet
