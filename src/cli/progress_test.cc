#include "cli/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <whet/error.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace whet::cli {
namespace {

TEST(TimeText, HasHoursOnlyWhereThereAreAny) {
  EXPECT_EQ(time_text(0), "0:00");
  EXPECT_EQ(time_text(7.4), "0:07");
  EXPECT_EQ(time_text(59.6), "1:00");
  EXPECT_EQ(time_text(245), "4:05");
  EXPECT_EQ(time_text(3599.4), "59:59");
  EXPECT_EQ(time_text(3723), "1:02:03");
  EXPECT_EQ(time_text(360000), "100:00:00");
}

TEST(TimeText, TakesAnyNumber) {
  EXPECT_EQ(time_text(-5), "0:00");
  EXPECT_EQ(time_text(std::nan("")), "0:00");
  EXPECT_EQ(time_text(1e300), "9999:59:59");
  EXPECT_EQ(time_text(HUGE_VAL), "9999:59:59");
}

TEST(RateText, ChoosesTheUnit) {
  EXPECT_EQ(rate_text(123456), "123456/s");
  EXPECT_EQ(rate_text(99.96), "100/s");
  EXPECT_EQ(rate_text(12.54), "12.5/s");
  EXPECT_EQ(rate_text(1), "1.0/s");
  EXPECT_EQ(rate_text(0.5), "30.0/min");
  EXPECT_EQ(rate_text(0.01), "36.0/h");
}

const ProgressState kHalf{"training seed 3", 500, 1000, 0, 40};

TEST(ProgressBar, FillsTheLineButItsLastColumn) {
  EXPECT_EQ(progress_bar(kHalf, 80),
            "training seed 3 [===============>               ] 50% 500/1000 12.5/s 0:40 left");
  EXPECT_EQ(progress_bar(kHalf, 80).size(), 79U);
  EXPECT_EQ(progress_bar({"all", 10, 10, 0, 5}, 44), "all [==========] 100% 10/10 2.0/s 0:00 left");
  EXPECT_EQ(progress_bar({"new", 0, 10, 0, 0}, 30), "new [>              ] 0% 0/10");
}

TEST(ProgressBar, LeavesOutWhatDoesNotFit) {
  EXPECT_EQ(progress_bar(kHalf, 59), "training seed 3 [=====>    ] 50% 500/1000 12.5/s 0:40 left");
  EXPECT_EQ(progress_bar(kHalf, 58), "training seed 3 50% 500/1000 12.5/s 0:40 left");
  EXPECT_EQ(progress_bar(kHalf, 45), "training seed 3 50% 500/1000");
  EXPECT_EQ(progress_bar(kHalf, 20), "traini 50% 500/1000");
  EXPECT_EQ(progress_bar(kHalf, 12), "50%");
  EXPECT_EQ(progress_bar(kHalf, 3), "50");
}

TEST(ProgressBar, NeverWraps) {
  const ProgressState huge{std::string(50, 'x'), 1'000'000'000'000, 4'000'000'000'000, 5, 1e9};
  for (int width = 0; width < 200; ++width) {
    for (const ProgressState& state : {kHalf, huge, ProgressState{}}) {
      EXPECT_LT(progress_bar(state, width).size(), static_cast<std::size_t>(std::max(width, 1))) << width;
    }
  }
}

TEST(ProgressBar, CutsNoCharacterInTwo) {
  EXPECT_EQ(progress_bar({"\u03b8\u03b8\u03b8\u03b8", 5, 9, 0, 0}, 13), "\u03b8\u03b8 55% 5/9");
  EXPECT_EQ(progress_bar({"\u03b8\u03b8\u03b8\u03b8", 5, 9, 0, 0}, 14), "\u03b8\u03b8 55% 5/9");
}

TEST(ProgressBar, SaysHundredOnlyAtTheEnd) {
  EXPECT_NE(progress_bar({"a", 99'999, 100'000, 0, 1}, 80).find(" 99% "), std::string::npos);
  EXPECT_NE(progress_bar({"a", 29, 100, 0, 1}, 80).find(" 29% "), std::string::npos);
  EXPECT_NE(progress_bar({"a", 0, 0, 0, 1}, 80).find(" 100% "), std::string::npos);
}

TEST(ProgressLine, CountsOnlyThisRunInTheRate) {
  EXPECT_EQ(progress_line({"train", 0, 1000, 0, 0}), "train: 0/1000");
  EXPECT_EQ(progress_line({"train", 600, 1000, 500, 10}), "train: 600/1000 (60%), 10.0/s, 0:40 left");
  EXPECT_EQ(finish_line({"train", 1000, 1000, 500, 10}), "train: 1000/1000 in 0:10 (50.0/s)");
  EXPECT_EQ(finish_line({"train", 500, 1000, 500, 10}), "train: 500/1000 in 0:10");
}

// A log: a FILE in memory, and a clock that the test moves.
class ProgressLog : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(out_ = ::open_memstream(&data_, &size_), nullptr); }
  void TearDown() override {
    std::fclose(out_);
    std::free(data_);
  }

  Progress start(std::int64_t total, std::int64_t before = 0) {
    return Progress("work", total, before, out_, [this] { return now_; });
  }
  std::string text() const { return {data_, size_}; }
  long lines() const {
    const std::string all = text();
    return std::ranges::count(all, '\n');
  }

  std::FILE* out_ = nullptr;
  char* data_ = nullptr;
  std::size_t size_ = 0;
  double now_ = 1000;
};

TEST_F(ProgressLog, OfQuickWorkIsItsBeginningAndEnd) {
  {
    Progress progress = start(1000);
    EXPECT_EQ(text(), "work: 0/1000\n");
    for (int i = 0; i < 1000; ++i) progress.advance();
    now_ += 4;
    progress.finish();
  }
  EXPECT_EQ(text(), "work: 0/1000\nwork: 1000/1000 in 0:04 (250/s)\n");
}

TEST_F(ProgressLog, WaitsForTenSecondsAndTenPercent) {
  Progress progress = start(100);
  now_ += 9.9;
  progress.advance(50);  // too soon
  EXPECT_EQ(lines(), 1);
  now_ += 0.2;
  progress.advance(10);
  EXPECT_EQ(text(), "work: 0/100\nwork: 60/100 (60%), 5.9/s, 0:07 left\n");
  now_ += 20;
  progress.advance(9);  // too little
  EXPECT_EQ(lines(), 2);
  progress.advance(1);
  EXPECT_EQ(lines(), 3);
}

TEST_F(ProgressLog, IsNeverSilentForTenMinutes) {
  Progress progress = start(1'000'000);
  for (int second = 0; second < 3600; ++second) {
    now_ += 1;
    progress.advance();
  }
  EXPECT_EQ(lines(), 1 + 3600 / 300);
}

TEST_F(ProgressLog, ResumesWhereAnEarlierRunStopped) {
  Progress progress = start(100, 40);
  now_ += 10;
  progress.advance(10);
  EXPECT_EQ(text(), "work: 40/100 (40%)\nwork: 50/100 (50%), 1.0/s, 0:50 left\n");
}

TEST_F(ProgressLog, EndsOnce) {
  {
    Progress progress = start(10);
    progress.finish();
    progress.finish();
    now_ += 1000;
    progress.advance(10);
  }
  EXPECT_EQ(text(), "work: 0/10\nwork: 0/10 in 0:00\n");
}

TEST_F(ProgressLog, OfWorkThatFailedHasNoEnd) {
  { Progress progress = start(10); }
  EXPECT_EQ(text(), "work: 0/10\n");
}

TEST_F(ProgressLog, CountsTheStepsOfAllThreads) {
  {
    Progress progress("work", 800'000, 0, out_);
    std::vector<std::jthread> workers(4);
    for (std::jthread& worker : workers) {
      worker = std::jthread([&] {
        for (int step = 0; step < 200'000; ++step) progress.advance();
      });
    }
    workers.clear();
    progress.finish();
  }
  EXPECT_NE(text().find("work: 800000/800000 in "), std::string::npos) << text();
}

TEST_F(ProgressLog, RefusesImpossibleNumbers) {
  EXPECT_THROW(start(-1), Error);
  EXPECT_THROW(start(10, 11), Error);
  EXPECT_THROW(start(10, -1), Error);
  EXPECT_EQ(text(), "");
}

// A pseudo-terminal of 60 columns.
class ProgressTerminal : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("TERM", "xterm", 1);
    screen_ = ::posix_openpt(O_RDWR | O_NOCTTY);
    if (screen_ < 0 || ::grantpt(screen_) != 0 || ::unlockpt(screen_) != 0)
      GTEST_SKIP() << "no terminals here";
    const int side = ::open(::ptsname(screen_), O_RDWR | O_NOCTTY);
    ASSERT_GE(side, 0);
    winsize size{};
    size.ws_col = 60;
    ASSERT_EQ(::ioctl(side, TIOCSWINSZ, &size), 0);
    ASSERT_NE(out_ = ::fdopen(side, "w"), nullptr);
  }
  void TearDown() override {
    if (out_ != nullptr) std::fclose(out_);
    if (screen_ >= 0) ::close(screen_);
  }

  // What was written since the last call.
  std::string shown() const {
    std::string text;
    char part[4096];
    pollfd waiting{screen_, POLLIN, 0};
    while (::poll(&waiting, 1, 50) == 1) {
      const ssize_t size = ::read(screen_, part, sizeof part);
      if (size <= 0) break;
      text.append(part, static_cast<std::size_t>(size));
    }
    return text;
  }

  int screen_ = -1;
  std::FILE* out_ = nullptr;
  double now_ = 0;
};

TEST_F(ProgressTerminal, DrawsABarOfItsWidthAtMostTenTimesASecond) {
  Progress progress("work", 100, 0, out_, [this] { return now_; });
  EXPECT_EQ(shown(), "\r\x1b[Kwork [>" + std::string(42, ' ') + "] 0% 0/100");
  now_ += 0.09;
  progress.advance(10);
  EXPECT_EQ(shown(), "");
  now_ += 0.91;
  progress.advance(40);
  EXPECT_EQ(shown(), "\r\x1b[Kwork [" + std::string(12, '=') + ">" + std::string(11, ' ') +
                         "] 50% 50/100 50.0/s 0:01 left");
}

TEST_F(ProgressTerminal, LeavesACleanLine) {
  {
    const Progress progress("work", 100, 0, out_, [this] { return now_; });
    shown();
  }
  EXPECT_EQ(shown(), "\r\x1b[K");
  {
    Progress progress("work", 100, 0, out_, [this] { return now_; });
    shown();
    now_ += 2;
    progress.advance(100);
    shown();
    progress.finish();
  }
  EXPECT_EQ(shown(), "\r\x1b[Kwork: 100/100 in 0:02 (50.0/s)\r\n");
}

TEST_F(ProgressTerminal, ThatIsDumbGetsLines) {
  ::setenv("TERM", "dumb", 1);
  const Progress progress("work", 100, 0, out_, [this] { return now_; });
  EXPECT_EQ(shown(), "work: 0/100\r\n");
}

}  // namespace
}  // namespace whet::cli
