// The gradient of attention, for a part of a unit's rows, block by block. x are logits, w weights, g = dL/dw
// and dx = dL/dx of a block, rows by keys; each line of backward is the derivative of the line of forward
// beside it:
//
//     for each block of rows
//       x   = q K^T           as forward: logits are computed again, not kept
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

#include "kernels/attention/backward_run.h"
#include "kernels/attention/block-inl.h"
#include "kernels/attention/dropout-inl.h"
#include "kernels/attention/logits-inl.h"
#include "kernels/attention/result-inl.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/elements-inl.h"
#include "kernels/row/normalizers-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using kernels::BackwardRun;
using kernels::BackwardScratch;

template <typename T>
struct BackwardBlock {
  const BackwardRun& run;
  const Unit& unit;
  const BackwardScratch<T>& scratch;
  std::int64_t first_row;
  std::int64_t rows;
  KeyRange ranges[core::kMaxBlockRows]{};
  KeyRange reach{};  // of all rows

  T* x(std::int64_t row) const { return scratch.x + row * run.stride; }
  T* g(std::int64_t row) const { return scratch.g + row * run.stride; }
  std::int64_t strips() const { return (rows + kStripRows - 1) / kStripRows; }
  int strip_rows(std::int64_t strip) const {
    return static_cast<int>(std::min<std::int64_t>(kStripRows, rows - strip * kStripRows));
  }
};

// to = a B for all rows of the block, where B is packed and transposed.
template <typename T>
HWY_INLINE void BlockProduct(const BackwardBlock<T>& block, const T* a, std::int64_t a_stride,
                             const T* packed, std::int64_t size, T* to) {
  const std::int64_t columns = PanelColumns<T>();
  const KeyRange& reach = block.reach;
  for (std::int64_t first = reach.begin / columns * columns; first < reach.end; first += columns) {
    for (std::int64_t s = 0; s < block.strips(); ++s) {
      const std::int64_t row = s * kStripRows;
      Multiply<Into::kReplace>(block.strip_rows(s), Strip<T>{a + row * a_stride, a_stride, 1},
                               Panel<T>{packed + first * size, columns}, size,
                               to + row * block.run.stride + first, block.run.stride);
    }
  }
}

// What the gradient of a row is made of: as it was saved, or found again.
template <typename T>
HWY_INLINE SavedRow SavedOf(const BackwardRun& run, std::int64_t row, const RowInput<T>& input,
                            const Rule& rule) {
  const RowFunctions<T>& functions = FunctionsOf<T>(run.job.options.normalizer);
  return run.reads_saved ? LoadSaved<T>(run.job.saved, functions.saves_threshold, row)
                         : functions.save(input, rule);
}

// dbias of a row: its dx, added in the place the bias has.
template <typename T>
HWY_INLINE void AddBias(const BackwardRun& run, const Unit& unit, std::int64_t unit_row,
                        const KeyRange& range, const T* dx) {
  const std::int64_t batch = unit.sequence.batch, head = unit.head(unit_row), query = unit.query(unit_row);
  const core::Grid& dbias = run.bias_sums;
  const std::int64_t first = unit.sequence.first_key + range.begin;
  T* to = reinterpret_cast<T*>(dbias.at(batch, head, query, first));
  for (std::int64_t i = 0; i < range.size(); ++i) to[i * dbias.strides[3]] += dx[range.begin + i];
}

// Where not everything is finite, a weight of this says that the key is hidden from the row.
template <typename T>
inline constexpr T kHidden = T(-1);

// Logits and G of a row become its weights and dx; 0 where the row doesn't look.
template <typename T>
HWY_NOINLINE void BlockRowGradient(const BackwardBlock<T>& block, std::int64_t row, bool nonfinite) {
  const BackwardRun& run = block.run;
  const Unit& unit = block.unit;
  const std::int64_t unit_row = block.first_row + row, head = unit.head(unit_row);
  const KeyRange range = block.ranges[row], reach = block.reach;
  T *x = block.x(row), *g = block.g(row);
  const auto clear = [&](const KeyRange& used) HWY_ATTR {
    const T unseen = nonfinite ? kHidden<T> : T(0);
    std::fill(x + reach.begin, x + used.begin, unseen);
    std::fill(x + used.end, x + reach.end, unseen);
    std::fill(g + reach.begin, g + used.begin, T(0));
    std::fill(g + used.end, g + reach.end, T(0));
  };
  if (range.empty()) return clear({reach.begin, reach.begin});
  T* cap_slopes = run.job.options.softcap > 0 ? block.scratch.cap_slopes : nullptr;
  ShapeLogits(run.job, unit, unit_row, range, x, cap_slopes);
  T* weights = block.scratch.weights + range.begin;
  const RowInput<T> input = InputOf(run.job, head, x, range, weights);
  const Rule& rule = run.job.rule(head);
  const std::int64_t index = run.job.row(unit.sequence.batch, head, unit.query(unit_row));
  const SavedRow saved = SavedOf(run, index, input, rule);
  if (saved.scale == 0) return clear({reach.begin, reach.begin});

  const auto drop = [&](T* values) {
    if (run.job.options.dropout == 0) return;
    Drop(run.job, index, unit.sequence.first_key + range.begin, range.size(), values);
  };
  drop(g + range.begin);
  // The sink is a key with value 0.
  if (input.sink) g[range.end] = T(0);
  core::RowArray line;
  line.dtype = kArithmetic<T>;
  line.key_stride = 1;
  auto* gradient = reinterpret_cast<std::byte*>(g + range.begin);
  const RowFunctions<T>& functions = FunctionsOf<T>(run.job.options.normalizer);
  const RowGradient<T> whole{input.x, input.size(), input.parameter, saved, gradient, gradient,
                             line,    line,         weights};
  if (!run.job.dparameter.empty()) {
    run.job.dparameter[static_cast<std::size_t>(index)] = functions.parameter_gradient(whole);
  }
  functions.backward(whole, rule, run.job.through_rule);
  if (input.sink) {
    block.scratch.dsinks[head - unit.key_head * unit.group] += static_cast<double>(g[range.end]);
  }
  if (run.bias_sums.data != nullptr) AddBias(run, unit, unit_row, range, static_cast<const T*>(g));
  for (std::int64_t key = range.begin; cap_slopes != nullptr && key < range.end; ++key) {
    if (x[key] != kMinusInfinity<T>) g[key] *= cap_slopes[key];
  }
  drop(weights);
  if (nonfinite || std::isnan(saved.scale)) {  // NaN must not reach hidden keys
    const T scale = static_cast<T>(saved.scale);
    for (std::int64_t i = 0; i < range.size(); ++i) {
      T& weight = x[range.begin + i];
      weight = weight == kMinusInfinity<T> ? (nonfinite ? kHidden<T> : T(0)) : weights[i] * scale;
    }
  } else {
    Scale(static_cast<const T*>(weights), x + range.begin, range.size(), saved.scale);
  }
  clear(range);
}

// dq = dx K
template <typename T>
HWY_INLINE void BlockQueries(const BackwardBlock<T>& block) {
  const BackwardRun& run = block.run;
  const std::int64_t size = run.job.shape.key_size, wide = run.key_size(), columns = PanelColumns<T>();
  const std::int64_t piece = std::min(PieceKeys<T>(wide), kTileKeys);
  for (std::int64_t begin = block.reach.begin; begin < block.reach.end; begin += piece) {
    const std::int64_t end = std::min(block.reach.end, begin + piece);
    const Panel<T> keys = Rows(run.job.k, block.unit, size, begin, end, block.scratch.tile, wide);
    for (std::int64_t s = 0; s < block.strips(); ++s) {
      const std::int64_t row = s * kStripRows;
      for (std::int64_t e = 0; e < size; e += columns) {
        Multiply<Into::kContinue>(block.strip_rows(s), Strip<T>{block.g(row) + begin, run.stride, 1},
                                  Panel<T>{keys.data + e, keys.stride}, end - begin,
                                  block.scratch.dq + row * wide + e, wide);
      }
    }
  }
}

// to += a^T b: a holds one value per row and key, b one vector per row, `to` one vector per key.
template <typename T>
HWY_INLINE void BlockKeys(const BackwardBlock<T>& block, const T* a, const T* b, std::int64_t size,
                          std::int64_t wide, T* to) {
  const std::int64_t columns = PanelColumns<T>();
  for (std::int64_t key = block.reach.begin; key < block.reach.end; key += kStripRows) {
    const int keys = static_cast<int>(std::min<std::int64_t>(kStripRows, block.reach.end - key));
    for (std::int64_t e = 0; e < size; e += columns) {
      Multiply<Into::kAdd>(keys, Strip<T>{a + key, 1, block.run.stride}, Panel<T>{b + e, wide}, block.rows,
                           to + key * wide + e, wide);
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
                                  Panel<T>{scratch.tile + e, wide}, end - begin, scratch.dq + row * wide + e,
                                  wide);
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
      Multiply<Into::kAdd>(1, Strip<T>{column, 1, 1}, Panel<T>{scratch.tile + e, vector_wide}, block.rows,
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
HWY_NOINLINE void RunBackwardBlock(BackwardBlock<T>& block, bool nonfinite) {
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
  BlockProduct(block, static_cast<const T*>(scratch.q), d_wide, static_cast<const T*>(scratch.keys),
               shape.key_size, scratch.x);
  BlockProduct(block, static_cast<const T*>(scratch.dout), e_wide, static_cast<const T*>(scratch.values),
               shape.value_size, scratch.g);
  for (std::int64_t row = 0; row < block.rows; ++row) BlockRowGradient(block, row, nonfinite);
  if (nonfinite) {
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
      BackwardBlock<T> block{run, unit, scratch, first, std::min(run.plan.block_rows, unit.rows() - first)};
      RunBackwardBlock(block, nonfinite);
    }
  }
  if (run.plan.parts == 1) JoinParts<T>(run, index, worker);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_BACKWARD_INL_H_
