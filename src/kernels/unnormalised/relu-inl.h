// ReLU attention (Wortsman et al., 2023): with s = beta x and n the number of visible keys,
//
//     w = max(0, s) / n        dw/ds = [s > 0] / n
//
// Keys with a logit of 0 or less have no weight, and tiles of them are skipped. Limit: the read of the row.
#if defined(WHET_KERNELS_UNNORMALISED_RELU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_UNNORMALISED_RELU_INL_H_
#undef WHET_KERNELS_UNNORMALISED_RELU_INL_H_
#else
#define WHET_KERNELS_UNNORMALISED_RELU_INL_H_
#endif

#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "core/normalizer.h"
#include "kernels/row/elementwise-inl.h"
#include "kernels/row/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct ReluElements {
  static constexpr bool kCouples = false, kDivides = false, kShifts = false;
  T beta, scale;

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Weight(D d, V x) const {
    return hn::IfThenZeroElse(hn::Le(x, hn::Zero(d)), hn::Mul(x, hn::Set(d, beta)));  // keeps NaN
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Slopes(D d, V x, V& w, V& a, V& b, V& c) const {
    w = Weight(d, x);
    a = hn::IfThenZeroElse(hn::Le(x, hn::Zero(d)), hn::Set(d, scale));
    b = c = hn::Zero(d);
  }
};

// Statistics of normalizers that give weight to logits above 0.
template <typename T>
HWY_INLINE void CountPositive(const Runs<T>& runs, RowResult<T>& result) {
  result.least = 0;
  result.support = 0;
  if (!(result.beta > 0)) return;  // all s are 0
  result.support =
      CountKeys(runs, [](auto d, auto x) HWY_ATTR { return hn::CountTrue(d, hn::Gt(x, hn::Zero(d))); });
}

struct Relu {
  static constexpr const char* kName = "relu";
  static constexpr std::optional<core::ParameterRange> kParameter{};
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = true;
  static constexpr bool kNeedsScratch = false;
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = false;
  static constexpr bool kIsSparse = true;
  static constexpr bool kMergesShards = false;
  static constexpr bool kSharesThreshold = false;
  static constexpr bool kParameterGradient = false;

  // Down to a logit of 0; where none is above, keys have no weight either way.
  template <typename T>
  static double Reach(const RowInput<T>& /*row*/, const RowResult<T>& result, double /*epsilon*/) {
    return std::max(0.0, static_cast<double>(result.top));
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                               RowResult<T>& result) {
    if (needs.support) CountPositive(runs, result);
    const auto count = static_cast<double>(result.state.count);
    const ReluElements<T> elements{static_cast<T>(runs.divide ? result.beta / count : result.beta), T(1)};
    const double sum = WeighElements(runs, elements, out, next);
    result.divided = runs.divide;
    // +inf is no more a logit than NaN is.
    result.sums = {.z = std::isnan(sum) || !std::isfinite(result.top)
                            ? std::numeric_limits<double>::quiet_NaN()
                            : count};
  }

  template <typename T>
  static double Peak(const RowInput<T>& /*row*/, const RowResult<T>& result) {
    return std::max(0.0, result.beta * static_cast<double>(result.key_max));
  }

  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& /*saved*/) {
    return 0;
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    const ReluElements<T> elements{static_cast<T>(row.saved.beta), static_cast<T>(row.saved.scale)};
    BackwardElements(row, elements, rule, moves);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_UNNORMALISED_RELU_INL_H_
