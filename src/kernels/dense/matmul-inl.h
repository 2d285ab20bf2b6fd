// Small matrix products for attention: C = A B or C += A B, a strip of up to kStripRows rows of A against
// a panel of B that is PanelColumns() wide.
//
// A's elements are broadcast one by one, B's are read as vectors, C stays in registers over the
// whole depth: 6 x 2 vectors and the three operands fill the 16 registers of AVX2 (6 x 4 the 32 of AVX-512).
// Every multiply-add needs 8/12 of a load, so a core with two loads and two multiply-adds a cycle is
// bound by the multiply-adds, if A and B come from the first-level cache: callers order their loops so.
//
// The result of an element depends on its own row and column only, never on how rows were grouped
// into strips: depth is summed in order.
#if defined(WHET_KERNELS_DENSE_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_DENSE_MATMUL_INL_H_
#undef WHET_KERNELS_DENSE_MATMUL_INL_H_
#else
#define WHET_KERNELS_DENSE_MATMUL_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/elements/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kStripRows = 6;
inline constexpr int kPanelVectors = HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3 ? 4 : 2;

template <typename T>
HWY_INLINE std::int64_t PanelColumns() {
  return kPanelVectors * static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
}

// Element (row, step) of A lies at data + row * row_stride + step * step_stride.
template <typename T>
struct Strip {
  const T* data;
  std::int64_t row_stride;
  std::int64_t step_stride;
};

// Row `step` of the panel lies at data + step * stride.
template <typename T>
struct Panel {
  const T* data;
  std::int64_t stride;
};

// One strip and kVectors vectors of columns; B may be stored in 16 bits.
template <int kRows, int kVectors, bool kAdd, typename T, typename Stored>
HWY_NOINLINE void MultiplyRows(const T* a, std::int64_t row_stride, std::int64_t step_stride, const Stored* b,
                               std::int64_t b_stride, std::int64_t depth, T* c, std::int64_t c_stride) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = kAdd ? hn::LoadU(d, c + r * c_stride + v * lanes) : hn::Zero(d);
    }
  }
#pragma GCC unroll 2
  for (std::int64_t step = 0; step < depth; ++step, b += b_stride, a += step_stride) {
    // Whichever side is shorter waits in registers: with 12 sums there are registers for 3 more and an
    // operand.
    if constexpr (kVectors < kRows) {
      V columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) columns[v] = LoadWide(d, b + v * lanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const V value = hn::Set(d, a[r * row_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(value, columns[v], sums[r][v]);
      }
    } else {
      V values[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) values[r] = hn::Set(d, a[r * row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const V column = LoadWide(d, b + v * lanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][v] = hn::MulAdd(values[r], column, sums[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, c + r * c_stride + v * lanes);
  }
}

// C (rows x PanelColumns) = A B, or += A B; rows 1..kStripRows.
template <bool kAdd, typename T>
HWY_INLINE void Multiply(int rows, const Strip<T>& a, const Panel<T>& b, std::int64_t depth, T* c,
                         std::int64_t c_stride) {
  static_assert(kStripRows == 6);
  switch (rows) {
    case 6:
      return MultiplyRows<6, kPanelVectors, kAdd>(a.data, a.row_stride, a.step_stride, b.data, b.stride,
                                                  depth, c, c_stride);
    case 5:
      return MultiplyRows<5, kPanelVectors, kAdd>(a.data, a.row_stride, a.step_stride, b.data, b.stride,
                                                  depth, c, c_stride);
    case 4:
      return MultiplyRows<4, kPanelVectors, kAdd>(a.data, a.row_stride, a.step_stride, b.data, b.stride,
                                                  depth, c, c_stride);
    case 3:
      return MultiplyRows<3, kPanelVectors, kAdd>(a.data, a.row_stride, a.step_stride, b.data, b.stride,
                                                  depth, c, c_stride);
    case 2:
      return MultiplyRows<2, kPanelVectors, kAdd>(a.data, a.row_stride, a.step_stride, b.data, b.stride,
                                                  depth, c, c_stride);
    default:
      return MultiplyRows<1, kPanelVectors, kAdd>(a.data, a.row_stride, a.step_stride, b.data, b.stride,
                                                  depth, c, c_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_DENSE_MATMUL_INL_H_
