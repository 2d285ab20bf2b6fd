// softmax_backward: arguments in, gradients out.

#include <whet/row.h>
#include <whet/softmax.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/row/normalizers.h"
#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/softmax/backward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/elements/elements-inl.h"
#include "kernels/row/normalizers-inl.h"
#include "kernels/row/visible-inl.h"

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

template <typename T>
HWY_INLINE void BackwardRowsOf(const RowJob& job, std::int64_t begin, std::int64_t end, T* buffer) {
  const std::int64_t bytes = core::element_bytes(job.in.dtype);
  const RowFunctions<T>& functions = FunctionsOf<T>(job.normalizer);
  const double parameter = job.normalizer.parameter();
  core::RowCursor<4> cursor(job.rows, {&job.in, &job.dout, &job.out, &job.mask}, begin);
  for (std::int64_t row = begin; row < end; ++row, cursor.next()) {
    const std::int64_t n = job.length(row);
    std::byte* din = job.out.data + cursor.offset(2) * bytes;
    const std::uint8_t* mask = job.mask_at(cursor.offset(3));
    double offset = 0;
    const T* x = VisibleRow(job, job.in.data + cursor.offset(0) * bytes, mask, n, buffer, buffer, offset);
    const SavedRow saved =
        job.saved.given() ? LoadSaved<T>(job.saved, functions.saves_threshold, row)
                          : functions.save(RowInput<T>{.x = x, .n = n, .parameter = parameter}, job.rule);
    const RowGradient<T> gradient{.x = x,
                                  .n = n,
                                  .parameter = parameter,
                                  .saved = saved,
                                  .dout = job.dout.data + cursor.offset(1) * bytes,
                                  .din = din,
                                  .dout_array = job.dout,
                                  .din_array = job.out};
    if (!job.dparameter.empty()) {
      job.dparameter[static_cast<std::size_t>(row)] =
          saved.scale == 0 ? 0 : functions.parameter_gradient(gradient);
    }
    if (saved.scale != 0) functions.backward(gradient, job.rule, job.through_rule);
    ClearGradient<T>(job, din, saved.scale == 0 ? 0 : n);
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
                      .normalizer = options.normalizer,
                      .in = rows.array(in, "in"),
                      .dout = rows.array(dout, "dout"),
                      .out = rows.output(din, "din"),
                      .mask = rows.mask(options.mask),
                      .lengths = options.lengths,
                      .saved = core::saved_rows(backward.saved, kernels::arithmetic(in.dtype), rows.count(),
                                                saved_size(options)),
                      .dparameter = backward.dparameter,
                      .through_rule = backward.beta_gradient == BetaGradient::through_rule};
  rows.check_lengths(options.lengths);
  core::check_same_or_apart(rows, job.out, "din", job.in, "in");
  core::check_same_or_apart(rows, job.out, "din", job.dout, "dout");
  core::check_apart({job.out, "din"}, {job.mask, "mask"});
  core::check_apart({job.out, "din"}, {options.lengths, "lengths"});
  core::check_apart({job.out, "din"}, {job.saved, "saved"});
  if (!job.dparameter.empty()) {
    kernels::check_parameter_gradient(options.normalizer);
    rows.check_per_row(job.dparameter.size(), "dparameter");
    const core::Extent written{job.dparameter, "dparameter"};
    core::check_apart(written, {job.in, "in"});
    core::check_apart(written, {job.dout, "dout"});
    core::check_apart(written, {job.out, "din"});
    core::check_apart(written, {job.mask, "mask"});
    core::check_apart(written, {options.lengths, "lengths"});
    core::check_apart(written, {job.saved, "saved"});
  }
  const bool buffered = !kernels::is_direct(job.in, rows.keys()) || job.mask.data != nullptr;
  kernels::run_rows(job, WHET_DISPATCH(kernels::BackwardRows), execution, buffered);
}

}  // namespace whet
#endif  // HWY_ONCE
