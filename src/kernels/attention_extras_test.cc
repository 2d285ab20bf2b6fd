// What else attention gives: weights, heaviest keys, column sums, tile counts; what it leaves out, certified;
// and the memory it works in.
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

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

std::size_t index_of(std::int64_t value) { return static_cast<std::size_t>(value); }

std::string name_of(DType type) { return "element type " + std::to_string(static_cast<int>(type)); }

std::vector<RowIndex> every_row(const oracle::Attention& p) {
  std::vector<RowIndex> rows;
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) { rows.push_back({b, h, i}); });
  return rows;
}

// A call that asks for everything, with the weights of every row. Filled with what must not stay.
struct Asking : AttentionCall {
  Asking(const oracle::Attention& p, DType type, std::int64_t top)
      : AttentionCall(p, type, arithmetic_type(type)),
        rows(every_row(p)),
        weights(type, {p.rows(), p.M}),
        top_keys(index_of(p.rows() * top), -7),
        top_weights(top_keys.size(), -7),
        column_sums(index_of(p.B * p.H * p.M), -7) {
    options.weight_rows = rows;
    options.weights = weights.view();
    options.top_k = top;
    options.top_keys = top_keys;
    options.top_weights = top_weights;
    options.column_sums = column_sums;
    options.tile_counts = &counts;
  }

  std::vector<RowIndex> rows;
  Placed weights;
  std::vector<std::int64_t> top_keys;
  std::vector<float> top_weights;
  std::vector<double> column_sums;
  TileCounts counts{-7, -7};
};

// ---- Weights ----

// As for the largest weight in attention_contract.h: what contract.h allows when logits are given, and what
// the rounding of the logits moves a weight by.
template <typename Arithmetic>
void expect_weights_of_rows(const oracle::Attention& p, DType type, const Asking& call) {
  using Real = typename Contract<Arithmetic>::Real;
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  const std::vector<double> got = call.weights.values();
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    const oracle::AttentionRow<Real>& row = exact.rows[r];
    const std::vector<Real> w = oracle::weights(row.logits, exact.betas[r]);
    const Real max = oracle::state<Real>(row.logits).max;
    const Real moved = 4 * exact.betas[r] * logit_error<Arithmetic>(row, p.D);
    std::vector<bool> visible(index_of(p.M), false);
    for (std::size_t n = 0; n < row.count(); ++n) {
      const std::size_t at = r * index_of(p.M) + index_of(row.keys[n]);
      visible[index_of(row.keys[n])] = true;
      const Real y = exact.betas[r] * (max - row.logits.x[n]);
      Real bound = w[n] * (Contract<Arithmetic>::weight * (1 + y) + moved) + Contract<Arithmetic>::tiny;
      bound += (w[n] + bound) * storage_unit(type);
      if (type == DType::f16) bound += kTinyF16;
      const std::string what = "row " + std::to_string(r) + ", weight of key " + std::to_string(row.keys[n]);
      if (!expect_within<Real>(got[at], w[n], bound, what)) return;
    }
    for (std::size_t j = 0; j < index_of(p.M); ++j) {
      if (visible[j]) continue;
      ASSERT_EQ(got[r * index_of(p.M) + j], 0) << "row " << r << ", hidden key " << j;
    }
  }
}

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
        type == DType::f64 ? expect_weights_of_rows<double>(p, type, call)
                           : expect_weights_of_rows<float>(p, type, call);
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
        call.options.weight_rows = rows;
        call.options.weights = weights.view();
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
        const auto expect_unchanged = [&](const char* what, void (*drop)(AttentionOptions&)) {
          SCOPED_TRACE(what);
          Asking call(p, type, 5);
          drop(call.options);
          call.forward();
          expect_same({call.out.values(), call.stats}, expected);
        };
        const auto no_weights = [](AttentionOptions& o) { o.weight_rows = {}, o.weights = {}; };
        const auto no_top = [](AttentionOptions& o) { o.top_k = 0, o.top_keys = {}, o.top_weights = {}; };
        expect_unchanged("everything", [](AttentionOptions&) {});
        expect_unchanged("without weights", no_weights);
        expect_unchanged("without top_k", no_top);
        expect_unchanged("without column_sums", [](AttentionOptions& o) { o.column_sums = {}; });
        expect_unchanged("without tile_counts", [](AttentionOptions& o) { o.tile_counts = nullptr; });
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
        call.options.tile_counts = &counts;
        call.options.skip_epsilon = 0;
        call.forward();
        EXPECT_EQ(counts.tiles, tiles_of(p));
        EXPECT_EQ(counts.skipped, 0);
      }
    }
  });
}

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
              {out.data(), {1, 1, rows, 3}},
              {.rule = rule, .scale = 1.0, .tile_counts = &counts, .skip_epsilon = epsilon});
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
  call.options.tile_counts = &counts;
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
  call.options.threads = threads;
  call.forward();
  const Result expected{call.out.values(), call.stats};
  const std::size_t size = attention_workspace(call.q.view(), call.k.view(), call.v.view(), call.options);
  ASSERT_GT(size, 0U);
  std::vector<std::byte> buffer(size + shift + 64, std::byte{0xA5});
  call.options.workspace = std::span(buffer).subspan(shift, size);
  call.out.fill(kNaN);
  call.forward();
  expect_same({call.out.values(), call.stats}, expected);
  for (std::size_t n = 0; n < buffer.size(); ++n) {
    if (n >= shift && n < shift + size) continue;
    ASSERT_EQ(buffer[n], std::byte{0xA5}) << n;
  }
  call.options.workspace = std::span(buffer).subspan(shift, size - 1);
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
  return attention_workspace(q, k, k, {.rule = Rule::paper(), .causal = true, .threads = 1});
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
