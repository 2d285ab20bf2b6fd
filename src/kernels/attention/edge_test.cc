// The edge cases attention promises: rows without keys, of one key, of equal keys; NaN and infinities in
// visible and in hidden positions; the largest logits; empty tensors.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "core/attention_plan.h"
#include "targets.h"

namespace whet {
namespace {

constexpr double kEpsilons[] = {0, 0x1p-24, 0.1};

std::string describe(const oracle::Attention& p, DType type) {
  return "B " + std::to_string(p.B) + ", H " + std::to_string(p.H) + ", K " + std::to_string(p.K) + ", N " +
         std::to_string(p.N) + ", M " + std::to_string(p.M) + ", D " + std::to_string(p.D) + ", E " +
         std::to_string(p.E) + ", element type " + std::to_string(static_cast<int>(type));
}

// ---- Ways to hide keys ----

struct Hiding {
  const char* name;
  std::int64_t batches;
  void (*apply)(oracle::Attention& p);
};

// Every second row sees nothing, the others two keys of three.
void hide_by_mask(oracle::Attention& p) {
  Random random(11);
  p.mask = draw_mask(random, {1, p.H, p.N, p.M}, 0.67);
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t i = 0; i < p.N; ++i) {
      for (std::int64_t j = 0; j < p.M && (h + i) % 2 == 1; ++j)
        p.mask.values[p.mask.position({0, h, i, j})] = 0;
    }
  }
}

void hide_by_bias(oracle::Attention& p) {
  hide_by_mask(p);
  Random random(12);
  p.bias = draw_array(random, p.mask.sizes, DType::f32);
  for (std::size_t n = 0; n < p.bias.values.size(); ++n) {
    if (p.mask.values[n] == 0) p.bias.values[n] = -kInfinity;
  }
  p.mask = {};
}

// Each hides at least one key from some row and, given more queries than keys, all keys from some.
const Hiding kHidings[] = {
    {"mask", 2, hide_by_mask},
    {"bias of -inf", 2, hide_by_bias},
    {"causal", 1, [](oracle::Attention& p) { p.causal = true; }},
    {"causal from the end", 1,
     [](oracle::Attention& p) {
       p.causal = true;
       p.align = Align::end;
     }},
    {"window", 1,
     [](oracle::Attention& p) {
       p.window_left = 2;
       p.window_right = 3;
     }},
    {"causal window from the end", 1,
     [](oracle::Attention& p) {
       p.causal = true;
       p.align = Align::end;
       p.window_left = 4;
     }},
    {"lengths of batch entries", 3,
     [](oracle::Attention& p) {
       p.lengths = {0, p.M / 2, p.M - 1};
     }},
    {"lengths of rows", 2, [](oracle::Attention& p) { p.lengths = row_lengths(p); }},
    {"packed sequences", 1,
     [](oracle::Attention& p) {
       p.query_starts = {0, p.N / 3, p.N / 2, p.N};
       p.key_starts = {0, p.M / 2, p.M / 2, p.M};
     }},
};

// Few keys, several tiles, and one query over several tiles.
const Shape kHidingShapes[] = {{1, 4, 2, 7, 5, 3, 3}, {1, 2, 1, 13, 270, 4, 5}, {1, 3, 1, 1, 520, 4, 3}};

oracle::Attention hiding_problem(const Hiding& hiding, Shape shape, DType type) {
  Random random(1);
  shape.B = hiding.batches;
  oracle::Attention p = draw_problem(random, shape, type);
  hiding.apply(p);
  return p;
}

// ---- Rows without keys ----

std::size_t expect_zeros_without_keys(const oracle::Attention& p, const Result& got) {
  std::size_t found = 0;
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    bool seen = false;
    for (std::int64_t j = 0; j < p.M; ++j) seen = seen || !oracle::hidden(p, b, h, i, j);
    if (seen) return;
    ++found;
    expect_all(got.row(p.row(b, h, i)), 0, "row without keys");
    expect_empty_stats(got.stats[p.row(b, h, i)]);
  });
  return found;
}

TEST(AttentionEdge, RowsWithoutVisibleKeysAreZeroAmongOthers) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const Hiding& hiding : kHidings) {
      SCOPED_TRACE(hiding.name);
      // More queries than keys: positions before the first and beyond the last key.
      oracle::Attention p = hiding_problem(hiding, {1, 2, 2, N, 4, 3, 3}, type);
      p.rules = {rule};
      const Result got = run(p, type);
      const std::size_t empty = expect_zeros_without_keys(p, got);
      expect_contract(p, got, type);
      p.sinks = {{2}, {0.5, -1}};
      const Result sunk = run(p, type);
      EXPECT_EQ(expect_zeros_without_keys(p, sunk), empty);
      expect_contract(p, sunk, type);
      const bool can_hide_all = std::string(hiding.name) != "causal";
      EXPECT_EQ(empty > 0, can_hide_all);
      EXPECT_LT(empty, got.rows());
    }
  });
}

// Logits of -inf are hidden keys, wherever they come from.
TEST(AttentionEdge, RowsWhoseLogitsAreAllMinusInfinityAreZero) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(2);
    oracle::Attention p = with_logits(random, N, {0.5, 1, 2, 3, 0.25, 1.5, 1, 4, 2}, type);
    p.rules = {rule};
    p.q.values[3] = -kInfinity;
    const Result got = run(p, type);
    expect_all(got.row(3), 0, "row of q = -inf");
    expect_empty_stats(got.stats[3]);
    expect_contract(p, got, type);
  });
}

TEST(AttentionEdge, NoKeysAtAllGiveZeros) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(3);
    oracle::Attention p = draw_problem(random, {2, 3, 3, N, 0, 4, 5}, type);
    p.rules = {rule};
    for (const bool with_sinks : {false, true}) {
      if (with_sinks) p.sinks = {{3}, {1, 2, 3}};
      const Result got = run(p, type);
      EXPECT_EQ(expect_zeros_without_keys(p, got), got.rows());
    }
  });
}

TEST(AttentionEdge, NullIsFineWhereNothingIs) {
  const float q[6] = {1, 2, 3, 4, 5, 6};
  float out[6] = {7, 7, 7, 7, 7, 7};
  const ConstView nothing(static_cast<const float*>(nullptr), {1, 1, 0, 2});
  for_each_target([&] {
    // No keys; no queries; no batch.
    attention({q, {1, 1, 3, 2}}, nothing, nothing, {out, {1, 1, 3, 2}});
    for (float value : out) EXPECT_EQ(value, 0);
    EXPECT_NO_THROW(attention(nothing, {q, {1, 1, 3, 2}}, {q, {1, 1, 3, 2}},
                              View(static_cast<float*>(nullptr), {1, 1, 0, 2})));
    const ConstView none(static_cast<const float*>(nullptr), {0, 1, 3, 2});
    EXPECT_NO_THROW(attention(none, none, none, View(static_cast<float*>(nullptr), {0, 1, 3, 2})));
    EXPECT_NO_THROW(attention_workspace(none, none, none));
  });
}

TEST(AttentionEdge, NoQueriesStillOverwriteWhatIsAskedFor) {
  for_each_target([] {
    Random random(4);
    oracle::Attention p = draw_problem(random, {2, 2, 2, 0, 9, 4, 5}, DType::f32);
    AttentionCall call(p, DType::f32, DType::f32);
    std::vector<double> sums(2 * 2 * 9, 7);
    TileCounts counts{7, 7};
    call.outputs.column_sums = sums;
    call.outputs.tile_counts = &counts;
    call.forward();
    expect_all(sums, 0, "column sum");
    EXPECT_EQ(counts.tiles, 0);
    EXPECT_EQ(counts.skipped, 0);
  });
}

// ---- One key ----

// Row r sees key `key_of(r)` only.
template <typename KeyOf>
void expect_the_value_of_one_key(oracle::Attention p, DType type, const KeyOf& key_of) {
  for (const double epsilon : {0.0, 0.1}) {
    const Result got = run(p, type, epsilon);
    oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
      const std::size_t r = p.row(b, h, i);
      for (std::int64_t e = 0; e < p.E; ++e) {
        ASSERT_EQ(got.row(r)[static_cast<std::size_t>(e)], p.v.at({b, p.key_head(h), key_of(i), e}))
            << "row " << r;
      }
      const RowStats& s = got.stats[r];
      for (double one : {s.count, s.peak, s.beta, s.sharp_peak}) ASSERT_EQ(one, 1) << "row " << r;
      for (double zero : {s.entropy, s.varentropy, s.spread, s.sharp_entropy}) ASSERT_EQ(zero, 0);
      ASSERT_EQ(s.log_sum_exp, s.max);
    });
  }
}

TEST(AttentionEdge, OneVisibleKeyGivesItsValueExactly) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(5);
    for (const std::int64_t M : {1, 20, 290}) {
      const oracle::Attention p = draw_problem(random, {1, 1, 1, N, M, 3, 9}, type);
      oracle::Attention by_mask = p, by_length = p;
      oracle::Attention by_window = with_queries(p, 0, std::min(M, N));
      by_mask.rules = by_length.rules = by_window.rules = {rule};
      by_mask.mask = {{1, 1, 1, M}, std::vector<double>(static_cast<std::size_t>(M), 0)};
      by_mask.mask.values.back() = 1;
      expect_the_value_of_one_key(by_mask, type, [&](std::int64_t) { return M - 1; });
      by_length.lengths = {1};
      expect_the_value_of_one_key(by_length, type, [](std::int64_t) { return 0; });
      by_window.window_left = by_window.window_right = 0;
      expect_the_value_of_one_key(by_window, type, [](std::int64_t i) { return i; });
    }
  });
}

// ---- Equal keys ----

void check_equal_logits(const oracle::Rule& rule, DType type, std::int64_t N, std::int64_t M) {
  Random random(6);
  oracle::Attention p = draw_problem(random, {1, 1, 1, N, M, 3, 5}, type);
  p.rules = {rule};
  p.q.values.assign(p.q.values.size(), 0);
  p.bias = {{1, 1, 1, 1}, {rounded(type, 0.7)}};
  p.causal = true;
  p.align = Align::end;
  AttentionCall call(p, type, type);
  const RowIndex rows[] = {{0, 0, 0}, {0, 0, N - 1}};
  Placed weights(type, {2, M});
  call.outputs.weight_rows = rows;
  call.outputs.weights = weights.view();
  call.forward();
  const Result got{call.out.values(), call.stats};
  expect_contract(p, got, type);
  const std::vector<double> w = weights.values();
  for (std::int64_t n = 0; n < 2; ++n) {
    const std::int64_t count = M - (1 - n) * (N - 1);
    const double share = rounded(type, rounded(arithmetic_type(type), 1 / static_cast<double>(count)));
    for (std::int64_t j = 0; j < M; ++j) {
      ASSERT_EQ(w[static_cast<std::size_t>(n * M + j)], j < count ? share : 0) << "key " << j;
    }
    const RowStats& s = got.stats[static_cast<std::size_t>((N - 1) * n)];
    EXPECT_EQ(s.count, static_cast<double>(count));
    EXPECT_NEAR(s.entropy, std::log(s.count), 1e-15 * std::log(s.count));
    EXPECT_EQ(s.varentropy, 0);
    EXPECT_EQ(s.spread, 0);
  }
}

TEST(AttentionEdge, EqualLogitsHaveWeightsOfExactlyOneOverCount) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const std::int64_t M : {20, 31, 257, 400}) {
      SCOPED_TRACE("M " + std::to_string(M));
      check_equal_logits(rule, type, N, M);
    }
  });
}

// ---- NaN and infinities in visible positions ----

TEST(AttentionEdge, BrokenQueriesBreakTheirOwnRowsOnly) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const double poison : {kNaN, kInfinity}) {
      Random random(7);
      oracle::Attention p = draw_problem(random, {2, 2, 2, N, 270, 3, 5}, type);
      p.rules = {rule};
      const Result clean = run(p, type);
      const std::size_t broken = p.row(1, 0, 3);
      p.q.values[p.q.position({1, 0, 3, 1})] = poison;
      const Result got = run(p, type);
      expect_all(got.row(broken), kNaN, "row of a broken query");
      expect_broken_stats(got.stats[broken]);
      for (std::size_t r = 0; r < got.rows(); ++r) {
        if (r != broken) {
          EXPECT_TRUE(same_row(got, r, clean, r));
        }
      }
    }
  });
}

// +inf in a key is +inf, NaN or -inf (hidden) in a logit, as the query's sign has it: D = 1 to know which.
TEST(AttentionEdge, InfiniteKeysBreakOrHideByTheSignOfTheQuery) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    Random random(8);
    oracle::Attention p = draw_problem(random, {1, 1, 1, N, 300, 1, 4}, type);
    p.rules = {rule};
    oracle::Attention masked = p;
    masked.mask = {{1, 1, 1, 300}, std::vector<double>(300, 1)};
    masked.mask.values[290] = 0;
    const Result without = run(masked, type);
    p.k.values[290] = kInfinity;
    const Result got = run(p, type);
    for (std::size_t r = 0; r < got.rows(); ++r) {
      ASSERT_NE(p.q.values[r], 0);
      if (p.q.values[r] < 0) {
        EXPECT_TRUE(same_row(got, r, without, r));
      } else {
        expect_all(got.row(r), kNaN, "row of a logit of +inf");
        expect_broken_stats(got.stats[r]);
      }
    }
  });
}

// A key near the diagonal of a causal problem is broken: later rows see it.
TEST(AttentionEdge, BrokenKeysBreakTheRowsThatSeeThem) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const std::int64_t j : {1, 5, 262}) {
      Random random(9);
      oracle::Attention p = draw_problem(random, {1, 1, 1, N, 264, 3, 4}, type);
      p.rules = {rule};
      p.causal = true;
      p.align = j < N ? Align::start : Align::end;
      const Result clean = run(p, type);
      p.k.values[p.k.position({0, 0, j, 2})] = kNaN;
      const Result got = run(p, type);
      oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
        const std::size_t r = p.row(b, h, i);
        if (oracle::hidden(p, b, h, i, j)) {
          EXPECT_TRUE(same_row(got, r, clean, r));
        } else {
          expect_all(got.row(r), kNaN, "row of a broken key");
          expect_broken_stats(got.stats[r]);
        }
      });
    }
  });
}

// Values don't enter statistics, nor the other elements of the output.
void check_broken_value(const oracle::Rule& rule, DType type, std::int64_t N, std::int64_t j, double poison) {
  Random random(10);
  oracle::Attention p = draw_problem(random, {1, 2, 2, N, 270, 3, 5}, type);
  p.rules = {rule};
  Random mask_random(11);
  p.mask = draw_mask(mask_random, {1, 1, N, 270}, 0.6);
  const Result clean = run(p, type);
  p.v.values[p.v.position({0, 1, j, 2})] = poison;
  const Result got = run(p, type);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    const bool sees = p.key_head(h) == 1 && !oracle::hidden(p, b, h, i, j);
    for (std::size_t e = 0; e < 5; ++e) {
      if (sees && e == 2) {
        ASSERT_TRUE(std::isnan(poison) ? std::isnan(got.row(r)[e]) : got.row(r)[e] == poison)
            << "row " << r << ": " << got.row(r)[e];
      } else {
        ASSERT_TRUE(same_bits(got.row(r)[e], clean.row(r)[e])) << "row " << r << ", element " << e;
      }
    }
    ASSERT_TRUE(same_bits(got.stats[r], clean.stats[r])) << "row " << r;
  });
}

TEST(AttentionEdge, BrokenValuesBreakTheirElementOfTheRowsThatSeeThem) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    // Sharper rules leave some keys without weight: below.
    if (oracle::solves(rule)) return;
    check_broken_value(rule, type, N, 0, kNaN);
    check_broken_value(rule, type, N, 133, kInfinity);
    check_broken_value(rule, type, N, 269, -kInfinity);
  });
}

// The broken value's key lies 1,000 or more below the maximum, among others like it: its weight is 0 and
// its tile could be skipped but for that value. Row 2 doesn't see it.
void check_broken_value_without_weight(const oracle::Rule& rule, DType type, std::int64_t N, std::int64_t M,
                                       std::int64_t j, double poison) {
  std::vector<double> logits(static_cast<std::size_t>(M), type == DType::f64 ? -30000 : -3000);
  logits[0] = 1;
  Random random(12);
  oracle::Attention p = with_logits(random, N, logits, type);
  p.rules = {rule};
  p.mask = {{1, 1, N, M}, std::vector<double>(static_cast<std::size_t>(N * M), 1)};
  p.mask.values[p.mask.position({0, 0, 2, j})] = 0;
  p.v.values[p.v.position({0, 0, j, 3})] = poison;
  for (const double epsilon : kEpsilons) {
    const Result got = run(p, type, epsilon);
    for (std::size_t r = 0; r < got.rows(); ++r) {
      for (std::size_t e = 0; e < 5; ++e) {
        if (e == 3 && r != 2) {
          ASSERT_FALSE(std::isfinite(got.row(r)[e])) << "row " << r << ", epsilon " << epsilon;
        } else {
          ASSERT_EQ(got.row(r)[e], p.v.values[e]) << "row " << r << ", element " << e;
        }
      }
    }
  }
}

TEST(AttentionEdge, BrokenValuesShowEvenWithoutWeight) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    for (const double poison : {kNaN, kInfinity}) {
      check_broken_value_without_weight(rule, type, N, 19, 17, poison);
      check_broken_value_without_weight(rule, type, N, 540, 530, poison);
    }
  });
}

// ---- NaN and infinities in hidden positions ----

// Keys and values j of every head are poisoned: rows that don't see key j keep their bits, others are broken.
void check_hidden(const oracle::Attention& p, DType type, const Result& clean, std::int64_t j, double poison,
                  bool key_too) {
  oracle::Attention bad = p;
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t kh = 0; kh < p.K; ++kh) {
      for (std::int64_t d = 0; d < p.D && key_too; ++d) bad.k.values[p.k.position({b, kh, j, d})] = poison;
      for (std::int64_t e = 0; e < p.E; ++e) bad.v.values[p.v.position({b, kh, j, e})] = poison;
    }
  }
  const Result got = run(bad, type);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    if (oracle::hidden(p, b, h, i, j)) {
      EXPECT_TRUE(same_row(got, r, clean, r));
    } else if (std::isnan(poison)) {
      expect_all(got.row(r), kNaN, "row that sees NaN");
    }
  });
}

TEST(AttentionEdge, WhatIsHiddenHasNoEffect) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const Hiding& hiding : kHidings) {
      for (const Shape& shape : kHidingShapes) {
        for (const DType type : kTypes) {
          oracle::Attention p = hiding_problem(hiding, shape, type);
          p.rules = {rules[turn++ % rules.size()].plain};
          SCOPED_TRACE(std::string(hiding.name) + ", " + describe(p, type));
          const Result clean = run(p, type);
          for (const std::int64_t j : {std::int64_t{0}, p.M / 2 + 1, p.M - 1}) {
            SCOPED_TRACE("key " + std::to_string(j));
            check_hidden(p, type, clean, j, kNaN, true);
            check_hidden(p, type, clean, j, kNaN, false);
            check_hidden(p, type, clean, j, kInfinity, true);
          }
        }
      }
    }
  });
}

// As above for keys hidden from every row, with tiles that may be skipped: nothing may look at them at all.
TEST(AttentionEdge, WhatNoRowSeesHasNoEffectOnSkipping) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    std::vector<double> logits(1100, -40);
    logits[3] = 2;
    Random random(13);
    oracle::Attention p = with_logits(random, N, logits, type);
    p.rules = {rule};
    p.lengths = {900};
    AttentionCall clean(p, type, type);
    for (std::size_t j = 900; j < 1100; ++j) p.k.values[j] = kNaN;
    for (std::size_t n = 900 * 5; n < 1100 * 5; ++n) p.v.values[n] = n % 2 ? kNaN : kInfinity;
    AttentionCall poisoned(p, type, type);
    TileCounts clean_counts, counts;
    clean.outputs.tile_counts = &clean_counts;
    poisoned.outputs.tile_counts = &counts;
    clean.forward();
    poisoned.forward();
    EXPECT_EQ(poisoned.out.bits(), clean.out.bits());
    EXPECT_EQ(counts.tiles, clean_counts.tiles);
    EXPECT_EQ(counts.skipped, clean_counts.skipped);
  });
}

// ---- The largest logits ----

TEST(AttentionEdge, DifferencesThatOverflowGiveTheValueOfTheMaximum) {
  for_each_case([](const oracle::Rule& rule, DType type, std::int64_t N) {
    if (type == DType::f16) return;  // holds no such number
    const double big = type == DType::f64 ? 1.5e308 : 3e38;
    for (const std::size_t M : Sizes{2, 3, 300}) {
      std::vector<double> logits(M, -big);
      logits[M / 2] = big;
      if (M > 2) logits[0] = 0;
      Random random(14);
      oracle::Attention p = with_logits(random, N, logits, type);
      p.rules = {rule};
      for (const double epsilon : kEpsilons) {
        const Result got = run(p, type, epsilon);
        for (std::size_t r = 0; r < got.rows(); ++r) {
          for (std::size_t e = 0; e < 5; ++e) {
            ASSERT_EQ(got.row(r)[e], p.v.values[M / 2 * 5 + e]) << "M " << M << ", row " << r;
          }
          ASSERT_EQ(got.stats[r].entropy, 0);
          ASSERT_EQ(got.stats[r].varentropy, 0);
          ASSERT_EQ(got.stats[r].peak, 1);
          ASSERT_TRUE(std::isfinite(got.stats[r].beta));
        }
      }
    }
  });
}

// ---- Sizes ----

// Around vectors and tiles, and primes; one key head for all, and each its own.
TEST(AttentionEdge, AnySizesGiveTheContract) {
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, 1},       {1, 1, 1, 1, 2, 2, 1},    {1, 1, 1, 2, 3, 1, 2},
      {3, 1, 1, 5, 7, 3, 7},       {1, 5, 1, 6, 15, 7, 8},   {1, 5, 5, 7, 16, 8, 9},
      {1, 7, 1, 1, 17, 13, 15},    {2, 6, 2, 3, 31, 16, 16}, {1, 6, 3, 11, 32, 17, 3},
      {1, 1, 1, 13, 33, 31, 17},   {1, 3, 1, 1, 127, 5, 31}, {1, 1, 1, 6, 255, 4, 33},
      {1, 1, 1, 7, 256, 2, 5},     {1, 2, 1, 5, 257, 3, 11}, {1, 1, 1, 3, 521, 64, 2},
      {1, 1, 1, 17, 37, 256, 256}, {1, 1, 1, 2, 61, 251, 1}, {1, 1, 1, 2, 61, 1, 255},
      {1, 1, 1, 17, 257, 33, 5},   {1, 3, 1, 7, 521, 3, 31}, {1, 1, 1, 1, 1031, 4, 4},
      {1, 1, 1, 61, 59, 2, 3},
  };
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const Shape& shape : shapes) {
      ++turn;  // five a shape, coprime to the number of rules: every type meets every rule
      for (const DType type : kTypes) {
        Random random(20);
        oracle::Attention p = draw_problem(random, shape, type);
        p.scale = 1 / std::sqrt(static_cast<double>(shape.D));
        p.rules = {rules[turn++ % rules.size()].plain};
        SCOPED_TRACE(describe(p, type) + ", rule " + library_rule(p.rules[0]).name());
        // What may be skipped by default is within the contract of f32, not of f64.
        expect_contract(p, run(p, type, type == DType::f64 ? 0 : 0x1p-24), type);
      }
    }
  });
}

}  // namespace
}  // namespace whet
