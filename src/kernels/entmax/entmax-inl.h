// Entmax (Peters, Niculae, Martins, 2019) and sparsemax (Martins, Astudillo, 2016): with s = beta x,
//
//     w = ((alpha - 1) s - tau)_+ ^ p,   p = 1 / (alpha - 1),   tau such that the weights sum to 1
//
// alpha = 2 is sparsemax; towards 1 it becomes softmax. With s measured from its maximum, tau lies in [-1, 0)
// and no key more than p / beta below the maximum has weight: the others never take part.
//
//     bound    the row is cut into groups, one per lane of four vectors. The largest keys of the groups are
//              some of the row's, and fewer keys have a lower tau: two steps for them alone give a bound,
//              mostly so close to tau that few keys above it have no weight. alpha > 2: -1
//     filter   keys with v = ((alpha - 1) s - tau)_+ > 0 at that bound are moved together in scratch; again
//              if tau turns out to be much higher
//     sums     of v^p, v^(p-1) and v^(p-2) over those keys
//     step     Halley's for (sum v^p)^(1/p) = 1, Newton's for p < 2. The norm is convex in tau for p >= 1, so
//              that Newton's steps rise to the solution and never pass it: where they would lead, keys that
//              are out stay out. alpha > 2: Newton's within a bracket
//     weights  v^p of the keys that were kept, put back where they belong, 0 elsewhere
//
// Limit: a maximum per key for the bound, one comparison for the filter and one for the weights, with the
// write of the row: where few keys have weight, a third of one exponential. Two or three sums over what is
// left come between, which short rows feel. Other alpha take a logarithm and an exponential per key that is
// left and step, in f32 up to alpha = 2, beyond in float64.
//
// Backward: q = v^(p-1) is dw/ds for a fixed tau, and dL/ds = q (g - sum q g / sum q). The gradient to alpha
// is in alpha_gradient-inl.h.
//
// A row whose keys lie in shards: tau comes from outside, as it is, not as it is stored for backward. Its
// steps, in threshold_search.cc, take the same sums, of all shards.
#if defined(WHET_KERNELS_ENTMAX_ENTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ENTMAX_ENTMAX_INL_H_
#undef WHET_KERNELS_ENTMAX_ENTMAX_INL_H_
#else
#define WHET_KERNELS_ENTMAX_ENTMAX_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "core/normalizer.h"
#include "kernels/entmax/alpha_gradient-inl.h"
#include "kernels/row/above-inl.h"
#include "kernels/row/elementwise-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// v^p, v^(p-1) and, for p >= 2, v^(p-2) for v >= 0: 0 where v is 0, NaN where it is NaN; and how many v are
// above 0. A threshold is kept as `stored`, so that a float of it loses nothing that shows. Powers are those
// of v / Unit(tau). Gain is 1 - 1 / N of the norm N = (sum v^p)^(1/p), Highest the largest threshold of n
// keys, whose largest weight is at least 1 / n.
struct PowerOne {
  static constexpr double p = 1;
  double stored(double tau) const { return tau; }
  double tau(double stored) const { return stored; }
  double Unit(double /*tau*/) const { return 1; }
  double Gain(double /*tau*/, double high) const { return 1 - 1 / high; }
  double Highest(double n) const { return -1 / n; }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Raise(D d, V y, V slope, V tau, V& high, V& low, V& lowest) const {
    const V v = hn::MulSub(y, slope, tau);
    const auto out = hn::Le(v, hn::Zero(d));
    high = hn::IfThenZeroElse(out, v);
    low = hn::IfThenZeroElse(out, hn::Set(d, hn::TFromD<D>(1)));
    lowest = hn::Zero(d);
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE std::size_t Count(D d, V y, V slope, V tau) const {
    return hn::CountTrue(d, hn::Gt(hn::MulSub(y, slope, tau), hn::Zero(d)));
  }
};

struct PowerTwo {
  static constexpr double p = 2;
  double stored(double tau) const { return tau; }
  double tau(double stored) const { return stored; }
  double Unit(double /*tau*/) const { return 1; }
  double Gain(double /*tau*/, double high) const { return 1 - 1 / std::sqrt(high); }
  double Highest(double n) const { return -1 / std::sqrt(n); }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Raise(D d, V y, V slope, V tau, V& high, V& low, V& lowest) const {
    const V v = hn::MulSub(y, slope, tau);
    const auto out = hn::Le(v, hn::Zero(d));
    low = hn::IfThenZeroElse(out, v);
    high = hn::Mul(low, low);
    lowest = hn::IfThenZeroElse(out, hn::Set(d, hn::TFromD<D>(1)));
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE std::size_t Count(D d, V y, V slope, V tau) const {
    return hn::CountTrue(d, hn::Gt(hn::MulSub(y, slope, tau), hn::Zero(d)));
  }
};

// In float64, since an error of ln v is multiplied by p.
struct PowerAny {
  static constexpr double kLeast = std::numeric_limits<double>::min();  // of v
  double p, slope64 = 0, tau64 = 0;

  // Near alpha = 1, tau is close to -1 and what matters is how far from it.
  double stored(double tau) const { return p > 16 ? (1 + tau) * p : tau; }
  double tau(double stored) const { return p > 16 ? stored / p - 1 : stored; }
  double Unit(double /*tau*/) const { return 1; }
  double Gain(double /*tau*/, double high) const { return -std::expm1(-std::log(high) / p); }
  double Highest(double n) const { return -std::pow(n, -1 / p); }

  HWY_INLINE void Raise(hn::ScalableTag<double> d, hn::Vec<hn::ScalableTag<double>> y,
                        hn::Vec<hn::ScalableTag<double>> /*slope*/, hn::Vec<hn::ScalableTag<double>> /*tau*/,
                        hn::Vec<hn::ScalableTag<double>>& high, hn::Vec<hn::ScalableTag<double>>& low,
                        hn::Vec<hn::ScalableTag<double>>& lowest) const {
    const auto v = hn::MulSub(y, hn::Set(d, slope64), hn::Set(d, tau64));
    const auto out = hn::Le(v, hn::Set(d, kLeast));
    const auto inside = hn::IfThenElse(out, hn::Set(d, 1.0), v);
    const auto power =
        hn::Exp(d, hn::Max(hn::Set(d, -700.0), hn::Mul(hn::Set(d, p - 1), hn::Log(d, inside))));
    const auto number = hn::Eq(v, v);  // Exp forgets NaN
    low = hn::IfThenElse(number, hn::IfThenZeroElse(out, power), v);
    high = hn::Mul(low, hn::IfThenZeroElse(out, inside));
    lowest = hn::Div(low, inside);
  }

  using Wide = hn::Vec<hn::ScalableTag<double>>;
  HWY_INLINE std::size_t Count(hn::ScalableTag<double> d, Wide y, Wide /*slope*/, Wide /*tau*/) const {
    const auto v = hn::MulSub(y, hn::Set(d, slope64), hn::Set(d, tau64));
    return hn::CountTrue(d, hn::Gt(v, hn::Set(d, kLeast)));
  }

#if HWY_TARGET == HWY_SCALAR
  HWY_INLINE void Raise(hn::ScalableTag<float> d, hn::Vec<hn::ScalableTag<float>> y,
                        hn::Vec<hn::ScalableTag<float>> slope, hn::Vec<hn::ScalableTag<float>> tau,
                        hn::Vec<hn::ScalableTag<float>>& high, hn::Vec<hn::ScalableTag<float>>& low,
                        hn::Vec<hn::ScalableTag<float>>& lowest) const {
    const hn::ScalableTag<double> dd;
    (void)slope, (void)tau;
    auto wide_high = hn::Zero(dd), wide_low = wide_high, wide_lowest = wide_high;
    Raise(dd, hn::PromoteTo(dd, y), wide_high, wide_low, wide_high, wide_low, wide_lowest);
    high = hn::DemoteTo(d, wide_high);
    low = hn::DemoteTo(d, wide_low);
    lowest = hn::DemoteTo(d, wide_lowest);
  }

  using Narrow = hn::Vec<hn::ScalableTag<float>>;
  HWY_INLINE std::size_t Count(hn::ScalableTag<float> /*d*/, Narrow y, Narrow /*slope*/,
                               Narrow /*tau*/) const {
    const hn::ScalableTag<double> dd;
    return Count(dd, hn::PromoteTo(dd, y), hn::Zero(dd), hn::Zero(dd));
  }
#else
  HWY_INLINE void Raise(hn::ScalableTag<float> d, hn::Vec<hn::ScalableTag<float>> y,
                        hn::Vec<hn::ScalableTag<float>> slope, hn::Vec<hn::ScalableTag<float>> tau,
                        hn::Vec<hn::ScalableTag<float>>& high, hn::Vec<hn::ScalableTag<float>>& low,
                        hn::Vec<hn::ScalableTag<float>>& lowest) const {
    const hn::ScalableTag<double> dd;
    const hn::Half<hn::ScalableTag<float>> half;
    (void)slope, (void)tau;
    const auto none = hn::Zero(dd);
    auto high_a = none, low_a = none, lowest_a = none, high_b = none, low_b = none, lowest_b = none;
    Raise(dd, hn::PromoteTo(dd, hn::LowerHalf(half, y)), none, none, high_a, low_a, lowest_a);
    Raise(dd, hn::PromoteTo(dd, hn::UpperHalf(half, y)), none, none, high_b, low_b, lowest_b);
    high = hn::Combine(d, hn::DemoteTo(half, high_b), hn::DemoteTo(half, high_a));
    low = hn::Combine(d, hn::DemoteTo(half, low_b), hn::DemoteTo(half, low_a));
    lowest = hn::Combine(d, hn::DemoteTo(half, lowest_b), hn::DemoteTo(half, lowest_a));
  }

  using Narrow = hn::Vec<hn::ScalableTag<float>>;
  HWY_INLINE std::size_t Count(hn::ScalableTag<float> /*d*/, Narrow y, Narrow /*slope*/,
                               Narrow /*tau*/) const {
    const hn::ScalableTag<double> dd;
    const hn::Half<hn::ScalableTag<float>> half;
    const auto none = hn::Zero(dd);
    return Count(dd, hn::PromoteTo(dd, hn::LowerHalf(half, y)), none, none) +
           Count(dd, hn::PromoteTo(dd, hn::UpperHalf(half, y)), none, none);
  }
#endif
};

// ln(1 + u) for -1 < u <= 0, with a relative error of about 2e-7: 1 + u = m 2^k with m in [sqrt(1/2),
// sqrt(2)), and m - 1 comes from u itself, so that nothing is lost near 0. The polynomial is that of Cephes'
// logf.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LogOnePlus(D d, V u) {
  const hn::RebindToSigned<D> di;
  const V one = hn::Set(d, 1.0f);
  const auto bits = hn::BitCast(di, hn::Add(one, u));
  const auto k = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3f3504f3)));  // the bits of sqrt(1/2)
  const V scale = hn::BitCast(d, hn::Sub(hn::BitCast(di, one), hn::ShiftLeft<23>(k)));  // 2^-k
  const V f = hn::MulAdd(u, scale, hn::Sub(scale, one));
  V p = hn::Set(d, 7.0376836292e-2f);
  p = hn::MulAdd(p, f, hn::Set(d, -1.1514610310e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.1676998740e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -1.2420140846e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.4249322787e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -1.6668057665e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.0000714765e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -2.4999993993e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 3.3333331174e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -0.5f));
  const V log_m = hn::MulAdd(hn::Mul(p, f), f, f);
  return hn::MulAdd(hn::ConvertTo(d, k), hn::Set(d, 0.693147181f), log_m);
}

// The same in the row's own arithmetic, for p >= 1. Powers are those of v / -tau = 1 + u, u = slope y / -tau:
// the logarithm keeps what u has of digits, so errors are small where weights are large. (Not for gradients
// if p < 2: v^(p-1) rises so steeply at 0 that the rounding of u would show.)
struct PowerNear : PowerAny {
  float ratio;  // slope / -tau

  double Unit(double tau) const { return -tau; }
  double Gain(double tau, double high) const { return 1 + std::exp(-std::log(high) / p) / tau; }

  using PowerAny::Raise;
  HWY_INLINE void Raise(hn::ScalableTag<float> d, hn::Vec<hn::ScalableTag<float>> y,
                        hn::Vec<hn::ScalableTag<float>> /*slope*/, hn::Vec<hn::ScalableTag<float>> /*tau*/,
                        hn::Vec<hn::ScalableTag<float>>& high, hn::Vec<hn::ScalableTag<float>>& low,
                        hn::Vec<hn::ScalableTag<float>>& lowest) const {
    const Exponential<float> exponential(p);
    const auto one = hn::Set(d, 1.0f), u = hn::Mul(y, hn::Set(d, ratio));
    const auto out = hn::Le(u, hn::Neg(one));
    const auto inside = hn::IfThenZeroElse(out, u);
    const auto power = exponential(d, exponential.limit(d, LogOnePlus(d, inside)));
    high = hn::IfThenElse(hn::Eq(u, u), hn::IfThenZeroElse(out, power), u);
    const auto inverse = hn::Div(one, hn::Add(one, inside));
    low = hn::Mul(high, inverse);
    lowest = hn::Mul(low, inverse);
  }
};

// The power of a normalizer at an inverse temperature and a threshold.
template <class Power>
HWY_INLINE Power PowerAt(const Power& power, double slope, double tau) {
  Power at = power;
  if constexpr (std::is_base_of_v<PowerAny, Power>) {
    at.slope64 = slope / power.Unit(tau);
    at.tau64 = tau / power.Unit(tau);
  }
  if constexpr (std::is_same_v<PowerNear, Power>) at.ratio = static_cast<float>(at.slope64);
  return at;
}

struct PowerSums {
  double high = 0, low = 0, lowest = 0;  // of v^p, v^(p-1) and v^(p-2), v in Units
};

// Keys above this may have weight at the threshold tau.
template <typename T>
HWY_INLINE T LimitAt(T top, double slope, double tau) {
  return LimitBelow(top, -tau / slope);
}

// Sums over n keys at the threshold tau. kAll: most of them have weight.
template <bool kAll, class Power, typename T>
HWY_NOINLINE PowerSums SumPowers(const Power& power, const T* x, std::int64_t n, T top, double slope,
                                 double tau) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const Power at = PowerAt(power, slope, tau);
  const V max = hn::Set(d, top), factor = hn::Set(d, static_cast<T>(slope));
  const V threshold = hn::Set(d, static_cast<T>(tau));
  WideVec high_a = hn::Zero(hn::ScalableTag<double>()), high_b = high_a, low_a = high_a, low_b = high_a,
          lowest_a = high_a, lowest_b = high_a;
  const std::int64_t run = RunKeys<T>();
  for (std::int64_t i = 0; i < n; i += run) {
    V high_sum = hn::Zero(d), low_sum = high_sum, lowest_sum = high_sum;
    const auto add = [&](V keys) HWY_ATTR {
      V high, low, lowest;
      at.Raise(d, hn::Sub(keys, max), factor, threshold, high, low, lowest);
      high_sum = hn::Add(high_sum, high);
      low_sum = hn::Add(low_sum, low);
      lowest_sum = hn::Add(lowest_sum, lowest);
      return keys;
    };
    if constexpr (kAll) {
      Map(d, static_cast<T*>(nullptr), std::min(run, n - i), add, x + i);
    } else {
      ForEachAbove(d, x + i, std::min(run, n - i), LimitAt(top, slope, tau), add);
    }
    AddWide(high_sum, high_a, high_b);
    AddWide(low_sum, low_a, low_b);
    AddWide(lowest_sum, lowest_a, lowest_b);
  }
  return {TotalWide<T>(high_a, high_b), TotalWide<T>(low_a, low_b), TotalWide<T>(lowest_a, lowest_b)};
}

// The same over a few vectors, with as many digits as T has.
template <class Power, typename T>
HWY_INLINE PowerSums RoughSums(const Power& power, const T* x, std::int64_t n, T top, double slope,
                               double tau) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const Power at = PowerAt(power, slope, tau);
  const V max = hn::Set(d, top), factor = hn::Set(d, static_cast<T>(slope));
  const V threshold = hn::Set(d, static_cast<T>(tau));
  V high_sum = hn::Zero(d), low_sum = high_sum, lowest_sum = high_sum;
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    V high, low, lowest;
    at.Raise(d, hn::Sub(hn::Load(d, x + i), max), factor, threshold, high, low, lowest);
    high_sum = hn::Add(high_sum, high);
    low_sum = hn::Add(low_sum, low);
    lowest_sum = hn::Add(lowest_sum, lowest);
  }
  const auto total = [&](V sum) HWY_ATTR { return static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum))); };
  return {total(high_sum), total(low_sum), total(lowest_sum)};
}

// The keys that a search still has to look at: the row's runs, or what was kept of them in scratch.
template <class Power, typename T>
class EntmaxKeys {
 public:
  // `next` is fetched into the cache meanwhile.
  EntmaxKeys(const Power& power, const Runs<T>& runs, T top, double slope, NextRow<T> next)
      : power_(power), runs_(runs), top_(top), slope_(slope), next_(next) {}

  // Keys that have no weight at tau needn't be looked at again. After the first time only if tau has risen
  // so much that many of those left may be such.
  HWY_INLINE void Drop(double tau) {
    constexpr double kMuch = 0.9;
    T* const scratch = runs_.row.scratch;
    if (scratch == nullptr) return;
    if (has_list() && (kept_ < kWorthDropping || tau < kMuch * dropped_)) return;
    dropped_ = tau;
    limit_ = LimitAt(top_, slope_, tau);
    std::int64_t kept = 0;
    if (has_list()) {
      kept = KeepKeys(static_cast<const T*>(scratch), kept_, limit_, scratch);
    } else {
      runs_.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
        kept += KeepKeys(runs_.row.x + begin, end - begin, limit_, scratch + kept, next_);
      });
    }
    kept_ = kept;
    padded_ = FillLastVector(scratch, kept, runs_.row.size());
  }

  HWY_INLINE PowerSums Sum(double tau) const {
    if (has_list()) {
      return SumPowers<true>(power_, static_cast<const T*>(runs_.row.scratch), padded_, top_, slope_, tau);
    }
    PowerSums sums;
    runs_.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
      const PowerSums more = SumPowers<false>(power_, runs_.row.x + begin, end - begin, top_, slope_, tau);
      sums.high += more.high;
      sums.low += more.low;
      sums.lowest += more.lowest;
    });
    return sums;
  }

  // The same, roughly, over the largest keys of groups.
  HWY_INLINE PowerSums SumLargest(const T* largest, double tau) const {
    return RoughSums(power_, largest, Groups<T>(), top_, slope_, tau);
  }

  bool has_list() const { return kept_ >= 0; }
  // Keys above the limit are in scratch: `kept` of them, one after the other, `padded` with what fills up the
  // last vector.
  T limit() const { return limit_; }
  std::int64_t kept() const { return kept_; }
  std::int64_t padded() const { return padded_; }

 private:
  static constexpr std::int64_t kWorthDropping = 64;
  const Power& power_;
  const Runs<T>& runs_;
  T top_;
  double slope_;
  NextRow<T> next_;
  double dropped_ = -1;
  T limit_ = kMinusInfinity<T>;
  std::int64_t kept_ = -1, padded_ = 0;  // -1: none were moved to scratch
};

// A step this small, relative to tau and times p, is the last: Newton's next would be its square, Halley's
// its cube. Halley's only if it differs little from Newton's, since keys that fall out bend the norm.
template <typename T>
inline constexpr double kLastStep = sizeof(T) == sizeof(float) ? 0x1p-16 : 0x1p-30;
template <typename T>
inline constexpr double kLastHalley = sizeof(T) == sizeof(float) ? 0x1p-9 : 0x1p-18;
template <typename T>
inline constexpr double kLastBend = sizeof(T) == sizeof(float) ? 0x1p-11 : 0x1p-22;

// As backward will read it.
template <typename T, class Power>
HWY_INLINE double Rounded(const Power& power, double tau) {
  return power.tau(static_cast<double>(static_cast<T>(power.stored(tau))));
}

// Steps from a threshold towards the solution: Newton's, which doesn't pass it wherever it starts, since the
// norm N is convex in tau for p >= 1; and Halley's, Newton's / (1 - bend), bend = (N - 1) N'' / (2 N'^2).
struct TauStep {
  double newton, halley, bend;
};

template <class Power>
HWY_INLINE TauStep StepFrom(const Power& power, double tau, const PowerSums& sums) {
  constexpr double kMostBend = 0.5;
  const double gain = power.Gain(tau, sums.high), ratio = sums.high / sums.low;
  const double newton = gain * ratio * power.Unit(tau);
  if (power.p < 2) return {newton, newton, 0};
  const double bend = 0.5 * gain * (power.p - 1) * (sums.lowest * ratio / sums.low - 1);
  return {newton, newton / (1 - std::min(bend, kMostBend)), bend};
}

// A threshold not above the solution: that of the largest keys of groups, or nearly. -1 if they say nothing.
template <class Power, typename T>
HWY_INLINE double TauBelow(const Power& power, const EntmaxKeys<Power, T>& keys, const T* largest,
                           double highest) {
  constexpr double kRoom = 1 + 8 * static_cast<double>(std::numeric_limits<T>::epsilon());
  // The middle of where tau can be saves a step or two; (1/2)^p would underflow for a large p.
  double tau = power.p <= 8 ? -0.5 : -1;
  for (const bool last : {false, true}) {
    const PowerSums sums = keys.SumLargest(largest, tau);
    if (!(sums.high > 0)) return -1;
    const TauStep step = StepFrom(power, tau, sums);
    tau = std::clamp(tau + (last ? step.newton : step.halley), -1.0, highest);
  }
  return std::max(-1.0, tau * kRoom);
}

// alpha <= 2: steps from a tau below the solution, with the sums there.
template <class Power, typename T>
HWY_INLINE double ClimbToTau(const Power& power, EntmaxKeys<Power, T>& keys, double tau, PowerSums sums,
                             double highest) {
  constexpr int kMostSteps = 100;  // it takes one to four
  for (int i = 0; i < kMostSteps; ++i) {
    const TauStep step = StepFrom(power, tau, sums);
    const double next = Rounded<T>(power, std::clamp(tau + step.halley, -1.0, highest));
    const double size = std::abs(next - tau) * power.p / -tau;
    if (size <= kLastStep<T> ||
        (power.p >= 2 && size <= kLastHalley<T> && std::abs(step.bend) <= kLastBend<T>)) {
      return next;
    }
    keys.Drop(std::clamp(tau + step.newton, -1.0, highest));
    tau = next;
    sums = keys.Sum(tau);
  }
  return tau;
}

// alpha > 2, where the sum isn't convex: Newton's steps while they stay within a bracket and halve it.
template <class Power, typename T>
HWY_INLINE double BracketTau(const Power& power, EntmaxKeys<Power, T>& keys, PowerSums sums, double highest) {
  double low = -1, high = highest, tau = -1;
  while (high - low > 0x1p-52 * -low) {
    const double width = high - low;
    double next = tau + (sums.high - 1) / (power.p * sums.low);
    const bool inside = next > low && next < high && next != tau;
    if (inside && std::abs(next - tau) <= kLastStep<T> * -tau * 0x1p-8) return next;
    if (!inside) next = 0.5 * (low + high);
    if (next <= low || next >= high) return next;
    tau = next;
    sums = keys.Sum(tau);
    if (sums.high == 1) return tau;
    (sums.high > 1 ? low : high) = tau;
    if (high - low > 0.5 * width) {
      tau = 0.5 * (low + high);
      if (tau <= low || tau >= high) return tau;
      sums = keys.Sum(tau);
      (sums.high > 1 ? low : high) = tau;
    }
  }
  return tau;
}

// tau in [-1, 0), rounded as backward will read it. No number, or 0 where no key is visible, if the weights
// can't sum to 1.
template <class Power, typename T>
HWY_INLINE double FindTau(const Power& power, EntmaxKeys<Power, T>& keys, const T* largest, std::int64_t n) {
  const double highest = power.Highest(static_cast<double>(n));
  const double tau = power.p < 1 ? -1 : Rounded<T>(power, TauBelow(power, keys, largest, highest));
  keys.Drop(tau);
  const PowerSums sums = keys.Sum(tau);
  if (!(sums.high > 0)) return sums.high;
  if (power.p < 1) return Rounded<T>(power, BracketTau(power, keys, sums, highest));
  return ClimbToTau(power, keys, tau, sums, highest);
}

// The elements of entmax: dw/ds = q, and q couples the keys of its support.
template <class Power, typename T>
struct EntmaxElements {
  static constexpr bool kCouples = true, kDivides = true, kShifts = true;
  static constexpr bool kHasUnit = std::is_same_v<Power, PowerNear>;
  Power power;
  T top, slope, tau;
  T high_unit, low_unit;  // what powers are multiples of

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Weight(D d, V x) const {
    V high, low, lowest;
    power.Raise(d, hn::Sub(x, hn::Set(d, top)), hn::Set(d, slope), hn::Set(d, tau), high, low, lowest);
    return kHasUnit ? hn::Mul(high, hn::Set(d, high_unit)) : high;
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Slopes(D d, V x, V& w, V& a, V& b, V& c) const {
    V lowest;
    power.Raise(d, hn::Sub(x, hn::Set(d, top)), hn::Set(d, slope), hn::Set(d, tau), w, a, lowest);
    if constexpr (kHasUnit) {
      w = hn::Mul(w, hn::Set(d, high_unit));
      a = hn::Mul(a, hn::Set(d, low_unit));
    }
    b = c = a;
  }

  // Keys in x that have weight.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE std::size_t Count(D d, V x) const {
    return power.Count(d, hn::Sub(x, hn::Set(d, top)), hn::Set(d, slope), hn::Set(d, tau));
  }
};

template <class Power, typename T>
HWY_INLINE EntmaxElements<Power, T> ElementsOf(const Power& power, double top, double slope, double tau) {
  EntmaxElements<Power, T> elements{PowerAt(power, slope, tau),
                                    static_cast<T>(top),
                                    static_cast<T>(slope),
                                    static_cast<T>(tau),
                                    T(1),
                                    T(1)};
  if constexpr (elements.kHasUnit) {
    const double unit = power.Unit(tau), high = std::pow(unit, power.p);
    elements.high_unit = static_cast<T>(high);
    elements.low_unit = static_cast<T>(high / unit);
  }
  return elements;
}

// What sparsemax, entmax15 and entmax:A share. `Family` says which power belongs to a parameter: With for
// gradients, WithWeights where weights alone are asked for.
template <class Family>
struct EntmaxOf {
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = false;
  static constexpr bool kNeedsScratch = true;
  static constexpr bool kNeedsLargest = true;
  static constexpr bool kSavesThreshold = true;
  static constexpr bool kIsSparse = true;
  static constexpr bool kMergesShards = true;
  static constexpr bool kSharesThreshold = true;
  static constexpr bool kParameterGradient = false;

  // Exact: a key that deep has weight 0.
  template <typename T>
  static double Reach(const RowInput<T>& row, const RowResult<T>& result, double /*epsilon*/) {
    double reach = 0;
    Family::With(row.parameter, [&](const auto& power) { reach = power.p / result.beta; });
    return reach;
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                               RowResult<T>& result) {
    Family::WithWeights(runs.row.parameter, [&](const auto& power) HWY_ATTR {
      using Power = std::remove_cvref_t<decltype(power)>;
      const double slope = result.beta / power.p;
      EntmaxKeys<Power, T> keys(power, runs, result.top, slope,
                                {next, next == nullptr ? nullptr : runs.row.next_out});
      HWY_ALIGN T groups[kMaxGroups<T>];
      if (power.p >= 1 && !result.has_largest) GroupMaxima(runs, groups);
      const double tau = FindTau(power, keys, result.has_largest ? result.largest : groups, runs.row.size());
      result.sums = {.z = tau};
      if (!(tau < 0)) return;
      result.threshold = power.stored(tau);
      const auto elements = ElementsOf<Power, T>(power, static_cast<double>(result.top), slope, tau);
      if (needs.support) {
        result.least = static_cast<double>(result.top) + tau / slope;
        result.support = CountKeys(runs, [&](auto d, auto x) HWY_ATTR { return elements.Count(d, x); });
      }
      if constexpr (kMovesLanes<T>) {
        constexpr bool kCheap = !std::is_base_of_v<PowerAny, Power>;
        if (keys.has_list() && IsWorthSpreading(kCheap, keys.kept(), runs.row.size())) {
          return WeighKept(runs, elements, keys.limit(), keys.kept(), keys.padded(), out, result);
        }
      }
      result.sums = {.z = keys.Sum(tau).high * std::pow(power.Unit(tau), power.p)};
      WeighAbove(runs, elements, LimitAt(result.top, slope, tau), out, result);
    });
  }

  template <typename T>
  static double Peak(const RowInput<T>& row, const RowResult<T>& result) {
    double peak = 0;
    Family::With(row.parameter, [&](const auto& power) {
      const double y = static_cast<double>(result.key_max) - static_cast<double>(result.top);
      const double v = result.beta / power.p * y - power.tau(result.threshold);
      peak = v > 0 ? std::pow(v, power.p) : 0;
    });
    return peak;
  }

  // (alpha - 1) beta (x - top) = tau, and room for its rounding.
  template <typename T>
  static double Least(double parameter, const SavedRow& saved) {
    double least = 0;
    Family::With(parameter, [&](const auto& power) {
      constexpr double kRoom = 1 + 16 * static_cast<double>(std::numeric_limits<T>::epsilon());
      least = saved.top + kRoom * power.tau(saved.threshold) * power.p / saved.beta;
    });
    return least;
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    Family::With(row.parameter, [&](const auto& power) HWY_ATTR {
      using Power = std::remove_cvref_t<decltype(power)>;
      BackwardElements(row,
                       ElementsOf<Power, T>(power, row.saved.top, row.saved.beta / power.p,
                                            power.tau(row.saved.threshold)),
                       rule, moves);
    });
  }

  // ---- A row that is part of a longer one ----

  static double PowerOf(double parameter) {
    double p = 1;
    Family::With(parameter, [&](const auto& power) { p = power.p; });
    return p;
  }

  template <typename T>
  static HWY_INLINE ThresholdSums PartThresholdSums(const RowInput<T>& row, T top, double beta, double tau) {
    ThresholdSums sums;
    Family::WithWeights(row.parameter, [&](const auto& power) HWY_ATTR {
      const PowerSums found = SumPowers<false>(power, row.x, row.size(), top, beta / power.p, tau);
      const double unit = power.Unit(tau), high = unit == 1 ? 1 : std::pow(unit, power.p);
      sums = {found.high * high, found.low * high / unit, found.lowest * high / (unit * unit)};
    });
    return sums;
  }

  template <typename T>
  static HWY_INLINE void WeighAt(const Runs<T>& runs, double tau, T* out, RowResult<T>& result) {
    Family::WithWeights(runs.row.parameter, [&](const auto& power) HWY_ATTR {
      using Power = std::remove_cvref_t<decltype(power)>;
      const double slope = result.beta / power.p;
      result.sums = {.z = PartThresholdSums(runs.row, result.top, result.beta, tau).high};
      WeighAbove(runs, ElementsOf<Power, T>(power, static_cast<double>(result.top), slope, tau),
                 LimitAt(result.top, slope, tau), out, result);
    });
  }

  template <typename T>
  static HWY_INLINE HWY_NAMESPACE::PartSums PartSums(const RowGradient<T>& row) {
    HWY_NAMESPACE::PartSums part;
    WithSaved(row, [&](const auto& elements) HWY_ATTR { part = SumPart(row, elements); });
    return part;
  }

  template <typename T>
  static HWY_INLINE void PartBackward(const RowGradient<T>& row, const PartLine& line) {
    WithSaved(row, [&](const auto& elements) HWY_ATTR { StorePart(row, elements, line); });
  }

 private:
  template <typename T, class Body>
  static HWY_INLINE void WithSaved(const RowGradient<T>& row, const Body& body) {
    Family::With(row.parameter, [&](const auto& power) HWY_ATTR {
      using Power = std::remove_cvref_t<decltype(power)>;
      body(ElementsOf<Power, T>(power, row.saved.top, row.saved.beta / power.p, row.saved.threshold));
    });
  }
};

struct Sparsemax : EntmaxOf<Sparsemax> {
  static constexpr const char* kName = "sparsemax";
  static constexpr std::optional<core::ParameterRange> kParameter{};

  template <class Body>
  static HWY_INLINE void With(double /*alpha*/, const Body& body) {
    body(PowerOne{});
  }
  template <class Body>
  static HWY_INLINE void WithWeights(double alpha, const Body& body) {
    With(alpha, body);
  }
};

struct Entmax15 : EntmaxOf<Entmax15> {
  static constexpr const char* kName = "entmax15";
  static constexpr std::optional<core::ParameterRange> kParameter{};

  template <class Body>
  static HWY_INLINE void With(double /*alpha*/, const Body& body) {
    body(PowerTwo{});
  }
  template <class Body>
  static HWY_INLINE void WithWeights(double alpha, const Body& body) {
    With(alpha, body);
  }
};

struct Entmax : EntmaxOf<Entmax> {
  static constexpr const char* kName = "entmax";
  static constexpr std::optional<core::ParameterRange> kParameter{{.above = 1, .most = 4}};
  static constexpr bool kParameterGradient = true;

  template <class Body>
  static HWY_INLINE void With(double alpha, const Body& body) {
    if (alpha == 2) return Sparsemax::With(alpha, body);
    if (alpha == 1.5) return Entmax15::With(alpha, body);
    WithPower(alpha, alpha < 1.5, body);
  }
  template <class Body>
  static HWY_INLINE void WithWeights(double alpha, const Body& body) {
    if (alpha == 2) return Sparsemax::With(alpha, body);
    if (alpha == 1.5) return Entmax15::With(alpha, body);
    WithPower(alpha, alpha < 2, body);
  }

  template <typename T>
  static double ParameterGradient(const RowGradient<T>& row) {
    double gradient = 0;
    With(row.parameter,
         [&](const auto& power) { gradient = AlphaGradient(row, power.p, power.tau(row.saved.threshold)); });
    return gradient;
  }

 private:
  template <class Body>
  static HWY_INLINE void WithPower(double alpha, bool near, const Body& body) {
    const PowerAny power{.p = 1 / (alpha - 1)};
    if (near) return body(PowerNear{power, 0});
    body(power);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ENTMAX_ENTMAX_INL_H_
