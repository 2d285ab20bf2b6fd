// One call of linear attention on its way through the kernels: the checked job, and where the scratch memory
// of its workers lies.
#ifndef WHET_KERNELS_LINEAR_RUN_H_
#define WHET_KERNELS_LINEAR_RUN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/attention_job.h"
#include "kernels/attention/run.h"

namespace whet::kernels {

// Queries, and keys, that are worked on at once. Between chunks causal attention goes through the state,
// inside one it is quadratic: at D = E = 64 that is half as much work again. A smaller chunk has less of it,
// but reads and writes the state for fewer multiply-adds.
inline constexpr std::int64_t kChunk = 64;
static_assert(kChunk % kPad == 0);  // a chunk of columns is whole panels

struct LinearRun {
  core::AttentionJob job;
  bool backward = false;
  std::int64_t units = 0;  // batch entries x key heads: one task each
  int workers = 1;

  std::byte* memory = nullptr;  // one LinearScratch a worker
  std::size_t shared_bytes = 0;
  std::size_t worker_bytes = 0;

  // Elements from one row to the next of arrays D, E and kChunk wide.
  std::int64_t key_stride() const { return logit_stride(job.shape.key_size); }
  std::int64_t value_stride() const { return logit_stride(job.shape.value_size); }
  static constexpr std::int64_t chunk_stride() { return logit_stride(kChunk); }
};

// Scratch of one worker. Rows are zero from their size to the end of their last panel.
template <typename T>
struct LinearScratch {
  T* q = nullptr;      // kChunk x D: phi(q); backward, divided by their denominators later
  T* k = nullptr;      // kChunk x D: phi(k)
  T* v = nullptr;      // kChunk x E
  T* out = nullptr;    // kChunk x E: output; backward: dout
  T* a = nullptr;      // kChunk x kChunk: products of queries and keys, by query
  T* k_t = nullptr;    // D x kChunk: phi(k) transposed
  T* state = nullptr;  // D x E: the sum of phi(k_j) v_j over the keys of earlier chunks; backward: of queries
  T* sum = nullptr;    // D: the sum of phi(k_j)

  // Backward only.
  T* state_t = nullptr;       // E x D: that of the keys, and then `state` transposed
  T* sums = nullptr;          // kChunk x D: the sum of phi(k) up to each key of the chunk
  T* query_sum = nullptr;     // D: the sum of delta_i phi(q_i) / denominator_i
  T* v_t = nullptr;           // E x kChunk: v transposed
  T* t = nullptr;             // kChunk x kChunk: <dout_i, v_j>, less delta_i
  T* dq = nullptr;            // kChunk x D: dphi(q), or dphi(k)
  T* dv = nullptr;            // kChunk x E
  T* denominators = nullptr;  // one per query of all heads of the unit, if causal
  T* deltas = nullptr;        // the same: <dout_i, out_i>
};

// Used both to count and to lay out.
template <typename T>
LinearScratch<T> lay_out_worker(const LinearRun& run, Arena& arena) {
  const core::AttentionShape& shape = run.job.shape;
  const std::int64_t keys = run.key_stride(), values = run.value_stride(), chunk = LinearRun::chunk_stride();
  LinearScratch<T> s;
  s.q = arena.take<T>(kChunk, keys);
  s.k = arena.take<T>(kChunk, keys);
  s.v = arena.take<T>(kChunk, values);
  s.out = arena.take<T>(kChunk, values);
  s.a = arena.take<T>(kChunk, chunk);
  s.k_t = arena.take<T>(shape.key_size, chunk);
  s.state = arena.take<T>(shape.key_size, values);
  s.sum = arena.take<T>(keys);
  if (!run.backward) return s;
  s.state_t = arena.take<T>(shape.value_size, keys);
  s.sums = arena.take<T>(kChunk, keys);
  s.query_sum = arena.take<T>(keys);
  s.v_t = arena.take<T>(shape.value_size, chunk);
  s.t = arena.take<T>(kChunk, chunk);
  s.dq = arena.take<T>(kChunk, keys);
  s.dv = arena.take<T>(kChunk, values);
  if (!run.job.options.causal) return s;
  s.denominators = arena.take<T>(shape.queries, shape.group);
  s.deltas = arena.take<T>(shape.queries, shape.group);
  return s;
}

template <typename T>
LinearScratch<T> scratch_of(const LinearRun& run, int worker) {
  Arena arena(run.memory + static_cast<std::size_t>(worker) * run.worker_bytes);
  return lay_out_worker<T>(run, arena);
}

// Workers of a run have all of its memory: nothing is shared.
template <typename T>
void lay_out_shared(const LinearRun& /*run*/, Arena& /*arena*/) {}

// What is done for one unit, as compiled for a target.
struct LinearSteps {
  void (*forward)(const LinearRun& run, std::int64_t unit, int worker);
  void (*backward)(const LinearRun& run, std::int64_t unit, int worker);
};

}  // namespace whet::kernels

#endif  // WHET_KERNELS_LINEAR_RUN_H_
