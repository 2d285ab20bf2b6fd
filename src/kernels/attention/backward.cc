// attention_backward: arguments in, gradients out.

#include <whet/attention.h>
#include <whet/shard.h>

#include <algorithm>

#include "core/arguments.h"
#include "core/attention_job.h"
#include "core/attention_plan.h"
#include "core/runtime.h"
#include "core/thread_pool.h"
#include "kernels/attention/backward_run.h"
#include "kernels/row/normalizers.h"
#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/backward.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/attention/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

void BackwardTask(const BackwardRun& run, std::int64_t unit, std::int64_t part, int worker) {
  run.job.shape.wide() ? RunPart<double>(run, unit, part, worker) : RunPart<float>(run, unit, part, worker);
}

void JoinTask(const BackwardRun& run, std::int64_t unit, int worker) {
  run.job.shape.wide() ? JoinParts<double>(run, unit, worker) : JoinParts<float>(run, unit, worker);
}

// One element of a gradient that was summed in the type of the arithmetic.
void StoreElement(const BackwardRun& run, double value, DType dtype, std::byte* to) {
  const auto narrow = static_cast<float>(value);
  run.job.shape.wide() ? StoreRow(&value, dtype, 1, 1, to) : StoreRow(&narrow, dtype, 1, 1, to);
}

kernels::BackwardSteps GradientSteps() { return {BackwardTask, JoinTask, StoreElement}; }

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet {

namespace kernels {

HWY_EXPORT(GradientSteps);

namespace {

DType arithmetic(const core::AttentionShape& shape) { return shape.wide() ? DType::f64 : DType::f32; }

// Calls body(a, b, c, d) for every element of a view of four axes.
template <typename Body>
void for_each_element(const Dims& sizes, const Body& body) {
  for (std::int64_t a = 0; a < sizes[0]; ++a) {
    for (std::int64_t b = 0; b < sizes[1]; ++b) {
      for (std::int64_t c = 0; c < sizes[2]; ++c) {
        for (std::int64_t d = 0; d < sizes[3]; ++d) body(a, b, c, d);
      }
    }
  }
}

// dbias is summed where it lies if it has the type of the arithmetic, else in the workspace. Units that
// share it can't run side by side, nor can parts of one.
void plan_bias(BackwardRun& run, const Dims& sizes) {
  if (!run.job.dbias.given) return;
  const core::AttentionShape& shape = run.job.shape;
  run.plan.parts = 1;
  const bool shared = (sizes[0] == 1 && shape.batch > 1) || (sizes[1] == 1 && shape.heads > 1) ||
                      (sizes[2] == 1 && sizes[3] == 1 && run.job.sequences() > 1);
  if (shared) run.workers = 1;
  run.bias_sums = run.job.dbias;
  if (run.job.dbias.dtype == arithmetic(shape)) return;
  run.bias_sums.dtype = arithmetic(shape);
  std::int64_t stride = 1;
  for (std::size_t i = 4; i-- > 0;) {
    run.bias_sums.strides[i] = sizes[i] == 1 ? 0 : stride;
    stride *= sizes[i];
  }
  run.bias_elements = stride;
}

void plan_backward(BackwardRun& run, const Dims& bias_sizes) {
  measure_units(run);
  run.tiles = (run.max_keys + core::kTileKeys - 1) / core::kTileKeys;
  // Few rows take another path forward, where logits round differently.
  run.reads_saved = run.job.saved.given() && run.max_rows > core::kFewRows;
  const core::PlanInput in = plan_input(run);
  run.plan = core::backward_plan(in);
  run.workers = in.threads;
  plan_bias(run, bias_sizes);
  run.workers = static_cast<int>(
      std::clamp<std::int64_t>(run.units * run.plan.parts, 1, static_cast<std::int64_t>(run.workers)));
  measure_memory(run);
}

template <typename T>
BackwardShared<T> backward_shared_of(const BackwardRun& run) {
  Arena arena(run.memory);
  return lay_out_shared<T>(run, arena);
}

TileCounts& counts_of(const BackwardRun& run, int worker) {
  Arena arena(run.memory + run.shared_bytes + static_cast<std::size_t>(worker) * run.worker_bytes);
  return run.job.shape.wide() ? *lay_out_worker<double>(run, arena).counts
                              : *lay_out_worker<float>(run, arena).counts;
}

void store_counts(const BackwardRun& run) {
  if (run.job.outputs.tile_counts == nullptr) return;
  TileCounts total;
  for (int worker = 0; worker < run.workers; ++worker) {
    total.tiles += counts_of(run, worker).tiles;
    total.skipped += counts_of(run, worker).skipped;
  }
  *run.job.outputs.tile_counts = total;
}

void clear_bias(BackwardRun& run, const Dims& sizes) {
  if (run.bias_sums.data == nullptr) return;
  if (run.bias_elements > 0) {
    run.bias_sums.data = run.job.shape.wide()
                             ? reinterpret_cast<std::byte*>(backward_shared_of<double>(run).bias)
                             : reinterpret_cast<std::byte*>(backward_shared_of<float>(run).bias);
  }
  const std::int64_t bytes = core::element_bytes(run.bias_sums.dtype);
  for_each_element(sizes,
                   [&](auto... index) { std::fill_n(run.bias_sums.at(index...), bytes, std::byte{0}); });
}

void store_bias(const BackwardRun& run, const BackwardSteps& steps, const Dims& sizes) {
  if (run.bias_elements == 0) return;
  for_each_element(sizes, [&](auto... index) {
    const std::byte* sum = run.bias_sums.at(index...);
    const double value = run.job.shape.wide() ? *reinterpret_cast<const double*>(sum)
                                              : static_cast<double>(*reinterpret_cast<const float*>(sum));
    steps.store(run, value, run.job.dbias.dtype, run.job.dbias.at(index...));
  });
}

void store_sinks(const BackwardRun& run, const BackwardSteps& steps) {
  const core::AttentionJob& job = run.job;
  if (job.dsinks.data == nullptr) return;
  const double* sums =
      job.shape.wide() ? backward_shared_of<double>(run).dsinks : backward_shared_of<float>(run).dsinks;
  for (std::int64_t head = 0; head < job.shape.heads; ++head) {
    const std::int64_t key_head = head / job.shape.group, member = head % job.shape.group;
    double sum = 0;
    for (std::int64_t unit = key_head; unit < run.units; unit += job.shape.key_heads) {
      for (std::int64_t part = 0; part < run.plan.parts; ++part) {
        sum += sums[(unit * run.plan.parts + part) * job.shape.group + member];
      }
    }
    steps.store(run, sum, job.dsinks.dtype, job.dsinks.at(0, head, 0));
  }
}

// Rows that share an element of query_scale are added by one thread, in order.
void store_query_scale(const BackwardRun& run, const BackwardSteps& steps, const Dims& sizes) {
  const core::AttentionJob& job = run.job;
  if (job.dquery_scale.data == nullptr) return;
  const double* rows = job.shape.wide() ? backward_shared_of<double>(run).dquery_scale
                                        : backward_shared_of<float>(run).dquery_scale;
  const Dims shape = {job.shape.batch, job.shape.heads, job.shape.queries};
  // How many indices of an axis of the call one element stands for.
  const auto shared = [&](std::size_t axis) { return sizes[axis] == 1 ? shape[axis] : 1; };
  for_each_element({sizes[0], sizes[1], sizes[2], 1}, [&](auto b, auto h, auto i, auto) {
    double sum = 0;
    for_each_element({shared(0), shared(1), shared(2), 1}, [&](auto batch, auto head, auto query, auto) {
      sum += rows[job.row(b + batch, h + head, i + query)];
    });
    steps.store(run, sum, job.dquery_scale.dtype, job.dquery_scale.at(b, h, i));
  });
}

void run_backward(BackwardRun& run, const AttentionGradients& gradients) {
  const BackwardSteps steps = WHET_DISPATCH(GradientSteps)();  // one target for all of the call
  const Execution& execution = run.job.execution;
  plan_backward(run, gradients.dbias.sizes);
  const Workspace workspace(execution.workspace, total_bytes(run));
  run.memory = workspace.base();
  clear_bias(run, gradients.dbias.sizes);
  std::ranges::fill(run.job.dparameter, 0.0);  // what rows that see nothing have
  for (int worker = 0; worker < run.workers; ++worker) counts_of(run, worker) = {};
  core::parallel_for(execution.executor, run.units * run.plan.parts, run.workers,
                     [&](std::int64_t task, int worker) {
                       steps.part(run, task / run.plan.parts, task % run.plan.parts, worker);
                     });
  if (run.shares_sums()) {
    core::parallel_for(execution.executor, run.units, run.workers,
                       [&](std::int64_t unit, int worker) { steps.join(run, unit, worker); });
  }
  store_bias(run, steps, gradients.dbias.sizes);
  store_sinks(run, steps);
  store_query_scale(run, steps, gradients.dquery_scale.sizes);
  store_counts(run);
}

}  // namespace

}  // namespace kernels

void attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                        const AttentionGradients& gradients, const AttentionOptions& options,
                        const AttentionBackwardOptions& backward, const Execution& execution) {
  kernels::BackwardRun run{
      .job = core::attention_backward_job(q, k, v, dout, gradients, options, backward, execution)};
  if (!run.job.dparameter.empty()) kernels::check_parameter_gradient(options.normalizer);
  kernels::run_backward(run, gradients);
}

void shard_gradient_sums(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                         std::span<const WeighedRow> rows, std::span<GradientSums> out,
                         const AttentionOptions& options, const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::BackwardRun run{.job = core::shard_backward_job(q, k, v, dout, shard, {}, options, execution),
                           .pass = kernels::BackwardPass::sums,
                           .weighed = rows,
                           .sums = out};
  core::check_one_a_row(rows.size(), run.job, "rows");
  core::check_one_a_row(out.size(), run.job, "out");
  core::check_apart(run.job, {out, "out"});
  core::check_apart({out, "out"}, {rows, "rows"});
  kernels::run_backward(run, {});
}

void shard_backward(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                    std::span<const RowSlope> rows, const AttentionGradients& gradients,
                    const AttentionOptions& options, const Execution& execution) {
  kernels::check_merges_shards(options.normalizer);
  kernels::BackwardRun run{
      .job = core::shard_backward_job(q, k, v, dout, shard, gradients, options, execution),
      .pass = kernels::BackwardPass::shard,
      .slopes = rows};
  core::check_one_a_row(rows.size(), run.job, "rows");
  core::check_written_apart(run.job, {rows, "rows"});
  kernels::run_backward(run, gradients);
}

std::size_t attention_backward_workspace(ConstView q, ConstView k, ConstView v,
                                         const AttentionGradients& gradients, const AttentionOptions& options,
                                         const AttentionBackwardOptions& backward,
                                         const Execution& execution) {
  kernels::BackwardRun run{
      .job = core::attention_backward_shape_job(q, k, v, gradients, options, backward, execution)};
  kernels::plan_backward(run, gradients.dbias.sizes);
  return kernels::total_bytes(run) + kernels::Arena::kLine;
}

}  // namespace whet
#endif  // HWY_ONCE
