// The gradient of attention, for a part of a unit's rows, block by block. x are logits, w weights, g = dL/dw
// and dx = dL/dx of a block, rows by keys; each line of backward is the derivative of the line of forward
// beside it:
//
//     for each block of rows
//       x   = q K^T           as forward: logits are computed again, not kept
//       keys that count       of each row: those that can have weight or gradient (Least in row/row-inl.h)
//       g   = dout V^T        of  out = w V                 with respect to w
//       dx                    of  w = normalizer(beta x)    with respect to x: row by row (BackwardRow in
//                             row/row-inl.h); then x becomes w, and g becomes dx
//       dq  = dx K            of  x = q K^T                 with respect to q; scaled as q was
//       dquery_scale          of  x = scale query_scale <q, k> with respect to query_scale: scale <dx K, q>
//       dv += w^T dout        of  out = w V                 with respect to V
//       dk += dx^T q          of  x = q K^T                 with respect to K
//     add the parts of the unit, in order; store dk and dv
//
// Flops: 6 D + 4 E per row and key, five products where forward has two; and two exponentials per key. Bytes:
// K and V are packed once per part, and the panels read once per block, from L2 or L3; x and g, 8 bytes per
// row and key in f32, stay in L2. dk and dv are summed over a block in registers and then in memory, 4 (D +
// E) bytes read and as many written per key and block of f32, so a block must have enough rows to pay for
// that (core/attention_plan.h). What bounds it are the multiply-adds of matmul-inl.h.
//
// Where weight and gradient of most keys are exactly 0, as those of sparse normalizers are unless beta
// follows the logits, only the first product is computed whole. A row of which fewer than one key in
// kBackwardListShare counts takes the others key by key (sparse-inl.h), all rows of a block within a piece of
// keys before the next, since what bounds it then is how often K, V, dk and dv come from L2 or L3. Of the
// other rows' products, tiles in which no row of a strip has a key that counts are skipped. Which way a row
// goes depends on that row alone, and skipping tiles changes no bit.
//
// 0 times NaN must not happen where a key is hidden: units with anything that isn't finite in q, k, v or
// dout take their sums key by key (VisibleProducts).
#if defined(WHET_KERNELS_ATTENTION_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_BACKWARD_INL_H_
#undef WHET_KERNELS_ATTENTION_BACKWARD_INL_H_
#else
#define WHET_KERNELS_ATTENTION_BACKWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/attention/backward_run.h"
#include "kernels/attention/block-inl.h"
#include "kernels/attention/dropout-inl.h"
#include "kernels/attention/few-inl.h"
#include "kernels/attention/logits-inl.h"
#include "kernels/attention/result-inl.h"
#include "kernels/attention/shard_backward-inl.h"
#include "kernels/attention/sparse-inl.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/normalizers-inl.h"
#include "kernels/row/normalizers.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using kernels::BackwardPass;
using kernels::BackwardRun;
using kernels::BackwardScratch;

// How a row of a block takes part in its products.
enum class RowKind : std::uint8_t {
  kEmpty,   // no visible key, no gradient
  kListed,  // key by key, done before the others
  kDense
};

template <typename T>
struct BackwardBlock {
  const BackwardRun& run;
  const Unit& unit;
  const BackwardScratch<T>& scratch;
  std::int64_t first_row;
  std::int64_t rows;
  bool nonfinite;  // something of the unit isn't finite
  KeyRange ranges[core::kMaxBlockRows]{};
  KeyRange reach{};  // of all rows
  SavedRow saved[core::kMaxBlockRows]{};
  RowKind kinds[core::kMaxBlockRows]{};        // kEmpty beyond the last row
  std::int64_t counts[core::kMaxBlockRows]{};  // of listed keys

  T* x(std::int64_t row) const { return scratch.x + row * run.stride; }
  T* g(std::int64_t row) const { return scratch.g + row * run.stride; }
  T* cap_slopes(std::int64_t row) const {
    return run.job.options.softcap > 0 ? scratch.cap_slopes + row * run.stride : nullptr;
  }
  std::int32_t* list(std::int64_t row) const { return scratch.list + row * run.list_size(); }
  std::int64_t index(std::int64_t row) const {  // in the order of attention.h
    const std::int64_t unit_row = first_row + row;
    return run.job.row(unit.sequence.batch, unit.head(unit_row), unit.query(unit_row));
  }
  std::int64_t strips() const { return (rows + kStripRows - 1) / kStripRows; }
  int strip_rows(std::int64_t strip) const {
    return static_cast<int>(std::min<std::int64_t>(kStripRows, rows - strip * kStripRows));
  }
  std::uint8_t* live(std::int64_t strip) const { return scratch.live + strip * run.tiles; }
  bool is_live(std::int64_t tile) const {
    for (std::int64_t s = 0; s < strips(); ++s) {
      if (live(s)[tile] != 0) return true;
    }
    return false;
  }
};

// to = a B for all rows of the block, where B is packed and transposed; of live tiles alone if `live_only`.
template <typename T>
HWY_INLINE void BlockProduct(const BackwardBlock<T>& block, const T* a, std::int64_t a_stride,
                             const T* packed, std::int64_t size, bool live_only, T* to) {
  const std::int64_t columns = PanelColumns<T>();
  static_assert(kTileKeys % kMaxPanelColumns == 0);  // a panel lies in one tile
  const KeyRange& reach = block.reach;
  for (std::int64_t first = reach.begin / columns * columns; first < reach.end; first += columns) {
    for (std::int64_t s = 0; s < block.strips(); ++s) {
      if (live_only && block.live(s)[first / kTileKeys] == 0) continue;
      const std::int64_t row = s * kStripRows;
      Multiply<Into::kReplace>(block.strip_rows(s), Strip<T>{a + row * a_stride, a_stride, 1},
                               Panel<T>{packed + first * size, columns}, size,
                               to + row * block.run.stride + first, block.run.stride);
    }
  }
}

// What the gradient of a row is made of: as it was saved, found again, or, for a shard, given.
template <typename T>
HWY_INLINE SavedRow SavedOf(const BackwardRun& run, std::int64_t row, const RowInput<T>& input,
                            const Rule& rule) {
  if (run.pass != BackwardPass::attention) return GivenRow(run, row);
  const RowFunctions<T>& functions = FunctionsOf<T>(run.job.options.normalizer);
  return run.reads_saved ? LoadSaved<T>(run.job.saved, functions.saves_threshold, row)
                         : functions.save(input, rule);
}

// dbias of a row: the dx of n keys, added in the place the bias has. They are those of `list`, or, if that is
// null, follow on `first`.
template <typename T>
HWY_INLINE void AddBias(const BackwardRun& run, const Unit& unit, std::int64_t unit_row, const T* dx,
                        const std::int32_t* list, std::int64_t first, std::int64_t n) {
  const std::int64_t batch = unit.sequence.batch, head = unit.head(unit_row), query = unit.query(unit_row);
  const core::Grid& dbias = run.bias_sums;
  T* to = reinterpret_cast<T*>(dbias.at(batch, head, query, unit.sequence.first_key));
  for (std::int64_t i = 0; i < n; ++i)
    to[(list == nullptr ? first + i : list[i]) * dbias.strides[3]] += dx[i];
}

// Where not everything is finite, a weight of this says that the key is hidden from the row.
template <typename T>
inline constexpr T kHidden = T(-1);

// The logits of a row for the row engine.
template <typename T>
HWY_INLINE RowInput<T> BackwardInput(const BackwardBlock<T>& block, std::int64_t row) {
  const KeyRange range = block.ranges[row];
  RowInput<T> input = InputOf(block.run.job, block.unit.head(block.first_row + row), block.x(row), range,
                              block.scratch.weights + range.begin);
  if (block.run.pass != BackwardPass::attention) input.sink = false;  // AddPartOfSink
  return input;
}

// The row engine's gradient of n keys, one after the other: x and g become weights and dx.
template <typename T>
HWY_INLINE void GradientOf(const BackwardBlock<T>& block, std::int64_t row, const T* x, std::int64_t n, T* g,
                           T* weights) {
  const core::AttentionJob& job = block.run.job;
  core::RowArray line;
  line.dtype = kArithmetic<T>;
  line.key_stride = 1;
  auto* gradient = reinterpret_cast<std::byte*>(g);
  const RowFunctions<T>& functions = FunctionsOf<T>(job.options.normalizer);
  const RowGradient<T> keys{
      x, n, job.options.normalizer.parameter(), block.saved[row], gradient, gradient, line, line, weights};
  if (block.run.pass != BackwardPass::attention) return GradientOfPart(block.run, block.index(row), keys);
  if (!job.dparameter.empty()) {
    job.dparameter[static_cast<std::size_t>(block.index(row))] = functions.parameter_gradient(keys);
  }
  functions.backward(keys, job.rule(block.unit.head(block.first_row + row)), job.through_rule);
}

template <typename T>
HWY_INLINE void AddSink(const BackwardBlock<T>& block, std::int64_t row, T dx) {
  const std::int64_t head = block.unit.head(block.first_row + row);
  block.scratch.dsinks[head - block.unit.key_head * block.unit.group] += static_cast<double>(dx);
}

// What the sink of a row adds to the sums of a shard, which begin here, or its own gradient.
template <typename T>
HWY_INLINE void AddPartOfSink(const BackwardBlock<T>& block, std::int64_t row) {
  const BackwardRun& run = block.run;
  const auto index = static_cast<std::size_t>(block.index(row));
  // The weights of one without beta have no gradient.
  const core::NormalizerEntry& entry = kernels::entry_of(run.job.options.normalizer);
  const double power =
      entry.threshold_power == nullptr ? 0 : entry.threshold_power(run.job.options.normalizer.parameter());
  const auto sink = static_cast<double>(
      entry.uses_beta ? SinkOf<T>(run.job, block.unit.head(block.first_row + row)) : kMinusInfinity<T>);
  if (run.pass == BackwardPass::sums) {
    run.sums[index] = SumsOfSink(sink, run.weighed[index], power);
  } else {
    AddSink(block, row, static_cast<T>(GradientOfSink(sink, run.slopes[index], power)));
  }
}

// Which keys of a row can have weight or gradient: if few, they are listed and their logits moved together,
// the sink's after them; if not, the tiles that hold any become live for the row's strip.
template <typename T>
HWY_INLINE RowKind ChooseRowKeys(BackwardBlock<T>& block, std::int64_t row) {
  const core::AttentionJob& job = block.run.job;
  const RowFunctions<T>& functions = FunctionsOf<T>(job.options.normalizer);
  const KeyRange range = block.ranges[row];
  const SavedRow& saved = block.saved[row];
  std::uint8_t* live = block.live(row / kStripRows);
  const std::int64_t first_tile = range.begin / kTileKeys, end_tile = (range.end - 1) / kTileKeys + 1;
  const Rule& rule = job.rule(block.unit.head(block.first_row + row));
  const double least = block.nonfinite || std::isnan(saved.scale) || job.options.skip_epsilon == 0 ||
                               block.run.pass != BackwardPass::attention ||
                               BetaMoves(saved, rule, job.through_rule)
                           ? -std::numeric_limits<double>::infinity()
                           : functions.least(job.options.normalizer.parameter(), saved);
  if (!(least > -std::numeric_limits<double>::infinity())) {
    std::fill(live + first_tile, live + end_tile, std::uint8_t(1));
    return RowKind::kDense;
  }
  const T below = std::nextafter(static_cast<T>(least), kMinusInfinity<T>);
  T* x = block.x(row);
  std::int64_t total = 0;
  for (std::int64_t tile = first_tile; tile < end_tile; ++tile) {
    const std::int64_t begin = std::max(range.begin, tile * kTileKeys),
                       end = std::min(range.end, (tile + 1) * kTileKeys);
    block.scratch.tile_keys[tile] = CountAbove(static_cast<const T*>(x + begin), end - begin, below);
    total += block.scratch.tile_keys[tile];
  }
  if (total * core::kBackwardListShare <= range.size()) {
    const T sink = x[range.end];
    block.counts[row] = ListAbove(static_cast<const T*>(x + range.begin), range.size(), below, range.begin,
                                  block.list(row), x);
    x[total] = sink;
    return RowKind::kListed;
  }
  for (std::int64_t tile = first_tile; tile < end_tile; ++tile) {
    if (block.scratch.tile_keys[tile] > 0) live[tile] = 1;
  }
  return RowKind::kDense;
}

// Products become logits, row by row, and the keys that count are found.
template <typename T>
HWY_INLINE void ChooseKeys(BackwardBlock<T>& block) {
  const BackwardRun& run = block.run;
  std::fill_n(block.scratch.live, block.strips() * run.tiles, std::uint8_t(0));
  for (std::int64_t row = 0; row < block.rows; ++row) {
    block.kinds[row] = RowKind::kEmpty;
    if (run.pass != BackwardPass::attention) AddPartOfSink(block, row);
    if (block.ranges[row].empty()) continue;
    const std::int64_t unit_row = block.first_row + row;
    ShapeLogits(run.job, block.unit, unit_row, block.ranges[row], block.x(row), block.cap_slopes(row));
    block.saved[row] =
        SavedOf(run, block.index(row), BackwardInput(block, row), run.job.rule(block.unit.head(unit_row)));
    if (block.saved[row].scale != 0) block.kinds[row] = ChooseRowKeys(block, row);
  }
}

// Calls body(row, begin, end, vectors) for the listed keys [begin, end) of each row in turn that lie in a
// piece of keys, piece after piece, so that what belongs to its keys stays in a cache for all rows: `vectors`
// are theirs in `grid` (k or v).
template <typename T, class Body>
HWY_INLINE void ForEachListed(const BackwardBlock<T>& block, const core::Grid& grid, std::int64_t size,
                              std::int64_t wide, const Body& body) {
  constexpr std::int64_t kPiece = kTileKeys / 2;
  std::int64_t done[core::kMaxBlockRows] = {};
  for (std::int64_t first = block.reach.begin; first < block.reach.end; first += kPiece) {
    const std::int64_t last = std::min(block.reach.end, first + kPiece);
    KeyVectors<T> vectors{nullptr, 0, PanelColumns<T>(), first};
    for (std::int64_t row = 0; row < block.rows; ++row) {
      if (block.kinds[row] != RowKind::kListed) continue;
      const std::int64_t begin = done[row];
      std::int64_t& end = done[row];
      while (end < block.counts[row] && block.list(row)[end] < last) ++end;
      if (begin == end) continue;
      if (vectors.data == nullptr) {
        const Panel<T> rows = Rows(grid, block.unit, size, first, last, block.scratch.tile, wide);
        vectors.data = rows.data;
        vectors.stride = rows.stride;
      }
      body(row, begin, end, vectors);
    }
  }
}

// Logits and g of a row's listed keys become weights, normalised, and dx.
template <typename T>
HWY_NOINLINE void ListedRowGradient(const BackwardBlock<T>& block, std::int64_t row) {
  const BackwardRun& run = block.run;
  const core::AttentionJob& job = run.job;
  const std::int64_t count = block.counts[row], unit_row = block.first_row + row;
  const std::int32_t* list = block.list(row);
  const bool drops = job.options.dropout > 0;
  const RowDropout<T> dropout(job, block.index(row), block.unit.sequence.first_key);
  T *x = block.x(row), *g = block.g(row), *weights = block.scratch.weights;
  for (std::int64_t i = 0; drops && i < count; ++i) g[i] = dropout(list[i], g[i]);
  const bool sink = SinkOf<T>(job, block.unit.head(unit_row)) != kMinusInfinity<T>;
  if (sink) g[count] = T(0);  // a key with value 0
  GradientOf(block, row, static_cast<const T*>(x), count + (sink ? 1 : 0), g, weights);
  if (sink) AddSink(block, row, g[count]);
  if (run.bias_sums.data != nullptr) {
    AddBias(run, block.unit, unit_row, static_cast<const T*>(g), list, 0, count);
  }
  const T* cap_slopes = block.cap_slopes(row);
  for (std::int64_t i = 0; cap_slopes != nullptr && i < count; ++i) g[i] *= cap_slopes[list[i]];
  const T scale = static_cast<T>(block.saved[row].scale);
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = (drops ? dropout(list[i], weights[i]) : weights[i]) * scale;
  }
}

// All gradients of the rows of which few keys count.
template <typename T>
HWY_NOINLINE void ListedGradients(const BackwardBlock<T>& block) {
  const BackwardRun& run = block.run;
  const core::AttentionJob& job = run.job;
  const BackwardScratch<T>& scratch = block.scratch;
  const std::int64_t d_size = job.shape.key_size, e_size = job.shape.value_size;
  const std::int64_t d_wide = run.key_size(), e_wide = run.value_size();
  ForEachListed(block, job.v, e_size, e_wide,
                [&](std::int64_t row, std::int64_t begin, std::int64_t end, const KeyVectors<T>& values)
                    HWY_ATTR {
                      const T* dout = scratch.dout + row * e_wide;
                      for (std::int64_t i = begin; i < end; ++i) {
                        block.g(row)[i] = InnerProduct(dout, values.of(block.list(row)[i]), e_size);
                      }
                    });
  for (std::int64_t row = 0; row < block.rows; ++row) {
    if (block.kinds[row] == RowKind::kListed) ListedRowGradient(block, row);
  }
  ForEachListed(
      block, job.k, d_size, d_wide,
      [&](std::int64_t row, std::int64_t begin, std::int64_t end, const KeyVectors<T>& keys) HWY_ATTR {
        const std::int32_t* list = block.list(row);
        const T *weights = block.x(row), *dx = block.g(row);
        const T *dout = scratch.dout + row * e_wide, *q = scratch.q + row * d_wide;
        if (run.needs_dq()) {
          AddListed(dx + begin, list + begin, end - begin, keys, d_size, scratch.dq + row * d_wide);
        }
        for (std::int64_t i = begin; job.dk.data != nullptr && i < end; ++i) {
          AddScaled(dx[i], q, d_size, scratch.dk + list[i] * d_wide);
        }
        for (std::int64_t i = begin; job.dv.data != nullptr && i < end; ++i) {
          AddScaled(weights[i], dout, e_size, scratch.dv + list[i] * e_wide);
        }
      });
}

// What became of the tiles within reach of each strip.
template <typename T>
HWY_INLINE void CountTiles(const BackwardBlock<T>& block) {
  TileCounts& counts = *block.scratch.counts;
  for (std::int64_t s = 0; s < block.strips(); ++s) {
    KeyRange reach;
    for (int r = 0; r < block.strip_rows(s); ++r) reach = Union(reach, block.ranges[s * kStripRows + r]);
    if (reach.empty()) continue;
    const std::int64_t first = reach.begin / kTileKeys, end = (reach.end - 1) / kTileKeys + 1;
    counts.tiles += end - first;
    counts.skipped += std::count(block.live(s) + first, block.live(s) + end, 0);
  }
}

// Logits and g of a row become its weights and dx; 0 where the row doesn't look.
template <typename T>
HWY_NOINLINE void BlockRowGradient(const BackwardBlock<T>& block, std::int64_t row) {
  const BackwardRun& run = block.run;
  const Unit& unit = block.unit;
  const KeyRange range = block.ranges[row], reach = block.reach;
  T *x = block.x(row), *g = block.g(row);
  const auto clear = [&](const KeyRange& used) HWY_ATTR {
    const T unseen = block.nonfinite ? kHidden<T> : T(0);
    std::fill(x + reach.begin, x + used.begin, unseen);
    std::fill(x + used.end, x + reach.end, unseen);
    std::fill(g + reach.begin, g + used.begin, T(0));
    std::fill(g + used.end, g + reach.end, T(0));
  };
  if (block.kinds[row] != RowKind::kDense) return clear({reach.begin, reach.begin});
  const std::uint8_t* live = block.live(row / kStripRows);
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const std::int64_t tile = begin / kTileKeys, end = std::min(range.end, (tile + 1) * kTileKeys);
    if (live[tile] == 0) std::fill(g + begin, g + end, T(0));
    begin = end;
  }
  const SavedRow& saved = block.saved[row];
  const auto drop = [&](T* values) {
    if (run.job.options.dropout == 0) return;
    Drop(run.job, block.index(row), unit.sequence.first_key + range.begin, range.size(), values);
  };
  drop(g + range.begin);
  const RowInput<T> input = BackwardInput(block, row);
  // The sink is a key with value 0.
  if (input.sink) g[range.end] = T(0);
  T* weights = block.scratch.weights + range.begin;
  GradientOf(block, row, input.x, input.size(), g + range.begin, weights);
  if (run.pass == BackwardPass::sums) return;
  if (input.sink) AddSink(block, row, g[range.end]);
  if (run.bias_sums.data != nullptr) {
    AddBias(run, unit, block.first_row + row, static_cast<const T*>(g + range.begin), nullptr, range.begin,
            range.size());
  }
  const T* cap_slopes = block.cap_slopes(row);
  for (std::int64_t key = range.begin; cap_slopes != nullptr && key < range.end; ++key) {
    if (x[key] != kMinusInfinity<T>) g[key] *= cap_slopes[key];
  }
  drop(weights);
  if (block.nonfinite || std::isnan(saved.scale)) {  // NaN must not reach hidden keys
    const T scale = static_cast<T>(saved.scale);
    for (std::int64_t i = 0; i < range.size(); ++i) {
      T& weight = x[range.begin + i];
      weight = weight == kMinusInfinity<T> ? (block.nonfinite ? kHidden<T> : T(0)) : weights[i] * scale;
    }
  } else {
    Scale(static_cast<const T*>(weights), x + range.begin, range.size(), saved.scale);
  }
  clear(range);
}

// dq = dx K over live tiles
template <typename T>
HWY_INLINE void BlockQueries(const BackwardBlock<T>& block) {
  const BackwardRun& run = block.run;
  const std::int64_t size = run.job.shape.key_size, wide = run.key_size(), columns = PanelColumns<T>();
  const std::int64_t piece = std::min(PieceKeys<T>(wide), kTileKeys);
  for (std::int64_t begin = block.reach.begin, end = 0; begin < block.reach.end; begin = end) {
    const std::int64_t tile = begin / kTileKeys;
    end = std::min({block.reach.end, begin + piece, (tile + 1) * kTileKeys});
    if (!block.is_live(tile)) continue;
    const Panel<T> keys = Rows(run.job.k, block.unit, size, begin, end, block.scratch.tile, wide);
    for (std::int64_t s = 0; s < block.strips(); ++s) {
      if (block.live(s)[tile] == 0) continue;
      const std::int64_t row = s * kStripRows;
      for (std::int64_t e = 0; e < size; e += columns) {
        Multiply<Into::kContinue>(block.strip_rows(s), Strip<T>{block.g(row) + begin, run.stride, 1},
                                  Panel<T>{keys.data + e, keys.stride, size - e}, end - begin,
                                  block.scratch.dq + row * wide + e, wide);
      }
    }
  }
}

// to += a^T b over live tiles: a holds one value per row and key, b one vector per row, `to` one vector per
// key.
template <typename T>
HWY_INLINE void BlockKeys(const BackwardBlock<T>& block, const T* a, const T* b, std::int64_t size,
                          std::int64_t wide, T* to) {
  const std::int64_t columns = PanelColumns<T>();
  for (std::int64_t begin = block.reach.begin, end = 0; begin < block.reach.end; begin = end) {
    const std::int64_t tile = begin / kTileKeys;
    end = std::min(block.reach.end, (tile + 1) * kTileKeys);
    if (!block.is_live(tile)) continue;
    while (end < block.reach.end && block.is_live(end / kTileKeys)) {  // tiles aren't whole strips of keys
      end = std::min(block.reach.end, end + kTileKeys);
    }
    for (std::int64_t key = begin; key < end; key += kStripRows) {
      const int keys = static_cast<int>(std::min<std::int64_t>(kStripRows, end - key));
      for (std::int64_t e = 0; e < size; e += columns) {
        Multiply<Into::kAdd>(keys, Strip<T>{a + key, 1, block.run.stride}, Panel<T>{b + e, wide, size - e},
                             block.rows, to + key * wide + e, wide);
      }
    }
  }
}

// The three products over visible keys alone, with the bits they would have if what is hidden were finite:
// whatever is hidden from a row, or a row from a key, is 0 on both sides.
template <typename T>
HWY_NOINLINE void VisibleProducts(const BackwardBlock<T>& block) {
  const BackwardRun& run = block.run;
  const BackwardScratch<T>& scratch = block.scratch;
  const std::int64_t size = run.job.shape.key_size, wide = run.key_size(), columns = PanelColumns<T>();
  const std::int64_t piece = std::min(PieceKeys<T>(wide), kTileKeys);
  for (std::int64_t row = 0; row < block.rows; ++row) {
    for (std::int64_t begin = block.reach.begin; begin < block.reach.end; begin += piece) {
      const std::int64_t end = std::min(block.reach.end, begin + piece);
      LoadVectors(run.job.k, block.unit, size, begin, end, scratch.tile, wide);
      for (std::int64_t key = begin; key < end; ++key) {
        if (block.x(row)[key] < T(0)) std::fill_n(scratch.tile + (key - begin) * wide, wide, T(0));
      }
      for (std::int64_t e = 0; e < size; e += columns) {
        Multiply<Into::kContinue>(1, Strip<T>{block.g(row) + begin, run.stride, 1},
                                  Panel<T>{scratch.tile + e, wide, size - e}, end - begin,
                                  scratch.dq + row * wide + e, wide);
      }
    }
  }
  const auto add = [&](std::int64_t key, const T* vectors, std::int64_t vector_size, std::int64_t vector_wide,
                       bool weights, T* to) HWY_ATTR {
    T column[core::kMaxBlockRows];
    for (std::int64_t row = 0; row < block.rows; ++row) {
      const bool hidden = block.x(row)[key] < T(0);
      column[row] = hidden ? T(0) : weights ? block.x(row)[key] : block.g(row)[key];
      T* copy = scratch.tile + row * vector_wide;
      std::copy_n(vectors + row * vector_wide, vector_wide, copy);
      if (hidden) std::fill_n(copy, vector_wide, T(0));
    }
    for (std::int64_t e = 0; e < vector_size; e += columns) {
      Multiply<Into::kAdd>(1, Strip<T>{column, 1, 1},
                           Panel<T>{scratch.tile + e, vector_wide, vector_size - e}, block.rows,
                           to + key * vector_wide + e, vector_wide);
    }
  };
  for (std::int64_t key = block.reach.begin; key < block.reach.end; ++key) {
    add(key, scratch.dout, run.job.shape.value_size, run.value_size(), true, scratch.dv);
    add(key, scratch.q, size, wide, false, scratch.dk);
  }
}

// dquery_scale of each row, while dq is still dx K: once dq is multiplied by query_scale, a scale of 0 would
// leave nothing to divide. Elements of 0 count as 0 whatever q holds there, as a row that sees nothing must
// not look at its query.
template <typename T>
HWY_INLINE void BlockQueryScales(const BackwardBlock<T>& block) {
  const core::AttentionJob& job = block.run.job;
  if (job.dquery_scale.data == nullptr) return;
  const std::int64_t size = job.shape.key_size, batch = block.unit.sequence.batch;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const std::int64_t unit_row = block.first_row + row;
    const std::int64_t head = block.unit.head(unit_row), query = block.unit.query(unit_row);
    const T* dq = block.scratch.dq + row * block.run.key_size();
    const T* q = VectorOf(job.q, batch, head, query, size, block.scratch.tile);
    double sum = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      if (dq[i] != T(0)) sum += static_cast<double>(dq[i]) * static_cast<double>(q[i]);
    }
    block.scratch.dquery_scale[job.row(batch, head, query)] = job.scale * sum;
  }
}

template <typename T>
HWY_INLINE void StoreQueries(const BackwardBlock<T>& block) {
  const core::AttentionJob& job = block.run.job;
  if (job.dq.data == nullptr) return;
  const std::int64_t size = job.shape.key_size;
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const std::int64_t unit_row = block.first_row + row;
    T* dq = block.scratch.dq + row * block.run.key_size();
    const T scale = static_cast<T>(QueryScale<T>(job, block.unit, unit_row));
    for (std::int64_t i = 0; i < size; ++i) dq[i] = dq[i] == T(0) ? T(0) : dq[i] * scale;
    std::byte* to =
        job.dq.at(block.unit.sequence.batch, block.unit.head(unit_row), block.unit.query(unit_row));
    StoreRow(static_cast<const T*>(dq), job.dq.dtype, job.dq.strides[3], size, to);
  }
}

template <typename T>
HWY_NOINLINE void RunBackwardBlock(BackwardBlock<T>& block) {
  const BackwardRun& run = block.run;
  const core::AttentionShape& shape = run.job.shape;
  const BackwardScratch<T>& scratch = block.scratch;
  const std::int64_t d_wide = run.key_size(), e_wide = run.value_size();
  for (std::int64_t row = 0; row < block.rows; ++row) {
    block.ranges[row] = block.unit.range(run.job, block.first_row + row);
    block.reach = Union(block.reach, block.ranges[row]);
  }
  std::fill_n(scratch.dq, block.rows * d_wide, T(0));
  LoadQueries(run.job, block.unit, block.first_row, block.first_row + block.rows, scratch.q, d_wide);
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const std::int64_t unit_row = block.first_row + row;
    T* to = scratch.dout + row * e_wide;
    const std::byte* from =
        run.job.dout.at(block.unit.sequence.batch, block.unit.head(unit_row), block.unit.query(unit_row));
    LoadRow(from, run.job.dout.dtype, run.job.dout.strides[3], shape.value_size, to);
    std::fill(to + shape.value_size, to + e_wide, T(0));
  }
  if (run.pass != BackwardPass::attention && run.max_rows <= core::kFewRows) {
    // With the bits of forward, whose largest logit these are compared with.
    FewProducts(run, block.unit, static_cast<const T*>(scratch.q), block.rows, block.reach, scratch.tile,
                scratch.x, run.stride);
  } else {
    BlockProduct(block, static_cast<const T*>(scratch.q), d_wide, static_cast<const T*>(scratch.keys),
                 shape.key_size, false, scratch.x);
  }
  ChooseKeys(block);
  ListedGradients(block);
  CountTiles(block);
  BlockProduct(block, static_cast<const T*>(scratch.dout), e_wide, static_cast<const T*>(scratch.values),
               shape.value_size, true, scratch.g);
  const bool dense = block.nonfinite || std::ranges::count(block.kinds, RowKind::kDense) > 0;
  for (std::int64_t row = 0; dense && row < block.rows; ++row) BlockRowGradient(block, row);
  if (run.pass == BackwardPass::sums) return;
  if (block.nonfinite) {
    VisibleProducts(block);
  } else {
    if (run.needs_dq()) BlockQueries(block);
    if (run.job.dv.data != nullptr) {
      BlockKeys(block, static_cast<const T*>(scratch.x), static_cast<const T*>(scratch.dout),
                shape.value_size, e_wide, scratch.dv);
    }
    if (run.job.dk.data != nullptr) {
      BlockKeys(block, static_cast<const T*>(scratch.g), static_cast<const T*>(scratch.q), shape.key_size,
                d_wide, scratch.dk);
    }
  }
  BlockQueryScales(block);
  StoreQueries(block);
}

// True if everything the unit's gradient is made of is finite.
template <typename T>
HWY_INLINE bool UnitIsFinite(const BackwardRun& run, const Unit& unit) {
  const core::AttentionJob& job = run.job;
  bool finite = IsFinite<T>(job.k, unit, job.shape.key_size, 0, unit.keys()) &&
                IsFinite<T>(job.v, unit, job.shape.value_size, 0, unit.keys());
  T buffer[kMaxHeadSize];
  for (std::int64_t row = 0; finite && row < unit.rows(); ++row) {
    const std::int64_t batch = unit.sequence.batch, head = unit.head(row), query = unit.query(row);
    LoadQueries(job, unit, row, row + 1, buffer, job.shape.key_size);
    finite =
        AllFinite(buffer, job.shape.key_size) &&
        AllFinite(VectorOf(job.dout, batch, head, query, job.shape.value_size, buffer), job.shape.value_size);
  }
  return finite;
}

// dk or dv of a unit from the sums of its parts; 0 for keys beyond its length.
template <typename T>
HWY_INLINE void StoreKeys(const BackwardRun& run, const core::Grid& grid, const Unit& unit, std::int64_t size,
                          T* sums, std::int64_t wide) {
  if (grid.data == nullptr) return;
  const bool packed = !run.job.options.key_starts.empty();
  const std::int64_t all = packed ? unit.keys() : run.job.shape.keys;
  const std::int64_t part_stride = kernels::padded(run.max_keys) * wide;
  for (std::int64_t key = 0; key < all; ++key) {
    T* sum = sums + key * wide;
    if (key >= unit.keys()) {
      std::fill_n(sum, size, T(0));
    } else {
      for (std::int64_t part = 1; part < run.plan.parts; ++part) {
        for (std::int64_t i = 0; i < size; ++i) sum[i] += sum[part * part_stride + i];
      }
    }
    std::byte* to = grid.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
    StoreRow(static_cast<const T*>(sum), grid.dtype, grid.strides[3], size, to);
  }
}

// dk and dv of a unit once all its parts are done.
template <typename T>
HWY_INLINE void JoinParts(const BackwardRun& run, std::int64_t index, int worker) {
  const Unit unit(run.job, index);
  const BackwardScratch<T> first = kernels::backward_scratch_of<T>(run, index, 0, worker);
  StoreKeys(run, run.job.dk, unit, run.job.shape.key_size, first.dk, run.key_size());
  StoreKeys(run, run.job.dv, unit, run.job.shape.value_size, first.dv, run.value_size());
}

// Part `part` of the rows of a unit.
template <typename T>
HWY_NOINLINE void RunPart(const BackwardRun& run, std::int64_t index, std::int64_t part, int worker) {
  const core::AttentionJob& job = run.job;
  const Unit unit(job, index);
  const BackwardScratch<T> scratch = kernels::backward_scratch_of<T>(run, index, part, worker);
  const std::int64_t keys = unit.keys();
  std::fill_n(scratch.dk, keys * run.key_size(), T(0));
  std::fill_n(scratch.dv, keys * run.value_size(), T(0));
  std::fill_n(scratch.dsinks, unit.group, 0.0);
  const std::int64_t blocks = (unit.rows() + run.plan.block_rows - 1) / run.plan.block_rows;
  const std::int64_t begin = blocks * part / run.plan.parts, end = blocks * (part + 1) / run.plan.parts;
  if (begin < end) {
    PackTransposed(job.k, unit, job.shape.key_size, 0, keys, scratch.keys);
    PackTransposed(job.v, unit, job.shape.value_size, 0, keys, scratch.values);
    const bool nonfinite = !UnitIsFinite<T>(run, unit);
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t first = b * run.plan.block_rows;
      BackwardBlock<T> block{
          run, unit, scratch, first, std::min(run.plan.block_rows, unit.rows() - first), nonfinite};
      RunBackwardBlock(block);
    }
  }
  if (run.plan.parts == 1) JoinParts<T>(run, index, worker);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_BACKWARD_INL_H_
