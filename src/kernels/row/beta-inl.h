// The inverse temperature of a row: what its rule chooses from the row's state, or by search.
//
//     scan     maximum; count and minimum where someone needs them
//     measure  state at beta = 1, if the rule or the caller needs it; e^y is kept if there is a buffer for it
//     rule     beta from the state, or by a search whose every step is one sweep
//
// Limit: no exponential for none, fixed and the rules of the count, one per key for rules of the entropy and
// for statistics, two to four for a search.
#if defined(WHET_KERNELS_ROW_BETA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_BETA_INL_H_
#undef WHET_KERNELS_ROW_BETA_INL_H_
#else
#define WHET_KERNELS_ROW_BETA_INL_H_
#endif

#include <whet/row.h>
#include <whet/rule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/attention_plan.h"
#include "core/saved_rows.h"
#include "core/sums.h"
#include "core/target_search.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::kTileKeys;

// Tiles of kTileKeys keys: keys that are weighed together or not at all.
template <typename T>
struct RowTiles {
  std::int64_t first_key;  // of the row, counted from the beginning of tile 0
  T* max;                  // scratch: the largest logit of each tile
  std::uint8_t* keep;      // result: 1 where the tile is weighed; null: all are
  const std::uint8_t*
      nonzero;     // 1 where even a weight of 0 matters, since values aren't finite; with keep only
  double epsilon;  // the mass that a dropped tile may have

  // Calls body(tile, begin, end) for the tiles of a row of n keys; keys are counted from the row's first.
  template <class Body>
  HWY_INLINE void ForEach(std::int64_t n, const Body& body) const {
    for (std::int64_t begin = 0; begin < n;) {
      const std::int64_t tile = (first_key + begin) / kTileKeys;
      const std::int64_t end = std::min(n, (tile + 1) * kTileKeys - first_key);
      body(tile, begin, end);
      begin = end;
    }
  }

  template <class Body>
  HWY_INLINE void ForEachFromEnd(std::int64_t n, const Body& body) const {
    for (std::int64_t end = n; end > 0;) {
      const std::int64_t tile = (first_key + end - 1) / kTileKeys;
      const std::int64_t begin = std::max<std::int64_t>(0, tile * kTileKeys - first_key);
      body(tile, begin, end);
      end = begin;
    }
  }
};

// A row to be weighed, and the buffers for it.
template <typename T>
struct RowInput {
  const T* x;               // logits; -inf where a key is hidden
  std::int64_t n;           // keys
  bool sink = false;        // x[n] is the logit of a sink
  double parameter = 0;     // of the normalizer
  T* scratch = nullptr;     // a row for sweeps that may not be the last; never x
  bool keep_plain = true;   // e^y is worth keeping in scratch, since beta = 1 is likely; changes no bit
  const T* next = nullptr;  // a row to fetch into the cache during the first sweep
  T* next_out = nullptr;    // where that row's weights will go, or null
  const RowTiles<T>* tiles = nullptr;  // null: the row is weighed whole

  std::int64_t size() const { return n + (sink ? 1 : 0); }
};

// Groups of a row's keys, one per lane of four vectors, and a bound for buffers: key i belongs to group i
// modulo their number.
template <typename T>
HWY_INLINE std::int64_t Groups() {
  return 4 * static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
}
template <typename T>
inline constexpr std::size_t kMaxGroups = 4 * HWY_MAX_BYTES / sizeof(T);

// What is known of a row once its beta is chosen, and later once it is weighed.
template <typename T>
struct RowResult {
  RowState state{};  // at beta = 1 as far as it was measured; the sink isn't in count and min
  double beta = 1;
  bool measured = false;      // state holds z and t
  bool summed = false;        // sums are those at beta
  Sums sums{};                // z, and t if it was wanted, of the weights before they are normalised
  double threshold = 0;       // below which keys have no weight, as the normalizer measures it
  T top = 0;                  // where y is measured from: the largest logit, the sink's too
  T key_max = 0;              // the largest logit of a key
  double peak = 0;            // the largest weight of a key, before they are normalised
  double entropy = 0;         // of the weights
  std::int64_t support = -1;  // keys that have weight; -1: all visible ones
  double least = -std::numeric_limits<double>::infinity();  // the logit below which keys have none
  const T* weights = nullptr;  // where e^(beta y) of all keys and the sink lies already
  bool divided = false;        // weights are divided by sums.z already
  T* largest = nullptr;        // space for the largest keys of groups, kGroups of them, or null
  bool has_largest = false;    // they are there
};

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

// beta of a search, the sums there, and where e^(beta y) lies, or null.
template <typename T>
struct Found {
  double beta;
  Sums sums;
  const T* weights;
};

// beta by search, for a row whose state and sums at beta = 1 are given. A sweep that is likely the last
// leaves its weights in row.scratch. At a large beta only keys near the maximum count: they are moved
// together there and swept alone, unless the search comes back to a smaller beta.
template <typename T>
HWY_NOINLINE Found<T> SearchBeta(const RowInput<T>& row, const Rule& rule, const RowState& state,
                                 const Sums& at_one) {
  using Limits = SearchLimits<T>;
  const T max = static_cast<T>(state.max);
  const std::int64_t count = state.count + (row.sink ? 1 : 0);
  core::TargetSearch search(rule, at_one, Limits::kTolerance, Limits::kResolution);
  if (search.done()) return {1, at_one, nullptr};
  const double reach = std::log(static_cast<double>(count)) + Limits::kReach;
  double shrink_above = kWorthShrinking * reach / row_spread(state);
  double least_beta = 0;  // down to which `keys` may stand for the row
  const T* keys = row.x;
  std::int64_t left = row.size();
  for (;;) {
    if (search.unbounded() && search.sweeps() == kSweepsBeforeDoubt) {
      const Top<T> top = TopOf(row.x, row.size(), max);
      if (core::unreachable(rule, top.ties)) {
        const double gap = state.max - static_cast<double>(top.next);
        const double beta = core::hard_beta(count, gap);
        return {beta, Measure<1>(row.x, row.scratch, row.size(), max, beta), row.scratch};
      }
    }
    const double beta = Exponential<T>::representable(search.proposal());
    if (beta < least_beta) {
      keys = row.x;
      left = row.size();
      least_beta = 0;
    }
    if (row.scratch != nullptr && beta > shrink_above) {
      least_beta = kShrinkMargin * beta;
      // Beside a huge maximum the difference may round away; the maximum itself always stays.
      const T least =
          std::min(static_cast<T>(state.max - reach / least_beta), std::nextafter(max, kMinusInfinity<T>));
      left = KeepAbove(keys, left, least, row.scratch);
      keys = row.scratch;
      shrink_above = kWorthShrinking * beta;
    }
    T* weights = keys == row.x && search.distance() < kLikelyLast ? row.scratch : nullptr;
    const Sums sums = Measure<3>(keys, weights, left, max, beta);
    search.absorb(beta, sums);
    if (search.done()) return {beta, sums, weights};
  }
}

using core::needs_count;
using core::needs_entropy;

// The maximum of the row's keys and of each of its tiles. kFull: minimum and count too; if not, a row without
// tiles leaves the largest keys of its groups in `largest`, if that isn't null.
template <bool kFull, typename T>
HWY_INLINE Extremes<T> ScanRow(const RowInput<T>& row, T* largest = nullptr) {
  if (row.tiles == nullptr) return Scan<kFull>(row.x, row.n, largest);
  Extremes<T> all{std::numeric_limits<T>::lowest(), -kMinusInfinity<T>, 0};
  row.tiles->ForEach(row.n, [&](std::int64_t tile, std::int64_t begin, std::int64_t end) HWY_ATTR {
    const Extremes<T> ends = Scan<kFull>(row.x + begin, end - begin);
    row.tiles->max[tile] = ends.max;
    all.max = std::max(all.max, ends.max);
    all.min = std::min(all.min, ends.min);
    all.count += ends.count;
  });
  return all;
}

// The state of a row at beta = 1 from one sweep. `weights`: where to leave e^y, or null.
template <int kMoments, typename T>
HWY_INLINE void MeasureState(const RowInput<T>& row, T min, T* weights, RowResult<T>& result) {
  RowState& state = result.state;
  result.sums = Measure<kMoments>(row.x, weights, row.size(), result.top, 1, row.next);
  result.measured = true;
  state.z = result.sums.z;
  state.t = result.sums.t;
  state.u = result.sums.u;
  if (std::isnan(state.z)) {
    state.min = state.max = state.t = state.u = state.z;
  } else {
    state.min = static_cast<double>(min);
  }
}

// The maximum of the row and, if `counts`, its minimum and the number of its visible keys (all keys if not).
template <typename T>
HWY_INLINE void ScanEnds(const RowInput<T>& row, bool counts, RowResult<T>& result, T& min) {
  result.has_largest = !counts && result.largest != nullptr && row.tiles == nullptr;
  const Extremes<T> ends = counts ? ScanRow<true>(row) : ScanRow<false>(row, result.largest);
  result.key_max = result.top = ends.max;
  if (row.sink) {
    const T sink = row.x[row.n];
    result.top = std::isnan(sink) || sink > ends.max ? sink : ends.max;
  }
  result.state.count = counts ? ends.count : row.n;
  result.state.max = static_cast<double>(result.top);
  min = ends.min;
}

// Chooses beta of the row; measures its state as far as the rule needs it, all of it if `full`, and the
// number of visible keys if `counts`. A row without visible keys has a count of 0, or a z of 0 if it was
// measured; one that holds NaN has NaN there.
template <typename T>
HWY_INLINE void ChooseBeta(const RowInput<T>& row, const Rule& rule, bool full, bool counts,
                           RowResult<T>& result) {
  T min = 0;
  ScanEnds(row, counts || full || row.sink || needs_count(rule), result, min);
  if (result.state.count == 0) return;
  if (!full && !needs_entropy(rule)) {
    if (rule.kind() == Rule::Kind::none) return;
    // Not a copy of result.state: reading at once what was just written piece by piece stalls.
    RowState state;
    state.count = result.state.count;
    state.max = result.state.max;
    result.beta = rule.beta(state);
    return;
  }
  T* const plain = row.keep_plain ? row.scratch : nullptr;
  if (rule.needs_search()) {
    MeasureState<4>(row, min, static_cast<T*>(nullptr), result);
  } else if (full) {
    MeasureState<2>(row, min, plain, result);
  } else {
    // Hidden keys count here: entropy 0 says of a row what a count of 1 would.
    MeasureState<1>(row, min, plain, result);
  }
  if (result.state.z == 0) result.state = {};
  if (!(result.state.z > 0)) return;
  if (!rule.needs_search()) {
    result.beta = rule.beta(result.state);
    result.summed = result.beta == 1;
    if (result.summed) result.weights = plain;
  } else {
    if (result.state.count > 1) {
      const Found<T> found = SearchBeta(row, rule, result.state, result.sums);
      result.beta = found.beta;
      result.sums = found.sums;
      result.weights = found.weights;
    }
    result.summed = true;
  }
}

// The state of a row; of its sink alone if no key is visible.
template <typename T>
HWY_INLINE RowState StateOfRow(const RowInput<T>& row) {
  RowResult<T> result;
  T min = 0;
  ScanEnds(row, true, result, min);
  if (result.state.count == 0 && !row.sink) return {};
  MeasureState<2>(row, min, static_cast<T*>(nullptr), result);
  return result.state;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_BETA_INL_H_
