// Attention with every normalizer whose weights may be 0: under every option, forward and backward, against
// the oracle; what is left out of its products; and that leaving out changes nothing.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "normalizer_cases.h"
#include "targets.h"

namespace whet {
namespace {

const char* const kNames[] = {"sparsemax",        "entmax15", "entmax:1.3", "top-k:3", "hard",
                              "straight-through", "relu",     "sigmoid",    "softpick"};
// Those of which backward leaves keys out.
const std::string kSparse[] = {"sparsemax", "entmax15", "entmax:1.3", "top-k:3", "hard", "relu"};

// ---- Against the oracle ----

// Outside the support gradients are exactly 0, not small.
void expect_zeros(const std::vector<double>& got, const std::vector<double>& expected, const char* what) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (expected[i] != 0) continue;
    ASSERT_EQ(got[i], 0) << what << " " << i;
  }
}

void check(const std::string& name, const oracle::Attention& p, const Expected& expected, DType type) {
  AttentionCall call(p, type, type);
  call.options.normalizer = Normalizer::parse(name);
  const SavedRows saved(type, p.rows(), saved_size(call.options));
  call.outputs.saved = saved.view();
  call.forward();
  expect_near(call.out.values(), expected.out, type, "out");
  for (const bool saves : {true, false}) {
    SCOPED_TRACE(saves ? "saved" : "found again");
    for (Placed* gradient : call.written_gradients()) gradient->fill(kNaN);
    if (!saves) call.outputs.saved = {};
    call.backward(BetaGradient::held);
    const oracle::Gradients<double>& g = expected.gradients;
    expect_near(call.dq.values(), g.dq, type, "dq");
    expect_near(call.dk.values(), g.dk, type, "dk");
    expect_near(call.dv.values(), g.dv, type, "dv");
    if (p.bias.given()) {
      expect_near(call.dbias.values(), oracle::reduced(p, g.dbias, p.bias.sizes), type, "dbias");
    }
    if (p.sinks.given()) expect_near(call.dsinks.values(), g.dsinks, type, "dsinks");
    if (p.query_scale.given()) {
      expect_near(call.dquery_scale.values(), oracle::reduced_rows(p, g.dquery_scale, p.query_scale.sizes),
                  type, "dquery_scale");
    }
    if (type == DType::f64 && std::ranges::find(kSparse, name) != std::end(kSparse)) {
      expect_zeros(call.dk.values(), g.dk, "dk");
      expect_zeros(call.dv.values(), g.dv, "dv");
    }
  }
}

// The rounding of 32 bits shows beta times in the weights of a rule that chose a large one.
bool has_rules(const OptionCase& option) { return option.name.starts_with("a rule"); }

// f64: every normalizer under every option; others: each option with a third of them in turn.
void check_options(const Shape& shape, DType type) {
  const std::vector<OptionCase> options = option_cases();
  for (std::size_t o = 0; o < options.size(); ++o) {
    if (type != DType::f64 && has_rules(options[o])) continue;
    Random random(static_cast<std::uint32_t>(o + 1));
    const oracle::Attention p = draw_with(options[o], random, shape, type, type);
    for (std::size_t n = 0; n < std::size(kNames); ++n) {
      if (type != DType::f64 && (o + n) % 3 != 0) continue;
      const std::string name = kNames[n];
      const Expected expected = expect(name, p);
      SCOPED_TRACE(options[o].name + ", " + name);
      for_each_target([&] { check(name, p, expected, type); });
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Units of 18 rows take the path of many, units of 8 that of few.
TEST(SparseAttention, EqualsTheOracleForEveryOptionInF64) {
  check_options({2, 4, 2, 9, 61, 8, 5}, DType::f64);
}
TEST(SparseAttention, EqualsTheOracleForEveryOptionInF32) {
  check_options({2, 4, 2, 9, 61, 16, 17}, DType::f32);
}
TEST(SparseAttention, EqualsTheOracleForEveryOptionInBF16) {
  check_options({2, 4, 2, 9, 40, 8, 5}, DType::bf16);
}
// Fewer keys than are written behind the end of a list, and the sink behind them.
TEST(SparseAttention, EqualsTheOracleForFewKeys) { check_options({2, 4, 2, 9, 7, 8, 5}, DType::f64); }
TEST(SparseAttention, EqualsTheOracleForFewQueries) { check_options({2, 4, 4, 8, 41, 5, 3}, DType::f32); }

// ---- What is left out ----

struct Gradients {
  std::vector<double> out, dq, dk, dv;
  TileCounts forward, backward;
};

Gradients gradients_of(const std::string& name, const oracle::Attention& p, DType type,
                       double skip_epsilon = 0x1p-24, int threads = 1, double dropout = 0) {
  AttentionCall call(p, type, type);
  call.options.normalizer = Normalizer::parse(name);
  call.options.skip_epsilon = skip_epsilon;
  call.options.dropout = dropout;
  call.options.dropout_seed = 5;
  call.execution.threads = threads;
  const SavedRows saved(type, p.rows(), saved_size(call.options));
  call.outputs.saved = saved.view();
  Gradients g;
  call.outputs.tile_counts = &g.forward;
  call.forward();
  attention_backward(call.q.view(), call.k.view(), call.v.view(), call.dout.view(), call.gradients(),
                     call.options, {.saved = call.outputs.saved, .tile_counts = &g.backward}, call.execution);
  g.out = call.out.values();
  g.dq = call.dq.values();
  g.dk = call.dk.values();
  g.dv = call.dv.values();
  return g;
}

bool same(const Gradients& a, const Gradients& b) {
  return same_bits(a.out, b.out) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

void expect_near(const Gradients& a, const Gradients& b, DType type) {
  expect_near(a.out, b.out, type, "out");
  expect_near(a.dq, b.dq, type, "dq");
  expect_near(a.dk, b.dk, type, "dk");
  expect_near(a.dv, b.dv, type, "dv");
}

TEST(SparseAttention, BackwardComputesNoTileOfRowsWithFewKeys) {
  Random random(1);
  oracle::Attention p = draw_problem(random, {1, 2, 1, 30, 700, 8, 8}, DType::f32, 6);
  p.k.values[0] = 40;  // no row without a positive logit
  for_each_target([&] {
    for (const std::string& name : kSparse) {
      SCOPED_TRACE(name);
      const Gradients all = gradients_of(name, p, DType::f32, 0), some = gradients_of(name, p, DType::f32);
      EXPECT_EQ(all.backward.skipped, 0);
      EXPECT_EQ(all.backward.tiles, 10 * 3);
      EXPECT_EQ(some.backward.tiles, all.backward.tiles);
      if (name == "relu") {
        EXPECT_EQ(some.backward.skipped, 0);  // half of the keys count
      } else {
        EXPECT_EQ(some.backward.skipped, some.backward.tiles);
      }
      expect_near(some, all, DType::f32);
    }
    for (const char* name : {"softmax", "sigmoid", "softpick", "straight-through"}) {
      EXPECT_EQ(gradients_of(name, p, DType::f32).backward.skipped, 0) << name;
    }
  });
}

// Keys that count lie in tiles 1 and 5 of 7, so many that rows aren't done key by key.
oracle::Attention two_tiles(DType type) {
  Random random(2);
  oracle::Attention p = draw_problem(random, {1, 1, 1, 20, 1700, 4, 6}, type);
  p.scale = 1;
  for (std::size_t i = 0; i < p.q.values.size(); ++i)
    p.q.values[i] = i % 4 == 0 ? 1 : p.q.values[i] * 0x1p-12;
  for (std::int64_t j = 0; j < p.M; ++j) {
    const bool counts = j / 256 == 1 || j / 256 == 5;
    p.k.values[index_of(4 * j)] = counts ? rounded(type, 5 + 0x1p-12 * static_cast<double>(j % 7)) : -9;
  }
  return p;
}

TEST(SparseAttention, SkippingTilesChangesNoBitOfTheGradients) {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    const oracle::Attention p = two_tiles(type);
    for_each_target([&] {
      for (const char* name : {"sparsemax", "entmax15", "top-k:400", "relu"}) {
        SCOPED_TRACE(std::string(name) + ", " + name_of(type));
        const Gradients all = gradients_of(name, p, type, 0), some = gradients_of(name, p, type);
        EXPECT_EQ(all.backward.skipped, 0);
        EXPECT_EQ(some.backward.tiles, 4 * 7);
        EXPECT_EQ(some.backward.skipped, 4 * 5);
        expect_near(some.out, all.out, type, "out");
        if (std::string(name) != "relu") continue;  // others' saved sums round apart
        EXPECT_TRUE(same(some, all));
      }
    });
  }
}

// Rows with few keys beside rows with many: both paths meet in dk and dv.
TEST(SparseAttention, RowsWithFewKeysAndWithManyMeet) {
  for (const DType type : {DType::f32, DType::f64}) {
    Random random(3);
    oracle::Attention p = draw_problem(random, {1, 2, 1, 25, 300, 8, 9}, type);
    for (std::size_t i = 0; i < p.q.values.size(); ++i) p.q.values[i] *= (i / 8) % 3 == 0 ? 0x1p-7 : 8;
    const Expected expected[] = {expect("sparsemax", p), expect("entmax15", p), expect("relu", p)};
    for_each_target([&] {
      check("sparsemax", p, expected[0], type);
      check("entmax15", p, expected[1], type);
      check("relu", p, expected[2], type);
    });
  }
}

TEST(SparseAttention, DropsTheSameWeightsKeyByKey) {
  Random random(4);
  const oracle::Attention p = draw_problem(random, {1, 2, 1, 20, 300, 8, 8}, DType::f64, 4);
  for_each_target([&] {
    for (const std::string& name : kSparse) {
      SCOPED_TRACE(name);
      expect_near(gradients_of(name, p, DType::f64, 0x1p-24, 1, 0.4),
                  gradients_of(name, p, DType::f64, 0, 1, 0.4), DType::f64);
    }
  });
}

TEST(SparseAttention, HasTheSameBitsForEveryNumberOfThreads) {
  for (const DType type : {DType::f32, DType::bf16}) {
    Random random(5);
    oracle::Attention p = draw_problem(random, {1, 2, 2, 130, 400, 8, 8}, type);
    for (std::size_t i = 0; i < p.q.values.size(); ++i) {
      p.q.values[i] = rounded(type, p.q.values[i] * ((i / 8) % 3 == 0 ? 0x1p-7 : 4));
    }
    p.causal = true;
    for_each_target([&] {
      for (const std::string& name : kSparse) {
        const Gradients one = gradients_of(name, p, type);
        for (const int threads : {2, 3}) {
          EXPECT_TRUE(same(gradients_of(name, p, type, 0x1p-24, threads), one)) << name;
        }
      }
    });
  }
}

// ---- What isn't finite ----

// NaN in V of a visible key shows in the output, even where its weight is 0; hidden, it doesn't.
TEST(SparseAttention, NotANumberShowsWhereItIsVisible) {
  Random random(6);
  oracle::Attention p = draw_problem(random, {1, 1, 1, 20, 600, 4, 4}, DType::f32, 4);
  p.causal = true;
  p.align = Align::end;
  oracle::Attention bad = p;
  bad.v.values[index_of(590 * 4)] = kNaN;  // visible from query 10 on
  for_each_target([&] {
    for (const std::string& name : kSparse) {
      SCOPED_TRACE(name);
      const Gradients clean = gradients_of(name, p, DType::f32), got = gradients_of(name, bad, DType::f32);
      for (std::int64_t i = 0; i < p.N; ++i) {
        EXPECT_EQ(std::isnan(got.out[index_of(4 * i)]), i >= 10) << i;
        if (i >= 10) continue;
        EXPECT_FALSE(std::isnan(got.dq[index_of(4 * i)])) << i;
        for (std::int64_t e = 0; e < 4; ++e) {
          EXPECT_NEAR(got.out[index_of(4 * i + e)], clean.out[index_of(4 * i + e)], 1e-5);
        }
      }
    }
  });
}

}  // namespace
}  // namespace whet
