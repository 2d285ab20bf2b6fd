// Rows in and out of memory: any element type, any stride, to a contiguous row of float or double.
//
// f16 and bf16 are converted with integer operations, the same on every target: exact inwards, to
// nearest with ties to even outwards (denormals, infinities and NaN included).
#if defined(WHET_KERNELS_ELEMENTS_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ELEMENTS_ELEMENTS_INL_H_
#undef WHET_KERNELS_ELEMENTS_ELEMENTS_INL_H_
#else
#define WHET_KERNELS_ELEMENTS_ELEMENTS_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>
#include <whet/view.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D32 = hn::ScalableTag<float>;
using DBits = hn::RebindToUnsigned<D32>;
using DSigned = hn::RebindToSigned<D32>;
using D16 = hn::Rebind<std::uint16_t, D32>;
using VBits = hn::Vec<DBits>;

HWY_INLINE hn::Vec<D32> FromBits(bf16 /*type*/, VBits bits) {
  return hn::BitCast(D32(), hn::ShiftLeft<16>(bits));
}

HWY_INLINE VBits ToBits(bf16 /*type*/, hn::Vec<D32> value) {
  const DBits du;
  const VBits bits = hn::BitCast(du, value);
  const VBits odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const VBits rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF))));
  // Rounding could carry a NaN's payload over into infinity: keep NaN, made quiet.
  const VBits nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
  return hn::IfThenElse(hn::RebindMask(du, hn::Eq(value, value)), rounded, nan);
}

HWY_INLINE hn::Vec<D32> FromBits(f16 /*type*/, VBits bits) {
  const D32 d;
  const DBits du;
  const VBits exponent_and_mantissa = hn::ShiftLeft<13>(hn::And(bits, hn::Set(du, 0x7FFF)));
  const VBits exponent = hn::And(exponent_and_mantissa, hn::Set(du, 0x0F800000));
  VBits result = hn::Add(exponent_and_mantissa, hn::Set(du, (127 - 15) << 23));
  result = hn::IfThenElse(hn::Eq(exponent, hn::Set(du, 0x0F800000)),  // infinity, NaN
                          hn::Add(result, hn::Set(du, (128 - 16) << 23)), result);
  // Denormals: 2^-14 * (1 + m) - 2^-14 is the exact value.
  const auto tiny = hn::Sub(hn::BitCast(d, hn::Add(result, hn::Set(du, 1 << 23))), hn::Set(d, 0x1p-14f));
  result = hn::IfThenElse(hn::Eq(exponent, hn::Zero(du)), hn::BitCast(du, tiny), result);
  return hn::BitCast(d, hn::Or(result, hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)))));
}

HWY_INLINE VBits ToBits(f16 /*type*/, hn::Vec<D32> value) {
  const D32 d;
  const DBits du;
  const VBits bits = hn::BitCast(du, value);
  const VBits sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
  const VBits a = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
  const auto magnitude = hn::BitCast(d, a);
  const VBits odd = hn::And(hn::ShiftRight<13>(a), hn::Set(du, 1));
  // (15 - 127) << 23 modulo 2^32, plus the rounding bias.
  VBits result = hn::ShiftRight<13>(hn::Add(a, hn::Add(odd, hn::Set(du, 0xC8000FFFu))));
  // Below 2^-14 the sum with 0.5 puts the mantissa in place, rounded by the addition itself.
  const VBits denormal =
      hn::Sub(hn::BitCast(du, hn::Add(magnitude, hn::Set(d, 0.5f))), hn::Set(du, 0x3F000000));
  result = hn::IfThenElse(hn::RebindMask(du, hn::Lt(magnitude, hn::Set(d, 0x1p-14f))), denormal, result);
  result = hn::IfThenElse(hn::RebindMask(du, hn::Ge(magnitude, hn::Set(d, 65536.0f))), hn::Set(du, 0x7C00),
                          result);
  result = hn::IfThenElse(hn::RebindMask(du, hn::Eq(value, value)), result, hn::Set(du, 0x7E00));
  return hn::Or(result, sign);
}

// A vector of elements as they are stored.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadWide(D d, const T* from) {
  if constexpr (sizeof(T) == sizeof(std::uint16_t)) {
    const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
    const auto wide =
        hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(hn::Rebind<std::uint16_t, D>(), bits));
    return FromBits(T{}, wide);
  } else {
    return hn::LoadU(d, from);
  }
}

// Strided 16-bit elements pass through a small contiguous block.
inline constexpr std::int64_t kBlock = 256;

template <typename Half>
HWY_INLINE void Load16(const Half* from, std::int64_t stride, std::int64_t n, float* to) {
  const D32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::uint16_t block[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t size = std::min(kBlock, n - i);
    for (std::int64_t j = 0; j < size; ++j) block[j] = from[(i + j) * stride].bits;
    std::fill(block + size, block + kBlock, std::uint16_t{0});
    float wide[HWY_MAX_BYTES / sizeof(float)];
    for (std::int64_t j = 0; j < size; j += lanes) {
      const auto v = FromBits(Half{}, hn::PromoteTo(DBits(), hn::LoadU(D16(), block + j)));
      if (j + lanes <= size) {
        hn::StoreU(v, d, to + i + j);
      } else {
        hn::StoreU(v, d, wide);
        std::copy_n(wide, size - j, to + i + j);
      }
    }
  }
}

template <typename Half>
HWY_INLINE void Store16(const float* from, std::int64_t stride, std::int64_t n, Half* to) {
  const D32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::uint16_t block[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t size = std::min(kBlock, n - i);
    std::int64_t at = 0;
    Map(
        d, static_cast<float*>(nullptr), size,
        [&](hn::Vec<D32> v) HWY_ATTR {
          const auto bits = hn::BitCast(DSigned(), ToBits(Half{}, v));
          hn::StoreU(hn::DemoteTo(D16(), bits), D16(), block + at);
          at += lanes;
          return v;
        },
        from + i);
    for (std::int64_t j = 0; j < size; ++j) to[(i + j) * stride].bits = block[j];
  }
}

// to[0..n) = the elements at `from`, converted.
template <typename T>
HWY_INLINE void LoadRow(const void* from, DType dtype, std::int64_t stride, std::int64_t n, T* to) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dtype == DType::bf16) return Load16(static_cast<const bf16*>(from), stride, n, to);
    if (dtype == DType::f16) return Load16(static_cast<const f16*>(from), stride, n, to);
  }
  const T* source = static_cast<const T*>(from);
  if (stride == 1) {
    std::copy_n(source, n, to);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) to[i] = source[i * stride];
}

template <typename T>
HWY_INLINE void StoreRow(const T* from, DType dtype, std::int64_t stride, std::int64_t n, void* to) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dtype == DType::bf16) return Store16(from, stride, n, static_cast<bf16*>(to));
    if (dtype == DType::f16) return Store16(from, stride, n, static_cast<f16*>(to));
  }
  T* target = static_cast<T*>(to);
  if (stride == 1) {
    std::copy_n(from, n, target);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) target[i * stride] = from[i];
}

// Puts `hidden` where the mask byte is 0.
template <typename T>
HWY_INLINE void HideMasked(const std::uint8_t* mask, std::int64_t stride, std::int64_t n, T hidden, T* row) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (mask[i * stride] == 0) row[i] = hidden;
  }
}

// to = ln(from / max), max the largest of the row, which is returned: measured from there, keys close
// to the maximum keep their distance exactly and a large beta does no harm. 0 gives -inf; negative
// numbers and NaN give NaN, an infinity makes itself NaN.
template <typename T>
HWY_INLINE T LogRow(const T* from, std::int64_t n, T* to) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const T max = Scan<false>(from, n).max;
  const V top = hn::Set(d, max), zero = hn::Zero(d);
  const V log_max = hn::Log(d, top), half = hn::Set(d, T(0.5)), tiny = hn::Set(d, T(0x1p-90));
  const V nan = hn::Set(d, std::numeric_limits<T>::quiet_NaN()), hidden = hn::Set(d, kMinusInfinity<T>);
  Map(
      d, to, n,
      [&](V p) HWY_ATTR {
        const V ratio = hn::Div(p, top);
        const V near = hn::Log1p(d, hn::Div(hn::Sub(p, top), top));  // the difference is exact
        const V far = hn::IfThenElse(hn::Lt(ratio, tiny), hn::Sub(hn::Log(d, p), log_max), hn::Log(d, ratio));
        V y = hn::IfThenElse(hn::Gt(ratio, half), near, far);
        y = hn::IfThenElse(hn::Eq(p, zero), hidden, y);
        return hn::IfThenElse(hn::Ge(p, zero), hn::IfThenElse(hn::Eq(p, hn::Neg(hidden)), nan, y), nan);
      },
      from);
  return max;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ELEMENTS_ELEMENTS_INL_H_
