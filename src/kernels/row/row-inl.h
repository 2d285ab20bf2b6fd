// The row engine: a row of logits becomes weights, and the gradient of its weights that of its logits.
//
// Everything that weighs rows goes through here: softmax and sharpen, attention with few and many queries,
// shards, and both backward functions. A row passes through these steps:
//
//     beta     scan, measure, rule (beta-inl.h)
//     tiles    which keys can have weight at all, given the row's maximum
//     weigh    weights of those keys, not yet normalised, and their sum
//
// Weights are left unnormalised: the caller divides by sums.z whatever it makes of them, a row of n weights
// or an output of E elements.
//
// A *normalizer* is a struct of static functions, templates on float or double. It says
//
//     kName             its name in every interface
//     kParameter        what may follow the name after a colon, in RowInput::parameter later
//     kUsesBeta         false if scaling all logits changes no weight: then no rule is asked
//     kIsExponential    its weights are e^(beta y): those that the sweeps of ChooseBeta leave behind will do
//     kNeedsCount       its weights depend on the number of visible keys
//     kNeedsScratch     RowInput::scratch makes it faster: without, each step of a search reads the whole row
//     kNeedsLargest     RowResult::largest, if it has them, makes it faster
//     kSavesThreshold   backward needs RowResult::threshold beside beta and the sum
//     kParameterGradient   its parameter has a gradient: ParameterGradient, from what Backward is given
//     kIsSparse         many weights of a row may be exactly 0: attention looks for those that aren't
//     kMergesShards     a shard can be weighed knowing the row's maximum and beta, and has PartSums and
//                       PartBackward: what its gradient needs of all shards, and its gradient once they have
//                       it
//     kSharesThreshold  a threshold of the whole row must be known, too: PowerOf, its weights' power,
//                       PartThresholdSums, by which a search finds it, and WeighAt, in place of Weigh
//     Reach             how far below the maximum (in units of the logit) a key may lie and still have
//     weight;
//                       keys beyond have less than `epsilon` of the row together
//     Weigh             weights of the row's runs of keys, and result.sums.z, which they are divided by; if
//     some
//                       visible keys may have no weight also result.support and result.least, where needed
//     Peak              the largest of them, given that a sink may lie above all keys
//     Least             the smallest logit that may have weight, or gradient while beta stays, given a saved
//                       row; -inf: any may
//     Backward          from a saved row, logits and dL/dw: the weights again, and dL/dx
//
// and is listed in normalizers.cc. Bytes: a row of n logits is read once by the scan, once by each sweep
// and written once; in cache after the first time. What bounds it are exponentials: see beta-inl.h, and one
// more sweep for weighing, but none where ChooseBeta left the weights.
#if defined(WHET_KERNELS_ROW_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_ROW_INL_H_
#undef WHET_KERNELS_ROW_ROW_INL_H_
#else
#define WHET_KERNELS_ROW_ROW_INL_H_
#endif

#include <whet/row.h>
#include <whet/rule.h>
#include <whet/shard.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/rows.h"
#include "core/saved_rows.h"
#include "core/slope.h"
#include "core/sums.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/beta-inl.h"
#include "kernels/row/sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What backward needs of a row beside its logits. The threshold is for normalizers that have one, the last
// three for a beta that moves with the logits; in memory a row has as many of these numbers as
// core::saved_size() says.
struct SavedRow {
  double top = 0;  // where y is measured from
  double beta = 1;
  double scale = 0;       // 1 / what weights are divided by; 0: no visible key; NaN: the row holds NaN
  double threshold = 0;   // RowResult::threshold
  double mean = 0;        // of y under the weights
  double slope = 0;       // dbeta/dH over the sum of e^y
  double plain_mean = 0;  // of y under softmax(x)
};

// ---- Forward ----

template <typename T>
HWY_INLINE bool HasNaN(const T* x, std::int64_t n) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  V sum = hn::Zero(d);
  // 0 for numbers; the maximum would forget a NaN.
  Map(
      d, static_cast<T*>(nullptr), n,
      [&](V v) HWY_ATTR {
        sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(v, v), v));
        return v;
      },
      x);
  const T total = hn::GetLane(hn::SumOfLanes(d, sum));
  return !(total == total);
}

// Which tiles hold keys within `reach` of the top, in tiles.keep. True if all do.
template <typename T>
HWY_INLINE bool ChooseTiles(const RowInput<T>& row, T top, double reach) {
  const RowTiles<T>& tiles = *row.tiles;
  bool all = true;
  tiles.ForEach(row.n, [&](std::int64_t tile, std::int64_t begin, std::int64_t end) HWY_ATTR {
    const double depth = static_cast<double>(top) - static_cast<double>(tiles.max[tile]);
    const bool drop = depth > reach && tiles.nonzero[tile] == 0 && !HasNaN(row.x + begin, end - begin);
    tiles.keep[tile] = drop ? 0 : 1;
    all &= !drop;
  });
  return all;
}

// The runs of keys that are weighed: the whole row, or what lies in tiles that are kept; the sink always.
template <typename T>
struct Runs {
  const RowInput<T>& row;
  bool all;
  bool divide = false;  // weights may be divided by sums.z at once, if the normalizer says so in `divided`

  // Calls body(begin, end) for every run.
  template <class Body>
  HWY_INLINE void ForEach(const Body& body) const {
    if (all) return body(std::int64_t{0}, row.size());
    std::int64_t from = 0;
    row.tiles->ForEach(row.n, [&](std::int64_t tile, std::int64_t begin, std::int64_t end) HWY_ATTR {
      if (row.tiles->keep[tile] != 0) return;
      if (begin > from) body(from, begin);
      from = end;
    });
    if (row.n > from) body(from, row.n);
    if (row.sink) body(row.n, row.n + 1);
  }

  // The same from the last key to the first, in runs that may be shorter.
  template <class Body>
  HWY_INLINE void ForEachFromEnd(const Body& body) const {
    if (all) return body(std::int64_t{0}, row.size());
    if (row.sink) body(row.n, row.n + 1);
    row.tiles->ForEachFromEnd(row.n, [&](std::int64_t tile, std::int64_t begin, std::int64_t end) HWY_ATTR {
      if (row.tiles->keep[tile] != 0) body(begin, end);
    });
  }
};

// The rule that is asked.
template <class Normalizer>
HWY_INLINE const Rule& RuleFor(const Rule& rule) {
  static constexpr Rule kNone{};
  return Normalizer::kUsesBeta ? rule : kNone;
}

// What will be asked of a row once it is weighed: StatsOf, Saved.
struct Wanted {
  bool stats = false;
  bool saved = false;

  // Whether the mean of y under the weights is part of it.
  bool mean(const Rule& rule) const { return stats || (saved && needs_entropy(rule)); }
};

// What Weigh finds beside the weights and sums.z: sums.t; support and least, before `out` takes the place of
// the logits.
struct Needs {
  bool mean = false;
  bool support = false;
};

// How many keys of the runs count(d, x) finds in vectors x of logits. The sink isn't one of them.
template <typename T, class Count>
HWY_INLINE std::int64_t CountKeys(const Runs<T>& runs, const Count& count) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  std::size_t keys = 0;
  runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    Map(
        d, static_cast<T*>(nullptr), std::min(end, runs.row.n) - begin,
        [&](V x) HWY_ATTR {
          keys += count(d, x);
          return x;
        },
        runs.row.x + begin);
  });
  return static_cast<std::int64_t>(keys);
}

// ChooseBeta compiled once for all normalizers but softmax, where a call per row shows in short ones.
template <typename T>
HWY_NOINLINE void ChooseBetaApart(const RowInput<T>& row, const Rule& rule, bool full, bool counts,
                                  RowResult<T>& result) {
  ChooseBeta(row, rule, full, counts, result);
}

template <class Normalizer, typename T>
HWY_INLINE void ChooseBetaFor(const RowInput<T>& row, const Rule& rule, Wanted wanted, RowResult<T>& result) {
  const bool counts = wanted.saved || Normalizer::kNeedsCount;
  if constexpr (Normalizer::kIsExponential) {
    ChooseBeta(row, rule, wanted.stats, counts, result);
  } else {
    ChooseBetaApart(row, rule, wanted.stats, counts, result);
  }
}

// Weigh of a normalizer, compiled once for all that call it, but for softmax, whose short rows would feel the
// call.
template <class Normalizer, typename T>
HWY_NOINLINE void WeighApart(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                             RowResult<T>& result) {
  Normalizer::Weigh(runs, needs, out, next, result);
}

template <class Normalizer, typename T>
HWY_INLINE void WeighKeys(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                          RowResult<T>& result) {
  if constexpr (Normalizer::kIsExponential) {
    Normalizer::Weigh(runs, needs, out, next, result);
  } else {
    WeighApart<Normalizer>(runs, needs, out, next, result);
  }
}

// False for a row without visible keys, whose sums.z stays 0, and for one that holds NaN, where it is NaN.
template <typename T>
HWY_INLINE bool CanBeWeighed(const RowResult<T>& result) {
  return result.state.count > 0 && (!result.measured || result.state.z > 0);
}

// The entropy of the weights that lie in `out`, as shares of their sum.
template <typename T>
HWY_NOINLINE double WeightEntropy(const Runs<T>& runs, const T* out) {
  double sum = 0, log_sum = 0;
  runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto weight = static_cast<double>(out[i]);
      if (weight == 0) continue;
      sum += weight;
      log_sum += weight * std::log(weight);
    }
  });
  if (sum == 0) return 0;
  const double entropy = std::log(sum) - log_sum / sum;
  return entropy < 0 ? 0 : entropy;  // keeps NaN
}

// What statistics say of the weights: the largest of a key, and their entropy. `out`: where they are.
template <class Normalizer, typename T>
HWY_INLINE void SharpStats(const Runs<T>& runs, const T* out, RowResult<T>& result) {
  result.peak = Normalizer::Peak(runs.row, result);
  if (Normalizer::kIsExponential) {
    result.entropy = core::entropy_of(result.sums, result.beta);
  } else {
    result.entropy = result.sums.z > 0 ? WeightEntropy(runs, out) : result.sums.z;
  }
}

// Drops the tiles whose keys are all below `least`: their weights are 0.
template <typename T>
HWY_INLINE void DropTilesBelow(const RowInput<T>& row, double least) {
  const RowTiles<T>& tiles = *row.tiles;
  tiles.ForEach(row.n, [&](std::int64_t tile, std::int64_t /*begin*/, std::int64_t /*end*/) {
    if (static_cast<double>(tiles.max[tile]) < least && tiles.nonzero[tile] == 0) tiles.keep[tile] = 0;
  });
}

// Weights of the row in `out` (which may be row.x), not normalised. A row that can't be weighed has a sums.z
// that isn't positive, and nothing is written.
template <class Normalizer, typename T>
HWY_NOINLINE RowResult<T> WeighRow(const RowInput<T>& row, const Rule& rule, Wanted wanted, T* out) {
  RowResult<T> result;
  const Rule& asked = RuleFor<Normalizer>(rule);
  // The gradient of a row of one key is exactly 0, since its beta is 1: where it is saved, keys are counted.
  ChooseBetaFor<Normalizer>(row, asked, wanted, result);
  if (!CanBeWeighed(result)) return result;
  bool all = true;
  if (row.tiles != nullptr && row.tiles->keep != nullptr) {
    all = ChooseTiles(row, result.top, Normalizer::Reach(row, result, row.tiles->epsilon));
  }
  const Runs<T> runs{row, all};
  if (Normalizer::kIsExponential && all && result.weights != nullptr) {
    std::copy_n(result.weights, row.size(), out);
  } else {
    WeighKeys<Normalizer>(runs, {wanted.mean(asked), wanted.stats}, out, result.measured ? nullptr : row.next,
                          result);
  }
  if (wanted.stats) SharpStats<Normalizer>(runs, out, result);
  if (Normalizer::kIsSparse && row.tiles != nullptr && row.tiles->keep != nullptr && result.sums.z > 0) {
    const SavedRow weighed{
        .top = static_cast<double>(result.top), .beta = result.beta, .threshold = result.threshold};
    DropTilesBelow(row, Normalizer::template Least<T>(row.parameter, weighed));
  }
  return result;
}

// The same for a row without tiles, with normalised weights: 0 in a row without visible keys, NaN in one that
// holds NaN.
template <class Normalizer, typename T>
HWY_INLINE void NormaliseRow(const RowInput<T>& row, const Rule& rule, Wanted wanted, T* out,
                             RowResult<T>& result) {
  const Rule& asked = RuleFor<Normalizer>(rule);
  HWY_ALIGN T largest[Normalizer::kNeedsLargest ? kMaxGroups<T> : 1];
  if (Normalizer::kNeedsLargest) result.largest = largest;
  ChooseBetaFor<Normalizer>(row, asked, wanted, result);
  const bool summed = Normalizer::kIsExponential && result.summed;
  if (CanBeWeighed(result) && !summed) {
    WeighKeys<Normalizer>(Runs<T>{row, true, true}, {wanted.mean(asked), wanted.stats}, out,
                          result.measured ? nullptr : row.next, result);
    result.weights = out;
  }
  if (wanted.stats) SharpStats<Normalizer>(Runs<T>{row, true}, out, result);
  const double z = result.sums.z;
  if (!(z > 0)) {
    std::fill_n(out, row.size(), static_cast<T>(z));
  } else if (result.divided) {
    return;
  } else if (result.weights != nullptr) {
    Scale(result.weights, out, row.size(), 1 / z);
  } else {
    Sweep<0, true>(row.x, out, row.size(), result.top, result.beta, static_cast<T>(1 / z));
  }
}

// Weights of a row whose largest logit, beta and threshold are known from elsewhere, since it is part of a
// longer one. `top` is scale.max.
template <class Normalizer, typename T>
HWY_NOINLINE Sums WeighPart(const RowInput<T>& row, T top, const RowScale& scale, T* out) {
  RowResult<T> result{.beta = scale.beta, .top = top, .key_max = top};
  if constexpr (Normalizer::kSharesThreshold) {
    Normalizer::WeighAt(Runs<T>{row, true}, scale.tau, out, result);
  } else {
    WeighKeys<Normalizer>(Runs<T>{row, true}, {}, out, static_cast<const T*>(nullptr), result);
  }
  return result.sums;
}

// What the search of such a threshold needs of a part.
template <class Normalizer, typename T>
HWY_NOINLINE ThresholdSums ThresholdPart(const RowInput<T>& row, T top, const RowScale& scale) {
  if constexpr (Normalizer::kSharesThreshold) {
    return Normalizer::PartThresholdSums(row, top, scale.beta, scale.tau);
  } else {
    return {};
  }
}

// The statistics of a row that was weighed. The sink isn't a key, so its weight isn't the peak.
template <typename T>
HWY_INLINE RowStats StatsOf(const RowInput<T>& row, const RowResult<T>& result) {
  RowStats stats = core::stats_of(result.state, result.beta, result.sums);
  if (!CanBeWeighed(result)) return stats;
  stats.sharp_entropy = result.entropy;
  stats.sharp_peak = result.sums.z == 0 ? 0 : result.peak / result.sums.z;
  if (result.support >= 0) stats.support = static_cast<double>(result.support);
  stats.threshold = result.least;
  if (row.sink) {
    stats.peak *= std::exp(static_cast<double>(result.key_max) - static_cast<double>(result.top));
  }
  return stats;
}

// ---- Backward ----

// In memory: without the threshold if the normalizer has none.
template <typename T>
HWY_INLINE void StoreSaved(const SavedRow& saved, bool with_threshold, const core::SavedRows& rows,
                           std::int64_t row) {
  const double numbers[] = {saved.top,  saved.beta,  saved.scale,     saved.threshold,
                            saved.mean, saved.slope, saved.plain_mean};
  T* const to = rows.row<T>(row);
  for (std::int64_t i = 0; i < rows.size; ++i) {
    to[i] = static_cast<T>(numbers[with_threshold || i < 3 ? i : i + 1]);
  }
}

template <typename T>
HWY_INLINE SavedRow LoadSaved(const core::SavedRows& rows, bool with_threshold, std::int64_t row) {
  double numbers[8] = {};
  const T* const from = rows.row<const T>(row);
  for (std::int64_t i = 0; i < rows.size; ++i) {
    numbers[with_threshold || i < 3 ? i : i + 1] = static_cast<double>(from[i]);
  }
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]};
}

template <typename T>
HWY_INLINE SavedRow Saved(const RowResult<T>& result, const Rule& rule) {
  SavedRow saved;
  if (std::isnan(result.sums.z)) saved.scale = result.sums.z;
  if (!(result.sums.z > 0)) return saved;
  saved.top = static_cast<double>(result.top);
  saved.beta = result.beta;
  saved.scale = 1 / result.sums.z;
  saved.threshold = result.threshold;
  if (!needs_entropy(rule) || !result.measured) return saved;
  saved.mean = result.sums.t / result.sums.z;
  if (rule.needs_search()) return saved;
  saved.slope = rule.slope(result.state) / result.state.z;
  saved.plain_mean = result.state.t / result.state.z;
  return saved;
}

// The saved row of a row that wasn't saved: what forward would have found.
template <class Normalizer, typename T>
HWY_NOINLINE SavedRow SaveRow(const RowInput<T>& row, const Rule& rule) {
  // The gradient of a row of one key is exactly 0, since its beta is 1: keys are counted.
  RowResult<T> result;
  ChooseBetaApart(row, RuleFor<Normalizer>(rule), false, true, result);
  if (CanBeWeighed(result) && !(Normalizer::kIsExponential && result.summed)) {
    WeighKeys<Normalizer>(Runs<T>{row, true}, {.mean = needs_entropy(rule)}, static_cast<T*>(nullptr),
                          static_cast<const T*>(nullptr), result);
  }
  return Saved(result, RuleFor<Normalizer>(rule));
}

// A row on its way back. The sink, if any, is one more key at the end.
template <typename T>
struct RowGradient {
  const T* x;  // logits; -inf where a key is hidden
  std::int64_t n;
  double parameter;  // of the normalizer
  SavedRow saved;
  const std::byte* dout;  // dL/dw
  std::byte* din;         // dL/dx; may be dout
  const core::RowArray& dout_array;
  const core::RowArray& din_array;
  T* weights = nullptr;  // if not null: where the weights are left, not normalised
};

// The gradient of a row that holds NaN is NaN for its visible keys.
template <typename T>
HWY_NOINLINE void BreakGradient(const RowGradient<T>& row) {
  constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
  const std::int64_t step = row.din_array.key_stride * core::element_bytes(row.din_array.dtype);
  T block[kBlock];
  for (std::int64_t i = 0; i < row.n; i += kBlock) {
    const std::int64_t size = std::min(kBlock, row.n - i);
    for (std::int64_t j = 0; j < size; ++j) block[j] = row.x[i + j] == kMinusInfinity<T> ? T(0) : kNaN;
    if (row.weights != nullptr) std::copy_n(block, size, row.weights + i);
    StoreRow(static_cast<const T*>(block), row.din_array.dtype, row.din_array.key_stride, size,
             row.din + i * step);
  }
}

// dL/dparameter of a row with visible keys. Before BackwardRow, which may overwrite dL/dw.
template <class Normalizer, typename T>
HWY_NOINLINE double ParameterGradient(const RowGradient<T>& row) {
  if (std::isnan(row.saved.scale)) return row.saved.scale;
  if constexpr (Normalizer::kParameterGradient) {
    return Normalizer::ParameterGradient(row);
  } else {
    return 0;
  }
}

using core::BackwardLine;
using core::BackwardSums;

// What the gradient of a row needs of each of its parts.
struct PartSums {
  BackwardSums sums;
  std::int64_t ties = 0;  // keys at the maximum
  double w = 0;           // the sum of w, and those of softmax at beta, if the normalizer has a threshold
  Sums soft{};
};

// What the gradient of a part needs of the whole: the line of softmax; with a threshold, C of
// elementwise-inl.h, and a line that is what its rule adds, whose w are softmax.
struct PartLine {
  BackwardLine line{};
  double coupling = 0;
  double soft_scale = 0;  // of that softmax
};

template <class Normalizer, typename T>
HWY_NOINLINE PartSums SumsOfPart(const RowGradient<T>& row) {
  if constexpr (Normalizer::kMergesShards) {
    if (!std::isnan(row.saved.scale)) return Normalizer::PartSums(row);
  }
  return {.sums = {.wg = std::numeric_limits<double>::quiet_NaN()}};
}

template <class Normalizer, typename T>
HWY_NOINLINE void BackwardPart(const RowGradient<T>& row, const PartLine& line) {
  if (std::isnan(row.saved.scale)) return BreakGradient(row);
  if constexpr (Normalizer::kMergesShards) Normalizer::PartBackward(row, line);
}

// Whether the row's beta follows its logits. At beta = 1 every rule that could is on the constant side of its
// kink.
HWY_INLINE bool BetaMoves(const SavedRow& saved, const Rule& rule, bool through_rule) {
  return through_rule && needs_entropy(rule) && saved.beta != 1;
}

template <class Normalizer, typename T>
HWY_NOINLINE void BackwardRow(const RowGradient<T>& row, const Rule& rule, bool through_rule) {
  if (std::isnan(row.saved.scale)) return BreakGradient(row);
  Normalizer::Backward(row, rule, BetaMoves(row.saved, rule, through_rule));
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_ROW_INL_H_
