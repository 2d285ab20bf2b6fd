// The gradient of linear attention, in linear time as well.
//
// With n_i = <phi(q_i), z_i> (z_i and S_i of the keys that query i sees), p_i = phi(q_i) / n_i, and
// delta_i = <dout_i, out_i>:
//     out_i     = sum_j <p_i, phi(k_j)> v_j
//     u_i       = sum_j <dout_i, v_j> phi(k_j)  = S_i dout_i        delta_i = <p_i, u_i>
//     dphi(q_i) = sum_j (<dout_i, v_j> - delta_i) phi(k_j) / n_i    = (u_i - delta_i z_i) / n_i
//     dphi(k_j) = sum_i (<dout_i, v_j> - delta_i) p_i               = R_j v_j - r_j
//     dv_j      = sum_i <p_i, phi(k_j)> dout_i                      = R_j^T phi(k_j)
// where R_j = sum_i p_i dout_i^T (D x E) and r_j = sum_i delta_i p_i are of the queries that see key j: the
// state of the other direction. out itself isn't needed.
//
// Every query sees every key: S^T, z over the keys; dq, R, r over the queries; dk, dv over the keys.
// Causal: chunks in order for dq, with what lies inside a chunk as in linear-inl.h; then in reverse order
// for dk and dv. n_i and delta_i are kept in between.
//
// Multiply-adds per query and key together: 5 D E, causal about C (3 D + 3 E) / 2 more. R is read as R for
// dv and as R^T for dk; transposing it once per chunk costs a tenth of summing it twice.
#if defined(WHET_KERNELS_LINEAR_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_LINEAR_BACKWARD_INL_H_
#undef WHET_KERNELS_LINEAR_BACKWARD_INL_H_
#else
#define WHET_KERNELS_LINEAR_BACKWARD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "kernels/linear/linear-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// row -= factor * other
template <typename T>
HWY_INLINE void SubtractRow(T factor, const T* other, std::int64_t size, T* row) {
  const ProductTag<T> d;
  const auto by = hn::Set(d, factor);
  for (std::int64_t i = 0; i < size; i += ProductLanes<T>()) {
    hn::StoreU(hn::NegMulAdd(by, hn::LoadU(d, other + i), hn::LoadU(d, row + i)), d, row + i);
  }
}

// sums_j = z + the keys of the chunk up to j.
template <typename T>
HWY_INLINE void SumKeysUpTo(std::int64_t count, std::int64_t size, const LinearMatrices<T>& m) {
  const ProductTag<T> d;
  const Matrix<T> k = m.by_key(m.k), sums = m.by_key(m.sums);
  for (std::int64_t i = 0; i < size; i += ProductLanes<T>()) {
    const auto before = hn::LoadU(d, m.sum + i);
    auto inside = hn::Zero(d);
    for (std::int64_t j = 0; j < count; ++j) {
      inside = hn::Add(inside, hn::LoadU(d, k.row(j) + i));
      hn::StoreU(hn::Add(before, inside), d, sums.row(j) + i);
    }
  }
}

// S^T, z += the keys of the chunk that is loaded.
template <typename T>
HWY_INLINE void AddKeysTransposed(const core::AttentionShape& shape, std::int64_t count,
                                  const LinearMatrices<T>& m) {
  MultiplyAll<Into::kAdd, true>(m.by_value(m.v), m.by_key(m.k), shape.value_size, count, shape.key_size,
                                m.by_key(m.state_t));
  AddRowsTo<T>(m.by_key(m.k), count, shape.key_size, nullptr, m.sum);
}

// R, r += the queries of the chunk that is loaded: p in m.q, dout in m.out.
template <typename T>
HWY_INLINE void AddQueries(const core::AttentionShape& shape, std::int64_t count, const T* deltas,
                           const LinearMatrices<T>& m) {
  MultiplyAll<Into::kAdd, true>(m.by_key(m.q), m.by_value(m.out), shape.key_size, count, shape.value_size,
                                m.by_value(m.state));
  AddRowsTo<T>(m.by_key(m.q), count, shape.key_size, deltas, m.query_sum);
}

// phi(q) and dout of a chunk of one head.
template <typename T>
HWY_INLINE void LoadQueriesAndGradients(const core::AttentionJob& job, std::int64_t batch, std::int64_t head,
                                        const Chunk& queries, const LinearMatrices<T>& m) {
  LoadFeatures(job.q, batch, head, queries, job.shape.key_size, m.by_key(m.q));
  LoadChunk(job.dout, batch, head, queries, job.shape.value_size, m.by_value(m.out));
}

// dq of a chunk of queries of one head, and n_i and delta_i.
template <typename T>
HWY_INLINE void RunQueriesBackward(const LinearRun& run, const Unit& unit, std::int64_t head,
                                   const Chunk& queries, const Chunk& keys, T* denominators, T* deltas,
                                   const LinearMatrices<T>& m) {
  const core::AttentionJob& job = run.job;
  const std::int64_t key_size = job.shape.key_size, value_size = job.shape.value_size;
  const std::int64_t batch = unit.sequence.batch;
  const Matrix<T> q = m.by_key(m.q), dout = m.by_value(m.out), dq = m.by_key(m.dq), t = m.by_chunk(m.t);
  LoadQueriesAndGradients(job, batch, head, queries, m);
  // 1. u
  if (job.options.causal) {
    MultiplyBelow(dout, m.by_chunk(m.v_t), queries.count, value_size, keys.count, t);
    SumBelow(t, m.by_key(m.k), queries.count, keys.count, key_size, dq);
    if (queries.first > 0) {
      MultiplyAll<Into::kAdd>(dout, m.by_key(m.state_t), queries.count, value_size, key_size, dq);
    }
  } else {
    MultiplyAll<Into::kReplace>(dout, m.by_key(m.state_t), queries.count, value_size, key_size, dq);
  }
  for (std::int64_t i = 0; i < queries.count; ++i) {
    // 2. n and delta
    const T* z = keys.count == 0 ? m.sum : m.by_key(m.sums).row(std::min(i, keys.count - 1));
    const T n = DotRows(q.row(i), z, key_size);
    const T delta = n == T(0) ? T(0) : DotRows(q.row(i), dq.row(i), key_size) / n;
    denominators[i] = n;
    deltas[i] = delta;
    if (job.dq.data == nullptr) continue;
    // 3. dphi(q) and dq
    SubtractRow(delta, z, key_size, dq.row(i));
    DivideRow(dq.row(i), key_size, n);
    FeatureRowBackward(q.row(i), key_size, dq.row(i));
    StoreVector(dq.row(i), job.dq, batch, head, queries.first + i, key_size);
  }
}

// p of the chunk of queries that is loaded.
template <typename T>
HWY_INLINE void DivideQueries(std::int64_t count, std::int64_t size, const T* denominators,
                              const LinearMatrices<T>& m) {
  for (std::int64_t i = 0; i < count; ++i) DivideRow(m.by_key(m.q).row(i), size, denominators[i]);
}

// dphi(k) and dv of the chunk of keys that is loaded, from the state of the queries of other chunks.
template <typename T>
HWY_INLINE void StartKeysBackward(const core::AttentionShape& shape, std::int64_t count,
                                  const LinearMatrices<T>& m) {
  const Matrix<T> dk = m.by_key(m.dq), dv = m.by_value(m.dv);
  MultiplyAll<Into::kReplace>(m.by_value(m.v), m.by_key(m.state_t), count, shape.value_size, shape.key_size,
                              dk);
  MultiplyAll<Into::kReplace>(m.by_key(m.k), m.by_value(m.state), count, shape.key_size, shape.value_size,
                              dv);
  for (std::int64_t j = 0; j < count; ++j) SubtractRow(T(1), m.query_sum, shape.key_size, dk.row(j));
}

// The same from the queries of the same chunk, of one head.
template <typename T>
HWY_INLINE void AddChunkToKeys(const core::AttentionShape& shape, const Chunk& queries, const Chunk& keys,
                               const T* deltas, const LinearMatrices<T>& m) {
  const Matrix<T> p = m.by_key(m.q), dout = m.by_value(m.out), a = m.by_chunk(m.a), t = m.by_chunk(m.t);
  MultiplyBelow(p, m.by_chunk(m.k_t), queries.count, shape.key_size, keys.count, a);
  MultiplyBelow(dout, m.by_chunk(m.v_t), queries.count, shape.value_size, keys.count, t);
  for (std::int64_t i = 0; i < queries.count; ++i) {
    const std::int64_t end = std::min(i + 1, keys.count);
    for (std::int64_t j = 0; j < end; ++j) t.row(i)[j] -= deltas[i];
  }
  AddAbove(a, dout, keys.count, queries.count, shape.value_size, m.by_value(m.dv));
  AddAbove(t, p, keys.count, queries.count, shape.key_size, m.by_key(m.dq));
}

// dk and dv of the chunk; keys past the length have none.
template <typename T>
HWY_INLINE void StoreKeysBackward(const core::AttentionJob& job, const Unit& unit, const Chunk& keys,
                                  const LinearMatrices<T>& m) {
  const core::AttentionShape& shape = job.shape;
  const Matrix<T> dk = m.by_key(m.dq), dv = m.by_value(m.dv);
  const Chunk all(keys.first, shape.keys);
  for (std::int64_t j = 0; j < all.count; ++j) {
    if (j < keys.count) {
      FeatureRowBackward(m.by_key(m.k).row(j), shape.key_size, dk.row(j));
    } else {
      std::fill_n(dk.row(j), shape.key_size, T(0));
      std::fill_n(dv.row(j), shape.value_size, T(0));
    }
    if (job.dk.data != nullptr) {
      StoreVector(dk.row(j), job.dk, unit.sequence.batch, unit.key_head, keys.first + j, shape.key_size);
    }
    if (job.dv.data != nullptr) {
      StoreVector(dv.row(j), job.dv, unit.sequence.batch, unit.key_head, keys.first + j, shape.value_size);
    }
  }
}

// The two directions of a unit. With `causal` the first keeps n and delta of every query; without, it sums up
// the queries for the second.
template <typename T>
HWY_INLINE void RunInOrder(const LinearRun& run, const Unit& unit, bool for_keys,
                           const LinearMatrices<T>& m) {
  const core::AttentionJob& job = run.job;
  const core::AttentionShape& shape = job.shape;
  const bool causal = job.options.causal;
  T chunk_denominators[kChunk], chunk_deltas[kChunk];
  for (std::int64_t first = 0; first < shape.queries; first += kChunk) {
    const Chunk queries(first, shape.queries), keys(first, causal ? unit.keys() : 0);
    if (keys.count > 0) {
      LoadKeys(job, unit, keys, m);
      Transpose(m.by_value(m.v), keys.count, shape.value_size, m.by_chunk(m.v_t));
      SumKeysUpTo(keys.count, shape.key_size, m);
    }
    for (std::int64_t g = 0; g < unit.group; ++g) {
      T* denominators = causal ? m.denominators + g * shape.queries + first : chunk_denominators;
      T* deltas = causal ? m.deltas + g * shape.queries + first : chunk_deltas;
      RunQueriesBackward(run, unit, unit.key_head * unit.group + g, queries, keys, denominators, deltas, m);
      if (causal || !for_keys) continue;
      DivideQueries(queries.count, shape.key_size, denominators, m);
      AddQueries(shape, queries.count, deltas, m);
    }
    if (keys.count > 0) AddKeysTransposed(shape, keys.count, m);
  }
}

template <typename T>
HWY_INLINE void RunInReverse(const LinearRun& run, const Unit& unit, const LinearMatrices<T>& m) {
  const core::AttentionJob& job = run.job;
  const core::AttentionShape& shape = job.shape;
  const bool causal = job.options.causal;
  const std::int64_t longest = std::max(causal ? shape.queries : 0, shape.keys);
  for (std::int64_t chunk = (longest + kChunk - 1) / kChunk; chunk-- > 0;) {
    const std::int64_t first = chunk * kChunk;
    const Chunk queries(first, causal ? shape.queries : 0), keys(first, unit.keys());
    if (keys.count > 0) {
      LoadKeys(job, unit, keys, m);
      StartKeysBackward(shape, keys.count, m);
    }
    if (keys.count > 0 && queries.count > 0) {
      Transpose(m.by_key(m.k), keys.count, shape.key_size, m.by_chunk(m.k_t));
      Transpose(m.by_value(m.v), keys.count, shape.value_size, m.by_chunk(m.v_t));
    }
    for (std::int64_t g = 0; g < unit.group && queries.count > 0; ++g) {
      const T* deltas = m.deltas + g * shape.queries + first;
      LoadQueriesAndGradients(job, unit.sequence.batch, unit.key_head * unit.group + g, queries, m);
      DivideQueries(queries.count, shape.key_size, m.denominators + g * shape.queries + first, m);
      if (keys.count > 0) AddChunkToKeys(shape, queries, keys, deltas, m);
      if (first > 0) AddQueries(shape, queries.count, deltas, m);
    }
    StoreKeysBackward(job, unit, keys, m);
    if (first > 0 && queries.count > 0) {
      Transpose(m.by_value(m.state), shape.key_size, shape.value_size, m.by_key(m.state_t));
    }
  }
}

template <typename T>
HWY_NOINLINE void RunUnitBackward(const LinearRun& run, std::int64_t index, int worker) {
  const core::AttentionJob& job = run.job;
  const core::AttentionShape& shape = job.shape;
  const Unit unit(job, index);
  const LinearMatrices<T> m(run, worker);
  const bool for_keys = job.dk.data != nullptr || job.dv.data != nullptr;
  // 1. S^T and z of all keys, R = 0, r = 0
  ClearState(run, m);
  std::fill_n(m.query_sum, m.key_stride, T(0));
  std::fill_n(m.state_t, shape.value_size * m.key_stride, T(0));
  for (std::int64_t first = 0; first < unit.keys() && !job.options.causal; first += kChunk) {
    const Chunk keys(first, unit.keys());
    LoadKeys(job, unit, keys, m);
    AddKeysTransposed(shape, keys.count, m);
  }
  // 2. dq
  RunInOrder(run, unit, for_keys, m);
  // 3. dk and dv, from R and its transpose (causal: 0 at first)
  if (!for_keys) return;
  Transpose(m.by_value(m.state), shape.key_size, shape.value_size, m.by_key(m.state_t));
  RunInReverse(run, unit, m);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_LINEAR_BACKWARD_INL_H_
