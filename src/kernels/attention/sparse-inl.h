// Products with rows of which few keys count: key by key, over a list of them.
//
// A dense product costs half a cycle per row, key and vector of elements, whatever the weights are; a list
// costs twice that for each of its keys, and finding it up to as much per key as a dense product of 8
// elements. So lists pay where few keys count (core/attention_plan.h says how few), and there they leave out
// nearly all of a product, however the keys are spread: a tile of 256 keys, in which six rows must agree that
// nothing counts, is seldom empty if the keys lie anywhere.
//
// Sums over a list go in the order of keys, as those of matmul-inl.h do: leaving out what is multiplied by 0
// changes no bit of them.
#if defined(WHET_KERNELS_ATTENTION_SPARSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_SPARSE_INL_H_
#undef WHET_KERNELS_ATTENTION_SPARSE_INL_H_
#else
#define WHET_KERNELS_ATTENTION_SPARSE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/dense/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Bit i: whether x[i] is above `limit`, for n <= kWordKeys numbers.
inline constexpr std::int64_t kWordKeys = 64;
template <typename T>
HWY_INLINE std::uint64_t BitsAbove(const T* x, std::int64_t n, T limit) {
  const hn::ScalableTag<T> d;
  const auto bound = hn::Set(d, limit);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::uint64_t bits = 0;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    std::uint8_t bytes[8] = {};
    hn::StoreMaskBits(d, hn::Gt(hn::LoadU(d, x + i), bound), bytes);
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    bits |= word << i;
  }
  for (; i < n; ++i) bits |= std::uint64_t{x[i] > limit} << i;
  return bits;
}

// How many of n numbers are above `limit`.
template <typename T>
HWY_INLINE std::int64_t CountAbove(const T* x, std::int64_t n, T limit) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; i += kWordKeys) {
    count += std::popcount(BitsAbove(x + i, std::min(kWordKeys, n - i), limit));
  }
  return count;
}

// Writes those to `values` (which may be x) and their keys, the first being `first`, to `list`; returns how
// many. Both must have space for kListRoom more.
inline constexpr std::int64_t kListRoom = 8;
template <typename T>
HWY_INLINE std::int64_t ListAbove(const T* x, std::int64_t n, T limit, std::int64_t first, std::int32_t* list,
                                  T* values) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; i += kWordKeys) {
    std::uint64_t bits = BitsAbove(x + i, std::min(kWordKeys, n - i), limit);
    const std::int64_t end = count + std::popcount(bits);
    // Always some at a time: how many there are can't be predicted. What is too much will be overwritten, and
    // `values` stays behind what is read.
    for (std::int64_t at = count; at < end; at += kListRoom) {
      for (std::int64_t j = at; j < at + kListRoom; ++j) {
        const std::int64_t key = i + (std::countr_zero(bits) & (kWordKeys - 1));
        list[j] = static_cast<std::int32_t>(first + key);
        values[j] = x[key];
        bits &= bits - 1;
      }
    }
    count = end;
  }
  return count;
}

// Vectors of keys from `first` on: element e of key j at
// data + (j - first) * stride + e / C * step + e % C, with C = PanelColumns.
template <typename T>
struct KeyVectors {
  const T* data;
  std::int64_t stride;
  std::int64_t step;
  std::int64_t first;

  const T* of(std::int64_t key) const { return data + (key - first) * stride; }
};

// The same for kPanels panels beside each other, the first of which lies at `at` in a vector of a key. Sums
// stay in registers over the whole list.
template <int kPanels, typename T>
HWY_INLINE void AddListedPanels(const T* values, const std::int32_t* list, std::int64_t count,
                                const KeyVectors<T>& vectors, std::int64_t at, T* out) {
  constexpr bool kFour = kPanels * kPanelVectors == 4;
  static_assert(kFour || kPanels * kPanelVectors == 2);
  const ProductTag<T> d;
  const std::int64_t lanes = ProductLanes<T>();
  const std::int64_t third = at + (kPanelVectors == 4 ? 2 * lanes : vectors.step);
  auto a = hn::LoadU(d, out), b = hn::LoadU(d, out + lanes), c = a, e = b;
  if constexpr (kFour) {
    c = hn::LoadU(d, out + 2 * lanes);
    e = hn::LoadU(d, out + 3 * lanes);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const auto factor = hn::Set(d, values[i]);
    const T* const key = vectors.of(list[i]);
    a = hn::MulAdd(factor, hn::LoadU(d, key + at), a);
    b = hn::MulAdd(factor, hn::LoadU(d, key + at + lanes), b);
    if constexpr (kFour) {
      c = hn::MulAdd(factor, hn::LoadU(d, key + third), c);
      e = hn::MulAdd(factor, hn::LoadU(d, key + third + lanes), e);
    }
  }
  hn::StoreU(a, d, out);
  hn::StoreU(b, d, out + lanes);
  if constexpr (kFour) {
    hn::StoreU(c, d, out + 2 * lanes);
    hn::StoreU(e, d, out + 3 * lanes);
  }
}

// out += sum of values[i] times the vector of key list[i], in the order of the list. Whole panels are read
// and written.
template <typename T>
HWY_INLINE void AddListed(const T* values, const std::int32_t* list, std::int64_t count,
                          const KeyVectors<T>& vectors, std::int64_t size, T* out) {
  const std::int64_t columns = PanelColumns<T>();
  std::int64_t first = 0, at = 0;
  for (; kPanelVectors == 2 && first + columns < size; first += 2 * columns, at += 2 * vectors.step) {
    AddListedPanels<kPanelVectors == 2 ? 2 : 1>(values, list, count, vectors, at, out + first);
  }
  for (; first < size; first += columns, at += vectors.step) {
    AddListedPanels<1>(values, list, count, vectors, at, out + first);
  }
}

// to += factor * x. Whole vectors are read and written.
template <typename T>
HWY_INLINE void AddScaled(T factor, const T* x, std::int64_t n, T* to) {
  const ProductTag<T> d;
  const auto scale = hn::Set(d, factor);
  for (std::int64_t i = 0; i < n; i += ProductLanes<T>()) {
    hn::StoreU(hn::MulAdd(scale, hn::LoadU(d, x + i), hn::LoadU(d, to + i)), d, to + i);
  }
}

// <a, b>. Whole panels are read: elements past n must be 0.
template <typename T>
HWY_INLINE T InnerProduct(const T* a, const T* b, std::int64_t n) {
  static_assert(kPanelVectors % 2 == 0);
  const ProductTag<T> d;
  const std::int64_t lanes = ProductLanes<T>();
  auto even = hn::Zero(d), odd = even;
  for (std::int64_t i = 0; i < n; i += 2 * lanes) {
    even = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), even);
    odd = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), odd);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_SPARSE_INL_H_
