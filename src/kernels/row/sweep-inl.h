// Sweeps over one contiguous row of float or double.
//
// A row is read in this order: scan (maximum), sweep (exponentials and their moments), scale. One core
// is bound by the exponentials, not by memory, so the number of sweeps matters less than the number
// of exponentials: none costs one per key, a rule of the entropy two. Measuring every exponential
// from the row's own maximum needs no rescaling afterwards; the extra read of the scan is
// light beside a sweep.
//
// Sums stay in T for kRun vectors and continue in float64: beside a term of 1, a float sum drops up to
// 2^-25 with every addition, so a run of 16 loses less than 5e-7. Sums of float64 keep what each addition of
// a run drops. Keys that aren't visible are -inf and contribute exactly 0 everywhere. Nothing outside [row,
// row + n) is read or written.
#if defined(WHET_KERNELS_ROW_SWEEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_SWEEP_INL_H_
#undef WHET_KERNELS_ROW_SWEEP_INL_H_
#else
#define WHET_KERNELS_ROW_SWEEP_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/sums.h"
#include "kernels/elements/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::Sums;

inline constexpr std::int64_t kRun = 16;

// Keys of a run, and a bound for buffers that hold one.
template <typename T>
HWY_INLINE std::int64_t RunKeys() {
  return kRun * static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
}
template <typename T>
inline constexpr std::size_t kMaxRunKeys = kRun* HWY_MAX_BYTES / sizeof(T);

// A sum in float64, fed a vector of T at a time. It lies in two vectors of the caller's, not in a struct: on
// targets whose vectors have no fixed length they can't be members.
using WideVec = hn::Vec<hn::ScalableTag<double>>;

// f32: the two hold the sums of the lower and of the upper lanes.
HWY_INLINE void AddWide(hn::Vec<hn::ScalableTag<float>> v, WideVec& low, WideVec& high) {
  const hn::ScalableTag<double> dd;
#if HWY_TARGET == HWY_SCALAR
  (void)high;
  low = hn::Add(low, hn::PromoteTo(dd, v));
#else
  const hn::Half<hn::ScalableTag<float>> half;
  low = hn::Add(low, hn::PromoteTo(dd, hn::LowerHalf(half, v)));
  high = hn::Add(high, hn::PromoteTo(dd, hn::UpperHalf(half, v)));
#endif
}

// f64: a sum and what its additions dropped (Knuth's two-sum): over 131,072 keys a plain sum drifts by up to
// 1e-12.
HWY_INLINE void AddWide(hn::Vec<hn::ScalableTag<double>> v, WideVec& sum, WideVec& dropped) {
  const auto next = hn::Add(sum, v);
  const auto added = hn::Sub(next, sum);
  const auto error = hn::Add(hn::Sub(sum, hn::Sub(next, added)), hn::Sub(v, added));
  dropped = hn::Add(dropped, error);
  sum = next;
}

template <typename T>
HWY_INLINE double TotalWide(WideVec a, WideVec b) {
  const hn::ScalableTag<double> dd;
  if constexpr (sizeof(T) == sizeof(float)) return hn::GetLane(hn::SumOfLanes(dd, hn::Add(a, b)));
  const double sum = hn::GetLane(hn::SumOfLanes(dd, a));
  const double dropped = hn::GetLane(hn::SumOfLanes(dd, b));
  return std::isfinite(sum) ? sum + dropped : sum;  // beside an infinity, `dropped` is NaN
}

template <typename T>
inline constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// out[i] = f(in[i], more[i]...) vector by vector; `out` may be any of the inputs, or null if f only
// accumulates. The last, partial vector passes through a buffer, where lanes past the end hold
// -inf (a key that isn't visible) for `in` and 0 for the others.
template <class D, typename T, class F, class... More>
HWY_INLINE void Map(D d, T* out, std::int64_t n, F&& f, const T* in, const More*... more) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (out != nullptr) {
    for (; i + lanes <= n; i += lanes)
      hn::StoreU(f(hn::LoadU(d, in + i), hn::LoadU(d, more + i)...), d, out + i);
  } else {
    for (; i + lanes <= n; i += lanes) f(hn::LoadU(d, in + i), hn::LoadU(d, more + i)...);
  }
  if (i == n) return;
  HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)];
  buffer[0] = 0;  // or gcc warns of vectors of one lane, which have no partial ones
  const auto partial = [&](const T* from, T fill) HWY_ATTR {
    std::fill_n(std::copy_n(from + i, n - i, buffer), lanes - (n - i), fill);
    return hn::Load(d, buffer);
  };
  const auto last = f(partial(in, kMinusInfinity<T>), partial(more, T(0))...);
  if (out != nullptr) {
    hn::Store(last, d, buffer);
    std::copy_n(buffer, n - i, out + i);
  }
}

template <typename T>
struct Extremes {
  T max;                   // lowest() if no key is visible
  T min;                   // of visible keys; infinity if there are none
  std::int64_t count = 0;  // visible keys; NaN counts
};

// The largest of n keys, lowest() if none is visible. `largest`, if not null: what each lane of
// four vectors has seen of them, -inf where that is nothing visible.
template <typename T>
HWY_INLINE T MaxOf(const T* x, std::int64_t n, T* largest = nullptr) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  // Four, so that no maximum waits for the one before.
  auto a = hn::Set(d, kMinusInfinity<T>), b = a, c = a, e = a;
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    a = hn::Max(a, hn::LoadU(d, x + i));
    b = hn::Max(b, hn::LoadU(d, x + i + lanes));
    c = hn::Max(c, hn::LoadU(d, x + i + 2 * lanes));
    e = hn::Max(e, hn::LoadU(d, x + i + 3 * lanes));
  }
  int vector = 0;
  Map(
      d, static_cast<T*>(nullptr), n - i,
      [&](hn::Vec<decltype(d)> v) HWY_ATTR {
        auto& max = vector == 0 ? a : vector == 1 ? b : vector == 2 ? c : e;
        max = hn::Max(max, v);
        ++vector;
        return v;
      },
      x + i);
  if (largest != nullptr) {
    hn::StoreU(a, d, largest);
    hn::StoreU(b, d, largest + lanes);
    hn::StoreU(c, d, largest + 2 * lanes);
    hn::StoreU(e, d, largest + 3 * lanes);
  }
  const auto lowest = hn::Set(d, std::numeric_limits<T>::lowest());
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(lowest, hn::Max(hn::Max(a, b), hn::Max(c, e)))));
}

// kFull: min and count too; if not, `largest` as in MaxOf.
template <bool kFull, typename T>
HWY_INLINE Extremes<T> Scan(const T* x, std::int64_t n, T* largest = nullptr) {
  if constexpr (!kFull) return {MaxOf(x, n, largest), -kMinusInfinity<T>, 0};
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V hidden = hn::Set(d, kMinusInfinity<T>);
  V min = hn::Neg(hidden);
  V max = hn::Set(d, std::numeric_limits<T>::lowest());
  std::int64_t count = 0;
  Map(
      d, static_cast<T*>(nullptr), n,
      [&](V v) HWY_ATTR {
        max = hn::Max(max, v);
        const auto visible = hn::Not(hn::Eq(v, hidden));  // NaN too
        count += static_cast<std::int64_t>(hn::CountTrue(d, visible));
        min = hn::Min(min, hn::IfThenElse(visible, v, hn::Neg(hidden)));
        return v;
      },
      x);
  return {hn::GetLane(hn::MaxOfLanes(d, max)), hn::GetLane(hn::MinOfLanes(d, min)), count};
}

// Asks for n keys that will be read later, into the second-level cache.
template <typename T>
HWY_INLINE void Fetch(const T* keys, std::int64_t n) {
  constexpr std::int64_t kLineKeys = 64 / sizeof(T);
  for (std::int64_t i = 0; i < n; i += kLineKeys) __builtin_prefetch(keys + i, 0, 2);
}

template <typename T>
HWY_INLINE void FetchForWrite(T* keys, std::int64_t n) {
  constexpr std::int64_t kLineKeys = 64 / sizeof(T);
  for (std::int64_t i = 0; i < n; i += kLineKeys) __builtin_prefetch(keys + i, 1, 2);
}

// Moments at beta over the row; kMoments = highest power of y summed, 0..4. Writes e^(beta y)
// times `scale` to `out` unless that is null; the sums are of the unscaled ones. While it computes, it has
// the row at `next` (null: none) on its way from memory.
template <int kMoments, bool kScale, typename T>
HWY_NOINLINE Sums Sweep(const T* x, T* out, std::int64_t n, T max, double beta, T scale,
                        const T* next = nullptr) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const Exponential<T> exponential(beta);
  const V top = hn::Set(d, max), factor = hn::Set(d, scale);
  const std::int64_t run = RunKeys<T>();
  const WideVec none = hn::Zero(hn::ScalableTag<double>());
  WideVec za = none, zb = none, ta = none, tb = none, ua = none, ub = none, va = none, vb = none, wa = none,
          wb = none;
  for (std::int64_t i = 0; i < n; i += run) {
    if (next != nullptr && i + run <= n) Fetch(next + i, run);
    V z = hn::Zero(d), t = z, u = z, v = z, w = z;
    Map(
        d, out == nullptr ? nullptr : out + i, std::min(run, n - i),
        [&](V key) HWY_ATTR {
          const V y = exponential.limit(d, hn::Sub(key, top));
          const V e = exponential(d, y);
          z = hn::Add(z, e);
          if constexpr (kMoments >= 1) t = hn::MulAdd(e, y, t);  // the same bits for every kMoments
          if constexpr (kMoments >= 2) {
            const V ey = hn::Mul(e, y);
            if constexpr (kMoments == 2) u = hn::MulAdd(ey, y, u);
            if constexpr (kMoments >= 3) {
              const V eyy = hn::Mul(ey, y);
              u = hn::Add(u, eyy);
              v = hn::MulAdd(eyy, y, v);
              if constexpr (kMoments == 4) w = hn::MulAdd(eyy, hn::Mul(y, y), w);
            }
          }
          return kScale ? hn::Mul(e, factor) : e;
        },
        x + i);
    AddWide(z, za, zb);
    if constexpr (kMoments >= 1) AddWide(t, ta, tb);
    if constexpr (kMoments >= 2) AddWide(u, ua, ub);
    if constexpr (kMoments >= 3) AddWide(v, va, vb);
    if constexpr (kMoments == 4) AddWide(w, wa, wb);
  }
  return {TotalWide<T>(za, zb), TotalWide<T>(ta, tb), TotalWide<T>(ua, ub), TotalWide<T>(va, vb),
          TotalWide<T>(wa, wb)};
}

template <int kMoments, typename T>
HWY_INLINE Sums Measure(const T* x, T* out, std::int64_t n, T max, double beta, const T* next = nullptr) {
  return Sweep<kMoments, false>(x, out, n, max, beta, T(1), next);
}

template <typename T>
HWY_INLINE void Scale(const T* in, T* out, std::int64_t n, double factor) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V scale = hn::Set(d, static_cast<T>(factor));
  Map(
      d, out, n, [&](V v) HWY_ATTR { return hn::Mul(v, scale); }, in);
}

// How many keys equal the maximum, and the largest of the others (-inf if there is none).
template <typename T>
struct Top {
  std::int64_t ties;
  T next;
};

template <typename T>
HWY_INLINE Top<T> TopOf(const T* x, std::int64_t n, T max) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V top = hn::Set(d, max), hidden = hn::Set(d, kMinusInfinity<T>);
  V next = hidden;
  std::int64_t ties = 0;
  Map(
      d, static_cast<T*>(nullptr), n,
      [&](V v) HWY_ATTR {
        const auto tied = hn::Eq(v, top);
        ties += static_cast<std::int64_t>(hn::CountTrue(d, tied));
        next = hn::Max(next, hn::IfThenElse(tied, hidden, v));
        return v;
      },
      x);
  return {ties, hn::GetLane(hn::MaxOfLanes(d, next))};
}

// Copies the vectors that hold a key above `least`, and what is left after the last whole vector, to the
// front of `out` (which may be `x`); returns how many keys that are. Without a branch: which vectors stay
// can't be predicted. (Whole vectors because Highway's CompressStore copies its table to the stack
// every time with gcc 12.)
template <typename T>
HWY_INLINE std::int64_t KeepAbove(const T* x, std::int64_t n, T least, T* out) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto limit = hn::Set(d, least);
  std::int64_t i = 0, kept = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, x + i);
    hn::StoreU(v, d, out + kept);  // kept <= i: nothing unread is overwritten
    kept += hn::AllFalse(d, hn::Gt(v, limit)) ? 0 : lanes;
  }
  std::copy_n(x + i, n - i, out + kept);
  return kept + n - i;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_SWEEP_INL_H_
