// whet_soak: random calls of every public function with every option against the oracle, on every SIMD target
// and with one to four threads.
//
//     whet_soak [--seconds S] [--calls N] [--seed FIRST] [--check NAME] [--shrink K] [--json FILE]
//
// Case n of a run has the seed FIRST + n, so a case that failed runs again alone by --seed N --calls 1. The
// exit code is 1 if a case failed. A crash or a case of more than two minutes ends the run with its seed.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>
#include <whet/whet.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "soak.h"

namespace whet::soak {
namespace {

constexpr Check kChecks[] = {
    {"softmax", 22, check_softmax},
    {"sharpen", 8, check_sharpen},
    {"states", 6, check_states},
    {"softmax_backward", 14, check_softmax_backward},
    {"normalizers", 8, check_normalizers},
    {"normalizers_backward", 6, check_normalizers_backward},
    {"attention", 12, check_attention},
    {"attention_backward", 6, check_attention_backward},
    {"shards", 4, check_shards},
    {"merge", 5, check_merge},
    {"rule", 5, check_rule},
    {"horizon", 4, check_horizon},
};
constexpr int kFailuresShown = 50;
constexpr unsigned kSecondsPerCase = 120;

struct Options {
  double seconds = 0;
  std::int64_t cases = 0;
  std::uint64_t seed = 1;
  std::string check;
  int shrink = 0;
  std::string json;
};

// ---- One case ----

const Check& check_of(const Case& c, const std::string& only) {
  int at = static_cast<int>(Dice(c, 63).between(0, 99));
  for (const Check& check : kChecks) {
    at -= check.share;
    if (only.empty() ? at < 0 : only == check.name) return check;
  }
  throw Error("check: is '" + only + "', must be one of the checks that a run lists");
}

// The message of the first check that fails; "" if none does.
std::string first_failure(const Check& check, const Case& c, Tally& tally) {
  testing::TestPartResultArray results;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    try {
      check.run(c, tally);
    } catch (const std::exception& error) {
      force_target("");
      ADD_FAILURE() << "throws " << error.what();
    }
  }
  return results.size() == 0 ? "" : results.GetTestPartResult(0).message();
}

// The smallest sizes that still fail.
Case shrunk(const Check& check, Case c) {
  Tally unused;
  for (int shrink = 8; shrink > c.shrink; --shrink) {
    const Case smaller{c.seed, shrink};
    if (!first_failure(check, smaller, unused).empty()) return smaller;
  }
  return c;
}

// What is running, for whoever ends it.
volatile std::uint64_t running_seed = 0;

void die(int signal) {
  char text[96];
  const int size =
      std::snprintf(text, sizeof text, "whet_soak: %s in seed %llu\n",
                    signal == SIGALRM ? "no end" : "a crash", static_cast<unsigned long long>(running_seed));
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(size)) < 0) _exit(3);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

// ---- All cases ----

struct Count {
  std::int64_t cases = 0;
  std::int64_t failures = 0;
};

struct Run {
  std::map<std::string, Count> checks;
  Tally calls;
  std::vector<nlohmann::json> failures;
  std::int64_t cases = 0;
  std::int64_t failed = 0;
  double seconds = 0;
};

void add_failure(Run& run, const Check& check, const Case& c, const std::string& what) {
  ++run.failed;
  ++run.checks[check.name].failures;
  if (run.failed > kFailuresShown) return;
  const Case smallest = shrunk(check, c);
  std::string again = "--seed " + std::to_string(c.seed) + " --calls 1 --check " + check.name;
  if (smallest.shrink > 0) again += " --shrink " + std::to_string(smallest.shrink);
  std::fprintf(stderr, "whet_soak %s\n%s\n\n", again.c_str(), what.c_str());
  run.failures.push_back({{"check", check.name}, {"run", "whet_soak " + again}, {"what", what}});
}

Run run_cases(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  Run run;
  for (;; ++run.cases) {
    run.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (options.cases > 0 ? run.cases == options.cases : run.seconds >= options.seconds) return run;
    const Case c{options.seed + static_cast<std::uint64_t>(run.cases), options.shrink};
    const Check& check = check_of(c, options.check);
    running_seed = c.seed;
    alarm(kSecondsPerCase);
    ++run.checks[check.name].cases;
    const std::string what = first_failure(check, c, run.calls);
    if (!what.empty()) add_failure(run, check, c, what);
  }
}

nlohmann::json to_json(const Options& options, const Run& run) {
  nlohmann::json checks, functions;
  for (const auto& [name, count] : run.checks) {
    checks[name] = {{"cases", count.cases}, {"failures", count.failures}};
  }
  std::int64_t calls = 0, rows = 0;
  for (const auto& [name, count] : run.calls) {
    functions[name] = {{"calls", count.calls}, {"rows", count.rows}};
    calls += count.calls;
    rows += count.rows;
  }
  return {{"seed", options.seed},   {"cases", run.cases},     {"calls", calls},       {"rows", rows},
          {"failures", run.failed}, {"seconds", run.seconds}, {"targets", targets()}, {"checks", checks},
          {"functions", functions}, {"failed", run.failures}};
}

// ---- Arguments ----

template <typename T>
T number(std::string_view name, std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < T{}) {
    throw Error(std::string(name) + ": is '" + std::string(text) + "', must be a number, 0 or more");
  }
  return value;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string_view name = arguments[i];
    if (i + 1 == count) throw Error(std::string(name) + ": needs a value");
    const std::string_view value = arguments[i + 1];
    if (name == "--seconds") {
      options.seconds = number<double>(name, value);
    } else if (name == "--calls") {
      options.cases = number<std::int64_t>(name, value);
    } else if (name == "--seed") {
      options.seed = number<std::uint64_t>(name, value);
    } else if (name == "--shrink") {
      options.shrink = number<int>(name, value);
    } else if (name == "--check") {
      options.check = value;
    } else if (name == "--json") {
      options.json = value;
    } else {
      throw Error(std::string(name) +
                  ": unknown, must be --seconds, --calls, --seed, --check, --shrink or --json");
    }
  }
  if (options.seconds == 0 && options.cases == 0) throw Error("--seconds or --calls: needed");
  return options;
}

int run_main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM}) ::signal(signal, die);
  const Run run = run_cases(options);
  const nlohmann::json json = to_json(options, run);
  if (!options.json.empty()) std::ofstream(options.json) << json.dump(1) << "\n";
  std::printf("%-20s %12s %10s\n", "check", "cases", "failures");
  for (const auto& [name, of] : run.checks) {
    std::printf("%-20s %12lld %10lld\n", name.c_str(), static_cast<long long>(of.cases),
                static_cast<long long>(of.failures));
  }
  std::printf("%lld calls, %lld rows in %.0f s\n", json["calls"].get<long long>(),
              json["rows"].get<long long>(), run.seconds);
  return run.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace whet::soak

int main(int count, char** arguments) {
  try {
    return whet::soak::run_main(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "whet_soak: %s\n", error.what());
    return 2;
  }
}
