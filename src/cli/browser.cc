#include "cli/browser.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "files/file.h"

namespace whet::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array kNames = {"chromium", "chromium-browser", "google-chrome"};
constexpr auto kPatience = std::chrono::minutes(2);

[[noreturn]] void fail(const std::string& action, int error) {
  throw std::runtime_error("cannot " + action + ": " + std::generic_category().message(error));
}

// For the page and the browser's profile; gone when done.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "whet-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) fail("make a temporary folder", errno);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A process that writes to a pipe of ours; ended, with its children, when this goes.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail("make a pipe", errno);
    output_.reset(ends[0]);
    const files::FileHandle input(ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, input.get(), STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    std::vector<char*> argv;
    argv.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    error_ = ::posix_spawnp(&id_, argv[0], &actions, &attributes, argv.data(), environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() {
    if (error_ != 0 || ended_) return;
    ::kill(-id_, SIGKILL);
    wait();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool exists() const { return error_ != ENOENT; }

  // Everything it writes, until it ends well.
  std::string read_all() {
    if (error_ != 0) fail("start the browser", error_);
    std::string text;
    const auto end = Clock::now() + kPatience;
    for (char block[65536];;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
      pollfd waiting{output_.get(), POLLIN, 0};
      const int ready = left > 0 ? ::poll(&waiting, 1, static_cast<int>(left)) : 0;
      if (ready == 0) throw std::runtime_error("the browser took longer than two minutes; try again");
      if (ready < 0 && errno == EINTR) continue;
      const ssize_t size = ::read(output_.get(), block, sizeof block);
      if (size < 0) fail("read from the browser", errno);
      if (size == 0) break;
      text.append(block, static_cast<std::size_t>(size));
    }
    const int status = wait();
    if (status != 0) throw std::runtime_error("the browser failed with status " + std::to_string(status));
    return text;
  }

 private:
  int wait() {
    int status = 0;
    while (::waitpid(id_, &status, 0) < 0 && errno == EINTR) {
    }
    ended_ = true;
    return status;
  }

  files::FileHandle output_;
  pid_t id_ = 0;
  int error_ = 0;
  bool ended_ = false;
};

}  // namespace

std::string document_of(const std::string& page, const std::string& hash) {
  const TemporaryFolder folder;
  files::write_text(folder.path() + "/page.html", page);
  for (const char* name : kNames) {
    std::vector<std::string> arguments{name,
                                       "--headless",
                                       "--disable-gpu",
                                       "--no-first-run",
                                       "--user-data-dir=" + folder.path() + "/profile",
                                       "--dump-dom",
                                       "file://" + folder.path() + "/page.html#" + hash};
    // Chromium's sandbox doesn't work for root; what it opens is our own page, which has no network.
    if (::geteuid() == 0) arguments.insert(arguments.begin() + 1, "--no-sandbox");
    Process browser(std::move(arguments));
    if (browser.exists()) return browser.read_all();
  }
  throw std::runtime_error(
      "figures become SVG files in a browser, and none is installed here: install chromium, or open the page "
      "(--format html) in any browser and use its SVG buttons");
}

}  // namespace whet::cli
