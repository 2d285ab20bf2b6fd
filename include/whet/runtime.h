// How calls run, and the library's only global state: the default number of threads and the SIMD target.
#ifndef WHET_RUNTIME_H_
#define WHET_RUNTIME_H_

#include <whet/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace whet {

// "0.1.0"
WHET_API std::string version();

// The threads that run the tasks of a call. The default is whet's own pool, whose workers sleep between
// calls. A host that has workers already (a server's pool, OpenMP) passes those, so that two pools don't
// compete for the same cores.
//
// run(context, tasks, threads, task, data) calls task(data, i, worker) once for every i in [0, tasks), in any
// order, on at most `threads` threads, whether the caller's own is among them or not, and returns when all of
// them have returned. `worker` is 0..threads-1 and selects scratch memory: no two tasks that run at the same
// time may have the same. Tasks don't throw and don't wait for each other. One call of whet may call run
// several times, one after the other, and doesn't where one thread is enough. Results have the same bits on
// every executor.
//
// If run throws, so does the call of whet; if it returns without having run every task once, on workers
// 0..threads-1, the call throws Error. Outputs are unspecified then. No task may run after run has returned
// or thrown.
struct Executor {
  using Task = void (*)(void* data, std::int64_t i, int worker);
  using Run = void (*)(void* context, std::int64_t tasks, int threads, Task task, void* data);

  Run run = nullptr;  // null: whet's own pool
  void* context = nullptr;
  int threads = 0;  // of calls whose Execution::threads is 0; 0: whet::threads()
};

// How one call runs; nothing in it changes a bit of a result.
struct Execution {
  // At most this many, 1..1024; 0: as many as the executor says, else whet::threads(), fewer where the work
  // is too little.
  int threads = 0;
  Executor executor{};  // default: whet's own pool
  // Scratch memory for the functions that have a query for its size (attention_workspace(),
  // attention_backward_workspace()): at least that many bytes, of any alignment, not shared with another call
  // at the same time. Empty: the call allocates. Other functions don't use it.
  std::span<std::byte> workspace{};
};

// Threads a call uses when neither its Execution nor its Executor says how many. At first the environment
// variable WHET_THREADS, else the number of processors this process may run on. set_threads(0) returns to
// that. Results have the same bits for every number of threads.
WHET_API int threads();
WHET_API void set_threads(int count);  // 0..1024, else Error

// SIMD targets compiled into the library that this machine can run, best first: "AVX2", "SSE4", ...
WHET_API std::vector<std::string> targets();

// The target that calls made now run on: the forced one, else the environment variable WHET_TARGET,
// else the best. An unknown name in WHET_TARGET throws Error here and from every kernel.
WHET_API std::string target();

// Forces a target for all later calls of this process; "" goes back to the default.
// Error if `name` isn't one of targets().
WHET_API void force_target(std::string_view name);

}  // namespace whet

#endif  // WHET_RUNTIME_H_
