// A small pool of threads that wait passively, so that a busy neighbour costs little: they look a few
// microseconds for the next job, then sleep.
//
// Work is cut into tasks by shape alone; which thread runs a task never changes a result. Threads
// take tasks one by one, so a thread that the system holds up delays only the task in its hands.
// Any number of threads may call at once: their jobs share the same workers. After fork() the child
// starts with no workers and makes its own when it first needs them.
#ifndef WHET_CORE_THREAD_POOL_H_
#define WHET_CORE_THREAD_POOL_H_

#include <cstdint>
#include <type_traits>

namespace whet::core {

// body(context, task, worker): worker is 0..threads-1, and no two tasks run at once on one worker
// of the same call. Must not throw.
using TaskBody = void (*)(void* context, std::int64_t task, int worker);

void run_tasks(std::int64_t tasks, int threads, TaskBody body, void* context);

// Calls body(task, worker) for every task in [0, tasks) on at most `threads` threads, the caller
// among them, and returns when all are done.
template <typename Body>
void parallel_for(std::int64_t tasks, int threads, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_tasks(
      tasks, threads,
      [](void* context, std::int64_t task, int worker) { (*static_cast<Plain*>(context))(task, worker); },
      const_cast<std::remove_const_t<Plain>*>(&body));
}

}  // namespace whet::core

#endif  // WHET_CORE_THREAD_POOL_H_
