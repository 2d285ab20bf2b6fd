#include "files/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>
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

constexpr int kMostLinks = 40;  // as the kernel follows

// The entry of /proc/PID/fd that a path leads to through any links (/dev/stdout, /dev/fd/3); empty if none.
std::filesystem::path descriptor_entry(std::filesystem::path path) {
  std::error_code error;
  for (int links = 0; links < kMostLinks; ++links) {
    const auto folder = std::filesystem::canonical(folder_of(path.string()), error);
    if (error) return {};
    if (folder.filename() == "fd" && folder.string().starts_with("/proc/")) return folder / path.filename();
    const auto target = std::filesystem::read_symlink(path, error);
    if (error) return {};
    path = folder / target;  // an absolute target replaces the folder
  }
  return {};
}

// The descriptor of this process that an entry stands for; -1 if it is another's.
int own_descriptor(const std::filesystem::path& entry) {
  const std::string name = entry.filename().string(), own = "/proc/" + std::to_string(::getpid()) + "/";
  int descriptor = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), descriptor);
  const bool number = error == std::errc() && end == name.data() + name.size();
  return number && entry.string().starts_with(own) ? descriptor : -1;
}

// The descriptor, standard output or standard error, that goes to this file; -1: neither does.
int standard_descriptor(const struct stat& file) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat own {};
    if (::fstat(descriptor, &own) == 0 && own.st_dev == file.st_dev && own.st_ino == file.st_ino) {
      return descriptor;
    }
  }
  return -1;
}

// Opens what must not be replaced. Nothing: it may be; -1, with errno: it can't be opened.
std::optional<int> open_straight(const std::string& path, const struct stat& status) {
  const std::filesystem::path entry = descriptor_entry(path);
  int own = own_descriptor(entry);
  if (own < 0 && S_ISREG(status.st_mode)) own = standard_descriptor(status);
  if (own >= 0) {
    std::fflush(stdout);  // what was printed before stands before
    return ::fcntl(own, F_DUPFD_CLOEXEC, 0);
  }
  const bool stream = S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode);
  if (!stream && entry.empty()) return std::nullopt;
  return ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
}

// Whether this name is still that of the open file.
bool is_name_of(const std::string& path, const FileHandle& file) {
  struct stat named {};
  struct stat opened {};
  return ::lstat(path.c_str(), &named) == 0 && ::fstat(file.get(), &opened) == 0 &&
         named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
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
  } else if (const std::optional<int> straight = open_straight(path, status)) {
    replaces_ = false;
    handle_.reset(*straight);
    if (handle_.get() < 0) fail("open", errno);
  } else if (S_ISREG(status.st_mode)) {
    // A rename needs no permission on the file it replaces; what is write-protected stays protected.
    if (::access(path.c_str(), W_OK) != 0) fail("write", errno);
    std::error_code error;
    target_ = std::filesystem::canonical(path, error).string();
    if (error) fail("open", error.value());
    open_temporary(status.st_mode & 07777U, true);
  } else {
    throw FileError(
        path, S_ISDIR(status.st_mode) ? "is a folder; name a file" : "is a disk or socket; name a file");
  }
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::open_temporary(unsigned permissions, bool keep_permissions) {
  const std::string start = folder_of(target_) + "/.whet-" + std::to_string(::getpid()) + "-";
  for (int attempt = 0; handle_.get() < 0; ++attempt) {
    temporary_ = start + std::to_string(attempt) + ".tmp";
    if (!create_temporary(permissions) && (errno != EEXIST || attempt == 1000)) {
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

// A new file under the name of temporary_, locked against remove_leftovers(); false, with errno, if there is
// one already.
bool OutputFile::create_temporary(unsigned permissions) {
  // O_EXCL: never follow or overwrite what lies there under a guessed name.
  handle_.reset(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, permissions));
  if (handle_.get() < 0) return false;
  // Between open() and flock() a remover may have taken it. A file system without locks is no error: there
  // nothing is removed.
  const bool taken = ::flock(handle_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  struct stat status {};
  if (!taken && (::fstat(handle_.get(), &status) != 0 || status.st_nlink > 0)) return true;
  handle_.close();
  errno = EEXIST;
  return false;
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
  if (temporary_.empty()) {
    if (const int error = handle_.close()) fail("write", error);
  } else if (::fsync(handle_.get()) != 0) {
    fail("write", errno);
  }
}

void OutputFile::commit() {
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("replace", errno);
  forget(temporary_.c_str());
  temporary_.clear();
  handle_.close();  // only now: its lock kept the file from remove_leftovers()
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
    int end = 0;
    const std::string name = entry.path().filename().string();
    std::sscanf(name.c_str(), ".whet-%*9d-%*9d.tmp%n", &end);
    if (end == 0 || end != static_cast<int>(name.size())) continue;
    // To be locked across hosts a file must be open for writing.
    const FileHandle file(::open(entry.path().c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.get() < 0 || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    // Its writer may have committed it before the lock, and begun another of this name.
    if (is_name_of(entry.path().string(), file)) ::unlink(entry.path().c_str());
  }
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw FileError(folder, "cannot make the folder: " + error.message());
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (std::filesystem::equivalent(a, b, error)) return true;
  const auto whole = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  };
  return !whole(a).empty() && whole(a) == whole(b);
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
