// Row functions on random rows: softmax, sharpen, states, softmax_backward.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention_contract.h"
#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "rows.h"
#include "soak.h"

namespace whet::soak {
namespace {

template <typename T>
std::vector<T> converted(const std::vector<double>& values) {
  std::vector<T> all;
  for (double value : values) all.push_back(static_cast<T>(value));
  return all;
}

// ---- Checking ----

void expect_all_nan(const oracle::Row& row, const std::vector<double>& got) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(row.visible(i) ? std::isnan(got[i]) : got[i] == 0 || std::isnan(got[i]))
        << "key " << i << " of a broken row is " << got[i];
  }
}

// True if the row is an ordinary one, whose numbers remain to be compared.
template <typename Real>
bool is_ordinary(const oracle::Row& row, const std::vector<double>& got, const RowStats& stats) {
  const oracle::State<Real> s = oracle::state<Real>(row);
  if (s.count == 0) {
    expect_all(got, 0, "a row without visible keys");
    expect_empty_stats(stats);
  } else if (oracle::is_broken(s)) {
    expect_all_nan(row, got);
    expect_broken_stats(stats);
  } else {
    return true;
  }
  return false;
}

template <typename T>
void expect_softmax(const Rows& rows, const Written& written) {
  using Real = typename Contract<T>::Real;
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    const oracle::Row row = rows.oracle_row(r);
    const std::vector<double> got = rows.row_of(written.values, r);
    const RowStats& stats = written.stats[index_of(r)];
    if (!is_ordinary<Real>(row, got, stats)) continue;
    expect_weights<T>(row, stats.beta, converted<T>(got), rows.type);
    expect_row_stats<T>(row, rows.rule, stats);
  }
}

// ln(p / max p) of the visible keys, as in sharpen_test.cc. Negative ones break their row.
oracle::Row logarithms(const oracle::Row& p, double& largest) {
  largest = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (p.visible(i)) largest = std::max(largest, p.x[i]);
  }
  oracle::Row row = p;
  for (std::size_t i = 0; i < p.size(); ++i) {
    row.x[i] = p.x[i] < 0 ? kNaN
                          : static_cast<double>(std::log(static_cast<long double>(p.x[i]) /
                                                         static_cast<long double>(largest)));
    if (p.x[i] == 0) row.x[i] = -kInfinity;
    if (p.x[i] == kInfinity) row.x[i] = kNaN;
  }
  return row;
}

template <typename T>
void expect_sharpened(const Rows& rows, const Written& written) {
  using Real = typename Contract<T>::Real;
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    double largest = 0;
    const oracle::Row row = logarithms(rows.oracle_row(r), largest);
    const std::vector<double> got = rows.row_of(written.values, r);
    const RowStats& stats = written.stats[index_of(r)];
    if (!is_ordinary<Real>(row, got, stats)) continue;
    expect_weights<T>(row, stats.beta, converted<T>(got), rows.type);
    expect_sharpen_stats<T>(row, std::log(static_cast<Real>(largest)), rows.rule, stats);
  }
}

template <typename T>
void expect_states(const Rows& rows, const std::vector<RowState>& got) {
  using Real = typename Contract<T>::Real;
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    const oracle::Row row = rows.oracle_row(r);
    const RowState& state = got[index_of(r)];
    const oracle::State<Real> s = oracle::state<Real>(row);
    if (!oracle::is_broken(s)) {
      expect_states_close<T>(row, state);
      continue;
    }
    EXPECT_EQ(state.count, s.count);
    for (double field : {state.min, state.max, state.z, state.t, state.u}) EXPECT_TRUE(std::isnan(field));
  }
}

// At a kink of the rule, which side a row is on is up to rounding.
template <typename T>
bool is_near_a_kink(const oracle::Row& row, const oracle::Rule& rule) {
  using Real = typename Contract<T>::Real;
  const Real near = 0x1p-13;
  if (oracle::state<Real>(row).count <= 1) return false;
  const Real h = oracle::entropy<Real>(row);
  if (oracle::solves(rule)) {
    const Real ties = static_cast<Real>(oracle::top<Real>(row).ties);
    const Real reachable =
        rule.kind == Rule::Kind::target_entropy ? std::log(ties) - rule.parameter : 1 / ties - rule.parameter;
    return std::abs(oracle::shortfall<Real>(row, rule, 1)) < near || std::abs(reachable) < near;
  }
  if (!oracle::of_entropy(rule)) return false;
  return std::abs(h - Real{rule.gate}) < near || std::abs(h - Real{rule.hold}) < near ||
         std::abs(oracle::polynomial(rule.coefficients, std::min(h, Real{rule.hold})) - 1) < near;
}

template <typename T>
void expect_gradients(const Rows& rows, const std::vector<double>& dout, BetaGradient mode,
                      const std::vector<RowStats>& stats, const std::vector<double>& din) {
  using Real = typename Contract<T>::Real;
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    const oracle::Row row = rows.oracle_row(r);
    const std::vector<double> got = rows.row_of(din, r);
    const oracle::State<Real> s = oracle::state<Real>(row);
    if (s.count == 0) {
      expect_all(got, 0, "a row without visible keys");
    } else if (oracle::is_broken(s)) {
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(row.visible(i) ? std::isnan(got[i]) : got[i] == 0)
            << "key " << i << " of a broken row is " << got[i];
      }
    } else if (mode == BetaGradient::held || !is_near_a_kink<T>(row, rows.rule)) {
      expect_gradient<T>(row, rows.row_of(dout, r), rows.rule, mode, stats[index_of(r)].beta,
                         converted<T>(got), rows.type);
    }
  }
}

}  // namespace

void check_softmax(const Case& c, Tally& tally) {
  Rows rows = draw_rows(c);
  draw_poison(rows, rows.in.values);
  const Forced forced(rows.target);
  SCOPED_TRACE(rows.describe());
  const Written written = run_twice(rows, softmax, "softmax", tally);
  rows.type == DType::f64 ? expect_softmax<double>(rows, written) : expect_softmax<float>(rows, written);
}

void check_sharpen(const Case& c, Tally& tally) {
  Rows rows = draw_rows(c);
  Dice dice(c, 5);
  const double scale = dice.pick<double>({1, 1, 1, 0.9, 8});
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    const oracle::Row row(rows.row_of(rows.in.values, r));
    const std::vector<double> p = oracle::weights<double>(row, 1);
    for (std::int64_t key = 0; key < rows.keys(); ++key) {
      double value = rounded(rows.type, scale * p[index_of(key)]);
      if (dice.chance(0.02)) value = 0;
      if (!rows.visible(r, key) && dice.chance(0.3)) value = dice.pick<double>({kNaN, kInfinity, -1});
      if (dice.chance(0.0005)) value = dice.pick<double>({kNaN, kInfinity, -0.25});
      rows.in.values[rows.position(r, key)] = value;
    }
  }
  const Forced forced(rows.target);
  SCOPED_TRACE(rows.describe());
  const Written written = run_twice(rows, sharpen, "sharpen", tally);
  rows.type == DType::f64 ? expect_sharpened<double>(rows, written) : expect_sharpened<float>(rows, written);
}

void check_states(const Case& c, Tally& tally) {
  Rows rows = draw_rows(c);
  draw_poison(rows, rows.in.values);
  const Forced forced(rows.target);
  SCOPED_TRACE(rows.describe());
  Placed in(rows.type, rows.in, rows.in_layout), mask;
  if (rows.mask.given()) mask = Placed(DType::boolean, rows.mask, rows.mask_layout);
  std::vector<RowState> got(index_of(rows.count())), again(got.size());
  const StatesOptions options{
      .axis = static_cast<int>(rows.axis), .mask = mask.view(), .lengths = rows.lengths};
  states(in.view(), got, options, {.threads = rows.threads});
  states(in.view(), again, options, {.threads = rows.other_threads});
  count(tally, "states", rows.count(), 2);
  for (std::size_t r = 0; r < got.size(); ++r) {
    const auto fields = [](const RowState& s) { return std::array{s.min, s.max, s.z, s.t, s.u}; };
    EXPECT_TRUE(whet::same_bits(fields(got[r]), fields(again[r]))) << rows.other_threads << " threads";
  }
  rows.type == DType::f64 ? expect_states<double>(rows, got) : expect_states<float>(rows, got);
}

void check_softmax_backward(const Case& c, Tally& tally) {
  Rows rows = draw_rows(c);
  Dice dice(c, 6);
  oracle::Array dout = draw_array(dice.random(), rows.sizes, rows.type);
  draw_poison(rows, rows.in.values);
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    for (std::int64_t key = 0; key < rows.keys(); ++key) {
      if (!rows.visible(r, key) && dice.chance(0.2)) dout.values[rows.position(r, key)] = kNaN;
    }
  }
  const Forced forced(rows.target);
  SCOPED_TRACE(rows.describe());
  const SavedRows saved(rows.type, rows.count(), saved_size(SoftmaxOptions{.rule = library_rule(rows.rule)}));
  const std::vector<RowStats> stats = run(rows, softmax, rows.threads, true, saved.view()).stats;
  count(tally, "softmax", 0);

  const BetaGradient mode = dice.chance(0.7) ? BetaGradient::through_rule : BetaGradient::held;
  const bool given = dice.chance(0.5);
  const auto backward = [&](int threads) {
    Placed in(rows.type, rows.in, rows.in_layout), of_out(rows.type, dout, rows.out_layout), mask;
    Placed din(rows.type, rows.sizes, rows.out_layout);
    Placed& to = rows.in_place ? of_out : din;
    if (rows.mask.given()) mask = Placed(DType::boolean, rows.mask, rows.mask_layout);
    softmax_backward(in.view(), of_out.view(), to.view(),
                     {.rule = library_rule(rows.rule),
                      .axis = static_cast<int>(rows.axis),
                      .mask = mask.view(),
                      .lengths = rows.lengths},
                     {.beta_gradient = mode, .saved = given ? saved.view() : View{}}, {.threads = threads});
    EXPECT_TRUE(to.gaps_are_intact());
    return to.values();
  };
  const std::vector<double> din = backward(rows.threads);
  const std::vector<double> again = backward(rows.other_threads);
  EXPECT_TRUE(whet::same_bits(again, din)) << rows.other_threads << " threads";
  count(tally, "softmax_backward", rows.count(), 2);
  rows.type == DType::f64 ? expect_gradients<double>(rows, dout.values, mode, stats, din)
                          : expect_gradients<float>(rows, dout.values, mode, stats, din);
}

}  // namespace whet::soak
