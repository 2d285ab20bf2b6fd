// Attention with everything drawn at random and jointly: sizes, element types, layouts, rules, every option,
// threads, target, forward and backward, NaN in places that nothing sees. What comes out is compared with the
// oracle. A case that fails is made as small as it goes and printed as one line; to run that one again:
//     WHET_CASE="SEED B H K N M D E" whet_tests --gtest_filter=AttentionRandom.*
//
// The contract is asserted in attention_test.cc and attention_backward_test.cc on problems large enough for
// the plain evaluation to be a fair measure. Here a problem may be one row of two keys, which it can meet
// exactly by luck, so bounds are a priori ones: a few times wider, but far below what a wrong term gives.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "cases.h"
#include "contract.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define WHET_TEST_IS_SLOW
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WHET_TEST_IS_SLOW
#endif

namespace whet {
namespace {

#ifdef WHET_TEST_IS_SLOW
constexpr std::uint64_t kDraws = 200;
#else
constexpr std::uint64_t kDraws = 3000;
#endif

// ---- Drawing ----

// Every part of a case has dice of its own: smaller sizes leave its other parts as they were.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t part) : random_(seed * 64 + part) {}

  Random& random() { return random_; }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  double real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }
  template <typename T>
  T pick(const std::vector<T>& all) {
    return all[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(all.size()) - 1))];
  }

 private:
  Random random_;
};

struct Case {
  std::uint64_t seed;
  Shape shape;
};

std::string text(const Case& c) {
  std::ostringstream line;
  line << c.seed;
  for (std::int64_t size : {c.shape.B, c.shape.H, c.shape.K, c.shape.N, c.shape.M, c.shape.D, c.shape.E}) {
    line << " " << size;
  }
  return line.str();
}

Shape draw_shape(std::uint64_t seed) {
  Dice dice(seed, 0);
  Shape s;
  s.B = dice.between(1, 2);
  s.K = dice.between(1, 2);
  s.H = s.K * dice.between(1, 3);
  s.N = dice.chance(0.3) ? dice.between(0, 3) : dice.between(1, dice.chance(0.2) ? 40 : 15);
  s.M = dice.chance(0.2) ? dice.between(0, 3) : dice.between(1, 40);
  s.D = dice.between(1, 20);
  s.E = dice.between(1, 20);
  if (dice.chance(0.08)) {
    s.M = dice.between(250, 300);
    s.N = std::min<std::int64_t>(s.N, 6);
  }
  return s;
}

oracle::Rule draw_rule(Dice& dice) {
  using Kind = Rule::Kind;
  switch (dice.between(0, 7)) {
    case 0:
      return {Kind::none};
    case 1:
      return {Kind::fixed, dice.real(0.2, 3)};
    case 2:
      return {Kind::paper, 1, 1, oracle::paper_coefficients()};
    case 3:
      return {Kind::polynomial, 1, 1, {dice.real(-0.3, 0.5), dice.real(0.5, 2)}, dice.real(0.2, 1),
              dice.real(1.5, 4)};
    case 4:
      return {Kind::log_length, dice.real(2, 20), dice.real(0.5, 2)};
    case 5:
      return {Kind::ssmax, dice.real(0.2, 1)};
    case 6:
      return {Kind::target_entropy, dice.real(0.1, 2)};
    default:
      return {Kind::target_peak, dice.real(0.1, 0.95)};
  }
}

Layout draw_layout(Dice& dice, std::size_t axes = 4) {
  Layout layout;
  if (dice.chance(0.4)) return layout;
  layout.order.resize(axes);
  std::iota(layout.order.begin(), layout.order.end(), std::size_t{0});
  std::shuffle(layout.order.begin(), layout.order.end(), dice.random());
  layout.spacing = dice.chance(0.7) ? 1 : dice.between(2, 3);
  layout.padding = dice.between(0, 3);
  layout.offset = static_cast<std::size_t>(dice.between(0, 3));
  for (std::size_t axis = 0; axis < axes; ++axis) {
    if (dice.chance(0.2)) layout.backwards.push_back(axis);
  }
  return layout;
}

// Each axis of a side array has its size, or 1.
std::vector<std::int64_t> draw_sizes(Dice& dice, std::vector<std::int64_t> sizes) {
  for (std::int64_t& size : sizes) {
    if (dice.chance(0.35)) size = 1;
  }
  return sizes;
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
  bool stats, workspace, backward, skip;
  BetaGradient mode;
};

void draw_visibility(oracle::Attention& p, std::uint64_t seed) {
  Dice dice(seed, 1);
  p.causal = dice.chance(0.35);
  p.align = dice.chance(0.5) ? Align::end : Align::start;
  if (dice.chance(0.25)) p.window_left = dice.between(0, 20);
  if (dice.chance(0.15)) p.window_right = dice.between(0, 20);
  const double kind = dice.real(0, 1);
  Dice of_sizes(seed, 2);
  if (kind < 0.2) {
    for (std::int64_t b = 0; b < p.B; ++b) p.lengths.push_back(of_sizes.between(0, p.M));
  } else if (kind < 0.35) {
    for (std::int64_t r = 0; r < p.rows(); ++r) p.lengths.push_back(of_sizes.between(0, p.M));
  } else if (kind < 0.55 && p.B == 1) {
    const std::int64_t sequences = of_sizes.between(1, 4);
    p.query_starts = draw_starts(of_sizes, sequences, p.N);
    p.key_starts = draw_starts(of_sizes, sequences, p.M);
  }
  Dice of_mask(seed, 3);
  if (of_mask.chance(0.3)) {
    const double visible = of_mask.real(0.2, 1);
    p.mask = draw_mask(of_mask.random(), draw_sizes(of_mask, {p.B, p.H, p.N, p.M}), visible);
  }
}

void draw_logits(oracle::Attention& p, std::uint64_t seed, DType side) {
  Dice dice(seed, 4);
  if (dice.chance(0.3)) p.scale = dice.real(-1, 1);
  if (dice.chance(0.25)) p.softcap = dice.real(0.5, 5);
  Dice of_query(seed, 5);
  if (of_query.chance(0.25)) {
    p.query_scale = draw_array(of_query.random(), draw_sizes(of_query, {p.B, p.H, p.N}), side);
  }
  Dice of_bias(seed, 6);
  if (of_bias.chance(0.35)) {
    const double hidden = of_bias.chance(0.5) ? 0.2 : 0;
    p.bias = draw_array(of_bias.random(), draw_sizes(of_bias, {p.B, p.H, p.N, p.M}), side);
    for (double& value : p.bias.values) value = of_bias.chance(hidden) ? -kInfinity : value;
  }
  Dice of_sinks(seed, 7);
  if (of_sinks.chance(0.3)) {
    p.sinks = draw_array(of_sinks.random(), {p.H}, side, 2);
    for (double& value : p.sinks.values) value = of_sinks.chance(0.15) ? -kInfinity : value;
  }
  Dice of_rules(seed, 8);
  const bool each_head = of_rules.chance(0.3);
  p.rules.clear();
  for (std::int64_t h = 0; h < (each_head ? p.H : 1); ++h) p.rules.push_back(draw_rule(of_rules));
  if (!Dice(seed, 9).chance(0.15)) return;
  p.scale = 0.5;
  for (oracle::Array* array : {&p.q, &p.k, &p.query_scale, &p.bias, &p.sinks}) put_on_grid(*array);
}

// NaN where nothing sees it, and rarely in a query.
void draw_poison(oracle::Attention& p, std::uint64_t seed) {
  Dice dice(seed, 10);
  if (dice.chance(0.04) && !p.q.values.empty()) p.q.values[0] = kNaN;
  if (!dice.chance(0.3)) return;
  std::vector<bool> seen(static_cast<std::size_t>(p.B * p.K * p.M), false);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const oracle::AttentionRow<double> row = oracle::row_of<double>(p, b, h, i);
    for (std::int64_t j : row.keys)
      seen[static_cast<std::size_t>((b * p.K + p.key_head(h)) * p.M + j)] = true;
    if (row.count() > 0) return;
    p.q.values[p.q.position({b, h, i, p.D - 1})] = kNaN;
    p.dout.values[p.dout.position({b, h, i, 0})] = kNaN;
  });
  for (std::size_t n = 0; n < seen.size(); ++n) {
    if (seen[n]) continue;
    p.k.values[n * static_cast<std::size_t>(p.D)] = dice.chance(0.5) ? kNaN : kInfinity;
    p.v.values[(n + 1) * static_cast<std::size_t>(p.E) - 1] = dice.chance(0.5) ? kNaN : kInfinity;
  }
}

Drawn draw(const Case& c) {
  Drawn drawn;
  Dice dice(c.seed, 11);
  drawn.type = dice.pick<DType>({DType::f32, DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
  drawn.side = dice.chance(0.5) ? drawn.type : arithmetic_type(drawn.type);
  drawn.target = dice.pick(targets());
  drawn.threads = dice.pick<int>({1, 1, 1, 2, 3, 7, 0});
  drawn.stats = dice.chance(0.7);
  drawn.workspace = dice.chance(0.3);
  drawn.backward = dice.chance(0.5);
  drawn.skip = dice.chance(0.8);
  drawn.mode = dice.chance(0.7) ? BetaGradient::through_rule : BetaGradient::held;
  const double sharpness = dice.pick<double>({0.3, 1, 1, 2, 6});
  drawn.layouts = {draw_layout(dice), draw_layout(dice), draw_layout(dice), draw_layout(dice),
                   draw_layout(dice)};
  Dice values(c.seed, 12);
  drawn.p = draw_problem(values.random(), c.shape, drawn.type, sharpness);
  draw_visibility(drawn.p, c.seed);
  draw_logits(drawn.p, c.seed, drawn.side);
  draw_poison(drawn.p, c.seed);
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
void expect_forward(const Drawn& drawn, const oracle::Forward<Real>& exact, const AttentionCall& call,
                    const std::vector<RowStats>& stats) {
  const oracle::Attention& p = drawn.p;
  const std::vector<double> out = call.out.values();
  const double largest_value = largest(p.v.values);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    SCOPED_TRACE("row " + std::to_string(r));
    const auto part = [&](const auto& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r) * p.E;
      return std::vector(begin, begin + p.E);
    };
    const double bound = output_bound<Arithmetic>(exact.rows[r], exact.betas[r], p.D, largest_value);
    const double skipped = 2 * call.options.skip_epsilon * largest_value;
    expect_all_within(part(out), part(exact.out), std::isnan(bound) ? 0 : bound + skipped, drawn.type, "out");
    expect_attention_stats<Arithmetic>(exact.rows[r], p.D, p.rule(h), stats[r], call.options.skip_epsilon);
  });
  EXPECT_TRUE(call.out.gaps_are_intact());
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

template <typename Arithmetic>
void check_of(Drawn drawn) {
  using Real = typename Contract<Arithmetic>::Real;
  oracle::Attention& p = drawn.p;
  AttentionCall call(p, drawn.type, drawn.side, drawn.layouts);
  call.options.threads = drawn.threads;
  if (!drawn.skip) call.options.skip_epsilon = 0;
  std::vector<std::byte> workspace;
  if (drawn.workspace) {
    workspace.assign(attention_workspace(call.q.view(), call.k.view(), call.v.view(), call.options),
                     std::byte{0xFF});
    call.options.workspace = workspace;
  }
  call.forward();
  const std::vector<RowStats> stats = call.stats;
  if (!drawn.stats) {
    const std::vector<std::byte> bits = call.out.bits();
    call.options.stats = {};
    call.forward();
    EXPECT_TRUE(call.out.bits() == bits) << "without stats";
  }
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, call.betas());
  expect_forward<Arithmetic>(drawn, exact, call, stats);
  if (!drawn.backward) return;

  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    if (exact.rows[r].count() == 0 || is_smooth<Arithmetic>(exact.rows[r], p.rule(h), exact.betas[r], p.D))
      return;
    for (std::int64_t e = 0; e < p.E; ++e) p.dout.values[p.dout.position({b, h, i, e})] = 0;
  });
  call.dout.set(p.dout.values);
  if (drawn.workspace) {
    workspace.assign(attention_backward_workspace(call.q.view(), call.k.view(), call.v.view(),
                                                  call.gradients(), call.options),
                     std::byte{0xFF});
    call.options.workspace = workspace;
  }
  call.backward(drawn.mode);
  ExpectedGradients<Arithmetic>(
      p, exact, drawn.mode == BetaGradient::through_rule,
      gradient_bound<Arithmetic>(p, exact, drawn.stats ? call.options.skip_epsilon : 0))
      .expect(call);
}

void check(const Case& c) {
  const Drawn drawn = draw(c);
  force_target(drawn.target);
  SCOPED_TRACE("type " + std::to_string(static_cast<int>(drawn.type)) + ", target " + drawn.target + ", " +
               std::to_string(drawn.threads) + " threads, rule " + library_rule(drawn.p.rules[0]).name());
  if (drawn.type == DType::f64) {
    check_of<double>(drawn);
  } else {
    check_of<float>(drawn);
  }
  force_target("");
}

// ---- Running ----

// The first complaint about a case; "" if there is none.
std::string complaint(const Case& c) {
  testing::TestPartResultArray results;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    try {
      check(c);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "throws " << error.what();
    }
  }
  return results.size() == 0 ? "" : results.GetTestPartResult(0).message();
}

// Halves one size after another as long as it still fails.
Case shrink(Case c) {
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (std::int64_t Shape::*size :
         {&Shape::B, &Shape::H, &Shape::K, &Shape::N, &Shape::M, &Shape::D, &Shape::E}) {
      Case next = c;
      next.shape.*size /= 2;
      if (next.shape.*size == 0 || next.shape.H % next.shape.K != 0 || complaint(next).empty()) continue;
      c = next;
      smaller = true;
    }
  }
  return c;
}

TEST(AttentionRandom, AgreesWithTheOracle) {
  if (const char* given = std::getenv("WHET_CASE")) {
    Case c{};
    Shape& s = c.shape;
    std::istringstream line(given);
    line >> c.seed >> s.B >> s.H >> s.K >> s.N >> s.M >> s.D >> s.E;
    ASSERT_TRUE(line) << "WHET_CASE is '" << given << "', must be SEED B H K N M D E";
    check(c);
    return;
  }
  int failures = 0;
  for (std::uint64_t seed = 1; seed <= kDraws && failures < 5; ++seed) {
    const Case c{seed, draw_shape(seed)};
    if (complaint(c).empty()) continue;
    const Case smallest = shrink(c);
    ADD_FAILURE() << "WHET_CASE=\"" << text(smallest) << "\" (found as \"" << text(c) << "\")\n"
                  << complaint(smallest);
    ++failures;
  }
}

}  // namespace
}  // namespace whet
