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
#include <cstdint>

#include "kernels/dense/matmul-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How many of n numbers are above `limit`.
template <typename T>
HWY_INLINE std::int64_t CountAbove(const T* x, std::int64_t n, T limit) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V bound = hn::Set(d, limit);
  std::int64_t count = 0;
  Map(
      d, static_cast<T*>(nullptr), n,
      [&](V v) HWY_ATTR {
        count += static_cast<std::int64_t>(hn::CountTrue(d, hn::Gt(v, bound)));
        return v;
      },
      x);
  return count;
}

// Writes those to `values` (which may be x) and their keys, the first being `first`, to `list`; returns how
// many. Both must have space for one more.
template <typename T>
HWY_INLINE std::int64_t ListAbove(const T* x, std::int64_t n, T limit, std::int64_t first, std::int32_t* list,
                                  T* values) {
  const hn::ScalableTag<T> d;
  const auto bound = hn::Set(d, limit);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr std::int64_t kPiece = 256;
  std::int64_t count = 0;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const T value = x[i];
      list[count] = static_cast<std::int32_t>(first + i);
      values[count] = value;  // count <= i: nothing unread is overwritten
      count += value > limit ? 1 : 0;
    }
  };
  const std::int64_t whole = n - n % lanes;
  for (std::int64_t begin = 0; begin < whole; begin += kPiece) {
    // First the vectors that hold any, without a branch: which ones can't be predicted.
    std::int32_t found[kPiece + 1];
    std::int64_t vectors = 0;
    for (std::int64_t i = begin; i < std::min(whole, begin + kPiece); i += lanes) {
      found[vectors] = static_cast<std::int32_t>(i);
      vectors += hn::AllFalse(d, hn::Gt(hn::LoadU(d, x + i), bound)) ? 0 : 1;
    }
    for (std::int64_t i = 0; i < vectors; ++i) add(found[i], found[i] + lanes);
  }
  add(whole, n);
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

// out += sum of values[i] times the vector of key list[i], in the order of the list. Whole panels are read
// and written.
template <typename T>
HWY_NOINLINE void AddListed(const T* values, const std::int32_t* list, std::int64_t count,
                            const KeyVectors<T>& vectors, std::int64_t size, T* out) {
  const ProductTag<T> d;
  using V = hn::Vec<ProductTag<T>>;
  const std::int64_t lanes = ProductLanes<T>(), columns = PanelColumns<T>();
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {  // four keys for each time that `out` is read and written
    const V x0 = hn::Set(d, values[i]), x1 = hn::Set(d, values[i + 1]);
    const V x2 = hn::Set(d, values[i + 2]), x3 = hn::Set(d, values[i + 3]);
    const T *a = vectors.of(list[i]), *b = vectors.of(list[i + 1]);
    const T *c = vectors.of(list[i + 2]), *e = vectors.of(list[i + 3]);
    for (std::int64_t first = 0, at = 0; first < size; first += columns, at += vectors.step) {
      for (std::int64_t j = 0; j < columns; j += lanes) {
        V sum = hn::MulAdd(x0, hn::LoadU(d, a + at + j), hn::LoadU(d, out + first + j));
        sum = hn::MulAdd(x1, hn::LoadU(d, b + at + j), sum);
        sum = hn::MulAdd(x2, hn::LoadU(d, c + at + j), sum);
        hn::StoreU(hn::MulAdd(x3, hn::LoadU(d, e + at + j), sum), d, out + first + j);
      }
    }
  }
  for (; i < count; ++i) {
    const V factor = hn::Set(d, values[i]);
    const T* a = vectors.of(list[i]);
    for (std::int64_t first = 0, at = 0; first < size; first += columns, at += vectors.step) {
      for (std::int64_t j = 0; j < columns; j += lanes) {
        const V sum = hn::MulAdd(factor, hn::LoadU(d, a + at + j), hn::LoadU(d, out + first + j));
        hn::StoreU(sum, d, out + first + j);
      }
    }
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
