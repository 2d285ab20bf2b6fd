// Attention for a block of rows against all keys of its unit: many queries.
//
//     for each block of rows
//       q        the block's rows, scaled, as T                         read once
//       logits   x = q K^T, panel by panel of packed K                  K comes from L2 or L3 once per block
//       weights  row by row in place (row/row-inl.h)                    x comes from L2
//       out      x V, tile by tile of 256 keys, over its normaliser     V comes from L2 or L3 once per block
//                (sparse-inl.h: over the keys that have weight, where
//                those are few)
//
// Flops: 2 D + 2 E per row and key, and one to two exponentials of 11 operations; tiles whose weights vanish
// cost only the logits. Bytes per row and key in f32: x is written once and read two or three times, 4 each,
// in L2; K and V, 4 (D + E) per key, are shared by all rows of the block. What bounds it are the
// multiply-adds of matmul-inl.h. A block's logits are kept because beta is known only after the whole row has
// been seen.
#if defined(WHET_KERNELS_ATTENTION_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_BLOCK_INL_H_
#undef WHET_KERNELS_ATTENTION_BLOCK_INL_H_
#else
#define WHET_KERNELS_ATTENTION_BLOCK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/attention/dropout-inl.h"
#include "kernels/attention/logits-inl.h"
#include "kernels/attention/pack-inl.h"
#include "kernels/attention/result-inl.h"
#include "kernels/attention/run.h"
#include "kernels/attention/shard-inl.h"
#include "kernels/attention/sparse-inl.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using kernels::Scratch;
using kernels::Shared;

HWY_INLINE KeyRange Union(const KeyRange& a, const KeyRange& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

// A block at work.
template <typename T>
struct Block {
  const AttentionRun& run;
  const Unit& unit;
  const T* keys;               // packed
  const T* values;             // packed; null: they aren't
  const std::uint8_t* unsafe;  // tiles of V
  std::int64_t first_row;
  std::int64_t rows;
  Scratch<T> scratch;
  bool lists;  // products may go over lists of keys
  KeyRange ranges[core::kMaxBlockRows]{};
  KeyRange reach[core::kMaxBlockRows / kStripRows]{};  // of a strip
  double sums[core::kMaxBlockRows]{};                  // of the weights of a row
  bool keep_plain = true;                              // beta of the row before was 1

  std::int64_t strips() const { return (rows + kStripRows - 1) / kStripRows; }
  int strip_rows(std::int64_t strip) const {
    return static_cast<int>(std::min<std::int64_t>(kStripRows, rows - strip * kStripRows));
  }
  T* x(std::int64_t row) const { return scratch.x + row * run.stride; }
  std::uint8_t* live(std::int64_t strip) const { return scratch.live + strip * run.tiles; }
};

// x = q K^T where some row of the strip may look.
template <typename T>
HWY_INLINE void BlockLogits(const Block<T>& block) {
  const std::int64_t size = block.run.job.shape.key_size, columns = PanelColumns<T>();
  KeyRange all;
  for (std::int64_t s = 0; s < block.strips(); ++s) all = Union(all, block.reach[s]);
  for (std::int64_t first = all.begin / columns * columns; first < all.end; first += columns) {
    const Panel<T> panel{block.keys + first * size, columns};
    for (std::int64_t s = 0; s < block.strips(); ++s) {
      if (first >= block.reach[s].end || first + columns <= block.reach[s].begin) continue;
      const std::int64_t row = s * kStripRows;
      Multiply<Into::kReplace>(
          block.strip_rows(s),
          Strip<T>{block.scratch.q + row * block.run.key_size(), block.run.key_size(), 1}, panel, size,
          block.x(row) + first, block.run.stride);
    }
  }
}

// Zeroes what a row doesn't weigh of the tiles that its strip's products will read.
template <typename T>
HWY_INLINE void ZeroUnweighed(T* x, const KeyRange& reach, const KeyRange& range, const std::uint8_t* keep,
                              const std::uint8_t* live) {
  for (std::int64_t begin = reach.begin; begin < reach.end;) {
    const std::int64_t tile = begin / kTileKeys;
    const std::int64_t end = std::min(reach.end, (tile + 1) * kTileKeys);
    if (live[tile] != 0) {
      std::fill(x + begin, x + (keep[tile] != 0 ? std::clamp(range.begin, begin, end) : end), T(0));
      std::fill(x + (keep[tile] != 0 ? std::clamp(range.end, begin, end) : end), x + end, T(0));
    }
    begin = end;
  }
}

// Below the rounding of f64, f64 skips as f32 does below its own.
template <typename T>
HWY_INLINE double SkipEpsilon(const AttentionRun& run) {
  const double given = run.job.options.skip_epsilon;
  return sizeof(T) == sizeof(double) ? std::min(given, 0x1p-53) : given;
}

// Products at x become logits, unless a shard has them already.
template <typename T>
HWY_INLINE void MakeLogits(const Block<T>& block, std::int64_t row, T* x) {
  const std::int64_t unit_row = block.first_row + row;
  if (block.run.has_logits()) {
    LoadLogits(block.run, block.unit, unit_row, block.ranges[row], x);
  } else {
    ShapeLogits(block.run.job, block.unit, unit_row, block.ranges[row], x);
  }
}

// Weights of a row in place, or what a shard wants of it; keep[tile] says which tiles hold any.
template <typename T>
HWY_INLINE void WeighBlockRow(Block<T>& block, std::int64_t row, std::uint8_t* keep) {
  const AttentionRun& run = block.run;
  const std::int64_t unit_row = block.first_row + row, head = block.unit.head(unit_row);
  const std::int64_t index = run.job.row(block.unit.sequence.batch, head, block.unit.query(unit_row));
  const KeyRange range = block.ranges[row];
  T* x = block.x(row);
  MakeLogits(block, row, x);
  if (run.keeps_logits()) KeepLogits(run, block.unit, unit_row, range, static_cast<const T*>(x));
  RowInput<T> input = InputOf(run.job, head, x, range, block.scratch.row);
  RowResult<T> result;
  if (run.pass == Pass::attention) {
    const bool skips = run.job.options.skip_epsilon > 0;
    const RowTiles<T> tiles{range.begin, block.scratch.tile_max, skips ? keep : nullptr, block.unsafe,
                            SkipEpsilon<T>(run)};
    input.keep_plain = block.keep_plain;
    input.tiles = &tiles;
    result = FinishRow(run, block.unit, unit_row, x, range, input, block.scratch.top);
  } else {
    result = ShardRow(run, index, input, x + range.begin);
  }
  block.sums[row] = result.sums.z;
  if (run.job.options.dropout > 0 && run.has_outputs()) {
    Drop(run.job, index, block.unit.sequence.first_key + range.begin, range.size(), x + range.begin);
  }
  block.keep_plain = result.beta == 1;
}

// Weights of a strip in place; live[tile] says which tiles its product with V needs.
template <typename T>
HWY_INLINE void WeighStrip(Block<T>& block, std::int64_t strip) {
  const AttentionRun& run = block.run;
  const int rows = block.strip_rows(strip);
  const KeyRange reach = block.reach[strip];
  std::uint8_t* live = block.live(strip);
  const std::int64_t first_tile = reach.begin / kTileKeys,
                     tiles = reach.empty() ? 0 : (reach.end - 1) / kTileKeys + 1 - first_tile;
  const bool skips = run.job.options.skip_epsilon > 0 && run.pass == Pass::attention;
  std::fill_n(live + first_tile, tiles, std::uint8_t(0));
  for (int r = 0; r < rows; ++r) {
    const std::int64_t row = strip * kStripRows + r;
    const KeyRange range = block.ranges[row];
    std::uint8_t* keep = block.scratch.keep + r * run.tiles;
    std::fill_n(keep + first_tile, tiles, std::uint8_t(0));
    block.sums[row] = 0;
    if (range.empty() && run.pass == Pass::attention) {
      FinishEmptyRow<T>(run, block.unit, block.first_row + row);
      continue;
    }
    // A shard without keys for the row may still hold its sink.
    if (!range.empty()) {
      std::fill(keep + range.begin / kTileKeys, keep + (range.end - 1) / kTileKeys + 1, std::uint8_t(1));
    }
    WeighBlockRow(block, row, keep);
    if (!(block.sums[row] > 0)) std::fill_n(keep + first_tile, tiles, std::uint8_t(0));
    for (std::int64_t t = first_tile; t < first_tile + tiles; ++t) live[t] |= keep[t];
  }
  for (int r = 0; r < rows; ++r) {
    const std::int64_t row = strip * kStripRows + r;
    ZeroUnweighed(block.x(row), reach, block.ranges[row], block.scratch.keep + r * run.tiles, live);
  }
  block.scratch.counts->tiles += tiles;
  if (skips) block.scratch.counts->skipped += std::count(live + first_tile, live + first_tile + tiles, 0);
}

// Keys whose values (or keys, backward) fill half of a first-level cache of 32 KiB, so that all strips of a
// block find them there.
template <typename T>
HWY_INLINE std::int64_t PieceKeys(std::int64_t wide) {
  return std::max<std::int64_t>(8, 16384 / (wide * static_cast<std::int64_t>(sizeof(T))));
}

// Values of keys [from, to) of a tile: the first panel, and how far apart panels lie.
template <typename T>
struct ValuePanels {
  Panel<T> first;
  std::int64_t step;
};

template <typename T>
HWY_INLINE ValuePanels<T> ValuesFrom(const Block<T>& block, std::int64_t from, std::int64_t to) {
  const AttentionRun& run = block.run;
  const std::int64_t wide = run.value_size(), columns = PanelColumns<T>();
  if (block.values == nullptr) {
    return {Rows(run.job.v, block.unit, run.job.shape.value_size, from, to, block.scratch.values, wide),
            columns};
  }
  const std::int64_t tile = from / kTileKeys * kTileKeys;
  return {{block.values + tile * wide + (from - tile) * columns, columns}, columns * kTileKeys};
}

// out = x V over keys [begin, end) of a tile for the rows of a strip, key by key of those that have weight.
// False, and nothing done, if they aren't few. `values`: from key `from` on.
template <typename T>
HWY_NOINLINE bool AddFewKeys(const Block<T>& block, std::int64_t strip, std::int64_t begin, std::int64_t end,
                             const ValuePanels<T>& values, std::int64_t from) {
  const std::int64_t rows = block.strip_rows(strip), first_row = strip * kStripRows;
  std::int64_t total = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    total += CountAbove(static_cast<const T*>(block.x(first_row + r) + begin), end - begin, T(0));
    if (total * core::kForwardListShare > rows * (end - begin)) return false;
  }
  const KeyVectors<T> vectors{values.first.data, values.first.stride, values.step, from};
  const std::int64_t wide = block.run.value_size();
  std::int32_t list[kTileKeys + kListRoom];
  T weights[kTileKeys + kListRoom];
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* x = block.x(first_row + r) + begin;
    const std::int64_t count = ListAbove(x, end - begin, T(0), begin, list, weights);
    AddListed(static_cast<const T*>(weights), list, count, vectors, block.run.job.shape.value_size,
              block.scratch.out + (first_row + r) * wide);
  }
  return true;
}

// out = x V over keys [from, to) of a tile, of which `values` are: strips with few keys of weight key by key,
// the others in pieces whose panel of V (or all of V, where it isn't packed) stays in the first-level cache
// for all.
template <typename T>
HWY_INLINE void TileOutput(const Block<T>& block, std::int64_t from, std::int64_t to) {
  const AttentionRun& run = block.run;
  const std::int64_t size = run.job.shape.value_size, wide = run.value_size(), columns = PanelColumns<T>();
  const std::int64_t tile = from / kTileKeys;
  const bool lists = block.lists && block.unsafe[tile] == 0;
  ValuePanels<T> values{};
  bool done[core::kMaxBlockRows / kStripRows];
  bool all_done = true;
  for (std::int64_t s = 0; s < block.strips(); ++s) {
    const std::int64_t begin = std::max(from, block.reach[s].begin), end = std::min(to, block.reach[s].end);
    done[s] = begin >= end || block.live(s)[tile] == 0;
    if (done[s]) continue;
    if (values.step == 0) values = ValuesFrom(block, from, to);
    if (lists) done[s] = AddFewKeys(block, s, begin, end, values, from);
    all_done = all_done && done[s];
  }
  const std::int64_t piece = PieceKeys<T>(block.values == nullptr ? wide : columns);
  for (; from < to && !all_done;) {
    const std::int64_t next = std::min(to, from + piece);
    for (std::int64_t e = 0; e < size; e += columns) {
      for (std::int64_t s = 0; s < block.strips(); ++s) {
        const std::int64_t begin = std::max(from, block.reach[s].begin),
                           end = std::min(next, block.reach[s].end);
        if (done[s] || begin >= end) continue;
        const T* first = values.first.data + (begin - from) * values.first.stride + e / columns * values.step;
        const std::int64_t row = s * kStripRows;
        Multiply<Into::kContinue>(block.strip_rows(s), Strip<T>{block.x(row) + begin, run.stride, 1},
                                  Panel<T>{first, values.first.stride, size - e}, end - begin,
                                  block.scratch.out + row * wide + e, wide);
      }
    }
    values.first.data += (next - from) * values.first.stride;
    from = next;
  }
}

// out = x V over the tiles that matter.
template <typename T>
HWY_INLINE void BlockOutput(const Block<T>& block) {
  KeyRange all;
  for (std::int64_t s = 0; s < block.strips(); ++s) all = Union(all, block.reach[s]);
  std::fill_n(block.scratch.out, block.rows * block.run.value_size(), T(0));
  for (std::int64_t from = all.begin; from < all.end;) {
    const std::int64_t to = std::min(all.end, (from / kTileKeys + 1) * kTileKeys);
    TileOutput(block, from, to);
    from = to;
  }
}

// A row whose output isn't finite though its weights are: its products again, without the values of
// hidden keys, in the same order.
template <typename T>
HWY_NOINLINE void RepeatVisible(const Block<T>& block, std::int64_t row, T* out) {
  const AttentionRun& run = block.run;
  const std::int64_t size = run.job.shape.key_size, wide = run.value_size(), columns = PanelColumns<T>();
  const KeyRange range = block.ranges[row], reach = block.reach[row / kStripRows];
  T* x = block.scratch.row;
  for (std::int64_t first = range.begin / columns * columns; first < range.end && !run.has_logits();
       first += columns) {
    Multiply<Into::kReplace>(1, Strip<T>{block.scratch.q + row * run.key_size(), run.key_size(), 1},
                             Panel<T>{block.keys + first * size, columns}, size, x + first, run.stride);
  }
  MakeLogits(block, row, x);
  std::fill_n(out, wide, T(0));
  for (std::int64_t begin = reach.begin; begin < reach.end;) {
    const std::int64_t tile = begin / kTileKeys, end = std::min(reach.end, (tile + 1) * kTileKeys);
    if (block.live(row / kStripRows)[tile] != 0) {
      T* values = block.scratch.values;
      LoadVisible(run.job, block.unit, static_cast<const T*>(x), range, begin, end, values, wide);
      for (std::int64_t e = 0; e < run.job.shape.value_size; e += columns) {
        Multiply<Into::kContinue>(1, Strip<T>{block.x(row) + begin, run.stride, 1},
                                  Panel<T>{values + e, wide, run.job.shape.value_size - e}, end - begin,
                                  out + e, wide);
      }
    }
    begin = end;
  }
}

// Rows [first_row, first_row + rows) of unit `index` of the wave.
template <typename T>
HWY_NOINLINE void RunBlock(const AttentionRun& run, std::int64_t index, std::int64_t first_row, int worker) {
  const core::AttentionJob& job = run.job;
  const Unit unit(job, run.first_unit + index);
  const std::int64_t rows = std::min(run.plan.block_rows, unit.rows() - first_row);
  if (rows <= 0) return;
  const Shared<T> shared = kernels::shared_of<T>(run);
  Block<T> block{
      run,
      unit,
      shared.keys + index * kernels::padded(run.max_keys) * job.shape.key_size,
      shared.values == nullptr ? nullptr : shared.values + index * run.tiles * kTileKeys * run.value_size(),
      shared.unsafe + index * run.tiles,
      first_row,
      rows,
      kernels::scratch_of<T>(run, worker),
      run.pass == Pass::attention && job.options.skip_epsilon > 0 &&
          FunctionsOf<T>(job.options.normalizer).is_sparse};
  for (std::int64_t row = 0; row < rows; ++row) {
    block.ranges[row] = unit.range(job, first_row + row);
    KeyRange& reach = block.reach[row / kStripRows];
    reach = row % kStripRows == 0 ? block.ranges[row] : Union(reach, block.ranges[row]);
  }
  if (!run.has_logits()) {
    LoadQueries(job, unit, first_row, first_row + rows, block.scratch.q, run.key_size());
    BlockLogits(block);
  }
  for (std::int64_t s = 0; s < block.strips(); ++s) WeighStrip(block, s);
  if (!run.has_outputs()) return;
  BlockOutput(block);
  for (std::int64_t row = 0; row < rows; ++row) {
    T* out = block.scratch.out + row * run.value_size();
    double z = block.sums[row];
    if (z > 0 && !AllFinite(out, job.shape.value_size)) {
      RepeatVisible(block, row, out);
      if (run.pass == Pass::attention && !AllFinite(out, job.shape.value_size)) {
        // A sum may overflow where the mean doesn't.
        T sums[kMaxHeadSize];
        std::copy_n(out, job.shape.value_size, sums);
        const KeyRange reach = block.reach[row / kStripRows];
        T* weights = block.x(row) + reach.begin;
        Scale(static_cast<const T*>(weights), weights, reach.size(), 1 / z);
        RepeatVisible(block, row, out);
        KeepFinite(static_cast<const T*>(sums), job.shape.value_size, z, out);
        z = 1;
      }
    }
    StoreOutput(run, unit, first_row + row, z, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_BLOCK_INL_H_
