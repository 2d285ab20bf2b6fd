// Rows whose weights are a function of each logit and of a few numbers of the row, and their gradients: what
// every normalizer but softmax and hard has in common.
//
// Such a normalizer makes, from the numbers of a row, an object that turns a vector of logits into
//
//     w   the weight, before it is multiplied by the row's scale
//     a, b, c   what its derivative is made of:   dL/ds = a g - b C,   C = sum c g  (over sum c if kDivides)
//
// with s = beta x and g = dL/dw. Forward is one sweep for w. Backward is a sweep for C and one for dL/dx;
// through a rule that follows the logits one more, since
//
//     s = beta x        dL/dx = beta dL/ds,    dL/dbeta = B = sum x dL/ds
//     beta = rule(x)    dL/dx gains B dbeta/dx
//
// where x may be measured from the maximum if the dL/ds of a row sum to 0 (kShifts). Bytes: a sweep reads x
// and g once, from cache after the first time; operations are those of the normalizer.
#if defined(WHET_KERNELS_ROW_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_ELEMENTWISE_INL_H_
#undef WHET_KERNELS_ROW_ELEMENTWISE_INL_H_
#else
#define WHET_KERNELS_ROW_ELEMENTWISE_INL_H_
#endif

#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/elements/elements-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/softmax/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Weights of the runs in `out` (null: nowhere). Returns their sum: NaN if a key is NaN. Has the row at `next`
// (null: none) on its way from memory meanwhile.
template <class Elements, typename T>
HWY_NOINLINE double WeighElements(const Runs<T>& runs, const Elements& elements, T* out,
                                  const T* next = nullptr) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  WideVec total = hn::Zero(hn::ScalableTag<double>()), rest = total;
  runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    const std::int64_t run = RunKeys<T>();
    for (std::int64_t i = begin; i < end; i += run) {
      if (next != nullptr && i + run <= end) Fetch(next + i, run);
      V sum = hn::Zero(d);
      Map(
          d, out == nullptr ? nullptr : out + i, std::min(run, end - i),
          [&](V x) HWY_ATTR {
            const V w = elements.Weight(d, x);
            sum = hn::Add(sum, w);
            return w;
          },
          runs.row.x + i);
      AddWide(sum, total, rest);
    }
  });
  return TotalWide<T>(total, rest);
}

// Sums over a row of c g and of c.
struct ElementSums {
  double cg = 0, c = 0;
};

// Leaves the weights in row.weights if that isn't null.
template <class Elements, typename T>
HWY_NOINLINE ElementSums SumElements(const RowGradient<T>& row, const Elements& elements) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V hidden = hn::Set(d, kMinusInfinity<T>);
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T block[kMaxRunKeys<T>];
  const WideVec none = hn::Zero(hn::ScalableTag<double>());
  WideVec cg_a = none, cg_b = none, c_a = none, c_b = none;
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    V cg = hn::Zero(d), sum = cg;
    Map(
        d, row.weights == nullptr ? nullptr : row.weights + i, size,
        [&](V x, V gradient) HWY_ATTR {
          const V g = hn::IfThenZeroElse(hn::Eq(x, hidden), gradient);
          V w, a, b, c;
          elements.Slopes(d, x, w, a, b, c);
          cg = hn::MulAdd(c, g, cg);
          sum = hn::Add(sum, c);
          return w;
        },
        row.x + i, GradientRun(row, i, size, block));
    AddWide(cg, cg_a, cg_b);
    AddWide(sum, c_a, c_b);
  }
  return {TotalWide<T>(cg_a, cg_b), TotalWide<T>(c_a, c_b)};
}

// B = sum (x - from) dL/ds.
template <class Elements, typename T>
HWY_NOINLINE double BetaGradientOf(const RowGradient<T>& row, const Elements& elements, double coupling,
                                   T from) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V hidden = hn::Set(d, kMinusInfinity<T>), origin = hn::Set(d, from);
  const V factor = hn::Set(d, static_cast<T>(coupling));
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T block[kMaxRunKeys<T>];
  WideVec total = hn::Zero(hn::ScalableTag<double>()), rest = total;
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    V sum = hn::Zero(d);
    Map(
        d, static_cast<T*>(nullptr), size,
        [&](V x, V gradient) HWY_ATTR {
          V w, a, b, c;
          elements.Slopes(d, x, w, a, b, c);
          const V ds = hn::NegMulAdd(b, factor, hn::Mul(a, gradient));
          const V term = hn::Mul(hn::Sub(x, origin), ds);
          sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(x, hidden), term));
          return w;
        },
        row.x + i, GradientRun(row, i, size, block));
    AddWide(sum, total, rest);
  }
  return TotalWide<T>(total, rest);
}

// dx = beta (a g - b C) + what the rule adds, as SweepB of softmax has it.
template <bool kRule, class Elements, typename T>
HWY_NOINLINE void StoreElements(const RowGradient<T>& row, const Elements& elements, double coupling,
                                const SavedRow& soft, const BackwardLine& line) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto set = [&](double value) HWY_ATTR { return hn::Set(d, static_cast<T>(value)); };
  const Exponential<T> exponential(soft.beta), plain(1);
  const V top = set(soft.top), hidden = hn::Set(d, kMinusInfinity<T>), beta = set(row.saved.beta);
  const V coupled = set(coupling), scale = set(soft.scale), mean = set(soft.mean);
  const V plain_mean = set(soft.plain_mean), constant = set(line.constant), y_factor = set(line.y_factor);
  const V p_factor = set(line.p_factor), peak_share = set(line.peak_share);
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
        [&](V x, V gradient) HWY_ATTR {
          V w, a, b, c;
          elements.Slopes(d, x, w, a, b, c);
          V dx = hn::Mul(beta, hn::NegMulAdd(b, coupled, hn::Mul(a, gradient)));
          if constexpr (kRule) {
            const V z = hn::Sub(x, top), y = exponential.limit(d, z);
            const V share = hn::Mul(exponential(d, y), scale);
            dx = hn::MulAdd(share, hn::MulAdd(y_factor, hn::Sub(y, mean), constant), dx);
            const V limited = plain.limit(d, z);
            dx = hn::MulAdd(hn::Mul(plain(d, limited), p_factor), hn::Sub(limited, plain_mean), dx);
            dx = hn::Sub(dx, hn::IfThenElseZero(hn::Eq(x, top), peak_share));
          }
          return hn::IfThenZeroElse(hn::Eq(x, hidden), dx);  // whatever the others' gradients are
        },
        row.x + i, GradientRun(row, i, size, gradients));
    if (!direct) StoreRow(results, out.dtype, out.key_stride, size, target);
  }
}

// `moves`: beta follows the logits.
template <class Elements, typename T>
HWY_INLINE void BackwardElements(const RowGradient<T>& row, const Elements& elements, const Rule& rule,
                                 bool moves) {
  double coupling = 0;
  if (Elements::kCouples || row.weights != nullptr) {
    const ElementSums sums = SumElements(row, elements);
    coupling = Elements::kDivides && sums.c != 0 ? sums.cg / sums.c : sums.cg;
  }
  if (!moves) return StoreElements<false>(row, elements, coupling, row.saved, {});
  const T from = Elements::kShifts ? static_cast<T>(row.saved.top) : T(0);
  const double b = BetaGradientOf(row, elements, coupling, from);
  // A search found beta by softmax: its mean and variance there.
  RowGradient<T> soft = row;
  BackwardSums at_beta{.wyg = b};
  if (rule.needs_search()) {
    const Sums sums =
        Measure<2>(row.x, static_cast<T*>(nullptr), row.n, static_cast<T>(row.saved.top), row.saved.beta);
    soft.saved.scale = 1 / sums.z;
    soft.saved.mean = sums.t / sums.z;
    at_beta.wyy = sums.u / sums.z - soft.saved.mean * soft.saved.mean;
  }
  BackwardLine line;
  AddRule(soft, rule, at_beta, line);
  StoreElements<true>(row, elements, coupling, soft.saved, line);
}

// ---- A row that is part of a longer one ----

// Sums of c g, (y - mean) c g and (y - mean) c over its keys, and that of c in `w`.
template <class Elements, typename T>
HWY_NOINLINE PartSums SumPartElements(const RowGradient<T>& row, const Elements& elements) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const V top = hn::Set(d, static_cast<T>(row.saved.top)), mean = hn::Set(d, static_cast<T>(row.saved.mean));
  const V zero = hn::Zero(d);
  const std::int64_t run = RunKeys<T>();
  HWY_ALIGN T block[kMaxRunKeys<T>];
  const WideVec none = hn::Zero(hn::ScalableTag<double>());
  WideVec cg_a = none, cg_b = none, ycg_a = none, ycg_b = none, yc_a = none, yc_b = none, c_a = none,
          c_b = none;
  for (std::int64_t i = 0; i < row.n; i += run) {
    const std::int64_t size = std::min(run, row.n - i);
    V cg = zero, ycg = zero, yc = zero, sum = zero;
    Map(
        d, static_cast<T*>(nullptr), size,
        [&](V x, V gradient) HWY_ATTR {
          V w, a, b, c;
          elements.Slopes(d, x, w, a, b, c);
          const auto out = hn::Eq(c, zero);  // there neither y nor the gradient need be a number
          const V moment = hn::IfThenZeroElse(out, hn::Mul(c, hn::Sub(hn::Sub(x, top), mean)));
          const V g = hn::IfThenZeroElse(out, gradient);
          cg = hn::MulAdd(c, g, cg);
          ycg = hn::MulAdd(moment, g, ycg);
          yc = hn::Add(yc, moment);
          sum = hn::Add(sum, c);
          return w;
        },
        row.x + i, GradientRun(row, i, size, block));
    AddWide(cg, cg_a, cg_b);
    AddWide(ycg, ycg_a, ycg_b);
    AddWide(yc, yc_a, yc_b);
    AddWide(sum, c_a, c_b);
  }
  return {.sums = {.wg = TotalWide<T>(cg_a, cg_b),
                   .wyg = TotalWide<T>(ycg_a, ycg_b),
                   .wy = TotalWide<T>(yc_a, yc_b)},
          .w = TotalWide<T>(c_a, c_b)};
}

// These, and what a rule that follows the logits needs beside them.
template <class Elements, typename T>
HWY_INLINE PartSums SumPart(const RowGradient<T>& row, const Elements& elements) {
  const T top = static_cast<T>(row.saved.top);
  PartSums part = SumPartElements(row, elements);
  part.ties = TopOf(row.x, row.n, top).ties;
  part.soft = Measure<2>(row.x, static_cast<T*>(nullptr), row.n, top, row.saved.beta);
  return part;
}

// Its gradient by the line of the whole row; the weights are left in row.weights.
template <class Elements, typename T>
HWY_INLINE void StorePart(const RowGradient<T>& row, const Elements& elements, const PartLine& line) {
  WeighElements(Runs<T>{{.x = row.x, .n = row.n}, true}, elements, row.weights);
  SavedRow soft = row.saved;
  soft.scale = line.soft_scale;
  const BackwardLine& rule = line.line;
  const bool moves = rule.constant != 0 || rule.y_factor != 0 || rule.p_factor != 0 || rule.peak_share != 0;
  moves ? StoreElements<true>(row, elements, line.coupling, soft, rule)
        : StoreElements<false>(row, elements, line.coupling, soft, rule);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_ELEMENTWISE_INL_H_
