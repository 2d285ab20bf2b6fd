// What the row kernels are given: a call whose arguments are checked, cut into tasks of whole rows.
#ifndef WHET_KERNELS_ROW_ROW_JOB_H_
#define WHET_KERNELS_ROW_ROW_JOB_H_

#include <whet/normalizer.h>
#include <whet/row.h>
#include <whet/rule.h>
#include <whet/softmax.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include "core/rows.h"
#include "core/runtime.h"
#include "core/saved_rows.h"
#include "core/thread_pool.h"

namespace whet::kernels {

// Calls the version of an exported kernel that was compiled for the chosen target.
// Where one target alone is compiled, Highway's table has it alone.
#define WHET_DISPATCH(FUNCTION) \
  (*(HWY_DISPATCH_TABLE(        \
      FUNCTION)[(HWY_TARGETS & (HWY_TARGETS - 1)) == 0 ? 0 : ::whet::core::chosen_target().GetIndex()]))

struct RowJob {
  core::Rows rows;
  Rule rule{};
  Normalizer normalizer{};
  core::RowArray in{};    // logits, or probabilities
  core::RowArray dout{};  // backward only
  core::RowArray out{};   // weights, or din
  core::RowArray mask{};  // data null: none
  std::span<const std::int64_t> lengths{};
  std::span<RowStats> stats{};
  core::SavedRows saved{};  // written by softmax, read by softmax_backward
  std::span<RowState> states{};
  std::span<double> dparameter{};  // backward only
  bool in_is_probabilities = false;
  bool through_rule = true;

  const std::uint8_t* mask_at(std::int64_t offset) const {
    return mask.data == nullptr ? nullptr : reinterpret_cast<const std::uint8_t*>(mask.data) + offset;
  }

  std::int64_t length(std::int64_t row) const {
    return lengths.empty() ? rows.keys() : lengths[static_cast<std::size_t>(row)];
  }
};

inline DType arithmetic(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// True if the kernel can work on the array where it is: contiguous rows of the arithmetic type.
inline bool is_direct(const core::RowArray& a, std::int64_t keys) {
  return (a.dtype == DType::f32 || a.dtype == DType::f64) && (a.key_stride == 1 || keys <= 1);
}

// One row for each worker, on cache lines of its own; empty if nobody needs one.
class RowBuffers {
 public:
  RowBuffers() = default;
  RowBuffers(int workers, std::int64_t keys, DType dtype) {
    const std::size_t element = dtype == DType::f64 ? sizeof(double) : sizeof(float);
    std::size_t total = 0;
    if (__builtin_mul_overflow(static_cast<std::size_t>(keys), element, &stride_) ||
        __builtin_add_overflow(stride_, 2 * kLine, &stride_) ||
        __builtin_mul_overflow(stride_ &= ~(kLine - 1), static_cast<std::size_t>(workers), &total)) {
      throw std::bad_alloc();
    }
    memory_.reset(static_cast<std::byte*>(::operator new(total, std::align_val_t(kLine))));
  }

  template <typename T>
  T* row(int worker) const {
    return memory_ ? reinterpret_cast<T*>(memory_.get() + static_cast<std::size_t>(worker) * stride_)
                   : nullptr;
  }

 private:
  static constexpr std::size_t kLine = 64;
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(kLine)); }
  };
  std::size_t stride_ = 0;
  std::unique_ptr<std::byte, Delete> memory_;
};

// Rows of one task, by shape alone: enough keys that handing a task over costs nothing beside it.
inline std::int64_t rows_per_task(std::int64_t keys) {
  constexpr std::int64_t kTaskKeys = 16384;
  return keys >= kTaskKeys ? 1 : kTaskKeys / (keys + 1) + 1;
}

// A kernel works on rows [begin, end) with one row of scratch (or null).
using RowKernel = void (*)(const RowJob& job, std::int64_t begin, std::int64_t end, void* buffer);

// Runs the kernel over all rows. Allocates once, before anything is written, if `buffered`.
inline void run_rows(const RowJob& job, RowKernel kernel, const Execution& execution, bool buffered) {
  const int threads = core::resolve_threads(execution);
  // Rows without keys only have outputs per row; there may be any number of them.
  const bool per_row =
      !job.stats.empty() || !job.states.empty() || !job.dparameter.empty() || job.saved.given();
  if (job.rows.keys() == 0 && !per_row) return;
  const std::int64_t per_task = rows_per_task(job.rows.keys());
  const std::int64_t tasks = (job.rows.count() + per_task - 1) / per_task;
  if (tasks == 0) return;
  const int workers = static_cast<int>(std::min<std::int64_t>(threads, tasks));
  const RowBuffers buffers = buffered ? RowBuffers(workers, job.rows.keys(), job.in.dtype) : RowBuffers();
  core::parallel_for(execution.executor, tasks, workers, [&](std::int64_t task, int worker) {
    const std::int64_t begin = task * per_task;
    kernel(job, begin, std::min(begin + per_task, job.rows.count()), buffers.row<void>(worker));
  });
}

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ROW_ROW_JOB_H_
