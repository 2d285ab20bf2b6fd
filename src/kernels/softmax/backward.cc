// softmax_backward: arguments in, gradients out.

#include <whet/row.h>
#include <whet/softmax.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/softmax/backward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/elements/elements-inl.h"
#include "kernels/softmax/backward-inl.h"
#include "kernels/softmax/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

using kernels::RowJob;

// The gradient 0 for keys from `begin` on.
template <typename T>
HWY_INLINE void ClearGradient(const RowJob& job, std::byte* din, std::int64_t begin) {
  const core::RowArray& out = job.out;
  static constexpr T kZeros[kBlock] = {};
  for (std::int64_t i = begin; i < job.rows.keys(); i += kBlock) {
    std::byte* target = din + i * out.key_stride * core::element_bytes(out.dtype);
    StoreRow(kZeros, out.dtype, out.key_stride, std::min(kBlock, job.rows.keys() - i), target);
  }
}

// The gradient of a row that holds NaN or +inf: NaN for visible keys.
template <typename T>
HWY_NOINLINE void BreakGradient(const RowJob& job, std::byte* din, const T* x, std::int64_t n) {
  const core::RowArray& out = job.out;
  T block[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t size = std::min(kBlock, n - i);
    std::transform(x + i, x + i + size, block, [](T logit) {
      return logit == kMinusInfinity<T> ? T(0) : std::numeric_limits<T>::quiet_NaN();
    });
    StoreRow(static_cast<const T*>(block), out.dtype, out.key_stride, size,
             din + i * out.key_stride * core::element_bytes(out.dtype));
  }
}

template <typename T>
HWY_INLINE void BackwardRowsOf(const RowJob& job, std::int64_t begin, std::int64_t end, T* buffer) {
  const std::int64_t bytes = core::element_bytes(job.in.dtype);
  core::RowCursor<4> cursor(job.rows, {&job.in, &job.dout, &job.out, &job.mask}, begin);
  for (std::int64_t row = begin; row < end; ++row, cursor.next()) {
    const std::int64_t n = job.length(row);
    std::byte* din = job.out.data + cursor.offset(2) * bytes;
    const std::uint8_t* mask = job.mask_at(cursor.offset(3));
    double offset = 0;
    const T* x = VisibleRow(job, job.in.data + cursor.offset(0) * bytes, mask, n, buffer, buffer, offset);
    RowStats stats;
    if (job.saved_stats.empty()) {
      RowState state;
      T* nowhere = nullptr;
      const Chosen<T> chosen = Choose<T>(x, n, job.rule, true, nowhere, nowhere, nullptr, state);
      stats = core::stats_of(state, chosen.beta, chosen.sums);
    } else {
      stats = job.saved_stats[static_cast<std::size_t>(row)];
    }
    if (stats.count > 0) {
      const BackwardRow<T> current{.x = x,
                                   .n = n,
                                   .max = static_cast<T>(stats.max),
                                   .stats = stats,
                                   .dout = job.dout.data + cursor.offset(1) * bytes,
                                   .din = din,
                                   .dout_array = job.dout,
                                   .din_array = job.out};
      BackwardRowOf(current, job.rule, job.through_rule);
    } else if (std::isnan(stats.count)) {
      BreakGradient(job, din, x, n);
    }
    ClearGradient<T>(job, din, stats.count == 0 ? 0 : n);
  }
}

void BackwardRows(const RowJob& job, std::int64_t begin, std::int64_t end, void* buffer) {
  if (job.in.dtype == DType::f64) {
    BackwardRowsOf(job, begin, end, static_cast<double*>(buffer));
  } else {
    BackwardRowsOf(job, begin, end, static_cast<float*>(buffer));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet {

namespace kernels {
HWY_EXPORT(BackwardRows);
}  // namespace kernels

void softmax_backward(ConstView in, ConstView dout, View din, const SoftmaxOptions& options,
                      const SoftmaxBackwardOptions& backward, const Execution& execution) {
  const core::Rows rows(in, options.axis);
  kernels::RowJob job{.rows = rows,
                      .rule = options.rule,
                      .in = rows.array(in, "in"),
                      .dout = rows.array(dout, "dout"),
                      .out = rows.output(din, "din"),
                      .mask = rows.mask(options.mask),
                      .lengths = options.lengths,
                      .saved_stats = backward.stats,
                      .through_rule = backward.beta_gradient == BetaGradient::through_rule};
  rows.check_lengths(options.lengths);
  if (!backward.stats.empty()) rows.check_per_row(backward.stats.size(), "stats");
  core::check_same_or_apart(rows, job.out, "din", job.in, "in");
  core::check_same_or_apart(rows, job.out, "din", job.dout, "dout");
  core::check_apart({job.out, "din"}, {job.mask, "mask"});
  core::check_apart({job.out, "din"}, {options.lengths, "lengths"});
  core::check_apart({job.out, "din"}, {backward.stats, "stats"});
  const int threads = core::resolve_threads(execution.threads);
  const bool buffered = !kernels::is_direct(job.in, rows.keys()) || job.mask.data != nullptr;
  kernels::run_rows(job, WHET_DISPATCH(kernels::BackwardRows), threads, buffered);
}

}  // namespace whet
#endif  // HWY_ONCE
