// Keys above a limit, where few of a row are: moved together, looked at, or weighed, the others left out.
//
// Four vectors are compared at a time, and what holds no key above the limit costs only that: 9 operations
// for 32 keys of f32 with AVX2, and the store of zeros where weights are written. A wrong guess of
// the branch costs about what looking at the four vectors would have. NaN counts as above, so that nobody
// misses it.
#if defined(WHET_KERNELS_ROW_ABOVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_ABOVE_INL_H_
#undef WHET_KERNELS_ROW_ABOVE_INL_H_
#else
#define WHET_KERNELS_ROW_ABOVE_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A limit that every key less than `depth` below `top` is above, however differences round; so is `top`.
template <typename T>
HWY_INLINE T LimitBelow(T top, double depth) {
  constexpr auto kUnit = static_cast<double>(std::numeric_limits<T>::epsilon());
  const double limit = static_cast<double>(top) - depth * (1 + 8 * kUnit);
  const double safe = limit - 2 * kUnit * std::abs(limit);
  const auto lowest = static_cast<double>(std::numeric_limits<T>::lowest());
  return safe <= lowest ? kMinusInfinity<T> : static_cast<T>(safe);
}

template <class D, class V>
HWY_INLINE bool AnyAbove(D d, V limit, V a, V b, V c, V e) {
  const auto below =
      hn::And(hn::And(hn::Le(a, limit), hn::Le(b, limit)), hn::And(hn::Le(c, limit), hn::Le(e, limit)));
  return !hn::AllTrue(d, below);
}

// Calls body(keys) for vectors of the row, at least for those with a key above the limit; lanes past the end
// hold -inf.
template <class D, typename T, class Body>
HWY_INLINE void ForEachAbove(D d, const T* x, std::int64_t n, T limit, const Body& body) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto least = hn::Set(d, limit);
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + lanes);
    const auto c = hn::LoadU(d, x + i + 2 * lanes), e = hn::LoadU(d, x + i + 3 * lanes);
    if (!AnyAbove(d, least, a, b, c, e)) continue;
    body(a);
    body(b);
    body(c);
    body(e);
  }
  Map(
      d, static_cast<T*>(nullptr), n - i,
      [&](hn::Vec<D> keys) HWY_ATTR {
        body(keys);
        return keys;
      },
      x + i);
}

#if HWY_TARGET == HWY_AVX2
// For every mask of 8 lanes: the lanes that are set, then the others.
struct LaneOrders {
  std::array<std::uint8_t, 256 * 8> lanes{};
  constexpr LaneOrders() {
    for (std::size_t mask = 0; mask < 256; ++mask) {
      std::size_t at = 8 * mask;
      for (const bool set : {true, false}) {
        for (std::size_t lane = 0; lane < 8; ++lane) {
          if (((mask >> lane & 1) != 0) == set) lanes[at++] = static_cast<std::uint8_t>(lane);
        }
      }
    }
  }
};
inline constexpr LaneOrders kLaneOrders;
#endif

// Stores the lanes that are set at `out`, followed by anything up to a whole vector; returns how many. All of
// them if one is set, where moving lanes is slow. (Highway's CompressStore copies its table to the stack
// every time with gcc 12.)
template <class D, class V, class Mask, typename T>
HWY_INLINE std::int64_t StoreSet(D d, V v, Mask set, T* out) {
#if HWY_TARGET == HWY_AVX2
  if constexpr (sizeof(T) == sizeof(float)) {
    std::uint8_t bits[8];
    hn::StoreMaskBits(d, set, bits);
    const hn::RebindToSigned<D> di;
    const auto order = hn::LoadU(hn::Rebind<std::uint8_t, D>(), kLaneOrders.lanes.data() + 8 * bits[0]);
    hn::StoreU(hn::TableLookupLanes(v, hn::IndicesFromVec(d, hn::PromoteTo(di, order))), d, out);
    return std::popcount(bits[0]);
  }
#endif
  hn::StoreU(v, d, out);
  return hn::AllFalse(d, set) ? 0 : static_cast<std::int64_t>(hn::Lanes(d));
}

// Fills up the last vector of `kept` keys, at most n of them, with keys that aren't visible: sweeps over
// whole vectors are faster. Returns how many keys that are.
template <typename T>
HWY_INLINE std::int64_t FillLastVector(T* keys, std::int64_t kept, std::int64_t n) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  const std::int64_t whole = (kept + lanes - 1) / lanes * lanes;
  if (whole > n) return kept;
  std::fill(keys + kept, keys + whole, kMinusInfinity<T>);
  return whole;
}

// Moves the keys above the limit to the front of `out` (which may be `x`), perhaps with others between them;
// returns how many keys that are. Writes no further than n. Has the row at `next` (null: none) on its way
// from memory meanwhile.
template <typename T>
HWY_NOINLINE std::int64_t KeepKeys(const T* x, std::int64_t n, T limit, T* out, const T* next = nullptr) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto least = hn::Set(d, limit);
  std::int64_t i = 0, kept = 0;  // kept <= i: nothing unread is overwritten
  const auto keep = [&](hn::Vec<decltype(d)> v)
                        HWY_ATTR { kept += StoreSet(d, v, hn::Not(hn::Le(v, least)), out + kept); };
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + lanes);
    const auto c = hn::LoadU(d, x + i + 2 * lanes), e = hn::LoadU(d, x + i + 3 * lanes);
    if (next != nullptr) Fetch(next + i, 4 * lanes);
    if (next != nullptr) FetchForWrite(out + i, 4 * lanes);
    if (!AnyAbove(d, least, a, b, c, e)) continue;
    keep(a);
    keep(b);
    keep(c);
    keep(e);
  }
  for (; i + lanes <= n; i += lanes) keep(hn::LoadU(d, x + i));
  for (; i < n; ++i) {
    const T key = x[i];
    out[kept] = key;
    kept += key <= limit ? 0 : 1;
  }
  return kept;
}

// Weights of keys above the limit, times `scale`; 0 for all others.
template <class Elements, typename T>
HWY_NOINLINE void WeighRunAbove(const T* x, std::int64_t n, const Elements& elements, T limit, T scale,
                                T* out) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V least = hn::Set(d, limit), factor = hn::Set(d, scale), zero = hn::Zero(d);
  const auto weight = [&](V keys) HWY_ATTR { return hn::Mul(elements.Weight(d, keys), factor); };
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    V a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + lanes);
    V c = hn::LoadU(d, x + i + 2 * lanes), e = hn::LoadU(d, x + i + 3 * lanes);
    if (AnyAbove(d, least, a, b, c, e)) {
      a = weight(a);
      b = weight(b);
      c = weight(c);
      e = weight(e);
    } else {
      a = b = c = e = zero;
    }
    hn::StoreU(a, d, out + i);
    hn::StoreU(b, d, out + i + lanes);
    hn::StoreU(c, d, out + i + 2 * lanes);
    hn::StoreU(e, d, out + i + 3 * lanes);
  }
  Map(d, out + i, n - i, weight, x + i);
}

// The same for the runs of a row whose sums.z is known, divided by it if that is wanted.
template <class Elements, typename T>
HWY_INLINE void WeighAbove(const Runs<T>& runs, const Elements& elements, T limit, T* out,
                           RowResult<T>& result) {
  if (out == nullptr) return;
  const T scale = runs.divide ? static_cast<T>(1 / result.sums.z) : T(1);
  result.divided = runs.divide;
  runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    WeighRunAbove(runs.row.x + begin, end - begin, elements, limit, scale, out + begin);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_ABOVE_INL_H_
