// Softmax over the K largest logits of a row; keys that tie with the K-th largest all stay.
//
// The K-th largest is found by bisection over the numbers between the smallest and the largest logit, in the
// order that their bits have: 32 steps at most (f64: 64), each a count of the keys above a number, 2
// operations per key; vectors without a key above the lower end leave the search. Then one exponential per
// key. The gradient is that of softmax over the keys that stay.
#if defined(WHET_KERNELS_TOP_K_TOP_K_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_TOP_K_TOP_K_INL_H_
#undef WHET_KERNELS_TOP_K_TOP_K_INL_H_
#else
#define WHET_KERNELS_TOP_K_TOP_K_INL_H_
#endif

#include <whet/rule.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>

#include "core/normalizer.h"
#include "kernels/row/elementwise-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/softmax/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Numbers in their order as integers, and back.
template <typename T>
using OrderOf = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
template <typename T>
HWY_INLINE OrderOf<T> OrderedBits(T x) {
  const auto bits = std::bit_cast<OrderOf<T>>(x);
  return bits >= 0 ? bits : static_cast<OrderOf<T>>(std::numeric_limits<OrderOf<T>>::min() - bits);
}
template <typename T>
HWY_INLINE T FromOrderedBits(OrderOf<T> order) {
  return std::bit_cast<T>(
      order >= 0 ? order : static_cast<OrderOf<T>>(std::numeric_limits<OrderOf<T>>::min() - order));
}

template <typename T>
HWY_NOINLINE std::int64_t CountFrom(const T* x, std::int64_t n, T least) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V limit = hn::Set(d, least);
  std::int64_t count = 0;
  Map(
      d, static_cast<T*>(nullptr), n,
      [&](V v) HWY_ATTR {
        count += static_cast<std::int64_t>(hn::CountTrue(d, hn::Ge(v, limit)));
        return v;
      },
      x);
  return count;
}

// The k-th largest visible logit of the runs; lowest() if there are fewer.
template <typename T>
HWY_NOINLINE T KthLargest(const Runs<T>& runs, std::int64_t k, T top) {
  T* const scratch = runs.row.scratch;
  std::int64_t kept = -1;  // keys in scratch; -1: none were moved there
  const auto count_from = [&](T least) HWY_ATTR {
    if (kept >= 0) return CountFrom(static_cast<const T*>(scratch), kept, least);
    std::int64_t count = 0;
    runs.ForEach([&](std::int64_t begin, std::int64_t end)
                     HWY_ATTR { count += CountFrom(runs.row.x + begin, end - begin, least); });
    return count;
  };
  T low = std::numeric_limits<T>::lowest();
  if (count_from(low) < k || !std::isfinite(top)) return low;
  // [low, high): at least k keys from low on, fewer from high on.
  auto from = static_cast<std::int64_t>(OrderedBits(low));
  auto to = static_cast<std::int64_t>(OrderedBits(top)) + 1;
  for (int step = 0; from + 1 < to; ++step) {
    // The first guesses fall where logits are dense: below the maximum by 1, 2, 4, ... of its own scale.
    T guess = FromOrderedBits<T>(static_cast<OrderOf<T>>(std::midpoint(from, to)));
    if (step < 12) {
      const T near = top - static_cast<T>(std::ldexp(1.0, step - 3));
      const auto order = static_cast<std::int64_t>(OrderedBits(near));
      if (order > from && order < to) guess = near;
    }
    const auto order = static_cast<std::int64_t>(OrderedBits(guess));
    const bool enough = count_from(guess) >= k;
    (enough ? from : to) = order;
    if (!enough || scratch == nullptr) continue;
    const T below = std::nextafter(guess, kMinusInfinity<T>);
    if (kept >= 0) {
      kept = KeepAbove(static_cast<const T*>(scratch), kept, below, scratch);
    } else {
      kept = 0;
      runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
        kept += KeepAbove(runs.row.x + begin, end - begin, below, scratch + kept);
      });
    }
    step = 12;  // now between two guesses
  }
  return FromOrderedBits<T>(static_cast<OrderOf<T>>(from));
}

template <typename T>
struct TopKElements {
  static constexpr bool kCouples = true, kDivides = false, kShifts = true;
  Exponential<T> exponential;
  T top, least, scale;

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Weight(D d, V x) const {
    const V y = exponential.limit(d, hn::Sub(x, hn::Set(d, top)));
    return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, least)), exponential(d, y));
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Slopes(D d, V x, V& w, V& a, V& b, V& c) const {
    w = Weight(d, x);
    a = b = c = hn::Mul(w, hn::Set(d, scale));
  }
};

struct TopK {
  static constexpr const char* kName = "top-k";
  static constexpr std::optional<core::ParameterRange> kParameter{
      {.above = 0, .most = 0x1p31, .whole = true}};
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = false;
  static constexpr bool kNeedsScratch = true;
  static constexpr bool kSavesThreshold = true;
  static constexpr bool kMergesShards = false;

  // As softmax: the K largest are among those that remain, or so few remain that the others have no weight.
  template <typename T>
  static double Reach(const RowInput<T>& row, const RowResult<T>& result, double epsilon) {
    return Softmax::Reach(row, result, epsilon);
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* /*next*/,
                               RowResult<T>& result) {
    const auto k = static_cast<std::int64_t>(runs.row.parameter);
    const T least = KthLargest(runs, k, result.top);
    result.threshold = static_cast<double>(least);
    if (needs.support) CountKept(runs, k, least, result);
    const TopKElements<T> elements{Exponential<T>(result.beta), result.top, least, T(1)};
    result.sums = {.z = WeighElements(runs, elements, out)};
  }

  // Where tiles were dropped and fewer than K keys are left, the K-th largest is in one of those.
  template <typename T>
  static HWY_INLINE void CountKept(const Runs<T>& runs, std::int64_t k, T least, RowResult<T>& result) {
    const Runs<T> every{runs.row, true};
    if (least == std::numeric_limits<T>::lowest() && !runs.all) least = KthLargest(every, k, result.top);
    if (least > std::numeric_limits<T>::lowest()) result.least = static_cast<double>(least);
    result.support = CountKeys(
        every, [&](auto d, auto x) HWY_ATTR { return hn::CountTrue(d, hn::Ge(x, hn::Set(d, least))); });
  }

  template <typename T>
  static double Peak(const RowInput<T>& row, const RowResult<T>& result) {
    return static_cast<double>(result.key_max) < result.threshold ? 0 : Softmax::Peak(row, result);
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    const SavedRow& saved = row.saved;
    BackwardElements(row,
                     TopKElements<T>{Exponential<T>(saved.beta), static_cast<T>(saved.top),
                                     static_cast<T>(saved.threshold), static_cast<T>(saved.scale)},
                     rule, moves);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_TOP_K_TOP_K_INL_H_
