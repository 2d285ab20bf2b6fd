// linear_attention and linear_attention_backward: arguments in, rows out.

#include <whet/linear_attention.h>

#include <algorithm>
#include <string>

#include "core/arguments.h"
#include "core/attention_job.h"
#include "core/runtime.h"
#include "core/thread_pool.h"
#include "kernels/linear/run.h"
#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/linear.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/linear/backward-inl.h"
#include "kernels/linear/linear-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

void LinearTask(const LinearRun& run, std::int64_t unit, int worker) {
  run.job.shape.wide() ? RunUnit<double>(run, unit, worker) : RunUnit<float>(run, unit, worker);
}

void LinearBackwardTask(const LinearRun& run, std::int64_t unit, int worker) {
  run.job.shape.wide() ? RunUnitBackward<double>(run, unit, worker)
                       : RunUnitBackward<float>(run, unit, worker);
}

kernels::LinearSteps UnitSteps() { return {LinearTask, LinearBackwardTask}; }

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet {

namespace kernels {

HWY_EXPORT(UnitSteps);

namespace {

// What attention checks with the same words; lengths per row are beyond a state that all rows share.
AttentionOptions attention_options(const LinearAttentionOptions& options) {
  return {.causal = options.causal, .lengths = options.lengths};
}

void check_lengths(const core::AttentionJob& job) {
  const std::size_t given = job.options.lengths.size();
  if (given == 0 || given == static_cast<std::size_t>(job.shape.batch)) return;
  core::fail("lengths", std::to_string(given) + " given, must be one per batch entry, " +
                            std::to_string(job.shape.batch));
}

// As many threads as the caller set, or as it is worth.
int threads_for(const LinearRun& run) {
  const int threads = core::resolve_threads(run.job.execution);
  if (run.job.execution.threads != 0) return threads;
  constexpr double kWorthWaking = 0x1p19;  // multiply-adds
  const core::AttentionShape& shape = run.job.shape;
  const double rows = static_cast<double>(shape.rows()) +
                      static_cast<double>(shape.batch) * static_cast<double>(shape.key_heads * shape.keys);
  const double work = rows * static_cast<double>(shape.key_size * shape.value_size);
  return std::min(threads, static_cast<int>(std::clamp(work / kWorthWaking, 1.0, 1024.0)));
}

void run_linear(LinearRun& run) {
  const LinearSteps steps = WHET_DISPATCH(UnitSteps)();  // one target for all of the call
  check_lengths(run.job);
  run.units = run.job.shape.batch * run.job.shape.key_heads;
  run.workers = static_cast<int>(std::clamp<std::int64_t>(run.units, 1, threads_for(run)));
  if (run.units == 0) return;
  measure_memory(run);
  const Workspace workspace({}, total_bytes(run));
  run.memory = workspace.base();
  core::parallel_for(run.job.execution.executor, run.units, run.workers, [&](std::int64_t unit, int worker) {
    (run.backward ? steps.backward : steps.forward)(run, unit, worker);
  });
}

// The caller's, without the workspace, which is unused.
Execution without_workspace(const Execution& execution) {
  return {.threads = execution.threads, .executor = execution.executor};
}

}  // namespace

}  // namespace kernels

void linear_attention(ConstView q, ConstView k, ConstView v, View out, const LinearAttentionOptions& options,
                      const Execution& execution) {
  kernels::LinearRun run{.job = core::attention_job(q, k, v, out, kernels::attention_options(options), {},
                                                    kernels::without_workspace(execution))};
  kernels::run_linear(run);
}

void linear_attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                               const LinearAttentionGradients& gradients,
                               const LinearAttentionOptions& options, const Execution& execution) {
  const AttentionGradients wanted{.dq = gradients.dq, .dk = gradients.dk, .dv = gradients.dv};
  kernels::LinearRun run{
      .job = core::attention_backward_job(q, k, v, dout, wanted, kernels::attention_options(options), {},
                                          kernels::without_workspace(execution)),
      .backward = true};
  kernels::run_linear(run);
}

}  // namespace whet
#endif  // HWY_ONCE
