// From products <q, k> to the logits of a row: soft-cap, bias, mask; a sink after the last key.
//
// A row lies at x, indexed by key; its keys are [range.begin, range.end), and everything else in x is free to
// use. Bytes: x is in cache; a bias is read once, an element per row and key, and where it isn't shared by
// rows that comes from memory and is the limit. The soft-cap costs one tanh per key, and its slope is kept
// for backward.
#if defined(WHET_KERNELS_ATTENTION_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_LOGITS_INL_H_
#undef WHET_KERNELS_ATTENTION_LOGITS_INL_H_
#else
#define WHET_KERNELS_ATTENTION_LOGITS_INL_H_
#endif

#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/attention_job.h"
#include "core/attention_plan.h"
#include "kernels/attention/load-inl.h"
#include "kernels/attention/run.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::kTileKeys;

// A piece of a row of bias.
template <typename T>
HWY_INLINE const T* BiasPiece(const core::Grid& bias, const std::byte* from, std::int64_t n, T* piece) {
  const DType arithmetic = sizeof(T) == sizeof(double) ? DType::f64 : DType::f32;
  if (bias.dtype == arithmetic && bias.strides[3] == 1) return reinterpret_cast<const T*>(from);
  LoadRow(from, bias.dtype, bias.strides[3], n, piece);
  return piece;
}

// cap tanh(v / cap). f64 by the C library: Highway's Tanh is off by up to 5 units in the last place, which a
// large cap makes visible in the output.
HWY_INLINE void SoftCap(double* x, std::int64_t n, double cap) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = cap * std::tanh(x[i] / cap);
}

// f32 in float64 too, since a few units in the last place of f32 would be multiplied by beta.
HWY_INLINE void SoftCap(float* x, std::int64_t n, double cap) {
  const hn::ScalableTag<double> d;
  using V = hn::Vec<decltype(d)>;
  const V size_of_cap = hn::Set(d, cap), inverse = hn::Set(d, 1 / cap);
  constexpr std::int64_t kPiece = 256;
  HWY_ALIGN double wide[kPiece];
  for (std::int64_t i = 0; i < n; i += kPiece) {
    const std::int64_t size = std::min(kPiece, n - i);
    for (std::int64_t j = 0; j < size; ++j) wide[j] = static_cast<double>(x[i + j]);
    Map(
        d, wide, size,
        [&](V v) HWY_ATTR {
          const V capped = hn::Mul(size_of_cap, hn::Tanh(d, hn::Mul(v, inverse)));
          return hn::IfThenElse(hn::Eq(v, v), capped, v);  // NaN stays
        },
        static_cast<const double*>(wide));
    for (std::int64_t j = 0; j < size; ++j) x[i + j] = static_cast<float>(wide[j]);
  }
}

// Where the row's piece of bias and mask begins; null if there is none.
HWY_INLINE const std::byte* SideRow(const core::Grid& grid, const Unit& unit, std::int64_t row,
                                    std::int64_t key) {
  return grid.data == nullptr
             ? nullptr
             : grid.at(unit.sequence.batch, unit.head(row), unit.query(row), unit.sequence.first_key + key);
}

// Products become logits; hidden keys become -inf. `cap_slopes`: where d logit / d product goes, by key, if
// there is a soft-cap; null: nowhere.
template <typename T>
HWY_INLINE void ShapeLogits(const core::AttentionJob& job, const Unit& unit, std::int64_t row,
                            const KeyRange& range, T* x, T* cap_slopes = nullptr) {
  const std::int64_t n = range.size();
  T* keys = x + range.begin;
  if (job.options.softcap > 0) {
    SoftCap(keys, n, job.options.softcap);
    const T inverse = static_cast<T>(1 / job.options.softcap);
    for (std::int64_t i = 0; cap_slopes != nullptr && i < n; ++i) {
      // s = c tanh(p / c):  ds/dp = 1 - (s / c)^2
      const T tangent = keys[i] * inverse;
      cap_slopes[range.begin + i] = 1 - tangent * tangent;
    }
  }
  if (const std::byte* bias = SideRow(job.bias, unit, row, range.begin)) {
    const hn::ScalableTag<T> d;
    using V = hn::Vec<decltype(d)>;
    const V hidden = hn::Set(d, kMinusInfinity<T>);
    HWY_ALIGN T piece[kTileKeys];
    const std::int64_t step = job.bias.strides[3] * core::element_bytes(job.bias.dtype);
    for (std::int64_t i = 0; i < n; i += kTileKeys) {
      const std::int64_t size = std::min(kTileKeys, n - i);
      Map(
          d, keys + i, size,
          // A bias of -inf hides whatever the product is: NaN too.
          [&](V v, V b) HWY_ATTR { return hn::IfThenElse(hn::Eq(b, hidden), hidden, hn::Add(v, b)); },
          static_cast<const T*>(keys + i), BiasPiece(job.bias, bias + i * step, size, piece));
    }
  }
  if (const std::byte* mask = SideRow(job.mask, unit, row, range.begin)) {
    HideMasked(reinterpret_cast<const std::uint8_t*>(mask), job.mask.strides[3], n, kMinusInfinity<T>, keys);
  }
}

// The sink of a row's head; -inf if there is none, or if another shard has it: that of key 0. (Without any
// key no row sees one, and the sink doesn't count.)
template <typename T>
HWY_INLINE T SinkOf(const core::AttentionJob& job, std::int64_t head) {
  if (job.sinks.data == nullptr || job.shard.first_key > 0 || job.shape.keys == 0) return kMinusInfinity<T>;
  return Element<T>(job.sinks, job.sinks.at(0, head, 0));
}

// The row of logits at x for the row engine; its sink is put after the last key.
template <typename T>
HWY_INLINE RowInput<T> InputOf(const core::AttentionJob& job, std::int64_t head, T* x, const KeyRange& range,
                               T* scratch) {
  const T sink = SinkOf<T>(job, head);
  const bool sinks = sink != kMinusInfinity<T>;
  if (sinks) x[range.end] = sink;
  return {.x = x + range.begin,
          .n = range.size(),
          .sink = sinks,
          .parameter = job.options.normalizer.parameter(),
          .scratch = scratch};
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_LOGITS_INL_H_
