#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <whet/error.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "executors.h"

namespace whet::core {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    for (const std::int64_t tasks : {0, 1, 2, 5, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      parallel_for(tasks, threads, [&](std::int64_t task, int worker) {
        EXPECT_LT(worker, threads);
        ++runs[static_cast<std::size_t>(task)];
      });
      for (const auto& count : runs) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, GivesEachWorkerItsOwnNumber) {
  constexpr int kThreads = 4;
  std::vector<std::atomic<int>> inside(kThreads);
  parallel_for(2000, kThreads, [&](std::int64_t, int worker) {
    auto& mine = inside[static_cast<std::size_t>(worker)];
    EXPECT_EQ(++mine, 1);
    std::this_thread::yield();
    --mine;
  });
}

TEST(ThreadPool, UsesOtherThreads) {
  // A task that waits for a second one to start can only end if two threads are at work.
  std::atomic<int> started{0};
  parallel_for(2, 2, [&](std::int64_t, int) {
    ++started;
    while (started < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  EXPECT_EQ(started, 2);
}

TEST(ThreadPool, ServesManyCallersAtOnce) {
  std::vector<std::int64_t> sums(8);
  std::vector<std::thread> callers;
  for (auto& sum : sums) {
    callers.emplace_back([&sum] {
      for (int round = 0; round < 50; ++round) {
        std::atomic<std::int64_t> total{0};
        parallel_for(100, 3, [&](std::int64_t task, int) { total += task; });
        sum += total;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  for (const std::int64_t sum : sums) EXPECT_EQ(sum, 50 * 4950);
}

TEST(ThreadPool, CallsInsideCallsComplete) {
  std::atomic<int> inner{0};
  parallel_for(4, 2, [&](std::int64_t, int) { parallel_for(10, 2, [&](std::int64_t, int) { ++inner; }); });
  EXPECT_EQ(inner, 40);
}

// True if the child that runs `body` exits with its result true, within ten seconds.
template <typename F>
bool child_succeeds(F&& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool two_threads_work() {
  std::atomic<int> started{0};
  parallel_for(2, 2, [&](std::int64_t, int) {
    ++started;
    while (started < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  return started == 2;
}

TEST(ThreadPool, WorksInAForkedChild) {
  ASSERT_TRUE(two_threads_work());  // the parent's workers exist
  EXPECT_TRUE(child_succeeds(two_threads_work));
  EXPECT_TRUE(two_threads_work());  // and still serve the parent
}

TEST(ThreadPool, WorksInAChildForkedWhileOthersCall) {
  std::atomic<bool> stop{false}, helped{false};
  std::thread busy([&] {
    while (!stop) {
      parallel_for(64, 2, [&](std::int64_t, int worker) {
        if (worker != 0) helped = true;
      });
    }
  });
  // Its first call allocates and starts a thread, during which a process under AddressSanitizer must not
  // fork: its allocator, unlike the C library's, may stay locked in the child. The thread has started once it
  // helps.
  while (!helped) std::this_thread::yield();
  int succeeded = 0;
  for (int i = 0; i < 20; ++i) succeeded += child_succeeds(two_threads_work) ? 1 : 0;
  stop = true;
  busy.join();
  EXPECT_EQ(succeeded, 20);
}

// ---- Executors of a host ----

using Task = Executor::Task;

TEST(Executor, RunsEveryTaskOnce) {
  for (const Executor::Run run : {run_backwards, run_on_new_threads}) {
    for (const std::int64_t tasks : {0, 1, 2, 5, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      parallel_for({.run = run}, tasks, 3, [&](std::int64_t task, int worker) {
        EXPECT_LT(worker, 3);
        ++runs[static_cast<std::size_t>(task)];
      });
      for (const auto& count : runs) ASSERT_EQ(count, 1);
    }
  }
}

TEST(Executor, GetsItsContextAndNoMoreThreadsThanTasks) {
  std::vector<int> calls;
  const auto record = [](void* context, std::int64_t tasks, int threads, Task task, void* data) {
    static_cast<std::vector<int>*>(context)->push_back(threads);
    run_backwards(nullptr, tasks, threads, task, data);
  };
  const Executor executor{.run = record, .context = &calls};
  parallel_for(executor, 5, 8, [](std::int64_t, int) {});
  parallel_for(executor, 5, 2, [](std::int64_t, int) {});
  parallel_for(executor, 5, 1, [](std::int64_t, int) {});  // one thread is enough: the caller's
  parallel_for(executor, 1, 8, [](std::int64_t, int) {});
  EXPECT_EQ(calls, (std::vector<int>{5, 2}));
}

std::string error_of(Executor::Run run) {
  try {
    parallel_for({.run = run}, 4, 2,
                 [](std::int64_t, int worker) { EXPECT_TRUE(worker == 0 || worker == 1); });
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(Executor, ThatLeavesTasksOutIsRefused) {
  EXPECT_EQ(error_of([](void*, std::int64_t, int, Task task, void* data) { task(data, 3, 0); }),
            "executor: ran 1 tasks, must run each of 4 once, on workers 0 to 1");
}

TEST(Executor, ThatRepeatsATaskIsRefused) {
  EXPECT_EQ(error_of([](void*, std::int64_t tasks, int threads, Task task, void* data) {
              run_backwards(nullptr, tasks, threads, task, data);
              task(data, 0, 0);
            }),
            "executor: ran 5 tasks, must run each of 4 once, on workers 0 to 1");
}

TEST(Executor, ThatNumbersTasksOrWorkersWronglyRunsNone) {
  EXPECT_EQ(error_of([](void*, std::int64_t tasks, int threads, Task task, void* data) {
              task(data, 0, threads);
              task(data, 1, -1);
              task(data, tasks, 0);
              task(data, -1, 0);
            }),
            "executor: ran 0 tasks, must run each of 4 once, on workers 0 to 1");
}

TEST(Executor, ThatThrowsIsHeard) {
  const auto refuse = [](void*, std::int64_t, int, Task, void*) { throw std::runtime_error("closed"); };
  EXPECT_THROW(parallel_for({.run = refuse}, 4, 2, [](std::int64_t, int) {}), std::runtime_error);
}

}  // namespace
}  // namespace whet::core
