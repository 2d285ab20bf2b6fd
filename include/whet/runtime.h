// How calls run, and the library's only global state: the default number of threads and the SIMD target.
#ifndef WHET_RUNTIME_H_
#define WHET_RUNTIME_H_

#include <whet/export.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace whet {

// "0.1.0"
WHET_API std::string version();

// How one call runs; nothing in it changes a bit of a result.
struct Execution {
  int threads = 0;  // at most this many, 1..1024; 0: whet::threads(), fewer where the work is too little
  // Scratch memory for the functions that have a query for its size (attention_workspace(),
  // attention_backward_workspace()): at least that many bytes, of any alignment, not shared with another call
  // at the same time. Empty: the call allocates. Other functions don't use it.
  std::span<std::byte> workspace{};
};

// Threads a call uses when Execution::threads is 0. At first the environment variable WHET_THREADS,
// else the number of processors this process may run on. set_threads(0) returns to that.
// Results have the same bits for every number of threads.
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
