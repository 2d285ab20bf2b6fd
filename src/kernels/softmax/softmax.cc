// softmax, sharpen and states: arguments in, rows out.

#include "kernels/softmax/softmax.h"

#include <whet/row.h>
#include <whet/softmax.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "kernels/row/normalizers.h"
#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/softmax/softmax.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/elements/elements-inl.h"
#include "kernels/row/normalizers-inl.h"
#include "kernels/row/visible-inl.h"
#include "kernels/softmax/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

using kernels::RowJob;

// Rows up to 32 KiB gain from having the next one fetched meanwhile; rows of 128 KiB lost by it.
template <typename T>
inline constexpr std::int64_t kMaxFetchKeys = 32768 / sizeof(T);

// normalise(row, wanted, out, result) is the row engine with the normalizer of the job.
template <class Normalise, typename T>
HWY_INLINE void SoftmaxRowsBy(const Normalise& normalise, const RowJob& job, std::int64_t begin,
                              std::int64_t end, T* buffer) {
  const bool with_threshold = kernels::entry_of(job.normalizer).saves_threshold;
  const Rule rule = kernels::entry_of(job.normalizer).uses_beta ? job.rule : Rule{};
  const std::int64_t in_bytes = core::element_bytes(job.in.dtype);
  core::RowCursor<3> cursor(job.rows, {&job.in, &job.out, &job.mask}, begin);
  core::RowCursor<2> following(job.rows, {&job.in, &job.out}, begin);  // one row ahead
  const Wanted wanted{.stats = !job.stats.empty(), .saved = job.saved.given()};
  const bool out_is_direct = kernels::is_direct(job.out, job.rows.keys());
  for (std::int64_t row = begin; row < end; ++row, cursor.next()) {
    const std::int64_t n = job.length(row);
    const std::byte* in = job.in.data + cursor.offset(0) * in_bytes;
    std::byte* out = job.out.data + cursor.offset(1) * in_bytes;
    const std::uint8_t* mask = job.mask_at(cursor.offset(2));

    T* target = out_is_direct ? reinterpret_cast<T*>(out) : buffer;
    double offset = 0;
    const T* x = VisibleRow(job, in, mask, n, target, buffer, offset);
    const T* next = nullptr;
    T* next_out = nullptr;
    following.next();
    if (x == reinterpret_cast<const T*>(in) && row + 1 < end && n <= kMaxFetchKeys<T>) {
      next = reinterpret_cast<const T*>(job.in.data + following.offset(0) * in_bytes);
      if (out_is_direct) next_out = reinterpret_cast<T*>(job.out.data + following.offset(1) * in_bytes);
    }
    const RowInput<T> input{.x = x,
                            .n = n,
                            .parameter = job.normalizer.parameter(),
                            .scratch = target != x ? target : (buffer != x ? buffer : nullptr),
                            .next = next,
                            .next_out = next_out};
    RowResult<T> result;
    normalise(input, wanted, target, result);
    std::fill(target + n, target + job.rows.keys(), T(0));
    if (!out_is_direct) StoreRow(target, job.out.dtype, job.out.key_stride, job.rows.keys(), out);
    if (wanted.saved) StoreSaved<T>(Saved(result, rule), with_threshold, job.saved, row);
    if (wanted.stats) {
      RowStats& stats = job.stats[static_cast<std::size_t>(row)];
      stats = StatsOf(input, result);
      if (result.state.count > 0) {
        stats.max += offset;
        stats.log_sum_exp += offset;
        stats.threshold += offset;
      }
    }
  }
}

// The loop is compiled for softmax itself: a call through a pointer per row shows in short rows.
template <typename T>
HWY_INLINE void RunSoftmaxRows(const RowJob& job, std::int64_t begin, std::int64_t end, T* buffer) {
  if (job.normalizer == Normalizer()) {
    const auto softmax = [&](const RowInput<T>& row, Wanted wanted, T* out, RowResult<T>& result)
                             HWY_ATTR { NormaliseRow<Softmax>(row, job.rule, wanted, out, result); };
    return SoftmaxRowsBy(softmax, job, begin, end, buffer);
  }
  const RowFunctions<T>& functions = FunctionsOf<T>(job.normalizer);
  const auto any = [&](const RowInput<T>& row, Wanted wanted, T* out, RowResult<T>& result)
                       HWY_ATTR { functions.normalise(row, job.rule, wanted, out, result); };
  SoftmaxRowsBy(any, job, begin, end, buffer);
}

void SoftmaxRows(const RowJob& job, std::int64_t begin, std::int64_t end, void* buffer) {
  if (job.in.dtype == DType::f64) {
    RunSoftmaxRows(job, begin, end, static_cast<double*>(buffer));
  } else {
    RunSoftmaxRows(job, begin, end, static_cast<float*>(buffer));
  }
}

template <typename T>
HWY_INLINE void StateRowsOf(const RowJob& job, std::int64_t begin, std::int64_t end, T* buffer) {
  core::RowCursor<2> cursor(job.rows, {&job.in, &job.mask}, begin);
  for (std::int64_t row = begin; row < end; ++row, cursor.next()) {
    const std::int64_t n = job.length(row);
    const std::byte* in = job.in.data + cursor.offset(0) * core::element_bytes(job.in.dtype);
    const std::uint8_t* mask = job.mask_at(cursor.offset(1));
    double offset = 0;
    const T* x = VisibleRow(job, in, mask, n, buffer, buffer, offset);
    job.states[static_cast<std::size_t>(row)] = StateOfRow(RowInput<T>{.x = x, .n = n});
  }
}

void StateRows(const RowJob& job, std::int64_t begin, std::int64_t end, void* buffer) {
  if (job.in.dtype == DType::f64) {
    StateRowsOf(job, begin, end, static_cast<double*>(buffer));
  } else {
    StateRowsOf(job, begin, end, static_cast<float*>(buffer));
  }
}

std::int64_t SoftmaxTarget() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet {

namespace kernels {

HWY_EXPORT(SoftmaxRows);
HWY_EXPORT(StateRows);
HWY_EXPORT(SoftmaxTarget);

std::int64_t softmax_target() { return WHET_DISPATCH(SoftmaxTarget)(); }

namespace {

void run_softmax(ConstView in, View out, const SoftmaxOptions& options, const SoftmaxOutputs& outputs,
                 const Execution& execution, bool in_is_probabilities) {
  const core::Rows rows(in, options.axis);
  RowJob job{
      .rows = rows,
      .rule = options.rule,
      .normalizer = options.normalizer,
      .in = rows.array(in, "in"),
      .out = rows.output(out, "out"),
      .mask = rows.mask(options.mask),
      .lengths = options.lengths,
      .stats = outputs.stats,
      .saved = core::saved_rows(outputs.saved, arithmetic(in.dtype), rows.count(), saved_size(options)),
      .in_is_probabilities = in_is_probabilities};
  rows.check_lengths(options.lengths);
  if (!outputs.stats.empty()) rows.check_per_row(outputs.stats.size(), "stats");
  core::check_same_or_apart(rows, job.out, "out", job.in, "in");
  if (in_is_probabilities && job.saved.given())
    core::fail("saved", "given to sharpen, which has no backward");
  const core::Extent written[] = {{job.out, "out"}, {outputs.stats, "stats"}, {job.saved, "saved"}};
  for (const core::Extent& w : written) {
    core::check_apart(w, {job.mask, "mask"});
    core::check_apart(w, {options.lengths, "lengths"});
  }
  for (std::size_t i = 1; i < std::size(written); ++i) {
    core::check_apart(written[i], {job.in, "in"});
    for (std::size_t j = 0; j < i; ++j) core::check_apart(written[i], written[j]);
  }

  const bool direct_in = is_direct(job.in, rows.keys()) && job.mask.data == nullptr;
  const bool in_place = job.in.data == job.out.data;
  const bool wants_scratch = options.rule.needs_search() || entry_of(options.normalizer).needs_scratch;
  const bool buffered = !direct_in || !is_direct(job.out, rows.keys()) || (in_place && wants_scratch);
  run_rows(job, WHET_DISPATCH(SoftmaxRows), execution, buffered);
}

}  // namespace

}  // namespace kernels

std::int64_t saved_size(const SoftmaxOptions& options) {
  return kernels::saved_size(options.rule, options.normalizer);
}

void softmax(ConstView in, View out, const SoftmaxOptions& options, const SoftmaxOutputs& outputs,
             const Execution& execution) {
  kernels::run_softmax(in, out, options, outputs, execution, false);
}

void sharpen(ConstView in, View out, const SoftmaxOptions& options, const SoftmaxOutputs& outputs,
             const Execution& execution) {
  kernels::run_softmax(in, out, options, outputs, execution, true);
}

void states(ConstView in, std::span<RowState> out, const StatesOptions& options, const Execution& execution) {
  const core::Rows rows(in, options.axis);
  kernels::RowJob job{.rows = rows,
                      .in = rows.array(in, "in"),
                      .mask = rows.mask(options.mask),
                      .lengths = options.lengths,
                      .states = out};
  rows.check_lengths(options.lengths);
  rows.check_per_row(out.size(), "out");
  core::check_apart({out, "out"}, {job.in, "in"});
  core::check_apart({out, "out"}, {job.mask, "mask"});
  core::check_apart({out, "out"}, {options.lengths, "lengths"});
  const bool buffered = !kernels::is_direct(job.in, rows.keys()) || job.mask.data != nullptr;
  kernels::run_rows(job, WHET_DISPATCH(kernels::StateRows), execution, buffered);
}

}  // namespace whet
#endif  // HWY_ONCE
