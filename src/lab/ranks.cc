#include "lab/ranks.h"

#include <fcntl.h>
#include <unistd.h>
#include <whet/error.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <utility>

#include "files/file.h"

namespace whet::lab {
namespace {

constexpr std::chrono::milliseconds kBeat{500};
constexpr int kLastBeats = 10;  // in which one that fails at once waits to hear of the session

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

int number(const char* name, int least, int most) {
  const std::string text = std::getenv(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw Error(std::string(name) + ": is '" + text + "', must be a number from " + std::to_string(least) +
                " to " + std::to_string(most));
  }
  return value;
}

struct Launcher {
  const char* rank;
  const char* size;
  const char* local_size;
};
constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
    // A batch script has SLURM_PROCID too; only what srun starts belongs to a step.
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE"}};

// The words of a rank's file: session, number of beats, state.
struct Beat {
  std::string session, count, state, rest;
};

Beat parse(const std::string& text) {
  Beat beat;
  std::istringstream words(text);
  words >> beat.session >> beat.count >> beat.state;
  std::getline(words >> std::ws, beat.rest);
  return beat;
}

std::string new_session() {
  std::random_device random;
  std::ostringstream text;
  text << std::hex << random() << random();
  return text.str();
}

}  // namespace

Rank rank_of_environment() {
  constexpr int kMost = 1 << 20;
  for (const Launcher& launcher : kLaunchers) {
    if (variable(launcher.rank) == nullptr || variable(launcher.size) == nullptr) continue;
    Rank rank;
    rank.size = number(launcher.size, 1, kMost);
    rank.rank = number(launcher.rank, 0, rank.size - 1);
    const char* local = variable(launcher.local_size);
    const std::string digits = local == nullptr ? "" : local;
    // Slurm may say "2(x3),1": then it is left at 1.
    if (!digits.empty() && digits.find_first_not_of("0123456789") == digits.npos) {
      rank.local_size = number(launcher.local_size, 1, kMost);
    }
    return rank;
  }
  return {};
}

std::chrono::milliseconds rank_timeout() {
  const char* text = variable("WHET_RANK_TIMEOUT");
  if (text == nullptr) return std::chrono::seconds(30);
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0 && seconds <= 86400)) {
    throw Error("WHET_RANK_TIMEOUT: is '" + std::string(text) + "', must be a number of seconds above 0");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

RankSession::RankSession(std::string folder, const Rank& rank,
                         std::function<void(const std::string&)> on_lost)
    : folder_(std::move(folder)),
      rank_(rank),
      on_lost_(std::move(on_lost)),
      timeout_(rank_timeout()),
      seen_(static_cast<std::size_t>(rank.size)),
      session_(rank.rank == 0 ? new_session() : "none") {
  files::make_folder(folder_);
  for (int r = 0; r < rank_.size; ++r) {
    look(r);  // what an earlier session left
    seen_[static_cast<std::size_t>(r)].changed = Clock::now();
    seen_[static_cast<std::size_t>(r)].alive = false;
  }
  watcher_ = std::thread([this] { watch(); });
}

RankSession::~RankSession() {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == "working") state_ = "failed";
    ended_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

void RankSession::finish() {
  std::unique_lock lock(mutex_);
  state_ = "done";
  changed_.notify_all();
  changed_.wait(lock, [&] { return all_done_; });
}

std::string RankSession::path(int rank) const {
  return (std::filesystem::path(folder_) / ("rank-" + std::to_string(rank))).string();
}

// Not synced. Renamed into place, since ranks beat in time: one that reads as another writes would do so
// again and again.
void RankSession::beat() {
  std::string state;
  {
    const std::lock_guard lock(mutex_);
    state = state_;
  }
  const std::string text = session_ + " " + std::to_string(++beats_) + " " + state + "\n";
  const std::string to = path(rank_.rank), next = to + ".next";
  {
    const files::FileHandle file(::open(next.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    // What can't be written is seen as silence.
    if (file.get() < 0 || ::write(file.get(), text.data(), text.size()) < 0) return;
  }
  if (std::rename(next.c_str(), to.c_str()) != 0) return;
  if (state == "done") said_done_ = session_;
}

void RankSession::watch() {
  for (bool last = false; !last;) {
    {
      const std::lock_guard lock(mutex_);
      last = ended_;
    }
    if (last) await_session();
    beat();
    if (last) return;
    rank_.rank == 0 ? look_at_all() : look_at_first();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kBeat, [&] { return ended_; });
  }
}

// Rank 0 hears only what is said of its own session.
void RankSession::await_session() {
  for (int i = 0; session_ == "none" && i < kLastBeats; ++i) {
    std::this_thread::sleep_for(kBeat);
    if (look(0)) session_ = parse(seen_.front().text).session;
  }
}

bool RankSession::look(int rank) {
  std::ifstream file(path(rank), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Seen& seen = seen_[static_cast<std::size_t>(rank)];
  if (text == seen.text || !text.ends_with('\n')) return false;
  seen.text = text;
  seen.changed = Clock::now();
  seen.alive = true;
  return true;
}

void RankSession::look_at_all() {
  bool all = true;
  for (int r = 1; r < rank_.size; ++r) {
    Seen& seen = seen_[static_cast<std::size_t>(r)];
    if (seen.done) continue;
    if (look(r)) {
      const Beat beat = parse(seen.text);
      const bool own = beat.session == session_;
      seen.done = own && beat.state == "done";
      if (own && beat.state == "failed") lose(r, "failed; its own message says why");
    }
    if (!seen.done && Clock::now() - seen.changed > timeout_) {
      lose(r, "gave no sign of life for " + std::to_string(timeout_.count() / 1000) + " s");
    }
    all = all && seen.done;
  }
  const std::lock_guard lock(mutex_);
  if (all && state_ == "done") {
    all_done_ = true;
    changed_.notify_all();
  }
}

void RankSession::look_at_first() {
  Seen& first = seen_.front();
  // What this rank last wrote was already of this session, and said so.
  const bool told = first.alive && said_done_ == session_;
  if (look(0)) {
    const Beat beat = parse(first.text);
    session_ = beat.session;
    if (beat.state == "failed") lose(0, "failed; its own message says why");
    if (beat.state == "lost") on_lost_(beat.rest);
  }
  if (Clock::now() - first.changed > timeout_) {
    lose(0, "gave no sign of life for " + std::to_string(timeout_.count() / 1000) + " s");
  }
  if (!told) return;
  const std::lock_guard lock(mutex_);
  all_done_ = true;
  changed_.notify_all();
}

void RankSession::lose(int rank, const std::string& why) {
  const std::string message = "rank " + std::to_string(rank) + " of " + std::to_string(rank_.size) + " " +
                              why + ". Run the same command again: it resumes";
  if (rank_.rank == 0) {
    {
      const std::lock_guard lock(mutex_);
      state_ = "lost " + message;
    }
    beat();
  }
  on_lost_(message);
}

}  // namespace whet::lab
