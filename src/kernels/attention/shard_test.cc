// Attention over keys cut into shards is attention over all keys: in two exchanges, or with a search of beta
// in a few more, in any order of merging.
#include <gtest/gtest.h>
#include <whet/shard.h>
#include <whet/whet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "shard_cases.h"
#include "targets.h"

namespace whet {
namespace {

template <typename Arithmetic>
void check_in(const oracle::Attention& p, DType type, Devices& devices) {
  const auto gathered = gather<Arithmetic>(p, devices);
  expect_output<Arithmetic>(p, gathered.exact, gathered.out, type);
}

void check(const oracle::Attention& p, DType type, const Cuts& cuts, bool backwards = false) {
  SCOPED_TRACE("cuts " + testing::PrintToString(cuts) + ", " + name_of(type) + ", rule " +
               library_rule(p.rules[0]).name());
  Devices devices(p, type, cuts);
  if (backwards) devices.reverse();
  type == DType::f64 ? check_in<double>(p, type, devices) : check_in<float>(p, type, devices);
}

// One to five shards, uneven, also empty ones.
const Cuts kCuts[] = {{0, 61}, {0, 1, 61}, {0, 17, 17, 61}, {0, 0, 16, 60, 61}, {0, 5, 6, 40, 61, 61}};

TEST(Shards, GiveAttentionForEveryRule) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    for (std::size_t n = 0; n < rules.size(); ++n) {
      for (std::size_t t = 0; t < 4; ++t) {
        // Few rows a key head, and many: they take different roads.
        const std::int64_t N = (n + t) % 2 == 0 ? 5 : 9;
        Random random(1);
        oracle::Attention p = draw_problem(random, {1, 4, 2, N, 61, 5, 3}, kTypes[t]);
        p.rules = {rules[n].plain};
        check(p, kTypes[t], kCuts[(n + t) % 5]);
        check(p, kTypes[t], kCuts[(n + t + 2) % 5]);
      }
    }
  });
}

// Each with rules of the state and rules that search. Under causal, window and lengths whole shards are out
// of reach of some rows.
TEST(Shards, GiveAttentionForEveryOption) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed")) continue;  // can't be cut
      for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
        for (const Cuts& cuts : {Cuts{0, 9, 41}, Cuts{0, 3, 4, 4, 30, 41}}) {
          Random random(2);
          oracle::Attention p =
              draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
          if (p.rules.size() == 1) p.rules = {rules[(turn += 7) % rules.size()].plain};
          SCOPED_TRACE(option.name);
          check(p, type, cuts);
        }
      }
    }
  });
}

TEST(Shards, GiveAttentionOverTiles) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    for (std::size_t n = 0; n < rules.size(); ++n) {
      Random random(3);
      const bool decode = n % 2 == 0;
      oracle::Attention p = draw_problem(random, {1, 2, 1, decode ? 1 : 9, 900, 4, 3}, DType::f32);
      p.rules = {rules[n].plain};
      p.causal = true;
      p.align = Align::end;
      p.window_left = 700;
      p.sinks = {{2}, {1, -kInfinity}};
      for (const Cuts& cuts : {Cuts{0, 256, 512, 900}, Cuts{0, 100, 101, 889, 900}})
        check(p, DType::f32, cuts);
    }
  });
}

TEST(Shards, GiveAttentionOfLargeHeads) {
  for_each_target([] {
    for (const std::int64_t N : {1, 9}) {
      Random random(11);
      oracle::Attention p = draw_problem(random, {1, 2, 1, N, 61, 576, 512}, DType::f32);
      p.scale = 1 / 24.0;
      check(p, DType::f32, {0, 17, 61});
    }
  });
}

TEST(Shards, MayBeMergedInAnyOrder) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      Random random(4);
      oracle::Attention p = draw_problem(random, {1, 4, 2, 5, 61, 5, 3}, DType::f32, 2);
      p.rules = {rule.plain};
      p.sinks = {{4}, {0.5, -1, 2, -kInfinity}};
      check(p, DType::f32, {0, 5, 6, 40, 61}, true);
    }
  });
}

// A sink lies in the shard of key 0, also for rows that see no key there; a row that sees none anywhere is 0.
TEST(Shards, CountASinkOnce) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      Random random(5);
      oracle::Attention p = draw_problem(random, {1, 2, 1, 6, 20, 5, 3}, DType::f32);
      p.rules = {rule.plain};
      p.sinks = {{2}, {2, -0.5}};
      p.mask = {{1, 1, 6, 20}, std::vector<double>(120, 1)};
      for (std::int64_t i = 0; i < 6; ++i) {
        const std::int64_t first = i == 5 ? 20 : i * 3;  // row 5 sees nothing, row 4 nothing before key 12
        for (std::int64_t j = 0; j < first; ++j) p.mask.values[p.mask.position({0, 0, i, j})] = 0;
      }
      for (const Cuts& cuts : {Cuts{0, 7, 11, 20}, Cuts{0, 0, 0, 9, 20}}) check(p, DType::f32, cuts);
      Devices devices(p, DType::f32, {0, 7, 11, 20});
      const std::vector<RowState> merged = devices.merged_states();
      std::vector<double> masses;
      const std::vector<double> out = devices.merged_outputs(scales_of(p, devices, merged), masses);
      for (std::size_t r : Sizes{5, 11}) {
        for (std::size_t e = 0; e < 3; ++e) EXPECT_EQ(out[r * 3 + e], 0) << "row " << r;
      }
    }
  });
}

// A sink of NaN or +inf breaks rows with a visible key, wherever that is, and doesn't exist for others: as in
// attention.
TEST(Shards, SinksOfRowsWithoutKeysDontCount) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      for (const double sink : {kNaN, kInfinity, 1.0}) {
        for (const Cuts& cuts : {Cuts{0, 20}, Cuts{0, 7, 20}, Cuts{0, 0, 20, 20}}) {
          Random random(10);
          oracle::Attention p = draw_problem(random, {1, 1, 1, 4, 20, 5, 3}, DType::f32);
          p.rules = {rule.plain};
          p.sinks = {{1}, {sink}};
          p.mask = {{1, 1, 4, 20}, std::vector<double>(80, 0)};
          p.mask.values[p.mask.position({0, 0, 0, 19})] = 1;  // one key
          for (std::int64_t j = 8; j < 12; ++j) p.mask.values[p.mask.position({0, 0, 1, j})] = 1;
          SCOPED_TRACE("sink " + std::to_string(sink) + ", rule " + rule.rule.name());
          Devices devices(p, DType::f32, cuts);
          const std::vector<RowState> merged = devices.merged_states();
          std::vector<double> masses;
          const std::vector<double> out = devices.merged_outputs(scales_of(p, devices, merged), masses);
          const std::vector<double> whole = run(p, DType::f32).out;
          for (std::size_t i = 0; i < 12; ++i) {
            EXPECT_EQ(std::isnan(out[i]), i < 6 && sink != 1) << "element " << i;
            EXPECT_EQ(std::isnan(whole[i]), i < 6 && sink != 1) << "element " << i;
            EXPECT_TRUE(i < 6 || out[i] == 0) << "element " << i << ", " << out[i];
          }
        }
      }
    }
  });
}

// Everything at once: options, rules, sinks and cuts, some of them empty.
TEST(Shards, GiveAttentionForRandomCuts) {
  const std::vector<RuleCase> rules = rule_cases();
  const std::vector<OptionCase> options = option_cases();
  for_each_target([&] {
    Random random(12);
    const auto below = [&](std::size_t n) {
      return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
    };
    for (int draw = 0; draw < 60; ++draw) {
      const OptionCase& option = options[below(options.size())];
      if (option.name.starts_with("packed")) continue;  // can't be cut
      const DType type = kTypes[below(4)];
      oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
      if (p.rules.size() == 1) p.rules = {rules[below(rules.size())].plain};
      p.sinks = draw_array(random, {4}, arithmetic_type(type), 2);
      Cuts cuts = {0, 41};
      for (std::size_t n = below(4); n > 0; --n) {
        cuts.push_back(below(3) == 0 ? 0 : static_cast<std::int64_t>(below(42)));
      }
      std::ranges::sort(cuts);
      SCOPED_TRACE("draw " + std::to_string(draw) + ", " + option.name);
      check(p, type, cuts);
    }
  });
}

// ---- One pass ----

// Out of partial outputs that each shard measured from its own maximum.
template <typename Arithmetic>
void check_partial(const oracle::Attention& p, DType type, const Cuts& cuts, double beta) {
  using Real = typename Contract<Arithmetic>::Real;
  Devices devices(p, type, cuts);
  const auto count = static_cast<std::size_t>(p.rows()), size = static_cast<std::size_t>(p.E);
  const std::vector<double> betas(count, beta);
  std::vector<std::vector<RowState>> states;
  std::vector<RowState> merged(count);
  for (std::size_t s = 0; s < devices.size(); ++s) {
    Device& device = devices.device(s);
    shard_partial_attention(device.call.q.view(), device.call.k.view(), device.call.v.view(), device.shard,
                            betas, device.out.view(), device.states, device.mass, device.call.options,
                            device.call.execution);
    EXPECT_TRUE(device.out.gaps_are_intact());
    for (std::size_t r = 0; r < count; ++r) merged[r] = merge(merged[r], device.states[r]);
  }
  std::vector<double> out(count * size), masses(count);
  for (std::size_t s = 0; s < devices.size(); ++s) {
    Device& device = devices.device(s);
    const std::vector<double> part = device.out.values();
    for (std::size_t r = 0; r < count; ++r) {
      if (device.mass[r] == 0) continue;
      const double share = std::exp(beta * (device.states[r].max - merged[r].max));
      masses[r] += share * device.mass[r];
      for (std::size_t e = 0; e < size; ++e) out[r * size + e] += share * part[r * size + e];
    }
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = masses[i / size] == 0 || merged[i / size].count == 0 ? 0 : out[i] / masses[i / size];
    out[i] = rounded(type, out[i]);
  }
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, betas);
  expect_output<Arithmetic>(p, exact, out, type);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    expect_merged_state<Arithmetic>(exact.rows[r], p.D, merged[r]);
  });
}

TEST(Shards, GiveStatesAndOutputsInOnePass) {
  for_each_target([] {
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed") || option.name.starts_with("a rule")) continue;
      for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
        for (const std::int64_t N : {9, 8}) {
          Random random(31);
          const Shape shape = N == 8 ? Shape{2, 4, 2, 8, 41, 5, 3} : Shape{2, 4, 2, 9, 41, 5, 3};
          oracle::Attention p = draw_with(option, random, shape, type, arithmetic_type(type));
          p.rules = {oracle::Rule{}};
          SCOPED_TRACE(option.name);
          const Cuts cuts = N == 8 ? Cuts{0, 3, 4, 4, 30, 41} : Cuts{0, 9, 41};
          type == DType::f64 ? check_partial<double>(p, type, cuts, 1)
                             : check_partial<float>(p, type, cuts, 1);
        }
      }
    }
  });
}

// docs/scaling.md: merging S states adds at most 4 S 2^-53 to z, relative, and to the others in proportion;
// outputs stay within the contract of one call.
TEST(Shards, MayBeAThousand) {
  constexpr std::int64_t kShards = 1000, kKeys = 10 * kShards;
  Random random(32);
  oracle::Attention p = draw_problem(random, {1, 2, 1, 3, kKeys, 8, 4}, DType::f32, 2);
  p.rules = {oracle::Rule{}};
  Cuts cuts;
  for (std::int64_t s = 0; s <= kShards; ++s) cuts.push_back(10 * s);
  check_partial<float>(p, DType::f32, cuts, 1);
  check(p, DType::f32, cuts);
  p.rules = {paper_case().plain};
  check(p, DType::f32, cuts);

  // The merge alone: beside the same states in long double.
  Devices devices(p, DType::f32, cuts);
  const std::vector<RowState> merged = devices.merged_states();
  double largest_error = 0;
  for (std::size_t r = 0; r < merged.size(); ++r) {
    long double z = 0, t = 0, u = 0;
    for (std::size_t s = 0; s < devices.size(); ++s) {
      const RowState& state = devices.device(s).states[r];
      const long double d = static_cast<long double>(state.max) - merged[r].max, c = std::exp(d);
      z += c * state.z;
      t += c * (state.t + d * state.z);
      u += c * (state.u + 2 * d * state.t + d * d * state.z);
    }
    const auto error_of = [](double got, long double exact) {
      return static_cast<double>(std::abs((got - exact) / exact));
    };
    constexpr double kBound = 4 * kShards * 0x1p-53;
    EXPECT_LE(error_of(merged[r].z, z), kBound);
    EXPECT_LE(error_of(merged[r].t, t), kBound);
    EXPECT_LE(error_of(merged[r].u, u), kBound);
    largest_error = std::max(largest_error, error_of(merged[r].z, z));
  }
  RecordProperty("largest_error", std::to_string(largest_error * 0x1p53) + " 2^-53");
}

// ---- Sums ----

TEST(Shards, SumsAreThoseOfTheOracle) {
  for_each_target([] {
    for (const double beta : {1.0, 0.3, 2.5}) {
      Random random(6);
      oracle::Attention p = draw_problem(random, {1, 4, 2, 5, 300, 5, 3}, DType::f32, 0.7);
      p.causal = true;
      p.align = Align::end;
      p.sinks = {{4}, {0.5, -1, 4, -kInfinity}};
      Devices devices(p, DType::f32, {0, 30, 31, 280, 300});
      std::vector<RowScale> rows;
      for (const RowState& state : devices.merged_states()) rows.push_back({state.max, beta});
      const std::vector<RowSums> got = devices.added_sums(rows);
      oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
        const std::size_t r = p.row(b, h, i);
        const oracle::AttentionRow<double> row = oracle::row_of<double>(p, b, h, i);
        const double max = oracle::state<double>(row.logits).max;
        const double delta = logit_error<float>(row, p.D);
        std::array<double, 5> exact{}, bounds{};
        for (double x : row.logits.x) {
          const double y = x - max;
          const double e = std::exp(beta * y);
          const double known = 2e-6 * (1 + beta * std::abs(y));
          for (int k = 0; k < 5; ++k) {
            const double power = std::pow(std::abs(y), k),
                         slope = k * std::pow(std::abs(y), std::max(k - 1, 0));
            exact[static_cast<std::size_t>(k)] += e * std::pow(y, k);
            bounds[static_cast<std::size_t>(k)] +=
                e * (known * power + 3 * delta * (beta * power + slope)) + 1e-30;
          }
        }
        const std::array<double, 5> sums = {got[r].z, got[r].t, got[r].u, got[r].v, got[r].w};
        for (std::size_t k = 0; k < 5; ++k) {
          expect_within<double>(sums[k], exact[k], bounds[k],
                                "row " + std::to_string(r) + ", sum " + std::to_string(k));
        }
      });
    }
  });
}

// ---- Gradients ----

template <typename Arithmetic>
void check_gradients_in(const oracle::Attention& p, DType type, Devices& devices, BetaGradient mode) {
  GatheredGradients gathered(p, type, devices, mode);
  using Real = typename Contract<Arithmetic>::Real;
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, gathered.betas);
  const bool through_rule = mode == BetaGradient::through_rule;
  ExpectedGradients<Arithmetic>(p, exact, through_rule, {.times = 4, .units = 16}).expect(gathered.call);
}

void check_gradients(const oracle::Attention& p, DType type, const Cuts& cuts,
                     BetaGradient mode = BetaGradient::through_rule) {
  SCOPED_TRACE("cuts " + testing::PrintToString(cuts) + ", " + name_of(type) + ", rule " +
               library_rule(p.rules[0]).name());
  Devices devices(p, type, cuts);
  type == DType::f64 ? check_gradients_in<double>(p, type, devices, mode)
                     : check_gradients_in<float>(p, type, devices, mode);
}

TEST(ShardGradients, AreThoseOfAttentionForEveryRule) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    for (std::size_t n = 0; n < rules.size(); ++n) {
      for (std::size_t t = 0; t < 4; ++t) {
        Random random(21);
        oracle::Attention p = draw_problem(random, {1, 4, 2, (n + t) % 2 == 0 ? 2 : 9, 61, 5, 3}, kTypes[t]);
        p.rules = {rules[n].plain};
        check_gradients(p, kTypes[t], kCuts[(n + t) % 5]);
        check_gradients(p, kTypes[t], kCuts[(n + t + 2) % 5], BetaGradient::held);
      }
    }
  });
}

TEST(ShardGradients, AreThoseOfAttentionForEveryOption) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed")) continue;  // can't be cut
      for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
        for (const Cuts& cuts : {Cuts{0, 9, 41}, Cuts{0, 3, 4, 4, 30, 41}}) {
          Random random(22);
          oracle::Attention p =
              draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
          if (p.rules.size() == 1) p.rules = {rules[(turn += 7) % rules.size()].plain};
          SCOPED_TRACE(option.name);
          check_gradients(p, type, cuts);
        }
      }
    }
  });
}

// Everything at once, with sinks: also of rows that see no key of the sink's shard.
TEST(ShardGradients, AreThoseOfAttentionForRandomCuts) {
  const std::vector<RuleCase> rules = rule_cases();
  const std::vector<OptionCase> options = option_cases();
  for_each_target([&] {
    Random random(23);
    const auto below = [&](std::size_t n) {
      return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
    };
    for (int draw = 0; draw < 60; ++draw) {
      const OptionCase& option = options[below(options.size())];
      if (option.name.starts_with("packed")) continue;
      const DType type = kTypes[below(4)];
      oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
      if (p.rules.size() == 1) p.rules = {rules[below(rules.size())].plain};
      p.sinks = draw_array(random, {4}, arithmetic_type(type), 2);
      Cuts cuts = {0, 41};
      for (std::size_t n = below(4); n > 0; --n) {
        cuts.push_back(below(3) == 0 ? 0 : static_cast<std::int64_t>(below(42)));
      }
      std::ranges::sort(cuts);
      SCOPED_TRACE("draw " + std::to_string(draw) + ", " + option.name);
      check_gradients(p, type, cuts, draw % 4 == 0 ? BetaGradient::held : BetaGradient::through_rule);
    }
  });
}

// The line of a row goes through its rule only where beta follows the logits.
TEST(ShardGradients, NeedAnExchangeOnlyWhereBetaMoves) {
  EXPECT_TRUE(beta_moves(Rule::paper(), 1.5));
  EXPECT_FALSE(beta_moves(Rule::paper(), 1));
  EXPECT_FALSE(beta_moves(Rule::paper(), 1.5, BetaGradient::held));
  EXPECT_FALSE(beta_moves(Rule::parse("log-length:16"), 1.5));
  EXPECT_TRUE(beta_moves(Rule::parse("target-peak:0.5"), 0.5));
  const RowState two = {.count = 2, .min = 0, .max = 2, .z = 1.5};
  const RowSlope slope = row_slope({}, two, {2, 1.5, kNaN}, 4, {.wg = 8});
  EXPECT_EQ(slope.scale, 0.25);
  EXPECT_EQ(slope.constant, -3);
  EXPECT_EQ(slope.g_factor, 1.5);
  EXPECT_EQ(slope.p_factor, 0);
  EXPECT_EQ(slope.mean, 0);
  EXPECT_EQ(row_slope({}, {}, {-kInfinity, 1, 0}, 0, {}).scale, 0);
  EXPECT_EQ(row_slope({}, {}, {1, 1, 0}, 1, {}).scale, 0);  // a sink alone
  EXPECT_TRUE(std::isnan(row_slope({}, two, {kNaN, kNaN, 0}, 0, {}).scale));
}

TEST(ShardGradients, AreZeroForRowsThatNoShardHasKeysOf) {
  for_each_target([] {
    Random random(24);
    oracle::Attention p = draw_problem(random, {1, 2, 1, 6, 20, 5, 3}, DType::f32);
    p.rules = {oracle::Rule{}};
    p.sinks = {{2}, {2, -0.5}};
    p.lengths = {0};
    for (const Cuts& cuts : {Cuts{0, 7, 20}, Cuts{0, 0, 20}}) {
      Devices devices(p, DType::f32, cuts);
      GatheredGradients gathered(p, DType::f32, devices, BetaGradient::through_rule);
      AttentionCall& call = gathered.call;
      for (const Placed* gradient : {&call.dq, &call.dk, &call.dv, &call.dsinks}) {
        for (const double value : gradient->values()) EXPECT_EQ(value, 0);
      }
    }
  });
}

TEST(ShardGradients, BrokenKeysBreakTheRowsThatSeeThem) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      Random random(25);
      oracle::Attention p = draw_problem(random, {1, 2, 1, 6, 20, 1, 3}, DType::f32);
      p.rules = {rule.plain};
      p.causal = true;
      p.k.values[3] = kNaN;
      SCOPED_TRACE("rule " + rule.rule.name());
      Devices devices(p, DType::f32, {0, 2, 5, 20});
      GatheredGradients gathered(p, DType::f32, devices, BetaGradient::through_rule);
      const std::vector<double> dq = gathered.call.dq.values();
      for (std::size_t r = 0; r < 12; ++r) EXPECT_EQ(std::isnan(dq[r]), r % 6 >= 3) << "row " << r;
      const std::vector<double> dv = gathered.call.dv.values();
      for (std::size_t n = 0; n < dv.size(); ++n) EXPECT_EQ(std::isnan(dv[n]), n / 3 <= 5) << "element " << n;
    }
  });
}

TEST(ShardGradients, HoldTheSameBitsForAnyNumberOfThreads) {
  for_each_target([] {
    Random random(26);
    oracle::Attention p = draw_problem(random, {2, 4, 2, 50, 60, 5, 3}, DType::f32);
    p.rules = {rule_cases()[1].plain};
    std::vector<double> first;
    for (const int threads : {1, 2, 3, 0}) {
      Devices devices(p, DType::f32, {0, 25, 60});
      for (std::size_t s = 0; s < devices.size(); ++s) devices.device(s).call.execution.threads = threads;
      GatheredGradients gathered(p, DType::f32, devices, BetaGradient::through_rule);
      std::vector<double> all;
      for (Placed* gradient : {&gathered.call.dq, &gathered.call.dk, &gathered.call.dv}) {
        for (const double value : gradient->values()) all.push_back(value);
      }
      if (threads == 1) first = all;
      EXPECT_TRUE(same_bits(all, first)) << threads << " threads";
    }
  });
}

// ---- Some of the queries ----

// Rows have the same bits whichever queries are called together: positions and dropout are those of the
// whole.
TEST(ShardQueries, HaveTheBitsOfAllTogether) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed")) continue;
      Random random(29);
      oracle::Attention p = draw_with(option, random, {2, 4, 2, 21, 41, 5, 3}, DType::f32, DType::f32);
      if (p.rules.size() == 1) p.rules = {rules[(turn += 5) % rules.size()].plain};
      SCOPED_TRACE(option.name);
      Devices all(p, DType::f32, {0, 9, 41});
      std::vector<double> masses;
      const std::vector<double> whole = all.merged_outputs(scales_of(p, all, all.merged_states()), masses);
      for (const std::int64_t from : {0, 10}) {
        oracle::Attention part = with_queries(p, from, from == 0 ? 10 : 21);
        if (p.lengths.size() == static_cast<std::size_t>(p.rows())) {
          part.lengths.clear();
          oracle::for_each_row(part, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
            part.lengths.push_back(p.lengths[p.row(b, h, from + i)]);
          });
        }
        Devices some(part, DType::f32, {0, 9, 41});
        for (std::size_t s = 0; s < some.size(); ++s) {
          some.device(s).shard.first_query = from;
          some.device(s).shard.all_queries = p.N;
        }
        const std::vector<double> out =
            some.merged_outputs(scales_of(part, some, some.merged_states()), masses);
        oracle::for_each_row(part, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
          for (std::int64_t e = 0; e < p.E; ++e) {
            EXPECT_EQ(out[part.dout.position({b, h, i, e})], whole[p.dout.position({b, h, from + i, e})])
                << "row " << p.row(b, h, from + i);
          }
        });
      }
    }
  });
}

// ---- Logits that are kept ----

// They change no bit, and they are the logits: sums of them are the states.
TEST(ShardLogits, GiveTheSameBits) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed")) continue;
      for (const DType type : {DType::f32, DType::f64, DType::f16}) {
        for (const std::int64_t queries : {2, 9}) {
          Random random(27);
          oracle::Attention p =
              draw_with(option, random, {2, 4, 2, queries, 41, 5, 3}, type, arithmetic_type(type));
          if (p.rules.size() == 1) p.rules = {rules[(turn += 5) % rules.size()].plain};
          SCOPED_TRACE(option.name + ", " + name_of(type));
          std::vector<double> bits[2];
          for (const bool keeps : {false, true}) {
            Devices devices(p, type, {0, 9, 30, 41});
            if (keeps) devices.keep_logits();
            const std::vector<RowScale> rows = scales_of(p, devices, devices.merged_states());
            std::vector<double> masses;
            bits[keeps ? 1 : 0] = devices.merged_outputs(rows, masses);
            for (const RowScale& row : rows) bits[keeps ? 1 : 0].push_back(row.beta);
          }
          EXPECT_TRUE(same_bits(bits[0], bits[1]));
        }
      }
    }
  });
}

// ---- Keys and values packed once ----

TEST(PackedShards, GiveTheSameBits) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed")) continue;
      for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
        Random random(31);
        oracle::Attention p =
            draw_with(option, random, {2, 4, 2, 11, 300, 5, 3}, type, arithmetic_type(type));
        if (p.rules.size() == 1) p.rules = {rules[(turn += 5) % rules.size()].plain};
        SCOPED_TRACE(option.name + ", " + name_of(type));
        std::vector<double> expected;
        for (const bool logits : {false, true}) {
          for (const bool packs : {false, true}) {
            Devices devices(p, type, {0, 270, 270, 300});
            std::vector<PackedShard> packed(devices.size());
            for (std::size_t s = 0; packs && s < devices.size(); ++s)
              devices.device(s).shard.packed = &packed[s];
            if (logits) devices.keep_logits();
            std::vector<double> masses;
            const std::vector<RowScale> rows = scales_of(p, devices, devices.merged_states());
            const std::vector<double> found = devices.merged_outputs(rows, masses);
            if (expected.empty()) expected = found;
            EXPECT_TRUE(same_bits(expected, found));
            EXPECT_TRUE(same_bits(expected, devices.merged_outputs(rows, masses)));
          }
        }
      }
    }
  });
}

// Neither is looked at again, whichever call came first; with few queries they are.
TEST(PackedShards, ReplaceKeysAndValues) {
  for_each_target([] {
    for (const bool states_first : {true, false}) {
      Random random(32);
      oracle::Attention p = draw_problem(random, {1, 2, 1, 20, 41, 5, 3}, DType::f32);
      p.rules = {rule_cases()[0].plain};
      Devices devices(p, DType::f32, {0, 20, 41});
      const std::vector<RowScale> rows = scales_of(p, devices, devices.merged_states());
      std::vector<double> masses;
      std::vector<PackedShard> packed(2);
      for (std::size_t s = 0; s < 2; ++s) devices.device(s).shard.packed = &packed[s];
      if (states_first) devices.merged_states();
      const std::vector<double> expected = devices.merged_outputs(rows, masses);
      for (std::size_t s = 0; s < 2; ++s) {
        devices.device(s).call.k.fill(kNaN);
        devices.device(s).call.v.fill(kNaN);
      }
      EXPECT_TRUE(same_bits(expected, devices.merged_outputs(rows, masses)));
    }
  });
}

TEST(PackedShards, RefuseOtherArrays) {
  Random random(33);
  const oracle::Attention p = draw_problem(random, {1, 2, 1, 20, 41, 5, 3}, DType::f32);
  Devices devices(p, DType::f32, {0, 20, 41});
  PackedShard packed;
  for (std::size_t s = 0; s < 2; ++s) devices.device(s).shard.packed = &packed;
  try {
    devices.merged_states();
    FAIL() << "took the keys of two shards";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "k: not what `packed` holds; must be the same array in all its calls");
  }
}

// The keys are not looked at again: here they are gone.
TEST(ShardLogits, ReplaceTheKeys) {
  for_each_target([] {
    for (const std::int64_t queries : {1, 9}) {
      Random random(28);
      oracle::Attention p = draw_problem(random, {1, 2, 1, queries, 41, 5, 3}, DType::f32);
      p.rules = {rule_cases()[0].plain};
      Devices devices(p, DType::f32, {0, 20, 41});
      devices.keep_logits();
      const std::vector<RowState> merged = devices.merged_states();
      for (std::size_t s = 0; s < 2; ++s) devices.device(s).call.k.fill(kNaN);
      std::vector<double> masses;
      const std::vector<RowScale> rows = scales_of(p, devices, merged);
      const std::vector<double> out = devices.merged_outputs(rows, masses);
      for (const double value : out) EXPECT_TRUE(std::isfinite(value));
    }
  });
}

// ---- Edges ----

TEST(Shards, BrokenKeysBreakTheRowsThatSeeThem) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      for (const double poison : {kNaN, kInfinity}) {
        Random random(7);
        oracle::Attention p = draw_problem(random, {1, 2, 1, 6, 20, 1, 3}, DType::f32);
        p.rules = {rule.plain};
        p.causal = true;
        for (double& value : p.q.values) value = std::abs(value);  // so that +inf stays +inf
        p.k.values[3] = poison;
        SCOPED_TRACE("rule " + rule.rule.name());
        Devices devices(p, DType::f32, {0, 2, 5, 20});
        const std::vector<RowState> merged = devices.merged_states();
        std::vector<double> masses;
        const std::vector<double> out = devices.merged_outputs(scales_of(p, devices, merged), masses);
        for (std::size_t r = 0; r < 12; ++r) {
          for (std::size_t e = 0; e < 3; ++e)
            EXPECT_EQ(std::isnan(out[r * 3 + e]), r % 6 >= 3) << "row " << r;
        }
      }
    }
  });
}

TEST(Shards, BrokenValuesBreakTheRowsThatSeeThem) {
  for_each_target([] {
    Random random(8);
    oracle::Attention p = draw_problem(random, {1, 1, 1, 6, 20, 3, 3}, DType::f32);
    p.causal = true;
    p.v.values[p.v.position({0, 0, 3, 1})] = kNaN;
    Devices devices(p, DType::f32, {0, 2, 5, 20});
    std::vector<double> masses;
    const std::vector<RowState> merged = devices.merged_states();
    const std::vector<double> out = devices.merged_outputs(scales_of(p, devices, merged), masses);
    for (std::size_t r = 0; r < 6; ++r) {
      for (std::size_t e = 0; e < 3; ++e)
        EXPECT_EQ(std::isnan(out[r * 3 + e]), r >= 3 && e == 1) << "row " << r;
    }
  });
}

TEST(Shards, HoldTheSameBitsForAnyNumberOfThreads) {
  for_each_target([] {
    for (const Shape& shape : {Shape{1, 4, 2, 20, 60, 5, 3}, Shape{1, 2, 1, 1, 1500, 5, 3}}) {
      Random random(9);
      const oracle::Attention p = draw_problem(random, shape, DType::f32);
      Device device(p, DType::f32, 0, p.M);
      std::vector<double> first;
      for (const int threads : {1, 2, 3, 0}) {
        device.call.execution.threads = threads;
        const ConstView q = device.call.q.view(), k = device.call.k.view(), v = device.call.v.view();
        shard_states(q, k, device.shard, device.states, device.call.options, device.call.execution);
        std::vector<RowScale> rows;
        for (const RowState& state : device.states) rows.push_back({state.max, 1.5});
        shard_sums(q, k, device.shard, rows, device.sums, device.call.options, device.call.execution);
        shard_attention(q, k, v, device.shard, rows, device.out.view(), device.mass, device.call.options,
                        device.call.execution);
        std::vector<double> all = device.out.values();
        all.insert(all.end(), device.mass.begin(), device.mass.end());
        for (const RowState& s : device.states) all.insert(all.end(), {s.min, s.max, s.z, s.t, s.u});
        for (const RowSums& s : device.sums) all.insert(all.end(), {s.z, s.t, s.u, s.v, s.w});
        if (threads == 1) first = all;
        EXPECT_TRUE(same_bits(all, first)) << threads << " threads";
      }
    }
  });
}

}  // namespace
}  // namespace whet
