#include "lab/ranks.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <whet/error.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "temporary_folder.h"

namespace whet::lab {
namespace {

class Ranks : public TemporaryFolder {
 protected:
  void SetUp() override {
    TemporaryFolder::SetUp();
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}) {
      ::unsetenv(name);
    }
    ::setenv("WHET_RANK_TIMEOUT", "2", 1);
  }
  void TearDown() override {
    ::unsetenv("WHET_RANK_TIMEOUT");
    TemporaryFolder::TearDown();
  }

  // Keeps the first message.
  struct Lost {
    std::function<void(const std::string&)> callback() {
      return [this](const std::string& text) {
        if (!lost.exchange(true)) message = text;
        told = true;
      };
    }
    // For as long as a message may take.
    bool wait() const {
      for (int i = 0; i < 100 && !told; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return told;
    }
    std::atomic<bool> lost{false}, told{false};
    std::string message;
  };
};

TEST_F(Ranks, ComeFromTheLauncher) {
  EXPECT_EQ(rank_of_environment().size, 1);
  ::setenv("SLURM_PROCID", "0", 1);  // a batch script, not a step
  EXPECT_EQ(rank_of_environment().size, 1);
  ::setenv("SLURM_STEP_NUM_TASKS", "8", 1);
  ::setenv("SLURM_PROCID", "7", 1);
  EXPECT_EQ(rank_of_environment().rank, 7);
  ::setenv("OMPI_COMM_WORLD_RANK", "2", 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "3", 1);
  ::setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3", 1);
  const Rank rank = rank_of_environment();
  EXPECT_EQ(rank.rank, 2);
  EXPECT_EQ(rank.size, 3);
  EXPECT_EQ(rank.local_size, 3);
  EXPECT_TRUE(rank.has(5));
  EXPECT_FALSE(rank.has(6));
  ::setenv("OMPI_COMM_WORLD_RANK", "3", 1);
  EXPECT_THROW(rank_of_environment(), Error);
  SetUp();
}

TEST_F(Ranks, EndTogether) {
  std::vector<std::thread> threads;
  std::atomic<int> done{0}, done_before_first{0};
  Lost lost;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      RankSession session(folder_, {.rank = r, .size = 3}, lost.callback());
      if (r == 2) std::this_thread::sleep_for(std::chrono::seconds(1));
      ++done;
      session.finish();
      if (r == 0) done_before_first = done.load();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done_before_first, 3);
  EXPECT_FALSE(lost.told) << lost.message;
}

// Also where files of a session that broke lie about.
TEST_F(Ranks, TakeNoOldFilesForSigns) {
  for (int r = 0; r < 2; ++r)
    std::ofstream(path("rank-" + std::to_string(r))) << "old 77 " << (r == 0 ? "lost all" : "done") << "\n";
  Lost lost;
  std::atomic<bool> worked{false};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    RankSession session(folder_, {.rank = 1, .size = 2}, lost.callback());
    worked = true;
    session.finish();
  });
  RankSession session(folder_, {.rank = 0, .size = 2}, lost.callback());
  session.finish();
  EXPECT_TRUE(worked);
  other.join();
  EXPECT_FALSE(lost.told) << lost.message;
}

TEST_F(Ranks, HearOfOneThatFails) {
  Lost first, second;
  RankSession a(folder_, {.rank = 0, .size = 3}, first.callback());
  RankSession b(folder_, {.rank = 1, .size = 3}, second.callback());
  {
    RankSession c(folder_, {.rank = 2, .size = 3}, [](const std::string&) {});
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  ASSERT_TRUE(first.wait());
  ASSERT_TRUE(second.wait());
  const std::string message =
      "rank 2 of 3 failed; its own message says why. Run the same command again: it resumes";
  EXPECT_EQ(first.message, message);
  EXPECT_EQ(second.message, message);
}

TEST_F(Ranks, MissOneThatIsSilent) {
  Lost first, second;
  RankSession a(folder_, {.rank = 0, .size = 3}, first.callback());
  RankSession b(folder_, {.rank = 1, .size = 3}, second.callback());  // rank 2 never comes
  ASSERT_TRUE(first.wait());
  ASSERT_TRUE(second.wait());
  EXPECT_EQ(first.message,
            "rank 2 of 3 gave no sign of life for 2 s. Run the same command again: it resumes");
  EXPECT_EQ(second.message, first.message);
}

TEST_F(Ranks, MissTheFirst) {
  Lost lost;
  RankSession session(folder_, {.rank = 1, .size = 2}, lost.callback());
  ASSERT_TRUE(lost.wait());
  EXPECT_EQ(lost.message, "rank 0 of 2 gave no sign of life for 2 s. Run the same command again: it resumes");
}

}  // namespace
}  // namespace whet::lab
