// Linear attention: one unit (a batch entry and a key head, with the queries of all heads that read it),
// chunk by chunk of kChunk = C queries or keys.
//
// A *state* is what queries need to know of the keys they see: S = sum_j phi(k_j) v_j^T (D x E) and
// z = sum_j phi(k_j) (D). Then out_i = S^T phi(q_i) / <z, phi(q_i)>.
//
//     every query sees every key              causal
//     for each chunk of keys: S, z += it      for each chunk:
//     for each head, chunk of queries:          for each head:
//       out = phi(q) S / phi(q) z                 a = phi(q) phi(k)^T, below and on the diagonal
//                                                 out = (a v + phi(q) S) / (a 1 + phi(q) z)
//                                               S, z += its keys
//
// Multiply-adds per query: D E for its product with S, and as many per key for S; causal C (D + E) / 2 more
// inside the chunk, half as much again at D = E = C = 64. Bytes: q, k, v and out pass by once; S
// (16 KiB of f32 at 64 x 64) and a chunk of each (another 64 KiB or so) stay in the second-level cache. All
// of it is products of matrices (matmul-inl.h), so a core is bound by its multiply-adds until S leaves the
// cache. Neither step needs masks: a product along the diagonal runs over what is visible to all rows of a
// strip, then row by row over the rest of the triangle, so that what isn't visible is never multiplied,
// not even by 0: NaN stays where it is.
//
// Sums of S and z are those of a chunk by themselves, added to the state: M / C + C roundings, not M.
#if defined(WHET_KERNELS_LINEAR_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_LINEAR_LINEAR_INL_H_
#undef WHET_KERNELS_LINEAR_LINEAR_INL_H_
#else
#define WHET_KERNELS_LINEAR_LINEAR_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention/pack-inl.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/exp-inl.h"
#include "kernels/linear/run.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using kernels::kChunk;
using kernels::LinearRun;
using kernels::LinearScratch;

// A matrix of scratch memory, rows `stride` apart.
template <typename T>
struct Matrix {
  T* data;
  std::int64_t stride;

  T* row(std::int64_t i) const { return data + i * stride; }
  Strip<T> strip(std::int64_t row, std::int64_t step = 0) const {
    return {data + row * stride + step, stride, 1};
  }
  // Of its transpose.
  Strip<T> transposed_strip(std::int64_t row, std::int64_t step = 0) const {
    return {data + row + step * stride, 1, stride};
  }
};

// The matrices of a worker.
template <typename T>
struct LinearMatrices : LinearScratch<T> {
  LinearMatrices(const LinearRun& run, int worker)
      : LinearScratch<T>(kernels::scratch_of<T>(run, worker)),
        key_stride(run.key_stride()),
        value_stride(run.value_stride()) {}

  Matrix<T> by_key(T* data) const { return {data, key_stride}; }      // rows of D
  Matrix<T> by_value(T* data) const { return {data, value_stride}; }  // rows of E
  Matrix<T> by_chunk(T* data) const { return {data, LinearRun::chunk_stride()}; }

  std::int64_t key_stride, value_stride;
};

// ---- Products ----

template <Into kInto, typename T>
HWY_INLINE void MultiplyStrip(int rows, const Strip<T>& a, const Matrix<T>& b, std::int64_t first,
                              std::int64_t column, std::int64_t depth, T* c, std::int64_t c_stride) {
  Multiply<kInto>(rows, a, Panel<T>{b.row(first) + column, b.stride}, depth, c, c_stride);
}

HWY_INLINE int StripRows(std::int64_t left) {
  return static_cast<int>(std::min<std::int64_t>(kStripRows, left));
}

// c (rows x columns) from a (rows x depth) b (depth x columns), columns up to whole panels.
template <Into kInto, bool kTransposed = false, typename T>
HWY_NOINLINE void MultiplyAll(const Matrix<T>& a, const Matrix<T>& b, std::int64_t rows, std::int64_t depth,
                              std::int64_t columns, const Matrix<T>& c) {
  for (std::int64_t column = 0; column < columns; column += PanelColumns<T>()) {
    for (std::int64_t row = 0; row < rows; row += kStripRows) {
      const Strip<T> strip = kTransposed ? a.transposed_strip(row) : a.strip(row);
      MultiplyStrip<kInto>(StripRows(rows - row), strip, b, 0, column, depth, c.row(row) + column, c.stride);
    }
  }
}

// c_ij = <a_i, b_j> for j <= i; what is above the diagonal is unspecified. b is given transposed.
template <typename T>
HWY_NOINLINE void MultiplyBelow(const Matrix<T>& a, const Matrix<T>& b_t, std::int64_t rows,
                                std::int64_t depth, std::int64_t columns, const Matrix<T>& c) {
  for (std::int64_t column = 0; column < columns; column += PanelColumns<T>()) {
    for (std::int64_t row = column / kStripRows * kStripRows; row < rows; row += kStripRows) {
      MultiplyStrip<Into::kReplace>(StripRows(rows - row), a.strip(row), b_t, 0, column, depth,
                                    c.row(row) + column, c.stride);
    }
  }
}

// c_i = sum of a_ij b_j over j <= i, j < depth.
template <typename T>
HWY_NOINLINE void SumBelow(const Matrix<T>& a, const Matrix<T>& b, std::int64_t rows, std::int64_t depth,
                           std::int64_t columns, const Matrix<T>& c) {
  for (std::int64_t column = 0; column < columns; column += PanelColumns<T>()) {
    for (std::int64_t row = 0; row < rows; row += kStripRows) {
      const int count = StripRows(rows - row);
      const std::int64_t common = std::min(row + 1, depth);
      MultiplyStrip<Into::kReplace>(count, a.strip(row), b, 0, column, common, c.row(row) + column, c.stride);
      for (std::int64_t i = row + 1; i < row + count && common < depth; ++i) {
        MultiplyStrip<Into::kContinue>(1, a.strip(i, common), b, common, column,
                                       std::min(i + 1, depth) - common, c.row(i) + column, c.stride);
      }
    }
  }
}

// c_j += sum of a_ij b_i over i >= j, i < depth.
template <typename T>
HWY_NOINLINE void AddAbove(const Matrix<T>& a, const Matrix<T>& b, std::int64_t rows, std::int64_t depth,
                           std::int64_t columns, const Matrix<T>& c) {
  for (std::int64_t column = 0; column < columns; column += PanelColumns<T>()) {
    for (std::int64_t row = 0; row < rows && row < depth; row += kStripRows) {
      const int count = StripRows(rows - row);
      const std::int64_t common = std::min(row + count - 1, depth);
      for (std::int64_t j = row; j < common && j < row + count; ++j) {
        MultiplyStrip<Into::kAdd>(1, a.transposed_strip(j, j), b, j, column, common - j, c.row(j) + column,
                                  c.stride);
      }
      if (common == depth) continue;
      MultiplyStrip<Into::kAdd>(count, a.transposed_strip(row, common), b, common, column, depth - common,
                                c.row(row) + column, c.stride);
    }
  }
}

// to (columns x rows) = from (rows x columns) transposed. `to` has space for whole panels of rows, and 0
// there.
template <typename T>
HWY_NOINLINE void Transpose(const Matrix<T>& from, std::int64_t rows, std::int64_t columns,
                            const Matrix<T>& to) {
  const T* four[4];
  for (std::int64_t row = 0; row < rows; row += 4) {
    const std::int64_t count = std::min<std::int64_t>(4, rows - row);
    for (std::int64_t r = 0; r < count; ++r) four[r] = from.row(row + r);
    TransposeRows(four, count, columns, to.data + row, to.stride);
  }
  const std::int64_t wide = (rows + PanelColumns<T>() - 1) / PanelColumns<T>() * PanelColumns<T>();
  for (std::int64_t i = 0; i < columns && rows < wide; ++i)
    std::fill(to.row(i) + rows, to.row(i) + wide, T(0));
}

// ---- Vectors, of rows that are 0 behind their last element ----

template <typename T>
HWY_INLINE T DotRows(const T* a, const T* b, std::int64_t size) {
  const ProductTag<T> d;
  auto sum = hn::Zero(d);
  for (std::int64_t i = 0; i < size; i += ProductLanes<T>()) {
    sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// The first `size` elements of a row; nothing behind them is read.
template <typename T>
HWY_INLINE T SumRow(const T* row, std::int64_t size) {
  const ProductTag<T> d;
  auto sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + ProductLanes<T>() <= size; i += ProductLanes<T>()) sum = hn::Add(sum, hn::LoadU(d, row + i));
  T rest = 0;
  for (; i < size; ++i) rest += row[i];
  return hn::GetLane(hn::SumOfLanes(d, sum)) + rest;
}

// sum += the sum of all rows, each times its factor (null: 1).
template <typename T>
HWY_INLINE void AddRowsTo(const Matrix<T>& rows, std::int64_t count, std::int64_t size, const T* factors,
                          T* sum) {
  const ProductTag<T> d;
  for (std::int64_t i = 0; i < size; i += ProductLanes<T>()) {
    auto total = hn::Zero(d);
    for (std::int64_t r = 0; r < count; ++r) {
      const auto row = hn::LoadU(d, rows.row(r) + i);
      total = factors == nullptr ? hn::Add(total, row) : hn::MulAdd(hn::Set(d, factors[r]), row, total);
    }
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), total), d, sum + i);
  }
}

// row /= divisor; 0 / 0 counts as 0: no key is visible, or all weights have underflown.
template <typename T>
HWY_INLINE void DivideRow(T* row, std::int64_t size, T divisor) {
  const ProductTag<T> d;
  const auto by = hn::Set(d, divisor);
  for (std::int64_t i = 0; i < size; i += ProductLanes<T>()) {
    hn::StoreU(divisor == T(0) ? hn::Zero(d) : hn::Div(hn::LoadU(d, row + i), by), d, row + i);
  }
}

// ---- Features ----

// phi(x) = elu(x) + 1, but without the rounding of elu near -1: small features keep their precision.
template <typename T>
HWY_INLINE void FeatureRow(T* row, std::int64_t size) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const Exponential<T> exponential(1.0);
  const V zero = hn::Zero(d), one = hn::Set(d, T(1));
  Map(
      d, row, size,
      [&](V x) HWY_ATTR {
        const auto positive = hn::Gt(x, zero);
        const V y = exponential.limit(d, hn::IfThenElse(positive, zero, x));
        return hn::IfThenElse(positive, hn::Add(x, one), exponential(d, y));
      },
      row);
}

// drow *= phi'(x), given phi(x): 1 for x >= 0, else e^x, which is phi itself.
template <typename T>
HWY_INLINE void FeatureRowBackward(const T* features, std::int64_t size, T* drow) {
  const ProductTag<T> d;
  const auto one = hn::Set(d, T(1));
  for (std::int64_t i = 0; i < size; i += ProductLanes<T>()) {
    const auto phi = hn::LoadU(d, features + i);
    const auto slope = hn::IfThenElse(hn::Gt(phi, one), one, phi);
    hn::StoreU(hn::Mul(hn::LoadU(d, drow + i), slope), d, drow + i);
  }
}

// ---- Chunks ----

// One chunk: `count` vectors from `first` on of the unit.
struct Chunk {
  std::int64_t first, count;

  Chunk(std::int64_t first_, std::int64_t all)
      : first(first_), count(std::clamp<std::int64_t>(all - first_, 0, kChunk)) {}
};

// Vectors of a head, from q, k, v or dout, padded with zeros.
template <typename T>
HWY_INLINE void LoadChunk(const core::Grid& grid, std::int64_t batch, std::int64_t head, const Chunk& chunk,
                          std::int64_t size, const Matrix<T>& to) {
  for (std::int64_t i = 0; i < chunk.count; ++i) {
    LoadRow(grid.at(batch, head, chunk.first + i), grid.dtype, grid.strides[3], size, to.row(i));
    std::fill(to.row(i) + size, to.row(i) + to.stride, T(0));
  }
}

template <typename T>
HWY_INLINE void LoadFeatures(const core::Grid& grid, std::int64_t batch, std::int64_t head,
                             const Chunk& chunk, std::int64_t size, const Matrix<T>& to) {
  LoadChunk(grid, batch, head, chunk, size, to);
  for (std::int64_t i = 0; i < chunk.count; ++i) FeatureRow(to.row(i), size);
}

// Row `index` of a head in an output.
template <typename T>
HWY_INLINE void StoreVector(const T* row, const core::Grid& grid, std::int64_t batch, std::int64_t head,
                            std::int64_t index, std::int64_t size) {
  StoreRow(row, grid.dtype, grid.strides[3], size, grid.at(batch, head, index));
}

template <typename T>
HWY_INLINE void LoadKeys(const core::AttentionJob& job, const Unit& unit, const Chunk& chunk,
                         const LinearMatrices<T>& m) {
  LoadFeatures(job.k, unit.sequence.batch, unit.key_head, chunk, job.shape.key_size, m.by_key(m.k));
  LoadChunk(job.v, unit.sequence.batch, unit.key_head, chunk, job.shape.value_size, m.by_value(m.v));
}

// ---- Forward ----

// S, z += the keys of the chunk that is loaded.
template <typename T>
HWY_INLINE void AddKeys(const core::AttentionShape& shape, std::int64_t count, const LinearMatrices<T>& m) {
  MultiplyAll<Into::kAdd, true>(m.by_key(m.k), m.by_value(m.v), shape.key_size, count, shape.value_size,
                                m.by_value(m.state));
  AddRowsTo<T>(m.by_key(m.k), count, shape.key_size, nullptr, m.sum);
}

template <typename T>
HWY_INLINE void ClearState(const LinearRun& run, const LinearMatrices<T>& m) {
  std::fill_n(m.state, run.job.shape.key_size * m.value_stride, T(0));
  std::fill_n(m.sum, m.key_stride, T(0));
}

// A chunk of queries of one head, with the state and, if causal, the keys of the same chunk.
template <typename T>
HWY_INLINE void RunQueries(const LinearRun& run, const Unit& unit, std::int64_t head, const Chunk& queries,
                           const Chunk& keys, const LinearMatrices<T>& m) {
  const core::AttentionJob& job = run.job;
  const std::int64_t key_size = job.shape.key_size, value_size = job.shape.value_size;
  const std::int64_t batch = unit.sequence.batch;
  const Matrix<T> q = m.by_key(m.q), out = m.by_value(m.out), a = m.by_chunk(m.a);
  LoadFeatures(job.q, batch, head, queries, key_size, q);
  if (job.options.causal) {
    MultiplyBelow(q, m.by_chunk(m.k_t), queries.count, key_size, keys.count, a);
    SumBelow(a, m.by_value(m.v), queries.count, keys.count, value_size, out);
    if (queries.first > 0) {
      MultiplyAll<Into::kAdd>(q, m.by_value(m.state), queries.count, key_size, value_size, out);
    }
  } else {
    MultiplyAll<Into::kReplace>(q, m.by_value(m.state), queries.count, key_size, value_size, out);
  }
  for (std::int64_t i = 0; i < queries.count; ++i) {
    T denominator = queries.first > 0 || !job.options.causal ? DotRows(q.row(i), m.sum, key_size) : T(0);
    if (job.options.causal) denominator += SumRow(a.row(i), std::min(i + 1, keys.count));
    DivideRow(out.row(i), value_size, denominator);
    StoreVector(out.row(i), job.out, batch, head, queries.first + i, value_size);
  }
}

template <typename T>
HWY_NOINLINE void RunUnit(const LinearRun& run, std::int64_t index, int worker) {
  const core::AttentionJob& job = run.job;
  const Unit unit(job, index);
  const LinearMatrices<T> m(run, worker);
  const std::int64_t all_queries = job.shape.queries, first_head = unit.key_head * unit.group;
  const bool causal = job.options.causal;
  ClearState(run, m);
  for (std::int64_t first = 0; first < unit.keys() && !causal; first += kChunk) {
    const Chunk keys(first, unit.keys());
    LoadKeys(job, unit, keys, m);
    AddKeys(job.shape, keys.count, m);
  }
  for (std::int64_t first = 0; first < all_queries; first += kChunk) {
    const Chunk queries(first, all_queries), keys(first, causal ? unit.keys() : 0);
    if (keys.count > 0) {
      LoadKeys(job, unit, keys, m);
      Transpose(m.by_key(m.k), keys.count, job.shape.key_size, m.by_chunk(m.k_t));
    }
    for (std::int64_t g = 0; g < unit.group; ++g) RunQueries(run, unit, first_head + g, queries, keys, m);
    if (keys.count > 0 && first + kChunk < all_queries) AddKeys(job.shape, keys.count, m);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_LINEAR_LINEAR_INL_H_
