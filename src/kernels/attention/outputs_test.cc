// What else attention gives: weights, heaviest keys, column sums, tile counts.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <numeric>
#include <regex>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_extras.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "core/attention_plan.h"
#include "targets.h"

namespace whet {
namespace {

// ---- Weights ----

TEST(AttentionAsked, WeightsAreThoseOfTheOracle) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      for (const DType type : kTypes) {
        Random random(1);
        oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
        if (p.rules.size() == 1) p.rules = {rules[turn++ % rules.size()].plain};
        SCOPED_TRACE(option.name + ", " + name_of(type) + ", rule " + library_rule(p.rules[0]).name());
        Asking call(p, type, 3);
        call.options.skip_epsilon = 0;
        call.forward();
        type == DType::f64
            ? expect_weights_of_rows<double>(p, oracle::forward<long double>(p, call.betas()), type, call)
            : expect_weights_of_rows<float>(p, oracle::forward<double>(p, call.betas()), type, call);
      }
    }
  });
}

// Rows are asked for in any order, and more than once.
TEST(AttentionAsked, WeightsOfChosenRowsAreThoseOfAllRows) {
  for_each_target([] {
    for (const DType type : kTypes) {
      for (const Shape& shape : {Shape{2, 4, 2, 9, 300, 5, 3}, Shape{2, 3, 1, 1, 600, 5, 3}}) {
        Random random(2);
        oracle::Attention p = draw_problem(random, shape, type);
        p.rules = {paper_case().plain};
        Asking all(p, type, 1);
        all.forward();
        const std::vector<RowIndex> rows = {
            {1, shape.H - 1, shape.N - 1}, {0, 0, 0}, {1, 1, shape.N / 2}, {0, 0, 0}};
        AttentionCall call(p, type, type);
        Placed weights(type, {4, p.M});
        call.outputs.weight_rows = rows;
        call.outputs.weights = weights.view();
        call.forward();
        const std::vector<double> got = weights.values(), expected = all.weights.values();
        for (std::size_t n = 0; n < rows.size(); ++n) {
          const std::size_t r = p.row(rows[n].batch, rows[n].head, rows[n].query);
          EXPECT_TRUE(same_bits(std::span(got).subspan(n * index_of(p.M), index_of(p.M)),
                                std::span(expected).subspan(r * index_of(p.M), index_of(p.M))))
              << "row " << r;
        }
      }
    }
  });
}

TEST(AttentionAsked, NothingAskedForChangesTheOutput) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      for (const std::int64_t M : {41, 270}) {
        const DType type = kTypes[turn % 4];
        Random random(3);
        oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, M, 5, 3}, type, arithmetic_type(type));
        if (p.rules.size() == 1) p.rules = {rules[turn++ % rules.size()].plain};
        SCOPED_TRACE(option.name + ", " + name_of(type) + ", rule " + library_rule(p.rules[0]).name());
        const Result expected = run(p, type, 0x1p-24);
        const auto expect_unchanged = [&](const char* what, void (*drop)(AttentionOutputs&)) {
          SCOPED_TRACE(what);
          Asking call(p, type, 5);
          drop(call.outputs);
          call.forward();
          EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
        };
        const auto no_weights = [](AttentionOutputs& o) { o.weight_rows = {}, o.weights = {}; };
        const auto no_top = [](AttentionOutputs& o) { o.top_k = 0, o.top_keys = {}, o.top_weights = {}; };
        expect_unchanged("everything", [](AttentionOutputs&) {});
        expect_unchanged("without weights", no_weights);
        expect_unchanged("without top_k", no_top);
        expect_unchanged("without column_sums", [](AttentionOutputs& o) { o.column_sums = {}; });
        expect_unchanged("without tile_counts", [](AttentionOutputs& o) { o.tile_counts = nullptr; });
      }
    }
  });
}

// ---- Heaviest keys ----

// Logits are multiples of 1/4 with many ties, exact in every type: the order is known to the last place.
oracle::Attention quarters_problem(Random& random, const Shape& shape) {
  oracle::Attention p = draw_problem(random, shape, DType::f16);
  for (double& value : p.q.values) value = static_cast<double>(random() % 5) / 2 - 1;
  for (double& value : p.k.values) value = static_cast<double>(random() % 5) / 2 - 1;
  return p;
}

void check_top_keys(const oracle::Attention& p, DType type, std::int64_t top) {
  Asking call(p, type, top);
  call.forward();
  const std::vector<double> weights = call.weights.values();
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    const oracle::AttentionRow<double> row = oracle::row_of<double>(p, b, h, i);
    std::vector<std::size_t> order(row.count());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order,
                             [&](std::size_t a, std::size_t c) { return row.logits.x[a] > row.logits.x[c]; });
    for (std::size_t n = 0; n < index_of(top); ++n) {
      const std::size_t at = r * index_of(top) + n;
      if (n >= row.count()) {
        ASSERT_EQ(call.top_keys[at], -1) << "row " << r << ", place " << n;
        ASSERT_EQ(call.top_weights[at], 0) << "row " << r << ", place " << n;
        continue;
      }
      const std::int64_t key = row.keys[order[n]];
      ASSERT_EQ(call.top_keys[at], key) << "row " << r << ", place " << n;
      const double stored = rounded(type, static_cast<double>(call.top_weights[at]));
      const double weight = weights[r * index_of(p.M) + index_of(key)];
      // top_weights are f32 whatever the type.
      ASSERT_EQ(type == DType::f64 ? static_cast<double>(static_cast<float>(weight)) : weight, stored)
          << "row " << r << ", place " << n;
    }
  });
}

TEST(AttentionAsked, TopKeysAreInOrderOfWeightThenOfPlace) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      for (const DType type : kTypes) {
        for (const Shape& shape :
             {Shape{2, 4, 2, 7, 23, 3, 2}, Shape{1, 2, 1, 9, 270, 4, 2}, Shape{1, 3, 1, 1, 300, 4, 2}}) {
          Random random(4);
          oracle::Attention p = quarters_problem(random, shape);
          p.rules = {rule.plain};
          p.scale = 0.5;
          p.mask = draw_mask(random, {1, 1, shape.N, shape.M}, 0.6);
          for (std::int64_t i = 3; i < shape.N; i += 3) {  // rows of few keys
            for (std::int64_t j = 2; j < shape.M; ++j) p.mask.values[p.mask.position({0, 0, i, j})] = 0;
          }
          SCOPED_TRACE(name_of(type) + ", M " + std::to_string(shape.M) + ", rule " + rule.rule.name());
          for (const std::int64_t top : {std::int64_t{1}, std::int64_t{7}}) check_top_keys(p, type, top);
          // As many as there are keys, and more.
          if (shape.M < 50) check_top_keys(p, type, shape.M + 2);
        }
      }
    }
  });
}

// Key 300 alone makes its tile, which is skipped; its weight is then 0, and those of lesser keys elsewhere
// aren't.
TEST(AttentionAsked, TopKeysOfSkippedTilesComeLast) {
  for_each_target([] {
    for (const DType type : {DType::f32, DType::f64}) {
      Random random(6);
      oracle::Attention p = draw_problem(random, {1, 1, 1, 40, 700, 1, 2}, type);
      p.scale = 1;
      std::ranges::fill(p.q.values, 1.0);
      std::ranges::fill(p.k.values, -62.0);
      p.k.values[3] = 0;
      p.k.values[5] = -60;
      p.k.values[300] = -50;
      Asking call(p, type, 4);
      call.forward();
      EXPECT_GT(call.counts.skipped, 0);
      for (std::size_t row = 0; row < index_of(p.N); ++row) {
        const auto keys = std::span(call.top_keys).subspan(4 * row, 4);
        const auto weights = std::span(call.top_weights).subspan(4 * row, 4);
        EXPECT_EQ(std::vector(keys.begin(), keys.end()), (std::vector<std::int64_t>{3, 5, 0, 300}));
        EXPECT_TRUE(std::ranges::is_sorted(weights, std::greater<>()));
        EXPECT_GT(weights[2], 0);
        EXPECT_EQ(weights[3], 0);
      }
    }
  });
}

// ---- Column sums ----

TEST(AttentionAsked, ColumnSumsAreSumsOfWeights) {
  const std::vector<RuleCase> rules = rule_cases();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const OptionCase& option : option_cases()) {
      for (const DType type : {DType::f32, DType::f64}) {
        for (const std::int64_t M : {41, 530}) {
          Random random(5);
          oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, M, 5, 3}, type, type);
          if (p.rules.size() == 1) p.rules = {rules[turn++ % rules.size()].plain};
          SCOPED_TRACE(option.name + ", " + name_of(type) + ", M " + std::to_string(M) + ", rule " +
                       library_rule(p.rules[0]).name());
          Asking call(p, type, 1);
          call.forward();
          const std::vector<double> weights = call.weights.values();
          const double unit_of = type == DType::f64 ? unit<double>() : unit<float>();
          for (std::size_t at = 0; at < call.column_sums.size(); ++at) {
            const std::size_t head = at / index_of(M), j = at % index_of(M);
            double sum = 0;
            for (std::size_t i = 0; i < index_of(p.N); ++i)
              sum += weights[(head * index_of(p.N) + i) * index_of(M) + j];
            // Each weight may have been rounded on its way to either.
            ASSERT_NEAR(call.column_sums[at], sum, 4 * unit_of * sum + 1e-30) << "column " << at;
          }
        }
      }
    }
  });
}

// In f64 they are those of 16-bit inputs to f32's precision, not to the precision of the storage.
TEST(AttentionAsked, ColumnSumsOfSixteenBitsAddUpToTheQueries) {
  for_each_target([] {
    for (const DType type : kTypes) {
      Random random(6);
      const oracle::Attention p = draw_problem(random, {2, 4, 2, 50, 300, 5, 3}, type);
      Asking call(p, type, 1);
      call.forward();
      for (std::size_t head = 0; head < 8; ++head) {
        const auto from = call.column_sums.begin() + static_cast<std::ptrdiff_t>(head * 300);
        EXPECT_NEAR(std::accumulate(from, from + 300, 0.0), 50, 50e-6) << name_of(type);
      }
    }
  });
}

// ---- Tiles ----

// By definition: 6 queries of a head by 256 keys, with a key that neither causal, window nor lengths hide.
std::int64_t tiles_of(oracle::Attention p) {
  p.mask = p.bias = {};
  std::int64_t tiles = 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t h = 0; h < p.H; ++h) {
      for (std::int64_t first = 0; first < p.N; first += 6) {
        for (std::int64_t left = 0; left < p.M; left += 256) {
          bool reached = false;
          for (std::int64_t i = first; i < std::min(first + 6, p.N); ++i) {
            for (std::int64_t j = left; j < std::min(left + 256, p.M); ++j)
              reached = reached || !oracle::hidden(p, b, h, i, j);
          }
          tiles += reached ? 1 : 0;
        }
      }
    }
  }
  return tiles;
}

TEST(AttentionAsked, TileCountsCountWhatIsWithinReach) {
  const OptionCase cases[] = {
      {"all", [](oracle::Attention&, Random&, DType) {}},
      {"causal", [](oracle::Attention& p, Random&, DType) { p.causal = true; }},
      {"causal from the end",
       [](oracle::Attention& p, Random&, DType) {
         p.causal = true;
         p.align = Align::end;
       }},
      {"window",
       [](oracle::Attention& p, Random&, DType) {
         p.window_left = 70;
         p.window_right = 3;
       }},
      {"window from the end",
       [](oracle::Attention& p, Random&, DType) {
         p.window_left = 300;
         p.align = Align::end;
       }},
      {"lengths of batch entries",
       [](oracle::Attention& p, Random&, DType) {
         p.lengths = {p.M, p.M / 2};
       }},
      {"lengths of rows, causal",
       [](oracle::Attention& p, Random&, DType) {
         p.causal = true;
         for (std::int64_t r = 0; r < p.rows(); ++r) p.lengths.push_back(r * 11 % (p.M + 1));
       }},
      {"mask, which may hide but not put out of reach",
       [](oracle::Attention& p, Random& random, DType) {
         p.mask = draw_mask(random, {1, 1, 1, p.M}, 0);
       }},
  };
  for_each_target([&] {
    for (const OptionCase& option : cases) {
      for (const auto& [N, M] :
           {std::pair<std::int64_t, std::int64_t>{60, 770}, {301, 300}, {62, 256}, {13, 257}}) {
        Random random(7);
        oracle::Attention p = draw_problem(random, {2, 2, 2, N, M, 1, 1}, DType::f32);
        option.set(p, random, DType::f32);
        SCOPED_TRACE(option.name + ", N " + std::to_string(N) + ", M " + std::to_string(M));
        AttentionCall call(p, DType::f32, DType::f32);
        TileCounts counts{-7, -7};
        call.outputs.tile_counts = &counts;
        call.options.skip_epsilon = 0;
        call.forward();
        EXPECT_EQ(counts.tiles, tiles_of(p));
        EXPECT_EQ(counts.skipped, 0);
      }
    }
  });
}

}  // namespace
}  // namespace whet
