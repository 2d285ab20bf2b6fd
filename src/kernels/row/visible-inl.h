// The visible keys of a row of an array as a contiguous row of float or double: from here on there is one
// kind of row.
#if defined(WHET_KERNELS_ROW_VISIBLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_VISIBLE_INL_H_
#undef WHET_KERNELS_ROW_VISIBLE_INL_H_
#else
#define WHET_KERNELS_ROW_VISIBLE_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "kernels/elements/elements-inl.h"
#include "kernels/row/row_job.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

// Where the row lies if that will do, else in `buffer`; hidden keys are -inf. Of probabilities the logarithm
// is taken, in `target` if the row may be written there, measured from `offset`.
template <typename T>
HWY_INLINE const T* VisibleRow(const kernels::RowJob& job, const void* in, const std::uint8_t* mask,
                               std::int64_t n, T* target, T* buffer, double& offset) {
  const bool direct = kernels::is_direct(job.in, n) && mask == nullptr;
  if (direct && !job.in_is_probabilities) return static_cast<const T*>(in);
  T* row = direct ? target : buffer;
  if (!direct) LoadRow(in, job.in.dtype, job.in.key_stride, n, row);
  if (mask != nullptr) {
    HideMasked(mask, job.mask.key_stride, n, job.in_is_probabilities ? T(0) : kMinusInfinity<T>, row);
  }
  if (job.in_is_probabilities) {
    offset = std::log(static_cast<double>(LogRow(direct ? static_cast<const T*>(in) : row, n, row)));
  }
  return row;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_VISIBLE_INL_H_
