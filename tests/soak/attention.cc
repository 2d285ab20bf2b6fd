// Attention with everything drawn at random and jointly: sizes, element types, layouts, rules, every option,
// threads, target, optional outputs, forward, backward and in shards, NaN that nothing sees.
//
// The contract is asserted in attention_test.cc and attention_backward_test.cc on problems large enough for
// the plain evaluation to be a fair measure. Here a problem may be one row of two keys, which it can meet
// exactly by luck, so bounds are a priori ones: a few times wider, but far below what a wrong term gives.
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
#include "attention_extras.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "contract.h"
#include "executors.h"
#include "shard_cases.h"
#include "soak.h"

namespace whet::soak {
namespace {

// ---- Drawing ----

Shape draw_shape(const Case& c) {
  Dice dice(c, 0);
  Shape s;
  s.B = dice.size(1, 2);
  s.K = dice.size(1, 2);
  s.H = s.K * dice.size(1, 3);
  s.N = dice.chance(0.3) ? dice.size(0, 3) : dice.size(1, dice.chance(0.2) ? 40 : 15);
  s.M = dice.chance(0.2) ? dice.size(0, 3) : dice.size(1, 40);
  s.D = dice.size(1, 20);
  s.E = dice.size(1, 20);
  if (dice.chance(0.05)) {
    s.M = dice.size(250, 300);
    s.N = std::min<std::int64_t>(s.N, 6);
  } else if (dice.chance(0.02)) {
    s.D = dice.size(100, 600);
    s.E = dice.size(1, 600);
  }
  return s;
}

std::vector<std::int64_t> draw_starts(Dice& dice, std::int64_t sequences, std::int64_t last) {
  std::vector<std::int64_t> starts = {0, last};
  for (std::int64_t n = 1; n < sequences; ++n) starts.push_back(dice.between(0, last));
  std::sort(starts.begin(), starts.end());
  return starts;
}

// Multiples of 1/2: logits are exact in every arithmetic, and many tie.
void put_on_grid(oracle::Array& array) {
  for (double& value : array.values) value = std::clamp(std::nearbyint(2 * value) / 2, -1.5, 1.5);
}

struct Drawn {
  oracle::Attention p;
  DType type, side;
  Layouts layouts;
  std::string target;
  int threads;
  int other_threads;
  bool workspace, skip;
  BetaGradient mode;

  std::string describe() const {
    return name_of(type) + ", target " + target + ", " + std::to_string(threads) +
           " threads, B H K N M D E " +
           testing::PrintToString(std::vector{p.B, p.H, p.K, p.N, p.M, p.D, p.E}) + ", rule " +
           library_rule(p.rules[0]).name();
  }
};

void draw_visibility(oracle::Attention& p, const Case& c, bool packed) {
  Dice dice(c, 1);
  p.causal = dice.chance(0.35);
  p.align = dice.chance(0.5) ? Align::end : Align::start;
  if (dice.chance(0.25)) p.window_left = dice.between(0, 20);
  if (dice.chance(0.15)) p.window_right = dice.between(0, 20);
  const double kind = dice.real(0, 1);
  Dice of_sizes(c, 2);
  if (kind < 0.2) {
    for (std::int64_t b = 0; b < p.B; ++b) p.lengths.push_back(of_sizes.between(0, p.M));
  } else if (kind < 0.35) {
    for (std::int64_t r = 0; r < p.rows(); ++r) p.lengths.push_back(of_sizes.between(0, p.M));
  } else if (kind < 0.55 && p.B == 1 && packed) {
    const std::int64_t sequences = of_sizes.between(1, 4);
    p.query_starts = draw_starts(of_sizes, sequences, p.N);
    p.key_starts = draw_starts(of_sizes, sequences, p.M);
  }
  Dice of_mask(c, 3);
  if (of_mask.chance(0.3)) {
    const double visible = of_mask.real(0.2, 1);
    p.mask = draw_mask(of_mask.random(), draw_side_sizes(of_mask, {p.B, p.H, p.N, p.M}), visible);
  }
}

void draw_logits(oracle::Attention& p, const Case& c, DType side) {
  Dice dice(c, 4);
  if (dice.chance(0.3)) p.scale = dice.real(-1, 1);
  if (dice.chance(0.25)) p.softcap = dice.real(0.5, 5);
  if (dice.chance(0.02)) p.softcap = dice.magnitude(1e-37, 1e-3);
  Dice of_query(c, 5);
  if (of_query.chance(0.25)) {
    p.query_scale = draw_array(of_query.random(), draw_side_sizes(of_query, {p.B, p.H, p.N}), side);
  }
  Dice of_bias(c, 6);
  if (of_bias.chance(0.35)) {
    const double hidden = of_bias.chance(0.5) ? 0.2 : 0;
    p.bias = draw_array(of_bias.random(), draw_side_sizes(of_bias, {p.B, p.H, p.N, p.M}), side);
    for (double& value : p.bias.values) value = of_bias.chance(hidden) ? -kInfinity : value;
  }
  Dice of_sinks(c, 7);
  if (of_sinks.chance(0.3)) {
    p.sinks = draw_array(of_sinks.random(), {p.H}, side, 2);
    for (double& value : p.sinks.values) value = of_sinks.chance(0.15) ? -kInfinity : value;
  }
  Dice of_rules(c, 8);
  const bool each_head = of_rules.chance(0.3);
  p.rules.clear();
  for (std::int64_t h = 0; h < (each_head ? p.H : 1); ++h) p.rules.push_back(draw_rule(of_rules));
  if (!Dice(c, 9).chance(0.15)) return;
  p.scale = 0.5;
  for (oracle::Array* array : {&p.q, &p.k, &p.query_scale, &p.bias, &p.sinks}) put_on_grid(*array);
}

// NaN where nothing sees it, and rarely in a query or a sink.
void draw_poison(oracle::Attention& p, const Case& c) {
  Dice dice(c, 10);
  if (dice.chance(0.04) && !p.q.values.empty()) p.q.values[0] = kNaN;
  if (dice.chance(0.02) && p.sinks.given()) p.sinks.values[0] = dice.chance(0.5) ? kNaN : kInfinity;
  if (!dice.chance(0.3)) return;
  std::vector<bool> seen(index_of(p.B * p.K * p.M), false);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const oracle::AttentionRow<double> row = oracle::row_of<double>(p, b, h, i);
    for (std::int64_t j : row.keys) seen[index_of((b * p.K + p.key_head(h)) * p.M + j)] = true;
    if (row.count() > 0) return;
    p.q.values[p.q.position({b, h, i, p.D - 1})] = kNaN;
    p.dout.values[p.dout.position({b, h, i, 0})] = kNaN;
  });
  for (std::size_t n = 0; n < seen.size(); ++n) {
    if (seen[n]) continue;
    p.k.values[n * index_of(p.D)] = dice.chance(0.5) ? kNaN : kInfinity;
    p.v.values[(n + 1) * index_of(p.E) - 1] = dice.chance(0.5) ? kNaN : kInfinity;
  }
}

// `packed`: the keys may be those of several sequences.
Drawn draw(const Case& c, bool packed = true) {
  Drawn drawn;
  Dice dice(c, 11);
  drawn.type = draw_type(dice);
  drawn.side = dice.chance(0.5) ? drawn.type : arithmetic_type(drawn.type);
  drawn.target = dice.pick(targets());
  drawn.threads = dice.pick<int>({1, 1, 2, 3, 4, 0});
  drawn.other_threads = static_cast<int>(dice.between(1, 4));
  drawn.workspace = dice.chance(0.3);
  drawn.skip = dice.chance(0.8);
  drawn.mode = dice.chance(0.7) ? BetaGradient::through_rule : BetaGradient::held;
  const double sharpness = dice.pick<double>({0.3, 1, 1, 2, 6});
  drawn.layouts = {draw_layout(dice, 4), draw_layout(dice, 4), draw_layout(dice, 4), draw_layout(dice, 4),
                   draw_layout(dice, 4)};
  Dice values(c, 12);
  drawn.p = draw_problem(values.random(), draw_shape(c), drawn.type, sharpness);
  draw_visibility(drawn.p, c, packed);
  draw_logits(drawn.p, c, drawn.side);
  draw_poison(drawn.p, c);
  return drawn;
}

// ---- Checking ----

// Of a row: every weight is off by 2 beta delta (attention_contract.h) and by what softmax.h allows, the sum
// over n keys by n units. That moves a weighted mean by at most twice as much of the largest value.
template <typename Arithmetic, typename Real>
double output_bound(const oracle::AttentionRow<Real>& row, Real beta, std::int64_t size,
                    double largest_value) {
  const oracle::State<Real> s = oracle::state(row.logits, beta);
  const Real logits = 2 * beta * logit_error<Arithmetic>(row, size);
  const Real weights = Contract<Arithmetic>::weight * (1 + beta * std::abs(s.t / s.z));
  const Real sum = static_cast<Real>(row.count() + 8) * unit<Arithmetic>();
  // Beyond first order, all that can be said is that an output lies among the values.
  return static_cast<double>(std::min(Real{2}, 2 * (logits + weights + sum))) * largest_value;
}

template <typename Arithmetic, typename Real>
void expect_outputs(const Drawn& drawn, const oracle::Forward<Real>& exact, const std::vector<double>& out,
                    double skip_epsilon) {
  const oracle::Attention& p = drawn.p;
  const double largest_value = largest(p.v.values);
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    const auto part = [&](const auto& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r) * p.E;
      return std::vector(begin, begin + p.E);
    };
    const double bound = output_bound<Arithmetic>(exact.rows[r], exact.betas[r], p.D, largest_value);
    expect_all_within(part(out), part(exact.out),
                      std::isnan(bound) ? 0 : bound + 2 * skip_epsilon * largest_value, drawn.type,
                      "out of row " + std::to_string(r));
  }
}

// The heaviest keys of every row, by the weights of the same call: each has its weight, none weighs more than
// the one before it, and none that is left out more than the last, unless in a tile that was skipped.
void expect_top_keys(const oracle::Attention& p, const Asking& call) {
  const std::vector<double> weights = call.weights.values();
  const std::size_t top = index_of(call.outputs.top_k);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    const RowStats& stats = call.stats[r];
    if (std::isnan(stats.beta)) return;
    std::vector<double> left(weights.begin() + static_cast<std::ptrdiff_t>(r) * p.M,
                             weights.begin() + static_cast<std::ptrdiff_t>(r + 1) * p.M);
    const std::size_t listed = std::min(top, index_of(static_cast<std::int64_t>(stats.count)));
    double last = 1;
    for (std::size_t n = 0; n < top; ++n) {
      const std::int64_t key = call.top_keys[r * top + n];
      const double weight = static_cast<double>(call.top_weights[r * top + n]);
      ASSERT_EQ(key < 0, n >= listed) << "row " << r << ", entry " << n;
      if (n >= listed) continue;
      ASSERT_LT(key, p.M);
      ASSERT_GE(left[index_of(key)], 0) << "row " << r << ": key " << key << " twice";
      const double stored = rounded(call.weights.type(), weight);
      ASSERT_EQ(
          call.weights.type() == DType::f64 ? static_cast<float>(left[index_of(key)]) : left[index_of(key)],
          stored)
          << "row " << r << ", key " << key;
      ASSERT_LE(weight, last) << "row " << r << ", entry " << n;
      last = weight;
      left[index_of(key)] = -1;
    }
    if (listed == 0) return;
    const double heaviest = static_cast<double>(static_cast<float>(*std::ranges::max_element(left)));
    ASSERT_LE(heaviest, rounded(call.weights.type(), last) + call.options.skip_epsilon) << "row " << r;
  });
}

void expect_column_sums(const oracle::Attention& p, const Asking& call) {
  const std::vector<double> weights = call.weights.values();
  const DType type = call.weights.type();
  const double unit_of = type == DType::f64 ? unit<double>() : unit<float>();
  for (std::size_t at = 0; at < call.column_sums.size(); ++at) {
    const std::size_t head = at / index_of(p.M), j = at % index_of(p.M);
    double sum = 0, stored = 0;
    for (std::size_t i = 0; i < index_of(p.N); ++i) {
      const double weight = weights[(head * index_of(p.N) + i) * index_of(p.M) + j];
      sum += weight;
      stored += storage_error(type, weight);
    }
    if (std::isnan(sum)) continue;
    ASSERT_NEAR(call.column_sums[at], sum, 4 * unit_of * sum + 2 * stored + 1e-30) << "column " << at;
  }
}

constexpr double kLargeBeta = 8;

// At a kink of the rule, which side it is on is up to rounding; and a row that rounding turns upside down has
// no gradient to compare.
template <typename Arithmetic, typename Real>
bool is_smooth(const oracle::AttentionRow<Real>& row, const oracle::Rule& rule, Real beta,
               std::int64_t size) {
  if (row.count() <= 1 || oracle::is_broken(oracle::state<Real>(row.logits))) return true;
  const Real near = 0x1p-10;
  const Real delta = logit_error<Arithmetic>(row, size);
  if (beta > kLargeBeta || oracle::top<Real>(row.logits).gap < 32 * delta) return false;
  if (oracle::solves(rule)) return std::abs(oracle::shortfall<Real>(row.logits, rule, 1)) > near;
  if (!oracle::of_entropy(rule)) return true;
  const Real h = oracle::entropy<Real>(row.logits);
  return std::abs(h - Real{rule.gate}) > near && std::abs(h - Real{rule.hold}) > near &&
         std::abs(oracle::polynomial(rule.coefficients, std::min(h, Real{rule.hold})) - 1) > near;
}

// Rounding of logits moves every term of a gradient by a few beta delta of itself, sums of n terms by n
// units; and the statistics of a forward pass that skipped tiles lack their mass.
template <typename Arithmetic, typename Real>
GradientBound gradient_bound(const oracle::Attention& p, const oracle::Forward<Real>& exact, double skipped) {
  Real moved = skipped;
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    const Real of_row = exact.betas[r] * logit_error<Arithmetic>(exact.rows[r], p.D);
    if (exact.betas[r] <= kLargeBeta) moved = std::max(moved, of_row);
  }
  const std::int64_t terms = p.N * (p.H / p.K) + p.M + p.D + p.E;
  return {2, static_cast<double>(2 * terms + 32) + 16 * static_cast<double>(moved) / unit<Arithmetic>()};
}

// Leaves rows out of the gradient whose derivative jumps close by.
template <typename Arithmetic, typename Real>
void keep_smooth_rows(oracle::Attention& p, const oracle::Forward<Real>& exact) {
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    if (exact.rows[r].count() == 0 || is_smooth<Arithmetic>(exact.rows[r], p.rule(h), exact.betas[r], p.D))
      return;
    for (std::int64_t e = 0; e < p.E; ++e) p.dout.values[p.dout.position({b, h, i, e})] = 0;
  });
}

// Leaves out optional outputs, in any combination.
void drop_some(AttentionOutputs& outputs, Dice& dice) {
  if (dice.chance(0.3)) outputs.stats = {};
  if (dice.chance(0.5)) outputs.saved = {};
  if (dice.chance(0.5)) outputs.weight_rows = {}, outputs.weights = {};
  if (dice.chance(0.5)) outputs.top_k = 0, outputs.top_keys = {}, outputs.top_weights = {};
  if (dice.chance(0.5)) outputs.column_sums = {};
  if (dice.chance(0.5)) outputs.tile_counts = nullptr;
}

void use_workspace(Execution& execution, std::vector<std::byte>& workspace, std::size_t bytes) {
  workspace.assign(bytes, std::byte{0xFF});
  execution.workspace = workspace;
}

template <typename Arithmetic>
void check_forward(const Drawn& drawn, const Case& c, Tally& tally) {
  using Real = typename Contract<Arithmetic>::Real;
  const oracle::Attention& p = drawn.p;
  Dice dice(c, 13);
  Asking call(p, drawn.type, dice.between(1, 5), drawn.side, drawn.layouts);
  AttentionOptions& options = call.options;
  call.execution.threads = drawn.threads;
  if (!drawn.skip) options.skip_epsilon = 0;
  std::vector<std::byte> workspace;
  const auto views = [&] { return std::tuple(call.q.view(), call.k.view(), call.v.view()); };
  if (drawn.workspace) {
    const auto [q, k, v] = views();
    use_workspace(call.execution, workspace,
                  attention_workspace(q, k, v, options, call.outputs, call.execution));
  }
  call.forward();
  count(tally, "attention", p.rows(), 2);
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  expect_outputs<Arithmetic>(drawn, exact, call.out.values(), options.skip_epsilon);
  EXPECT_TRUE(call.out.gaps_are_intact());
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    SCOPED_TRACE("row " + std::to_string(r));
    expect_attention_stats<Arithmetic>(exact.rows[r], p.D, p.rule(h), call.stats[r], options.skip_epsilon);
  });
  expect_weights_of_rows<Arithmetic>(p, exact, drawn.type, call);
  expect_top_keys(p, call);
  expect_column_sums(p, call);

  const std::vector<double> out = call.out.values();
  call.execution = {.threads = drawn.other_threads, .executor = {.run = run_backwards}};
  drop_some(call.outputs, dice);
  call.out.fill(kNaN);
  call.forward();
  EXPECT_TRUE(same_bits(call.out.values(), out))
      << drawn.other_threads << " threads of a host, other optional outputs";
}

// Gradients that are wanted: all, or some.
AttentionGradients draw_wanted(AttentionCall& call, Dice& dice) {
  AttentionGradients wanted = call.gradients();
  if (dice.chance(0.5)) return wanted;
  for (View* gradient :
       {&wanted.dq, &wanted.dk, &wanted.dv, &wanted.dbias, &wanted.dsinks, &wanted.dquery_scale}) {
    if (dice.chance(0.4)) *gradient = {};
  }
  return wanted;
}

template <typename Arithmetic>
void check_backward(Drawn drawn, const Case& c, Tally& tally) {
  using Real = typename Contract<Arithmetic>::Real;
  oracle::Attention& p = drawn.p;
  Dice dice(c, 14);
  AttentionCall call(p, drawn.type, drawn.side, drawn.layouts);
  call.execution.threads = drawn.other_threads;
  if (!drawn.skip) call.options.skip_epsilon = 0;
  call.forward();
  count(tally, "attention", 0);
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  keep_smooth_rows<Arithmetic>(p, exact);
  call.dout.set(p.dout.values);
  const bool given = dice.chance(0.7);
  if (!given) call.outputs.saved = {};
  const AttentionGradients wanted = draw_wanted(call, dice);
  const AttentionBackwardOptions backward_options{.beta_gradient = drawn.mode, .saved = call.outputs.saved};
  std::vector<std::byte> workspace;
  if (drawn.workspace) {
    use_workspace(call.execution, workspace,
                  attention_backward_workspace(call.q.view(), call.k.view(), call.v.view(), wanted,
                                               call.options, backward_options, call.execution));
  }
  const auto backward = [&](int threads) {
    call.execution.threads = threads;
    attention_backward(call.q.view(), call.k.view(), call.v.view(), call.dout.view(), wanted, call.options,
                       backward_options, call.execution);
    std::vector<double> all;
    for (const Placed* gradient : {&call.dq, &call.dk, &call.dv}) {
      const std::vector<double> values = gradient->values();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  const std::vector<double> first = backward(drawn.other_threads);
  call.execution.workspace = {};
  EXPECT_TRUE(same_bits(backward(drawn.threads), first)) << drawn.threads << " threads";
  count(tally, "attention_backward", p.rows(), 2);
  ExpectedGradients<Arithmetic>(p, exact, drawn.mode == BetaGradient::through_rule,
                                gradient_bound<Arithmetic>(p, exact, given ? call.options.skip_epsilon : 0))
      .expect(call, wanted);
}

template <typename Arithmetic>
void check_in_shards(Drawn drawn, const Case& c, Tally& tally) {
  Dice dice(c, 15);
  const Cuts cuts = draw_starts(dice, dice.between(1, 5), drawn.p.M);
  SCOPED_TRACE("cuts " + testing::PrintToString(cuts));
  Devices devices(drawn.p, drawn.type, cuts);
  if (dice.chance(0.5)) devices.reverse();
  if (dice.chance(0.5)) devices.keep_logits();
  const auto gathered = gather<Arithmetic>(drawn.p, devices);
  const std::int64_t shards = std::ssize(cuts) - 1;
  for (const char* function : {"shard_states", "shard_attention"})
    count(tally, function, drawn.p.rows(), shards);
  count(tally, "merge_outputs", drawn.p.rows());
  expect_outputs<Arithmetic>(drawn, gathered.exact, gathered.out, 0);

  keep_smooth_rows<Arithmetic>(drawn.p, gathered.exact);
  Devices others(drawn.p, drawn.type, cuts);
  GatheredGradients gradients(drawn.p, drawn.type, others, drawn.mode);
  for (const char* function : {"shard_gradient_sums", "shard_backward"})
    count(tally, function, drawn.p.rows(), shards);
  ExpectedGradients<Arithmetic>(drawn.p, gathered.exact, drawn.mode == BetaGradient::through_rule,
                                gradient_bound<Arithmetic>(drawn.p, gathered.exact, 0))
      .expect(gradients.call);
}

template <typename Body>
void run(const Drawn& drawn, const Body& body) {
  SCOPED_TRACE(drawn.describe());
  force_target(drawn.target);
  body();
  force_target("");
}

}  // namespace

void check_attention(const Case& c, Tally& tally) {
  const Drawn drawn = draw(c);
  run(drawn, [&] {
    drawn.type == DType::f64 ? check_forward<double>(drawn, c, tally) : check_forward<float>(drawn, c, tally);
  });
}

void check_attention_backward(const Case& c, Tally& tally) {
  const Drawn drawn = draw(c);
  run(drawn, [&] {
    drawn.type == DType::f64 ? check_backward<double>(drawn, c, tally)
                             : check_backward<float>(drawn, c, tally);
  });
}

void check_shards(const Case& c, Tally& tally) {
  const Drawn drawn = draw(c, false);  // packed sequences can't be cut
  run(drawn, [&] {
    drawn.type == DType::f64 ? check_in_shards<double>(drawn, c, tally)
                             : check_in_shards<float>(drawn, c, tally);
  });
}

}  // namespace whet::soak
