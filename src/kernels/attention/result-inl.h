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

#include "kernels/attention/load-inl.h"
#include "kernels/attention/run.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/normalizers-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::kTileKeys;
using kernels::Pass;

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

// The heaviest keys and their weights. One in a skipped tile has weight 0 and comes after all that were
// weighed, whose weights may be smaller than the one its logit would have given it.
template <typename T>
HWY_INLINE void StoreTop(const AttentionRun& run, const Unit& unit, std::int64_t row, const T* x,
                         const std::int64_t* top, std::int64_t found, const std::uint8_t* keep, double z) {
  const AttentionOutputs& outputs = run.job.outputs;
  std::int64_t* keys = outputs.top_keys.data() + row * outputs.top_k;
  float* weights = outputs.top_weights.data() + row * outputs.top_k;
  const auto weighed = [&](std::int64_t key) {
    return !(z > 0) || keep == nullptr || keep[key / kTileKeys] != 0;
  };
  std::int64_t stored = 0;
  for (std::int64_t i = 0; i < found; ++i) {
    if (!weighed(top[i])) continue;
    keys[stored] = unit.sequence.first_key + top[i];
    weights[stored++] =
        z > 0 ? static_cast<float>(static_cast<double>(x[top[i]]) / z) : static_cast<float>(z);
  }
  for (std::int64_t i = 0; i < found && stored < found; ++i) {
    if (weighed(top[i])) continue;
    keys[stored] = unit.sequence.first_key + top[i];
    weights[stored++] = 0;
  }
  std::fill(keys + stored, keys + outputs.top_k, -1);
  std::fill(weights + stored, weights + outputs.top_k, 0.0f);
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

// Logits at x become weights there, and the optional outputs of the row are written. `top`: scratch for top_k
// keys.
template <typename T>
HWY_NOINLINE RowResult<T> FinishRow(const AttentionRun& run, const Unit& unit, std::int64_t unit_row, T* x,
                                    const KeyRange& range, const RowInput<T>& input, std::int64_t* top) {
  const AttentionOutputs& outputs = run.job.outputs;
  const std::int64_t head = unit.head(unit_row);
  const std::int64_t row = run.job.row(unit.sequence.batch, head, unit.query(unit_row));
  const std::int64_t found = outputs.top_k > 0 ? HeaviestKeys(x, range, outputs.top_k, top) : 0;
  const Wanted wanted{.stats = !outputs.stats.empty(), .saved = run.job.saved.given()};
  const RowFunctions<T>& functions = FunctionsOf<T>(run.job.options.normalizer);
  const RowResult<T> result = functions.weigh(input, run.job.rule(head), wanted, x + range.begin);
  const double z = result.sums.z;
  if (wanted.stats) outputs.stats[static_cast<std::size_t>(row)] = StatsOf(input, result);
  if (wanted.saved) {
    StoreSaved<T>(Saved(result, run.job.rule(head)), functions.saves_threshold, run.job.saved, row);
  }
  const std::uint8_t* keep = input.tiles->keep;
  if (outputs.top_k > 0) StoreTop(run, unit, row, x, top, found, keep, z);
  if (!(z > 0)) {
    if (!outputs.weight_rows.empty() || !outputs.column_sums.empty()) {
      StoreWeights(run, unit, unit_row, x, std::isnan(z) ? range : KeyRange{}, nullptr, z);
    }
    return result;
  }
  if (!outputs.weight_rows.empty() || !outputs.column_sums.empty()) {
    StoreWeights(run, unit, unit_row, static_cast<const T*>(x), range, keep, z);
  }
  return result;
}

// A row of attention without keys within its reach.
template <typename T>
HWY_INLINE void FinishEmptyRow(const AttentionRun& run, const Unit& unit, std::int64_t unit_row) {
  const AttentionOutputs& outputs = run.job.outputs;
  const std::int64_t row = run.job.row(unit.sequence.batch, unit.head(unit_row), unit.query(unit_row));
  if (!outputs.stats.empty()) outputs.stats[static_cast<std::size_t>(row)] = core::stats_of({}, 1, {});
  if (run.job.saved.given()) StoreSaved<T>({}, true, run.job.saved, row);
  if (outputs.top_k > 0) {
    std::fill_n(outputs.top_keys.data() + row * outputs.top_k, outputs.top_k, -1);
    std::fill_n(outputs.top_weights.data() + row * outputs.top_k, outputs.top_k, 0.0f);
  }
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
