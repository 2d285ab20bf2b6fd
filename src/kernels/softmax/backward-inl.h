// The gradient of one row of softmax, g = dL/dw. Forward, and what each line of backward differentiates:
//
//     w = e^s / sum e^s     dL/ds = w (g - D),     D = sum w g
//     s = beta y            dL/dy = beta dL/ds,    dL/dbeta = B = sum y dL/ds
//     y = x - max           dL/dx = dL/dy          (they sum to 0: the maximum gains nothing)
//     beta = rule(x)        dL/dx gains B dbeta/dx
//
//     sweep A   D, and through the rule B, mean and variance of y under w
//     sweep B   dx = beta w (g - D) + B dbeta/dx
//
// where dbeta/dx is a combination of w, w y, p and p y (p = softmax(x)) with one coefficient each,
// so every rule is the same sweep. y is measured from its mean under w, which the saved row holds, so neither
// B nor the variance cancels.
//
// Bytes: x and g are read twice and dx written once, from memory once where a row fits a cache. Two
// exponentials per key, one if the weights are kept, one more through a rule of the entropy: those bound it.
#if defined(WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
#undef WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
#else
#define WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
#endif

#include <whet/row.h>
#include <whet/rule.h>

#include <cmath>

#include "core/slope.h"
#include "core/target_search.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/row_job.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
HWY_INLINE const T* GradientRun(const RowGradient<T>& row, std::int64_t begin, std::int64_t size, T* block) {
  const auto& a = row.dout_array;
  const std::byte* from = row.dout + begin * a.key_stride * core::element_bytes(a.dtype);
  if (kernels::is_direct(a, row.n)) return reinterpret_cast<const T*>(from);
  LoadRow(from, a.dtype, a.key_stride, size, block);
  return block;
}

template <bool kThroughRule, typename T>
HWY_NOINLINE BackwardSums SweepA(const RowGradient<T>& row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const Exponential<T> exponential(row.saved.beta);
  const V top = hn::Set(d, static_cast<T>(row.saved.top));
  const V mean = hn::Set(d, static_cast<T>(row.saved.mean));
  const V hidden = hn::Set(d, kMinusInfinity<T>);
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T block[kMaxRunKeys<T>];
  const WideVec none = hn::Zero(hn::ScalableTag<double>());
  WideVec wg_a = none, wg_b = none, wyg_a = none, wyg_b = none, wy_a = none, wy_b = none, wyy_a = none,
          wyy_b = none;
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    V wg = hn::Zero(d), wyg = wg, wy = wg, wyy = wg;
    Map(
        d, row.weights == nullptr ? nullptr : row.weights + i, size,
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
    AddWide(wg, wg_a, wg_b);
    if constexpr (kThroughRule) {
      AddWide(wyg, wyg_a, wyg_b);
      AddWide(wy, wy_a, wy_b);
      AddWide(wyy, wyy_a, wyy_b);
    }
  }
  const double scale = row.saved.scale;
  return {TotalWide<T>(wg_a, wg_b) * scale, TotalWide<T>(wyg_a, wyg_b) * scale,
          TotalWide<T>(wy_a, wy_b) * scale, TotalWide<T>(wyy_a, wyy_b) * scale};
}

// kY: the line has a y_factor; kP: a p_factor; kKept: the exponentials are there.
template <bool kY, bool kP, bool kKept, typename T>
HWY_NOINLINE void SweepB(const RowGradient<T>& row, const BackwardLine& line) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto set = [&](double value) HWY_ATTR { return hn::Set(d, static_cast<T>(value)); };
  const Exponential<T> exponential(row.saved.beta), plain(1);
  const V top = set(row.saved.top), hidden = set(-std::numeric_limits<double>::infinity());
  const V scale = set(row.saved.scale), mean = set(row.saved.mean), plain_mean = set(row.saved.plain_mean);
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
          const V w = hn::Mul(kKept ? kept : exponential(d, y), scale);
          V factor = hn::MulAdd(g_factor, gradient, constant);
          if constexpr (kY) factor = hn::MulAdd(y_factor, hn::Sub(y, mean), factor);
          V dx = hn::Mul(w, factor);
          if constexpr (kP) {
            const V limited = plain.limit(d, z);
            const V p = hn::Mul(plain(d, limited), p_factor);
            dx = hn::MulAdd(p, hn::Sub(limited, plain_mean), dx);
          }
          dx = hn::Sub(dx, hn::IfThenElseZero(hn::Eq(x, top), peak_share));
          return hn::IfThenZeroElse(hn::Eq(x, hidden), dx);  // whatever the others' gradients are
        },
        row.x + i, GradientRun(row, i, size, gradients), kKept ? row.weights + i : row.x + i);
    if (!direct) StoreRow(results, out.dtype, out.key_stride, size, target);
  }
}

// dbeta/dx folded into the line.
template <typename T>
HWY_INLINE void AddRule(const RowGradient<T>& row, const Rule& rule, const BackwardSums& sums,
                        BackwardLine& line) {
  if (!rule.needs_search()) return core::add_rule_of_entropy(row.saved.slope, sums, line);
  const Top<T> top = TopOf(row.x, row.n, static_cast<T>(row.saved.top));
  if (top.ties == 0 || core::unreachable(rule, top.ties)) return;
  core::add_rule_of_target(rule, row.saved.beta, row.saved.mean, static_cast<double>(top.ties), sums, line);
}

template <bool kKept, typename T>
HWY_INLINE void SweepLine(const RowGradient<T>& row, const BackwardLine& line) {
  if (line.p_factor != 0) {
    SweepB<false, true, kKept>(row, line);
  } else if (line.y_factor != 0) {
    SweepB<true, false, kKept>(row, line);
  } else {
    SweepB<false, false, kKept>(row, line);
  }
}

// `moves`: beta follows the logits.
template <typename T>
HWY_INLINE void SoftmaxBackward(const RowGradient<T>& row, const Rule& rule, bool moves) {
  const double beta = row.saved.beta;
  const BackwardSums sums = moves ? SweepA<true>(row) : SweepA<false>(row);
  BackwardLine line{.constant = -beta * sums.wg, .g_factor = beta};
  if (moves) AddRule(row, rule, sums, line);
  if (row.weights != nullptr) {
    SweepLine<true>(row, line);
  } else {
    SweepLine<false>(row, line);
  }
}

// ---- A row that is part of a longer one ----

// Its sums, and how many of its keys are at the maximum.
template <typename T>
HWY_INLINE PartSums SoftmaxPartSums(const RowGradient<T>& row) {
  return {SweepA<true>(row), TopOf(row.x, row.n, static_cast<T>(row.saved.top)).ties};
}

// Its gradient by the line of the whole row; the exponentials are left in row.weights.
template <typename T>
HWY_INLINE void SoftmaxPartBackward(const RowGradient<T>& row, const BackwardLine& line) {
  Measure<0>(row.x, row.weights, row.n, static_cast<T>(row.saved.top), row.saved.beta);
  SweepLine<true>(row, line);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_SOFTMAX_BACKWARD_INL_H_
