// Sinks and soft-caps at their limits.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "targets.h"

namespace whet {
namespace {

// ---- Sinks ----

TEST(AttentionLogits, AHugeSinkTakesAllMass) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(15);
    oracle::Attention p = draw_problem(random, {1, 2, 2, N, 270, 3, 5}, type);
    p.rules = {rule};
    p.sinks = {{2}, {30000, -kInfinity}};
    const Result got = run(p, type);
    const std::size_t second = p.row(0, 1, 0);
    for (std::size_t r = 0; r < second; ++r) {
      expect_all(got.row(r), 0, "row of a huge sink");
      EXPECT_EQ(got.stats[r].count, 270);
      EXPECT_EQ(got.stats[r].max, 30000);
      EXPECT_EQ(got.stats[r].entropy, 0);
      EXPECT_EQ(got.stats[r].peak, 0);
      EXPECT_EQ(got.stats[r].sharp_peak, 0);
    }
    p.sinks = {};
    const Result without = run(p, type);
    // -inf is no sink.
    for (std::size_t r = second; r < got.rows(); ++r) EXPECT_TRUE(same_row(got, r, without, r));
  });
}

TEST(AttentionLogits, SinksGoWithEveryRule) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(16);
    oracle::Attention p = draw_problem(random, {1, 4, 4, N, 37, 3, 5}, type, 1.5);
    p.rules = {rule};
    p.causal = true;  // rows of one key, too
    p.sinks = {{4}, {0.5, -3, 4, -kInfinity}};
    expect_contract(p, run(p, type), type);
  });
}

TEST(AttentionLogits, BrokenSinksBreakTheRowsOfTheirHead) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const double poison : {kNaN, kInfinity}) {
      Random random(17);
      oracle::Attention p = draw_problem(random, {1, 2, 2, N, 20, 3, 5}, type);
      p.rules = {rule};
      p.sinks = {{2}, {0.5, 0.5}};
      p.lengths = row_lengths(p);
      p.lengths[1] = 0;
      const Result clean = run(p, type);
      p.sinks.values[0] = poison;
      const Result got = run(p, type);
      for (std::size_t r = 0; r < got.rows(); ++r) {
        if (r >= p.row(0, 1, 0) || p.lengths[r] == 0) {
          EXPECT_TRUE(same_row(got, r, clean, r));
        } else {
          expect_all(got.row(r), kNaN, "row of a broken sink");
          expect_broken_stats(got.stats[r]);
        }
      }
    }
  });
}

// ---- Soft-cap ----

TEST(AttentionLogits, SoftcapBoundsLogits) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const double cap : {0.5, 3.0, 50.0}) {
      Random random(18);
      // Far beyond the cap logits are equal but for rounding, and what a target rule makes of that is
      // chance.
      const double sharpness = oracle::solves(rule) ? cap / 2 : 20;
      oracle::Attention p = draw_problem(random, {1, 1, 1, N, 40, 4, 5}, type, sharpness);
      p.rules = {rule};
      p.softcap = cap;
      const Result got = run(p, type);
      expect_contract(p, got, type);
      for (const RowStats& row : got.stats) {
        EXPECT_LE(row.max, cap);
        EXPECT_LE(row.spread, 2 * cap);
      }
    }
  });
}

// The cap of +-inf is +-softcap, a logit like any other.
TEST(AttentionLogits, SoftcapTamesInfiniteProducts) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(19);
    oracle::Attention p = with_logits(random, N, {1, 2, -1, 0.5, -2}, type);
    p.rules = {rule};
    p.softcap = 2;
    p.q.values[4] = kInfinity;
    const Result got = run(p, type);
    expect_contract(p, got, type);
    EXPECT_EQ(got.stats[4].count, 5);
    EXPECT_EQ(got.stats[4].max, 2);
    EXPECT_EQ(got.stats[4].spread, 4);
  });
}

// The smallest that are allowed leave nothing of the logits; products of 0, too.
TEST(AttentionLogits, SmallestSoftcapsMakeLogitsEqual) {
  for_each_target([] {
    for (const DType type : kTypes) {
      for (const std::int64_t N : kQueries) {
        Random random(20);
        oracle::Attention p = draw_problem(random, {1, 2, 1, N, 9, 4, 3}, type, 5);
        for (std::size_t i = 0; i < 4; ++i) p.k.values[i] = 0;
        p.softcap = type == DType::f64 ? std::numeric_limits<double>::min()
                                       : static_cast<double>(std::numeric_limits<float>::min());
        SCOPED_TRACE(name_of(type) + ", N " + std::to_string(N));
        expect_contract(p, run(p, type), type);
        AttentionCall call(p, type, arithmetic_type(type));
        call.outputs.saved = {};
        call.backward();
        for (const Placed* gradient : {&call.dq, &call.dk, &call.dv}) {
          for (const double value : gradient->values()) ASSERT_TRUE(std::isfinite(value));
        }
      }
    }
  });
}

}  // namespace
}  // namespace whet
