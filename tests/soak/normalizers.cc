// Random rows under normalizers other than softmax: weights against their definitions, gradients against
// differences of those along a random direction.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "cases.h"
#include "normalizer_oracle.h"
#include "oracle.h"
#include "rows.h"
#include "soak.h"

namespace whet::soak {
namespace {

using oracle::Logits;
using oracle::Long;

// The oracle sorts and bisects in long double: longer rows would take all of the time.
constexpr std::int64_t kMostKeys = 2000;

// Above alpha = 2 a weight rises with infinite slope at the threshold, and no bound holds for all rows.
std::string draw_normalizer(Dice& dice) {
  const std::string name = dice.pick<std::string>({"sparsemax", "entmax15", "entmax", "top-k", "hard",
                                                   "straight-through", "sigmoid", "relu", "softpick"});
  if (name == "entmax") return name + ":" + std::to_string(dice.real(1.02, 2));
  if (name == "top-k") return name + ":" + std::to_string(dice.between(1, 40));
  return name;
}

bool is_measured_from_zero(const std::string& name) {
  return name == "sigmoid" || name == "relu" || name == "softpick";
}

struct Drawn {
  Rows rows;
  std::string name;
  bool usable = true;  // false: too long for the oracle, or beyond what unnormalised weights can hold
};

Drawn draw(const Case& c) {
  Drawn drawn{.rows = draw_rows(c), .name = ""};
  Dice dice(c, 7);
  drawn.name = draw_normalizer(dice);
  drawn.rows.normalizer = Normalizer::parse(drawn.name);
  draw_poison(drawn.rows, drawn.rows.in.values);
  drawn.usable = drawn.rows.keys() <= kMostKeys;
  // s = beta x itself counts here, and loses all its digits where it is large.
  for (const double value : drawn.rows.in.values) {
    drawn.usable &= !is_measured_from_zero(drawn.name) || !std::isfinite(value) || std::abs(value) < 50;
  }
  if (is_measured_from_zero(drawn.name)) drawn.rows.rule = draw_rule(dice);
  return drawn;
}

Logits logits_of(const oracle::Row& row, double beta) {
  Logits s(row.size(), -std::numeric_limits<Long>::infinity());
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (row.visible(i)) s[i] = static_cast<Long>(beta) * static_cast<Long>(row.x[i]);
  }
  return s;
}

// Of the arithmetic, relative.
double unit_of(DType type) { return type == DType::f64 ? 2e-13 : 1e-6; }

// How the row is seen: nothing visible, NaN or +inf visible, or ordinary.
enum class Kind { empty, broken, ordinary };
Kind kind_of(const oracle::Row& row) {
  const oracle::State<double> s = oracle::state<double>(row);
  return s.count == 0 ? Kind::empty : oracle::is_broken(s) ? Kind::broken : Kind::ordinary;
}

void expect_weights(const Drawn& drawn, const Written& written, std::int64_t r) {
  const Rows& rows = drawn.rows;
  const oracle::Row row = rows.oracle_row(r);
  const std::vector<double> got = rows.row_of(written.values, r);
  const Kind kind = kind_of(row);
  const double beta = drawn.name == "hard" ? 1 : written.stats[index_of(r)].beta;
  Logits s, exact(got.size(), 0);
  if (kind == Kind::ordinary) exact = oracle::weights_of(drawn.name, s = logits_of(row, beta));
  const double largest = static_cast<double>(oracle::largest(exact));
  const double top = kind == Kind::ordinary ? static_cast<double>(oracle::largest(s)) : 0;
  const double unit = unit_of(rows.type), near_one = drawn.name.starts_with("entmax:1.0") ? 20 : 3;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (kind == Kind::broken) {
      ASSERT_TRUE(std::isnan(got[i]) || !row.visible(i)) << "key " << i << " of a broken row is " << got[i];
      continue;
    }
    const auto w = static_cast<double>(exact[i]);
    const double depth = w > 0 ? std::abs(top) + std::abs(static_cast<double>(s[i]) - top) : 0;
    const double allowed = unit * (near_one * largest + 2 * (1 + depth) * w) + storage_unit(rows.type) * w +
                           (rows.type == DType::f16 ? 6e-8 : 0);
    ASSERT_NEAR(got[i], w, allowed) << "row " << r << ", key " << i << ", beta " << beta;
  }
}

// The slope of a key's own weight, at least: what an error of the incoming gradient is multiplied by.
Logits slopes(const std::string& name, const Logits& s) {
  Logits q = oracle::weights_of(name == "straight-through" ? "softmax" : name, s);
  const Normalizer normalizer = Normalizer::parse(name);
  const Long alpha = name == "sparsemax"           ? 2
                     : name == "entmax15"          ? 1.5L
                     : name.starts_with("entmax:") ? static_cast<Long>(normalizer.parameter())
                                                   : 1;
  Long z = 0;
  for (const Long v : s) z += oracle::is_visible(v) ? std::abs(std::expm1(v)) : 0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    if (name == "relu") q[i] = s[i] > 0 ? 1 / oracle::visible_count(s) : 0;
    if (name == "softpick") q[i] = z == 0 || !oracle::is_visible(s[i]) ? 0 : std::exp(s[i]) / z;
    if (alpha > 1) q[i] = q[i] > 0 ? std::pow(q[i], 2 - alpha) : 0;
  }
  return q;
}

void expect_gradient(const Drawn& drawn, const std::vector<double>& dout, const std::vector<double>& din,
                     double beta, std::int64_t r) {
  const Rows& rows = drawn.rows;
  const oracle::Row row = rows.oracle_row(r);
  const std::vector<double> got = rows.row_of(din, r), g = rows.row_of(dout, r);
  const Kind kind = kind_of(row);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool is_zero = kind == Kind::empty || !row.visible(i);
    const bool is_nan = kind == Kind::broken && !is_zero;
    ASSERT_TRUE(!is_zero || got[i] == 0) << "row " << r << ", key " << i << " is " << got[i];
    ASSERT_TRUE(!is_nan || std::isnan(got[i])) << "row " << r << ", key " << i << " is " << got[i];
  }
  if (kind != Kind::ordinary) return;
  if (drawn.name == "hard") return expect_all(got, 0, "the gradient of hard");
  const std::string forward = drawn.name == "straight-through" ? "softmax" : drawn.name;
  Dice dice({rows.c.seed, 0}, 8);
  const Logits s = logits_of(row, beta), slope = slopes(drawn.name, s);
  std::vector<double> direction(got.size(), 0);
  double largest = 0, along = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!row.visible(i)) continue;
    direction[i] = dice.real(-1, 1);
    largest = std::max(largest, std::abs(g[i]));
    along += direction[i] * got[i];
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    size += std::abs(direction[i]) * (static_cast<double>(slope[i]) * beta * largest + std::abs(got[i]));
  }
  // The derivative of the loss along the direction, to one side.
  const auto loss = [&](Long h) {
    Logits moved = s;
    for (std::size_t i = 0; i < s.size(); ++i) {
      if (row.visible(i)) moved[i] += h * static_cast<Long>(direction[i]);
    }
    const Logits w = oracle::weights_of(forward, moved);
    Long sum = 0;
    for (std::size_t i = 0; i < s.size(); ++i) sum += row.visible(i) ? static_cast<Long>(g[i]) * w[i] : 0;
    return sum;
  };
  // The kink of relu and softpick, where slopes to both sides may agree by chance.
  const auto is_zero = [](Long v) { return v == 0; };
  if (is_measured_from_zero(drawn.name) && std::any_of(s.begin(), s.end(), is_zero)) return;
  const Long step = 1e-8L, here = loss(0);
  const auto slope_to = [&](Long h) {
    return static_cast<double>((loss(h) - here) * static_cast<Long>(beta) / h);
  };
  const double above = slope_to(step), below = slope_to(-step), expected = (above + below) / 2;
  const double unit = rows.type == DType::f64 ? 1e-7 : 5e-6;
  double depth = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (slope[i] > 0) depth = std::max(depth, std::abs(static_cast<double>(s[i] - oracle::largest(s))));
  }
  depth += is_measured_from_zero(drawn.name) ? std::abs(static_cast<double>(oracle::largest(s))) : 0;
  const double allowed = (unit * (1 + std::min(depth, 100.0)) + storage_unit(rows.type)) * size + 1e-9 +
                         (rows.type == DType::f16 ? 6e-8 * static_cast<double>(got.size()) : 0);
  // Where the support changes, or nearly, there is no derivative to compare with: slopes to both sides
  // differ, or grow as the step shrinks where ties make a weight jump.
  const double room = allowed / 4;
  if (std::abs(above - below) > room || std::abs(above - slope_to(10 * step)) > room) return;
  EXPECT_NEAR(along, expected, allowed) << "row " << r << ", beta " << beta;
}

}  // namespace

void check_normalizers(const Case& c, Tally& tally) {
  const Drawn drawn = draw(c);
  if (!drawn.usable) return;
  const Forced forced(drawn.rows.target);
  SCOPED_TRACE(drawn.rows.describe());
  const Written written = run_twice(drawn.rows, softmax, "softmax", tally);
  for (std::int64_t r = 0; r < drawn.rows.count(); ++r) expect_weights(drawn, written, r);
}

void check_normalizers_backward(const Case& c, Tally& tally) {
  const Drawn drawn = draw(c);
  if (!drawn.usable || drawn.rows.keys() > 300) return;
  const Rows& rows = drawn.rows;
  Dice dice(c, 6);
  const oracle::Array dout = draw_array(dice.random(), rows.sizes, rows.type);
  const Forced forced(rows.target);
  SCOPED_TRACE(rows.describe());
  const SoftmaxOptions shared{.rule = library_rule(rows.rule), .normalizer = rows.normalizer};
  const SavedRows saved(rows.type, rows.count(), saved_size(shared));
  const std::vector<RowStats> stats = run(rows, softmax, rows.threads, true, saved.view()).stats;
  count(tally, "softmax", 0);

  const bool given = dice.chance(0.5);
  const auto backward = [&](int threads) {
    Placed in(rows.type, rows.in, rows.in_layout), of_out(rows.type, dout, rows.out_layout), mask;
    Placed din(rows.type, rows.sizes, rows.out_layout);
    if (rows.mask.given()) mask = Placed(DType::boolean, rows.mask, rows.mask_layout);
    SoftmaxOptions options = shared;
    options.axis = static_cast<int>(rows.axis);
    options.mask = mask.view();
    options.lengths = rows.lengths;
    softmax_backward(in.view(), of_out.view(), din.view(), options,
                     {.beta_gradient = BetaGradient::held, .saved = given ? saved.view() : View{}},
                     {.threads = threads});
    EXPECT_TRUE(din.gaps_are_intact());
    return din.values();
  };
  const std::vector<double> din = backward(rows.threads);
  EXPECT_TRUE(whet::same_bits(backward(rows.other_threads), din)) << rows.other_threads << " threads";
  count(tally, "softmax_backward", rows.count(), 2);
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    const double beta = drawn.name == "hard" ? 1 : stats[index_of(r)].beta;
    expect_gradient(drawn, dout.values, din, beta, r);
  }
}

}  // namespace whet::soak
