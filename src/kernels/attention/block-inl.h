// Attention for a block of rows against all keys of its unit: many queries.
//
//     q        the block's rows, scaled, as T                         read once
//     logits   x = q K^T, panel by panel of packed K                  K comes from L2 or L3 once a block
//     weights  row by row in place (attention-inl.h)                  x comes from L2
//     out      x V, tile by tile of 256 keys, over its normaliser     V comes from L2 or L3 once a block
//
// Limit: 4 D multiply-adds' flops a row and key at the rate of matmul-inl.h, beside one to two sweeps of
// exponentials. A block's logits are kept because beta is known only after the whole row has been seen.
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

#include "kernels/attention/logits-inl.h"
#include "kernels/attention/result-inl.h"
#include "kernels/attention/run.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using kernels::Scratch;
using kernels::Shared;

// Rows of `grid` can be read where they are, as whole panels.
template <typename T>
HWY_INLINE bool IsPanelled(const core::Grid& grid, std::int64_t size) {
  return grid.dtype == kArithmetic<T> && grid.strides[3] == 1 && size % PanelColumns<T>() == 0;
}

// What the products of a row are multiplied with.
template <typename T>
HWY_INLINE double QueryScale(const core::AttentionJob& job, const Unit& unit, std::int64_t row) {
  if (job.query_scale.data == nullptr) return job.scale;
  const std::byte* at = job.query_scale.at(unit.sequence.batch, unit.head(row), unit.query(row));
  return job.scale * static_cast<double>(Element<T>(job.query_scale, at));
}

// to = rows [begin, end) of the unit, times their scale.
template <typename T>
HWY_INLINE void LoadQueries(const core::AttentionJob& job, const Unit& unit, std::int64_t begin,
                            std::int64_t end, T* to, std::int64_t stride) {
  const std::int64_t size = job.shape.key_size;
  for (std::int64_t row = begin; row < end; ++row, to += stride) {
    const T scale = static_cast<T>(QueryScale<T>(job, unit, row));
    const std::byte* from = job.q.at(unit.sequence.batch, unit.head(row), unit.query(row));
    LoadRow(from, job.q.dtype, job.q.strides[3], size, to);
    for (std::int64_t i = 0; i < size; ++i) to[i] *= scale;
    std::fill(to + size, to + stride, T(0));
  }
}

// to = keys [begin, end) of the unit in a grid (k or v), padded with zeros to `stride`.
template <typename T>
HWY_INLINE void LoadVectors(const core::Grid& grid, const Unit& unit, std::int64_t size, std::int64_t begin,
                            std::int64_t end, T* to, std::int64_t stride) {
  for (std::int64_t key = begin; key < end; ++key, to += stride) {
    const std::byte* from = grid.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
    LoadRow(from, grid.dtype, grid.strides[3], size, to);
    std::fill(to + size, to + stride, T(0));
  }
}

// to[i * columns + r] = rows[r][i] for up to four rows and `size` elements.
template <typename T>
HWY_INLINE void TransposeRows(const T* const* rows, std::int64_t count, std::int64_t size, T* to,
                              std::int64_t columns) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == sizeof(float)) {
    const hn::FixedTag<float, 4> d;
    const hn::RepartitionToWide<decltype(d)> dw;
    for (; count == 4 && i + 4 <= size; i += 4, to += 4 * columns) {
      const auto a = hn::LoadU(d, rows[0] + i), b = hn::LoadU(d, rows[1] + i);
      const auto c = hn::LoadU(d, rows[2] + i), e = hn::LoadU(d, rows[3] + i);
      const auto ab_low = hn::BitCast(dw, hn::InterleaveLower(d, a, b));
      const auto ce_low = hn::BitCast(dw, hn::InterleaveLower(d, c, e));
      const auto ab_high = hn::BitCast(dw, hn::InterleaveUpper(d, a, b));
      const auto ce_high = hn::BitCast(dw, hn::InterleaveUpper(d, c, e));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab_low, ce_low)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab_low, ce_low)), d, to + columns);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab_high, ce_high)), d, to + 2 * columns);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab_high, ce_high)), d, to + 3 * columns);
    }
  }
#endif
  for (; i < size; ++i, to += columns) {
    for (std::int64_t r = 0; r < count; ++r) to[r] = rows[r][i];
  }
}

// Keys [begin, end) of a grid (k, or v in backward) as panels: element (d, key) at
// to[key / C * C * size + d * C + key % C], C = PanelColumns; keys past the end are 0.
template <typename T>
HWY_NOINLINE void PackTransposed(const core::Grid& grid, const Unit& unit, std::int64_t size,
                                 std::int64_t begin, std::int64_t end, T* to) {
  const std::int64_t columns = PanelColumns<T>(), count = std::min<std::int64_t>(4, columns);
  static constexpr T kZeros[kMaxHeadSize] = {};
  T buffer[4][kMaxHeadSize];
  const T* rows[4];
  for (std::int64_t first = begin; first < end; first += columns) {
    for (std::int64_t c = 0; c < columns; c += count) {
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t key = first + c + r;
        rows[r] = key >= unit.keys() ? kZeros
                                     : VectorOf(grid, unit.sequence.batch, unit.key_head,
                                                unit.sequence.first_key + key, size, buffer[r]);
      }
      TransposeRows(rows, count, size, to + first * size + c, columns);
    }
  }
}

// Values of keys [begin, end) of a tile as panels: element (key, e) at
// to[e / C * C * kTileKeys + (key - begin) * C + e % C]; columns past E are 0.
template <typename T>
HWY_NOINLINE void PackValues(const AttentionRun& run, const Unit& unit, std::int64_t begin, std::int64_t end,
                             T* to) {
  const std::int64_t size = run.job.shape.value_size, wide = run.value_size(), columns = PanelColumns<T>();
  T buffer[kMaxHeadSize];
  for (std::int64_t key = begin; key < end; ++key, to += columns) {
    const T* value =
        VectorOf(run.job.v, unit.sequence.batch, unit.key_head, unit.sequence.first_key + key, size, buffer);
    for (std::int64_t e = 0; e < wide; e += columns) {
      const std::int64_t used = std::clamp<std::int64_t>(size - e, 0, columns);
      std::fill(std::copy_n(value + e, used, to + e * kTileKeys), to + e * kTileKeys + columns, T(0));
    }
  }
}

// True if all of v's keys [begin, end) are finite.
template <typename T>
HWY_NOINLINE bool IsFinite(const core::Grid& grid, const Unit& unit, std::int64_t size, std::int64_t begin,
                           std::int64_t end) {
  T buffer[kMaxHeadSize];
  bool finite = true;
  for (std::int64_t key = begin; key < end; ++key) {
    finite &= AllFinite(
        VectorOf(grid, unit.sequence.batch, unit.key_head, unit.sequence.first_key + key, size, buffer),
        size);
  }
  return finite;
}

// Packs tile `tile` of the keys of unit `index` of the wave.
template <typename T>
HWY_INLINE void PackTile(const AttentionRun& run, std::int64_t index, std::int64_t tile) {
  const core::AttentionJob& job = run.job;
  const Unit unit(job, run.first_unit + index);
  const std::int64_t begin = tile * kTileKeys, end = std::min(begin + kTileKeys, unit.keys());
  if (begin >= end) return;
  const Shared<T> shared = kernels::shared_of<T>(run);
  PackTransposed(job.k, unit, job.shape.key_size, begin, end,
                 shared.keys + index * kernels::padded(run.max_keys) * job.shape.key_size);
  if (shared.values != nullptr) {
    PackValues(run, unit, begin, end,
               shared.values + (index * run.tiles + tile) * kTileKeys * run.value_size());
  }
  shared.unsafe[index * run.tiles + tile] =
      job.v.data != nullptr && job.options.skip_epsilon > 0 && run.pass == Pass::attention &&
              !IsFinite<T>(job.v, unit, job.shape.value_size, begin, end)
          ? 1
          : 0;
}

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
  KeyRange ranges[core::kMaxBlockRows]{};
  KeyRange reach[core::kMaxBlockRows / kStripRows]{};  // of a strip
  RowOutcome<T> outcomes[core::kMaxBlockRows]{};
  bool keeps_plain = true;  // as the row before tells

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
      Multiply<false>(block.strip_rows(s),
                      Strip<T>{block.scratch.q + row * block.run.key_size(), block.run.key_size(), 1}, panel,
                      size, block.x(row) + first, block.run.stride);
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
    const std::int64_t row = strip * kStripRows + r, unit_row = block.first_row + row;
    const KeyRange range = block.ranges[row];
    std::uint8_t* keep = block.scratch.keep + r * run.tiles;
    std::fill_n(keep + first_tile, tiles, std::uint8_t(0));
    block.outcomes[row] = {};
    if (range.empty() && run.pass == Pass::attention) {
      FinishEmptyRow(run, block.unit, unit_row);
      continue;
    }
    // A shard without keys for the row may still hold its sink.
    if (!range.empty()) {
      std::fill(keep + range.begin / kTileKeys, keep + (range.end - 1) / kTileKeys + 1, std::uint8_t(1));
    }
    ShapeLogits(run.job, block.unit, unit_row, range, block.x(row));
    const RowTools<T> tools{block.scratch.room, block.scratch.tile_max, skips ? keep : nullptr,
                            block.unsafe,       SkipEpsilon<T>(run),    block.keeps_plain};
    block.outcomes[row] = FinishRow(run, block.unit, unit_row, block.x(row), range, tools, block.scratch.top);
    block.keeps_plain = block.outcomes[row].beta == 1;
    if (!(block.outcomes[row].sums.z > 0)) std::fill_n(keep + first_tile, tiles, std::uint8_t(0));
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

// Rows of k or v from key `key` of the unit on, for products with them: where they are if whole panels lie
// there, else converted in `buffer`.
template <typename T>
HWY_INLINE Panel<T> Rows(const core::Grid& grid, const Unit& unit, std::int64_t size, std::int64_t key,
                         std::int64_t end, T* buffer, std::int64_t wide) {
  if (IsPanelled<T>(grid, size)) {
    const std::byte* at = grid.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
    return {reinterpret_cast<const T*>(at), grid.strides[2]};
  }
  LoadVectors(grid, unit, size, key, end, buffer, wide);
  return {buffer, wide};
}

// Values from key `from` on, up to the end of its tile or to `to`: the first panel, and how far apart panels
// lie.
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

// out = x V over the tiles that matter, in pieces of keys whose panel of V (or all of V, where it isn't
// packed) stays in the first-level cache for all strips.
template <typename T>
HWY_INLINE void BlockOutput(const Block<T>& block) {
  const AttentionRun& run = block.run;
  const std::int64_t size = run.job.shape.value_size, wide = run.value_size(), columns = PanelColumns<T>();
  const std::int64_t piece = PieceKeys<T>(block.values == nullptr ? wide : columns);
  KeyRange all;
  for (std::int64_t s = 0; s < block.strips(); ++s) all = Union(all, block.reach[s]);
  std::fill_n(block.scratch.out, block.rows * wide, T(0));
  for (std::int64_t from = all.begin; from < all.end;) {
    const std::int64_t tile = from / kTileKeys;
    const std::int64_t to = std::min({all.end, (tile + 1) * kTileKeys, from + piece});
    ValuePanels<T> values{};
    for (std::int64_t e = 0; e < size; e += columns) {
      for (std::int64_t s = 0; s < block.strips(); ++s) {
        const std::int64_t begin = std::max(from, block.reach[s].begin),
                           end = std::min(to, block.reach[s].end);
        if (begin >= end || block.live(s)[tile] == 0) continue;
        if (values.step == 0) values = ValuesFrom(block, from, to);
        const T* first = values.first.data + (begin - from) * values.first.stride + e / columns * values.step;
        const std::int64_t row = s * kStripRows;
        Multiply<true>(block.strip_rows(s), Strip<T>{block.x(row) + begin, run.stride, 1},
                       Panel<T>{first, values.first.stride}, end - begin, block.scratch.out + row * wide + e,
                       wide);
      }
    }
    from = to;
  }
}

// A row whose output isn't finite though its weights are: its products again, without the values of
// hidden keys, in the same order.
template <typename T>
HWY_NOINLINE void RepeatWithCare(const Block<T>& block, std::int64_t row, T* out) {
  const AttentionRun& run = block.run;
  const std::int64_t size = run.job.shape.key_size, wide = run.value_size(), columns = PanelColumns<T>();
  const KeyRange range = block.ranges[row], reach = block.reach[row / kStripRows];
  T* x = block.scratch.room;
  for (std::int64_t first = range.begin / columns * columns; first < range.end; first += columns) {
    Multiply<false>(1, Strip<T>{block.scratch.q + row * run.key_size(), run.key_size(), 1},
                    Panel<T>{block.keys + first * size, columns}, size, x + first, run.stride);
  }
  ShapeLogits(run.job, block.unit, block.first_row + row, range, x);
  std::fill_n(out, wide, T(0));
  for (std::int64_t begin = reach.begin; begin < reach.end;) {
    const std::int64_t tile = begin / kTileKeys, end = std::min(reach.end, (tile + 1) * kTileKeys);
    if (block.live(row / kStripRows)[tile] != 0) {
      T* values = block.scratch.values;
      LoadVisible(run.job, block.unit, static_cast<const T*>(x), range, begin, end, values, wide);
      for (std::int64_t e = 0; e < run.job.shape.value_size; e += columns) {
        Multiply<true>(1, Strip<T>{block.x(row) + begin, run.stride, 1}, Panel<T>{values + e, wide},
                       end - begin, out + e, wide);
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
      kernels::scratch_of<T>(run, worker)};
  for (std::int64_t row = 0; row < rows; ++row) {
    block.ranges[row] = unit.range(job, first_row + row);
    KeyRange& reach = block.reach[row / kStripRows];
    reach = row % kStripRows == 0 ? block.ranges[row] : Union(reach, block.ranges[row]);
  }
  LoadQueries(job, unit, first_row, first_row + rows, block.scratch.q, run.key_size());
  BlockLogits(block);
  for (std::int64_t s = 0; s < block.strips(); ++s) WeighStrip(block, s);
  if (run.pass == Pass::states || run.pass == Pass::sums) return;
  BlockOutput(block);
  for (std::int64_t row = 0; row < rows; ++row) {
    T* out = block.scratch.out + row * run.value_size();
    double z = block.outcomes[row].sums.z;
    if (z > 0 && !AllFinite(out, job.shape.value_size)) {
      RepeatWithCare(block, row, out);
      if (run.pass == Pass::attention && !AllFinite(out, job.shape.value_size)) {
        // A sum may overflow where the mean doesn't.
        T sums[kMaxHeadSize];
        std::copy_n(out, job.shape.value_size, sums);
        const KeyRange reach = block.reach[row / kStripRows];
        T* weights = block.x(row) + reach.begin;
        Scale(static_cast<const T*>(weights), weights, reach.size(), 1 / z);
        RepeatWithCare(block, row, out);
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
