// Hard attention, the limit of softmax as beta grows: the largest logit takes all weight, ties share it
// equally.
//
// Weights are 1 at the maximum and 0 elsewhere before they are normalised, so a row costs its scan and one
// more pass of three operations per key, and only tiles that hold the maximum are read again. The gradient is
// 0: weights don't move with the logits, except where they jump.
#if defined(WHET_KERNELS_HARD_HARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_HARD_HARD_INL_H_
#undef WHET_KERNELS_HARD_HARD_INL_H_
#else
#define WHET_KERNELS_HARD_HARD_INL_H_
#endif

#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "core/normalizer.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/above-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct HardElements {
  T top;

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Weight(D d, V x) const {
    const V y = hn::Sub(x, hn::Set(d, top));
    const V marked = hn::IfThenElseZero(hn::Eq(y, hn::Zero(d)), hn::Set(d, T(1)));
    return hn::IfThenElse(hn::Eq(y, y), marked, y);  // keeps NaN
  }
};

struct Hard {
  static constexpr const char* kName = "hard";
  static constexpr std::optional<core::ParameterRange> kParameter{};
  static constexpr bool kUsesBeta = false;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = false;
  static constexpr bool kNeedsScratch = false;
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = false;
  static constexpr bool kIsSparse = true;
  static constexpr bool kMergesShards = true;
  static constexpr bool kSharesThreshold = false;
  static constexpr bool kParameterGradient = false;

  template <typename T>
  static double Reach(const RowInput<T>& /*row*/, const RowResult<T>& /*result*/, double /*epsilon*/) {
    return 0;
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* /*next*/,
                               RowResult<T>& result) {
    if (needs.support) {
      result.least = static_cast<double>(result.top);
      result.support = CountKeys(
          runs, [&](auto d, auto x) HWY_ATTR { return hn::CountTrue(d, hn::Eq(x, hn::Set(d, result.top))); });
    }
    const HardElements<T> elements{result.top};
    const T limit = std::nextafter(result.top, kMinusInfinity<T>);
    Sums sums;
    runs.ForEach([&](std::int64_t begin, std::int64_t end)
                     HWY_ATTR { sums.z += Ties(runs.row.x + begin, end - begin, elements, limit); });
    result.sums = sums;
    WeighAbove(runs, elements, limit, out, result);
  }

  template <typename T>
  static double Peak(const RowInput<T>& /*row*/, const RowResult<T>& result) {
    return result.key_max == result.top ? 1 : 0;
  }

  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& saved) {
    return saved.top;
  }

  // w = [x = max] / ties doesn't depend on x:  dx = 0
  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& /*rule*/, bool /*moves*/) {
    if (row.weights != nullptr) Mark(row.x, row.n, static_cast<T>(row.saved.top), row.weights);
    static constexpr T kZeros[kBlock] = {};
    const core::RowArray& din = row.din_array;
    for (std::int64_t i = 0; i < row.n; i += kBlock) {
      StoreRow(kZeros, din.dtype, din.key_stride, std::min(kBlock, row.n - i),
               row.din + i * din.key_stride * core::element_bytes(din.dtype));
    }
  }

  template <typename T>
  static HWY_INLINE HWY_NAMESPACE::PartSums PartSums(const RowGradient<T>& /*row*/) {
    return {};
  }

  template <typename T>
  static HWY_INLINE void PartBackward(const RowGradient<T>& row, const PartLine& /*line*/) {
    Backward(row, Rule{}, false);
  }

  // out = 1 where x is `top`, else 0; NaN where x is NaN or +inf.
  template <typename T>
  static HWY_NOINLINE void Mark(const T* x, std::int64_t n, T top, T* out) {
    const hn::ScalableTag<T> d;
    const HardElements<T> elements{top};
    Map(
        d, out, n, [&](hn::Vec<decltype(d)> v) HWY_ATTR { return elements.Weight(d, v); }, x);
  }

  // The sum of these.
  template <typename T>
  static HWY_NOINLINE double Ties(const T* x, std::int64_t n, const HardElements<T>& elements, T limit) {
    const hn::ScalableTag<T> d;
    WideVec a = hn::Zero(hn::ScalableTag<double>()), b = a;
    ForEachAbove(d, x, n, limit,
                 [&](hn::Vec<decltype(d)> v) HWY_ATTR { AddWide(elements.Weight(d, v), a, b); });
    return TotalWide<T>(a, b);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_HARD_HARD_INL_H_
