// Outputs: replaced whole, or written straight where that would lose something.
#include "files/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "temporary_folder.h"

namespace whet::files {
namespace {

namespace fs = std::filesystem;

// A descriptor of this process for a file, under a given number; what was there comes back.
class Redirected {
 public:
  Redirected(int number, const std::string& path, int flags)
      : number_(number), before_(::fcntl(number, F_DUPFD_CLOEXEC, 100)) {
    const FileHandle file(::open(path.c_str(), flags | O_CLOEXEC));
    ::dup2(file.get(), number_);
  }
  ~Redirected() {
    if (before_ < 0) {
      ::close(number_);
      return;
    }
    ::dup2(before_, number_);
    ::close(before_);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;

 private:
  int number_, before_;
};

class Output : public TemporaryFolder {
 protected:
  // Whether the file was replaced.
  static bool put(const std::string& path, std::string_view text) {
    OutputFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.finish();
    file.commit();
    return file.replaces();
  }

  void SetUp() override {
    TemporaryFolder::SetUp();
    write_text(path("log"), "old\n");
  }

  std::string log() const { return content_of(path("log")); }
};

TEST_F(Output, ReplacesAFile) {
  EXPECT_TRUE(put(path("log"), "new"));
  EXPECT_EQ(log(), "new");
}

TEST_F(Output, GoesOnWhereADescriptorStands) {
  const Redirected three(33, path("log"), O_WRONLY | O_APPEND);
  fs::create_symlink("/proc/self/fd/33", path("link"));
  const std::string own = "/proc/" + std::to_string(::getpid());
  for (const std::string& name :
       {std::string("/dev/fd/33"), std::string("/proc/self/fd/33"), std::string("/proc/thread-self/fd/33"),
        own + "/fd/33", own + "/cwd/../../../../../../../../dev/fd/33", path("link")}) {
    const std::string before = log();
    EXPECT_FALSE(put(name, "more\n")) << name;
    EXPECT_EQ(log(), before + "more\n") << name;
  }
  EXPECT_TRUE(fs::is_symlink(path("link")));
}

// As after a shell's `>`: no O_APPEND, an offset of its own.
TEST_F(Output, KeepsWhatADescriptorHasWritten) {
  const Redirected redirected(33, path("log"), O_WRONLY | O_TRUNC);
  ASSERT_EQ(::write(33, "one\n", 4), 4);
  EXPECT_FALSE(put("/dev/fd/33", "two\n"));
  ASSERT_EQ(::write(33, "three\n", 6), 6);
  EXPECT_EQ(log(), "one\ntwo\nthree\n");
}

TEST_F(Output, KnowsTheFileOfStandardErrorByItsOwnName) {
  fs::create_symlink("log", path("link"));
  const Redirected error(STDERR_FILENO, path("log"), O_WRONLY | O_APPEND);
  EXPECT_FALSE(put(path("log"), "more\n"));
  EXPECT_FALSE(put(path("link"), "again\n"));
  EXPECT_EQ(log(), "old\nmore\nagain\n");
}

TEST_F(Output, AppendsToAFileThatAnotherProcessHasOpen) {
  const Redirected redirected(33, path("log"), O_WRONLY | O_APPEND);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    char byte;
    ::close(ends[1]);
    ::_exit(static_cast<int>(::read(ends[0], &byte, 1)));
  }
  EXPECT_FALSE(put("/proc/" + std::to_string(child) + "/fd/33", "more\n"));
  EXPECT_EQ(log(), "old\nmore\n");
  ::close(ends[0]);
  ::close(ends[1]);
  ::waitpid(child, nullptr, 0);
}

TEST_F(Output, ThroughAReadOnlyDescriptorIsAnError) {
  const Redirected redirected(33, path("log"), O_RDONLY);
  EXPECT_THROW(put("/dev/fd/33", "new"), FileError);
  EXPECT_EQ(log(), "old\n");
}

// ---- leftovers

TEST_F(Output, LeftoversGoWhoeverHasTheirProcessIdNow) {
  for (const std::string& process :
       {std::to_string(::getpid()), std::string("1"), std::string("999999999")}) {
    write_text(path(".whet-" + process + "-0.tmp"), "half");
  }
  write_text(path(".whet-1-0.tmp.txt"), "other");
  write_text(path(".whet-x-0.tmp"), "other");
  remove_leftovers(folder_);
  EXPECT_FALSE(fs::exists(path(".whet-1-0.tmp")));
  EXPECT_FALSE(fs::exists(path(".whet-999999999-0.tmp")));
  EXPECT_FALSE(fs::exists(path(".whet-" + std::to_string(::getpid()) + "-0.tmp")));
  EXPECT_TRUE(fs::exists(path(".whet-1-0.tmp.txt")));
  EXPECT_TRUE(fs::exists(path(".whet-x-0.tmp")));
}

// As a process of another host leaves it: its id says nothing here, its lock does.
TEST_F(Output, WhatIsStillWrittenStays) {
  write_text(path(".whet-999999999-0.tmp"), "half");
  const FileHandle elsewhere(::open(path(".whet-999999999-0.tmp").c_str(), O_WRONLY));
  ASSERT_EQ(::flock(elsewhere.get(), LOCK_EX), 0);
  remove_leftovers(folder_);
  EXPECT_TRUE(fs::exists(path(".whet-999999999-0.tmp")));

  OutputFile file(path("log"));
  file.write(std::as_bytes(std::span("new", 3)));
  remove_leftovers(folder_);
  file.finish();
  remove_leftovers(folder_);  // finished, not yet committed
  file.commit();
  EXPECT_EQ(log(), "new");
}

}  // namespace
}  // namespace whet::files
