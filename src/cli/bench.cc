// whet bench: speed of this machine's kernels beside what limits them, verified before timed.
#include "cli/bench.h"

#include <whet/whet.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"

namespace whet::cli {
namespace {

constexpr double kSecondsPerTiming = 0.01;

struct Benchmark {
  const char* name;
  const char* description;
  const char* footer;
  void (*run)(const BenchOptions&);
};

constexpr Benchmark kBenchmarks[] = {
    {"rows", "Softmax over rows: plain, adaptive, to a target, backward",
     "Checks every function against float64 first, then times all of them in turns (about 10 seconds).\n"
     "To compare with torch and JAX: make bench.\n",
     bench_rows},
    {"attention", "Attention, many queries and one: plain, adaptive, to a target",
     "Checks some rows of every function against float64 first, then times all of them in turns (about 20\n"
     "seconds). To compare with torch and JAX: make bench-attention.\n",
     bench_attention},
    {"train", "Max retrieval: steps of training and sets of evaluation per second",
     "From initial weights, or from those of a trained head (--run), whose sets need less of a backward "
     "pass.\n"
     "To compare with JAX: make bench-train.\n",
     bench_train},
};

}  // namespace

double Contender::quantile(double q) const {
  std::vector<double> sorted = ns;
  std::ranges::sort(sorted);
  return sorted[static_cast<std::size_t>(std::lround(q * static_cast<double>(sorted.size() - 1)))];
}

void time_all(std::vector<Contender>& contenders) {
  using Clock = std::chrono::steady_clock;
  for (Contender& c : contenders) c.run();
  for (int round = 0; round < kBenchRounds; ++round) {
    for (Contender& c : contenders) {
      const auto start = Clock::now();
      double seconds = 0;
      std::int64_t runs = 0;
      while (seconds < kSecondsPerTiming) {
        c.run();
        ++runs;
        seconds = std::chrono::duration<double>(Clock::now() - start).count();
      }
      c.ns.push_back(seconds * 1e9 / static_cast<double>(runs));
    }
  }
}

double mean_beta(std::span<const RowStats> stats) {
  double sum = 0;
  for (const RowStats& s : stats) sum += s.beta;
  return sum / static_cast<double>(stats.size());
}

nlohmann::ordered_json bench_report(const char* benchmark, const BenchOptions& options) {
  return {{"whet", version()},          {"benchmark", benchmark}, {"target", target()},
          {"threads", options.threads}, {"dtype", "float32"},     {"rounds", kBenchRounds}};
}

void print_bench_title(const BenchOptions& options) {
  std::printf("whet %s, %s, %d thread%s, float32. ", version().c_str(), target().c_str(), options.threads,
              options.threads == 1 ? "" : "s");
}

nlohmann::ordered_json quartiles(const Contender& contender, double elements) {
  return {{"median", contender.median() / elements},
          {"lower_quartile", contender.quantile(0.25) / elements},
          {"upper_quartile", contender.quantile(0.75) / elements}};
}

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Speed of this machine's kernels beside their limits");
  bench->require_subcommand(1);
  bench->footer("Example:\n  whet bench rows --threads 2\n");
  for (const Benchmark& benchmark : kBenchmarks) {
    CLI::App* command = bench->add_subcommand(benchmark.name, benchmark.description);
    auto options = std::make_shared<BenchOptions>();
    command->add_flag("--json", options->json, "Print JSON instead of a table");
    command->add_flag("--quick", options->quick, "The first shape only, to see that it works");
    command->add_option("--threads", options->threads, "Threads to use (default 1)")
        ->check(CLI::Range(1, 1024));
    if (benchmark.run == bench_train) {
      command->add_option("--run", options->run, "Start from this run's weights")->type_name("DIR");
      command
          ->add_option("--keep", options->keep,
                       "Keep weights, batches, losses and gradients of the first 100 steps")
          ->type_name("FILE.safetensors");
    }
    command->footer(benchmark.footer);
    command->callback([options, run = benchmark.run] { run(*options); });
  }
}

}  // namespace whet::cli
