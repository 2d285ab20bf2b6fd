// Attention for few queries against many keys: decoding.
//
//     logits   a task is a chunk of keys: products of all rows of the unit with them, from K as it lies
//     weights  a task is a row, whole: maximum, beta, exponentials (row/row-inl.h)
//     values   a task is a chunk of keys: weighted sums of V as it lies
//     out      the chunks' sums added in order, over the normaliser
//
// Bytes: D + E elements per key, each read once and nothing packed, whatever the number of rows; logits, 4
// bytes per row and key, stay in cache. Flops: 2 D + 2 E per row and key, half a flop for each byte of f32
// and row of the group. So memory bandwidth bounds it. Products of up to 3 rows with 4 keys keep 12 sums in
// registers; 16-bit keys and values become f32 on the way to them, which serves all rows of the group. No
// tile is skipped.
#if defined(WHET_KERNELS_ATTENTION_FEW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_FEW_INL_H_
#undef WHET_KERNELS_ATTENTION_FEW_INL_H_
#else
#define WHET_KERNELS_ATTENTION_FEW_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention/block-inl.h"
#include "kernels/attention/dropout-inl.h"
#include "kernels/attention/logits-inl.h"
#include "kernels/attention/result-inl.h"
#include "kernels/attention/run.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kFewGroup = 3;           // rows at a time
inline constexpr int kFewKeys = 4;            // keys at a time
inline constexpr int kFewVectors = 4;         // vectors of a value at a time
inline constexpr std::int64_t kFewTile = 64;  // keys that stay in the first-level cache for all rows

// out[i] = the sum of the lanes of s<i>.
template <class D, class V = hn::Vec<D>, typename T>
HWY_INLINE void StoreSums(D d, V s0, V s1, V s2, V s3, T* out) {
  out[0] = hn::GetLane(hn::SumOfLanes(d, s0));
  out[1] = hn::GetLane(hn::SumOfLanes(d, s1));
  out[2] = hn::GetLane(hn::SumOfLanes(d, s2));
  out[3] = hn::GetLane(hn::SumOfLanes(d, s3));
}

// Where the length of vectors is known, the four sums of floats are taken together.
#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
// out[0..4) = the sums over all blocks of 4 lanes.
template <class D>
HWY_INLINE void StoreBlockSum(D d, hn::Vec<D> v, float* out) {
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<D> half;
    StoreBlockSum(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), out);
  } else {
    hn::StoreU(v, d, out);
  }
}

template <class V = hn::Vec<hn::ScalableTag<float>>>
HWY_INLINE void StoreSums(hn::ScalableTag<float> d, V s0, V s1, V s2, V s3, float* out) {
  const hn::RepartitionToWide<decltype(d)> dw;
  const auto a = hn::Add(hn::InterleaveLower(d, s0, s1), hn::InterleaveUpper(d, s0, s1));
  const auto b = hn::Add(hn::InterleaveLower(d, s2, s3), hn::InterleaveUpper(d, s2, s3));
  const auto aw = hn::BitCast(dw, a), bw = hn::BitCast(dw, b);
  const auto low = hn::BitCast(d, hn::InterleaveLower(dw, aw, bw));
  const auto high = hn::BitCast(d, hn::InterleaveUpper(dw, aw, bw));
  StoreBlockSum(d, hn::Add(low, high), out);
}
#endif

// x[row][key] = <q_row, k_key> for kRows rows and `keys` keys; size is a multiple of the vector. The sum of
// row r and key i is s<r><i>.
template <int kRows, typename T, typename Stored>
HWY_NOINLINE void DotRows(const T* q, std::int64_t q_stride, const Stored* k, std::int64_t k_stride,
                          std::int64_t keys, std::int64_t size, T* x, std::int64_t x_stride) {
  static_assert(kRows <= kFewGroup && kFewGroup == 3 && kFewKeys == 4);
  const hn::ScalableTag<T> d;
  using V = hn::Vec<hn::ScalableTag<T>>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V zero = hn::Zero(d);
  for (std::int64_t key = 0; key < keys; key += kFewKeys) {
    const auto at = [&](std::int64_t i) { return k + std::min(key + i, keys - 1) * k_stride; };
    const Stored *k0 = at(0), *k1 = at(1), *k2 = at(2), *k3 = at(3);
    V s00 = zero, s01 = zero, s02 = zero, s03 = zero, s10 = zero, s11 = zero, s12 = zero, s13 = zero;
    V s20 = zero, s21 = zero, s22 = zero, s23 = zero;
    for (std::int64_t e = 0; e < size; e += lanes) {
      // 12 sums, 3 queries and one key: all 16 registers of AVX2.
      const V q0 = hn::LoadU(d, q + e);
      V q1 = zero, q2 = zero;
      if constexpr (kRows > 1) q1 = hn::LoadU(d, q + q_stride + e);
      if constexpr (kRows > 2) q2 = hn::LoadU(d, q + 2 * q_stride + e);
      AddProducts<kRows>(LoadWide(d, k0 + e), q0, q1, q2, s00, s10, s20);
      AddProducts<kRows>(LoadWide(d, k1 + e), q0, q1, q2, s01, s11, s21);
      AddProducts<kRows>(LoadWide(d, k2 + e), q0, q1, q2, s02, s12, s22);
      AddProducts<kRows>(LoadWide(d, k3 + e), q0, q1, q2, s03, s13, s23);
    }
    T sums[kRows * kFewKeys];
    const bool whole = key + kFewKeys <= keys;
    T* to = whole ? x + key : sums;
    const std::int64_t stride = whole ? x_stride : kFewKeys;
    StoreSums(d, s00, s01, s02, s03, to);
    if constexpr (kRows > 1) StoreSums(d, s10, s11, s12, s13, to + stride);
    if constexpr (kRows > 2) StoreSums(d, s20, s21, s22, s23, to + 2 * stride);
    for (int r = 0; !whole && r < kRows; ++r) {
      std::copy_n(sums + r * kFewKeys, keys - key, x + r * x_stride + key);
    }
  }
}

// out[row] += sum over keys of w[row][key] v_key.
template <int kRows, typename T, typename Stored>
HWY_INLINE void AddValues(const T* w, std::int64_t w_stride, const Stored* v, std::int64_t v_stride,
                          std::int64_t keys, std::int64_t size, T* out, std::int64_t out_stride) {
  const std::int64_t lanes = ProductLanes<T>();
  std::int64_t e = 0;
  for (; e + kFewVectors * lanes <= size; e += kFewVectors * lanes) {
    MultiplyRows<kRows, kFewVectors, Into::kContinue>(w, w_stride, 1, v + e, v_stride, keys, out + e,
                                                      out_stride);
  }
  for (; e < size; e += lanes)
    MultiplyRows<kRows, 1, Into::kContinue>(w, w_stride, 1, v + e, v_stride, keys, out + e, out_stride);
}

// Calls body(first row, integral constant of rows) for groups of rows.
template <class Body>
HWY_INLINE void ForRowGroups(std::int64_t rows, const Body& body) {
  static_assert(kFewGroup == 3);
  std::int64_t row = 0;
  for (; row + 3 <= rows; row += 3) body(row, std::integral_constant<int, 3>());
  if (rows - row == 2) body(row, std::integral_constant<int, 2>());
  if (rows - row == 1) body(row, std::integral_constant<int, 1>());
}

// Calls body(rows of keys as they can be read, stride, size): in the stored type where whole vectors lie
// there, else converted in `buffer`, padded with zeros.
template <typename T, class Body>
HWY_INLINE void WithStored(const core::Grid& grid, const Unit& unit, std::int64_t key, std::int64_t keys,
                           std::int64_t size, T* buffer, const Body& body) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  const std::byte* at = grid.at(unit.sequence.batch, unit.key_head, unit.sequence.first_key + key);
  const std::int64_t stride = grid.strides[2];
  if (grid.strides[3] == 1 && size % lanes == 0) {
    if (grid.dtype == kArithmetic<T>) return body(reinterpret_cast<const T*>(at), stride, size);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (grid.dtype == DType::bf16) return body(reinterpret_cast<const bf16*>(at), stride, size);
      return body(reinterpret_cast<const f16*>(at), stride, size);
    }
  }
  const std::int64_t wide = kernels::padded(size), bytes = core::element_bytes(grid.dtype);
  for (std::int64_t i = 0; i < keys; ++i) {
    LoadRow(at + i * stride * bytes, grid.dtype, grid.strides[3], size, buffer + i * wide);
    std::fill(buffer + i * wide + size, buffer + (i + 1) * wide, T(0));
  }
  body(static_cast<const T*>(buffer), wide, wide);
}

// Products of rows with keys [range) of the unit, at x + row * x_stride + key.
template <class Run, typename T>
HWY_INLINE void FewProducts(const Run& run, const Unit& unit, const T* q, std::int64_t rows,
                            const KeyRange& range, T* buffer, T* x, std::int64_t x_stride) {
  for (std::int64_t key = range.begin; key < range.end; key += kFewTile) {
    const std::int64_t keys = std::min(kFewTile, range.end - key);
    WithStored(run.job.k, unit, key, keys, run.job.shape.key_size, buffer,
               [&](const auto* k, std::int64_t stride, std::int64_t size) HWY_ATTR {
                 ForRowGroups(rows, [&](std::int64_t row, auto count) HWY_ATTR {
                   DotRows<decltype(count)::value>(q + row * run.key_size(), run.key_size(), k, stride, keys,
                                                   size, x + row * x_stride + key, x_stride);
                 });
               });
  }
}

// Keys that any row of the unit may see.
HWY_INLINE KeyRange Reach(const AttentionRun& run, const Unit& unit) {
  KeyRange all;
  for (std::int64_t row = 0; row < unit.rows(); ++row) all = Union(all, unit.range(run.job, row));
  return all;
}

HWY_INLINE KeyRange ChunkOf(const AttentionRun& run, const Unit& unit, std::int64_t chunk) {
  const KeyRange reach = Reach(run, unit);
  return {std::max(reach.begin, chunk * core::kChunkKeys),
          std::min(reach.end, (chunk + 1) * core::kChunkKeys)};
}

// Tiles within reach of the strip that begins at `row`.
HWY_INLINE std::int64_t StripTiles(const AttentionRun& run, const Unit& unit, std::int64_t row) {
  KeyRange reach;
  for (std::int64_t r = row; r < std::min(row + kStripRows, unit.rows()); ++r) {
    reach = Union(reach, unit.range(run.job, r));
  }
  return reach.empty() ? 0 : (reach.end - 1) / kTileKeys + 1 - reach.begin / kTileKeys;
}

template <typename T>
HWY_INLINE void FewLogits(const AttentionRun& run, std::int64_t index, std::int64_t chunk, int worker) {
  const Unit unit(run.job, run.first_unit + index);
  const KeyRange keys = ChunkOf(run, unit, chunk);
  if (keys.empty()) return;
  const Scratch<T> scratch = kernels::scratch_of<T>(run, worker);
  LoadQueries(run.job, unit, 0, unit.rows(), scratch.q, run.key_size());
  T* x = kernels::shared_of<T>(run).x + index * run.max_rows * run.stride;
  FewProducts(run, unit, static_cast<const T*>(scratch.q), unit.rows(), keys, scratch.values, x, run.stride);
}

// Products of a row become logits, unless a shard has them already.
template <typename T>
HWY_INLINE void FewRowLogits(const AttentionRun& run, const Unit& unit, std::int64_t row,
                             const KeyRange& range, T* x) {
  if (run.has_logits()) {
    LoadLogits(run, unit, row, range, x);
  } else {
    ShapeLogits(run.job, unit, row, range, x);
  }
}

// They become weights, or what a shard wants of the row.
template <typename T>
HWY_INLINE RowResult<T> FewRow(const AttentionRun& run, const Unit& unit, std::int64_t row,
                               const KeyRange& range, const Scratch<T>& scratch, T* x) {
  const std::int64_t job_row = run.job.row(unit.sequence.batch, unit.head(row), unit.query(row));
  FewRowLogits(run, unit, row, range, x);
  if (run.keeps_logits()) KeepLogits(run, unit, row, range, static_cast<const T*>(x));
  const RowTiles<T> tiles{range.begin, scratch.tile_max, nullptr, nullptr, 0};
  RowInput<T> input = InputOf(run.job, unit.head(row), x, range, scratch.row);
  RowResult<T> result;
  if (run.pass == Pass::attention) {
    input.tiles = &tiles;
    result = FinishRow(run, unit, row, x, range, input, scratch.top);
  } else {
    result = ShardRow(run, job_row, input, x + range.begin);
  }
  if (run.job.options.dropout > 0 && run.has_outputs()) {
    Drop(run.job, job_row, unit.sequence.first_key + range.begin, range.size(), x + range.begin);
  }
  return result;
}

template <typename T>
HWY_INLINE void FewWeights(const AttentionRun& run, std::int64_t index, std::int64_t row, int worker) {
  const Unit unit(run.job, run.first_unit + index);
  if (row >= unit.rows()) return;
  const Scratch<T> scratch = kernels::scratch_of<T>(run, worker);
  const Shared<T> shared = kernels::shared_of<T>(run);
  const KeyRange reach = Reach(run, unit), range = unit.range(run.job, row);
  T* x = shared.x + (index * run.max_rows + row) * run.stride;
  double z = 0;
  if (range.empty() && run.pass == Pass::attention) {
    FinishEmptyRow<T>(run, unit, row);
  } else {
    z = FewRow(run, unit, row, range, scratch, x).sums.z;
  }
  if (row % kStripRows == 0) scratch.counts->tiles += StripTiles(run, unit, row);
  if (!run.has_outputs()) return;
  const KeyRange weighed = z > 0 ? range : KeyRange{reach.begin, reach.begin};
  std::fill(x + reach.begin, x + std::max(weighed.begin, reach.begin), T(0));
  std::fill(x + weighed.end, x + std::max(reach.end, weighed.end), T(0));
  shared.z[index * run.max_rows + row] = z;
}

template <typename T>
HWY_INLINE void FewValues(const AttentionRun& run, std::int64_t index, std::int64_t chunk, int worker) {
  const Unit unit(run.job, run.first_unit + index);
  const Shared<T> shared = kernels::shared_of<T>(run);
  const std::int64_t rows = unit.rows(), wide = run.value_size();
  T* sums = shared.partial + (index * run.plan.blocks + chunk) * run.max_rows * wide;
  std::fill_n(sums, rows * wide, T(0));
  const KeyRange range = ChunkOf(run, unit, chunk);
  const T* x = shared.x + index * run.max_rows * run.stride;
  T* buffer = kernels::scratch_of<T>(run, worker).values;
  for (std::int64_t key = range.begin; key < range.end; key += kFewTile) {
    const std::int64_t keys = std::min(kFewTile, range.end - key);
    WithStored(run.job.v, unit, key, keys, run.job.shape.value_size, buffer,
               [&](const auto* v, std::int64_t stride, std::int64_t size) HWY_ATTR {
                 ForRowGroups(rows, [&](std::int64_t row, auto count) HWY_ATTR {
                   AddValues<decltype(count)::value>(x + row * run.stride + key, run.stride, v, stride, keys,
                                                     size, sums + row * wide, wide);
                 });
               });
  }
}

// A row whose output isn't finite though its weights are: its sums again, without the values of hidden
// keys, in the same order.
template <typename T>
HWY_NOINLINE void RepeatVisibleFew(const AttentionRun& run, const Unit& unit, std::int64_t row,
                                   const T* weights, const Scratch<T>& scratch, T* out) {
  const std::int64_t size = run.job.shape.value_size, wide = run.value_size();
  const KeyRange range = unit.range(run.job, row);
  T* x = scratch.row;
  LoadQueries(run.job, unit, row, row + 1, scratch.q, run.key_size());
  FewProducts(run, unit, static_cast<const T*>(scratch.q), 1, range, scratch.values, x, run.stride);
  FewRowLogits(run, unit, row, range, x);
  std::fill_n(out, size, T(0));
  HWY_ALIGN T sum[kMaxHeadSize];
  for (std::int64_t chunk = 0; chunk < run.plan.blocks; ++chunk) {
    const KeyRange keys = ChunkOf(run, unit, chunk);
    std::fill_n(sum, wide, T(0));
    for (std::int64_t key = keys.begin; key < keys.end; key += kFewTile) {
      const std::int64_t end = std::min(key + kFewTile, keys.end);
      LoadVisible(run.job, unit, static_cast<const T*>(x), range, key, end, scratch.values, wide);
      AddValues<1>(weights + key, run.stride, static_cast<const T*>(scratch.values), wide, end - key, wide,
                   sum, wide);
    }
    for (std::int64_t i = 0; i < size; ++i) out[i] += sum[i];
  }
}

template <typename T>
HWY_INLINE void FewOutput(const AttentionRun& run, std::int64_t index, std::int64_t row, int worker) {
  const Unit unit(run.job, run.first_unit + index);
  if (row >= unit.rows()) return;
  const Scratch<T> scratch = kernels::scratch_of<T>(run, worker);
  const Shared<T> shared = kernels::shared_of<T>(run);
  const std::int64_t size = run.job.shape.value_size, wide = run.value_size();
  T* out = scratch.out;
  std::fill_n(out, size, T(0));
  for (std::int64_t chunk = 0; chunk < run.plan.blocks; ++chunk) {
    const T* sum = shared.partial + ((index * run.plan.blocks + chunk) * run.max_rows + row) * wide;
    for (std::int64_t i = 0; i < size; ++i) out[i] += sum[i];
  }
  double z = shared.z[index * run.max_rows + row];
  if (z > 0 && !AllFinite(out, size)) {
    T* weights = shared.x + (index * run.max_rows + row) * run.stride;
    RepeatVisibleFew(run, unit, row, static_cast<const T*>(weights), scratch, out);
    if (run.pass == Pass::attention && !AllFinite(out, size)) {  // a sum may overflow where the mean doesn't
      T sums[kMaxHeadSize];
      std::copy_n(out, size, sums);
      const KeyRange reach = Reach(run, unit);
      Scale(static_cast<const T*>(weights + reach.begin), weights + reach.begin, reach.size(), 1 / z);
      RepeatVisibleFew(run, unit, row, static_cast<const T*>(weights), scratch, out);
      KeepFinite(static_cast<const T*>(sums), size, z, out);
      z = 1;
    }
  }
  StoreOutput(run, unit, row, z, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_FEW_INL_H_
