// Keys above a limit, where few of a row are: moved together, looked at, or weighed, the others left out.
//
// What holds no key above the limit costs little more than the comparison: 9 operations for 32 keys of f32
// with AVX2, 64 with AVX-512, and the store of zeros where weights are written. There is a branch for each
// four vectors, and a wrong guess costs about what looking at them would have; not with AVX2, where moving
// single keys is dear: vectors that hold one are listed first and visited afterwards. NaN counts as above, so
// that nobody misses it.
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
#include <functional>
#include <limits>

#include "kernels/row/elementwise-inl.h"
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

// Whether KeepKeys moves single keys, so that SpreadKeys can put them back; whole vectors if not. AVX-512 has
// instructions for it, AVX2 a table of our own. (Highway's CompressStore copies its table to the stack every
// time with gcc 12.)
#undef WHET_MOVES_LANES
#define WHET_MOVES_LANES (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)
template <typename T>
inline constexpr bool kMovesLanes = WHET_MOVES_LANES && sizeof(T) == sizeof(float);

// Rows to have on their way from memory: the next one to be read, and where its weights will be written.
template <typename T>
struct NextRow {
  const T* in = nullptr;
  T* out = nullptr;
};

#if WHET_MOVES_LANES
using Floats = hn::ScalableTag<float>;
using FloatVec = hn::Vec<Floats>;
using FloatMask = hn::Mask<Floats>;
inline constexpr std::int64_t kFloats = HWY_TARGET == HWY_AVX2 ? 8 : 16;

#if HWY_TARGET == HWY_AVX2
// For every mask of 8 lanes: `together`, the lanes that are set, then the others; `apart`, for each lane how
// many that are set come before it.
struct LaneOrders {
  std::array<std::uint8_t, 256 * 8> together{}, apart{};
  constexpr LaneOrders() {
    for (std::size_t mask = 0; mask < 256; ++mask) {
      std::size_t at = 8 * mask;
      for (const bool set : {true, false}) {
        for (std::size_t lane = 0; lane < 8; ++lane) {
          if (((mask >> lane & 1) != 0) == set) together[at++] = static_cast<std::uint8_t>(lane);
        }
      }
      std::size_t before = 0;
      for (std::size_t lane = 0; lane < 8; ++lane) {
        apart[8 * mask + lane] = static_cast<std::uint8_t>(before);
        before += mask >> lane & 1;
      }
    }
  }
};
inline constexpr LaneOrders kLaneOrders;

// Lane i of the result is lane orders[8 bits + i] of v.
HWY_INLINE FloatVec OrderLanes(FloatVec v, const std::uint8_t* orders, std::uint32_t bits) {
  const Floats d;
  const auto bytes = hn::LoadU(hn::Rebind<std::uint8_t, Floats>(), orders + 8 * bits);
  return hn::TableLookupLanes(v, hn::IndicesFromVec(d, hn::PromoteTo(hn::RebindToSigned<Floats>(), bytes)));
}

HWY_INLINE std::uint32_t BitsOf(FloatMask mask) {
  std::uint8_t bits[8];
  hn::StoreMaskBits(Floats(), mask, bits);
  return bits[0];
}

// The lanes that are set, one after the other from the first on; the rest is anything.
HWY_INLINE FloatVec Together(FloatVec v, FloatMask set) {
  return OrderLanes(v, kLaneOrders.together.data(), BitsOf(set));
}

// The inverse: each lane that is set gets the next of v, the others 0.
HWY_INLINE FloatVec Apart(FloatVec v, FloatMask set) {
  return hn::IfThenElseZero(set, OrderLanes(v, kLaneOrders.apart.data(), BitsOf(set)));
}
#else
HWY_INLINE FloatVec Together(FloatVec v, FloatMask set) { return hn::Compress(v, set); }
HWY_INLINE FloatVec Apart(FloatVec v, FloatMask set) {
  return FloatVec{_mm512_maskz_expand_ps(set.raw, v.raw)};  // which Highway 1.0.3 has no name for
}
#endif

// Stores the keys above the limit at `out`, followed by anything up to a whole vector. Returns how many.
HWY_INLINE std::int64_t StoreAbove(FloatVec keys, FloatVec limit, float* out) {
  const Floats d;
  const auto above = hn::Not(hn::Le(keys, limit));
  hn::StoreU(Together(keys, above), d, out);
  return static_cast<std::int64_t>(hn::CountTrue(d, above));
}

// The inverse: the numbers that end at `end` where keys are above the limit, 0 elsewhere; moves `end` back to
// the first of them.
HWY_INLINE FloatVec LoadAbove(FloatVec keys, FloatVec limit, const float*& end) {
  const Floats d;
  const auto above = hn::Not(hn::Le(keys, limit));
  end -= hn::CountTrue(d, above);
  return Apart(hn::LoadU(d, end), above);
}

// Keys that are looked at together: four vectors, of which a piece has up to kPieceQuads. Those of a piece
// that hold a key above the limit are listed first, without a branch, since which ones can't be predicted.
inline constexpr std::int64_t kQuadKeys = 4 * kFloats, kPieceQuads = 64, kPieceKeys = kPieceQuads * kQuadKeys;

// Whether most such groups hold none of the keys that were kept.
HWY_INLINE bool AreFew(std::int64_t kept, std::int64_t n) { return 3 * kQuadKeys / 4 * kept < n; }

HWY_INLINE bool QuadAbove(const float* x, FloatVec limit) {
  const Floats d;
  return AnyAbove(d, limit, hn::LoadU(d, x), hn::LoadU(d, x + kFloats), hn::LoadU(d, x + 2 * kFloats),
                  hn::LoadU(d, x + 3 * kFloats));
}
#endif

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

#if HWY_TARGET == HWY_AVX2
// KeepKeys with AVX2.
HWY_INLINE std::int64_t KeepLanes(const float* x, std::int64_t n, float limit, float* out,
                                  NextRow<float> next) {
  const Floats d;
  const auto least = hn::Set(d, limit);
  const std::int64_t quads_end = n - n % kQuadKeys;
  float* to = out;  // never past what is read: nothing unread is overwritten
  for (std::int64_t begin = 0; begin < quads_end; begin += kPieceKeys) {
    const std::int64_t end = std::min(quads_end, begin + kPieceKeys);
    std::int32_t found[kPieceQuads + 1];
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; i += kQuadKeys) {
      if (next.in != nullptr) Fetch(next.in + i, kQuadKeys);
      if (next.out != nullptr) FetchForWrite(next.out + i, kQuadKeys);
      found[count] = static_cast<std::int32_t>(i);
      count += QuadAbove(x + i, least) ? 1 : 0;
    }
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t i = found[j]; i < found[j] + kQuadKeys; i += kFloats) {
        to += StoreAbove(hn::LoadU(d, x + i), least, to);
      }
    }
  }
  for (std::int64_t i = quads_end; i < n; ++i) {
    const float key = x[i];
    *to = key;
    to += key <= limit ? 0 : 1;
  }
  return to - out;
}

#endif

#if WHET_MOVES_LANES
// The inverse of KeepKeys: numbers that end at `end`, one for each key above the limit, to where the keys
// are, times `scale`; 0 for all others. `few`: most vectors hold no such key. From the end of the row on, so
// that they may lie at the front of `out`: none is overwritten before it is read. `x` may be `out`. Returns
// where they begin.
HWY_NOINLINE const float* SpreadKeys(const float* x, std::int64_t n, float limit, float scale, bool few,
                                     const float* end, float* out) {
  const Floats d;
  const auto least = hn::Set(d, limit), factor = hn::Set(d, scale), zero = hn::Zero(d);
  const auto spread = [&](std::int64_t quad) HWY_ATTR {
    for (std::int64_t i = quad + kQuadKeys - kFloats; i >= quad; i -= kFloats) {
      hn::StoreU(hn::Mul(LoadAbove(hn::LoadU(d, x + i), least, end), factor), d, out + i);
    }
  };
  std::int64_t i = n;
  while (i % kQuadKeys != 0) {
    --i;
    out[i] = x[i] <= limit ? 0.0f : *--end * scale;
  }
  const bool in_out = !std::less<>()(end, static_cast<const float*>(out)) &&
                      !std::less<>()(static_cast<const float*>(out + n), end);
  while (i > 0 && few && x != out) {
    // Zeros may be written beyond the numbers that aren't read yet.
    const std::int64_t unread = in_out ? (end - out + kQuadKeys - 1) / kQuadKeys * kQuadKeys : 0;
    const std::int64_t begin = std::max(unread, i - kPieceKeys);
    if (begin >= i) break;
    std::int32_t found[kPieceQuads + 1];
    std::int64_t count = 0;
    while (i > begin) {
      i -= kQuadKeys;
      found[count] = static_cast<std::int32_t>(i);
      count += QuadAbove(x + i, least) ? 1 : 0;
      for (std::int64_t j = i; j < i + kQuadKeys; j += kFloats) hn::StoreU(zero, d, out + j);
    }
    for (std::int64_t j = 0; j < count; ++j) spread(found[j]);
  }
  while (i > 0) {
    i -= kQuadKeys;
    spread(i);
  }
  return end;
}
#endif

// Moves the keys above the limit to the front of `out` (which may be `x`), perhaps with others between them;
// returns how many keys that are. Writes no further than n. Has `next` on its way from memory meanwhile.
template <typename T>
HWY_NOINLINE std::int64_t KeepKeys(const T* x, std::int64_t n, T limit, T* out, NextRow<T> next = {}) {
#if HWY_TARGET == HWY_AVX2
  if constexpr (kMovesLanes<T>) return KeepLanes(x, n, limit, out, next);
#endif
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto least = hn::Set(d, limit);
  std::int64_t i = 0, kept = 0;  // kept <= i: nothing unread is overwritten
  const auto keep = [&](hn::Vec<decltype(d)> v) HWY_ATTR {
    if constexpr (kMovesLanes<T>) {
      kept += StoreAbove(v, least, out + kept);
    } else {
      hn::StoreU(v, d, out + kept);
      kept += hn::AllTrue(d, hn::Le(v, least)) ? 0 : lanes;
    }
  };
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + lanes);
    const auto c = hn::LoadU(d, x + i + 2 * lanes), e = hn::LoadU(d, x + i + 3 * lanes);
    if (next.in != nullptr) Fetch(next.in + i, 4 * lanes);
    if (next.out != nullptr) FetchForWrite(next.out + i, 4 * lanes);
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

// The largest key of each group, as MaxOf finds them. Which runs are left out changes only groups whose
// largest key lies there. NaN may be overlooked.
template <typename T>
HWY_NOINLINE void GroupMaxima(const Runs<T>& runs, T* largest) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t groups = Groups<T>();
  std::fill_n(largest, groups, kMinusInfinity<T>);
  runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    const T* const x = runs.row.x;
    auto a = hn::Load(d, largest), b = hn::Load(d, largest + lanes);
    auto c = hn::Load(d, largest + 2 * lanes), e = hn::Load(d, largest + 3 * lanes);
    std::int64_t i = begin / groups * groups;  // as if the run before weren't left out
    for (; i + groups <= runs.row.size() && i < end; i += groups) {
      a = hn::Max(a, hn::LoadU(d, x + i));
      b = hn::Max(b, hn::LoadU(d, x + i + lanes));
      c = hn::Max(c, hn::LoadU(d, x + i + 2 * lanes));
      e = hn::Max(e, hn::LoadU(d, x + i + 3 * lanes));
    }
    hn::Store(a, d, largest);
    hn::Store(b, d, largest + lanes);
    hn::Store(c, d, largest + 2 * lanes);
    hn::Store(e, d, largest + 3 * lanes);
    for (std::int64_t j = i; j < end; ++j) largest[j - i] = std::max(largest[j - i], x[j]);
  });
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

#if WHET_MOVES_LANES
// WeighAbove where the keys above the limit lie together in row.scratch, `kept` of them,
// `padded` with those that fill up the last vector: only they are weighed. Finds sums.z.
template <class Elements, typename T>
HWY_INLINE void WeighKept(const Runs<T>& runs, const Elements& elements, T limit, std::int64_t kept,
                          std::int64_t padded, T* out, RowResult<T>& result) {
  T* const scratch = runs.row.scratch;
  const RowInput<T> those{.x = scratch, .n = padded};
  result.sums = {.z = WeighElements(Runs<T>{those, true}, elements, out == nullptr ? nullptr : scratch)};
  if (out == nullptr || !(result.sums.z > 0)) return;
  const T scale = runs.divide ? static_cast<T>(1 / result.sums.z) : T(1);
  result.divided = runs.divide;
  const bool few = AreFew(kept, runs.row.size());
  const T* end = scratch + kept;
  runs.ForEachFromEnd([&](std::int64_t begin, std::int64_t to) HWY_ATTR {
    end = SpreadKeys(runs.row.x + begin, to - begin, limit, scale, few, end, out + begin);
  });
}

// Whether that is faster than to weigh all vectors that hold a key: with AVX-512, where those are few and
// weights cheap, a branch for each four of them costs less.
HWY_INLINE bool IsWorthSpreading(bool cheap, std::int64_t kept, std::int64_t n) {
  return HWY_TARGET == HWY_AVX2 || !cheap || !AreFew(kept, n);
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_ABOVE_INL_H_
