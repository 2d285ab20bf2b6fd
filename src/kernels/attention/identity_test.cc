// Two ways to ask attention for the same thing: packed sequences and calls of their own, lengths and shorter
// tensors, windows and masks, shared and repeated key heads, scales. The same bits, except where a mask
// spells out what a window computes: there the contract.
//
// Up to core::kFewRows rows a key head take another road through the kernels than more: sums run in another
// order there, so calls share their bits only on the same road.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

std::vector<oracle::Rule> plain_rules() {
  std::vector<oracle::Rule> rules;
  for (const RuleCase& rule : rule_cases()) rules.push_back(rule.plain);
  return rules;
}

// Every rule in f32 and in one other type, which moves on with the target.
template <typename Body>
void for_each_target_rule_and_type(const Body& body) {
  std::size_t first = 0;
  for_each_target([&] {
    std::size_t turn = first++;
    for (const oracle::Rule& rule : plain_rules()) {
      const DType other = kTypes[1 + turn++ % 3];
      for (const DType type : {DType::f32, other}) {
        SCOPED_TRACE("rule " + library_rule(rule).name() + ", element type " +
                     std::to_string(static_cast<int>(type)));
        body(rule, type);
      }
    }
  });
}

// Reaches of causal and window, with both alignments.
struct Reach {
  bool causal;
  Align align;
  std::int64_t left, right;
};

constexpr Reach kReaches[] = {
    {false, Align::start, -1, -1}, {true, Align::start, -1, -1}, {true, Align::end, -1, -1},
    {false, Align::start, 3, 2},   {false, Align::end, 40, 0},   {true, Align::end, 5, 7},
    {false, Align::end, -1, 4},    {true, Align::start, 2, -1},  {false, Align::start, 0, 0},
    {false, Align::end, 260, 300},
};

void set_reach(oracle::Attention& p, const Reach& reach) {
  p.causal = reach.causal;
  p.align = reach.align;
  p.window_left = reach.left;
  p.window_right = reach.right;
}

std::string describe(const Reach& reach) {
  return std::string(reach.causal ? "causal, " : "") + (reach.align == Align::end ? "end" : "start") +
         ", window " + std::to_string(reach.left) + " " + std::to_string(reach.right);
}

// ---- Positions and masks ----

// The words of attention.h, as a mask.
oracle::Array mask_of(const Reach& reach, std::int64_t N, std::int64_t M) {
  oracle::Array mask{{1, 1, N, M}, {}};
  for (std::int64_t i = 0; i < N; ++i) {
    const std::int64_t position = reach.align == Align::start ? i : i + M - N;
    for (std::int64_t j = 0; j < M; ++j) {
      const bool after = reach.causal && j > position;
      const bool left = reach.left >= 0 && j < position - reach.left;
      const bool right = reach.right >= 0 && j > position + reach.right;
      mask.values.push_back(after || left || right ? 0 : 1);
    }
  }
  return mask;
}

TEST(AttentionIdentity, WindowsAreMasks) {
  const std::vector<oracle::Rule> rules = plain_rules();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const Reach& reach : kReaches) {
      for (const auto& [N, M] :
           {std::pair<std::int64_t, std::int64_t>{7, 7}, {5, 31}, {31, 5}, {9, 270}, {1, 300}}) {
        for (const DType type : {DType::f32, DType::f64}) {
          SCOPED_TRACE(describe(reach) + ", N " + std::to_string(N) + ", M " + std::to_string(M));
          Random random(1);
          oracle::Attention by_mask = draw_problem(random, {1, 2, 1, N, M, 4, 3}, type);
          by_mask.rules = {rules[turn++ % rules.size()]};
          oracle::Attention by_window = by_mask;
          by_mask.mask = mask_of(reach, N, M);
          set_reach(by_window, reach);
          // Against the oracle of the mask, both.
          expect_contract(by_mask, run(by_mask, type), type);
          expect_contract(by_mask, run(by_window, type), type);
        }
      }
    }
  });
}

// ---- Packed sequences ----

struct Packing {
  const char* name;
  std::vector<std::int64_t> query_starts, key_starts;
  bool same_bits;  // the whole and its parts take the same road through the kernels
};

// For two query heads a key head. Sequences without queries and without keys are among them.
const Packing kPackings[] = {
    {"few", {0, 3, 3, 8, 9}, {0, 4, 6, 6, 306}, true},
    {"many", {0, 9, 9, 24, 49}, {0, 4, 6, 6, 306}, true},
    {"few and many", {0, 3, 3, 8, 9, 22}, {0, 4, 6, 6, 13, 313}, false},
};

void check_packing(const Packing& packing, const Reach& reach, const oracle::Rule& rule, DType type) {
  const std::int64_t N = packing.query_starts.back(), M = packing.key_starts.back();
  Random random(2);
  oracle::Attention packed = draw_problem(random, {1, 4, 2, N, M, 5, 6}, type);
  packed.rules = {rule};
  packed.query_scale = draw_array(random, {1, 4, N}, DType::f32, 0.5);
  packed.bias = draw_array(random, {1, 1, N, M}, DType::f32, 0.5);
  packed.sinks = {{4}, {0.25, -1, -kInfinity, 1}};
  set_reach(packed, reach);
  const oracle::Attention whole = packed;
  packed.query_starts = packing.query_starts;
  packed.key_starts = packing.key_starts;
  const Result got = run(packed, type);
  expect_contract(packed, got, type);
  for (std::size_t s = 0; s + 1 < packing.query_starts.size() && packing.same_bits; ++s) {
    SCOPED_TRACE("sequence " + std::to_string(s));
    const std::int64_t first = packing.query_starts[s];
    const oracle::Attention alone = with_keys(with_queries(whole, first, packing.query_starts[s + 1]),
                                              packing.key_starts[s], packing.key_starts[s + 1]);
    const Result expected = run(alone, type);
    oracle::for_each_row(alone, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
      EXPECT_TRUE(same_row(got, packed.row(b, h, first + i), expected, alone.row(b, h, i)));
    });
  }
}

TEST(AttentionIdentity, PackedSequencesAreCallsOfTheirOwn) {
  const std::vector<oracle::Rule> rules = plain_rules();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const Reach& reach : kReaches) {
      for (const Packing& packing : kPackings) {
        const DType type = kTypes[turn % 4];
        const oracle::Rule& rule = rules[turn++ % rules.size()];
        SCOPED_TRACE(std::string(packing.name) + ", " + describe(reach) + ", rule " +
                     library_rule(rule).name() + ", element type " + std::to_string(static_cast<int>(type)));
        check_packing(packing, reach, rule, type);
        check_packing(packing, reach, rule, DType::f32);
      }
    }
  });
}

// ---- Lengths ----

void check_lengths(const Reach& reach, const oracle::Rule& rule, DType type, std::int64_t N) {
  Random random(3);
  oracle::Attention p = draw_problem(random, {4, 2, 1, N, 300, 3, 4}, type);
  p.rules = {rule};
  p.bias = draw_array(random, {4, 1, 1, 300}, DType::f32, 0.5);
  set_reach(p, reach);
  const oracle::Attention whole = p;
  p.lengths = {300, 17, 0, 260};
  const Result got = run(p, type);
  for (std::int64_t b = 0; b < 4; ++b) {
    const oracle::Attention cut =
        with_keys(with_batches(whole, b, b + 1), 0, p.lengths[static_cast<std::size_t>(b)]);
    const Result expected = run(cut, type);
    for (std::size_t r = 0; r < expected.rows(); ++r) {
      EXPECT_TRUE(same_row(got, p.row(b, 0, 0) + r, expected, r));
    }
  }
}

TEST(AttentionIdentity, LengthsOfBatchEntriesAreShorterKeys) {
  const std::vector<oracle::Rule> rules = plain_rules();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const Reach& reach : kReaches) {
      for (const std::int64_t N : {1, 9}) {
        const DType type = kTypes[turn % 4];
        const oracle::Rule& rule = rules[turn++ % rules.size()];
        SCOPED_TRACE(describe(reach) + ", N " + std::to_string(N) + ", rule " + library_rule(rule).name() +
                     ", element type " + std::to_string(static_cast<int>(type)));
        check_lengths(reach, rule, type, N);
        check_lengths(reach, rule, DType::f32, N);
      }
    }
  });
}

TEST(AttentionIdentity, LengthsOfRowsAreShorterKeys) {
  const std::int64_t lengths[] = {300, 0, 1, 17, 255, 256, 257, 64, 299, 100};
  for_each_target_rule_and_type([&](const oracle::Rule& rule, DType type) {
    for (const std::int64_t N : {5, 10}) {
      Random random(4);
      oracle::Attention p = draw_problem(random, {1, 2, 1, N, 300, 3, 4}, type);
      p.rules = {rule};
      const oracle::Attention whole = p;
      for (std::size_t r = 0; r < static_cast<std::size_t>(p.rows()); ++r)
        p.lengths.push_back(lengths[r % 10]);
      const Result got = run(p, type);
      for (const std::int64_t length : lengths) {
        const Result expected = run(with_keys(whole, 0, length), type);
        for (std::size_t r = 0; r < got.rows(); ++r) {
          if (p.lengths[r] == length) {
            EXPECT_TRUE(same_row(got, r, expected, r));
          }
        }
      }
    }
  });
}

// A length a row moves no place: align = end counts from the last key there is.
TEST(AttentionIdentity, LengthsOfRowsLeavePlacesAlone) {
  for_each_target([] {
    for (const Reach& reach : kReaches) {
      Random random(5);
      oracle::Attention p = draw_problem(random, {2, 2, 1, 5, 31, 5, 6}, DType::f32);
      set_reach(p, reach);
      oracle::Attention by_mask = p;
      set_reach(by_mask, kReaches[0]);
      by_mask.mask = {{2, 2, 5, 31}, {}};
      for (std::int64_t r = 0; r < p.rows(); ++r) p.lengths.push_back(r * 7 % 32);
      const oracle::Array reached = mask_of(reach, 5, 31);
      oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
        for (std::int64_t j = 0; j < 31; ++j) {
          by_mask.mask.values.push_back(j < p.lengths[p.row(b, h, i)] ? reached.at({0, 0, i, j}) : 0);
        }
      });
      SCOPED_TRACE(describe(reach));
      expect_contract(by_mask, run(p));
    }
  });
}

// ---- Key heads ----

oracle::Array repeated_heads(const oracle::Array& array, std::int64_t times) {
  oracle::Array all{array.sizes, {}};
  all.sizes[1] *= times;
  const std::size_t head = static_cast<std::size_t>(array.sizes[2] * array.sizes[3]);
  for (std::size_t at = 0; at < array.values.size(); at += head) {
    for (std::int64_t n = 0; n < times; ++n) {
      const auto from = array.values.begin() + static_cast<std::ptrdiff_t>(at);
      all.values.insert(all.values.end(), from, from + static_cast<std::ptrdiff_t>(head));
    }
  }
  return all;
}

// Few rows a key head with either, or many with either.
TEST(AttentionIdentity, SharedKeyHeadsAreRepeatedOnes) {
  for_each_target_rule_and_type([](const oracle::Rule& rule, DType type) {
    for (const Shape& shape :
         {Shape{2, 6, 2, 5, 40, 5, 6}, Shape{1, 3, 1, 17, 300, 5, 6}, Shape{1, 3, 1, 1, 600, 4, 3}}) {
      Random random(6);
      oracle::Attention shared = draw_problem(random, shape, type);
      shared.rules = {rule};
      shared.causal = true;
      shared.align = Align::end;
      shared.bias = draw_array(random, {1, shape.H, 1, shape.M}, DType::f32);
      oracle::Attention repeated = shared;
      repeated.K = shape.H;
      repeated.k = repeated_heads(shared.k, shape.H / shape.K);
      repeated.v = repeated_heads(shared.v, shape.H / shape.K);
      EXPECT_TRUE(same(run(shared, type), run(repeated, type)));
    }
  });
}

TEST(AttentionIdentity, HeadRulesAreTheRuleOfEachHead) {
  const std::vector<oracle::Rule> rules = plain_rules();
  const auto H = static_cast<std::int64_t>(rules.size());
  for_each_target([&] {
    for (const DType type : kTypes) {
      for (const Shape& shape : {Shape{2, H, 3, 5, 40, 5, 6}, Shape{1, H, 1, 1, 300, 5, 6}}) {
        Random random(7);
        oracle::Attention p = draw_problem(random, shape, type);
        p.rules = rules;
        const Result got = run(p, type);
        expect_contract(p, got, type);
        for (std::int64_t h = 0; h < H; ++h) {
          SCOPED_TRACE("rule " + library_rule(rules[static_cast<std::size_t>(h)]).name());
          p.rules = {rules[static_cast<std::size_t>(h)]};
          const Result expected = run(p, type);
          for (std::int64_t b = 0; b < p.B; ++b) {
            for (std::int64_t i = 0; i < p.N; ++i) {
              EXPECT_TRUE(same_row(got, p.row(b, h, i), expected, p.row(b, h, i)));
            }
          }
        }
      }
    }
  });
}

// ---- Scales ----

// Powers of two round nothing: in q, in scale and in query_scale they are one.
TEST(AttentionIdentity, QueryScaleIsAScaledQuery) {
  for_each_target_rule_and_type([](const oracle::Rule& rule, DType type) {
    Random random(8);
    oracle::Attention p = draw_problem(random, {2, 2, 1, 9, 37, 5, 6}, type);
    p.rules = {rule};
    p.scale = 0.375;
    oracle::Attention scaled = p;
    scaled.query_scale = {{2, 2, 9}, {}};
    const double factors[] = {1, 2, -0.5, 0.25, -1, 0};
    oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
      const double factor = factors[p.row(b, h, i) % 6];
      scaled.query_scale.values.push_back(factor);
      for (std::int64_t d = 0; d < p.D; ++d) p.q.values[p.q.position({b, h, i, d})] *= factor;
    });
    const Result got = run(scaled, type);
    EXPECT_TRUE(same(got, run(p, type)));
    expect_contract(scaled, got, type);
  });
}

TEST(AttentionIdentity, QueryScaleIsRepeatedAlongAxesOfOne) {
  for_each_target([] {
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{1, 1, 1}, {2, 1, 1}, {1, 3, 1}, {1, 1, 7}, {2, 1, 7}, {2, 3, 7}}) {
      Random random(9);
      oracle::Attention p = draw_problem(random, {2, 3, 1, 7, 37, 5, 6}, DType::f32);
      p.query_scale = draw_array(random, sizes, DType::f32);
      oracle::Attention full = p;
      full.query_scale = {{2, 3, 7}, {}};
      oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
        full.query_scale.values.push_back(p.query_scale.at({b, h, i}));
      });
      const Result got = run(p);
      EXPECT_TRUE(same(got, run(full)));
      expect_contract(p, got);
    }
  });
}

TEST(AttentionIdentity, DefaultScaleIsOneOverTheRootOfD) {
  for_each_target([] {
    for (const std::int64_t D : {1, 5, 64}) {
      Random random(10);
      oracle::Attention p = draw_problem(random, {1, 2, 1, 7, 37, D, 6}, DType::f32);
      p.scale = 1 / std::sqrt(static_cast<double>(D));
      AttentionCall call(p, DType::f32, DType::f32);
      call.options.scale.reset();
      call.options.skip_epsilon = 0;
      call.forward();
      EXPECT_TRUE(same({call.out.values(), call.stats}, run(p)));
    }
  });
}

// Side arrays in a 16-bit type are the same numbers in f32.
TEST(AttentionIdentity, SideArraysMayBeInTheTypeOfQ) {
  for_each_target([] {
    for (const DType type : {DType::bf16, DType::f16}) {
      Random random(11);
      oracle::Attention p = draw_problem(random, {2, 2, 1, 7, 37, 5, 6}, type);
      p.query_scale = draw_array(random, {2, 1, 7}, type);
      p.bias = draw_array(random, {1, 2, 7, 37}, type);
      p.sinks = draw_array(random, {2}, type);
      AttentionCall call(p, type, type);
      call.options.skip_epsilon = 0;
      call.forward();
      EXPECT_TRUE(same({call.out.values(), call.stats}, run(p, type)));
    }
  });
}

}  // namespace
}  // namespace whet
