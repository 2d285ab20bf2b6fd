// Softmax over the K largest logits of a row; keys that tie with the K-th largest all stay.
//
// The row is cut into groups of equal size, several times K of them, by one sweep that takes the largest of
// each. A number that K of these reach is reached by K keys: what lies below leaves the search, and few more
// than K keys stay. Among them the K-th largest is found by bisection over numbers in the order that their
// bits have, each step a count of the keys above one. Then one exponential per key that stays. Where rows
// have too few keys for that, all of them are searched. The gradient is that of softmax over the keys that
// stay.
#if defined(WHET_KERNELS_TOP_K_TOP_K_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_TOP_K_TOP_K_INL_H_
#undef WHET_KERNELS_TOP_K_TOP_K_INL_H_
#else
#define WHET_KERNELS_TOP_K_TOP_K_INL_H_
#endif

#include <whet/rule.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>

#include "core/normalizer.h"
#include "kernels/row/above-inl.h"
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

// The smallest of n keys that are at least `least`; infinity if there is none.
template <typename T>
HWY_NOINLINE T SmallestFrom(const T* x, std::int64_t n, T least) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V limit = hn::Set(d, least), none = hn::Set(d, -kMinusInfinity<T>);
  V smallest = none;
  Map(
      d, static_cast<T*>(nullptr), n,
      [&](V v) HWY_ATTR {
        smallest = hn::Min(smallest, hn::IfThenElse(hn::Ge(v, limit), v, none));
        return v;
      },
      x);
  return hn::GetLane(hn::MinOfLanes(d, smallest));
}

// A number that at least k keys reach, and at most `most` unless it is the k-th largest itself, by bisection
// between `low`, which k keys reach, and `top`, the largest. count_from(x) is how many reach x.
template <class CountFrom, typename T>
HWY_INLINE T ReachedBy(const CountFrom& count_from, std::int64_t k, std::int64_t most, T low, T top) {
  constexpr int kHalvings = 24;  // of the distance, then of the numbers between, which always ends
  auto from = static_cast<std::int64_t>(OrderedBits(low));
  auto to = static_cast<std::int64_t>(OrderedBits(top)) + 1;  // [from, to): fewer than k reach `to`
  for (int step = 0; from + 1 < to; ++step) {
    const T lower = FromOrderedBits<T>(static_cast<OrderOf<T>>(from));
    const T upper = FromOrderedBits<T>(static_cast<OrderOf<T>>(to - 1));
    auto order = static_cast<std::int64_t>(OrderedBits(lower / 2 + upper / 2));
    if (step >= kHalvings || order <= from || order >= to) order = std::midpoint(from, to);
    const std::int64_t count = count_from(FromOrderedBits<T>(static_cast<OrderOf<T>>(order)));
    (count >= k ? from : to) = order;
    if (count >= k && count <= most) break;
  }
  return FromOrderedBits<T>(static_cast<OrderOf<T>>(from));
}

// The largest of each group of a run: group g of `groups` vectors of them has the vectors g, g + groups, ...
// What is left after the last whole vector of groups goes to its end. Returns how many numbers `out` has.
template <typename T>
HWY_NOINLINE std::int64_t LargestOfGroups(const T* x, std::int64_t n, std::int64_t groups, T* out) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t step = groups * lanes, whole = n / step * step;
  if (whole > 0) {
    for (std::int64_t g = 0; g < step; g += lanes) {
      auto max = hn::Set(d, kMinusInfinity<T>);
      for (std::int64_t i = g; i < whole; i += step) max = hn::Max(max, hn::LoadU(d, x + i));
      hn::StoreU(max, d, out + g);
    }
  }
  const std::int64_t size = whole > 0 ? step : 0;
  std::copy_n(x + whole, n - whole, out + size);
  return size + n - whole;
}

// A number that at least k keys of the row reach and few more, from the largest of groups; lowest() if there
// are too few keys.
template <typename T>
HWY_INLINE T ReachedByGroups(const Runs<T>& runs, std::int64_t k, T top) {
  constexpr std::int64_t kGroupsPerKey = 4, kLeastGroup = 4;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  const std::int64_t groups = (kGroupsPerKey * k + lanes - 1) / lanes;
  constexpr T kLowest = std::numeric_limits<T>::lowest();
  T* const scratch = runs.row.scratch;
  if (scratch == nullptr || !runs.all || groups * lanes * kLeastGroup > runs.row.size()) return kLowest;
  const std::int64_t size = LargestOfGroups(runs.row.x, runs.row.size(), groups, scratch);
  const auto count_from = [&](T least) HWY_ATTR { return CountFrom(scratch, size, least); };
  if (count_from(kLowest) < k) return kLowest;
  return ReachedBy(count_from, k, k + k / 8, SmallestFrom(scratch, size, kLowest), top);
}

// The k-th largest visible logit of the runs; lowest() if there are fewer. Leaves the keys from there on, and
// perhaps some below, in row.scratch if there is one: `kept` of them.
template <typename T>
HWY_NOINLINE T KthLargest(const Runs<T>& runs, std::int64_t k, T top, std::int64_t& kept) {
  constexpr T kLowest = std::numeric_limits<T>::lowest();
  T* const scratch = runs.row.scratch;
  if (scratch != nullptr) {
    const T limit = std::nextafter(ReachedByGroups(runs, k, top), kMinusInfinity<T>);
    runs.ForEach([&](std::int64_t begin, std::int64_t end)
                     HWY_ATTR { kept += KeepKeys(runs.row.x + begin, end - begin, limit, scratch + kept); });
    kept = FillLastVector(scratch, kept, runs.row.size());
  }
  // Of every run of keys to search: f(keys, how many).
  const auto visit = [&](const auto& f) HWY_ATTR {
    if (scratch != nullptr) return f(static_cast<const T*>(scratch), kept);
    runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR { f(runs.row.x + begin, end - begin); });
  };
  const auto count_from = [&](T least) HWY_ATTR {
    std::int64_t count = 0;
    visit([&](const T* x, std::int64_t n) HWY_ATTR { count += CountFrom(x, n, least); });
    return count;
  };
  const auto smallest_from = [&](T least) HWY_ATTR {
    T smallest = -kMinusInfinity<T>;
    visit([&](const T* x, std::int64_t n)
              HWY_ATTR { smallest = std::min(smallest, SmallestFrom(x, n, least)); });
    return smallest;
  };
  if (!std::isfinite(top) || count_from(kLowest) < k) return kLowest;
  return smallest_from(ReachedBy(count_from, k, k, smallest_from(kLowest), top));
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
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = true;
  static constexpr bool kIsSparse = true;
  static constexpr bool kMergesShards = false;
  static constexpr bool kSharesThreshold = false;
  static constexpr bool kParameterGradient = false;

  // As softmax: the K largest are among those that remain, or so few remain that the others have no weight.
  template <typename T>
  static double Reach(const RowInput<T>& row, const RowResult<T>& result, double epsilon) {
    return Softmax::Reach(row, result, epsilon);
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* /*next*/,
                               RowResult<T>& result) {
    const auto k = static_cast<std::int64_t>(runs.row.parameter);
    std::int64_t kept = 0;
    const T least = KthLargest(runs, k, result.top, kept);
    result.threshold = static_cast<double>(least);
    const TopKElements<T> elements{Exponential<T>(result.beta), result.top, least, T(1)};
    const RowInput<T> those{.x = runs.row.scratch, .n = kept};
    if (those.x != nullptr) {
      result.sums = {.z = WeighElements(Runs<T>{those, true}, elements, static_cast<T*>(nullptr))};
    }
    // After the scratch was read, before weights may take the place of the logits.
    if (needs.support) CountKept(runs, k, least, result);
    if (those.x == nullptr) {
      result.sums = {.z = WeighElements(runs, elements, out)};
      return;
    }
    WeighAbove(runs, elements, std::nextafter(least, kMinusInfinity<T>), out, result);
  }

  // Where tiles were dropped and fewer than K keys are left, the K-th largest is in one of those.
  template <typename T>
  static HWY_INLINE void CountKept(const Runs<T>& runs, std::int64_t k, T least, RowResult<T>& result) {
    const Runs<T> every{runs.row, true};
    std::int64_t kept = 0;
    if (least == std::numeric_limits<T>::lowest() && !runs.all)
      least = KthLargest(every, k, result.top, kept);
    if (least > std::numeric_limits<T>::lowest()) result.least = static_cast<double>(least);
    result.support = CountKeys(
        every, [&](auto d, auto x) HWY_ATTR { return hn::CountTrue(d, hn::Ge(x, hn::Set(d, least))); });
  }

  template <typename T>
  static double Peak(const RowInput<T>& row, const RowResult<T>& result) {
    return static_cast<double>(result.key_max) < result.threshold ? 0 : Softmax::Peak(row, result);
  }

  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& saved) {
    return saved.threshold;
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
