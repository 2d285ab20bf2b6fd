// A run: a folder that holds a training, finished or not.
//
//     config.json              the recipe
//     checkpoint.safetensors   weights and Adam's moments; the steps done and the recipe in its metadata
//     metrics.jsonl            one line every kMetricsEvery steps: step, loss, accuracy
//     evaluation.json          what `whet reproduce` found of the head (lab/reproduction.h), if it did
//
// Files are replaced whole. Metrics are written before the checkpoint they belong to, and what is ahead of
// the checkpoint is dropped when a run is resumed, so that a run killed at any moment ends in the same bits.
#ifndef WHET_LAB_RUN_H_
#define WHET_LAB_RUN_H_

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "lab/recipe.h"
#include "lab/trainer.h"

namespace whet::lab {

inline constexpr std::int64_t kMetricsEvery = 500;
inline constexpr std::int64_t kCheckpointEvery = 2000;
inline constexpr const char* kEvaluation = "evaluation.json";
static_assert(kCheckpointEvery % kMetricsEvery == 0);

// Mean cross-entropy and accuracy over the training batches of the steps since the last line.
struct Metrics {
  std::int64_t step = 0;
  double loss = 0;
  double accuracy = 0;
};

struct Run {
  std::string folder;
  Recipe recipe;
  std::vector<float> parameters;
  std::int64_t step = 0;  // steps done
  std::vector<Metrics> metrics;
  std::string edit;  // what was done to the weights after training; empty: nothing
  // The step at which loss or weights were no longer finite, if train_runs() found one; the weights are then
  // those of an earlier checkpoint. Not part of the folder.
  std::int64_t diverged = 0;
};

// Of train_run(). The folder keeps its last checkpoint, at worst that of step 0.
class Diverged : public std::runtime_error {
 public:
  Diverged(const std::string& folder, std::int64_t step)
      : std::runtime_error(folder + ": the loss is no longer finite at step " + std::to_string(step) +
                           "; try a lower rate"),
        step_(step) {}
  std::int64_t step() const { return step_; }

 private:
  std::int64_t step_;
};

// Makes the folder if needed, and says how many steps of this recipe are done in it. Error if it holds a run
// of another recipe, FileError if a file of it can't be read, is damaged, or can't be written.
std::int64_t prepare_run(const std::string& folder, const Recipe& recipe);

// Trains until recipe.steps, from where the folder's checkpoint stands, as prepare_run() has it. `progress`
// hears of every step; what it throws ends the training, which can be resumed from the last checkpoint.
// FileError also if another process is training in this folder; Diverged if the loss or the weights are no
// longer finite.
void train_run(const std::string& folder, const Recipe& recipe,
               const std::function<void(std::int64_t steps)>& progress);

// FileError if there is no run, or a file of it is damaged or foreign.
Run load_run(const std::string& folder);

// The paths of its files.
std::vector<std::string> files_of(const Run& run);

// Writes a run of given weights: what an edit of a trained one leaves. It has no moments, so it can't be
// trained on.
void save_edited_run(const std::string& folder, const Run& run);

// Weights as tensors, `prefix` before their names, and back.
void add_parameters(files::Safetensors& content, const std::string& prefix,
                    const std::vector<float>& parameters);
std::vector<float> parameters_of(const files::Safetensors& content, const std::string& prefix);

}  // namespace whet::lab

#endif  // WHET_LAB_RUN_H_
