// Files as commands and experiments see them: errors that begin with the file's name, inputs of known size,
// and outputs that appear whole or not at all.
#ifndef WHET_FILES_FILE_H_
#define WHET_FILES_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace whet::files {

// A file that can't be read or written. what() is one line: the file's name, what is wrong with it
// and, where there is one, the next step.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& path, const std::string& problem)
      : std::runtime_error(path + ": " + problem) {}
};

// An open file that closes itself.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  ~FileHandle() { close(); }
  FileHandle(const FileHandle&) = delete;
  FileHandle& operator=(const FileHandle&) = delete;

  int get() const { return descriptor_; }
  void reset(int descriptor);
  int close();  // 0, or errno: a network file system may report a full disk only here

 private:
  int descriptor_ = -1;
};

// A regular file, read from its beginning. Pipes and devices are refused: their size isn't known
// before memory is allocated for them.
class InputFile {
 public:
  explicit InputFile(const std::string& path);

  std::uint64_t size() const { return size_; }
  // Fills `bytes` from `offset`.
  void read(std::uint64_t offset, std::span<std::byte> bytes) const;

 private:
  std::string path_;
  FileHandle handle_;
  std::uint64_t size_ = 0;
};

// A new file, or the next content of an existing one. What is written goes to a temporary name in
// the same folder; commit() gives it the real one. Without commit() (an error, a signal) an existing
// file keeps its content and the temporary one is removed. A symbolic link to a file stays, and the
// file it leads to gets the content; the file's permissions stay.
//
// What must not be replaced is written straight: FIFOs, character devices, and open files of a process.
// /dev/stdout, /dev/fd/3 and a file that standard output or standard error goes to are written through
// the descriptor itself, so that they go on where it stands: `whet ... /dev/stdout >>log` appends.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Whether commit() puts a whole file in place; false: writes go straight to what is there.
  bool replaces() const { return replaces_; }

  void write(std::span<const std::byte> bytes);
  // Ends the writing; after it a full disk can no longer happen. With several outputs finish all,
  // then commit all.
  void finish();
  void commit();

 private:
  void open_temporary(unsigned permissions, bool keep_permissions);
  bool create_temporary(unsigned permissions);
  void discard() noexcept;
  [[noreturn]] void fail(const std::string& action, int error) const;

  std::string path_;       // as the user wrote it, for messages
  std::string target_;     // behind symbolic links
  std::string temporary_;  // empty: writing straight to the target, or committed
  bool replaces_ = true;
  FileHandle handle_;
};

// Removes the temporary files that outputs into this folder left when their process was killed. Those that a
// process still writes are locked, by whichever host or container it runs on, and stay; so do all where the
// file system has no locks.
void remove_leftovers(const std::string& folder);

// Makes the folder and those it is in, where they aren't there yet.
void make_folder(const std::string& folder);

// Whether two paths lead to the same file, or would once it exists.
bool same_file(const std::string& a, const std::string& b);

// A whole small text: written at once; and read, if it has at most 64 MiB.
void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);

// Removes the temporary files of unfinished outputs when SIGINT, SIGTERM or SIGHUP ends the process,
// and turns SIGXFSZ (a file size limit) into an error of write().
void clean_up_on_signals();

}  // namespace whet::files

#endif  // WHET_FILES_FILE_H_
