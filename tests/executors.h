// Executors that a host might pass to a call: the worst order, and threads of their own.
#ifndef WHET_TESTS_EXECUTORS_H_
#define WHET_TESTS_EXECUTORS_H_

#include <whet/runtime.h>

#include <cstdint>
#include <thread>
#include <vector>

namespace whet {

// On the caller's thread, last task first.
inline void run_backwards(void*, std::int64_t tasks, int threads, Executor::Task task, void* data) {
  for (std::int64_t i = tasks - 1; i >= 0; --i) task(data, i, threads - 1);
}

// On as many new threads, which the caller only waits for.
inline void run_on_new_threads(void*, std::int64_t tasks, int threads, Executor::Task task, void* data) {
  std::vector<std::thread> team;
  for (int worker = 0; worker < threads; ++worker) {
    team.emplace_back([=] {
      for (std::int64_t i = worker; i < tasks; i += threads) task(data, i, worker);
    });
  }
  for (std::thread& member : team) member.join();
}

}  // namespace whet

#endif  // WHET_TESTS_EXECUTORS_H_
