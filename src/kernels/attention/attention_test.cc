// Attention: the documented accuracy for every rule, option, size and element type on every target,
// the statistics, and the same bits whatever the number of threads.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "cases.h"
#include "contract.h"
#include "targets.h"

namespace whet {
namespace {

std::string describe(const Shape& s) {
  std::string text = "B H K N M D E =";
  for (std::int64_t size : {s.B, s.H, s.K, s.N, s.M, s.D, s.E}) text += " " + std::to_string(size);
  return text;
}

// Output and statistics of a call that was made.
template <typename Arithmetic>
void expect_contract_of(const oracle::Attention& p, const AttentionCall& call) {
  using Real = typename Contract<Arithmetic>::Real;
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  expect_output<Arithmetic>(p, exact, call.out.values(), call.out.type());
  EXPECT_TRUE(call.out.gaps_are_intact());
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    SCOPED_TRACE("batch " + std::to_string(b) + ", head " + std::to_string(h) + ", query " +
                 std::to_string(i));
    expect_attention_stats<Arithmetic>(exact.rows[r], p.D, p.rule(h), call.stats[r]);
  });
}

void check(const oracle::Attention& p, DType type, DType side, const Layouts& layouts = {}) {
  AttentionCall call(p, type, side, layouts);
  call.forward();
  if (type == DType::f64) {
    expect_contract_of<double>(p, call);
  } else {
    expect_contract_of<float>(p, call);
  }
}

void check(const oracle::Attention& p, DType type = DType::f32) { check(p, type, type); }

// ---- Rules and sizes ----

void check_every_rule(const Shape& shape, DType type) {
  Random random(1);
  for (double sharpness : {0.5, 1.5, 5.0}) {
    oracle::Attention p = draw_problem(random, shape, type, sharpness);
    for (const RuleCase& rule : rule_cases()) {
      p.rules = {rule.plain};
      SCOPED_TRACE(rule.rule.name() + ", sharpness " + std::to_string(sharpness));
      for_each_target([&] { check(p, type); });
    }
  }
}

TEST(AttentionContract, HoldsForEveryRuleInF32) { check_every_rule({2, 4, 2, 7, 61, 16, 12}, DType::f32); }
TEST(AttentionContract, HoldsForEveryRuleInF64) { check_every_rule({1, 2, 1, 5, 37, 8, 8}, DType::f64); }
TEST(AttentionContract, HoldsForEveryRuleInBF16) { check_every_rule({1, 4, 2, 7, 41, 16, 12}, DType::bf16); }
TEST(AttentionContract, HoldsForEveryRuleInF16) { check_every_rule({1, 4, 2, 7, 41, 16, 12}, DType::f16); }

// Several rows a size, so that the plain evaluation isn't exact by luck.
void check_size(const Shape& shape, DType type, Random& random) {
  oracle::Attention p = draw_problem(random, shape, type, 2);
  for (const RuleCase& rule : {RuleCase{Rule::none(), {}}, paper_case()}) {
    p.rules = {rule.plain};
    SCOPED_TRACE(describe(shape) + ", rule " + rule.rule.name());
    for_each_target([&] { check(p, type); });
  }
}

TEST(AttentionContract, HoldsForEverySizeOfKeysAndValues) {
  Random random(2);
  const std::vector<std::int64_t> sizes = {1,  2,  3,  4,  5,  7,  8,   9,   15,  16,  17,
                                           31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256};
  for (std::size_t n = 0; n < sizes.size(); ++n) {
    const std::int64_t other = sizes[(n * 7 + 3) % sizes.size()];
    check_size({2, 2, 1, 7, 19, sizes[n], other}, DType::f32, random);
    check_size({1, 2, 2, 2, 19, sizes[n], sizes[n]}, DType::bf16, random);
    if (sizes[n] < 70) check_size({1, 2, 1, 3, 19, other, sizes[n]}, DType::f64, random);
  }
}

// Every path of both kernels, up to the largest: few rows and many, keys or values, or both.
TEST(AttentionContract, HoldsForLargeHeads) {
  Random random(12);
  const std::int64_t sizes[] = {257, 511, 512, 576, 1000, kMaxHeadSize};
  for (const std::int64_t size : sizes) {
    for (const std::int64_t queries : {2, 9}) {
      check_size({1, 2, 1, queries, 19, size, 5}, DType::f32, random);
      check_size({1, 2, 1, queries, 19, 5, size}, DType::bf16, random);
      check_size({1, 2, 2, queries, 19, size, size}, DType::f16, random);
    }
  }
  check_size({1, 16, 1, 1, 300, 576, 512}, DType::f32, random);
  check_size({1, 1, 1, 20, 300, 576, 512}, DType::f32, random);
  check_size({1, 1, 1, 3, 19, 577, 513}, DType::f64, random);
  check_size({1, 1, 1, 17, 19, 577, 513}, DType::f64, random);
}

TEST(AttentionContract, HoldsForEveryNumberOfKeys) {
  Random random(3);
  for (std::int64_t keys :
       {0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 61, 127, 255, 256, 257, 509, 512, 513}) {
    check_size({2, 2, 1, 7, keys, 9, 5}, DType::f32, random);
    if (keys < 300) check_size({1, 2, 2, 2, keys, 4, 3}, DType::f64, random);
    check_size({1, 2, 1, 1, keys, 16, 16}, DType::f16, random);
  }
}

TEST(AttentionContract, HoldsForEveryNumberOfQueries) {
  Random random(4);
  for (std::int64_t queries : {0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 47, 48, 49, 97, 257}) {
    check_size({1, 4, 2, queries, 23, 9, 5}, DType::f32, random);
  }
}

TEST(AttentionContract, HoldsForEveryGroupOfHeads) {
  Random random(5);
  for (std::int64_t key_heads : {1, 2, 3, 6}) {
    for (std::int64_t queries : {1, 8}) {
      check_size({2, 6, key_heads, queries, 37, 16, 8}, DType::f32, random);
    }
  }
}

TEST(AttentionContract, HoldsForManyKeysAndQueries) {
  Random random(6);
  oracle::Attention p = draw_problem(random, {1, 1, 1, 70, 1500, 64, 64}, DType::f32, 2);
  p.rules = {paper_case().plain};
  for_each_target([&] { check(p); });
}

TEST(AttentionContract, HoldsForOneQueryAndManyKeys) {
  Random random(7);
  oracle::Attention p = draw_problem(random, {2, 6, 2, 1, 1543, 32, 16}, DType::f32);
  for (const RuleCase& rule : rule_cases()) {
    p.rules = {rule.plain};
    SCOPED_TRACE(rule.rule.name());
    for_each_target([&] { check(p); });
  }
}

TEST(AttentionContract, HoldsForOneKey) {
  Random random(8);
  oracle::Attention p = draw_problem(random, {1, 2, 1, 3, 1, 8, 8}, DType::f32);
  for (bool sink : {false, true}) {
    if (sink) p.sinks = draw_array(random, {2}, DType::f32);
    for (const RuleCase& rule : rule_cases()) {
      p.rules = {rule.plain};
      SCOPED_TRACE(rule.rule.name() + (sink ? ", with a sink" : ""));
      for_each_target([&] { check(p); });
    }
  }
}

// ---- Options ----

void check_every_option(DType type, DType side, const Shape& shape) {
  Random random(9);
  for (const OptionCase& option : option_cases()) {
    oracle::Attention p = draw_with(option, random, shape, type, side);
    std::vector<RuleCase> rules = {{Rule::none(), {}},
                                   paper_case(),
                                   {Rule::log_length(4), {Rule::Kind::log_length, 4}},
                                   {Rule::target_entropy(0.7), {Rule::Kind::target_entropy, 0.7}},
                                   {Rule::target_peak(0.7), {Rule::Kind::target_peak, 0.7}}};
    if (p.rules.size() > 1) rules.resize(1);
    for (const RuleCase& rule : rules) {
      if (p.rules.size() == 1) p.rules = {rule.plain};
      SCOPED_TRACE(option.name + ", rule " + rule.rule.name());
      for_each_target([&] { check(p, type, side); });
    }
  }
}

TEST(AttentionOption, HoldsInF32) { check_every_option(DType::f32, DType::f32, {2, 4, 2, 13, 29, 12, 20}); }
TEST(AttentionOption, HoldsInF64) { check_every_option(DType::f64, DType::f64, {2, 4, 2, 8, 9, 4, 4}); }
TEST(AttentionOption, HoldsInBF16) { check_every_option(DType::bf16, DType::bf16, {2, 4, 2, 9, 21, 8, 8}); }
TEST(AttentionOption, HoldsInF16WithSideArraysInF32) {
  check_every_option(DType::f16, DType::f32, {2, 4, 2, 9, 21, 8, 8});
}

// Tiles of 256 keys, some beyond reach, some cut: the same options where there are several.
TEST(AttentionOption, HoldsForManyKeys) {
  Random random(10);
  for (const OptionCase& option : option_cases()) {
    oracle::Attention p = draw_with(option, random, {2, 4, 2, 8, 300, 8, 8}, DType::f32, DType::f32);
    SCOPED_TRACE(option.name);
    for_each_target([&] { check(p); });
  }
}

TEST(AttentionOption, HoldsForCausalSquares) {
  Random random(11);
  oracle::Attention p = draw_problem(random, {1, 1, 1, 390, 390, 8, 8}, DType::f32, 2);
  p.causal = true;
  p.rules = {paper_case().plain};
  for (std::int64_t window : {-1, 37, 300}) {
    p.window_left = window;
    SCOPED_TRACE("window " + std::to_string(window));
    for_each_target([&] { check(p); });
  }
}

// ---- NaN ----

// What notices NaN, and at which lane, differs with and without statistics.
TEST(AttentionNaN, BreaksItsRowAtEveryNumberOfKeysAlsoWithoutStats) {
  for_each_target([] {
    Random random(12);
    for (std::int64_t queries : {1, 5, 24}) {
      for (std::int64_t keys = 1; keys <= 35; ++keys) {
        for (DType type : {DType::f32, DType::f64}) {
          oracle::Attention p = draw_problem(random, {1, 2, 1, queries, keys, 3, 2}, type);
          for (bool by_query : {true, false}) {
            const std::size_t query = p.q.position({0, 0, queries / 2, 0});
            const std::size_t key = p.k.position({0, 0, keys - 1, 0});
            (by_query ? p.q.values[query] : p.k.values[key]) = kNaN;
            AttentionCall call(p, type, type);
            call.outputs.stats = {};
            call.forward();
            const std::vector<double> out = call.out.values();
            for (std::int64_t r = 0; r < p.rows(); ++r) {
              const bool broken = !by_query || r == queries / 2;
              ASSERT_EQ(std::isnan(out[static_cast<std::size_t>(2 * r)]), broken)
                  << "N " << queries << ", M " << keys << ", row " << r << ", type " << static_cast<int>(type)
                  << (by_query ? ", NaN in a query" : ", NaN in the last key");
            }
            (by_query ? p.q.values[query] : p.k.values[key]) = 0.5;
          }
        }
      }
    }
  });
}

// ---- Bits ----

struct Bits {
  std::vector<std::byte> out;
  std::vector<double> stats;

  friend bool operator==(const Bits& a, const Bits& b) {
    return a.out == b.out &&
           std::memcmp(a.stats.data(), b.stats.data(), a.stats.size() * sizeof(double)) == 0;
  }
};

Bits bits_of(const oracle::Attention& p, DType type, int threads) {
  AttentionCall call(p, type, type);
  call.execution.threads = threads;
  call.forward();
  Bits bits{call.out.bits(), std::vector<double>(call.stats.size() * sizeof(RowStats) / sizeof(double))};
  std::memcpy(bits.stats.data(), call.stats.data(), call.stats.size() * sizeof(RowStats));
  return bits;
}

std::vector<std::byte> bits_of_output_alone(const oracle::Attention& p, DType type) {
  AttentionCall call(p, type, type);
  call.outputs = {};
  call.forward();
  return call.out.bits();
}

void check_bits(const oracle::Attention& p, DType type) {
  const Bits one = bits_of(p, type, 1);
  for (int threads : {1, 2, 3, 7, 0}) {
    EXPECT_TRUE(bits_of(p, type, threads) == one) << threads << " threads";
  }
  EXPECT_TRUE(bits_of_output_alone(p, type) == one.out) << "without stats";
}

TEST(AttentionBits, DontDependOnThreadsRepetitionOrStats) {
  const std::vector<Shape> shapes = {{2, 4, 2, 37, 150, 16, 8},
                                     {1, 1, 1, 1, 5000, 32, 16},
                                     {1, 2, 1, 3, 1200, 8, 8},
                                     {1, 1, 1, 130, 300, 8, 8}};
  for_each_target([&] {
    Random random(19);
    for (const Shape& shape : shapes) {
      for (DType type : {DType::f32, DType::f64, DType::bf16}) {
        oracle::Attention p = draw_problem(random, shape, type, 3);
        for (const RuleCase& rule :
             {RuleCase{Rule::none(), {}}, paper_case(),
              RuleCase{Rule::target_entropy(0.5), {Rule::Kind::target_entropy, 0.5}}}) {
          if (type != DType::f32 && rule.rule != Rule::paper()) continue;
          p.rules = {rule.plain};
          p.causal = rule.rule == Rule::paper();
          p.align = Align::end;
          SCOPED_TRACE(describe(shape) + ", type " + std::to_string(static_cast<int>(type)) + ", rule " +
                       rule.rule.name());
          check_bits(p, type);
        }
      }
    }
  });
}

TEST(AttentionBits, DontDependOnThreadsForAnyOption) {
  for_each_target([] {
    Random random(20);
    for (const OptionCase& option : option_cases()) {
      SCOPED_TRACE(option.name);
      check_bits(draw_with(option, random, {2, 4, 2, 20, 300, 8, 8}, DType::f32, DType::f32), DType::f32);
    }
  });
}

}  // namespace
}  // namespace whet
