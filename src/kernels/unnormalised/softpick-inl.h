// Softpick (Zuhri, Fuadi, Aji, 2025): with s = beta x,
//
//     w = max(0, e^s - 1) / Z,   Z = sum |e^s - 1|;   0 where Z is 0
//     dL/ds = e^s / Z ([s > 0] g - sign(s) sum w g)
//
// Keys below 0 have no weight, yet count in Z, so weights may sum to less than 1. Everything is divided by
// e^max of the row if that is above e, so that nothing overflows. Limit: one exponential per key.
#if defined(WHET_KERNELS_UNNORMALISED_SOFTPICK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_UNNORMALISED_SOFTPICK_INL_H_
#undef WHET_KERNELS_UNNORMALISED_SOFTPICK_INL_H_
#else
#define WHET_KERNELS_UNNORMALISED_SOFTPICK_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/normalizer.h"
#include "kernels/row/elementwise-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/unnormalised/relu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct SoftpickElements {
  static constexpr bool kCouples = true, kDivides = false, kShifts = false;
  Exponential<T> exponential;
  T beta, top, one, scale;  // the larger of 0 and the row's maximum; e^0 and Z measured from there
  bool small;               // no s is above 1: top is 0, and e^s - 1 must not cancel

  // (e^s - 1) and e^s; both 0 for hidden keys.
  template <class D, class V>
  HWY_INLINE V Signed(D d, V x, V& e) const {
    const auto hidden = hn::Eq(x, hn::Set(d, kMinusInfinity<T>));
    V excess;
    if (small) {
      const V s = hn::Mul(hn::IfThenZeroElse(hidden, x), hn::Set(d, beta));
      excess = hn::IfThenElse(hn::Eq(s, s), hn::Expm1(d, hn::Max(s, hn::Set(d, T(-80)))), s);
      e = hn::IfThenZeroElse(hidden, hn::Add(excess, hn::Set(d, T(1))));
    } else {
      e = exponential(d, exponential.limit(d, hn::Sub(x, hn::Set(d, top))));
      excess = hn::Sub(e, hn::Set(d, one));
    }
    return hn::IfThenZeroElse(hidden, excess);
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Slopes(D d, V x, V& w, V& a, V& b, V& c) const {
    V e;
    const V excess = Signed(d, x, e);
    const V slope = hn::Mul(e, hn::Set(d, scale)), zero = hn::Zero(d);
    w = hn::IfThenZeroElse(hn::Le(x, zero), excess);
    a = hn::IfThenZeroElse(hn::Le(x, zero), slope);
    b = hn::IfThenElse(hn::Lt(x, zero), hn::Neg(slope), a);
    c = hn::Mul(w, hn::Set(d, scale));
  }
};

// Weights of the runs in `out` (null: nowhere). Returns Z, the sum of |e^s - 1|.
template <typename T>
HWY_NOINLINE double WeighSoftpick(const Runs<T>& runs, const SoftpickElements<T>& elements, T* out,
                                  const T* next) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  WideVec total = hn::Zero(hn::ScalableTag<double>()), rest = total;
  runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    const std::int64_t run = RunKeys<T>();
    for (std::int64_t i = begin; i < end; i += run) {
      if (next != nullptr && i + run <= end) Fetch(next + i, run);
      V sum = hn::Zero(d);
      Map(
          d, out == nullptr ? nullptr : out + i, std::min(run, end - i),
          [&](V x) HWY_ATTR {
            V e;
            const V excess = elements.Signed(d, x, e);
            sum = hn::Add(sum, hn::Abs(excess));
            return hn::IfThenZeroElse(hn::Le(x, hn::Zero(d)), excess);  // keeps NaN
          },
          runs.row.x + i);
      AddWide(sum, total, rest);
    }
  });
  return TotalWide<T>(total, rest);
}

struct Softpick {
  static constexpr const char* kName = "softpick";
  static constexpr std::optional<core::ParameterRange> kParameter{};
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = false;
  static constexpr bool kNeedsScratch = false;
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = false;
  static constexpr bool kIsSparse = true;
  static constexpr bool kMergesShards = false;
  static constexpr bool kSharesThreshold = false;
  static constexpr bool kParameterGradient = false;

  // Every key counts in Z.
  template <typename T>
  static double Reach(const RowInput<T>& /*row*/, const RowResult<T>& /*result*/, double /*epsilon*/) {
    return std::numeric_limits<double>::infinity();
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                               RowResult<T>& result) {
    const auto elements = Elements<T>(static_cast<double>(result.top), result.beta, 1);
    // Before the weights, which may take the place of the logits.
    if (needs.support) CountPositive(runs, result);
    result.sums = {.z = WeighSoftpick(runs, elements, out, next)};
  }

  template <typename T>
  static double Peak(const RowInput<T>& /*row*/, const RowResult<T>& result) {
    const double top = Origin(result.beta, static_cast<double>(result.top));
    return std::max(0.0, std::exp(result.beta * (static_cast<double>(result.key_max) - top)) -
                             std::exp(-result.beta * top));
  }

  // Keys below 0 have no weight, but a gradient through Z.
  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& /*saved*/) {
    return -std::numeric_limits<double>::infinity();
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    BackwardElements(row, Elements<T>(row.saved.top, row.saved.beta, row.saved.scale), rule, moves);
  }

  // Where exponentials of a row are measured from.
  static double Origin(double beta, double top) { return beta * top > 1 ? top : 0; }

  template <typename T>
  static HWY_INLINE SoftpickElements<T> Elements(double top, double beta, double scale) {
    const double from = Origin(beta, top);
    return {Exponential<T>(beta),  static_cast<T>(beta),
            static_cast<T>(from),  static_cast<T>(std::exp(-beta * from)),
            static_cast<T>(scale), from == 0};
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_UNNORMALISED_SOFTPICK_INL_H_
