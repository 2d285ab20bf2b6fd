// Small results, for tests: one head of one size and four rules; a benchmark of one section; a probe of four
// heads at two lengths; decoders on one algorithm of CLRS-Text.
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

// The same value in every head.
inline HeadStatistic everywhere(double mean, double error) {
  return {.mean = {{mean, mean}, {mean, mean}}, .error = {{error, error}, {error, error}}};
}

// Two layers of two heads, one of each class, at 64 and 256 tokens.
inline Probe probe_example() {
  Probe results;
  results.provenance = {"whet probe", "0.1.0", "a machine", "AVX2", 2};
  results.model = {.name = "tiny",
                   .architecture = "llama",
                   .layers = 2,
                   .heads = 2,
                   .key_heads = 1,
                   .parameters = 1234567,
                   .context = 8192};
  results.prompts = {.kind = "max", .example = "What is the maximum?", .per_length = 4, .seed = 1};
  results.rule = "paper";
  results.horizon_weight = 0.5;
  results.thresholds = {.sink = 0.5, .uniform = 0.9, .dispersing = 0.2};
  for (const double tokens : {64.0, 256.5}) {
    const HeadStatistics statistics{.entropy = everywhere(std::log(tokens) / 2, 0.0625),
                                    .relative_entropy = everywhere(0.5, 0.015625),
                                    .peak = everywhere(0.25, 0.125),
                                    .first = everywhere(0.125, NAN),
                                    .spread = everywhere(12, 1),
                                    .beta = everywhere(1.5, 0.25),
                                    .sharp_entropy = everywhere(1, 0.25),
                                    .sharp_peak = everywhere(0.75, 0.25)};
    results.lengths.push_back({.tokens = tokens, .prompts = 4, .statistics = statistics});
  }
  results.heads = {{0, 0, "sharp", 0.0625, -0.25, 0.375, 162755.75},
                   {0, 1, "sink", 0, NAN, NAN, 1e300},
                   {1, 0, "uniform", 0.9, 0.875, 0.925, 12},
                   {1, 1, "dispersing", 0.5, 0.25, 0.75, NAN}};
  return results;
}

// The same after its settings were compared.
inline Probe advised_probe_example() {
  Probe results = probe_example();
  results.settings = {{.name = "none",
                       .perplexity = 18.75,
                       .perplexity_low = 18,
                       .perplexity_high = 19.5,
                       .needle = 0.75,
                       .needle_low = 0.5,
                       .needle_high = 0.9,
                       .tokens = 1500},
                      {.name = "paper, all heads",
                       .perplexity = 20,
                       .perplexity_low = 19,
                       .perplexity_high = 21,
                       .difference = 0.0645,
                       .low = 0.05,
                       .high = 0.08,
                       .tokens = 1500}};
  results.verdict = "Don't sharpen this model: perplexity grows from 18.75 to 20.";
  return results;
}

// Two seeds of softmax and of the paper's rule, at a trained size and one beyond; log length in place of
// softmax at test was tried at the first.
inline Clrs clrs_example() {
  Clrs results;
  results.provenance = {"whet-clrs report sweep", "0.1.0", "a machine", "AVX2", 2};
  for (const char* variant : {"softmax", "paper"}) {
    for (const std::uint64_t seed : {0U, 1U}) {
      results.runs.push_back({.name = std::string(variant) + "-" + std::to_string(seed),
                              .variant = variant,
                              .seed = seed,
                              .step = 100,
                              .parameters = 1234,
                              .recipe = {{"seed", seed}},
                              .metrics = {{50, 0.5, 0.75}, {100, 0.25, 0.875}}});
    }
  }
  const auto variant = [](const char* name, const char* setting, double exact) {
    return ClrsVariant{.variant = name,
                       .setting = setting,
                       .runs = 2,
                       .exact = {exact, exact - 0.125, exact + 0.125},
                       .tokens = {0.75, NAN, NAN},
                       .forced = 0.875,
                       .errors = {0.25, 0.5},
                       .entropy = std::vector<double>{1.5, 0.5},
                       .sharp_entropy = std::vector<double>{1.25, 0.25}};
  };
  const ClrsDifferences differences{.exact = {0.25, 0.125, 0.375, 0.0123}, .tokens = {0, NAN, NAN, NAN}};
  for (const std::int64_t size : {8, 16}) {
    ClrsSize made{.size = size, .problems = 10, .chance = {0, 0.25}, .copy = {0.0625, 0.5}};
    made.variants = {variant("softmax", "as trained", 0.5), variant("paper", "as trained", 0.75)};
    made.variants[0].sharp_entropy = {};
    made.variants[1].against_softmax = differences;
    if (size == 8) made.variants.push_back(variant("softmax", "log-length:32", 0.25));
    if (results.tasks.empty()) {
      results.tasks.push_back({.algorithm = "insertion_sort", .hints = true, .trained_sizes = {4, 8}});
    }
    results.tasks[0].sizes.push_back(made);
  }
  return results;
}

}  // namespace whet::results

#endif  // WHET_TESTS_RESULTS_EXAMPLE_H_
