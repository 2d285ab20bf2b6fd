// The gradients of attention: against the oracle for every rule, option, size, layout and element type on
// every target, against finite differences of the forward pass, and their promises about hidden positions,
// saved statistics and threads.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "cases.h"
#include "contract.h"
#include "targets.h"

namespace whet {
namespace {

constexpr BetaGradient kBoth[] = {BetaGradient::through_rule, BetaGradient::held};

const char* name_of(BetaGradient mode) { return mode == BetaGradient::held ? "held" : "through the rule"; }

// Rows of a larger beta get no dout. Where few keys nearly tie, a target rule takes a beta of hundreds or
// thousands, the rounding of a logit shows that many times over, and one such row would decide by its luck
// about the largest error of the kernel and of the plain evaluation.
constexpr double kLargeBeta = 8;

void calm(oracle::Attention& p, const std::vector<double>& betas, double large = kLargeBeta) {
  for (std::size_t n = 0; n < p.dout.values.size(); ++n) {
    if (betas[n / static_cast<std::size_t>(p.E)] > large) p.dout.values[n] = 0;
  }
}

std::vector<double> betas_of(const oracle::Attention& p, DType type, DType side) {
  AttentionCall call(p, type, side);
  call.forward();
  return call.betas();
}

// The bound, of each of dq, dk, dv, dbias, dsinks, dquery_scale: the largest error is at most twice that of
// the plain evaluation in the same arithmetic, plus 8 units of what the terms of the gradient's largest
// element add up to without their signs. (16-bit: then rounded.) Both with what forward saved and without.
template <typename Arithmetic>
void check_of(oracle::Attention p, DType type, DType side, const Layouts& layouts) {
  using Real = typename Contract<Arithmetic>::Real;
  calm(p, betas_of(p, type, side));
  AttentionCall call(p, type, side, layouts);
  call.forward();
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  for (BetaGradient mode : kBoth) {
    const ExpectedGradients<Arithmetic> expected(p, exact, mode == BetaGradient::through_rule);
    for (bool saved : {true, false}) {
      SCOPED_TRACE(std::string(name_of(mode)) + (saved ? ", saved" : ""));
      for (Placed* gradient : call.written_gradients()) gradient->fill(kNaN);
      const View kept = std::exchange(call.outputs.saved, saved ? call.outputs.saved : View{});
      call.backward(mode);
      call.outputs.saved = kept;
      expected.expect(call);
    }
  }
}

void check(const oracle::Attention& p, DType type, DType side, const Layouts& layouts = {}) {
  if (type == DType::f64) {
    check_of<double>(p, type, side, layouts);
  } else {
    check_of<float>(p, type, side, layouts);
  }
}

void check(const oracle::Attention& p, DType type = DType::f32) { check(p, type, type); }

// ---- Rules and sizes ----

void check_every_rule(const Shape& shape, DType type) {
  Random random(1);
  for (double sharpness : {0.5, 2.0}) {
    oracle::Attention p = draw_problem(random, shape, type, sharpness);
    for (const RuleCase& rule : rule_cases()) {
      p.rules = {rule.plain};
      SCOPED_TRACE(rule.rule.name() + ", sharpness " + std::to_string(sharpness));
      for_each_target([&] { check(p, type); });
    }
  }
}

TEST(AttentionGradient, EqualsTheOracleForEveryRuleInF32) {
  check_every_rule({2, 4, 2, 7, 41, 16, 12}, DType::f32);
}
TEST(AttentionGradient, EqualsTheOracleForEveryRuleInF64) {
  check_every_rule({1, 2, 1, 5, 21, 8, 8}, DType::f64);
}
TEST(AttentionGradient, EqualsTheOracleForEveryRuleInBF16) {
  check_every_rule({1, 4, 2, 7, 31, 8, 12}, DType::bf16);
}
TEST(AttentionGradient, EqualsTheOracleForEveryRuleInF16) {
  check_every_rule({1, 2, 2, 7, 31, 8, 12}, DType::f16);
}

void check_size(const Shape& shape, DType type, Random& random) {
  oracle::Attention p = draw_problem(random, shape, type, 1.5);
  p.rules = {paper_case().plain};
  SCOPED_TRACE("B H K N M D E = " + std::to_string(shape.B) + " " + std::to_string(shape.H) + " " +
               std::to_string(shape.K) + " " + std::to_string(shape.N) + " " + std::to_string(shape.M) + " " +
               std::to_string(shape.D) + " " + std::to_string(shape.E));
  for_each_target([&] { check(p, type); });
}

TEST(AttentionGradient, EqualsTheOracleForEverySize) {
  Random random(2);
  const std::vector<std::int64_t> sizes = {1,  2,  3,  4,  5,  7,   8,   9,   15,  16,
                                           17, 31, 33, 64, 65, 128, 256, 257, 512, 576};
  for (std::size_t n = 0; n < sizes.size(); ++n) {
    const std::int64_t other = sizes[(n * 5 + 3) % sizes.size()];
    check_size({1, 2, 1, 7, 13, sizes[n], other}, DType::f32, random);
  }
  for (std::int64_t keys : {0, 1, 2, 5, 8, 15, 16, 17, 33, 255, 256, 257, 601}) {
    check_size({1, 2, 1, 7, keys, 5, 9}, DType::f32, random);
  }
  for (std::int64_t queries : {0, 1, 2, 5, 6, 7, 12, 13, 48, 49, 131}) {
    check_size({2, 2, 2, queries, 19, 9, 5}, DType::f32, random);
  }
  for (std::int64_t key_heads : {1, 2, 6}) check_size({2, 6, key_heads, 5, 19, 8, 8}, DType::f32, random);
  check_size({1, 6, 2, 1, 1031, 16, 16}, DType::f32, random);
}

TEST(AttentionGradient, EqualsTheOracleForManyQueriesAndKeys) {
  Random random(3);
  oracle::Attention p = draw_problem(random, {1, 2, 1, 70, 700, 32, 32}, DType::f32, 2);
  p.rules = {paper_case().plain, {Rule::Kind::target_entropy, 0.8}};
  for_each_target([&] { check(p); });
}

// ---- Options and layouts ----

void check_every_option(DType type, DType side, const Shape& shape) {
  Random random(4);
  for (const OptionCase& option : option_cases()) {
    oracle::Attention p = draw_with(option, random, shape, type, side);
    std::vector<RuleCase> rules = {paper_case(),
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

TEST(AttentionGradientOption, HoldsInF32) {
  check_every_option(DType::f32, DType::f32, {2, 4, 2, 13, 21, 8, 12});
}
TEST(AttentionGradientOption, HoldsInF64) {
  check_every_option(DType::f64, DType::f64, {2, 4, 2, 8, 11, 4, 6});
}
TEST(AttentionGradientOption, HoldsInBF16) {
  check_every_option(DType::bf16, DType::bf16, {2, 4, 2, 8, 11, 8, 6});
}
TEST(AttentionGradientOption, HoldsInF16WithSideArraysInF32) {
  check_every_option(DType::f16, DType::f32, {2, 4, 2, 8, 11, 8, 6});
}
TEST(AttentionGradientOption, HoldsForManyKeys) {
  Random random(5);
  for (const OptionCase& option : option_cases()) {
    SCOPED_TRACE(option.name);
    const oracle::Attention p = draw_with(option, random, {2, 4, 2, 8, 270, 4, 4}, DType::f32, DType::f32);
    for_each_target([&] { check(p); });
  }
}

TEST(AttentionGradientLayout, MayBeAnything) {
  Random random(6);
  const Layout permuted{.order = {0, 2, 1, 3}, .padding = 3};
  const Layout transposed{.order = {1, 0, 3, 2}, .offset = 1};
  const Layout spaced{.spacing = 2, .padding = 1, .backwards = {3}, .offset = 3};
  const Layout backwards{.order = {2, 3, 0, 1}, .backwards = {0, 1, 2}, .offset = 1};
  const std::vector<Layouts> cases = {{permuted, permuted, permuted, permuted, permuted},
                                      {transposed, spaced, backwards, permuted, spaced},
                                      {spaced, transposed, transposed, backwards, transposed},
                                      {backwards, backwards, spaced, transposed, backwards}};
  for (DType type : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    oracle::Attention p = draw_problem(random, {2, 4, 2, 7, 13, 9, 5}, type, 1.5);
    p.rules = {paper_case().plain};
    p.bias = draw_array(random, {2, 1, 7, 13}, type);
    p.mask = draw_mask(random, {1, 4, 7, 13}, 0.8);
    for (std::size_t n = 0; n < cases.size(); ++n) {
      SCOPED_TRACE("type " + std::to_string(static_cast<int>(type)) + ", layouts " + std::to_string(n));
      for_each_target([&] { check(p, type, type, cases[n]); });
    }
  }
}

// ---- Finite differences ----

// L = sum dout out by the library's own f64 forward pass.
double loss(const oracle::Attention& p) {
  AttentionCall call(p, DType::f64, DType::f64);
  call.execution.threads = 1;
  call.forward();
  const std::vector<double> out = call.out.values();
  oracle::Sum<double> sum;
  for (std::size_t n = 0; n < out.size(); ++n) sum.add(out[n] * p.dout.values[n]);
  return sum.value();
}

// Central differences of fourth order in one number of the problem.
template <typename Loss>
double difference(double& at, double step, const Loss& of) {
  const double start = at;
  const auto moved = [&](double by) {
    at = start + by;
    const double value = of();
    at = start;
    return value;
  };
  return (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step);
}

template <typename Loss>
void expect_differences(std::vector<double>& at, const std::vector<double>& gradient, const char* name,
                        double tolerance, const Loss& of) {
  ASSERT_EQ(at.size(), gradient.size());
  for (std::size_t n = 0; n < at.size(); ++n) {
    if (!std::isfinite(at[n])) continue;
    // Twice as long a step would leave up to 3e-7 of fifth derivatives.
    EXPECT_NEAR(gradient[n], difference(at[n], 5e-4, of), tolerance) << name << "[" << n << "]";
  }
}

// Sinks, soft-cap, bias and mask, with rows of different lengths: every path a gradient takes.
oracle::Attention smooth_problem(Random& random) {
  oracle::Attention p = draw_problem(random, {1, 2, 1, 4, 6, 3, 2}, DType::f64);
  p.query_scale = {{1, 2, 1}, {1.25, -0.75}};
  p.softcap = 3;
  p.bias = draw_array(random, {1, 1, 4, 6}, DType::f64, 0.5);
  p.bias.values[8] = -kInfinity;
  p.sinks = {{2}, {-0.5, 0.25}};
  p.causal = true;
  p.align = Align::end;
  return p;
}

// The gradients of a key and of its value are sums over queries. Summed one after the other, 16,384 of them
// round to within nine units of the sum.
TEST(AttentionGradient, RoundsLittleOverManyQueries) {
  constexpr std::int64_t N = 16384, M = 8, D = 4, E = 64;
  Random random(15);
  std::vector<float> q(N * D, 0.0f), k(M * D, 1.0f), v(M * E, 1.0f), dout(N * E), dv(M * E);
  std::vector<double> sums(E, 0.0);
  for (std::size_t i = 0; i < dout.size(); ++i) {
    dout[i] = static_cast<float>(random() % 16777213) * 0x1p-24f;
    sums[i % E] += static_cast<double>(dout[i]) / M;
  }
  for_each_target([&] {
    attention_backward(ConstView(q.data(), {1, 1, N, D}), ConstView(k.data(), {1, 1, M, D}),
                       ConstView(v.data(), {1, 1, M, E}), ConstView(dout.data(), {1, 1, N, E}),
                       {.dv = View(dv.data(), {1, 1, M, E})});
    for (std::size_t i = 0; i < dv.size(); ++i) {
      ASSERT_NEAR(dv[i], sums[i % E], 4.5 * 0x1p-24 * sums[i % E]) << "element " << i;
    }
  });
}

TEST(AttentionGradient, ThroughTheRuleEqualsFiniteDifferencesOfForward) {
  for_each_target([] {
    Random random(7);
    for (const RuleCase& rule : rule_cases()) {
      SCOPED_TRACE(rule.rule.name());
      oracle::Attention p = smooth_problem(random);
      p.rules = {rule.plain};
      AttentionCall call(p, DType::f64, DType::f64);
      call.outputs.saved = {};
      call.backward();
      const auto of = [&] { return loss(p); };
      expect_differences(p.q.values, call.dq.values(), "q", 1e-7, of);
      expect_differences(p.k.values, call.dk.values(), "k", 1e-7, of);
      expect_differences(p.v.values, call.dv.values(), "v", 1e-7, of);
      expect_differences(p.bias.values, call.dbias.values(), "bias", 1e-7, of);
      expect_differences(p.sinks.values, call.dsinks.values(), "sinks", 1e-7, of);
      expect_differences(p.query_scale.values, call.dquery_scale.values(), "query_scale", 1e-7, of);
    }
  });
}

// Held: the derivative at the betas that forward reported, which the oracle can keep and the library can't.
TEST(AttentionGradient, HeldEqualsFiniteDifferencesAtFixedBeta) {
  Random random(8);
  for (const RuleCase& rule : rule_cases()) {
    SCOPED_TRACE(rule.rule.name());
    oracle::Attention p = smooth_problem(random);
    p.rules = {rule.plain};
    calm(p, betas_of(p, DType::f64, DType::f64), 4);  // the step is short only beside 1 / beta
    AttentionCall call(p, DType::f64, DType::f64);
    call.forward();
    call.backward(BetaGradient::held);
    const std::vector<double> betas = call.betas();
    const auto of = [&] {
      const oracle::Forward<long double> f = oracle::forward<long double>(p, betas);
      long double sum = 0;
      for (std::size_t n = 0; n < f.out.size(); ++n) sum += f.out[n] * p.dout.values[n];
      return static_cast<double>(sum);
    };
    expect_differences(p.q.values, call.dq.values(), "q", 1e-7, of);
    expect_differences(p.k.values, call.dk.values(), "k", 1e-7, of);
    expect_differences(p.bias.values, call.dbias.values(), "bias", 1e-7, of);
    expect_differences(p.sinks.values, call.dsinks.values(), "sinks", 1e-7, of);
    expect_differences(p.query_scale.values, call.dquery_scale.values(), "query_scale", 1e-7, of);
  }
}

// The oracle itself, without the library: its gradients are those of its forward pass.
TEST(AttentionOracle, GradientEqualsFiniteDifferencesOfItsOwnForward) {
  Random random(9);
  for (const RuleCase& rule : rule_cases()) {
    SCOPED_TRACE(rule.rule.name());
    oracle::Attention p = smooth_problem(random);
    p.rules = {rule.plain};
    const oracle::Gradients<long double> g = oracle::backward(p, oracle::forward<long double>(p), true);
    const auto of = [&] {
      const oracle::Forward<long double> f = oracle::forward<long double>(p);
      long double sum = 0;
      for (std::size_t n = 0; n < f.out.size(); ++n) sum += f.out[n] * p.dout.values[n];
      return static_cast<double>(sum);
    };
    const auto to_doubles = [](const std::vector<long double>& values) {
      return std::vector<double>(values.begin(), values.end());
    };
    expect_differences(p.q.values, to_doubles(g.dq), "q", 1e-7, of);
    expect_differences(p.k.values, to_doubles(g.dk), "k", 1e-7, of);
    expect_differences(p.v.values, to_doubles(g.dv), "v", 1e-7, of);
    expect_differences(p.bias.values, to_doubles(oracle::reduced(p, g.dbias, p.bias.sizes)), "bias", 1e-7,
                       of);
    expect_differences(p.sinks.values, to_doubles(g.dsinks), "sinks", 1e-7, of);
    expect_differences(p.query_scale.values,
                       to_doubles(oracle::reduced_rows(p, g.dquery_scale, p.query_scale.sizes)),
                       "query_scale", 1e-7, of);
  }
}

// A scale of 0 is no reason for a gradient of 0, nor for 0 / 0.
TEST(AttentionGradient, OfAQueryScaleOfZeroEqualsFiniteDifferences) {
  for_each_target([] {
    Random random(19);
    oracle::Attention p = smooth_problem(random);
    p.query_scale = draw_array(random, {1, 2, 4}, DType::f64);
    for (std::size_t n = 0; n < p.query_scale.values.size(); n += 2) p.query_scale.values[n] = 0;
    p.rules = {paper_case().plain};
    AttentionCall call(p, DType::f64, DType::f64);
    call.outputs.saved = {};
    call.backward();
    const std::vector<double> gradient = call.dquery_scale.values();
    EXPECT_NE(gradient[2], 0);
    expect_differences(p.query_scale.values, gradient, "query_scale", 1e-7, [&] { return loss(p); });
  });
}

// Which weights are dropped doesn't depend on query_scale, so that differences see the same ones.
TEST(AttentionGradient, OfQueryScaleWithDropoutEqualsFiniteDifferences) {
  for_each_target([] {
    Random random(20);
    oracle::Attention p = smooth_problem(random);
    p.query_scale = draw_array(random, {1, 1, 4}, DType::f64);
    p.rules = {paper_case().plain};
    const auto of = [&](AttentionCall& call) {
      call.options.dropout = 0.4;
      call.options.dropout_seed = 7;
      call.execution.threads = 1;
      call.forward();
      const std::vector<double> out = call.out.values();
      double sum = 0;
      for (std::size_t n = 0; n < out.size(); ++n) sum += out[n] * p.dout.values[n];
      return sum;
    };
    AttentionCall call(p, DType::f64, DType::f64);
    of(call);
    call.backward();
    expect_differences(p.query_scale.values, call.dquery_scale.values(), "query_scale", 1e-7, [&] {
      AttentionCall moved(p, DType::f64, DType::f64);
      return of(moved);
    });
  });
}

// Packed sequences, grouped heads and a causal paper rule meet, for every size that query_scale may have.
TEST(AttentionGradient, OfQueryScaleOfAnySizesEqualsTheOracle) {
  for (DType type : {DType::f32, DType::f64, DType::bf16}) {
    Random random(21);
    for (int sizes = 0; sizes < 4; ++sizes) {
      oracle::Attention p = draw_problem(random, {1, 6, 2, 23, 31, 12, 8}, type, 1.5);
      p.rules = {paper_case().plain};
      p.causal = true;
      p.query_starts = {0, 4, 4, 19, p.N};
      p.key_starts = {0, 0, 7, 28, p.M};
      p.query_scale = draw_array(random, {1, sizes & 1 ? 1 : p.H, sizes & 2 ? 1 : p.N}, type);
      SCOPED_TRACE("type " + std::to_string(static_cast<int>(type)) + ", sizes " + std::to_string(sizes));
      for_each_target([&] { check(p, type); });
    }
  }
}

// ---- Hidden positions ----

std::vector<std::vector<std::byte>> bits_of(AttentionCall& call) {
  std::vector<std::vector<std::byte>> bits;
  for (const Placed* gradient : call.written_gradients()) bits.push_back(gradient->bits());
  return bits;
}

// Keys 2 (mask), 7 (bias) and from 17 on (lengths) are hidden from all; row 3 of every head sees nothing.
oracle::Attention problem_with_hidden_positions(Random& random) {
  oracle::Attention p = draw_problem(random, {1, 4, 2, 9, 19, 8, 6}, DType::f32);
  p.bias = draw_array(random, {1, 1, 9, 19}, DType::f32);
  p.mask = {{1, 1, 9, 19}, std::vector<double>(9 * 19, 1)};
  p.lengths = {17};
  p.sinks = draw_array(random, {4}, DType::f32);
  p.query_scale = draw_array(random, {1, 4, 9}, DType::f32);
  for (std::int64_t i = 0; i < p.N; ++i) {
    p.mask.values[p.mask.position({0, 0, i, 2})] = 0;
    p.bias.values[p.bias.position({0, 0, i, 7})] = -kInfinity;
  }
  for (std::int64_t j = 0; j < p.M; ++j) p.mask.values[p.mask.position({0, 0, 3, j})] = 0;
  return p;
}

void break_hidden_positions(oracle::Attention& p) {
  for (std::int64_t j : {2, 7, 17, 18}) {
    for (std::int64_t h = 0; h < p.K; ++h) {
      p.k.values[p.k.position({0, h, j, 1})] = j == 7 ? kInfinity : kNaN;
      p.v.values[p.v.position({0, h, j, 0})] = kNaN;
    }
  }
  for (std::int64_t h = 0; h < p.H; ++h) {
    p.q.values[p.q.position({0, h, 3, 0})] = kNaN;
    p.dout.values[p.dout.position({0, h, 3, 5})] = kInfinity;
  }
  p.bias.values[p.bias.position({0, 0, 5, 2})] = kNaN;
}

TEST(AttentionGradientEdge, HiddenPositionsHaveNoGradient) {
  Random random(10);
  for (const RuleCase& rule : rule_cases()) {
    oracle::Attention p = problem_with_hidden_positions(random);
    p.rules = {rule.plain};
    break_hidden_positions(p);
    SCOPED_TRACE(rule.rule.name());
    for_each_target([&] {
      check(p);
      AttentionCall call(p, DType::f32, DType::f32);
      call.forward();
      call.backward();
      const std::vector<double> dk = call.dk.values(), dv = call.dv.values(), dq = call.dq.values(),
                                dquery_scale = call.dquery_scale.values();
      for (std::int64_t h = 0; h < p.K; ++h) {
        for (std::int64_t j : {2, 7, 17, 18}) {
          for (std::int64_t d = 0; d < p.D; ++d) ASSERT_EQ(dk[p.k.position({0, h, j, d})], 0);
          for (std::int64_t e = 0; e < p.E; ++e) ASSERT_EQ(dv[p.v.position({0, h, j, e})], 0);
        }
      }
      for (std::int64_t h = 0; h < p.H; ++h) {
        for (std::int64_t d = 0; d < p.D; ++d) ASSERT_EQ(dq[p.q.position({0, h, 3, d})], 0);
        ASSERT_EQ(dquery_scale[p.row(0, h, 3)], 0);
      }
    });
  }
}

TEST(AttentionGradientEdge, HiddenPositionsDontChangeABit) {
  for_each_target([] {
    Random random(11);
    for (const RuleCase& rule : rule_cases()) {
      oracle::Attention p = problem_with_hidden_positions(random);
      p.rules = {rule.plain};
      oracle::Attention broken = p;
      break_hidden_positions(broken);
      SCOPED_TRACE(rule.rule.name());
      AttentionCall clean_call(p, DType::f32, DType::f32), call(broken, DType::f32, DType::f32);
      clean_call.outputs.saved = call.outputs.saved = {};
      clean_call.backward();
      call.backward();
      EXPECT_TRUE(bits_of(call) == bits_of(clean_call));
    }
  });
}

TEST(AttentionGradientEdge, NothingVisibleGivesZeros) {
  for_each_target([] {
    Random random(11);
    oracle::Attention p = draw_problem(random, {2, 2, 1, 3, 5, 4, 4}, DType::f32);
    p.mask = {{1, 1, 1, 1}, {0}};
    p.sinks = draw_array(random, {2}, DType::f32);
    p.bias = draw_array(random, {1, 1, 1, 1}, DType::f32);
    p.query_scale = draw_array(random, {2, 1, 3}, DType::f32);
    for (const RuleCase& rule : rule_cases()) {
      p.rules = {rule.plain};
      AttentionCall call(p, DType::f32, DType::f32);
      call.outputs.saved = {};
      call.backward();
      for (const Placed* gradient : call.written_gradients()) {
        for (double value : gradient->values()) ASSERT_EQ(value, 0) << rule.rule.name();
      }
    }
  });
}

TEST(AttentionGradientEdge, NaNInAVisibleLogitBreaksWhatItsRowTouches) {
  Random random(12);
  for (const RuleCase& rule : rule_cases()) {
    oracle::Attention p = draw_problem(random, {1, 2, 2, 8, 20, 4, 4}, DType::f32);
    p.rules = {rule.plain};
    p.causal = true;
    p.query_scale = draw_array(random, {1, 2, 8}, DType::f32);
    p.q.values[p.q.position({0, 1, 5, 2})] = kNaN;  // head 1, keys 0..5
    SCOPED_TRACE(rule.rule.name());
    for_each_target([&] { check(p); });
  }
}

// Keys past the length get nothing from a row of NaN, whether its query or its bias is.
TEST(AttentionGradientEdge, RowsOfNaNDontTouchKeysPastTheirLength) {
  for_each_target([] {
    for (const RuleCase& rule : rule_cases()) {
      for (const bool in_bias : {false, true}) {
        Random random(18);
        oracle::Attention p = draw_problem(random, {2, 2, 1, 9, 20, 4, 4}, DType::f32);
        p.rules = {rule.plain};
        p.lengths = {11, 20};
        p.bias = draw_array(random, {2, 2, 9, 20}, DType::f32);
        if (in_bias) {
          p.bias.values[p.bias.position({0, 1, 5, 3})] = kNaN;
        } else {
          p.q.values[p.q.position({0, 1, 5, 2})] = kNaN;
        }
        SCOPED_TRACE(rule.rule.name());
        check(p);
        AttentionCall call(p, DType::f32, DType::f32);
        call.outputs.saved = {};
        call.backward();
        for (const Placed* gradient : {&call.dk, &call.dv}) {
          const std::vector<double> values = gradient->values();
          for (std::size_t i = 11 * 4; i < 20 * 4; ++i) ASSERT_EQ(values[i], 0) << "element " << i;
        }
      }
    }
  });
}

// ---- What is asked for, and how ----

TEST(AttentionGradientBits, DontDependOnThreadsOrRepetition) {
  const std::vector<Shape> shapes = {
      {2, 4, 2, 37, 90, 8, 8}, {1, 1, 1, 200, 150, 8, 8}, {1, 2, 1, 2, 1500, 8, 8}};
  for_each_target([&] {
    Random random(13);
    for (const Shape& shape : shapes) {
      for (DType type : {DType::f32, DType::f64, DType::bf16}) {
        oracle::Attention p = draw_problem(random, shape, type, 2);
        p.bias = draw_array(random, {1, shape.H, 1, shape.M}, type);
        p.sinks = draw_array(random, {shape.H}, type);
        p.query_scale = draw_array(random, {1, 1, shape.N}, type);
        for (const RuleCase& rule :
             {paper_case(), RuleCase{Rule::target_peak(0.5), {Rule::Kind::target_peak, 0.5}}}) {
          p.rules = {rule.plain};
          SCOPED_TRACE("N " + std::to_string(shape.N) + ", type " + std::to_string(static_cast<int>(type)) +
                       ", rule " + rule.rule.name());
          AttentionCall call(p, type, type);
          call.outputs.saved = {};
          call.execution.threads = 1;
          call.backward();
          const std::vector<std::vector<std::byte>> one = bits_of(call);
          for (int threads : {1, 2, 3, 7, 0}) {
            call.execution.threads = threads;
            call.backward();
            EXPECT_TRUE(bits_of(call) == one) << threads << " threads";
          }
        }
      }
    }
  });
}

TEST(AttentionGradientBits, DontDependOnThreadsForAnyOption) {
  for_each_target([] {
    Random random(14);
    for (const OptionCase& option : option_cases()) {
      SCOPED_TRACE(option.name);
      const oracle::Attention p = draw_with(option, random, {2, 4, 2, 20, 300, 4, 4}, DType::f32, DType::f32);
      AttentionCall call(p, DType::f32, DType::f32);
      call.forward();
      call.execution.threads = 1;
      call.backward();
      const std::vector<std::vector<std::byte>> one = bits_of(call);
      call.execution.threads = 3;
      call.backward();
      EXPECT_TRUE(bits_of(call) == one);
    }
  });
}

// Each gradient alone has the bits it has among the others, and a workspace of one's own changes none.
TEST(AttentionGradientBits, DontDependOnWhatElseIsAskedFor) {
  for_each_target([] {
    Random random(15);
    oracle::Attention p = draw_problem(random, {2, 4, 2, 20, 270, 4, 4}, DType::f32);
    p.rules = {paper_case().plain};
    p.bias = draw_array(random, {1, 4, 20, 270}, DType::f32);
    p.sinks = draw_array(random, {4}, DType::f32);
    p.query_scale = draw_array(random, {2, 1, 20}, DType::f32);
    AttentionCall all(p, DType::f32, DType::f32), one(p, DType::f32, DType::f32);
    all.outputs.saved = one.outputs.saved = {};
    all.backward();
    for (int n = 0; n < 6; ++n) {
      SCOPED_TRACE("gradient " + std::to_string(n));
      AttentionGradients wanted;
      if (n == 0) wanted.dq = one.dq.view();
      if (n == 1) wanted.dk = one.dk.view();
      if (n == 2) wanted.dv = one.dv.view();
      if (n == 3) wanted.dbias = one.dbias.view();
      if (n == 4) wanted.dsinks = one.dsinks.view();
      if (n == 5) wanted.dquery_scale = one.dquery_scale.view();
      std::vector<std::byte> workspace(attention_backward_workspace(one.q.view(), one.k.view(), one.v.view(),
                                                                    wanted, one.options, {}, one.execution));
      one.execution.workspace = workspace;
      attention_backward(one.q.view(), one.k.view(), one.v.view(), one.dout.view(), wanted, one.options, {},
                         one.execution);
    }
    EXPECT_TRUE(bits_of(one) == bits_of(all));
  });
}

// Nothing is skipped, whatever forward was allowed to skip.
TEST(AttentionGradientEdge, IgnoresSkipEpsilon) {
  for_each_target([] {
    Random random(16);
    const oracle::Attention p = draw_problem(random, {1, 1, 1, 12, 1100, 8, 8}, DType::f32, 12);
    AttentionCall call(p, DType::f32, DType::f32);
    call.outputs.saved = {};
    call.backward();
    const std::vector<std::vector<std::byte>> usual = bits_of(call);
    call.options.skip_epsilon = 0.1;
    call.backward();
    EXPECT_TRUE(bits_of(call) == usual);
  });
}

}  // namespace
}  // namespace whet
