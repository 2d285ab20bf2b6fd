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
//
// Every sum is a variable of its own, and what a kernel with fewer rows or vectors doesn't use is discarded
// at compile time: vectors whose length is known only at run time (SVE) can't be elements of an array.
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
inline constexpr std::int64_t kMaxPanelColumns = 64;

// Vectors of a product: as long as the target has them, but no panel is wider than kMaxPanelColumns.
template <typename T>
using ProductTag = hn::CappedTag<T, kMaxPanelColumns / kPanelVectors>;

template <typename T>
HWY_INLINE std::int64_t ProductLanes() {
  return static_cast<std::int64_t>(hn::Lanes(ProductTag<T>()));
}

template <typename T>
HWY_INLINE std::int64_t PanelColumns() {
  return kPanelVectors * ProductLanes<T>();
}

// Element (row, step) of A lies at data + row * row_stride + step * step_stride.
template <typename T>
struct Strip {
  const T* data;
  std::int64_t row_stride;
  std::int64_t step_stride;
};

// Row `step` of the panel lies at data + step * stride. If no more than half of the columns count, the others
// are left out of a product, and what lies there in C stays.
template <typename T>
struct Panel {
  const T* data;
  std::int64_t stride;
  std::int64_t columns = kMaxPanelColumns;  // that count
};

// s_i += factor * x_i for i < kCount.
template <int kCount, class V>
HWY_INLINE void AddProducts(V factor, V x0, V x1, V x2, V& s0, V& s1, V& s2) {
  static_assert(1 <= kCount && kCount <= 3);
  s0 = hn::MulAdd(factor, x0, s0);
  if constexpr (kCount > 1) s1 = hn::MulAdd(factor, x1, s1);
  if constexpr (kCount > 2) s2 = hn::MulAdd(factor, x2, s2);
}
template <int kCount, class V>
HWY_INLINE void AddProducts(V factor, V x0, V x1, V x2, V x3, V& s0, V& s1, V& s2, V& s3) {
  AddProducts<std::min(kCount, 3)>(factor, x0, x1, x2, s0, s1, s2);
  if constexpr (kCount > 3) s3 = hn::MulAdd(factor, x3, s3);
}

// kVectors (1, 2 or 4) vectors of a row, from memory and back.
template <int kVectors, class D, typename Stored, class V = hn::Vec<D>>
HWY_INLINE void LoadRowVectors(D d, const Stored* from, V& v0, V& v1, V& v2, V& v3) {
  static_assert(kVectors == 1 || kVectors == 2 || kVectors == 4);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  v0 = LoadWide(d, from);
  if constexpr (kVectors > 1) v1 = LoadWide(d, from + lanes);
  if constexpr (kVectors > 2) {
    v2 = LoadWide(d, from + 2 * lanes);
    v3 = LoadWide(d, from + 3 * lanes);
  }
}
template <int kVectors, class D, typename T, class V = hn::Vec<D>>
HWY_INLINE void AddRowVectors(D d, const T* from, V& v0, V& v1, V& v2, V& v3) {
  V more0 = hn::Zero(d), more1 = more0, more2 = more0, more3 = more0;
  LoadRowVectors<kVectors>(d, from, more0, more1, more2, more3);
  v0 = hn::Add(v0, more0);
  if constexpr (kVectors > 1) v1 = hn::Add(v1, more1);
  if constexpr (kVectors > 2) {
    v2 = hn::Add(v2, more2);
    v3 = hn::Add(v3, more3);
  }
}
template <int kVectors, class D, typename T, class V = hn::Vec<D>>
HWY_INLINE void StoreRowVectors(D d, V v0, V v1, V v2, V v3, T* to) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  hn::StoreU(v0, d, to);
  if constexpr (kVectors > 1) hn::StoreU(v1, d, to + lanes);
  if constexpr (kVectors > 2) {
    hn::StoreU(v2, d, to + 2 * lanes);
    hn::StoreU(v3, d, to + 3 * lanes);
  }
}

// What becomes of what lies in C.
enum class Into {
  kReplace,   // C = A B
  kContinue,  // its sums go on: the same bits however a product is cut into several along its depth
  kAdd,       // C + A B, a product summed by itself: rounds less where many are added
};

// One strip and kVectors vectors of columns; B may be stored in 16 bits. The sum of row r and vector v is
// s<r><v>.
template <int kRows, int kVectors, Into kInto, typename T, typename Stored>
HWY_NOINLINE void MultiplyRows(const T* a, std::int64_t row_stride, std::int64_t step_stride, const Stored* b,
                               std::int64_t b_stride, std::int64_t depth, T* c, std::int64_t c_stride) {
  const ProductTag<T> d;
  using V = hn::Vec<ProductTag<T>>;
  const V zero = hn::Zero(d);
  V s00 = zero, s01 = zero, s02 = zero, s03 = zero, s10 = zero, s11 = zero, s12 = zero, s13 = zero;
  V s20 = zero, s21 = zero, s22 = zero, s23 = zero, s30 = zero, s31 = zero, s32 = zero, s33 = zero;
  V s40 = zero, s41 = zero, s42 = zero, s43 = zero, s50 = zero, s51 = zero, s52 = zero, s53 = zero;
  if constexpr (kInto == Into::kContinue) {
    LoadRowVectors<kVectors>(d, c, s00, s01, s02, s03);
    if constexpr (kRows > 1) LoadRowVectors<kVectors>(d, c + c_stride, s10, s11, s12, s13);
    if constexpr (kRows > 2) LoadRowVectors<kVectors>(d, c + 2 * c_stride, s20, s21, s22, s23);
    if constexpr (kRows > 3) LoadRowVectors<kVectors>(d, c + 3 * c_stride, s30, s31, s32, s33);
    if constexpr (kRows > 4) LoadRowVectors<kVectors>(d, c + 4 * c_stride, s40, s41, s42, s43);
    if constexpr (kRows > 5) LoadRowVectors<kVectors>(d, c + 5 * c_stride, s50, s51, s52, s53);
  }
  const auto value = [&](int row) HWY_ATTR { return hn::Set(d, a[row * row_stride]); };
#pragma GCC unroll 2
  for (std::int64_t step = 0; step < depth; ++step, b += b_stride, a += step_stride) {
    // Whichever side is shorter waits in registers: with 12 sums there are registers for 3 more and an
    // operand.
    if constexpr (kVectors < kRows) {
      V b0 = zero, b1 = zero, b2 = zero, b3 = zero;
      LoadRowVectors<kVectors>(d, b, b0, b1, b2, b3);
      AddProducts<kVectors>(value(0), b0, b1, b2, b3, s00, s01, s02, s03);
      if constexpr (kRows > 1) AddProducts<kVectors>(value(1), b0, b1, b2, b3, s10, s11, s12, s13);
      if constexpr (kRows > 2) AddProducts<kVectors>(value(2), b0, b1, b2, b3, s20, s21, s22, s23);
      if constexpr (kRows > 3) AddProducts<kVectors>(value(3), b0, b1, b2, b3, s30, s31, s32, s33);
      if constexpr (kRows > 4) AddProducts<kVectors>(value(4), b0, b1, b2, b3, s40, s41, s42, s43);
      if constexpr (kRows > 5) AddProducts<kVectors>(value(5), b0, b1, b2, b3, s50, s51, s52, s53);
    } else {
      const V a0 = value(0), a1 = kRows > 1 ? value(1) : a0, a2 = kRows > 2 ? value(2) : a0,
              a3 = kRows > 3 ? value(3) : a0;
      const auto column = [&](int v) HWY_ATTR { return LoadWide(d, b + v * ProductLanes<T>()); };
      AddProducts<kRows>(column(0), a0, a1, a2, a3, s00, s10, s20, s30);
      if constexpr (kVectors > 1) AddProducts<kRows>(column(1), a0, a1, a2, a3, s01, s11, s21, s31);
      if constexpr (kVectors > 2) {
        AddProducts<kRows>(column(2), a0, a1, a2, a3, s02, s12, s22, s32);
        AddProducts<kRows>(column(3), a0, a1, a2, a3, s03, s13, s23, s33);
      }
    }
  }
  if constexpr (kInto == Into::kAdd) {
    AddRowVectors<kVectors>(d, c, s00, s01, s02, s03);
    if constexpr (kRows > 1) AddRowVectors<kVectors>(d, c + c_stride, s10, s11, s12, s13);
    if constexpr (kRows > 2) AddRowVectors<kVectors>(d, c + 2 * c_stride, s20, s21, s22, s23);
    if constexpr (kRows > 3) AddRowVectors<kVectors>(d, c + 3 * c_stride, s30, s31, s32, s33);
    if constexpr (kRows > 4) AddRowVectors<kVectors>(d, c + 4 * c_stride, s40, s41, s42, s43);
    if constexpr (kRows > 5) AddRowVectors<kVectors>(d, c + 5 * c_stride, s50, s51, s52, s53);
  }
  StoreRowVectors<kVectors>(d, s00, s01, s02, s03, c);
  if constexpr (kRows > 1) StoreRowVectors<kVectors>(d, s10, s11, s12, s13, c + c_stride);
  if constexpr (kRows > 2) StoreRowVectors<kVectors>(d, s20, s21, s22, s23, c + 2 * c_stride);
  if constexpr (kRows > 3) StoreRowVectors<kVectors>(d, s30, s31, s32, s33, c + 3 * c_stride);
  if constexpr (kRows > 4) StoreRowVectors<kVectors>(d, s40, s41, s42, s43, c + 4 * c_stride);
  if constexpr (kRows > 5) StoreRowVectors<kVectors>(d, s50, s51, s52, s53, c + 5 * c_stride);
}

template <int kVectors, Into kInto, typename T>
HWY_INLINE void MultiplyVectors(int rows, const Strip<T>& a, const Panel<T>& b, std::int64_t depth, T* c,
                                std::int64_t c_stride) {
  static_assert(kStripRows == 6);
  switch (rows) {
    case 6:
      return MultiplyRows<6, kVectors, kInto>(a.data, a.row_stride, a.step_stride, b.data, b.stride, depth, c,
                                              c_stride);
    case 5:
      return MultiplyRows<5, kVectors, kInto>(a.data, a.row_stride, a.step_stride, b.data, b.stride, depth, c,
                                              c_stride);
    case 4:
      return MultiplyRows<4, kVectors, kInto>(a.data, a.row_stride, a.step_stride, b.data, b.stride, depth, c,
                                              c_stride);
    case 3:
      return MultiplyRows<3, kVectors, kInto>(a.data, a.row_stride, a.step_stride, b.data, b.stride, depth, c,
                                              c_stride);
    case 2:
      return MultiplyRows<2, kVectors, kInto>(a.data, a.row_stride, a.step_stride, b.data, b.stride, depth, c,
                                              c_stride);
    default:
      return MultiplyRows<1, kVectors, kInto>(a.data, a.row_stride, a.step_stride, b.data, b.stride, depth, c,
                                              c_stride);
  }
}

// C (rows x PanelColumns) from A B; rows 1..kStripRows.
template <Into kInto, typename T>
HWY_INLINE void Multiply(int rows, const Strip<T>& a, const Panel<T>& b, std::int64_t depth, T* c,
                         std::int64_t c_stride) {
  constexpr int kHalf = kPanelVectors == 4 ? 2 : kPanelVectors;
  if (kPanelVectors == 4 && b.columns <= kHalf * ProductLanes<T>()) {
    return MultiplyVectors<kHalf, kInto>(rows, a, b, depth, c, c_stride);
  }
  MultiplyVectors<kPanelVectors, kInto>(rows, a, b, depth, c, c_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_DENSE_MATMUL_INL_H_
