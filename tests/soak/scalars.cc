// Functions of a few numbers: merging of states, rules and their names, horizons.
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
#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "soak.h"

namespace whet::soak {
namespace {

using Real = long double;
constexpr Real kUnit = std::numeric_limits<double>::epsilon();

RowState to_state(const oracle::State<Real>& s) {
  return {s.count,
          static_cast<double>(s.min),
          static_cast<double>(s.max),
          static_cast<double>(s.z),
          static_cast<double>(s.t),
          static_cast<double>(s.u)};
}

// Relative to `size`, a few roundings off.
void expect_close(double got, Real expected, Real size, const char* what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << what << " is " << got;
  } else if (static_cast<Real>(got) != expected) {
    expect_within<Real>(got, expected, 64 * kUnit * size + std::numeric_limits<double>::min(), what);
  }
}

void expect_functions_of(const RowState& state, const oracle::Row& row) {
  const oracle::State<Real> s = oracle::state<Real>(row);
  if (s.count == 0) {
    EXPECT_EQ(row_log_sum_exp(state), -kInfinity);
    for (double value : {row_entropy(state), row_varentropy(state), row_peak(state), row_spread(state)}) {
      EXPECT_EQ(value, 0);
    }
    return;
  }
  const Real log_z = std::log(s.z), mean = s.t / s.z;
  expect_close(row_log_sum_exp(state), s.max + log_z, std::abs(s.max) + log_z + 1, "row_log_sum_exp");
  expect_close(row_entropy(state), log_z - mean, 1 + log_z + std::abs(mean), "row_entropy");
  expect_close(row_varentropy(state), oracle::moments<Real>(row).variance, s.u / s.z + mean * mean + 1,
               "row_varentropy");
  expect_close(row_peak(state), 1 / s.z, 1 / s.z, "row_peak");
  expect_close(row_spread(state), s.max - s.min, s.max - s.min, "row_spread");
}

// The same rule with a name that was changed at one character.
std::string misspelt(std::string name, Dice& dice) {
  static const std::string kLetters = "0123456789.,:-+eE=abinopxyz \n";
  const std::size_t at = static_cast<std::size_t>(dice.between(0, std::ssize(name) - 1));
  const char letter = kLetters[static_cast<std::size_t>(dice.between(0, std::ssize(kLetters) - 1))];
  switch (dice.between(0, 3)) {
    case 0:
      name[at] = letter;
      break;
    case 1:
      name.insert(at, 1, letter);
      break;
    case 2:
      name.erase(at, 1);
      break;
    default:
      name.resize(at);
  }
  return name;
}

// The largest singular value: the largest norm of a row after one-sided Jacobi rotations.
Real singular_value(std::vector<std::vector<Real>> rows) {
  const auto dot = [](const std::vector<Real>& a, const std::vector<Real>& b) {
    Real sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  for (int sweep = 0; sweep < 60; ++sweep) {
    for (std::size_t p = 0; p < rows.size(); ++p) {
      for (std::size_t q = p + 1; q < rows.size(); ++q) {
        const Real a = dot(rows[p], rows[p]), b = dot(rows[q], rows[q]), c = dot(rows[p], rows[q]);
        if (c == 0) continue;
        const Real angle = std::atan2(2 * c, a - b) / 2;
        for (std::size_t i = 0; i < rows[p].size(); ++i) {
          const Real x = rows[p][i], y = rows[q][i];
          rows[p][i] = std::cos(angle) * x + std::sin(angle) * y;
          rows[q][i] = std::cos(angle) * y - std::sin(angle) * x;
        }
      }
    }
  }
  Real largest = 0;
  for (const std::vector<Real>& row : rows) largest = std::max(largest, std::sqrt(dot(row, row)));
  return largest;
}

void check_singular_value(Dice& dice, Tally& tally) {
  const DType type = dice.chance(0.5) ? DType::f32 : DType::f64;
  const std::int64_t rows = dice.size(0, 6), columns = dice.size(0, 6);
  const double scale = type == DType::f64 ? dice.magnitude(1e-300, 1e300) : dice.magnitude(1e-30, 1e30);
  const oracle::Array matrix = draw_array(dice.random(), {rows, columns}, type, scale);
  Placed placed(type, matrix, draw_layout(dice, 2));
  const double got = largest_singular_value(placed.view());
  count(tally, "largest_singular_value", 1);
  std::vector<std::vector<Real>> exact(static_cast<std::size_t>(rows));
  for (std::size_t n = 0; n < matrix.values.size(); ++n) {
    exact[n / static_cast<std::size_t>(columns)].push_back(matrix.values[n]);
  }
  const Real expected = singular_value(exact);
  EXPECT_GE(static_cast<Real>(got), expected * (1 - 4 * kUnit)) << rows << " x " << columns;
  EXPECT_LE(static_cast<Real>(got), expected * (1 + Real{1e-9L})) << rows << " x " << columns;
}

}  // namespace

// A row cut into parts, whose states are merged in any order.
void check_merge(const Case& c, Tally& tally) {
  Dice dice(c, 1);
  const std::size_t n = static_cast<std::size_t>(dice.size(0, 60));
  const RowKind kind = kRowKinds[dice.between(0, std::ssize(kRowKinds) - 1)];
  SCOPED_TRACE(describe(n, kind));
  oracle::Row row(make_row<double>(kind, n, dice.random()));
  for (double& x : row.x) {
    if (dice.chance(0.05)) x = -kInfinity;
  }
  const bool broken = n > 0 && dice.chance(0.05);
  if (broken) row.x[0] = dice.chance(0.5) ? kNaN : kInfinity;

  std::vector<RowState> parts;
  for (std::size_t from = 0; from < n;) {
    const std::size_t to = std::min(n, from + static_cast<std::size_t>(dice.between(1, 20)));
    const std::vector<double> part(row.x.begin() + static_cast<std::ptrdiff_t>(from),
                                   row.x.begin() + static_cast<std::ptrdiff_t>(to));
    parts.push_back(to_state(oracle::state<Real>(oracle::Row(part))));
    if (dice.chance(0.1)) parts.emplace_back();
    from = to;
  }
  std::shuffle(parts.begin(), parts.end(), dice.random());
  while (parts.size() > 1) {
    const std::size_t at = static_cast<std::size_t>(dice.between(0, std::ssize(parts) - 2));
    parts[at] = merge(parts[at], parts[at + 1]);
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    count(tally, "merge", 0);
  }
  const RowState merged = parts.empty() ? RowState{} : parts[0];
  const oracle::State<Real> s = oracle::state<Real>(row);
  count(tally, "row_entropy and others", 1, 5);
  EXPECT_EQ(merged.count, s.count);
  if (broken) {
    for (double field : {merged.min, merged.max, merged.z, merged.t, merged.u})
      EXPECT_TRUE(std::isnan(field));
    return;
  }
  EXPECT_EQ(merged.min, static_cast<double>(s.min));
  EXPECT_EQ(merged.max, static_cast<double>(s.max));
  // e^(m_s - m) is off by |m_s - m| roundings.
  const Real spread = s.count == 0 ? 0 : s.max - s.min;
  const Real bound = kUnit * (64 + spread);
  expect_within<Real>(merged.z, s.z, bound * s.z, "z");
  expect_within<Real>(merged.t, s.t, bound * (std::abs(s.t) + s.z), "t");
  expect_within<Real>(merged.u, s.u, bound * (s.u + std::abs(s.t) + s.z), "u");
  expect_functions_of(to_state(s), row);
}

// A rule is its name again, a name that isn't one is refused, and beta of a state is what it says.
void check_rule(const Case& c, Tally& tally) {
  Dice dice(c, 1);
  const oracle::Rule plain = draw_rule(dice);
  const Rule rule = library_rule(plain);
  SCOPED_TRACE(rule.name());
  EXPECT_TRUE(Rule::parse(rule.name()) == rule);
  const std::string other = misspelt(rule.name(), dice);
  count(tally, "Rule::parse", 0, 2);
  try {
    const Rule parsed = Rule::parse(other);
    EXPECT_TRUE(Rule::parse(parsed.name()) == parsed) << other;
  } catch (const Error& error) {
    EXPECT_FALSE(std::string(error.what()).empty());
  }
  if (rule.needs_search()) return;

  const RowKind kind = kRowKinds[dice.between(0, std::ssize(kRowKinds) - 1)];
  const oracle::Row row(make_row<double>(kind, static_cast<std::size_t>(dice.size(0, 60)), dice.random()));
  const RowState state = to_state(oracle::state<Real>(row));
  const Real beta = oracle::beta<Real>(row, plain);
  count(tally, "Rule::beta, Rule::slope", 1, 2);
  const Real h = row.size() == 0 ? 0 : oracle::entropy<Real>(row);
  expect_within<Real>(rule.beta(state), beta, 1024 * kUnit * (1 + beta), "beta");
  const bool at_kink = std::abs(h - plain.gate) < 1e-9L || std::abs(h - plain.hold) < 1e-9L ||
                       std::abs(oracle::polynomial(plain.coefficients, h) - 1) < 1e-9L;
  if (at_kink) return;
  const bool moves = oracle::of_entropy(plain) && row.size() > 1 && oracle::moves<Real>(row, plain);
  const Real slope = moves ? oracle::polynomial_slope(plain.coefficients, h) : Real{0};
  expect_within<Real>(rule.slope(state), slope, 4096 * kUnit * (1 + std::abs(slope)), "slope");
}

// The formulas of horizon.h in long double.
void check_horizon(const Case& c, Tally& tally) {
  Dice dice(c, 1);
  const double spread = dice.chance(0.1) ? dice.pick<double>({0, kInfinity}) : dice.magnitude(1e-6, 1e3);
  const double beta = dice.magnitude(1e-2, 1e2);
  const double weight = dice.chance(0.1) ? 1 : dice.real(1e-6, 1);
  const double keys = dice.chance(0.1) ? dice.pick<double>({1, kInfinity}) : dice.magnitude(1, 1e12);
  SCOPED_TRACE("spread " + testing::PrintToString(spread) + ", beta " + testing::PrintToString(beta) +
               ", weight " + testing::PrintToString(weight) + ", keys " + testing::PrintToString(keys));
  const Real d = static_cast<Real>(beta * spread);
  const Real size = 1 + d;  // an exponential is off by as many roundings as its argument has units
  const auto to_double_range = [](Real value) {
    return value > std::numeric_limits<double>::max() ? std::numeric_limits<Real>::infinity() : value;
  };
  const Real horizon_of = weight == 1 ? Real{1} : to_double_range(1 + std::exp(d) * (1 / Real{weight} - 1));
  expect_close(horizon(spread, weight, beta), horizon_of, horizon_of * size, "horizon");
  const Real infinitely_many = std::isinf(d) ? 1 : 0;
  const Real weight_of = std::isinf(keys) ? infinitely_many : 1 / (1 + (Real{keys} - 1) * std::exp(-d));
  expect_close(largest_weight(keys, spread, beta), weight_of, weight_of * size, "largest_weight");
  const WeightBounds bounds = paper_bounds(keys, spread, beta);
  const Real upper = std::isinf(keys) ? infinitely_many : std::min(Real{1}, std::exp(d) / Real{keys});
  expect_close(bounds.lower, std::exp(-d) / Real{keys}, std::exp(-d) / Real{keys} * size, "lower");
  expect_close(bounds.upper, upper, upper * size, "upper");
  EXPECT_LE(largest_weight(keys, spread, beta), bounds.upper * (1 + 1e-12));
  count(tally, "horizon, largest_weight, paper_bounds", 1, 4);

  const auto norm = [&] { return dice.chance(0.05) ? 0 : dice.magnitude(1e-60, 1e60); };
  const HeadNorms norms{norm(), norm(), norm(), norm(), norm(), norm()};
  const Real bound = 2 * (Real{norms.query_gain} * norms.query_input + norms.query_bias) * norms.key_gain *
                     norms.key_input * norms.scale;
  expect_close(spread_bound(norms), to_double_range(bound), bound, "spread_bound");
  count(tally, "spread_bound", 1);
  if (dice.chance(0.2)) check_singular_value(dice, tally);
}

}  // namespace whet::soak
