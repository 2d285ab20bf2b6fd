// What becomes of a row of attention once its logits are there: weights, and whatever the caller asked
// for; later its output.
#if defined(WHET_KERNELS_ATTENTION_RESULT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_RESULT_INL_H_
#undef WHET_KERNELS_ATTENTION_RESULT_INL_H_
#else
#define WHET_KERNELS_ATTENTION_RESULT_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/attention/logits-inl.h"
#include "kernels/attention/run.h"
#include "kernels/elements/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using kernels::Pass;

template <typename T>
inline constexpr DType kArithmetic = sizeof(T) == sizeof(double) ? DType::f64 : DType::f32;

// A row of q, k, v or dout as contiguous T: where it is if that will do, else in `buffer`.
template <typename T>
HWY_INLINE const T* VectorOf(const core::Grid& grid, std::int64_t batch, std::int64_t head,
                             std::int64_t index, std::int64_t size, T* buffer) {
  const std::byte* at = grid.at(batch, head, index);
  if (grid.dtype == kArithmetic<T> && grid.strides[3] == 1) return reinterpret_cast<const T*>(at);
  LoadRow(at, grid.dtype, grid.strides[3], size, buffer);
  return buffer;
}

// The sink of a row's head; -inf if there is none, or if another shard has it: that of key 0. (Without any
// key no row sees one, and the sink doesn't count.)
template <typename T>
HWY_INLINE T SinkOf(const core::AttentionJob& job, std::int64_t head) {
  if (job.sinks.data == nullptr || job.shard.first_key > 0 || job.shape.keys == 0) return kMinusInfinity<T>;
  return Element<T>(job.sinks, job.sinks.at(0, head, 0));
}

// The heaviest visible keys, heaviest first, as indices into x; returns how many.
template <typename T>
HWY_INLINE std::int64_t HeaviestKeys(const T* x, const KeyRange& range, std::int64_t wanted,
                                     std::int64_t* top) {
  const auto heavier = [x](std::int64_t a, std::int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  std::int64_t found = 0;
  for (std::int64_t key = range.begin; key < range.end && wanted > 0; ++key) {
    if (x[key] == kMinusInfinity<T>) continue;
    if (found < wanted) {
      top[found++] = key;
      std::push_heap(top, top + found, heavier);  // the lightest on top
    } else if (heavier(key, top[0])) {
      std::pop_heap(top, top + found, heavier);
      top[found - 1] = key;
      std::push_heap(top, top + found, heavier);
    }
  }
  std::sort_heap(top, top + found, heavier);
  return found;
}

// Weights of chosen rows, column sums: after weighing. `keep`: null = every tile.
template <typename T>
HWY_INLINE void StoreWeights(const AttentionRun& run, const Unit& unit, std::int64_t unit_row, const T* x,
                             const KeyRange& range, const std::uint8_t* keep, double z) {
  const core::AttentionJob& job = run.job;
  const AttentionOutputs& outputs = job.outputs;
  const std::int64_t batch = unit.sequence.batch, head = unit.head(unit_row), query = unit.query(unit_row);
  const auto weight = [&](std::int64_t key) {
    if (key < range.begin || key >= range.end || (keep != nullptr && keep[key / kTileKeys] == 0)) return T(0);
    if (x[key] == T(0) || x[key] == kMinusInfinity<T>) return T(0);  // also in a row of NaN
    return static_cast<T>(static_cast<double>(x[key]) / z);
  };
  for (std::size_t i = 0; i < outputs.weight_rows.size(); ++i) {
    const RowIndex& wanted = outputs.weight_rows[i];
    if (wanted.batch != batch || wanted.head != head || wanted.query != query) continue;
    std::byte* to = job.weights.at(static_cast<std::int64_t>(i), 0, 0, unit.sequence.first_key);
    const std::int64_t step = job.weights.strides[3] * core::element_bytes(job.weights.dtype);
    for (std::int64_t key = 0; key < unit.keys(); ++key) {
      const T value = weight(key);
      StoreRow(&value, job.weights.dtype, 1, 1, to + key * step);
    }
  }
  if (outputs.column_sums.empty()) return;
  double* sums = outputs.column_sums.data() + (batch * job.shape.heads + head) * job.shape.keys +
                 unit.sequence.first_key;
  for (std::int64_t key = range.begin; key < range.end; ++key) sums[key] += static_cast<double>(weight(key));
}

// Rows of a shard whose max and beta come from outside.
template <typename T>
HWY_INLINE RowOutcome<T> ScaledRow(const AttentionRun& run, std::int64_t row, T* x, const KeyRange& range,
                                   T sink) {
  RowOutcome<T> outcome;
  const RowScale& scale = run.scales[static_cast<std::size_t>(row)];
  std::int64_t n = range.size();
  if (sink != kMinusInfinity<T>) x[range.begin + n++] = sink;
  T* keys = x + range.begin;
  outcome.beta = scale.beta;
  outcome.top = static_cast<T>(scale.max);
  if (std::isnan(scale.beta)) {
    outcome.sums.z = scale.beta;
  } else if (scale.max > -std::numeric_limits<double>::infinity()) {  // not NaN
    outcome.sums = run.pass == Pass::sums
                       ? Measure<4>(keys, static_cast<T*>(nullptr), n, outcome.top, scale.beta)
                       : Measure<0>(keys, keys, n, outcome.top, scale.beta);
  }
  return outcome;
}

template <typename T>
HWY_INLINE RowState StateOfRow(T* x, const KeyRange& range, T sink) {
  const Extremes<T> ends = Scan<true>(x + range.begin, range.size());
  if (ends.count == 0 && sink == kMinusInfinity<T>) return {};
  std::int64_t n = range.size();
  Extremes<T> whole = ends;
  if (sink != kMinusInfinity<T>) {
    x[range.begin + n++] = sink;
    whole.max = std::isnan(sink) ? sink : std::max(sink, ends.max);
  }
  Sums sums;
  RowState state = StateOf<2>(static_cast<const T*>(x + range.begin), n, whole, static_cast<T*>(nullptr),
                              static_cast<const T*>(nullptr), sums);
  return state;
}

// Logits at x become weights there, or whatever the pass wants of them; the caller's statistics of the
// row are written.
template <typename T>
HWY_NOINLINE RowOutcome<T> FinishRow(const AttentionRun& run, const Unit& unit, std::int64_t unit_row, T* x,
                                     const KeyRange& range, const RowTools<T>& tools, std::int64_t* top) {
  const AttentionOutputs& outputs = run.job.outputs;
  const std::int64_t head = unit.head(unit_row);
  const std::int64_t row = run.job.row(unit.sequence.batch, head, unit.query(unit_row));
  const auto index = static_cast<std::size_t>(row);
  const T sink = SinkOf<T>(run.job, head);
  if (run.pass == Pass::states) {
    run.states[index] = StateOfRow(x, range, sink);
    return {};
  }
  if (run.pass != Pass::attention) {
    const RowOutcome<T> outcome = ScaledRow(run, row, x, range, sink);
    if (run.pass == Pass::sums) run.sums[index] = outcome.sums;
    if (run.pass == Pass::shard) run.mass[index] = outcome.sums.z;
    return outcome;
  }

  float* top_weights = outputs.top_weights.data() + row * outputs.top_k;
  std::int64_t found = 0;
  if (outputs.top_k > 0) {
    found = HeaviestKeys(x, range, outputs.top_k, top);
    std::int64_t* keys = outputs.top_keys.data() + row * outputs.top_k;
    for (std::int64_t i = 0; i < found; ++i) keys[i] = unit.sequence.first_key + top[i];
    std::fill(keys + found, keys + outputs.top_k, -1);
    std::fill_n(top_weights, outputs.top_k, 0.0f);
  }
  const RowOutcome<T> outcome = WeighRow(x, range, sink, run.job.rule(head), !outputs.stats.empty(), tools);
  const double z = outcome.sums.z;
  if (!outputs.stats.empty()) {
    const double depth = static_cast<double>(outcome.top) - static_cast<double>(outcome.key_max);
    outputs.stats[index] =
        StatsOf(outcome.state, outcome.beta, outcome.sums, depth, sink != kMinusInfinity<T>);
  }
  if (!(z > 0)) {
    if (std::isnan(z)) std::fill_n(top_weights, found, std::numeric_limits<float>::quiet_NaN());
    if (!outputs.weight_rows.empty() || !outputs.column_sums.empty()) {
      StoreWeights(run, unit, unit_row, x, std::isnan(z) ? range : KeyRange{}, nullptr, z);
    }
    return outcome;
  }
  for (std::int64_t i = 0; i < found; ++i) {
    const bool weighed = tools.keep == nullptr || tools.keep[top[i] / kTileKeys] != 0;
    top_weights[i] = weighed ? static_cast<float>(static_cast<double>(x[top[i]]) / z) : 0.0f;
  }
  if (!outputs.weight_rows.empty() || !outputs.column_sums.empty()) {
    StoreWeights(run, unit, unit_row, static_cast<const T*>(x), range, tools.keep, z);
  }
  return outcome;
}

// A row of attention without keys within its reach.
HWY_INLINE void FinishEmptyRow(const AttentionRun& run, const Unit& unit, std::int64_t unit_row) {
  const AttentionOutputs& outputs = run.job.outputs;
  const std::int64_t row = run.job.row(unit.sequence.batch, unit.head(unit_row), unit.query(unit_row));
  if (!outputs.stats.empty()) outputs.stats[static_cast<std::size_t>(row)] = core::stats_of({}, 1, {});
  if (outputs.top_k > 0) {
    std::fill_n(outputs.top_keys.data() + row * outputs.top_k, outputs.top_k, -1);
    std::fill_n(outputs.top_weights.data() + row * outputs.top_k, outputs.top_k, 0.0f);
  }
}

// to = values of keys [begin, end) of the unit, 0 where they are hidden from the row whose logits are x.
template <typename T>
HWY_INLINE void LoadVisible(const core::AttentionJob& job, const Unit& unit, const T* x,
                            const KeyRange& range, std::int64_t begin, std::int64_t end, T* to,
                            std::int64_t stride) {
  for (std::int64_t key = begin; key < end; ++key, to += stride) {
    std::fill_n(to, stride, T(0));
    if (key < range.begin || key >= range.end || x[key] == kMinusInfinity<T>) continue;
    const std::byte* from = job.v.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
    LoadRow(from, job.v.dtype, job.v.strides[3], job.shape.value_size, to);
  }
}

template <typename T>
HWY_INLINE bool AllFinite(const T* row, std::int64_t size) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);  // of 0 for numbers and NaN for others
  std::int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const auto v = hn::LoadU(d, row + i);
    sum = hn::Add(sum, hn::Sub(v, v));
  }
  T rest = 0;
  for (; i < size; ++i) rest += row[i] - row[i];
  return hn::GetLane(hn::SumOfLanes(d, sum)) + rest == T(0);
}

// means[i] = sums[i] / z where the sum is finite.
template <typename T>
HWY_INLINE void KeepFinite(const T* sums, std::int64_t size, double z, T* means) {
  const T inverse = static_cast<T>(1 / z);
  for (std::int64_t i = 0; i < size; ++i) {
    if (std::isfinite(sums[i])) means[i] = sums[i] * inverse;
  }
}

// The output of a row from its sum of weighted values, which is overwritten.
template <typename T>
HWY_INLINE void StoreOutput(const AttentionRun& run, const Unit& unit, std::int64_t unit_row, double z,
                            T* sum) {
  const core::Grid& out = run.job.out;
  const std::int64_t size = run.job.shape.value_size;
  if (!(z > 0)) {
    std::fill_n(sum, size, static_cast<T>(z));  // no visible key: 0; NaN otherwise
  } else if (run.pass == Pass::attention) {
    const T inverse = static_cast<T>(1 / z);
    for (std::int64_t i = 0; i < size; ++i) sum[i] *= inverse;
  }
  std::byte* to = out.at(unit.sequence.batch, unit.head(unit_row), unit.query(unit_row));
  StoreRow(static_cast<const T*>(sum), out.dtype, out.strides[3], size, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_RESULT_INL_H_
