#include <whet/shard.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/arguments.h"
#include "core/attention_views.h"
#include "core/beta.h"
#include "core/saved_rows.h"
#include "core/slope.h"
#include "core/target_search.h"

namespace whet {

namespace {

using core::fail;
using core::Grid;

constexpr double kTolerance = 1e-6;
constexpr double kResolution = 0x1p-23;  // shards compute in f32

// A binary format by the bits of its significand and the exponent of its smallest normal number.
struct Format {
  int bits;
  int min_exponent;
};
constexpr Format kBf16{8, -126};
constexpr Format kF16{11, -14};

// The nearest number of the format, ties to even, were its exponents unbounded above. Rounding once, from
// the double, is closer than rounding to f32 first.
double nearest(double x, Format format) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(x), format.min_exponent) - format.bits + 1);
  return std::nearbyint(x / quantum) * quantum;
}

bf16 to_bf16(double x) {
  if (std::isnan(x)) return {0x7FC0};
  return {
      static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(nearest(x, kBf16))) >> 16)};
}

f16 to_f16(double x) {
  if (std::isnan(x)) return {0x7E00};
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const double magnitude = nearest(std::abs(x), kF16);
  std::uint32_t bits = 0x7C00;  // infinity
  if (magnitude < 0x1p-14) {    // subnormal: a multiple of 2^-24
    bits = static_cast<std::uint32_t>(magnitude * 0x1p24);
  } else if (magnitude < 65536) {  // f32 has 13 bits more, and an exponent 112 larger
    bits = (std::bit_cast<std::uint32_t>(static_cast<float>(magnitude)) >> 13) - (112U << 10);
  }
  return {static_cast<std::uint16_t>(sign | bits)};
}

template <typename T>
void add_elements(const std::byte* from, std::int64_t stride, std::span<double> sums) {
  const T* x = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] += static_cast<double>(x[static_cast<std::int64_t>(i) * stride]);
  }
}

template <typename T, typename Round>
void store_elements(std::span<const double> values, std::int64_t stride, std::byte* to, Round round) {
  T* y = reinterpret_cast<T*>(to);
  for (std::size_t i = 0; i < values.size(); ++i) y[static_cast<std::int64_t>(i) * stride] = round(values[i]);
}

void store(std::span<const double> values, DType dtype, std::int64_t stride, std::byte* to) {
  switch (dtype) {
    case DType::f32:
      return store_elements<float>(values, stride, to, [](double x) { return static_cast<float>(x); });
    case DType::f64:
      return store_elements<double>(values, stride, to, [](double x) { return x; });
    case DType::bf16:
      return store_elements<bf16>(values, stride, to, to_bf16);
    case DType::f16:
      return store_elements<f16>(values, stride, to, to_f16);
    case DType::boolean:
      break;  // refused before
  }
}

struct Merge {
  Dims sizes;  // (B, H, N, E)
  Grid out;
  std::vector<Grid> outs;
  std::span<const std::span<const double>> masses;
};

Grid checked_out(const View& out) {
  core::check_sizes(out.sizes, "out");
  if (out.sizes.size() != 4) {
    fail("out", "has " + std::to_string(out.sizes.size()) + " axes, must have 4, (B, H, N, E)");
  }
  if (core::element_bytes(out.dtype) < 2) {
    fail("out",
         std::string("its element type is ") + core::text(out.dtype) + ", must be f32, f64, bf16 or f16");
  }
  return core::grid(out,
                    {.name = "out",
                     .letters = "(B, H, N, E)",
                     .sizes = out.sizes,
                     .dtype = out.dtype,
                     .other_dtype = out.dtype,
                     .written = true},
                    core::Data::read);
}

Merge checked_merge(std::span<const ConstView> outs, std::span<const std::span<const double>> masses,
                    const View& out) {
  Merge merge{.sizes = out.sizes, .out = checked_out(out), .outs = {}, .masses = masses};
  const std::int64_t rows = out.sizes[0] * out.sizes[1] * out.sizes[2];
  if (outs.empty()) fail("outs", "none given, must be one per shard");
  if (masses.size() != outs.size()) {
    fail("masses",
         std::to_string(masses.size()) + " given, must be as many as outs, " + std::to_string(outs.size()));
  }
  for (std::size_t i = 0; i < outs.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    const std::string outs_name = "outs" + index, masses_name = "masses" + index;
    merge.outs.push_back(core::grid(outs[i],
                                    {.name = outs_name.c_str(),
                                     .letters = "(B, H, N, E)",
                                     .sizes = out.sizes,
                                     .dtype = DType::f32,
                                     .other_dtype = DType::f64},
                                    core::Data::read));
    if (masses[i].size() != static_cast<std::size_t>(rows)) {
      fail(masses_name.c_str(),
           std::to_string(masses[i].size()) + " given, must be one per row, " + std::to_string(rows));
    }
    core::check_apart({merge.out, "out"}, {merge.outs.back(), outs_name.c_str()});
    core::check_apart({merge.out, "out"}, {masses[i], masses_name.c_str()});
  }
  return merge;
}

void merge_row(const Merge& merge, std::size_t row, std::int64_t batch, std::int64_t head, std::int64_t query,
               std::span<double> sums) {
  double mass = 0;
  std::ranges::fill(sums, 0.0);
  for (std::size_t i = 0; i < merge.outs.size(); ++i) {
    const Grid& from = merge.outs[i];
    const bool wide = from.dtype == DType::f64;
    (wide ? add_elements<double> : add_elements<float>)(from.at(batch, head, query), from.strides[3], sums);
    mass += merge.masses[i][row];
  }
  const double scale = 1 / mass;
  for (double& sum : sums) sum = mass == 0 ? 0 : sum * scale;
  store(sums, merge.out.dtype, merge.out.strides[3], merge.out.at(batch, head, query));
}

void check_searches(const Rule& rule) {
  if (!rule.needs_search()) fail("rule", "is " + rule.name() + ", must be target-entropy or target-peak");
}

}  // namespace

RowSums add(const RowSums& a, const RowSums& b) {
  return {a.z + b.z, a.t + b.t, a.u + b.u, a.v + b.v, a.w + b.w};
}

GradientSums add(const GradientSums& a, const GradientSums& b) {
  return {a.wg + b.wg, a.wdg + b.wdg, a.wd + b.wd, a.wdd + b.wdd, a.ties + b.ties,
          a.w + b.w,   a.e + b.e,     a.ey + b.ey, a.eyy + b.eyy};
}

// At beta = 1 every rule that could is on the constant side of its kink.
bool beta_moves(const Rule& rule, double beta, BetaGradient beta_gradient) {
  return beta_gradient == BetaGradient::through_rule && core::needs_entropy(rule) && beta != 1;
}

namespace {

// What the rule adds to the line of a row: `means` are measured from `mean`.
void add_rule(const Rule& rule, const RowState& merged, double beta, double mean, double ties,
              const core::BackwardSums& means, core::BackwardLine& line, RowSlope& slope) {
  if (!rule.needs_search()) {
    core::add_rule_of_entropy(rule.slope(merged) / merged.z, means, line);
    slope.plain_mean = merged.t / merged.z;
  } else if (ties > 0 && !core::unreachable(rule, static_cast<std::int64_t>(ties))) {
    core::add_rule_of_target(rule, beta, mean, ties, means, line);
  }
  if (line.y_factor != 0) slope.mean = mean;  // else it may be anything
}

// C = sum w g / sum w couples the keys of a row with a threshold, and dL/dbeta = sum y w (g - C); a search
// found beta by softmax.
core::BackwardLine line_of_threshold(const Rule& rule, const RowState& merged, const WeighedRow& row,
                                     const GradientSums& sums, bool moves, RowSlope& slope) {
  slope.tau = row.tau;
  slope.coupling = sums.w == 0 ? 0 : sums.wg / sums.w;
  core::BackwardLine line{.g_factor = row.beta};
  if (!moves) return line;
  const double mean = sums.ey / sums.e;
  slope.soft_scale = 1 / sums.e;
  const core::BackwardSums means = {.wyg = sums.wdg - slope.coupling * sums.wd,
                                    .wyy = sums.eyy / sums.e - mean * mean};
  add_rule(rule, merged, row.beta, mean, sums.ties, means, line, slope);
  return line;
}

core::BackwardLine line_of_softmax(const Rule& rule, const RowState& merged, const WeighedRow& row,
                                   double mass, const GradientSums& sums, bool moves, RowSlope& slope) {
  const core::BackwardSums means = {sums.wg / mass, sums.wdg / mass, sums.wd / mass, sums.wdd / mass};
  core::BackwardLine line{.constant = -row.beta * means.wg, .g_factor = row.beta};
  if (moves) add_rule(rule, merged, row.beta, row.mean, sums.ties, means, line, slope);
  return line;
}

}  // namespace

RowSlope row_slope(const Rule& rule, const RowState& merged, const WeighedRow& row, double mass,
                   const GradientSums& sums, BetaGradient beta_gradient) {
  RowSlope slope;
  slope.max = row.max;
  slope.beta = row.beta;
  slope.scale = std::isnan(row.beta) ? row.beta : mass;
  if (merged.count == 0) slope.scale = 0;  // a sink alone has no weight
  if (!(slope.scale > 0)) return slope;
  slope.scale = 1 / mass;
  const bool moves = beta_moves(rule, row.beta, beta_gradient);
  const core::BackwardLine line = row.tau < 0 ? line_of_threshold(rule, merged, row, sums, moves, slope)
                                              : line_of_softmax(rule, merged, row, mass, sums, moves, slope);
  slope.constant = line.constant;
  slope.g_factor = line.g_factor;
  slope.y_factor = line.y_factor;
  slope.p_factor = line.p_factor;
  slope.peak_share = line.peak_share;
  return slope;
}

struct BetaSearch::Search {
  Rule rule;
  bool done = false;
  double beta = 1;
  std::optional<core::TargetSearch> steps{};  // from the sums at 1 on
};

BetaSearch::BetaSearch(const Rule& rule, const RowState& merged) {
  check_searches(rule);
  const bool broken = merged.count > 0 && std::isnan(merged.z);
  search_ = std::make_unique<Search>(
      Search{.rule = rule, .done = merged.count <= 1 || broken, .beta = broken ? merged.z : 1});
}

BetaSearch::BetaSearch(const Rule& rule, const BetaSearchState& state) {
  check_searches(rule);
  search_ = std::make_unique<Search>(Search{.rule = rule, .done = state.stage == 2, .beta = state.beta});
  if (state.stage != 1) return;
  const core::TargetSearch::Progress progress{state.beta, state.low, state.high,
                                              static_cast<int>(state.sweeps)};
  search_->steps.emplace(rule, progress, kTolerance, kResolution);
}

BetaSearch::BetaSearch(BetaSearch&& other) noexcept = default;
BetaSearch& BetaSearch::operator=(BetaSearch&& other) noexcept = default;
BetaSearch::~BetaSearch() = default;

bool BetaSearch::done() const { return search_->done; }

double BetaSearch::beta() const { return search_->beta; }

BetaSearchState BetaSearch::state() const {
  const Search& s = *search_;
  if (s.done || !s.steps) return {.beta = s.beta, .stage = s.done ? 2 : 0};
  const core::TargetSearch::Progress progress = s.steps->progress();
  return {.beta = s.beta, .low = progress.low, .high = progress.high, .sweeps = progress.sweeps, .stage = 1};
}

void BetaSearch::absorb(const RowSums& sums) {
  Search& s = *search_;
  if (s.done) return;
  if (s.steps) {
    s.steps->absorb(s.beta, sums);
  } else {
    s.steps.emplace(s.rule, sums, kTolerance, kResolution);
  }
  // Only keys at the maximum have weight left: a larger beta changes nothing.
  const bool hard = s.steps->unbounded() && (sums.t == 0 || s.beta >= core::kMaxBeta);
  s.done = s.steps->done() || hard;
  if (!s.done) s.beta = s.steps->proposal();
}

void merge_outputs(std::span<const ConstView> outs, std::span<const std::span<const double>> masses,
                   View out) {
  const Merge merge = checked_merge(outs, masses, out);
  if (merge.out.data == nullptr) return;
  std::vector<double> sums(static_cast<std::size_t>(merge.sizes[3]));
  std::size_t row = 0;
  for (std::int64_t batch = 0; batch < merge.sizes[0]; ++batch) {
    for (std::int64_t head = 0; head < merge.sizes[1]; ++head) {
      for (std::int64_t query = 0; query < merge.sizes[2]; ++query) {
        merge_row(merge, row++, batch, head, query, sums);
      }
    }
  }
}

}  // namespace whet
