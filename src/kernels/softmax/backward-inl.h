// The gradient of one row of softmax. With w = softmax(beta x), g = dL/dw, y = x - max:
//
//     sweep A   D = sum w g,   and through the rule   B = sum y w (g - D),  mean and variance of y under w
//     sweep B   dx = beta w (g - D) + B dbeta/dx
//
// where dbeta/dx is a combination of w, w y, p and p y (p = softmax(x)) with one coefficient each,
// so every rule is the same sweep. Two exponentials a key, three through a rule of the entropy. y is
// measured from its mean under w, which the stats hold, so neither B nor the variance cancels.
#if defined(WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
#undef WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
#else
#define WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
#endif

#include <whet/row.h>
#include <whet/rule.h>

#include <cmath>

#include "core/target_search.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/softmax/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What sweep A finds: sums of w g, w y g, w y, w y^2, y measured from the mean the stats imply.
struct BackwardSums {
  double wg = 0, wyg = 0, wy = 0, wyy = 0;
};

// dx = w (constant + g_factor g + y_factor y) + p (p_factor (z - z_mean)) - peak_share at the maximum,
// y measured from `mean`, z = x - max.
struct BackwardLine {
  double constant = 0, g_factor = 0, y_factor = 0, p_factor = 0, z_mean = 0, peak_share = 0;
};

// A row of the backward pass: x is contiguous with hidden keys at -inf; dout and din stay where they
// are, in any type and stride, and pass run by run.
template <typename T>
struct BackwardRow {
  const T* x;
  std::int64_t n;
  T max;
  RowStats stats;
  const std::byte* dout;
  std::byte* din;
  const core::RowArray& dout_array;
  const core::RowArray& din_array;
  T* kept = nullptr;  // if not null: room for a row, where sweep A leaves e^(beta y) for sweep B

  double mean() const { return (-std::log(stats.sharp_peak) - stats.sharp_entropy) / stats.beta; }
};

template <typename T>
HWY_INLINE const T* GradientRun(const BackwardRow<T>& row, std::int64_t begin, std::int64_t size, T* block) {
  const auto& a = row.dout_array;
  const std::byte* from = row.dout + begin * a.key_stride * core::element_bytes(a.dtype);
  if (kernels::is_direct(a, row.n)) return reinterpret_cast<const T*>(from);
  LoadRow(from, a.dtype, a.key_stride, size, block);
  return block;
}

template <bool kThroughRule, typename T>
HWY_NOINLINE BackwardSums SweepA(const BackwardRow<T>& row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const Exponential<T> exponential(row.stats.beta);
  const V top = hn::Set(d, row.max), mean = hn::Set(d, static_cast<T>(row.mean()));
  const V hidden = hn::Set(d, kMinusInfinity<T>);
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T block[kMaxRunKeys<T>];
  WideSum<T> wgs, wygs, wys, wyys;
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    V wg = hn::Zero(d), wyg = wg, wy = wg, wyy = wg;
    Map(
        d, row.kept == nullptr ? nullptr : row.kept + i, size,
        [&](V x, V gradient) HWY_ATTR {
          const V g = hn::IfThenZeroElse(hn::Eq(x, hidden), gradient);
          const V y = exponential.limit(d, hn::Sub(x, top));
          const V w = exponential(d, y);
          wg = hn::MulAdd(w, g, wg);
          if constexpr (kThroughRule) {
            const V centred = hn::Sub(y, mean);
            const V moment = hn::Mul(w, centred);
            wy = hn::Add(wy, moment);
            wyg = hn::MulAdd(moment, g, wyg);
            wyy = hn::MulAdd(moment, centred, wyy);
          }
          return w;
        },
        row.x + i, GradientRun(row, i, size, block));
    wgs.Add(wg);
    if constexpr (kThroughRule) {
      wygs.Add(wyg);
      wys.Add(wy);
      wyys.Add(wyy);
    }
  }
  const double peak = row.stats.sharp_peak;  // 1 / sum of the exponentials
  return {wgs.Total() * peak, wygs.Total() * peak, wys.Total() * peak, wyys.Total() * peak};
}

// kY: the line has a y_factor; kP: a p_factor; kKept: the exponentials are there.
template <bool kY, bool kP, bool kKept, typename T>
HWY_NOINLINE void SweepB(const BackwardRow<T>& row, const BackwardLine& line) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto set = [&](double value) HWY_ATTR { return hn::Set(d, static_cast<T>(value)); };
  const Exponential<T> exponential(row.stats.beta), plain(1);
  const V top = set(static_cast<double>(row.max)), hidden = set(-std::numeric_limits<double>::infinity());
  const V peak = set(row.stats.sharp_peak), plain_peak = set(row.stats.peak);
  const V mean = set(row.mean()), z_mean = set(line.z_mean);
  const V constant = set(line.constant), g_factor = set(line.g_factor);
  const V y_factor = set(line.y_factor), p_factor = set(line.p_factor);
  const V peak_share = set(line.peak_share);
  const auto& out = row.din_array;
  const bool direct = kernels::is_direct(out, row.n);
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T gradients[kMaxRunKeys<T>];
  HWY_ALIGN T results[kMaxRunKeys<T>];
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    std::byte* target = row.din + i * out.key_stride * core::element_bytes(out.dtype);
    Map(
        d, direct ? reinterpret_cast<T*>(target) : results, size,
        [&](V x, V gradient, V kept) HWY_ATTR {
          const V z = hn::Sub(x, top);
          const V y = exponential.limit(d, z);
          const V w = hn::Mul(kKept ? kept : exponential(d, y), peak);
          V factor = hn::MulAdd(g_factor, gradient, constant);
          if constexpr (kY) factor = hn::MulAdd(y_factor, hn::Sub(y, mean), factor);
          V dx = hn::Mul(w, factor);
          if constexpr (kP) {
            const V limited = plain.limit(d, z);
            const V p = hn::Mul(plain(d, limited), plain_peak);
            dx = hn::MulAdd(hn::Mul(p, p_factor), hn::Sub(limited, z_mean), dx);
          }
          dx = hn::Sub(dx, hn::IfThenElseZero(hn::Eq(x, top), peak_share));
          return hn::IfThenZeroElse(hn::Eq(x, hidden), dx);  // whatever the others' gradients are
        },
        row.x + i, GradientRun(row, i, size, gradients), kKept ? row.kept + i : row.x + i);
    if (!direct) StoreRow(results, out.dtype, out.key_stride, size, target);
  }
}

// dbeta/dx folded into the line; B = sum y w (g - D).
template <typename T>
HWY_INLINE void AddRule(const BackwardRow<T>& row, const Rule& rule, const BackwardSums& sums,
                        BackwardLine& line) {
  const double beta = row.stats.beta;
  const double b = sums.wyg - sums.wg * sums.wy;
  if (!rule.needs_search()) {
    RowState state;
    state.count = static_cast<std::int64_t>(row.stats.count);
    state.max = row.stats.max;
    state.z = 1 / row.stats.peak;
    state.t = state.z * (std::log(state.z) - row.stats.entropy);
    line.p_factor = -b * rule.slope(state);
    line.z_mean = state.t / state.z;
    return;
  }
  const Top<T> top = TopOf(row.x, row.n, row.max);
  if (top.ties == 0 || core::unreachable(rule, top.ties)) return;
  if (rule.kind() == Rule::Kind::target_entropy) {
    const double variance = sums.wyy - sums.wy * sums.wy;
    if (!(variance > 0)) return;
    line.y_factor = -b * beta / variance;
    line.constant -= line.y_factor * sums.wy;
  } else {
    const double mean = row.mean() + sums.wy;
    if (!(mean < 0)) return;
    line.constant += b * beta / -mean;
    line.peak_share = b * beta / -mean / static_cast<double>(top.ties);
  }
}

template <bool kKept, typename T>
HWY_INLINE void SweepLine(const BackwardRow<T>& row, const BackwardLine& line) {
  if (line.p_factor != 0) {
    SweepB<false, true, kKept>(row, line);
  } else if (line.y_factor != 0) {
    SweepB<true, false, kKept>(row, line);
  } else {
    SweepB<false, false, kKept>(row, line);
  }
}

template <typename T>
HWY_INLINE void BackwardRowOf(const BackwardRow<T>& row, const Rule& rule, bool through_rule) {
  const double beta = row.stats.beta;
  // At beta = 1 every rule that depends on the logits is on the constant side of its kink.
  const bool moves = through_rule && needs_entropy(rule) && beta != 1 && !std::isnan(beta);
  const BackwardSums sums = moves ? SweepA<true>(row) : SweepA<false>(row);
  BackwardLine line{.constant = -beta * sums.wg, .g_factor = beta};
  if (moves) AddRule(row, rule, sums, line);
  if (row.kept != nullptr) {
    SweepLine<true>(row, line);
  } else {
    SweepLine<false>(row, line);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
