// Heads trained from several seeds at once.
#include "lab/reproduction.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "temporary_folder.h"

namespace whet::lab {
namespace {

class TrainSeeds : public TemporaryFolder {
 protected:
  // The checkpoints of three seeds, trained on this many threads.
  std::vector<std::string> checkpoints(const std::string& name, int threads) {
    Recipe recipe;
    recipe.steps = 20;
    recipe.batch = 4;
    std::atomic<std::int64_t> done{0};
    const ProgressListener listener{
        .begin = [&](const std::string&, std::int64_t, std::int64_t before) { done = before; },
        .advance = [&](std::int64_t steps) { done += steps; },
        .end = [] {}};
    std::vector<std::string> contents;
    for (const auto& run : train_seeds(path(name), recipe, 3, threads, listener)) {
      contents.push_back(content_of(run.folder + "/checkpoint.safetensors"));
    }
    EXPECT_EQ(done, 60);
    return contents;
  }
};

TEST_F(TrainSeeds, GivesTheSameBytesForAnyNumberOfThreads) {
  const std::vector<std::string> one = checkpoints("one", 1);
  ASSERT_EQ(one.size(), 3);
  EXPECT_NE(one[0], one[1]);
  EXPECT_EQ(checkpoints("three", 3), one);
}

}  // namespace
}  // namespace whet::lab
