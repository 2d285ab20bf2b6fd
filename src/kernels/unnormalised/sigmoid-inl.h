// Sigmoid attention (Ramapuram et al., 2024): with s = beta x and n the number of visible keys,
//
//     w = 1 / (1 + e^-(s - ln n))        dw/ds = w (1 - w)
//
// Each key is weighed by itself: weights don't sum to 1, and none is divided by anything. Limit: one
// exponential and one division per key.
#if defined(WHET_KERNELS_UNNORMALISED_SIGMOID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_UNNORMALISED_SIGMOID_INL_H_
#undef WHET_KERNELS_UNNORMALISED_SIGMOID_INL_H_
#else
#define WHET_KERNELS_UNNORMALISED_SIGMOID_INL_H_
#endif

#include <whet/rule.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/normalizer.h"
#include "kernels/row/elementwise-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct SigmoidElements {
  static constexpr bool kCouples = false, kDivides = false, kShifts = false;
  Exponential<T> exponential;  // at 1
  T beta, offset;

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Weight(D d, V x) const {
    V w, rest;
    Both(d, x, w, rest);
    return w;
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Slopes(D d, V x, V& w, V& a, V& b, V& c) const {
    V rest;
    Both(d, x, w, rest);
    a = hn::Mul(w, rest);
    b = c = hn::Zero(d);
  }

  // w and 1 - w, both as exact as the exponential.
  template <class D, class V>
  HWY_INLINE void Both(D d, V x, V& w, V& rest) const {
    const V s = hn::MulSub(x, hn::Set(d, beta), hn::Set(d, offset));
    const V e = exponential(d, exponential.limit(d, hn::Neg(hn::Abs(s))));
    const V larger = hn::Div(hn::Set(d, T(1)), hn::Add(hn::Set(d, T(1)), e)), smaller = hn::Mul(e, larger);
    const auto positive = hn::Ge(s, hn::Zero(d));
    w = hn::IfThenElse(positive, larger, smaller);
    rest = hn::IfThenElse(positive, smaller, larger);
  }
};

struct Sigmoid {
  static constexpr const char* kName = "sigmoid";
  static constexpr std::optional<core::ParameterRange> kParameter{};
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = true;
  static constexpr bool kNeedsScratch = false;
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = true;
  static constexpr bool kIsSparse = false;
  static constexpr bool kMergesShards = false;
  static constexpr bool kSharesThreshold = false;
  static constexpr bool kParameterGradient = false;

  // Weights have no sum that the small ones would vanish beside.
  template <typename T>
  static double Reach(const RowInput<T>& /*row*/, const RowResult<T>& /*result*/, double /*epsilon*/) {
    return std::numeric_limits<double>::infinity();
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& /*needs*/, T* out, const T* next,
                               RowResult<T>& result) {
    result.threshold = std::log(static_cast<double>(result.state.count));
    const double sum = WeighElements(runs, Elements<T>(result.beta, result.threshold), out, next);
    result.divided = true;
    // +inf is no more a logit than NaN is.
    result.sums = {
        .z = std::isnan(sum) || !std::isfinite(result.top) ? std::numeric_limits<double>::quiet_NaN() : 1};
  }

  template <typename T>
  static double Peak(const RowInput<T>& /*row*/, const RowResult<T>& result) {
    return 1 / (1 + std::exp(result.threshold - result.beta * static_cast<double>(result.key_max)));
  }

  // Every key has weight or gradient.
  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& /*saved*/) {
    return -std::numeric_limits<double>::infinity();
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    BackwardElements(row, Elements<T>(row.saved.beta, row.saved.threshold), rule, moves);
  }

  template <typename T>
  static HWY_INLINE SigmoidElements<T> Elements(double beta, double offset) {
    return {Exponential<T>(1), static_cast<T>(beta), static_cast<T>(offset)};
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_UNNORMALISED_SIGMOID_INL_H_
