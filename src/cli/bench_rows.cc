// whet bench rows: the row functions beside the cost of copying the same memory.
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/bench.h"

namespace whet::cli {
namespace {

struct Shape {
  std::int64_t rows, keys;
  double elements() const { return static_cast<double>(rows * keys); }
};

constexpr Shape kShapes[] = {{4096, 1024}, {512, 8192}, {64, 65536}, {8, 131072}, {1, 131072}, {32, 49152}};

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
  softmax({x.data(), {shape.rows, shape.keys}}, {w.data(), {shape.rows, shape.keys}}, {.rule = rule},
          {.stats = stats});
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

std::vector<Contender> contenders_for(const Shape& shape, const std::vector<float>& x, std::vector<float>& w,
                                      std::vector<RowStats>& stats, int threads) {
  const Dims sizes = {shape.rows, shape.keys};
  const auto row_function = [&x, &w, sizes, threads](const Rule& rule) {
    return [&x, &w, sizes, threads, rule] {
      softmax({x.data(), sizes}, {w.data(), sizes}, {.rule = rule}, {}, {.threads = threads});
    };
  };
  std::vector<Contender> list;
  list.push_back({"copy", [&x, &w] { std::memcpy(w.data(), x.data(), x.size() * sizeof(float)); }});
  list.push_back({"none", row_function(Rule::none())});
  list.push_back({"paper", row_function(Rule::paper())});
  list.push_back({"target-entropy:1", row_function(Rule::target_entropy(1))});
  list.push_back({"paper + stats", [&x, &w, &stats, sizes, threads] {
                    softmax({x.data(), sizes}, {w.data(), sizes}, {.rule = Rule::paper()}, {.stats = stats},
                            {.threads = threads});
                  }});
  const auto size = saved_size(SoftmaxOptions{.rule = Rule::paper()});
  std::vector<float> saved(static_cast<std::size_t>(shape.rows * size));
  softmax({x.data(), sizes}, {w.data(), sizes}, {.rule = Rule::paper()},
          {.saved = {saved.data(), {shape.rows, size}}});
  list.push_back({"paper backward", [&x, &w, saved, size, rows = shape.rows, sizes, threads] {
                    softmax_backward({x.data(), sizes}, {x.data(), sizes}, {w.data(), sizes},
                                     {.rule = Rule::paper()}, {.saved = {saved.data(), {rows, size}}},
                                     {.threads = threads});
                  }});
  return list;
}

void print_header(const std::vector<Contender>& contenders) {
  std::printf("%-14s%9s", "rows x keys", "mean beta");
  for (const Contender& c : contenders) std::printf("%18s", c.what.c_str());
  std::printf("\n");
}

void print_row(const Shape& shape, double beta, const std::vector<Contender>& contenders) {
  const std::string text = std::to_string(shape.rows) + " x " + std::to_string(shape.keys);
  const double elements = shape.elements();
  std::printf("%-14s%9.2f", text.c_str(), beta);
  for (const Contender& c : contenders)
    std::printf("%10.3f ±%6.3f", c.median() / elements, c.half_spread() / elements);
  std::printf("\n");
  std::fflush(stdout);
}

nlohmann::ordered_json to_json(const Shape& shape, double beta, const std::vector<Contender>& contenders) {
  nlohmann::ordered_json result = {{"rows", shape.rows}, {"keys", shape.keys}, {"mean_beta", beta}};
  for (const Contender& c : contenders) {
    result["ns_per_element"][c.what] = quartiles(c, shape.elements());
  }
  return result;
}

}  // namespace

void bench_rows(const BenchOptions& options) {
  nlohmann::ordered_json report = bench_report("rows", options);
  if (!options.json) {
    print_bench_title(options);
    std::printf(
        "ns per element: median of %d interleaved rounds ± half the\n"
        "distance of the quartiles. copy = memcpy, what memory alone would cost.\n\n",
        kBenchRounds);
  }
  for (const Shape& shape : std::span(kShapes).first(options.quick ? 1 : std::size(kShapes))) {
    const std::vector<float> x = logits(shape);
    std::vector<float> w(x.size());
    std::vector<RowStats> stats(static_cast<std::size_t>(shape.rows));
    for (const Rule& rule : {Rule::none(), Rule::paper(), Rule::target_entropy(1)}) verify(shape, x, rule);
    std::vector<Contender> contenders = contenders_for(shape, x, w, stats, options.threads);
    if (!options.json && &shape == kShapes) print_header(contenders);
    // "paper + stats" stands before "paper backward" and leaves the stats that one reads.
    time_all(contenders);
    if (options.json) {
      report["shapes"].push_back(to_json(shape, mean_beta(stats), contenders));
    } else {
      print_row(shape, mean_beta(stats), contenders);
    }
  }
  if (options.json) std::cout << report.dump(2) << "\n";
}

}  // namespace whet::cli
