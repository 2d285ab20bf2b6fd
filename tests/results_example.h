// Small results, for tests: one head of one size and four rules; a benchmark of one section.
#ifndef WHET_TESTS_RESULTS_EXAMPLE_H_
#define WHET_TESTS_RESULTS_EXAMPLE_H_

#include <cmath>
#include <string>

#include "results/results.h"

namespace whet::results {

// `deviation` and `p` are NaN as they are for one seed.
inline Reproduction example(double deviation = NAN, double p = NAN) {
  Reproduction results;
  results.provenance = {"whet reproduce", "0.1.0", "a machine", "AVX2", 2};
  results.options = {.sets_seed = 1, .sets = 10, .precision = "f32"};
  results.paper = {{16, 98.6, 98.6, 0.4}, {64, 94.3, 94.5, NAN}};
  SizeSummary summary{.items = 64, .sets = 10};
  Size size{.items = 64, .sets = 10, .entropy = 0.5, .predicted = 0.82};
  Model model{.seed = 3, .recipe = {{"seed", 3}}, .step = 100};
  HeatMapFrame frame{.items = 64};
  const std::pair<const char*, double> accuracies[] = {
      {"softmax", 0.5}, {"paper", 0.6255}, {"target_entropy", 0.75}, {"hard", 0.8}};
  for (const auto& [name, accuracy] : accuracies) {
    const bool plain = std::string(name) == "softmax";
    const Difference difference{-0.0123, std::isnan(deviation) ? NAN : -0.02, -0.005, plain ? NAN : p};
    summary.rules.set(name, {accuracy, deviation, difference, difference});
    size.rules.set(name, {accuracy, 1.5, 0.25, 0.125, 0.75});
    frame.rules.set(name, {{0.75, 0.25}});
    model.rules.set(name, plain ? "none" : name);
  }
  model.rules.set("target_entropy", "target-entropy:0.0625");
  model.diagnosis = {.slope = 100, .offsets = {-0.25, 0.25}, .deviation = 0.25, .resolution = 400};
  model.metrics = {{100, 0.5, 0.75}};
  model.sizes = {size};
  results.summary = {summary};
  results.models = {model};
  results.fit_scatter = {{0.5, 2}};
  results.heat_map = {.seed = 3, .sets = 1, .columns = 2, .frames = {frame}};
  return results;
}

inline Benchmark benchmark_example() {
  Benchmark results;
  results.provenance = {"python -m bench.rows", "0.1.0", "a machine", "AVX2", 2};
  results.facts.set("L2 cache", "512K");
  results.sections = {{.title = "Softmax",
                       .note = "one thread",
                       .headers = {"shape", "ns"},
                       .rows = {{"4×4", "1.2"}},
                       .bars = {{"whet × torch", 0.7, 0.8, true}}}};
  return results;
}

}  // namespace whet::results

#endif  // WHET_TESTS_RESULTS_EXAMPLE_H_
