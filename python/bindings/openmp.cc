// A library whose workers spin between its operators, as torch's do, leaves no core to another pool: whet
// runs on the same workers instead. GOMP_parallel is what compilers make of `#pragma omp parallel`, and part
// of libgomp's stable ABI; calling it needs neither OpenMP when this file is compiled nor a second runtime.

#include "openmp.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "bindings.h"
#include "values.h"

namespace whet_python {

namespace {

// void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags): every member of the
// team calls body(data); threads = 0 is as many as the program has set.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using InParallel = int (*)();

struct OpenMp {
  Parallel parallel = nullptr;
  InParallel in_parallel = nullptr;
};

OpenMp openmp;

// In a child of fork() the team looks complete and has no threads: a parallel region would wait for ever.
std::atomic<bool> forked{false};

// The tasks of one parallel region; members take them one by one.
struct Region {
  const std::int64_t tasks;
  const int threads;
  const whet::Executor::Task task;
  void* const data;
  std::atomic<std::int64_t> next{0};
  std::atomic<int> members{0};

  static void enter(void* self) {
    Region& region = *static_cast<Region*>(self);
    const int worker = region.members++;
    if (worker >= region.threads) return;
    for (std::int64_t i = region.next++; i < region.tasks; i = region.next++) {
      region.task(region.data, i, worker);
    }
  }
};

// The team has always the size that the program has set, also where fewer are needed: libgomp ends threads
// that a smaller team leaves over and starts them again for the next one. Inside a parallel region the caller
// does everything, as torch does.
void run(void*, std::int64_t tasks, int threads, whet::Executor::Task task, void* data) {
  Region region{.tasks = tasks, .threads = threads, .task = task, .data = data};
  if (openmp.in_parallel() != 0) {
    Region::enter(&region);
  } else {
    openmp.parallel(Region::enter, &region, 0, 0);
  }
}

// The definition that calls made by `library` reach: global ones come first, then its own dependencies.
template <typename Function>
Function find(void* library, const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  return reinterpret_cast<Function>(found != nullptr ? found : dlsym(library, name));
}

// Whether the library at `path`, which must be loaded already, brought an OpenMP runtime along.
bool find_openmp(nb::handle path) {
  void* library = dlopen(std::string(text_of(path, "path")).c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return false;
  const OpenMp found{find<Parallel>(library, "GOMP_parallel"), find<InParallel>(library, "omp_in_parallel")};
  dlclose(library);
  if (found.parallel == nullptr || found.in_parallel == nullptr) return false;
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  openmp = found;
  return true;
}

}  // namespace

whet::Executor openmp_executor(int threads) {
  constexpr int kMostThreads = 1024;  // that whet takes
  const bool usable = openmp.parallel != nullptr && !forked.load(std::memory_order_relaxed);
  return {.run = usable ? run : nullptr, .threads = std::min(threads, kMostThreads)};
}

void add_openmp(nb::module_& module) { module.def("find_openmp", &find_openmp, nb::arg("path").none()); }

}  // namespace whet_python
