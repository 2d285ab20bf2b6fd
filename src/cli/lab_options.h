// Options that the commands of the lab share: the recipe of a head, the sizes and sets of an evaluation.
#ifndef WHET_CLI_LAB_OPTIONS_H_
#define WHET_CLI_LAB_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/progress.h"
#include "lab/ranks.h"
#include "lab/recipe.h"
#include "lab/reproduction.h"
#include "results/results.h"

namespace CLI {
class App;
}

namespace whet::cli {

// What a user gave; whatever wasn't given stays as the named recipe has it.
struct RecipeOptions {
  std::string name = "paper";
  std::optional<std::uint64_t> seed;
  std::optional<std::int64_t> steps, batch;
  std::string items, schedule, l2_form, rule, normalizer, activation;
  std::optional<int> heads;
  std::optional<double> zoom, zoom_warmup, rate, warmup, l2;
  std::optional<bool> l2_biases;

  void add_to(CLI::App& command);
  lab::Recipe recipe() const;  // Error naming the option
};

struct EvaluationFlags {
  std::vector<std::int64_t> sizes;
  std::int64_t sets = 0;
  std::uint64_t seed = 1;
  std::string precision = "f32";
  std::vector<std::string> rules;  // beside the standard ones
  int threads = 0;

  void add_to(CLI::App& command);
  lab::StudyOptions options() const;
};

// For options of unsigned numbers: CLI11 would let -1 wrap around.
std::string not_negative(const std::string& number);

// Every head once: Error if two folders hold the same weights, be it one run by two names or a copy.
std::vector<lab::Run> load_runs(const std::vector<std::string>& folders);

// Of the lab's work, on standard error; of several ranks, that of the first.
lab::ProgressListener progress_bars(const lab::Rank& rank = {});

// Error naming `option` if `path` leads to a file of one of these runs.
void refuse_to_overwrite(const std::vector<lab::Run>& runs, const std::string& option,
                         const std::string& path);

results::Provenance provenance(int threads_given);  // 0: the default
void remember_command(int argc, char** argv);       // for provenance()

}  // namespace whet::cli

#endif  // WHET_CLI_LAB_OPTIONS_H_
