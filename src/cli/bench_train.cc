// whet bench train: steps of training and sets of evaluation per second. bench.training verifies them
// against JAX.
//
// What bench.training needs to run the same steps in JAX can be kept: weights, batches, losses,
// gradients.
#include <whet/runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/lab_options.h"
#include "files/text.h"
#include "lab/evaluation.h"
#include "lab/run.h"
#include "lab/trainer.h"

namespace whet::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::int64_t kKeptSteps = 100;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

lab::TrainingState start_state(const lab::Recipe& recipe, const BenchOptions& options) {
  lab::TrainingState state = lab::initial_state(recipe);
  if (options.run.empty()) return state;
  const lab::Run run = lab::load_run(options.run);
  if (!options.keep.empty()) refuse_to_overwrite({run}, "--keep", options.keep);
  state.parameters = run.parameters;
  return state;
}

// Batches one after the other, each with its own number of items.
struct Kept {
  std::vector<std::int64_t> sizes;
  std::vector<float> priorities, queries;
  std::vector<std::uint8_t> classes, targets;
  std::vector<double> losses;

  void add(const lab::Trainer& trainer) {
    const lab::Batch& batch = trainer.batch();
    sizes.push_back(batch.items);
    priorities.insert(priorities.end(), batch.priorities.begin(), batch.priorities.end());
    classes.insert(classes.end(), batch.classes.begin(), batch.classes.end());
    queries.insert(queries.end(), batch.queries.begin(), batch.queries.end());
    targets.insert(targets.end(), batch.targets.begin(), batch.targets.end());
    losses.push_back(trainer.loss());
  }

  void add_to(files::Safetensors& content) const {
    const auto add = [&](const char* name, const auto& values) {
      content.add(name, std::span(values), {static_cast<std::int64_t>(values.size())});
    };
    add("batches.sizes", sizes);
    add("batches.priorities", priorities);
    add("batches.classes", classes);
    add("batches.queries", queries);
    add("batches.targets", targets);
    add("losses", losses);
  }
};

// The first kKeptSteps steps: weights before, gradients of the first step, batches, losses, weights after.
void keep_steps(const std::string& path, const lab::Recipe& recipe, const lab::TrainingState& start) {
  files::Safetensors content;
  content.metadata["recipe"] = lab::to_json(recipe).dump();
  lab::add_parameters(content, "before.", start.parameters);
  lab::Trainer trainer(recipe, start);
  Kept kept;
  for (std::int64_t step = 0; step < kKeptSteps; ++step) {
    trainer.step();
    kept.add(trainer);
    if (step == 0) lab::add_parameters(content, "gradient.", trainer.gradients());
  }
  lab::add_parameters(content, "after.", trainer.state().parameters);
  kept.add_to(content);
  files::OutputFile file(path);
  files::write_safetensors(file, content);
  file.commit();
}

// Seconds per step: the median over rounds of `steps` steps that continue each other.
std::vector<double> time_steps(const lab::Recipe& recipe, const lab::TrainingState& start, int rounds,
                               int steps) {
  lab::Trainer trainer(recipe, start);
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = Clock::now();
    for (int step = 0; step < steps; ++step) trainer.step();
    seconds.push_back(seconds_since(begin) / steps);
  }
  std::ranges::sort(seconds);
  return seconds;
}

double sets_per_second(const std::vector<float>& parameters, std::int64_t items,
                       const BenchOptions& options) {
  const std::vector<lab::NamedWeighting> softmax{{"softmax", {}}};
  lab::EvaluationOptions evaluation{.sizes = {items},
                                    .sets = std::max<std::int64_t>(8, 200'000 / items),
                                    .seed = 1,
                                    .stream = lab::Stream::evaluation,
                                    .precision = lab::Precision::f32,
                                    .threads = options.threads,
                                    .progress = {}};
  double best = 0;
  for (int round = 0; round < (options.quick ? 1 : 5); ++round) {
    const auto begin = Clock::now();
    lab::evaluate(parameters, softmax, evaluation);
    best = std::max(best, static_cast<double>(evaluation.sets) / seconds_since(begin));
  }
  return best;
}

}  // namespace

void bench_train(const BenchOptions& options) {
  lab::Recipe recipe = lab::named_recipe("paper");
  const lab::TrainingState start = start_state(recipe, options);
  if (!options.keep.empty()) keep_steps(options.keep, recipe, start);
  const std::vector<double> seconds =
      time_steps(recipe, start, options.quick ? 3 : 9, options.quick ? 20 : 100);
  const double step = seconds[seconds.size() / 2];
  Json report = bench_report("train", options);
  const std::string from = options.run.empty() ? "initial weights" : files::escaped(options.run);
  report["start"] = from;
  report["steps_per_second"] = 1 / step;
  report["milliseconds_per_step"] = step * 1e3;
  Json evaluation = Json::array();
  for (const std::int64_t items : {1024, 16384}) {
    evaluation.push_back(
        {{"items", items}, {"sets_per_second", sets_per_second(start.parameters, items, options)}});
    if (options.quick) break;
  }
  report["evaluation"] = evaluation;
  if (options.json) {
    std::printf("%s\n", report.dump(2).c_str());
    return;
  }
  print_bench_title(options);
  std::printf("Max retrieval, batch 128, sets of 5..16 items, from %s.\n\n", from.c_str());
  std::printf("training      %8.1f steps/s  (%.2f ms; one thread)\n", 1 / step, step * 1e3);
  for (const Json& line : evaluation) {
    std::printf("evaluation    %8.1f sets/s   (%d items)\n", line["sets_per_second"].get<double>(),
                line["items"].get<int>());
  }
}

}  // namespace whet::cli
