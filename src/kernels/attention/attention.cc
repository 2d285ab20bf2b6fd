// attention and the functions of a shard: arguments in, rows out.

#include <whet/attention.h>
#include <whet/shard.h>

#include <algorithm>
#include <string>

#include "core/arguments.h"
#include "core/attention_job.h"
#include "core/attention_plan.h"
#include "core/runtime.h"
#include "core/thread_pool.h"
#include "kernels/attention/run.h"
#include "kernels/row/normalizers.h"
#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/attention/block-inl.h"
#include "kernels/attention/few-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

// Steps of a call, for one task of one unit of the wave.

void PackTask(const AttentionRun& run, std::int64_t unit, std::int64_t task, int /*worker*/) {
  run.job.shape.wide() ? PackTile<double>(run, unit, task) : PackTile<float>(run, unit, task);
}

void BlockTask(const AttentionRun& run, std::int64_t unit, std::int64_t task, int worker) {
  run.job.shape.wide() ? RunBlock<double>(run, unit, task * run.plan.block_rows, worker)
                       : RunBlock<float>(run, unit, task * run.plan.block_rows, worker);
}

void FewLogitsTask(const AttentionRun& run, std::int64_t unit, std::int64_t task, int worker) {
  run.job.shape.wide() ? FewLogits<double>(run, unit, task, worker)
                       : FewLogits<float>(run, unit, task, worker);
}

void FewWeightsTask(const AttentionRun& run, std::int64_t unit, std::int64_t task, int worker) {
  run.job.shape.wide() ? FewWeights<double>(run, unit, task, worker)
                       : FewWeights<float>(run, unit, task, worker);
}

void FewValuesTask(const AttentionRun& run, std::int64_t unit, std::int64_t task, int worker) {
  run.job.shape.wide() ? FewValues<double>(run, unit, task, worker)
                       : FewValues<float>(run, unit, task, worker);
}

void FewOutputTask(const AttentionRun& run, std::int64_t unit, std::int64_t task, int worker) {
  run.job.shape.wide() ? FewOutput<double>(run, unit, task, worker)
                       : FewOutput<float>(run, unit, task, worker);
}

kernels::AttentionSteps ForwardSteps() {
  return {PackTask, BlockTask, FewLogitsTask, FewWeightsTask, FewValuesTask, FewOutputTask};
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet {

namespace kernels {

HWY_EXPORT(ForwardSteps);

namespace {

// `tasks` of every unit of the wave, unit by unit while its keys are in cache; the last tasks first, which
// under a causal mask are the longest.
void run_step(const AttentionRun& run, std::int64_t wave, std::int64_t tasks, AttentionStep step) {
  core::parallel_for(run.job.execution.executor, wave * tasks, run.workers, [&](std::int64_t i, int worker) {
    step(run, i / tasks, tasks - 1 - i % tasks, worker);
  });
}

// The same with the tasks of a unit one after the other, in order.
void run_step_in_order(const AttentionRun& run, std::int64_t wave, std::int64_t tasks, AttentionStep step) {
  core::parallel_for(run.job.execution.executor, wave, run.workers, [&](std::int64_t unit, int worker) {
    for (std::int64_t task = 0; task < tasks; ++task) step(run, unit, task, worker);
  });
}

bool needs_packing(const AttentionRun& run) {
  if (run.packed == nullptr) return true;
  return (!run.has_logits() && !run.packed->has_keys) || (run.packs_values() && !run.packed->has_values);
}

void run_wave(const AttentionRun& run, const AttentionSteps& steps, std::int64_t wave) {
  // Rows of a head add to the same column sums.
  const auto rows_step = run.job.outputs.column_sums.empty() ? run_step : run_step_in_order;
  if (run.plan.few) {
    if (!run.has_logits()) run_step(run, wave, run.plan.blocks, steps.few_logits);
    rows_step(run, wave, run.max_rows, steps.few_weights);
    if (!run.has_outputs()) return;
    run_step(run, wave, run.plan.blocks, steps.few_values);
    run_step(run, wave, run.max_rows, steps.few_output);
  } else {
    if (needs_packing(run)) run_step(run, wave, run.tiles, steps.pack);
    if (run.packed != nullptr) {
      run.packed->has_keys |= !run.has_logits();
      run.packed->has_values |= run.packs_values();
    }
    rows_step(run, wave, run.plan.blocks, steps.block);
  }
}

// What is packed stays with the shard: then all units are one wave.
void hold_packed(AttentionRun& run, const void* target) {
  run.packed = run.job.shard.packed == nullptr || run.plan.few ? nullptr : &run.job.shard.packed->memory();
  if (run.packed == nullptr || run.units == 0) return;
  run.plan.wave = run.units;
  using Source = PackedShard::Memory::Source;
  const auto source = [&](const core::Grid& grid, std::int64_t size) {
    return Source{grid.data, grid.dtype, run.units, run.max_keys, size, target};
  };
  run.packed->hold(source(run.job.k, run.job.shape.key_size),
                   run.packs_values() ? source(run.job.v, run.value_size()) : Source{}, run.tiles,
                   run.job.shape.wide() ? sizeof(double) : sizeof(float));
}

// Fills in everything but memory. `target`: as for hold_packed.
void plan_run(AttentionRun& run, const void* target = nullptr) {
  measure_units(run);
  run.tiles = (run.max_keys + core::kTileKeys - 1) / core::kTileKeys;
  const core::PlanInput in = plan_input(run);
  run.plan = core::forward_plan(in);
  hold_packed(run, target);
  const std::int64_t tasks = std::max(run.plan.wave, std::int64_t{1}) *
                             std::max({run.plan.blocks, run.tiles, run.max_rows, std::int64_t{1}});
  run.workers = static_cast<int>(std::min<std::int64_t>(in.threads, tasks));
  measure_memory(run);
}

TileCounts& counts_of(const AttentionRun& run, int worker) {
  return run.job.shape.wide() ? *scratch_of<double>(run, worker).counts
                              : *scratch_of<float>(run, worker).counts;
}

// Keys of other sequences, and beyond a length, have no weight.
void clear_sums(const AttentionRun& run) {
  const AttentionOutputs& outputs = run.job.outputs;
  std::ranges::fill(outputs.column_sums, 0.0);
  const std::int64_t bytes = core::element_bytes(run.job.weights.dtype);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(outputs.weight_rows.size()); ++i) {
    for (std::int64_t key = 0; key < run.job.shape.keys; ++key) {
      std::fill_n(run.job.weights.at(i, 0, 0, key), bytes, std::byte{0});
    }
  }
}

void run_attention(AttentionRun& run) {
  const AttentionSteps steps = WHET_DISPATCH(ForwardSteps)();  // one target for all of the call
  plan_run(run, reinterpret_cast<const void*>(steps.pack));
  const Workspace workspace(run.job.execution.workspace, total_bytes(run));
  run.memory = workspace.base();
  clear_sums(run);
  if (run.units > 0 && run.max_rows > 0) {
    for (int worker = 0; worker < run.workers; ++worker) counts_of(run, worker) = {};
    for (; run.first_unit < run.units; run.first_unit += run.plan.wave) {
      run_wave(run, steps, std::min(run.plan.wave, run.units - run.first_unit));
    }
  }
  if (run.job.outputs.tile_counts == nullptr) return;
  TileCounts total;
  for (int worker = 0; worker < run.workers && run.units > 0 && run.max_rows > 0; ++worker) {
    total.tiles += counts_of(run, worker).tiles;
    total.skipped += counts_of(run, worker).skipped;
  }
  *run.job.outputs.tile_counts = total;
}

}  // namespace

}  // namespace kernels

std::int64_t saved_size(const AttentionOptions& options) {
  if (options.head_rules.empty()) return kernels::saved_size(options.rule, options.normalizer);
  std::int64_t size = 0;
  for (const Rule& rule : options.head_rules) {
    size = std::max(size, kernels::saved_size(rule, options.normalizer));
  }
  return size;
}

void attention(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options,
               const AttentionOutputs& outputs, const Execution& execution) {
  kernels::AttentionRun run{.job = core::attention_job(q, k, v, out, options, outputs, execution)};
  kernels::run_attention(run);
}

std::size_t attention_workspace(ConstView q, ConstView k, ConstView v, const AttentionOptions& options,
                                const AttentionOutputs& outputs, const Execution& execution) {
  kernels::AttentionRun run{.job = core::attention_shape_job(q, k, v, options, outputs, execution)};
  kernels::plan_run(run);
  return kernels::total_bytes(run) + kernels::Arena::kLine;
}

PackedShard::PackedShard() : memory_(std::make_unique<Memory>()) {}
PackedShard::PackedShard(PackedShard&& other) noexcept = default;
PackedShard& PackedShard::operator=(PackedShard&& other) noexcept = default;
PackedShard::~PackedShard() = default;

void shard_states(ConstView q, ConstView k, const Shard& shard, std::span<RowState> out,
                  const AttentionOptions& options, const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::AttentionRun run{.job = core::shard_job(q, k, {}, {}, shard, options, execution),
                            .pass = kernels::Pass::states,
                            .states = out};
  core::check_one_a_row(out.size(), run.job, "out");
  core::check_apart(run.job, {out, "out"});
  kernels::run_attention(run);
}

void shard_sums(ConstView q, ConstView k, const Shard& shard, std::span<const RowScale> rows,
                std::span<RowSums> out, const AttentionOptions& options, const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::AttentionRun run{.job = core::shard_job(q, k, {}, {}, shard, options, execution),
                            .pass = kernels::Pass::sums,
                            .scales = rows,
                            .sums = out};
  core::check_one_a_row(rows.size(), run.job, "rows");
  core::check_one_a_row(out.size(), run.job, "out");
  core::check_apart(run.job, {out, "out"});
  core::check_apart({out, "out"}, {rows, "rows"});
  kernels::run_attention(run);
}

void shard_threshold_sums(ConstView q, ConstView k, const Shard& shard, std::span<const RowScale> rows,
                          std::span<ThresholdSums> out, const AttentionOptions& options,
                          const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::check_threshold(options.normalizer, true);
  kernels::AttentionRun run{.job = core::shard_job(q, k, {}, {}, shard, options, execution),
                            .pass = kernels::Pass::threshold,
                            .scales = rows,
                            .threshold_sums = out};
  core::check_one_a_row(rows.size(), run.job, "rows");
  core::check_one_a_row(out.size(), run.job, "out");
  core::check_apart(run.job, {out, "out"});
  core::check_apart({out, "out"}, {rows, "rows"});
  kernels::run_attention(run);
}

void shard_attention(ConstView q, ConstView k, ConstView v, const Shard& shard,
                     std::span<const RowScale> rows, View out, std::span<double> mass,
                     const AttentionOptions& options, const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::AttentionRun run{.job = core::shard_job(q, k, v, out, shard, options, execution),
                            .pass = kernels::Pass::shard,
                            .scales = rows,
                            .mass = mass};
  core::check_one_a_row(rows.size(), run.job, "rows");
  core::check_one_a_row(mass.size(), run.job, "mass");
  if (!run.job.v.given) core::fail("v", "not given, must be (B, K, M, E)");
  core::check_apart(run.job, {mass, "mass"});
  core::check_apart({mass, "mass"}, {rows, "rows"});
  core::check_apart({run.job.out, "out"}, {rows, "rows"});
  kernels::run_attention(run);
}

void shard_partial_attention(ConstView q, ConstView k, ConstView v, const Shard& shard,
                             std::span<const double> betas, View out, std::span<RowState> states,
                             std::span<double> mass, const AttentionOptions& options,
                             const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::check_threshold(options.normalizer, false);
  kernels::AttentionRun run{.job = core::shard_job(q, k, v, out, shard, options, execution),
                            .pass = kernels::Pass::partial,
                            .betas = betas,
                            .states = states,
                            .mass = mass};
  core::check_one_a_row(betas.size(), run.job, "betas");
  core::check_one_a_row(states.size(), run.job, "states");
  core::check_one_a_row(mass.size(), run.job, "mass");
  if (!run.job.v.given) core::fail("v", "not given, must be (B, K, M, E)");
  core::check_apart(run.job, {states, "states"});
  core::check_apart(run.job, {mass, "mass"});
  core::check_apart({mass, "mass"}, {states, "states"});
  for (const core::Extent& written :
       {core::Extent(states, "states"), core::Extent(mass, "mass"), core::Extent(run.job.out, "out")}) {
    core::check_apart(written, {betas, "betas"});
  }
  kernels::run_attention(run);
}

void check_shard(ConstView q, ConstView k, ConstView v, ConstView out, const Shard& shard,
                 const AttentionOptions& options) {
  kernels::check_merges_shards(options.normalizer);
  core::check_shard_call(q, k, v, out, shard, options);
}

void check_shard_backward(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                          const AttentionGradients& gradients, const AttentionOptions& options) {
  kernels::check_merges_shards(options.normalizer);
  core::check_shard_backward_call(q, k, v, dout, shard, gradients, options);
}

}  // namespace whet
#endif  // HWY_ONCE
