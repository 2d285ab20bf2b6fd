#include "files/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <system_error>

namespace whet::files {
namespace {

std::string error_text(int error) { return std::generic_category().message(error); }

// What a signal handler may touch: the names of temporary files that exist now.
std::array<std::atomic<const char*>, 64> unfinished{};
static_assert(std::atomic<const char*>::is_always_lock_free);

void remember(const char* name) {
  for (auto& slot : unfinished) {
    const char* empty = nullptr;
    if (slot.compare_exchange_strong(empty, name)) return;
  }
}

void forget(const char* name) {
  for (auto& slot : unfinished) {
    const char* expected = name;
    if (slot.compare_exchange_strong(expected, nullptr)) return;
  }
}

extern "C" void remove_unfinished(int signal) {
  for (auto& slot : unfinished) {
    if (const char* name = slot.load()) ::unlink(name);
  }
  // SA_RESETHAND has restored the default action: the process ends as the sender expects.
  ::raise(signal);
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

void FileHandle::reset(int descriptor) {
  close();
  descriptor_ = descriptor;
}

int FileHandle::close() {
  if (descriptor_ < 0) return 0;
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  return result == 0 ? 0 : errno;
}

InputFile::InputFile(const std::string& path) : path_(path) {
  // Without O_NONBLOCK opening a FIFO would wait for a writer before we can refuse it.
  handle_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (handle_.get() < 0) throw FileError(path, "cannot open: " + error_text(errno));
  struct stat status {};
  if (::fstat(handle_.get(), &status) != 0) throw FileError(path, "cannot read: " + error_text(errno));
  if (S_ISDIR(status.st_mode)) throw FileError(path, "is a folder; name a file");
  if (!S_ISREG(status.st_mode)) {
    throw FileError(path, "is a pipe or device, whose size isn't known; save it to a file first");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

void InputFile::read(std::uint64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = ::pread(handle_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(path_, "cannot read: " + error_text(errno));
    if (count == 0) throw FileError(path_, "became shorter while it was read; try again");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

OutputFile::OutputFile(const std::string& path) : path_(path), target_(path) {
  if (path.empty()) throw FileError("''", "is no file name; name a file to write");
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) fail("open", errno);
    if (::lstat(path.c_str(), &status) == 0) {
      throw FileError(path, "is a link to a file that does not exist; name the file itself");
    }
    open_temporary(0666, false);
  } else if (S_ISREG(status.st_mode)) {
    // A rename needs no permission on the file it replaces; what is write-protected stays protected.
    if (::access(path.c_str(), W_OK) != 0) fail("write", errno);
    std::error_code error;
    target_ = std::filesystem::canonical(path, error).string();
    if (error) fail("open", error.value());
    open_temporary(status.st_mode & 07777U, true);
  } else if (S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode)) {
    handle_.reset(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (handle_.get() < 0) fail("open", errno);
  } else {
    throw FileError(
        path, S_ISDIR(status.st_mode) ? "is a folder; name a file" : "is a disk or socket; name a file");
  }
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::open_temporary(unsigned permissions, bool keep_permissions) {
  const std::string start = folder_of(target_) + "/.whet-" + std::to_string(::getpid()) + "-";
  // O_EXCL: never follow or overwrite what lies there under a guessed name.
  for (int attempt = 0; handle_.get() < 0; ++attempt) {
    temporary_ = start + std::to_string(attempt) + ".tmp";
    handle_.reset(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, permissions));
    if (handle_.get() < 0 && (errno != EEXIST || attempt == 1000)) {
      const int error = errno;
      temporary_.clear();
      fail("create a file in " + folder_of(target_) + " for", error);
    }
  }
  remember(temporary_.c_str());
  if (keep_permissions && ::fchmod(handle_.get(), permissions) != 0) {
    const int error = errno;
    discard();
    fail("keep the permissions of", error);
  }
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(handle_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void OutputFile::finish() {
  if (!temporary_.empty() && ::fsync(handle_.get()) != 0) fail("write", errno);
  if (const int error = handle_.close()) fail("write", error);
}

void OutputFile::commit() {
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("replace", errno);
  forget(temporary_.c_str());
  temporary_.clear();
  // The new name must survive a power cut too. File systems that can't sync a folder say EINVAL.
  const FileHandle folder(::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0 && ::fsync(folder.get()) != 0 && errno != EINVAL) fail("sync the folder of", errno);
}

void OutputFile::discard() noexcept {
  handle_.close();
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  forget(temporary_.c_str());
  temporary_.clear();
}

void OutputFile::fail(const std::string& action, int error) const {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  throw FileError(path_, "cannot " + action + " it: " + error_text(error) +
                             (full ? "; free some space or name a file elsewhere" : ""));
}

void remove_leftovers(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    long process = 0;
    int end = 0;
    const std::string name = entry.path().filename().string();
    if (std::sscanf(name.c_str(), ".whet-%9ld-%*9d.tmp%n", &process, &end) != 1) continue;
    if (end != static_cast<int>(name.size()) || process < 1) continue;
    if (::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) ::unlink(entry.path().c_str());
  }
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw FileError(folder, "cannot make the folder: " + error.message());
}

void write_text(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
  file.commit();
}

std::string read_text(const std::string& path) {
  constexpr std::uint64_t kMost = 64 << 20;
  const InputFile file(path);
  if (file.size() > kMost) throw FileError(path, "is larger than the 64 MiB that a text may have");
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void clean_up_on_signals() {
  std::signal(SIGXFSZ, SIG_IGN);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGQUIT, SIGXCPU}) {
    struct sigaction action {};
    // A signal that the caller ignores (nohup) stays ignored.
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = remove_unfinished;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace whet::files
