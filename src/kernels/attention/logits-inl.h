// One row of attention between its two matrix products: from <q, k> to logits, beta and weights.
//
//     shape    soft-cap, bias, mask; a sink is put after the last key
//     scan     maximum of every tile of 256 keys, and so of the row
//     measure  state at beta = 1, if the rule or the caller wants it; e^y kept aside
//     rule     beta
//     weigh    e^(beta y) in place, for the tiles that matter
//
// A row lies at x, indexed by key; its keys are [range.begin, range.end), and everything else in x is
// free to use. Sweeps are those of row-inl.h, so accuracy is that of softmax.
//
// A tile doesn't matter to a row if beta (max - tile max) > ln n + ln(1/epsilon): its weights together are
// less than epsilon.
#if defined(WHET_KERNELS_ATTENTION_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_LOGITS_INL_H_
#undef WHET_KERNELS_ATTENTION_LOGITS_INL_H_
#else
#define WHET_KERNELS_ATTENTION_LOGITS_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/attention_plan.h"
#include "kernels/attention/run.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/softmax/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::KeyRange;
using core::kTileKeys;
using kernels::AttentionRun;
using kernels::Unit;

// Element `index` of a side array (bias, sinks, query_scale) in the type of the arithmetic.
template <typename T>
HWY_INLINE T Element(const core::Grid& grid, const std::byte* at) {
  T value;
  LoadRow(at, grid.dtype, 1, 1, &value);
  return value;
}

// A piece of a row of bias.
template <typename T>
HWY_INLINE const T* BiasPiece(const core::Grid& bias, const std::byte* from, std::int64_t n, T* piece) {
  const DType arithmetic = sizeof(T) == sizeof(double) ? DType::f64 : DType::f32;
  if (bias.dtype == arithmetic && bias.strides[3] == 1) return reinterpret_cast<const T*>(from);
  LoadRow(from, bias.dtype, bias.strides[3], n, piece);
  return piece;
}

// cap tanh(v / cap). In float64, since a few units in the last place of f32 would be multiplied by beta.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Capped(D d, V v, double cap) {
  const V capped = hn::Mul(hn::Set(d, cap), hn::Tanh(d, hn::Mul(v, hn::Set(d, 1 / cap))));
  return hn::IfThenElse(hn::Eq(v, v), capped, v);
}

HWY_INLINE void SoftCap(double* x, std::int64_t n, double cap) {
  const hn::ScalableTag<double> d;
  Map(
      d, x, n, [&](hn::Vec<decltype(d)> v) HWY_ATTR { return Capped(d, v, cap); },
      static_cast<const double*>(x));
}

HWY_INLINE void SoftCap(float* x, std::int64_t n, double cap) {
  constexpr std::int64_t kPiece = 256;
  HWY_ALIGN double wide[kPiece];
  for (std::int64_t i = 0; i < n; i += kPiece) {
    const std::int64_t size = std::min(kPiece, n - i);
    for (std::int64_t j = 0; j < size; ++j) wide[j] = static_cast<double>(x[i + j]);
    SoftCap(wide, size, cap);
    for (std::int64_t j = 0; j < size; ++j) x[i + j] = static_cast<float>(wide[j]);
  }
}

// Where the row's piece of bias and mask begins; null if there is none.
HWY_INLINE const std::byte* SideRow(const core::Grid& grid, const Unit& unit, std::int64_t row,
                                    std::int64_t key) {
  return grid.data == nullptr
             ? nullptr
             : grid.at(unit.sequence.batch, unit.head(row), unit.query(row), unit.sequence.first_key + key);
}

// Products become logits; hidden keys become -inf.
template <typename T>
HWY_INLINE void ShapeLogits(const core::AttentionJob& job, const Unit& unit, std::int64_t row,
                            const KeyRange& range, T* x) {
  const std::int64_t n = range.size();
  T* keys = x + range.begin;
  if (job.options.softcap > 0) SoftCap(keys, n, job.options.softcap);
  if (const std::byte* bias = SideRow(job.bias, unit, row, range.begin)) {
    const hn::ScalableTag<T> d;
    using V = hn::Vec<decltype(d)>;
    const V hidden = hn::Set(d, kMinusInfinity<T>);
    HWY_ALIGN T piece[kTileKeys];
    const std::int64_t step = job.bias.strides[3] * core::element_bytes(job.bias.dtype);
    for (std::int64_t i = 0; i < n; i += kTileKeys) {
      const std::int64_t size = std::min(kTileKeys, n - i);
      Map(
          d, keys + i, size,
          // A bias of -inf hides whatever the product is: NaN too.
          [&](V v, V b) HWY_ATTR { return hn::IfThenElse(hn::Eq(b, hidden), hidden, hn::Add(v, b)); },
          static_cast<const T*>(keys + i), BiasPiece(job.bias, bias + i * step, size, piece));
    }
  }
  if (const std::byte* mask = SideRow(job.mask, unit, row, range.begin)) {
    HideMasked(reinterpret_cast<const std::uint8_t*>(mask), job.mask.strides[3], n, kMinusInfinity<T>, keys);
  }
}

// Scan, tile by tile.
template <bool kFull, typename T>
HWY_INLINE Extremes<T> ScanTiles(const T* x, const KeyRange& range, T* tile_max) {
  Extremes<T> all{std::numeric_limits<T>::lowest(), -kMinusInfinity<T>, 0};
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const std::int64_t tile = begin / kTileKeys;
    const std::int64_t end = std::min(range.end, (tile + 1) * kTileKeys);
    const Extremes<T> ends = Scan<kFull>(x + begin, end - begin);
    tile_max[tile] = ends.max;
    all.max = std::max(all.max, ends.max);
    all.min = std::min(all.min, ends.min);
    all.count += ends.count;
    begin = end;
  }
  return all;
}

// What a row came to.
template <typename T>
struct RowOutcome {
  RowState state;  // at beta = 1 as far as it was wanted; the sink isn't in count and min
  double beta = 1;
  Sums sums;      // at beta, of the tiles that were weighed
  T top = 0;      // where y is measured from
  T key_max = 0;  // the largest logit of a key
};

inline RowStats StatsOf(const RowState& state, double beta, const Sums& sums, double key_depth, bool sink) {
  RowStats stats = core::stats_of(state, beta, sums);
  if (sink && state.count > 0 && !std::isnan(state.z)) {
    stats.peak *= std::exp(-key_depth);
    stats.sharp_peak *= std::exp(-beta * key_depth);
  }
  return stats;
}

HWY_INLINE void AddTo(Sums& sums, const Sums& more) {
  sums.z += more.z;
  sums.t += more.t;
}

// e^(beta y) in place of the keys whose tile is kept, and of the sink after them.
template <typename T>
HWY_INLINE Sums Weigh(T* x, const KeyRange& range, bool sink, const std::uint8_t* keep, T top, double beta,
                      bool full) {
  Sums sums;
  const auto sweep = [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    T* keys = x + begin;
    AddTo(sums, full ? Measure<1>(keys, keys, end - begin, top, beta)
                     : Measure<0>(keys, keys, end - begin, top, beta));
  };
  if (keep == nullptr) {
    sweep(range.begin, range.end + (sink ? 1 : 0));
    return sums;
  }
  std::int64_t begin = range.begin;
  for (std::int64_t at = range.begin; at < range.end;) {
    const std::int64_t tile = at / kTileKeys;
    const std::int64_t end = std::min(range.end, (tile + 1) * kTileKeys);
    if (keep[tile] == 0) {
      if (at > begin) sweep(begin, at);
      begin = end;
    }
    at = end;
  }
  if (range.end > begin) sweep(begin, range.end);
  if (sink) sweep(range.end, range.end + 1);
  return sums;
}

// How a row is worked on.
template <typename T>
struct RowTools {
  T* room;  // a row, for sweeps whose result may not be the last
  T* tile_max;
  std::uint8_t* keep;          // null: every tile is weighed
  const std::uint8_t* unsafe;  // a tile that is never dropped
  double epsilon;
  bool keep_plain;  // e^y is worth keeping, since beta = 1 is likely; changes no bit
};

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

// Which tiles a row needs, in keep[tile]. True if it needs all.
template <typename T>
HWY_INLINE bool ChooseTiles(const T* x, const KeyRange& range, const RowTools<T>& tools, T top, double beta) {
  const double depth = std::log(static_cast<double>(range.size() + 1)) - std::log(tools.epsilon);
  bool all = true;
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const std::int64_t tile = begin / kTileKeys, end = std::min(range.end, (tile + 1) * kTileKeys);
    const double below = beta * (static_cast<double>(top) - static_cast<double>(tools.tile_max[tile]));
    const bool drop = below > depth && tools.unsafe[tile] == 0 && !HasNaN(x + begin, end - begin);
    tools.keep[tile] = drop ? 0 : 1;
    all &= !drop;
    begin = end;
  }
  return all;
}

// beta of the row at x, and everything it was chosen from; x stays, but for the sink after its last key.
// `sink`: a logit that takes part, -inf for none. `full`: all of the state is wanted. `plain`: where to
// keep e^y, or null. `kept`: where e^(beta y) of all keys and the sink lies already, or null.
template <typename T>
HWY_INLINE RowOutcome<T> ChooseRow(T* x, const KeyRange& range, T sink, const Rule& rule, bool full,
                                   T* tile_max, T* room, T* plain, const T*& kept) {
  RowOutcome<T> row;
  kept = nullptr;
  const bool sinks = sink != kMinusInfinity<T>;
  const bool counts = full || sinks || needs_count(rule);
  const Extremes<T> ends =
      counts ? ScanTiles<true>(x, range, tile_max) : ScanTiles<false>(x, range, tile_max);
  row.key_max = row.top = ends.max;
  if (counts && ends.count == 0) return row;
  const std::int64_t n = range.size() + (sinks ? 1 : 0);
  const T* keys = x + range.begin;
  if (sinks) {
    x[range.end] = sink;
    row.top = std::isnan(sink) || sink > ends.max ? sink : ends.max;
  }
  RowState& state = row.state;
  state.count = counts ? ends.count : range.size();
  state.max = static_cast<double>(row.top);
  if (!full && !needs_entropy(rule)) {
    row.beta = rule.beta(state);
    return row;
  }

  const Extremes<T> whole{row.top, ends.min, state.count};
  T* const nowhere = nullptr;
  const T* const next = nullptr;
  if (rule.needs_search()) {
    state = StateOf<4>(keys, n, whole, nowhere, next, row.sums);
  } else if (full) {
    state = StateOf<2>(keys, n, whole, plain, next, row.sums);
  } else {
    state = StateOf<1>(keys, n, whole, plain, next, row.sums);
  }
  if (state.z == 0) state = {};
  if (!(state.z > 0)) return row;
  if (!rule.needs_search()) {
    row.beta = rule.beta(state);
    if (row.beta == 1) kept = plain;
  } else if (state.count > 1) {
    RowState all = state;
    all.count += sinks ? 1 : 0;
    const Chosen<T> chosen = Solve(keys, n, all, Chosen<T>{1, row.sums, nullptr}, rule, room);
    row.beta = chosen.beta;
    row.sums = chosen.sums;
    kept = chosen.weights;
  }
  return row;
}

// Logits at x become weights there; `tools.keep` says which tiles were weighed. A row that can't be
// weighed (no visible key, NaN) has a z that isn't positive.
template <typename T>
HWY_NOINLINE RowOutcome<T> WeighRow(T* x, const KeyRange& range, T sink, const Rule& rule, bool full,
                                    const RowTools<T>& tools) {
  const T* kept = nullptr;
  RowOutcome<T> row = ChooseRow(x, range, sink, rule, full, tools.tile_max, tools.room,
                                tools.keep_plain ? tools.room : nullptr, kept);
  const bool sinks = sink != kMinusInfinity<T>;
  const bool measured = full || needs_entropy(rule);
  if (row.state.count == 0 || (measured && !(row.state.z > 0))) return row;
  const bool all =
      tools.keep == nullptr || ChooseTiles(static_cast<const T*>(x), range, tools, row.top, row.beta);
  if (all && kept != nullptr) {
    std::copy_n(kept, range.size() + (sinks ? 1 : 0), x + range.begin);
  } else {
    row.sums = Weigh(x, range, sinks, all ? nullptr : tools.keep, row.top, row.beta, full);
  }
  return row;
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_LOGITS_INL_H_
