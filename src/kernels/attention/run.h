// One call of attention on its way through the kernels: the checked job, how it is cut up, and where its
// scratch memory lies.
#ifndef WHET_KERNELS_ATTENTION_RUN_H_
#define WHET_KERNELS_ATTENTION_RUN_H_

#include <whet/attention.h>
#include <whet/error.h>
#include <whet/shard.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>

#include "core/attention_job.h"
#include "core/attention_plan.h"
#include "core/runtime.h"
#include "kernels/attention/memory.h"
#include "kernels/attention/packed.h"

namespace whet::kernels {

// Elements from one row of logits to the next: space for a sink, and rows that don't all start in the
// same set of the first-level cache.
inline constexpr std::int64_t logit_stride(std::int64_t keys) { return padded(keys) + 16; }

// What is wanted of the rows.
enum class Pass {
  attention,
  states,     // shard_states
  sums,       // shard_sums
  threshold,  // shard_threshold_sums
  shard,      // shard_attention
  partial     // shard_partial_attention
};

// Scratch of one worker.
template <typename T>
struct Scratch {
  T* q = nullptr;                // block_rows x padded D, scaled
  T* x = nullptr;                // block_rows x stride: logits, then weights
  T* out = nullptr;              // block_rows x padded E
  T* row = nullptr;              // one row of logits
  T* values = nullptr;           // a tile of values, converted
  T* tile_max = nullptr;         // one per tile
  std::uint8_t* keep = nullptr;  // kBlockStep rows x tiles: does a row need a tile?
  std::uint8_t* live = nullptr;  // strips x tiles: does a strip?
  std::int64_t* top = nullptr;   // top_k keys
  TileCounts* counts = nullptr;
};

struct AttentionRun {
  core::AttentionJob job;
  core::AttentionPlan plan{};
  Pass pass = Pass::attention;
  PackedShard::Memory* packed = nullptr;      // of a shard whose calls share what is packed
  std::span<const RowScale> scales{};         // sums, threshold, shard
  std::span<const double> betas{};            // partial
  std::span<RowState> states{};               // states, partial
  std::span<RowSums> sums{};                  // sums
  std::span<ThresholdSums> threshold_sums{};  // threshold
  std::span<double> mass{};                   // shard, partial

  std::int64_t units = 0;     // sequences x key heads
  std::int64_t max_rows = 0;  // of a unit
  std::int64_t max_keys = 0;
  std::int64_t stride = 0;  // of rows of logits
  std::int64_t tiles = 0;   // of max_keys
  int workers = 1;

  std::byte* memory = nullptr;  // what all workers share comes first, then one Scratch a worker
  std::size_t shared_bytes = 0;
  std::size_t worker_bytes = 0;

  std::int64_t first_unit = 0;  // of the wave at work
  std::int64_t key_size() const { return padded(job.shape.key_size); }
  std::int64_t value_size() const { return padded(job.shape.value_size); }
  bool packs_values() const { return plan.packs_values && job.v.given; }
  // A shard's logits may outlive the pass that computed them.
  bool keeps_logits() const { return pass == Pass::states && job.logits.data != nullptr; }
  bool has_logits() const {
    return (pass == Pass::sums || pass == Pass::threshold || pass == Pass::shard) &&
           job.logits.data != nullptr;
  }
  bool has_outputs() const { return pass == Pass::attention || pass == Pass::shard || pass == Pass::partial; }
};

// Units of a call, and rows, keys and stride of the largest.
template <typename Run>
void measure_units(Run& run) {
  const core::AttentionShape& shape = run.job.shape;
  run.units = run.job.sequences() * shape.key_heads;
  run.max_rows = shape.queries * shape.group;
  run.max_keys = shape.keys;
  if (!run.job.options.query_starts.empty()) {
    run.max_rows = run.max_keys = 0;
    for (std::int64_t i = 0; i < run.job.sequences(); ++i) {
      const core::Sequence sequence = run.job.sequence(i);
      run.max_rows = std::max(run.max_rows, sequence.queries * shape.group);
      run.max_keys = std::max(run.max_keys, sequence.keys);
    }
  }
  run.stride = logit_stride(run.max_keys);
}

// The shape that a plan is made for; as many threads as the caller set, or as it is worth.
template <typename Run>
core::PlanInput plan_input(const Run& run) {
  const core::AttentionShape& shape = run.job.shape;
  core::PlanInput in{.units = run.units,
                     .rows = run.max_rows,
                     .keys = run.max_keys,
                     .key_size = shape.key_size,
                     .value_size = shape.value_size,
                     .element_bytes = shape.wide() ? 8 : 4,
                     .cache_bytes = core::cache_bytes(),
                     .threads = core::resolve_threads(run.job.execution)};
  if (run.job.execution.threads == 0) in.threads = std::min(in.threads, core::useful_threads(in));
  return in;
}

// What a run's lay_out_shared and lay_out_worker (found by its type) take.
template <typename T, typename Run>
void measure_memory_of(Run& run) {
  Arena shared, worker;
  lay_out_shared<T>(run, shared);
  lay_out_worker<T>(run, worker);
  run.shared_bytes = shared.used();
  run.worker_bytes = worker.used();
}

template <typename Run>
void measure_memory(Run& run) {
  run.job.shape.wide() ? measure_memory_of<double>(run) : measure_memory_of<float>(run);
}

template <typename Run>
std::size_t total_bytes(const Run& run) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(run.worker_bytes, static_cast<std::size_t>(run.workers), &bytes) ||
      __builtin_add_overflow(bytes, run.shared_bytes, &bytes)) {
    throw std::bad_alloc();
  }
  return bytes;
}

// A step of a call for one task of one unit of the wave, and the steps compiled for a target.
using AttentionStep = void (*)(const AttentionRun& run, std::int64_t unit, std::int64_t task, int worker);
struct AttentionSteps {
  AttentionStep pack, block, few_logits, few_weights, few_values, few_output;
};

// What all workers of a wave share.
template <typename T>
struct Shared {
  T* keys = nullptr;               // many rows: a wave of packed K
  T* values = nullptr;             // many rows, if planned: a wave of packed V
  std::uint8_t* unsafe = nullptr;  // many rows: 1 for each tile of V that holds NaN or infinity; a wave
  T* x = nullptr;                  // few rows: rows x stride, a wave
  T* partial = nullptr;            // few rows: chunks x rows x padded E, a wave
  double* z = nullptr;             // few rows: normaliser of a row, a wave
};

// Used both to count and to lay out.
template <typename T>
Shared<T> lay_out_shared(const AttentionRun& run, Arena& arena) {
  Shared<T> s;
  const std::int64_t wave = run.plan.wave;
  if (run.plan.few) {
    s.x = arena.take<T>(wave, run.max_rows, run.stride);
    s.partial = arena.take<T>(wave * run.plan.blocks, run.max_rows, run.value_size());
    s.z = arena.take<double>(wave, run.max_rows);
  } else if (run.packed != nullptr) {
    s.keys = run.packed->keys<T>();
    s.values = run.packs_values() ? run.packed->values<T>() : nullptr;
    s.unsafe = run.packed->unsafe();
  } else {
    s.keys = arena.take<T>(wave, padded(run.max_keys), run.job.shape.key_size);
    if (run.packs_values()) s.values = arena.take<T>(wave, run.tiles * core::kTileKeys, run.value_size());
    s.unsafe = arena.take<std::uint8_t>(wave, run.tiles);
  }
  return s;
}

template <typename T>
Scratch<T> lay_out_worker(const AttentionRun& run, Arena& arena) {
  Scratch<T> s;
  const std::int64_t rows = run.plan.few ? 1 : run.plan.block_rows;
  s.q = arena.take<T>(run.plan.few ? run.max_rows : rows, run.key_size());
  if (!run.plan.few) s.x = arena.take<T>(rows, run.stride);
  s.out = arena.take<T>(rows, run.value_size());
  s.row = arena.take<T>(run.stride);
  s.values = arena.take<T>(core::kTileKeys, std::max(run.value_size(), run.key_size()));
  s.tile_max = arena.take<T>(run.tiles);
  s.keep = arena.take<std::uint8_t>(core::kBlockStep, run.tiles);
  s.live = arena.take<std::uint8_t>((rows + core::kBlockStep - 1) / core::kBlockStep, run.tiles);
  s.top = arena.take<std::int64_t>(run.job.outputs.top_k);
  s.counts = arena.take<TileCounts>(1);
  return s;
}

template <typename T>
Shared<T> shared_of(const AttentionRun& run) {
  Arena arena(run.memory);
  return lay_out_shared<T>(run, arena);
}

template <typename T>
Scratch<T> scratch_of(const AttentionRun& run, int worker) {
  Arena arena(run.memory + run.shared_bytes + static_cast<std::size_t>(worker) * run.worker_bytes);
  return lay_out_worker<T>(run, arena);
}

// A unit of the wave and its rows.
struct Unit {
  core::Sequence sequence;
  std::int64_t key_head;
  std::int64_t group;

  Unit(const core::AttentionJob& job, std::int64_t index)
      : sequence(job.sequence(index / job.shape.key_heads)),
        key_head(index % job.shape.key_heads),
        group(job.shape.group) {}

  std::int64_t rows() const { return sequence.queries * group; }
  std::int64_t keys() const { return sequence.keys; }
  std::int64_t query(std::int64_t row) const { return sequence.first_query + row / group; }
  std::int64_t head(std::int64_t row) const { return key_head * group + row % group; }

  // Keys that lengths, causal and window leave to a row, counted from the unit's first key.
  core::KeyRange range(const core::AttentionJob& job, std::int64_t row) const {
    const core::KeyRange r = job.visible(sequence, head(row), query(row));
    return r.empty() ? core::KeyRange{}
                     : core::KeyRange{r.begin - sequence.first_key, r.end - sequence.first_key};
  }
};

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ATTENTION_RUN_H_
