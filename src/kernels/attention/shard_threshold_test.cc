// Attention over keys cut into shards with the normalizers whose rows have a threshold: beside the oracle,
// and beside one call with all keys.
#include <gtest/gtest.h>
#include <whet/shard.h>
#include <whet/whet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "normalizer_cases.h"
#include "shard_cases.h"
#include "targets.h"

namespace whet {
namespace {

const std::string kNames[] = {"sparsemax", "entmax15", "entmax:1.3", "entmax:1.7", "entmax:2", "entmax:1.01"};
// Above A = 2 the rounding of a logit may move a weight by anything: only f64 is compared.
const std::string kSteep[] = {"entmax:2.5", "entmax:4"};

// The rounding of a logit shows beta times in a weight.
double sharpness(const std::vector<double>& betas) {
  double largest = 1;
  for (const double beta : betas) {
    if (std::isfinite(beta)) largest = std::max(largest, beta);
  }
  return largest;
}

void expect_gradients(const oracle::Attention& p, AttentionCall& call, const oracle::Gradients<double>& g,
                      DType type, double times) {
  expect_near(call.dq.values(), g.dq, type, "dq", times);
  expect_near(call.dk.values(), g.dk, type, "dk", times);
  expect_near(call.dv.values(), g.dv, type, "dv", times);
  if (p.bias.given()) {
    expect_near(call.dbias.values(), oracle::reduced(p, g.dbias, p.bias.sizes), type, "dbias", times);
  }
  if (p.sinks.given()) expect_near(call.dsinks.values(), g.dsinks, type, "dsinks", times);
  if (p.query_scale.given()) {
    expect_near(call.dquery_scale.values(), oracle::reduced_rows(p, g.dquery_scale, p.query_scale.sizes),
                type, "dquery_scale", times);
  }
}

void check(const std::string& name, const oracle::Attention& p, DType type, const Cuts& cuts,
           BetaGradient mode = BetaGradient::through_rule, double times = 1) {
  SCOPED_TRACE(name + ", cuts " + testing::PrintToString(cuts) + ", " + name_of(type) + ", rule " +
               library_rule(p.rules[0]).name());
  Devices devices(p, type, cuts, Normalizer::parse(name));
  GatheredGradients gathered(p, type, devices, mode);
  const Expected expected = expect(name, p, gathered.betas, mode == BetaGradient::through_rule);
  times *= sharpness(gathered.betas);
  expect_near(gathered.out, expected.out, type, "out", times);
  expect_gradients(p, gathered.call, expected.gradients, type, times);
}

const Cuts kCuts[] = {{0, 61}, {0, 1, 61}, {0, 17, 17, 61}, {0, 0, 16, 60, 61}, {0, 5, 6, 40, 61, 61}};

TEST(ShardThresholds, GiveAttentionForEveryRule) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    for (std::size_t n = 0; n < rules.size(); ++n) {
      for (std::size_t t = 0; t < 3; ++t) {
        const DType type = std::array{DType::f64, DType::f32, DType::bf16}[t];
        Random random(41);
        oracle::Attention p = draw_problem(random, {1, 4, 2, (n + t) % 2 == 0 ? 5 : 9, 61, 5, 3}, type);
        p.rules = {rules[n].plain};
        for (std::size_t i = 0; i < std::size(kNames); ++i) {
          if ((i + n) % (type == DType::f64 ? 2 : 3) != t % 2) continue;
          check(kNames[i], p, type, kCuts[(n + i) % 5],
                i % 3 == 0 ? BetaGradient::held : BetaGradient::through_rule);
        }
        if (type == DType::f64) check(kSteep[n % 2], p, type, kCuts[n % 5], BetaGradient::through_rule, 1e3);
      }
    }
  });
}

// With sinks, also for rows that see no key of the sink's shard, and rows that see none at all.
TEST(ShardThresholds, GiveAttentionForEveryOption) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      if (option.name.starts_with("packed")) continue;  // can't be cut
      for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
        if (type != DType::f64 && option.name.starts_with("a rule")) continue;
        Random random(42);
        oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
        ++turn;
        if (type == DType::f64 && p.rules.size() == 1) p.rules = {rules[turn * 7 % rules.size()].plain};
        if (turn % 2 == 0) p.sinks = draw_array(random, {4}, arithmetic_type(type), 2);
        SCOPED_TRACE(option.name);
        check(kNames[turn % std::size(kNames)], p, type,
              turn % 3 == 0 ? Cuts{0, 9, 41} : Cuts{0, 3, 4, 4, 30, 41});
      }
    }
  });
}

// Beside one call with all keys, to the rounding of its weights; over tiles, for few queries and for many.
TEST(ShardThresholds, GiveWhatOneCallGives) {
  for_each_target([] {
    for (const DType type : {DType::f32, DType::f64, DType::f16}) {
      for (const std::string& name : kNames) {
        for (const std::int64_t queries : {1, 9}) {
          Random random(43);
          oracle::Attention p = draw_problem(random, {1, 4, 2, queries, 700, 8, 5}, type);
          p.rules = {paper_case().plain};
          p.causal = true;
          p.align = Align::end;
          p.sinks = {{4}, {2, -1, 0.5, -kInfinity}};
          SCOPED_TRACE(name + ", " + name_of(type));
          Devices devices(p, type, {0, 100, 101, 689, 700}, Normalizer::parse(name));
          GatheredGradients gathered(p, type, devices, BetaGradient::through_rule);
          AttentionCall whole(p, type, arithmetic_type(type));
          whole.options.normalizer = Normalizer::parse(name);
          whole.outputs.saved = {};
          whole.forward();
          whole.backward(BetaGradient::through_rule);
          expect_near(gathered.out, whole.out.values(), type, "out");
          expect_near(gathered.call.dq.values(), whole.dq.values(), type, "dq");
          expect_near(gathered.call.dk.values(), whole.dk.values(), type, "dk");
          expect_near(gathered.call.dv.values(), whole.dv.values(), type, "dv");
          expect_near(gathered.call.dsinks.values(), whole.dsinks.values(), type, "dsinks");
        }
      }
    }
  });
}

// Equal logits have equal weights, whichever shards they are in; one key has all.
TEST(ShardThresholds, TiesAndSingleKeys) {
  for_each_target([] {
    for (const DType type : {DType::f32, DType::f64}) {
      for (const std::string name : {"sparsemax", "entmax15", "entmax:1.3", "entmax:4"}) {
        if (name == kSteep[1] && type == DType::f32) continue;
        Random random(44);
        oracle::Attention p = draw_problem(random, {1, 1, 1, 20, 20, 5, 3}, type);
        std::ranges::fill(p.k.values, 0.5);
        p.causal = true;
        check(name, p, type, {0, 7, 7, 13, 20}, BetaGradient::through_rule, name == kSteep[1] ? 1e3 : 1);
        // Half of the keys 40 lower: no weight.
        oracle::Attention two = draw_problem(random, {1, 1, 1, 20, 20, 1, 3}, type);
        std::ranges::fill(two.q.values, 1);
        for (std::size_t j = 0; j < 20; ++j) two.k.values[j] = j % 2 == 0 ? 3 : -37;
        check(name, two, type, {0, 7, 7, 13, 20}, BetaGradient::through_rule, name == kSteep[1] ? 1e3 : 1);
      }
    }
  });
}

TEST(ShardThresholds, RowsWithoutKeysAreZero) {
  for_each_target([] {
    for (const std::string& name : kNames) {
      Random random(45);
      oracle::Attention p = draw_problem(random, {1, 2, 1, 6, 20, 5, 3}, DType::f32);
      p.sinks = {{2}, {2, -0.5}};
      p.lengths = {0};
      for (const Cuts& cuts : {Cuts{0, 7, 20}, Cuts{0, 0, 20}}) {
        Devices devices(p, DType::f32, cuts, Normalizer::parse(name));
        GatheredGradients gathered(p, DType::f32, devices, BetaGradient::through_rule);
        AttentionCall& call = gathered.call;
        for (const double value : gathered.out) EXPECT_EQ(value, 0);
        for (const Placed* gradient : {&call.dq, &call.dk, &call.dv, &call.dsinks}) {
          for (const double value : gradient->values()) EXPECT_EQ(value, 0);
        }
      }
    }
  });
}

TEST(ShardThresholds, BrokenKeysBreakTheRowsThatSeeThem) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      for (const std::string& name : {std::string("sparsemax"), std::string("entmax:1.3")}) {
        Random random(46);
        oracle::Attention p = draw_problem(random, {1, 2, 1, 6, 20, 1, 3}, DType::f32);
        p.rules = {rule.plain};
        p.causal = true;
        p.k.values[3] = kNaN;
        SCOPED_TRACE(name + ", rule " + rule.rule.name());
        Devices devices(p, DType::f32, {0, 2, 5, 20}, Normalizer::parse(name));
        GatheredGradients gathered(p, DType::f32, devices, BetaGradient::through_rule);
        const std::vector<double> dq = gathered.call.dq.values();
        for (std::size_t r = 0; r < 12; ++r) {
          EXPECT_EQ(std::isnan(dq[r]), r % 6 >= 3) << "row " << r;
          for (std::size_t e = 0; e < 3; ++e) {
            EXPECT_EQ(std::isnan(gathered.out[r * 3 + e]), r % 6 >= 3) << "row " << r;
          }
        }
      }
    }
  });
}

// Logits that are kept, and keys that are packed, change no bit.
TEST(ShardThresholds, HoldTheSameBits) {
  for_each_target([] {
    for (const std::int64_t queries : {2, 20}) {
      Random random(47);
      oracle::Attention p = draw_problem(random, {1, 4, 2, queries, 300, 5, 3}, DType::f32);
      p.rules = {paper_case().plain};
      std::vector<double> first;
      for (const bool keeps : {false, true}) {
        for (const int threads : {1, 3}) {
          Devices devices(p, DType::f32, {0, 270, 270, 300}, Normalizer::parse("entmax15"));
          std::vector<PackedShard> packed(devices.size());
          for (std::size_t s = 0; s < devices.size(); ++s) {
            devices.device(s).call.execution.threads = threads;
            if (keeps) devices.device(s).shard.packed = &packed[s];
          }
          if (keeps) devices.keep_logits();
          std::vector<double> masses;
          const std::vector<RowScale> rows = scales_of(p, devices, devices.merged_states());
          std::vector<double> found = devices.merged_outputs(rows, masses);
          for (const RowScale& row : rows) found.push_back(row.tau);
          if (first.empty()) first = found;
          EXPECT_TRUE(same_bits(first, found));
        }
      }
    }
  });
}

TEST(ShardThresholds, TakeFewSteps) {
  struct Case {
    const char* name;
    double sd;
    int most;
  };
  for (const Case& c : {Case{"sparsemax", 1, 6}, Case{"sparsemax", 0.1, 12}, Case{"entmax15", 1, 5},
                        Case{"entmax:1.3", 1, 4}, Case{"entmax:1.001", 1, 4}, Case{"entmax:4", 1, 40}}) {
    for (const DType type : {DType::f32, DType::f64}) {
      Random random(48);
      oracle::Attention p = draw_problem(random, {1, 1, 1, 20, 5000, 4, 3}, type, c.sd);
      p.scale = 0.5;
      Devices devices(p, type, {0, 2000, 5000}, Normalizer::parse(c.name));
      const std::vector<RowState> merged = devices.merged_states();
      std::vector<RowScale> rows;
      for (const RowState& state : merged) rows.push_back({state.max, 1});
      EXPECT_LE(find_thresholds(devices, merged, rows), c.most) << c.name << ", sd " << c.sd;
    }
  }
}

// ---- The search ----

TEST(ThresholdSearch, IsOfNormalizersWithAThreshold) {
  for (const char* name : {"sparsemax", "entmax15", "entmax:1.2"}) {
    EXPECT_TRUE(needs_threshold(Normalizer::parse(name))) << name;
  }
  for (const char* name : {"softmax", "hard", "top-k:2", "sigmoid", "relu", "softpick", "straight-through"}) {
    EXPECT_FALSE(needs_threshold(Normalizer::parse(name))) << name;
    try {
      const ThresholdSearch search(Normalizer::parse(name), {}, 1, DType::f32);
      FAIL() << name;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "normalizer: is " + std::string(name) + ", must be sparsemax, entmax15 or entmax:A");
    }
  }
}

TEST(ThresholdSearch, IsDoneAtOnceWhereNothingIsToFind) {
  const Normalizer sparsemax = Normalizer::parse("sparsemax");
  EXPECT_TRUE(ThresholdSearch(sparsemax, {}, 1, DType::f32).done());
  const RowState one = {.count = 1, .min = 2, .max = 2, .z = 1};
  const ThresholdSearch alone(sparsemax, one, 1, DType::f32);
  EXPECT_TRUE(alone.done());
  EXPECT_EQ(alone.tau(), -1);
  const ThresholdSearch broken(sparsemax, {.count = 3, .min = kNaN, .max = kNaN, .z = kNaN}, kNaN,
                               DType::f32);
  EXPECT_TRUE(broken.done());
  EXPECT_TRUE(std::isnan(broken.tau()));
}

// ---- Arguments ----

void expect_error(const std::string& text, const std::function<void()>& body) {
  try {
    body();
    FAIL() << "took it, must say " << text;
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), text);
  }
}

TEST(ShardThresholds, RefuseWhatDoesNotFit) {
  Random random(49);
  const oracle::Attention p = draw_problem(random, {1, 2, 1, 3, 20, 5, 3}, DType::f32);
  const auto shards = [&](const char* name) {
    return Devices(p, DType::f32, {0, 20}, Normalizer::parse(name));
  };
  for (const char* name : {"top-k:2", "straight-through", "sigmoid", "relu", "softpick"}) {
    expect_error("normalizer: is " + std::string(name) + ", which can't be merged from shards of keys",
                 [&] { shards(name).merged_states(); });
  }
  const std::vector<RowScale> rows(6);
  expect_error("normalizer: is softmax, must be sparsemax, entmax15 or entmax:A, which have a threshold",
               [&] { shards("softmax").added_threshold_sums(rows); });
  expect_error("normalizer: is sparsemax, whose threshold comes after the maxima of all shards", [&] {
    Devices devices = shards("sparsemax");
    Device& d = devices.device(0);
    const std::vector<double> betas(6, 1);
    shard_partial_attention(d.call.q.view(), d.call.k.view(), d.call.v.view(), d.shard, betas, d.out.view(),
                            d.states, d.mass, d.call.options);
  });
}

}  // namespace
}  // namespace whet
