#include "cli/ranks.h"

#include <unistd.h>
#include <whet/runtime.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "files/text.h"

namespace whet::cli {
namespace {

// By the signal of an ordinary end, so that temporary files are removed; the exit code says that it failed.
void end_process(const std::string& message) {
  const std::string line = files::escaped("whet: " + message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::raise(SIGTERM);
}

}  // namespace

lab::Rank join_ranks() {
  const lab::Rank rank = lab::rank_of_environment();
  if (rank.local_size > 1 && std::getenv("WHET_THREADS") == nullptr) {
    set_threads(std::clamp(processors() / rank.local_size, 1, threads()));
  }
  return rank;
}

int processors() { return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN))); }

bool share_work(const lab::Rank& rank, const std::string& folder, const std::function<void()>& work) {
  lab::RankSession session(folder, rank, end_process);
  work();
  if (rank.rank == 0) {
    std::fprintf(stderr, "Waiting for the other ranks, %d.\n", rank.size - 1);
  }
  session.finish();
  return rank.rank == 0;
}

void end_ranks(const lab::Rank& rank, const std::string& folder) {
  std::error_code error;  // what stays does no harm
  if (rank.size > 1) std::filesystem::remove_all(folder, error);
}

}  // namespace whet::cli
