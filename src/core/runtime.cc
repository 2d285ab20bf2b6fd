#include "core/runtime.h"

#include <sched.h>
#include <whet/error.h>
#include <whet/runtime.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace whet {

namespace {

constexpr int kMaxThreads = 1024;

std::atomic<int> default_threads{0};  // 0: not set by the program

int processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void check_threads(int count, const char* name = "threads") {
  if (count < 0 || count > kMaxThreads) {
    throw Error(std::string(name) + " is " + std::to_string(count) + ", must be 0 (the default) to " +
                std::to_string(kMaxThreads));
  }
}

int initial_threads() {
  const char* text = std::getenv("WHET_THREADS");
  if (text == nullptr || *text == '\0') return processors();
  const std::string_view s = text;
  int count = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), count);
  if (error != std::errc() || end != s.data() + s.size() || count < 1 || count > kMaxThreads) {
    throw Error("WHET_THREADS is '" + std::string(s) + "', must be a number from 1 to " +
                std::to_string(kMaxThreads));
  }
  return count;
}

// Highway numbers targets so that a lower bit is a better target.
std::vector<int64_t> target_bits() {
  std::vector<int64_t> bits;
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  for (int shift = 0; shift < 63; ++shift) {
    const int64_t bit = int64_t{1} << shift;
    if (usable & bit) bits.push_back(bit);
  }
  return bits;
}

int64_t find_target(std::string_view name, const char* argument) {
  std::string known;
  for (const int64_t bit : target_bits()) {
    if (name == hwy::TargetName(bit)) return bit;
    known += (known.empty() ? "" : ", ") + std::string(hwy::TargetName(bit));
  }
  throw Error(std::string(argument) + " is '" + std::string(name) + "', this machine runs " + known);
}

struct TargetChoice {
  std::mutex mutex;             // guards the two below against concurrent changes
  std::atomic<int64_t> bit{0};  // 0: not chosen yet
  hwy::ChosenTarget chosen;
};

TargetChoice& choice() {
  static TargetChoice instance;
  return instance;
}

int64_t default_target() {
  const char* name = std::getenv("WHET_TARGET");
  if (name != nullptr && *name != '\0') return find_target(name, "WHET_TARGET");
  return target_bits().front();
}

void choose(int64_t bit) {
  choice().chosen.Update(bit);
  choice().bit = bit;
}

int64_t chosen_bit() {
  if (choice().bit == 0) {
    const std::lock_guard lock(choice().mutex);
    if (choice().bit == 0) choose(default_target());
  }
  return choice().bit;
}

}  // namespace

namespace core {

const hwy::ChosenTarget& chosen_target() {
  chosen_bit();
  return choice().chosen;
}

int resolve_threads(int requested) {
  check_threads(requested);
  return requested == 0 ? threads() : requested;
}

int resolve_threads(const Execution& execution) {
  check_threads(execution.executor.threads, "executor.threads");
  return resolve_threads(execution.threads == 0 ? execution.executor.threads : execution.threads);
}

}  // namespace core

std::string version() { return WHET_VERSION; }

int threads() {
  const int count = default_threads;
  if (count > 0) return count;
  static const int initial = initial_threads();  // an error is thrown again by every call
  return initial;
}

void set_threads(int count) {
  check_threads(count);
  default_threads = count;
}

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (const int64_t bit : target_bits()) names.emplace_back(hwy::TargetName(bit));
  return names;
}

std::string target() { return hwy::TargetName(chosen_bit()); }

void force_target(std::string_view name) {
  const std::lock_guard lock(choice().mutex);
  choose(name.empty() ? default_target() : find_target(name, "target"));
}

}  // namespace whet
