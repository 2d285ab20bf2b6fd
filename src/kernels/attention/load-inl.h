// Vectors of q, k, v and dout as contiguous rows of the arithmetic type.
#if defined(WHET_KERNELS_ATTENTION_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_LOAD_INL_H_
#undef WHET_KERNELS_ATTENTION_LOAD_INL_H_
#else
#define WHET_KERNELS_ATTENTION_LOAD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/attention_job.h"
#include "kernels/attention/run.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::KeyRange;
using kernels::AttentionRun;
using kernels::Unit;

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

// Element `index` of a side array (bias, sinks, query_scale) in the type of the arithmetic.
template <typename T>
HWY_INLINE T Element(const core::Grid& grid, const std::byte* at) {
  T value;
  LoadRow(at, grid.dtype, 1, 1, &value);
  return value;
}

// What the products of a row are multiplied with.
template <typename T>
HWY_INLINE double QueryScale(const core::AttentionJob& job, const Unit& unit, std::int64_t row) {
  if (job.query_scale.data == nullptr) return job.scale;
  const std::byte* at = job.query_scale.at(unit.sequence.batch, unit.head(row), unit.query(row));
  return job.scale * static_cast<double>(Element<T>(job.query_scale, at));
}

// to = rows [begin, end) of the unit, times their scale.
template <typename T>
HWY_INLINE void LoadQueries(const core::AttentionJob& job, const Unit& unit, std::int64_t begin,
                            std::int64_t end, T* to, std::int64_t stride) {
  const std::int64_t size = job.shape.key_size;
  for (std::int64_t row = begin; row < end; ++row, to += stride) {
    const T scale = static_cast<T>(QueryScale<T>(job, unit, row));
    const std::byte* from = job.q.at(unit.sequence.batch, unit.head(row), unit.query(row));
    LoadRow(from, job.q.dtype, job.q.strides[3], size, to);
    for (std::int64_t i = 0; i < size; ++i) to[i] *= scale;
    std::fill(to + size, to + stride, T(0));
  }
}

// to = keys [begin, end) of the unit in a grid (k or v), padded with zeros to `stride`.
template <typename T>
HWY_INLINE void LoadVectors(const core::Grid& grid, const Unit& unit, std::int64_t size, std::int64_t begin,
                            std::int64_t end, T* to, std::int64_t stride) {
  for (std::int64_t key = begin; key < end; ++key, to += stride) {
    const std::byte* from = grid.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
    LoadRow(from, grid.dtype, grid.strides[3], size, to);
    std::fill(to + size, to + stride, T(0));
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

// True if all of v's keys [begin, end) are finite.
template <typename T>
HWY_NOINLINE bool IsFinite(const core::Grid& grid, const Unit& unit, std::int64_t size, std::int64_t begin,
                           std::int64_t end) {
  T buffer[kMaxHeadSize];
  bool finite = true;
  for (std::int64_t key = begin; key < end; ++key) {
    finite &= AllFinite(
        VectorOf(grid, unit.sequence.batch, unit.key_head, unit.sequence.first_key + key, size, buffer),
        size);
  }
  return finite;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_LOAD_INL_H_
