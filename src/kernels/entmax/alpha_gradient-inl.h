// The gradient to the parameter A of entmax:A (Correia, Niculae, Martins, 2019). With p = 1 / (A - 1),
// v = (A - 1) s - tau of the keys that have weight, w = v^p, q = v^(p-1) and g = dL/dw,
//
//     dw/dA = p^2 (w (1 - ln v) - c q),   c such that they sum to 0
//     dL/dA = p^2 sum q f (g - sum q g / sum q),   f = v (1 - ln v) - 1
//
// which is the published formula: c may be chosen freely in the second line, since the last factor sums to 0
// under q. With the 1 in f, terms of the size of p^2 never appear: near A = 1, v is near 1, f is about
// -(v - 1)^2 / 2, and p (v - 1) is about ln w. There f is a series, and nothing cancels.
//
// One sweep in float64. Limit: a logarithm and an exponential per key, about as much as a step of the search
// for tau at such an A.
#if defined(WHET_KERNELS_ENTMAX_ALPHA_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ENTMAX_ALPHA_GRADIENT_INL_H_
#undef WHET_KERNELS_ENTMAX_ALPHA_GRADIENT_INL_H_
#else
#define WHET_KERNELS_ENTMAX_ALPHA_GRADIENT_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/softmax/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// v (1 - ln v) - 1 for v > 0, given ln v; relative error below 1e-13.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V EntropyExcess(D d, V v, V log) {
  const V u = hn::Sub(v, hn::Set(d, 1.0));
  // -sum over k >= 2 of (-u)^k / (k (k - 1)): 16 terms are exact where |u| <= 1/8.
  constexpr int kTerms = 16;
  V series = hn::Zero(d);
  for (int k = kTerms + 1; k >= 2; --k) {
    series = hn::NegMulAdd(u, series, hn::Set(d, 1.0 / (k * (k - 1))));
  }
  series = hn::Neg(hn::Mul(hn::Mul(u, u), series));
  return hn::IfThenElse(hn::Le(hn::Abs(u), hn::Set(d, 0.125)), series, hn::NegMulAdd(v, log, u));
}

// Sums over a row of q f g, q f, q g and q.
struct AlphaSums {
  double fg = 0, f = 0, g = 0, q = 0;
};

// `size` keys, at most a run, of which y is the distance from the maximum, -inf where hidden.
HWY_NOINLINE void AddAlphaSums(const double* y, const double* g, std::int64_t size, double p, double slope,
                               double tau, AlphaSums& sums) {
  const hn::ScalableTag<double> d;
  using V = hn::Vec<decltype(d)>;
  V fg = hn::Zero(d), f_sum = fg, g_sum = fg, q_sum = fg;
  Map(
      d, static_cast<double*>(nullptr), size,
      [&](V distance, V gradient) HWY_ATTR {
        const V v = hn::MulSub(distance, hn::Set(d, slope), hn::Set(d, tau));
        const auto out = hn::Le(v, hn::Set(d, std::numeric_limits<double>::min()));
        const V inside = hn::IfThenElse(out, hn::Set(d, 1.0), v);
        const V log = hn::Log(d, inside);
        const V power = hn::Exp(d, hn::Max(hn::Set(d, -700.0), hn::Mul(hn::Set(d, p - 1), log)));
        const V q = hn::IfThenZeroElse(out, power);
        const V qf = hn::Mul(q, EntropyExcess(d, inside, log));
        fg = hn::MulAdd(qf, gradient, fg);
        f_sum = hn::Add(f_sum, qf);
        g_sum = hn::MulAdd(q, gradient, g_sum);
        q_sum = hn::Add(q_sum, q);
        return v;
      },
      y, g);
  sums.fg += hn::GetLane(hn::SumOfLanes(d, fg));
  sums.f += hn::GetLane(hn::SumOfLanes(d, f_sum));
  sums.g += hn::GetLane(hn::SumOfLanes(d, g_sum));
  sums.q += hn::GetLane(hn::SumOfLanes(d, q_sum));
}

// dL/dA of a row whose threshold is tau.
template <typename T>
HWY_NOINLINE double AlphaGradient(const RowGradient<T>& row, double p, double tau) {
  const T top = static_cast<T>(row.saved.top);
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T block[kMaxRunKeys<T>];
  HWY_ALIGN double y[kMaxRunKeys<T>];
  HWY_ALIGN double g[kMaxRunKeys<T>];
  AlphaSums sums;
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    const T* const gradient = GradientRun(row, i, size, block);
    for (std::int64_t j = 0; j < size; ++j) {
      const T x = row.x[i + j];
      y[j] = static_cast<double>(x - top);
      g[j] = x == kMinusInfinity<T> ? 0 : static_cast<double>(gradient[j]);
    }
    AddAlphaSums(y, g, size, p, row.saved.beta / p, tau, sums);
  }
  return p * p * (sums.fg - sums.f * (sums.g / sums.q));
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ENTMAX_ALPHA_GRADIENT_INL_H_
