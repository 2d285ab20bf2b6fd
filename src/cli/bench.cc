// whet bench: speed of this machine's kernels beside what limits them, verified before timed.
#include <whet/whet.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace whet::cli {
namespace {

struct Shape {
  std::int64_t rows, keys;
};

constexpr Shape kShapes[] = {{4096, 1024}, {512, 8192}, {64, 65536}, {8, 131072}, {1, 131072}, {32, 49152}};
constexpr int kRounds = 9;
constexpr double kSecondsPerTiming = 0.01;

struct Options {
  bool json = false;
  int threads = 1;
};

// One thing to time. `what` is unique within a shape.
struct Contender {
  std::string what;
  std::function<void()> run;
  std::vector<double> ns{};  // per element, one a round

  double quantile(double q) const {
    std::vector<double> sorted = ns;
    std::ranges::sort(sorted);
    return sorted[static_cast<std::size_t>(std::lround(q * static_cast<double>(sorted.size() - 1)))];
  }
};

// Logits on which the paper's rule acts: gaussian rows whose width puts the entropy near 3 nats.
std::vector<float> logits(const Shape& shape) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(shape.rows * shape.keys));
  const float width = std::sqrt(2 * (std::log(static_cast<float>(shape.keys)) - 3)) * 1.05F;
  for (float& v : x) v = width * normal(generator);
  return x;
}

// What anybody would write first; also the reference, in float64.
void plain_row(const float* x, std::int64_t n, double beta, double* w) {
  const double max = *std::max_element(x, x + n);
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += w[i] = std::exp(beta * (x[i] - max));
  for (std::int64_t i = 0; i < n; ++i) w[i] /= sum;
}

// The first, middle and last row against float64 at the beta the stats report.
void verify(const Shape& shape, const std::vector<float>& x, const Rule& rule) {
  std::vector<float> w(x.size());
  std::vector<RowStats> stats(static_cast<std::size_t>(shape.rows));
  softmax({x.data(), {shape.rows, shape.keys}}, {w.data(), {shape.rows, shape.keys}},
          {.rule = rule, .stats = stats});
  std::vector<double> expected(static_cast<std::size_t>(shape.keys));
  for (const std::int64_t row : {std::int64_t{0}, shape.rows / 2, shape.rows - 1}) {
    const float* logit = x.data() + row * shape.keys;
    const RowStats& s = stats[static_cast<std::size_t>(row)];
    plain_row(logit, shape.keys, s.beta, expected.data());
    for (std::int64_t i = 0; i < shape.keys; ++i) {
      const double want = expected[static_cast<std::size_t>(i)];
      const double got = w[static_cast<std::size_t>(row * shape.keys + i)];
      const double allowed = 1e-6 * (1 + std::abs(s.beta * (logit[i] - s.max))) * want + 1e-30;
      if (!(std::abs(got - want) <= allowed)) {
        throw std::runtime_error("wrong weight under " + rule.name() +
                                 ": nothing was timed. Please report this");
      }
    }
  }
}

// Every contender once a round, so that a slow moment of the machine hits all of them alike.
void time_all(std::vector<Contender>& contenders, std::int64_t elements) {
  using Clock = std::chrono::steady_clock;
  for (Contender& c : contenders) c.run();
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& c : contenders) {
      const auto start = Clock::now();
      double seconds = 0;
      std::int64_t runs = 0;
      while (seconds < kSecondsPerTiming) {
        c.run();
        ++runs;
        seconds = std::chrono::duration<double>(Clock::now() - start).count();
      }
      c.ns.push_back(seconds * 1e9 / static_cast<double>(runs * elements));
    }
  }
}

std::vector<Contender> contenders_for(const Shape& shape, const std::vector<float>& x, std::vector<float>& w,
                                      std::vector<RowStats>& stats, int threads) {
  const Dims sizes = {shape.rows, shape.keys};
  const auto row_function = [&x, &w, sizes, threads](const Rule& rule) {
    return [&x, &w, sizes, threads, rule] {
      softmax({x.data(), sizes}, {w.data(), sizes}, {.rule = rule, .threads = threads});
    };
  };
  std::vector<Contender> list;
  list.push_back({"copy", [&x, &w] { std::memcpy(w.data(), x.data(), x.size() * sizeof(float)); }});
  list.push_back({"none", row_function(Rule::none())});
  list.push_back({"paper", row_function(Rule::paper())});
  list.push_back({"target-entropy:1", row_function(Rule::target_entropy(1))});
  list.push_back({"paper + stats", [&x, &w, &stats, sizes, threads] {
                    softmax({x.data(), sizes}, {w.data(), sizes},
                            {.rule = Rule::paper(), .stats = stats, .threads = threads});
                  }});
  list.push_back({"paper backward", [&x, &w, &stats, sizes, threads] {
                    softmax_backward({x.data(), sizes}, {x.data(), sizes}, {w.data(), sizes},
                                     {.rule = Rule::paper(), .stats = stats, .threads = threads});
                  }});
  return list;
}

double mean_beta(const std::vector<RowStats>& stats) {
  double sum = 0;
  for (const RowStats& s : stats) sum += s.beta;
  return sum / static_cast<double>(stats.size());
}

void print_header(const std::vector<Contender>& contenders) {
  std::printf("%-14s%9s", "rows x keys", "mean beta");
  for (const Contender& c : contenders) std::printf("%18s", c.what.c_str());
  std::printf("\n");
}

void print_row(const std::string& shape, double beta, const std::vector<Contender>& contenders) {
  std::printf("%-14s%9.2f", shape.c_str(), beta);
  for (const Contender& c : contenders)
    std::printf("%10.3f ±%6.3f", c.quantile(0.5), (c.quantile(0.75) - c.quantile(0.25)) / 2);
  std::printf("\n");
  std::fflush(stdout);
}

nlohmann::ordered_json to_json(const Shape& shape, double beta, const std::vector<Contender>& contenders) {
  nlohmann::ordered_json result = {{"rows", shape.rows}, {"keys", shape.keys}, {"mean_beta", beta}};
  for (const Contender& c : contenders) {
    result["ns_per_element"][c.what] = {{"median", c.quantile(0.5)},
                                        {"lower_quartile", c.quantile(0.25)},
                                        {"upper_quartile", c.quantile(0.75)}};
  }
  return result;
}

void bench_rows(const Options& options) {
  nlohmann::ordered_json report = {{"whet", version()},          {"benchmark", "rows"}, {"target", target()},
                                   {"threads", options.threads}, {"dtype", "float32"},  {"rounds", kRounds}};
  if (!options.json) {
    std::printf(
        "whet %s, %s, %d thread%s, float32. ns per element: median of %d interleaved rounds ± half the\n"
        "distance of the quartiles. copy = memcpy, what memory alone would cost.\n\n",
        version().c_str(), target().c_str(), options.threads, options.threads == 1 ? "" : "s", kRounds);
  }
  for (const Shape& shape : kShapes) {
    const std::vector<float> x = logits(shape);
    std::vector<float> w(x.size());
    std::vector<RowStats> stats(static_cast<std::size_t>(shape.rows));
    for (const Rule& rule : {Rule::none(), Rule::paper(), Rule::target_entropy(1)}) verify(shape, x, rule);
    std::vector<Contender> contenders = contenders_for(shape, x, w, stats, options.threads);
    if (!options.json && &shape == kShapes) print_header(contenders);
    // "paper + stats" stands before "paper backward" and leaves the stats that one reads.
    time_all(contenders, shape.rows * shape.keys);
    if (options.json) {
      report["shapes"].push_back(to_json(shape, mean_beta(stats), contenders));
    } else {
      print_row(std::to_string(shape.rows) + " x " + std::to_string(shape.keys), mean_beta(stats),
                contenders);
    }
  }
  if (options.json) std::cout << report.dump(2) << "\n";
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Speed of this machine's kernels beside their limits");
  bench->require_subcommand(1);
  bench->footer("Example:\n  whet bench rows --threads 2\n");
  CLI::App* rows = bench->add_subcommand("rows", "Softmax over rows: plain, adaptive, to a target, backward");
  auto options = std::make_shared<Options>();
  rows->add_flag("--json", options->json, "Print JSON instead of a table");
  rows->add_option("--threads", options->threads, "Threads to use (default 1)")->check(CLI::Range(1, 1024));
  rows->footer(
      "Checks every function against float64 first, then times all of them in turns (about 10 seconds).\n"
      "To compare with torch and JAX: make bench.\n");
  rows->callback([options] { bench_rows(*options); });
}

}  // namespace whet::cli
