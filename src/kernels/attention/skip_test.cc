// What attention leaves out, certified, and the memory it works in.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <regex>
#include <span>
#include <string>
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

// ---- Certified skipping ----

constexpr std::int64_t kFarTiles = 8;
constexpr std::int64_t kFarKeys = kFarTiles * 256;

// Logits chosen freely for each row of a tile: q is the unit matrix, so k holds them, key by key. Strips of
// six rows are alike.
template <typename T>
struct Free {
  explicit Free(std::int64_t strips)
      : rows(6 * strips), q(index_of(rows * 6)), k(index_of(kFarKeys * 6)), v(index_of(kFarKeys * 3)) {
    for (std::int64_t i = 0; i < rows; ++i) q[index_of(i * 6 + i % 6)] = T{1};
  }
  T& logit(std::int64_t row, std::int64_t key) { return k[index_of(key * 6 + row)]; }

  std::vector<T> run(const Rule& rule, double epsilon, TileCounts& counts) const {
    std::vector<T> out(index_of(rows * 3));
    attention({q.data(), {1, 1, rows, 6}}, {k.data(), {1, 1, kFarKeys, 6}}, {v.data(), {1, 1, kFarKeys, 3}},
              {out.data(), {1, 1, rows, 3}}, {.rule = rule, .scale = 1.0, .skip_epsilon = epsilon},
              {.tile_counts = &counts});
    return out;
  }

  std::int64_t rows;
  std::vector<T> q, k, v;
};

// Where the keys that matter lie, and how far below them the others.
struct Pattern {
  const char* name;
  std::int64_t (*near)(std::int64_t row);                // the key at 0
  double (*depth)(std::int64_t row, std::int64_t tile);  // others are at -gap times this
};

const Pattern kPatterns[] = {
    // Together the far tiles hold eight times what each does.
    {"all as far", [](std::int64_t) { return std::int64_t{700}; },
     [](std::int64_t, std::int64_t) { return 1.0; }},
    {"each farther", [](std::int64_t) { return std::int64_t{0}; },
     [](std::int64_t, std::int64_t tile) { return 1 + 0.2 * static_cast<double>(tile); }},
    // What one row could lose is another's only key.
    {"rows disagree", [](std::int64_t row) { return row * 256 + 17; },
     [](std::int64_t, std::int64_t) { return 1.0; }},
    {"one row near all", [](std::int64_t) { return kFarKeys - 1; },
     [](std::int64_t row, std::int64_t) { return row == 4 ? 0.5 : 1.0; }},
};

template <typename T>
Free<T> far_problem(const Pattern& pattern, std::int64_t strips, double gap) {
  constexpr double kHuge = 1e6;
  Free<T> p(strips);
  Random random(8);
  for (std::int64_t j = 0; j < kFarKeys; ++j) {
    bool near = false;
    for (std::int64_t row = 0; row < 6; ++row) {
      const bool here = pattern.near(row) == j;
      near = near || here;
      p.logit(row, j) = here ? T{0} : static_cast<T>(-gap * pattern.depth(row, j / 256));
    }
    // Opposite to what matters, the worst there is; huge beside it; and huge of either sign.
    p.v[index_of(j * 3)] = static_cast<T>(near ? -kHuge : kHuge);
    p.v[index_of(j * 3 + 1)] = static_cast<T>(near ? 1 : kHuge);
    p.v[index_of(j * 3 + 2)] = static_cast<T>(random() % 2 ? -kHuge : kHuge);
  }
  return p;
}

// Whether anything was skipped at this gap; the bound holds whether or not.
template <typename T>
bool check_skip(const Pattern& pattern, const Rule& rule, double epsilon, std::int64_t strips, double gap) {
  const Free<T> p = far_problem<T>(pattern, strips, gap);
  TileCounts counts, none;
  const std::vector<T> got = p.run(rule, epsilon, counts), expected = p.run(rule, 0, none);
  EXPECT_EQ(none.skipped, 0);
  EXPECT_EQ(none.tiles, strips * kFarTiles);
  EXPECT_EQ(counts.tiles, strips * kFarTiles);
  EXPECT_LE(counts.skipped, strips * (kFarTiles - 1));
  // 64 units for the sums of either call over 2,048 keys.
  const double bound = 1e6 * (2 * epsilon + 64 * unit<T>());
  for (std::size_t n = 0; n < got.size(); ++n) {
    EXPECT_LE(std::abs(static_cast<double>(got[n]) - static_cast<double>(expected[n])), bound)
        << "row " << n / 3 << ", column " << n % 3 << ", gap " << gap << ", skipped " << counts.skipped;
  }
  return counts.skipped > 0;
}

// Halves towards the smallest gap at which tiles are skipped, where what is lost is largest.
template <typename T>
void check_skip_at_its_limit(const Pattern& pattern, const Rule& rule, double epsilon) {
  const std::int64_t strips = core::kFewRows / 6 + 1;
  double none = 0.01, some = 400;
  EXPECT_TRUE(check_skip<T>(pattern, rule, epsilon, strips, some)) << "nothing is ever skipped";
  for (int step = 0; step < 9; ++step) {
    const double middle = (none + some) / 2;
    (check_skip<T>(pattern, rule, epsilon, strips, middle) ? some : none) = middle;
  }
}

TEST(AttentionSkip, NeverMovesAnOutputByMoreThanItSays) {
  for_each_target([] {
    for (const Pattern& pattern : kPatterns) {
      for (const Rule& rule : {Rule::none(), Rule::fixed(0.3), Rule::paper(), Rule::target_peak(0.2)}) {
        for (const double epsilon : {0x1p-24, 0x1p-10, 0.1}) {
          SCOPED_TRACE(std::string(pattern.name) + ", rule " + rule.name() + ", epsilon " +
                       testing::PrintToString(epsilon));
          check_skip_at_its_limit<double>(pattern, rule, epsilon);
          // The rounding of f32 hides what 2^-24 could.
          if (epsilon > 0x1p-24) check_skip_at_its_limit<float>(pattern, rule, epsilon);
        }
      }
    }
  });
}

TEST(AttentionSkip, SparesNothingOfFewQueries) {
  for_each_target([] {
    for (const double gap : {1.0, 20.0, 400.0}) {
      EXPECT_FALSE(check_skip<float>(kPatterns[0], Rule::none(), 0.1, core::kFewRows / 6, gap));
    }
  });
}

// Local attention: queries and keys on half a circle, logits 2,000 cos(angle between them). Six queries span
// 205 keys and what lies more than 103 keys beside them weighs less than 2^-24 in all: they touch at
// most 3 tiles of 8.
oracle::Attention local_problem(Random& random, DType type) {
  oracle::Attention p = draw_problem(random, {1, 1, 1, 60, 2048, 2, 3}, type);
  for (std::int64_t i = 0; i < p.N; ++i) {
    const double angle = std::numbers::pi * (static_cast<double>(i) + 0.5) / static_cast<double>(p.N);
    p.q.values[index_of(2 * i)] = rounded(type, 2000 * std::cos(angle));
    p.q.values[index_of(2 * i + 1)] = rounded(type, 2000 * std::sin(angle));
  }
  for (std::int64_t j = 0; j < p.M; ++j) {
    const double angle = std::numbers::pi * (static_cast<double>(j) + 0.5) / static_cast<double>(p.M);
    p.k.values[index_of(2 * j)] = rounded(type, std::cos(angle));
    p.k.values[index_of(2 * j + 1)] = rounded(type, std::sin(angle));
  }
  return p;
}

template <typename Arithmetic>
void check_local(const oracle::Rule& rule, DType type) {
  using Real = typename Contract<Arithmetic>::Real;
  Random random(9);
  oracle::Attention p = local_problem(random, type);
  p.rules = {rule};
  AttentionCall call(p, type, type);
  TileCounts counts;
  call.outputs.tile_counts = &counts;
  call.forward();
  EXPECT_EQ(counts.tiles, 80);
  EXPECT_GE(counts.skipped, 50);
  const std::vector<double> out = call.out.values();
  call.options.skip_epsilon = 0;
  call.forward();
  EXPECT_EQ(counts.tiles, 80);
  EXPECT_EQ(counts.skipped, 0);
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  expect_output<Arithmetic>(p, exact, call.out.values(), type);
  // What is skipped by default is within the contract of f32, not of f64.
  if (type == DType::f32) {
    expect_output<Arithmetic>(p, exact, out, type);
  } else {
    expect_all_within(out, exact.out, 2 * 0x1p-24 * largest(p.v.values), type, "out");
  }
}

TEST(AttentionSkip, SparesMostTilesOfLocalAttention) {
  for_each_target([] {
    check_local<float>({}, DType::f32);
    check_local<float>(paper_case().plain, DType::f32);
    check_local<double>({Rule::Kind::log_length, 16}, DType::f64);
  });
}

// ---- Workspace ----

// In a buffer whose other bytes must stay as they are.
void check_workspace(const oracle::Attention& p, DType type, int threads, std::size_t shift) {
  AttentionCall call(p, type, type);
  call.execution.threads = threads;
  call.forward();
  const Result expected{call.out.values(), call.stats};
  const std::size_t size = attention_workspace(call.q.view(), call.k.view(), call.v.view(), call.options,
                                               call.outputs, call.execution);
  ASSERT_GT(size, 0U);
  std::vector<std::byte> buffer(size + shift + 64, std::byte{0xA5});
  call.execution.workspace = std::span(buffer).subspan(shift, size);
  call.out.fill(kNaN);
  call.forward();
  EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
  for (std::size_t n = 0; n < buffer.size(); ++n) {
    if (n >= shift && n < shift + size) continue;
    ASSERT_EQ(buffer[n], std::byte{0xA5}) << n;
  }
  call.execution.workspace = std::span(buffer).subspan(shift, size - 1);
  call.out.fill(kNaN);
  try {
    call.forward();
    ADD_FAILURE() << "accepted a workspace of one byte less than " << size;
  } catch (const Error& error) {
    EXPECT_TRUE(std::regex_search(error.what(), std::regex("\\bworkspace\\b"))) << error.what();
  }
  for (double value : call.out.values()) ASSERT_TRUE(std::isnan(value));
}

TEST(AttentionWorkspace, MayLieAnywhereAndIsNoLargerThanItSays) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const Shape& shape : {Shape{2, 4, 2, 9, 41, 5, 3}, Shape{1, 2, 1, 17, 270, 19, 9},
                               Shape{2, 3, 1, 1, 300, 17, 9}, Shape{1, 1, 1, 1, 1, 1, 1}}) {
      for (const DType type : kTypes) {
        for (const int threads : {1, 2}) {
          for (const std::size_t shift : Sizes{0, 1, 63}) {
            Random random(10);
            oracle::Attention p = draw_problem(random, shape, type);
            p.rules = {rules[turn++ % rules.size()].plain};
            SCOPED_TRACE(name_of(type) + ", M " + std::to_string(shape.M) + ", threads " +
                         std::to_string(threads) + ", shift " + std::to_string(shift));
            check_workspace(p, type, threads, shift);
          }
        }
      }
    }
  });
}

std::size_t workspace_of(std::int64_t N, std::int64_t M, DType type) {
  const void* const anything = nullptr;
  const ConstView q(anything, type, {1, 1, N, 64}), k(anything, type, {1, 1, M, 64});
  return attention_workspace(q, k, k, {.rule = Rule::paper(), .causal = true}, {}, {.threads = 1});
}

TEST(AttentionWorkspace, GrowsNoFasterThanQueriesAndKeys) {
  constexpr std::int64_t kMany = 131072;
  for_each_target([] {
    for (const DType type : kTypes) {
      SCOPED_TRACE(name_of(type));
      EXPECT_LT(workspace_of(kMany, kMany, type), bytes_of(arithmetic_type(type)) << 24);
      const double more_keys = static_cast<double>(workspace_of(1024, 2 * kMany, type));
      EXPECT_LE(more_keys, 2.1 * static_cast<double>(workspace_of(1024, kMany, type)));
      const double more_of_both = static_cast<double>(workspace_of(4 * kMany, 4 * kMany, type));
      EXPECT_LE(more_of_both, 4.2 * static_cast<double>(workspace_of(kMany, kMany, type)));
    }
  });
}

}  // namespace
}  // namespace whet
