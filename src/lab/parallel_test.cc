// A task that fails ends the others, on whichever thread it ran.
#include "lab/parallel.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace whet::lab {
namespace {

TEST(ForEachTask, RunsEveryTaskOnce) {
  std::array<std::atomic<int>, 100> seen{};
  for_each_task(100, 3, [&](std::int64_t task, int) { ++seen[static_cast<std::size_t>(task)]; });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
}

TEST(ForEachTask, ThrowsWhatATaskThrewAndBeginsNoFurtherOne) {
  for (const int threads : {1, 2, 4}) {
    std::atomic<int> begun{0};
    EXPECT_THROW(for_each_task(100, threads,
                               [&](std::int64_t task, int) {
                                 ++begun;
                                 if (task == 10) throw std::runtime_error("tenth");
                               }),
                 std::runtime_error);
    // With more threads the others may be through before the tenth fails.
    if (threads == 1) {
      EXPECT_EQ(begun, 11);
    }
  }
}

TEST(ForEachTask, TellsTasksThatRun) {
  std::atomic<bool> failed{false};
  EXPECT_THROW(for_each_task(
                   2, 2,
                   [&](std::int64_t task, int) {
                     if (task == 0) throw std::runtime_error("first");
                     if (failed) return;
                   },
                   &failed),
               std::runtime_error);
  EXPECT_TRUE(failed);
}

}  // namespace
}  // namespace whet::lab
