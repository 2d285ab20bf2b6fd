// A small pool of threads that wait passively, so that a busy neighbour costs little: they look a few
// microseconds for the next job, then sleep.
//
// Work is cut into tasks by shape alone; which thread runs a task never changes a result. Threads
// take tasks one by one, so a thread that the system holds up delays only the task in its hands.
// Any number of threads may call at once: their jobs share the same workers. After fork() the child
// starts with no workers and makes its own when it first needs them.
#ifndef WHET_CORE_THREAD_POOL_H_
#define WHET_CORE_THREAD_POOL_H_

#include <whet/runtime.h>

#include <cstdint>
#include <type_traits>

namespace whet::core {

// Runs the tasks on the executor, on the pool if it has no `run`, and in the caller if one thread is enough.
// `task` must not throw. Error if the executor doesn't run each task once.
void run_tasks(const Executor& executor, std::int64_t tasks, int threads, Executor::Task task, void* data);

// Calls body(task, worker) for every task in [0, tasks) on at most `threads` threads, and returns when all
// are done. worker is 0..threads-1, and no two tasks run at once on one worker of the same call. `body` must
// not throw.
template <typename Body>
void parallel_for(const Executor& executor, std::int64_t tasks, int threads, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_tasks(
      executor, tasks, threads,
      [](void* data, std::int64_t task, int worker) { (*static_cast<Plain*>(data))(task, worker); },
      const_cast<std::remove_const_t<Plain>*>(&body));
}

// The same on the pool.
template <typename Body>
void parallel_for(std::int64_t tasks, int threads, Body&& body) {
  parallel_for(Executor{}, tasks, threads, body);
}

}  // namespace whet::core

#endif  // WHET_CORE_THREAD_POOL_H_
