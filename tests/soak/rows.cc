// Row functions on random rows: softmax, sharpen, states, softmax_backward.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_runs.h"
#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "soak.h"

namespace whet::soak {
namespace {

// ---- Drawing ----

// Wider than in attention, where the rounding of logits would drown what is found here.
oracle::Rule draw_wide_rule(Dice& dice) {
  using Kind = Rule::Kind;
  if (dice.chance(0.6)) return draw_rule(dice);
  switch (dice.between(0, 6)) {
    case 0:
      return {Kind::fixed, dice.magnitude(1e-3, 1e3)};
    case 1:
      return {Kind::log_length, dice.magnitude(1.1, 1e5), dice.magnitude(0.1, 10)};
    case 2:
      return {Kind::ssmax, dice.magnitude(1e-2, 10)};
    case 3:
      return {.kind = Kind::log_power,
              .parameter = dice.chance(0.2) ? 0 : dice.magnitude(1e-2, 10),
              .factor = dice.magnitude(1e-3, 1),
              .exponent = dice.real(0, 3)};
    case 4:
      return {Kind::llama4, std::floor(dice.magnitude(1, 1e5)), dice.magnitude(1e-2, 10)};
    case 5:
      return {Kind::target_entropy, dice.magnitude(1e-3, 10)};
    default:
      return {Kind::target_peak, dice.chance(0.5) ? dice.magnitude(1e-4, 1) : 1 - dice.magnitude(1e-4, 0.5)};
  }
}

// Long rows of few levels, where every rounding goes the same way, and target rules on them are the hardest.
constexpr std::int64_t kLong = 600;

// Mostly short, often around the length of a vector, of a tile of sums or of a block; rarely long.
std::int64_t draw_keys(Dice& dice) {
  const double kind = dice.real(0, 1);
  if (kind < 0.1) return dice.size(0, 3);
  if (kind < 0.93) return dice.size(1, 80);
  if (kind < 0.98) return dice.size(250, 520);
  if (kind < 0.995) return dice.size(1000, 5000);
  return dice.pick<std::int64_t>({20000, 65536, 131072}) - dice.between(0, 1);
}

struct Rows {
  Case c;
  DType type = DType::f32;
  std::vector<std::int64_t> sizes;
  std::size_t axis = 0;
  oracle::Array in;
  oracle::Array mask;
  std::vector<std::int64_t> lengths;
  oracle::Rule rule;
  Layout in_layout, out_layout, mask_layout;
  bool in_place = false;
  int threads = 1, other_threads = 2;
  std::string target;

  std::int64_t keys() const { return sizes[axis]; }
  std::int64_t inner() const {
    return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(axis) + 1, sizes.end(),
                           std::int64_t{1}, std::multiplies{});
  }
  std::int64_t count() const {
    std::int64_t rows = 1;
    for (std::size_t a = 0; a < sizes.size(); ++a) rows *= a == axis ? 1 : sizes[a];
    return rows;
  }
  // Where key `key` of row `row` lies in row-major order.
  std::size_t position(std::int64_t row, std::int64_t key) const {
    return index_of((row / inner() * keys() + key) * inner() + row % inner());
  }
  std::vector<double> row_of(const std::vector<double>& values, std::int64_t row) const {
    std::vector<double> of(index_of(keys()));
    for (std::int64_t key = 0; key < keys(); ++key) of[index_of(key)] = values[position(row, key)];
    return of;
  }
  bool visible(std::int64_t row, std::int64_t key) const {
    if (!lengths.empty() && key >= lengths[index_of(row)]) return false;
    if (!mask.given()) return true;
    std::size_t at = position(row, key), step = 1, in_mask = 0;
    for (std::size_t a = sizes.size(); a-- > 0;) {
      const std::size_t index = at % index_of(sizes[a]);
      at /= index_of(sizes[a]);
      in_mask += mask.sizes[a] == 1 ? 0 : index * step;
      step *= index_of(mask.sizes[a]);
    }
    return mask.values[in_mask] != 0;
  }
  oracle::Row oracle_row(std::int64_t row) const {
    std::vector<bool> flags;
    for (std::int64_t key = 0; key < keys(); ++key) flags.push_back(visible(row, key));
    return {row_of(in.values, row), flags};
  }
  std::string describe() const {
    return name_of(type) + ", target " + target + ", " + std::to_string(threads) + " threads, sizes " +
           testing::PrintToString(sizes) + ", axis " + std::to_string(axis) + ", rule " +
           library_rule(rule).name();
  }
};

// Values of one row: a kind of row that has been trouble somewhere, or a few levels, far apart or close.
std::vector<double> draw_row(Dice& dice, std::int64_t keys) {
  const std::size_t n = index_of(keys);
  if (!dice.chance(keys > kLong ? 0.6 : 0.25)) {
    const RowKind kind = kRowKinds[index_of(dice.between(0, std::ssize(kRowKinds) - 1))];
    return make_row<double>(kind, n, dice.random());
  }
  std::vector<double> levels = {0};
  for (std::int64_t extra = dice.between(1, 3); extra > 0; --extra) {
    levels.push_back(levels.back() - dice.magnitude(1e-3, 40));
  }
  std::vector<double> x(n, levels.back());
  for (double& value : x) value = dice.chance(0.5) ? levels.back() : dice.pick(levels);
  if (dice.chance(0.3)) std::fill(x.begin(), x.end(), levels.back());
  if (n > 0) x[index_of(dice.between(0, keys - 1))] = levels.front();
  return x;
}

void draw_visibility(Rows& rows, Dice& dice) {
  if (dice.chance(0.3)) {
    const double visible = dice.real(0.1, 1);
    rows.mask = draw_mask(dice.random(), draw_side_sizes(dice, rows.sizes), visible);
  }
  if (dice.chance(0.3)) {
    for (std::int64_t r = 0; r < rows.count(); ++r) rows.lengths.push_back(dice.between(0, rows.keys()));
  }
}

Rows draw_rows(const Case& c) {
  Rows rows;
  rows.c = c;
  Dice sizes(c, 0);
  const std::int64_t keys = draw_keys(sizes);
  rows.sizes.resize(index_of(sizes.between(1, 4)));
  rows.axis = index_of(sizes.between(0, std::ssize(rows.sizes) - 1));
  for (std::int64_t& size : rows.sizes)
    size = keys > kLong ? sizes.between(1, 2) : sizes.size(sizes.chance(0.05) ? 0 : 1, 4);
  rows.sizes[rows.axis] = keys;

  Dice dice(c, 1);
  rows.type = draw_type(dice);
  rows.rule = draw_wide_rule(dice);
  if (keys > kLong && dice.chance(0.4)) rows.rule = {Rule::Kind::target_entropy, dice.magnitude(0.1, 10)};
  rows.in_layout = draw_layout(dice, rows.sizes.size());
  rows.out_layout = draw_layout(dice, rows.sizes.size());
  rows.mask_layout = draw_layout(dice, rows.sizes.size());
  rows.in_place = dice.chance(0.2);
  if (rows.in_place) rows.out_layout = rows.in_layout;
  rows.threads = static_cast<int>(dice.between(0, 4));
  rows.other_threads = static_cast<int>(dice.between(1, 4));
  rows.target = dice.pick(targets());
  draw_visibility(rows, dice);

  Dice values(c, 2);
  rows.in = {rows.sizes, std::vector<double>(index_of(rows.count() * keys))};
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    const std::vector<double> x = draw_row(values, keys);
    for (std::int64_t key = 0; key < keys; ++key)
      rows.in.values[rows.position(r, key)] = rounded(rows.type, x[index_of(key)]);
  }
  return rows;
}

// NaN and infinity where nothing sees them, -inf for some keys, and rarely NaN or +inf where a row sees it.
void draw_poison(Rows& rows, std::vector<double>& values) {
  Dice dice(rows.c, 3);
  const bool hidden = dice.chance(0.3), absent = dice.chance(0.1), seen = dice.chance(0.04);
  for (std::int64_t r = 0; r < rows.count(); ++r) {
    for (std::int64_t key = 0; key < rows.keys(); ++key) {
      double& value = values[rows.position(r, key)];
      if (absent && dice.chance(0.2)) value = -kInfinity;
      if (hidden && !rows.visible(r, key)) value = dice.pick<double>({kNaN, kInfinity, -kInfinity});
    }
    if (seen && rows.keys() > 0 && dice.chance(0.5)) {
      values[rows.position(r, dice.between(0, rows.keys() - 1))] = dice.pick<double>({kNaN, kInfinity});
    }
  }
}

// ---- Running ----

class Forced {
 public:
  explicit Forced(const std::string& name) { force_target(name); }
  ~Forced() { force_target(""); }
  Forced(const Forced&) = delete;
};

// What one call wrote.
struct Written {
  std::vector<double> values;
  std::vector<RowStats> stats;
};

using RowFunction = void (*)(ConstView, View, const SoftmaxOptions&, const SoftmaxOutputs&, const Execution&);

Written run(const Rows& rows, RowFunction function, int threads, bool stats, const View& saved = {}) {
  Placed in(rows.type, rows.in, rows.in_layout), out(rows.type, rows.sizes, rows.out_layout), mask;
  if (rows.mask.given()) mask = Placed(DType::boolean, rows.mask, rows.mask_layout);
  Placed& to = rows.in_place ? in : out;
  Written written;
  written.stats.resize(stats ? index_of(rows.count()) : 0);
  function(in.view(), to.view(),
           {.rule = library_rule(rows.rule),
            .axis = static_cast<int>(rows.axis),
            .mask = mask.view(),
            .lengths = rows.lengths},
           {.stats = written.stats, .saved = saved}, {.threads = threads});
  EXPECT_TRUE(to.gaps_are_intact());
  written.values = to.values();
  return written;
}

bool same_bits(const std::vector<RowStats>& a, const std::vector<RowStats>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const RowStats& x, const RowStats& y) { return whet::same_bits(x, y); });
}

// The call, after the same bits came from another number of threads and without stats.
Written run_twice(const Rows& rows, RowFunction function, const char* name, Tally& tally) {
  const Written written = run(rows, function, rows.threads, true);
  const bool stats = Dice(rows.c, 4).chance(0.5);
  const Written again = run(rows, function, rows.other_threads, stats);
  for (std::size_t n = 0; n < written.values.size(); ++n) {
    if (whet::same_bits(again.values[n], written.values[n])) continue;
    ADD_FAILURE() << "element " << n << " is " << testing::PrintToString(written.values[n]) << ", and "
                  << testing::PrintToString(again.values[n]) << " with " << rows.other_threads
                  << " threads and stats " << stats;
    break;
  }
  EXPECT_TRUE(!stats || same_bits(again.stats, written.stats)) << rows.other_threads << " threads";
  count(tally, name, rows.count(), 2);
  return written;
}

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
