// Tasks that may fail, on several threads.
#ifndef WHET_LAB_PARALLEL_H_
#define WHET_LAB_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "core/thread_pool.h"

namespace whet::lab {

// Calls body(task, worker) for every task. The first exception ends it: no further task is begun, and when
// those that run have returned it is thrown here. (core::parallel_for's body must not throw.) `failed` tells
// long tasks to give up.
template <typename Body>
void for_each_task(std::int64_t tasks, int threads, Body&& body, std::atomic<bool>* failed = nullptr) {
  std::atomic<bool> own{false};
  std::atomic<bool>& stop = failed != nullptr ? *failed : own;
  std::mutex mutex;
  std::exception_ptr first;
  core::parallel_for(tasks, threads, [&](std::int64_t task, int worker) {
    if (stop) return;
    try {
      body(task, worker);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      stop = true;
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace whet::lab

#endif  // WHET_LAB_PARALLEL_H_
