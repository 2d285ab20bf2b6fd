// One row of softmax, from logits to weights.
//
//     scan     maximum (count and minimum where someone asks)
//     measure  state at beta = 1, if the rule or the caller wants it; e^y kept where there is room
//     rule     beta from the state, or by search (solve)
//     weigh    beta = 1: scale what was kept. Else: exponentials at beta, their sum, scale.
//
// Limit: one exponential a key for none, fixed, log_length, ssmax without stats; two for rules of the
// entropy and with stats, but one on rows where beta turns out 1. Reads and writes beside that stay in cache
// up to its size.
#if defined(WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
#undef WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
#else
#define WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
#endif

#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/sums.h"
#include "core/target_search.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/row_job.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How close a search comes to its target, which beta still makes a difference, and how far below
// the maximum (in beta y, beyond ln n) keys together are less than rounding.
template <typename T>
struct SearchLimits;
template <>
struct SearchLimits<float> {
  static constexpr double kTolerance = 1e-6, kResolution = 0x1p-23, kReach = 18;
};
template <>
struct SearchLimits<double> {
  static constexpr double kTolerance = 1e-13, kResolution = 0x1p-51, kReach = 40;
};

// Keys are dropped from a search once those that count at kShrinkMargin beta lie within 0.3 of the
// row's spread.
inline constexpr double kShrinkMargin = 0.7;
inline constexpr double kWorthShrinking = 1 / (0.3 * kShrinkMargin);

// A sweep started this close to the goal (in ln f) mostly ends the search.
inline constexpr double kLikelyLast = 0.1;

// A search that found nothing sharp enough after so many sweeps looks whether there can be.
inline constexpr int kSweepsBeforeDoubt = 3;

// beta of a row and the sums there. `weights`: where a sweep left e^(beta y), or null.
template <typename T>
struct Chosen {
  double beta;
  Sums sums;
  const T* weights;
};

// beta for a rule that needs_search(). A sweep that is likely the last leaves its weights in `room` (may be
// null) and is the answer then. At a large beta only keys near the maximum count: they are moved
// together in `room` and swept alone, unless the search comes back to a smaller beta.
template <typename T>
HWY_NOINLINE Chosen<T> Solve(const T* x, std::int64_t n, const RowState& state, const Chosen<T>& at_one,
                             const Rule& rule, T* room) {
  using Limits = SearchLimits<T>;
  const T max = static_cast<T>(state.max);
  core::TargetSearch search(rule, at_one.sums, Limits::kTolerance, Limits::kResolution);
  if (search.done()) return at_one;
  const double reach = std::log(static_cast<double>(state.count)) + Limits::kReach;
  double shrink_above = kWorthShrinking * reach / row_spread(state);
  double least_beta = 0;  // down to which `keys` may stand for the row
  const T* keys = x;
  std::int64_t left = n;
  for (;;) {
    if (search.unbounded() && search.sweeps() == kSweepsBeforeDoubt) {
      const Top<T> top = TopOf(x, n, max);
      if (core::unreachable(rule, top.ties)) {
        const double gap = state.max - static_cast<double>(top.next);
        const double beta = core::hard_beta(state.count, gap);
        return {beta, Measure<1>(x, room, n, max, beta), room};
      }
    }
    const double beta = Exponential<T>::representable(search.proposal());
    if (beta < least_beta) {
      keys = x;
      left = n;
      least_beta = 0;
    }
    if (room != nullptr && beta > shrink_above) {
      least_beta = kShrinkMargin * beta;
      // Beside a huge maximum the difference may round away; the maximum itself always stays.
      const T least =
          std::min(static_cast<T>(state.max - reach / least_beta), std::nextafter(max, kMinusInfinity<T>));
      left = KeepAbove(keys, left, least, room);
      keys = room;
      shrink_above = kWorthShrinking * beta;
    }
    T* weights = keys == x && search.distance() < kLikelyLast ? room : nullptr;
    const Sums sums = Measure<3>(keys, weights, left, max, beta);
    search.absorb(beta, sums);
    if (search.done()) return {beta, sums, weights};
  }
}

// The state of a row at beta = 1. With `room`, e^y stays there.
template <int kMoments, typename T>
HWY_INLINE RowState StateOf(const T* x, std::int64_t n, const Extremes<T>& ends, T* room, const T* next,
                            Sums& sums) {
  sums = Measure<kMoments>(x, room, n, ends.max, 1, next);
  RowState state;
  state.count = ends.count;
  state.z = sums.z;
  state.t = sums.t;
  state.u = sums.u;
  if (std::isnan(sums.z)) {
    state.min = state.max = state.t = state.u = sums.z;
  } else if (sums.z > 0) {
    state.min = static_cast<double>(ends.min);
    state.max = static_cast<double>(ends.max);
  }
  return state;
}

// What a rule must see before it can choose.
inline bool needs_entropy(const Rule& rule) {
  return rule.kind() == Rule::Kind::paper || rule.kind() == Rule::Kind::polynomial || rule.needs_search();
}
inline bool needs_count(const Rule& rule) {
  return rule.kind() == Rule::Kind::log_length || rule.kind() == Rule::Kind::ssmax || rule.needs_search();
}

// Chooses beta for the row x. Sweeps after which x isn't needed any more leave their weights in `out`
// (which may be x, or null), earlier ones in `room` (never x; may be null). `next`: see Sweep. Fills
// `state` as far as the rule needs it; all of it if `full`.
template <typename T>
HWY_INLINE Chosen<T> Choose(const T* x, std::int64_t n, const Rule& rule, bool full, T* out, T* room,
                            const T* next, RowState& state) {
  const Extremes<T> ends = full || needs_count(rule) ? Scan<true>(x, n) : Scan<false>(x, n);
  state.max = static_cast<double>(ends.max);
  if (!full && !needs_entropy(rule)) {
    // beta is known before the first exponential: one sweep does it all.
    state.count = needs_count(rule) ? ends.count : n;
    const double beta = rule.beta(state);
    return {beta, Measure<0>(x, out, n, ends.max, beta, next), out};
  }
  Chosen<T> one{1, {}, nullptr};
  if (rule.needs_search()) {
    T* nowhere = nullptr;
    state = StateOf<4>(x, n, ends, nowhere, next, one.sums);
    if (state.count <= 1 || std::isnan(state.z)) return one;
    return Solve(x, n, state, one, rule, room);
  }
  one.weights = room;
  if (full) {
    state = StateOf<2>(x, n, ends, room, next, one.sums);
  } else {
    state = StateOf<1>(x, n, ends, room, next, one.sums);
    state.count = n;  // an upper bound: entropy 0 then says what a count of 1 would
  }
  const double beta = rule.beta(state);
  if (beta == 1 || std::isnan(beta) || state.z == 0) return one;
  return {beta, full ? Measure<1>(x, out, n, ends.max, beta) : Measure<0>(x, out, n, ends.max, beta), out};
}

// Weights of the row x in `out` (may be x). `state` and the result as in Choose.
template <typename T>
HWY_INLINE Chosen<T> SoftmaxRow(const T* x, std::int64_t n, const Rule& rule, bool full, T* out, T* room,
                                const T* next, RowState& state) {
  const Chosen<T> chosen = Choose(x, n, rule, full, out, room, next, state);
  const double z = chosen.sums.z;
  if (!(z > 0)) {
    std::fill_n(out, n, static_cast<T>(z));  // no visible key: 0; NaN otherwise
  } else if (chosen.weights != nullptr) {
    Scale(chosen.weights, out, n, 1 / z);
  } else {
    Sweep<0, true>(x, out, n, static_cast<T>(state.max), chosen.beta, static_cast<T>(1 / z));
  }
  return chosen;
}

// The visible keys of a row as a contiguous row of T: where they are if that will do, else in
// `buffer`. Sharpening takes their logarithm, in `target` if the row may be written there, measured from
// `offset`.
template <typename T>
HWY_INLINE const T* VisibleRow(const kernels::RowJob& job, const void* in, const std::uint8_t* mask,
                               std::int64_t n, T* target, T* buffer, double& offset) {
  const bool direct = kernels::is_direct(job.in, n) && mask == nullptr;
  if (direct && !job.in_is_probabilities) return static_cast<const T*>(in);
  T* row = direct ? target : buffer;
  if (!direct) LoadRow(in, job.in.dtype, job.in.key_stride, n, row);
  if (mask != nullptr) {
    HideMasked(mask, job.mask.key_stride, n, job.in_is_probabilities ? T(0) : kMinusInfinity<T>, row);
  }
  if (job.in_is_probabilities) {
    offset = std::log(static_cast<double>(LogRow(direct ? static_cast<const T*>(in) : row, n, row)));
  }
  return row;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
