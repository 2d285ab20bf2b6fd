// Entmax (Peters, Niculae, Martins, 2019) and sparsemax (Martins, Astudillo, 2016): with s = beta x,
//
//     w = ((alpha - 1) s - tau)_+ ^ p,   p = 1 / (alpha - 1),   tau such that the weights sum to 1
//
// alpha = 2 is sparsemax; towards 1 it becomes softmax. With s measured from its maximum, tau lies in [-1, 0)
// and no key more than p / beta below the maximum has weight: the others never take part.
//
//     filter   keys with v = ((alpha - 1) s - tau)_+ > 0 at tau = -1 are moved together in scratch; again
//              whenever tau has risen
//     sums     of v^p and v^(p-1) over those keys
//     step     Newton's for (sum v^p)^(1/p) = 1, which is convex in tau for p >= 1: it rises to the solution
//              and never passes it, so keys that are out stay out. alpha > 2: Newton's within a bracket
//     weights  v^p where any of a few neighbours is above the threshold, 0 elsewhere
//
// Limit: one comparison per key for the filter and one for the weights, with the write of the row: where few
// keys have weight, a third of one exponential. Four to eight steps on what is left come between, which
// short rows feel. Other alpha take a logarithm and an exponential per key that is left and step, in f32 up
// to alpha = 1.5, beyond in float64.
//
// Backward: q = v^(p-1) is dw/ds for a fixed tau, and dL/ds = q (g - sum q g / sum q). The gradient to alpha
// is in alpha_gradient-inl.h.
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

// v^p and v^(p-1) for v >= 0: 0 where v is 0, NaN where it is NaN; and how many v are above 0. A threshold is
// kept as `stored`, so that a float of it loses nothing that shows. Climb is Newton's step for
// (sum v^p)^(1/p) = 1, Highest the largest threshold of n keys, whose largest weight is at least 1 / n.
struct PowerOne {
  static constexpr double p = 1;
  double stored(double tau) const { return tau; }
  double tau(double stored) const { return stored; }
  double Climb(double high, double low) const { return (high - 1) / low; }
  double Highest(double n) const { return -1 / n; }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Raise(D d, V y, V slope, V tau, V& high, V& low) const {
    const V v = hn::MulSub(y, slope, tau);
    const auto out = hn::Le(v, hn::Zero(d));
    high = hn::IfThenZeroElse(out, v);
    low = hn::IfThenZeroElse(out, hn::Set(d, hn::TFromD<D>(1)));
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
  double Climb(double high, double low) const {
    const double norm = std::sqrt(high);
    return (norm - 1) * norm / low;
  }
  double Highest(double n) const { return -1 / std::sqrt(n); }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Raise(D d, V y, V slope, V tau, V& high, V& low) const {
    const V v = hn::MulSub(y, slope, tau);
    low = hn::IfThenZeroElse(hn::Le(v, hn::Zero(d)), v);
    high = hn::Mul(low, low);
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
  double Climb(double high, double low) const {
    const double log_norm = std::log(high) / p;
    return std::expm1(log_norm) * std::exp((p - 1) * log_norm) / low;
  }
  double Highest(double n) const { return -std::pow(n, -1 / p); }

  HWY_INLINE void Raise(hn::ScalableTag<double> d, hn::Vec<hn::ScalableTag<double>> y,
                        hn::Vec<hn::ScalableTag<double>> /*slope*/, hn::Vec<hn::ScalableTag<double>> /*tau*/,
                        hn::Vec<hn::ScalableTag<double>>& high, hn::Vec<hn::ScalableTag<double>>& low) const {
    const auto v = hn::MulSub(y, hn::Set(d, slope64), hn::Set(d, tau64));
    const auto out = hn::Le(v, hn::Set(d, kLeast));
    const auto inside = hn::IfThenElse(out, hn::Set(d, 1.0), v);
    const auto power =
        hn::Exp(d, hn::Max(hn::Set(d, -700.0), hn::Mul(hn::Set(d, p - 1), hn::Log(d, inside))));
    const auto number = hn::Eq(v, v);  // Exp forgets NaN
    low = hn::IfThenElse(number, hn::IfThenZeroElse(out, power), v);
    high = hn::Mul(low, hn::IfThenZeroElse(out, inside));
  }

  using Wide = hn::Vec<hn::ScalableTag<double>>;
  HWY_INLINE std::size_t Count(hn::ScalableTag<double> d, Wide y, Wide /*slope*/, Wide /*tau*/) const {
    const auto v = hn::MulSub(y, hn::Set(d, slope64), hn::Set(d, tau64));
    return hn::CountTrue(d, hn::Gt(v, hn::Set(d, kLeast)));
  }

#if HWY_TARGET == HWY_SCALAR
  HWY_INLINE void Raise(hn::ScalableTag<float> d, hn::Vec<hn::ScalableTag<float>> y,
                        hn::Vec<hn::ScalableTag<float>> slope, hn::Vec<hn::ScalableTag<float>> tau,
                        hn::Vec<hn::ScalableTag<float>>& high, hn::Vec<hn::ScalableTag<float>>& low) const {
    const hn::ScalableTag<double> dd;
    (void)slope, (void)tau;
    auto wide_high = hn::Zero(dd), wide_low = wide_high;
    Raise(dd, hn::PromoteTo(dd, y), wide_high, wide_low, wide_high, wide_low);
    high = hn::DemoteTo(d, wide_high);
    low = hn::DemoteTo(d, wide_low);
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
                        hn::Vec<hn::ScalableTag<float>>& high, hn::Vec<hn::ScalableTag<float>>& low) const {
    const hn::ScalableTag<double> dd;
    const hn::Half<hn::ScalableTag<float>> half;
    (void)slope, (void)tau;
    const auto none = hn::Zero(dd);
    auto high_a = none, low_a = none, high_b = none, low_b = none;
    Raise(dd, hn::PromoteTo(dd, hn::LowerHalf(half, y)), none, none, high_a, low_a);
    Raise(dd, hn::PromoteTo(dd, hn::UpperHalf(half, y)), none, none, high_b, low_b);
    high = hn::Combine(d, hn::DemoteTo(half, high_b), hn::DemoteTo(half, high_a));
    low = hn::Combine(d, hn::DemoteTo(half, low_b), hn::DemoteTo(half, low_a));
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
  float ratio, largest, low_factor;  // slope / -tau, (-tau)^p, (-tau)^(p-1)

  using PowerAny::Raise;
  HWY_INLINE void Raise(hn::ScalableTag<float> d, hn::Vec<hn::ScalableTag<float>> y,
                        hn::Vec<hn::ScalableTag<float>> /*slope*/, hn::Vec<hn::ScalableTag<float>> /*tau*/,
                        hn::Vec<hn::ScalableTag<float>>& high, hn::Vec<hn::ScalableTag<float>>& low) const {
    const Exponential<float> exponential(p);
    const auto one = hn::Set(d, 1.0f), u = hn::Mul(y, hn::Set(d, ratio));
    const auto out = hn::Le(u, hn::Neg(one));
    const auto inside = hn::IfThenZeroElse(out, u);
    const auto power = exponential(d, exponential.limit(d, LogOnePlus(d, inside)));
    const auto kept = hn::IfThenElse(hn::Eq(u, u), hn::IfThenZeroElse(out, power), u);
    high = hn::Mul(kept, hn::Set(d, largest));
    low = hn::Div(hn::Mul(kept, hn::Set(d, low_factor)), hn::Add(one, inside));
  }
};

// The power of a normalizer at an inverse temperature and a threshold.
template <class Power>
HWY_INLINE Power PowerAt(const Power& power, double slope, double tau) {
  Power at = power;
  if constexpr (std::is_base_of_v<PowerAny, Power>) {
    at.slope64 = slope;
    at.tau64 = tau;
  }
  if constexpr (std::is_same_v<PowerNear, Power>) {
    const double largest = std::pow(-tau, power.p);
    at.ratio = static_cast<float>(slope / -tau);
    at.largest = static_cast<float>(largest);
    at.low_factor = static_cast<float>(largest / -tau);
  }
  return at;
}

struct PowerSums {
  double high = 0, low = 0;  // of v^p and of v^(p-1)
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
  WideVec high_a = hn::Zero(hn::ScalableTag<double>()), high_b = high_a, low_a = high_a, low_b = high_a;
  const std::int64_t run = RunKeys<T>();
  for (std::int64_t i = 0; i < n; i += run) {
    V high_sum = hn::Zero(d), low_sum = high_sum;
    const auto add = [&](V keys) HWY_ATTR {
      V high, low;
      at.Raise(d, hn::Sub(keys, max), factor, threshold, high, low);
      high_sum = hn::Add(high_sum, high);
      low_sum = hn::Add(low_sum, low);
      return keys;
    };
    if constexpr (kAll) {
      Map(d, static_cast<T*>(nullptr), std::min(run, n - i), add, x + i);
    } else {
      ForEachAbove(d, x + i, std::min(run, n - i), LimitAt(top, slope, tau), add);
    }
    AddWide(high_sum, high_a, high_b);
    AddWide(low_sum, low_a, low_b);
  }
  return {TotalWide<T>(high_a, high_b), TotalWide<T>(low_a, low_b)};
}

// The keys that a search still has to look at: the row's runs, or what was kept of them in scratch.
template <class Power, typename T>
class EntmaxKeys {
 public:
  // `next`: a row to fetch into the cache meanwhile, or null.
  EntmaxKeys(const Power& power, const Runs<T>& runs, T top, double slope, const T* next)
      : power_(power), runs_(runs), top_(top), slope_(slope), next_(next) {}

  // Keys that have no weight at tau needn't be looked at again.
  HWY_INLINE void Drop(double tau) {
    T* const scratch = runs_.row.scratch;
    if (scratch == nullptr || (kept_ >= 0 && kept_ < kWorthDropping)) return;
    const T limit = LimitAt(top_, slope_, tau);
    const std::int64_t size = runs_.row.size();
    std::int64_t kept = 0;
    if (kept_ >= 0) {
      kept = KeepKeys(static_cast<const T*>(scratch), kept_, limit, scratch);
    } else {
      runs_.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
        kept += KeepKeys(runs_.row.x + begin, end - begin, limit, scratch + kept, next_);
      });
    }
    kept_ = FillLastVector(scratch, kept, size);
  }

  HWY_INLINE PowerSums Sum(double tau) const {
    if (kept_ >= 0) {
      return SumPowers<true>(power_, static_cast<const T*>(runs_.row.scratch), kept_, top_, slope_, tau);
    }
    PowerSums sums;
    runs_.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
      const PowerSums more = SumPowers<false>(power_, runs_.row.x + begin, end - begin, top_, slope_, tau);
      sums.high += more.high;
      sums.low += more.low;
    });
    return sums;
  }

 private:
  static constexpr std::int64_t kWorthDropping = 64;
  const Power& power_;
  const Runs<T>& runs_;
  T top_;
  double slope_;
  const T* next_;
  std::int64_t kept_ = -1;  // how many keys lie in scratch; -1: none were moved there
};

// A step this small, relative to tau and times p, is the last: Newton's next would be its square.
template <typename T>
inline constexpr double kLastStep = sizeof(T) == sizeof(float) ? 0x1p-16 : 0x1p-30;

// As backward will read it.
template <typename T, class Power>
HWY_INLINE double Rounded(const Power& power, double tau) {
  return power.tau(static_cast<double>(static_cast<T>(power.stored(tau))));
}

// A threshold and the sum of the weights there.
struct FoundTau {
  double tau, z;
};

// Newton's next threshold. The norm is convex in tau for p >= 1: from wherever the step starts, it doesn't
// pass the solution.
template <typename T, class Power>
HWY_INLINE double NextTau(const Power& power, double tau, const PowerSums& sums, double highest) {
  return Rounded<T>(power, std::clamp(tau + power.Climb(sums.high, sums.low), -1.0, highest));
}

// alpha <= 2: Newton's steps for the norm (sum v^p)^(1/p) = 1 from a tau below the solution, with the sums
// there. The sum of weights is convex, too, so that a last step from 1 + e lowers it by no more than e, and,
// but for its square, by that: where e is below rounding, nobody needs to look.
template <class Power, typename T>
HWY_INLINE FoundTau ClimbToTau(const Power& power, EntmaxKeys<Power, T>& keys, double tau, PowerSums sums,
                               double highest) {
  constexpr int kMostSteps = 100;  // it takes one to five
  constexpr double kRounding = sizeof(T) == sizeof(float) ? 0x1p-21 : 0x1p-50;
  for (int step = 0; step < kMostSteps; ++step) {
    const double next = NextTau<T>(power, tau, sums, highest);
    const double fall = power.p * sums.low * (next - tau);
    if (next <= tau || fall < kRounding) return {next, sums.high - fall};
    const bool last = (next - tau) * power.p <= kLastStep<T> * -tau;
    tau = next;
    if (!last) keys.Drop(tau);
    sums = keys.Sum(tau);
    if (last) break;
  }
  return {tau, sums.high};
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

// tau in [-1, 0), rounded as backward will read it; z is NaN if a key is NaN, and 0 if none is visible.
template <class Power, typename T>
HWY_INLINE FoundTau FindTau(const Power& power, EntmaxKeys<Power, T>& keys, std::int64_t n) {
  const double highest = power.Highest(static_cast<double>(n));
  keys.Drop(-1);
  // The middle of where tau can be saves a step or two; (1/2)^p would underflow for a large p.
  double tau = power.p >= 1 && power.p <= 8 ? -0.5 : -1;
  PowerSums sums = keys.Sum(tau);
  if (!(sums.high > 0)) return {0, sums.high};
  if (power.p < 1) {
    tau = Rounded<T>(power, BracketTau(power, keys, sums, highest));
    return {tau, keys.Sum(tau).high};
  }
  tau = NextTau<T>(power, tau, sums, highest);
  keys.Drop(tau);
  return ClimbToTau(power, keys, tau, keys.Sum(tau), highest);
}

// The elements of entmax: dw/ds = q, and q couples the keys of its support.
template <class Power, typename T>
struct EntmaxElements {
  static constexpr bool kCouples = true, kDivides = true, kShifts = true;
  Power power;
  T top, slope, tau;

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Weight(D d, V x) const {
    V high, low;
    power.Raise(d, hn::Sub(x, hn::Set(d, top)), hn::Set(d, slope), hn::Set(d, tau), high, low);
    return high;
  }

  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void Slopes(D d, V x, V& w, V& a, V& b, V& c) const {
    power.Raise(d, hn::Sub(x, hn::Set(d, top)), hn::Set(d, slope), hn::Set(d, tau), w, a);
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
  return {PowerAt(power, slope, tau), static_cast<T>(top), static_cast<T>(slope), static_cast<T>(tau)};
}

// What sparsemax, entmax15 and entmax:A share. `Family` says which power belongs to a parameter: With for
// gradients, WithWeights where weights alone are asked for.
template <class Family>
struct EntmaxOf {
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = false;
  static constexpr bool kNeedsCount = false;
  static constexpr bool kNeedsScratch = true;
  static constexpr bool kSavesThreshold = true;
  static constexpr bool kIsSparse = true;
  static constexpr bool kMergesShards = false;
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
      EntmaxKeys<Power, T> keys(power, runs, result.top, slope, next);
      const auto [tau, z] = FindTau(power, keys, runs.row.size());
      result.sums = {.z = z};
      if (!(z > 0)) return;
      result.threshold = power.stored(tau);
      const auto elements = ElementsOf<Power, T>(power, static_cast<double>(result.top), slope, tau);
      if (needs.support) {
        result.least = static_cast<double>(result.top) + tau / slope;
        result.support = CountKeys(runs, [&](auto d, auto x) HWY_ATTR { return elements.Count(d, x); });
      }
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
    if (near) return body(PowerNear{power, 0, 0, 0});
    body(power);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ENTMAX_ENTMAX_INL_H_
