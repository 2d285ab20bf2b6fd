// One call of attention_backward: how it is cut up and where its scratch memory lies.
#ifndef WHET_KERNELS_ATTENTION_BACKWARD_RUN_H_
#define WHET_KERNELS_ATTENTION_BACKWARD_RUN_H_

#include <whet/shard.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/attention_job.h"
#include "core/attention_plan.h"
#include "kernels/attention/run.h"

namespace whet::kernels {

// What is wanted of the rows.
enum class BackwardPass {
  attention,
  sums,  // shard_gradient_sums
  shard  // shard_backward
};

struct BackwardRun {
  core::AttentionJob job;
  BackwardPass pass = BackwardPass::attention;
  std::span<const WeighedRow> weighed{};  // sums
  std::span<GradientSums> sums{};         // sums
  std::span<const RowSlope> slopes{};     // shard
  core::BackwardPlan plan{};
  bool reads_saved = false;  // job.saved is what forward found on the same path
  core::Grid bias_sums{};    // dbias itself, or sums in the type of the arithmetic; data null: not wanted
  std::int64_t bias_elements = 0;  // of such sums in the workspace
  std::int64_t units = 0;
  std::int64_t max_rows = 0;
  std::int64_t max_keys = 0;
  std::int64_t stride = 0;
  std::int64_t tiles = 0;  // of max_keys
  int workers = 1;

  std::byte* memory = nullptr;  // shared, then one piece a worker
  std::size_t shared_bytes = 0;
  std::size_t worker_bytes = 0;

  std::int64_t key_size() const { return padded(job.shape.key_size); }
  std::int64_t value_size() const { return padded(job.shape.value_size); }
  // dk and dv of parts are kept until all are there; a unit in one part keeps its worker's.
  bool shares_sums() const { return plan.parts > 1; }
  // Of a row whose products go key by key, and what is written behind its end.
  std::int64_t list_size() const { return max_keys / core::kBackwardListShare + kPad; }
  bool needs_dq() const { return job.dq.data != nullptr || job.dquery_scale.data != nullptr; }
};

// The steps of a call compiled for a target.
struct BackwardSteps {
  void (*part)(const BackwardRun& run, std::int64_t unit, std::int64_t part, int worker);
  void (*join)(const BackwardRun& run, std::int64_t unit, int worker);
  void (*store)(const BackwardRun& run, double value, DType dtype, std::byte* to);
};

template <typename T>
struct BackwardScratch {
  T* keys = nullptr;  // packed K and V, transposed
  T* values = nullptr;
  T* q = nullptr;                     // block_rows x padded D, scaled
  T* dout = nullptr;                  // block_rows x padded E
  T* dq = nullptr;                    // block_rows x padded D
  T* x = nullptr;                     // block_rows x stride
  T* g = nullptr;                     // block_rows x stride
  T* weights = nullptr;               // one row
  T* cap_slopes = nullptr;            // block_rows x stride, if there is a soft-cap
  T* tile = nullptr;                  // a tile of keys, converted
  std::int32_t* list = nullptr;       // block_rows x list_size: keys that count
  std::int64_t* tile_keys = nullptr;  // one per tile: keys of a row that count
  std::uint8_t* live = nullptr;       // strips x tiles: do the products of a strip need a tile?
  TileCounts* counts = nullptr;
  T* dk = nullptr;                 // keys x padded D
  T* dv = nullptr;                 // keys x padded E
  double* dsinks = nullptr;        // one per head of the group
  double* dquery_scale = nullptr;  // one per row of the call
};

template <typename T>
struct BackwardShared {
  double* dsinks = nullptr;  // units x parts x group
  T* dk = nullptr;           // units x parts x keys x padded D, if parts share
  T* dv = nullptr;
  T* bias = nullptr;               // bias_elements
  double* dquery_scale = nullptr;  // one per row, if wanted
};

template <typename T>
BackwardShared<T> lay_out_shared(const BackwardRun& run, Arena& arena) {
  BackwardShared<T> s;
  const std::int64_t parts = run.units * run.plan.parts;
  s.dsinks = arena.take<double>(parts, run.job.shape.group);
  if (run.shares_sums()) {
    s.dk = arena.take<T>(parts, padded(run.max_keys), run.key_size());
    s.dv = arena.take<T>(parts, padded(run.max_keys), run.value_size());
  }
  s.bias = arena.take<T>(run.bias_elements);
  s.dquery_scale = arena.take<double>(run.job.dquery_scale.given ? run.job.shape.rows() : 0);
  return s;
}

template <typename T>
BackwardScratch<T> lay_out_worker(const BackwardRun& run, Arena& arena) {
  BackwardScratch<T> s;
  const std::int64_t rows = run.plan.block_rows, keys = padded(run.max_keys);
  s.keys = arena.take<T>(keys, run.job.shape.key_size);
  s.values = arena.take<T>(keys, run.job.shape.value_size);
  s.q = arena.take<T>(rows, run.key_size());
  s.dout = arena.take<T>(rows, run.value_size());
  s.dq = arena.take<T>(rows, run.key_size());
  s.x = arena.take<T>(rows, run.stride);
  s.g = arena.take<T>(rows, run.stride);
  s.weights = arena.take<T>(run.stride);
  s.cap_slopes = arena.take<T>(run.job.options.softcap > 0 ? rows : 0, run.stride);
  s.tile = arena.take<T>(core::kTileKeys, std::max(run.key_size(), run.value_size()));
  s.list = arena.take<std::int32_t>(rows, run.list_size());
  s.tile_keys = arena.take<std::int64_t>(run.tiles);
  s.live = arena.take<std::uint8_t>((rows + core::kBlockStep - 1) / core::kBlockStep, run.tiles);
  s.counts = arena.take<TileCounts>(1);
  if (!run.shares_sums()) {
    s.dk = arena.take<T>(keys, run.key_size());
    s.dv = arena.take<T>(keys, run.value_size());
  }
  return s;
}

template <typename T>
BackwardScratch<T> backward_scratch_of(const BackwardRun& run, std::int64_t unit, std::int64_t part,
                                       int worker) {
  Arena shared_arena(run.memory);
  const BackwardShared<T> shared = lay_out_shared<T>(run, shared_arena);
  Arena arena(run.memory + run.shared_bytes + static_cast<std::size_t>(worker) * run.worker_bytes);
  BackwardScratch<T> s = lay_out_worker<T>(run, arena);
  const std::int64_t index = unit * run.plan.parts + part;
  s.dsinks = shared.dsinks + index * run.job.shape.group;
  s.dquery_scale = shared.dquery_scale;
  if (run.shares_sums()) {
    s.dk = shared.dk + index * padded(run.max_keys) * run.key_size();
    s.dv = shared.dv + index * padded(run.max_keys) * run.value_size();
  }
  return s;
}

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ATTENTION_BACKWARD_RUN_H_
