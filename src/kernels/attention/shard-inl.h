// A row of a shard: its state, its sums at a given beta or threshold, or its weights there. The largest
// logit, beta and threshold come from the exchanges between shards; where beta is known without one, and
// there is no threshold, state and weights are one pass, and the weights are measured from the largest logit
// of this shard.
//
// Each of the other passes computes the logits again, 2 D flops per row and key, unless the caller
// gives memory for them, 4 bytes per row and key: else what is kept between passes are a few numbers per row.
#if defined(WHET_KERNELS_ATTENTION_SHARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_SHARD_INL_H_
#undef WHET_KERNELS_ATTENTION_SHARD_INL_H_
#else
#define WHET_KERNELS_ATTENTION_SHARD_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/attention/load-inl.h"
#include "kernels/attention/run.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/normalizers-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
using kernels::AttentionRun;
using kernels::Pass;

// The logits of a row, in the caller's memory, from x or to it; x is indexed by key.
template <typename T>
HWY_INLINE void KeepLogits(const AttentionRun& run, const Unit& unit, std::int64_t unit_row,
                           const KeyRange& range, const T* x) {
  const core::Grid& to = run.job.logits;
  StoreRow(x + range.begin, to.dtype, to.strides[3], range.size(),
           to.at(unit.sequence.batch, unit.head(unit_row), unit.query(unit_row), range.begin));
}

template <typename T>
HWY_INLINE void LoadLogits(const AttentionRun& run, const Unit& unit, std::int64_t unit_row,
                           const KeyRange& range, T* x) {
  const core::Grid& from = run.job.logits;
  LoadRow(from.at(unit.sequence.batch, unit.head(unit_row), unit.query(unit_row), range.begin), from.dtype,
          from.strides[3], range.size(), x + range.begin);
}

// The sums of a step of the search for the threshold.
template <typename T>
HWY_INLINE ThresholdSums ShardThresholdSums(const AttentionRun& run, const RowInput<T>& input,
                                            const RowScale& scale) {
  if (std::isnan(scale.beta) || std::isnan(scale.tau))
    return {.high = std::numeric_limits<double>::quiet_NaN()};
  if (!(scale.max > -std::numeric_limits<double>::infinity())) return {};
  return FunctionsOf<T>(run.job.options.normalizer).threshold_part(input, static_cast<T>(scale.max), scale);
}

// Sums of the weights of the row, or the moments of a search; the weights themselves lie in `out`.
template <typename T>
HWY_INLINE Sums ShardSums(const AttentionRun& run, const RowInput<T>& input, const RowScale& scale, T* out) {
  if (std::isnan(scale.beta)) return {.z = scale.beta};
  if (!(scale.max > -std::numeric_limits<double>::infinity())) return {};  // no shard has a key, or NaN
  const T top = static_cast<T>(scale.max);
  if (run.pass == Pass::sums) {
    return Measure<4>(input.x, static_cast<T*>(nullptr), input.size(), top, scale.beta);
  }
  return FunctionsOf<T>(run.job.options.normalizer).weigh_part(input, top, scale, out);
}

template <typename T>
HWY_NOINLINE RowResult<T> ShardRow(const AttentionRun& run, std::int64_t row, const RowInput<T>& input,
                                   T* out) {
  const auto index = static_cast<std::size_t>(row);
  RowResult<T> result;
  if (run.pass == Pass::states) {
    run.states[index] = StateOfRow(input);
    return result;
  }
  RowScale scale;
  if (run.pass == Pass::partial) {
    const RowState& state = run.states[index] = StateOfRow(input);
    scale = {state.max, std::isnan(state.z) ? state.z : run.betas[index]};
  } else {
    scale = run.scales[index];
  }
  result.beta = scale.beta;
  if (run.pass == Pass::threshold) {
    run.threshold_sums[index] = ShardThresholdSums(run, input, scale);
    return result;
  }
  result.sums = ShardSums(run, input, scale, out);
  if (run.pass == Pass::sums) {
    run.sums[index] = result.sums;
  } else {
    run.mass[index] = result.sums.z;
  }
  return result;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_SHARD_INL_H_
