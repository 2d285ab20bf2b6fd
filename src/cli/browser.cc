#include "cli/browser.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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
constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(2);

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

// Keeps the signals that would end this process pending while it lives, so that what it has started and made
// can be taken away first; they do their work when it goes. One that is ignored (nohup) stays ignored.
class PendingSignals {
 public:
  PendingSignals() {
    sigset_t held;
    sigemptyset(&held);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      struct sigaction action {};
      if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN)
        sigaddset(&held, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &held, &before_);
    descriptor_.reset(::signalfd(-1, &held, SFD_CLOEXEC));
  }
  ~PendingSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  PendingSignals(const PendingSignals&) = delete;
  PendingSignals& operator=(const PendingSignals&) = delete;

  int descriptor() const { return descriptor_.get(); }  // readable once there is one
  const sigset_t& before() const { return before_; }    // the signals that were held back already

 private:
  sigset_t before_{};
  files::FileHandle descriptor_;
};

// A process that writes to a pipe of ours; ended, with its children, when this goes.
class Process {
 public:
  Process(std::vector<std::string> arguments, const PendingSignals& signals) : signals_(signals) {
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
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigmask(&attributes, &signals.before());
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
    while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool exists() const { return error_ != ENOENT; }

  // Everything it writes, until it ends well.
  std::string read_all() {
    if (error_ != 0) fail("start the browser", error_);
    std::string text;
    for (char block[65536];;) {
      if (!await(output_.get())) continue;
      const ssize_t size = ::read(output_.get(), block, sizeof block);
      if (size < 0) fail("read from the browser", errno);
      if (size == 0) break;
      text.append(block, static_cast<std::size_t>(size));
    }
    const int status = await_end();
    if (status != 0) throw std::runtime_error("the browser failed with status " + std::to_string(status));
    return text;
  }

 private:
  // Until the descriptor can be read (-1: none is), at most so long; whether it can. Throws where patience
  // ends or a signal waits.
  bool await(int descriptor, std::chrono::milliseconds longest = kPatience) const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now());
    if (left.count() <= 0) throw std::runtime_error("the browser took longer than two minutes; try again");
    pollfd waiting[] = {{descriptor, POLLIN, 0}, {signals_.descriptor(), POLLIN, 0}};
    const int ready = ::poll(waiting, 2, static_cast<int>(std::min(left, longest).count()));
    if (ready < 0 && errno != EINTR) fail("wait for the browser", errno);
    if (ready > 0 && waiting[1].revents != 0) throw std::runtime_error("interrupted");
    return ready > 0;
  }

  int await_end() {
    for (int status = 0;; await(-1, std::chrono::milliseconds(10))) {
      if (::waitpid(id_, &status, WNOHANG) != id_) continue;
      ended_ = true;
      return status;
    }
  }

  const PendingSignals& signals_;
  const Clock::time_point end_ = Clock::now() + kPatience;
  files::FileHandle output_;
  pid_t id_ = 0;
  int error_ = 0;
  bool ended_ = false;
};

}  // namespace

std::string document_of(const std::string& page, const std::string& hash) {
  const PendingSignals signals;  // first, to go last
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
    Process browser(std::move(arguments), signals);
    if (browser.exists()) return browser.read_all();
  }
  throw std::runtime_error(
      "figures become SVG files in a browser, and none is installed here: install chromium, or open the page "
      "(--format html) in any browser and use its SVG buttons");
}

}  // namespace whet::cli
