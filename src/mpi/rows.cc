#include "mpi/rows.h"

#include <whet/error.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace whet::mpi {
namespace {

// Where a row has one key, fixed is 1: nobody sees that but a sink.
bool is_known(const Rule& rule, bool sinks) {
  return rule.kind() == Rule::Kind::none || (rule.kind() == Rule::Kind::fixed && !sinks);
}

double mean_of(double t, double z) {
  const double mean = t / z;
  return std::isnan(mean) ? 0 : mean;
}

// The search of one row among all.
struct RowSearch {
  std::size_t row;
  BetaSearch search;
};

void step(std::vector<RowSearch>& searches, Rows& rows, const SumsAt& sums_at) {
  for (const RowSearch& s : searches) rows.weighed[s.row].beta = s.search.beta();
  std::vector<RowSums> sums(rows.states.size());
  sums_at(scales_of(rows), sums);
  for (RowSearch& s : searches) {
    if (!s.search.done()) s.search.absorb(sums[s.row]);
    rows.weighed[s.row].mean = mean_of(sums[s.row].t, sums[s.row].z);
  }
}

template <typename T>
double product(const T* a, const T* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

}  // namespace

const Rule& Problem::rule(std::int64_t row) const {
  static const Rule none;
  if (is_hard()) return none;
  if (options.head_rules.empty()) return options.rule;
  return options.head_rules[static_cast<std::size_t>(row / queries() % heads())];
}

bool Problem::is_one_pass() const {
  if (is_hard()) return true;
  if (has_threshold()) return false;
  const auto known = [&](const Rule& rule) { return is_known(rule, is_given(options.sinks)); };
  return options.head_rules.empty() ? known(options.rule) : std::ranges::all_of(options.head_rules, known);
}

bool Problem::keeps_logits() const {
  return searches() || has_threshold() || queries() * (heads() / k.sizes[1]) <= kFewRows;
}

bool Problem::searches() const {
  if (is_hard()) return false;
  const auto searching = [](const Rule& rule) { return rule.needs_search(); };
  return options.head_rules.empty() ? searching(options.rule)
                                    : std::ranges::any_of(options.head_rules, searching);
}

Problem Problem::of_queries(std::int64_t first, std::int64_t count) const {
  Problem part = *this;
  part.q = cut(q, 2, first, count);
  part.options.query_scale = cut_if_long(options.query_scale, 2, first, count);
  part.options.bias = cut_if_long(options.bias, 2, first, count);
  part.options.mask = cut_if_long(options.mask, 2, first, count);
  return part;
}

std::string problem_of(const std::function<void(const Shard& shard)>& check, const ConstView& k,
                       const AttentionOptions& options) {
  // Lengths count keys of all ranks: how many there are is seen later.
  std::int64_t keys = k.sizes.size() == 4 ? k.sizes[2] : 0;
  for (const std::int64_t length : options.lengths) keys = std::max(keys, length);
  try {
    check({.first_key = 0, .all_keys = keys});
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

Rows empty_rows(const Problem& problem) {
  const auto count = static_cast<std::size_t>(problem.rows());
  Rows rows;
  rows.states.resize(count);
  rows.weighed.resize(count, {-std::numeric_limits<double>::infinity(), 1, 0});
  rows.masses.resize(count);
  rows.out.resize(count * static_cast<std::size_t>(problem.value_size()) * bytes_of(problem.arithmetic()));
  return rows;
}

std::vector<double> known_betas(const Problem& problem) {
  std::vector<double> betas(static_cast<std::size_t>(problem.rows()), 1);
  for (std::size_t i = 0; i < betas.size(); ++i) {
    const Rule& rule = problem.rule(static_cast<std::int64_t>(i));
    if (rule.kind() == Rule::Kind::fixed) betas[i] = rule.parameter();
  }
  return betas;
}

void choose_betas(const Problem& problem, Rows& rows, const SumsAt& sums_at, const AnyLeft& any_left) {
  std::vector<RowSearch> searches;
  for (std::size_t i = 0; i < rows.states.size(); ++i) {
    const RowState& state = rows.states[i];
    const Rule& rule = problem.rule(static_cast<std::int64_t>(i));
    rows.weighed[i] = {state.max, 1, mean_of(state.t, state.z)};
    if (rule.needs_search()) {
      searches.push_back({i, BetaSearch(rule, state)});
    } else {
      rows.weighed[i].beta = rule.beta(state);
    }
  }
  const auto left = [&] {
    return std::ranges::any_of(searches, [](const RowSearch& s) { return !s.search.done(); });
  };
  if (problem.searches()) {
    while (any_left(left())) step(searches, rows, sums_at);
  }
  for (const RowSearch& s : searches) rows.weighed[s.row].beta = s.search.beta();
}

void choose_thresholds(const Problem& problem, Rows& rows, const ThresholdSumsAt& sums_at,
                       const AnyLeft& any_left) {
  if (!problem.has_threshold()) return;
  std::vector<ThresholdSearch> searches;
  searches.reserve(rows.states.size());
  for (std::size_t i = 0; i < rows.states.size(); ++i) {
    searches.emplace_back(problem.options.normalizer, rows.states[i], rows.weighed[i].beta,
                          problem.arithmetic());
  }
  std::vector<ThresholdSums> sums(searches.size());
  const auto left = [&] {
    for (std::size_t i = 0; i < searches.size(); ++i) rows.weighed[i].tau = searches[i].tau();
    return std::ranges::any_of(searches, [](const ThresholdSearch& s) { return !s.done(); });
  };
  while (any_left(left())) {
    std::ranges::fill(sums, ThresholdSums{});
    sums_at(scales_of(rows), sums);
    for (std::size_t i = 0; i < searches.size(); ++i) searches[i].absorb(sums[i]);
  }
}

std::vector<RowScale> scales_of(const Rows& rows) {
  std::vector<RowScale> scales;
  scales.reserve(rows.weighed.size());
  for (const WeighedRow& row : rows.weighed) scales.push_back({row.max, row.beta, row.tau});
  return scales;
}

template <typename Header>
Records<Header>::Records(const Problem& problem)
    : sizes_(problem.out_sizes()),
      dtype_(problem.arithmetic()),
      pitch_(sizeof(Header) +
             (static_cast<std::size_t>(problem.value_size()) * bytes_of(dtype_) + 7) / 8 * 8),
      bytes_(static_cast<std::size_t>(problem.rows()) * pitch_) {}

template <typename Header>
View Records<Header>::outs() {
  const auto step = static_cast<std::int64_t>(pitch_ / bytes_of(dtype_));
  return {bytes_.data() + (bytes_.empty() ? 0 : sizeof(Header)), dtype_, sizes_,
          Dims{sizes_[1] * sizes_[2] * step, sizes_[2] * step, step, 1}};
}

template class Records<PartialHeader>;
template class Records<WeighedHeader>;

double share_of(const RowState& part, const RowState& merged, double beta, bool hard) {
  if (hard) return part.max == merged.max ? 1 : 0;
  if (part.max == merged.max) return 1;
  return std::exp(beta * (part.max - merged.max));
}

namespace {

// sums += c out.
template <typename T>
void add_outs(const std::byte* out, double c, std::span<double> sums) {
  const T* values = reinterpret_cast<const T*>(out);
  for (std::size_t e = 0; e < sums.size(); ++e) sums[e] += c * static_cast<double>(values[e]);
}

}  // namespace

void add_outs(DType dtype, const std::byte* out, double c, std::span<double> sums) {
  dtype == DType::f64 ? add_outs<double>(out, c, sums) : add_outs<float>(out, c, sums);
}

void normalise(DType dtype, std::span<const double> sums, double mass, std::byte* out) {
  const double scale = mass == 0 ? 0 : 1 / mass;
  for (std::size_t e = 0; e < sums.size(); ++e) {
    const double value = mass == 0 ? 0 : sums[e] * scale;
    if (dtype == DType::f64) {
      reinterpret_cast<double*>(out)[e] = value;
    } else {
      reinterpret_cast<float*>(out)[e] = static_cast<float>(value);
    }
  }
}

void compute_partial(const Problem& p, const Shard& shard, std::span<const double> betas,
                     Records<PartialHeader>& records) {
  std::vector<RowState> states(betas.size());
  std::vector<double> masses(betas.size());
  shard_partial_attention(p.q, p.k, p.v, shard, betas, records.outs(), states, masses, p.options,
                          p.execution);
  for (std::size_t i = 0; i < betas.size(); ++i) {
    records.header(static_cast<std::int64_t>(i)) = {states[i], masses[i]};
  }
}

void compute_weighed(const Problem& p, const Shard& shard, std::span<const RowScale> scales,
                     Records<WeighedHeader>& records) {
  std::vector<double> masses(scales.size());
  shard_attention(p.q, p.k, p.v, shard, scales, records.outs(), masses, p.options, p.execution);
  for (std::size_t i = 0; i < scales.size(); ++i) records.header(static_cast<std::int64_t>(i)) = {masses[i]};
}

bool needs_sums(const Problem& problem, const Rows& rows, BetaGradient beta_gradient) {
  if (problem.has_threshold()) return true;
  for (std::size_t i = 0; i < rows.weighed.size(); ++i) {
    if (beta_moves(problem.rule(static_cast<std::int64_t>(i)), rows.weighed[i].beta, beta_gradient))
      return true;
  }
  return false;
}

std::vector<GradientSums> output_products(const Problem& problem, const Rows& rows, const ConstView& dout) {
  Array own = Array::copy(dout, true);
  std::vector<GradientSums> sums(rows.masses.size());
  const std::int64_t size = problem.value_size();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * size;
    const double sum = problem.arithmetic() == DType::f64
                           ? product(own.elements<double>().data() + at,
                                     reinterpret_cast<const double*>(rows.out.data()) + at, size)
                           : product(own.elements<float>().data() + at,
                                     reinterpret_cast<const float*>(rows.out.data()) + at, size);
    sums[i].wg = rows.masses[i] == 0 ? 0 : rows.masses[i] * sum;
  }
  return sums;
}

std::vector<RowSlope> slopes_of(const Problem& problem, const Rows& rows, std::span<const GradientSums> sums,
                                BetaGradient beta_gradient) {
  std::vector<RowSlope> slopes;
  slopes.reserve(sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    slopes.push_back(row_slope(problem.rule(static_cast<std::int64_t>(i)), rows.states[i], rows.weighed[i],
                               rows.masses[i], sums[i], beta_gradient));
  }
  return slopes;
}

void check_rows(const Problem& problem, const Rows& rows) {
  const Rows like = empty_rows(problem);
  const auto check = [](std::size_t given, std::size_t wanted, const char* name) {
    if (given == wanted) return;
    throw Error("rows: its " + std::string(name) + " has " + std::to_string(given) + " elements, must have " +
                std::to_string(wanted) + ", as forward of these arguments leaves it");
  };
  check(rows.states.size(), like.states.size(), "states");
  check(rows.weighed.size(), like.weighed.size(), "weighed");
  check(rows.masses.size(), like.masses.size(), "masses");
  check(rows.out.size(), like.out.size(), "out");
}

}  // namespace whet::mpi
