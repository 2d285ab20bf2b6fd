// The paper's experiment as a whole: heads trained from several seeds, evaluated on the same sets under every
// rule, diagnosed, refitted, calibrated; everything in one results::Reproduction (docs/results.md).
#ifndef WHET_LAB_REPRODUCTION_H_
#define WHET_LAB_REPRODUCTION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lab/evaluation.h"
#include "lab/fit_points.h"
#include "lab/recipe.h"
#include "lab/run.h"
#include "results/results.h"

namespace whet::lab {

// Hears how far long work has come; advance() is called from several threads.
struct ProgressListener {
  // `before` of `total` was done by an earlier run.
  std::function<void(const std::string& label, std::int64_t total, std::int64_t before)> begin;
  std::function<void(std::int64_t steps)> advance;
  std::function<void()> end;  // not called if the work fails
};

struct StudyOptions {
  std::vector<std::int64_t> sizes{16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
  std::int64_t sets = 0;   // of each size; 0: default_sets(size)
  std::uint64_t seed = 1;  // of the sets
  Precision precision = Precision::f32;
  std::vector<NamedWeighting> extra{};  // beside the standard ones
  bool calibrate = true;  // also the two calibrated versions of every head, on a quarter of the sets
  int threads = 0;
  bool cache = false;  // results of each head in evaluation.json of its run, so that a stopped study resumes
  std::string cache_folder{};  // or in a file of this folder, for runs that aren't to be written into
};

// A run to train: where, and how.
struct Training {
  std::string folder;
  Recipe recipe;
};

// Trains every run, one per thread; existing runs are resumed. Every folder is looked at before the first
// step: a wrong one must not cost the training of the others. A run that diverges is no error: it is returned
// as its last checkpoint has it, Run::diverged set.
std::vector<Run> train_runs(const std::vector<Training>& trainings, int threads,
                            const ProgressListener& listener);

// Runs of the seeds recipe.seed, recipe.seed + 1, ... in folder/seed-N.
std::vector<Training> seed_trainings(const std::string& folder, const Recipe& recipe, int seeds);

// Trains them all.
std::vector<Run> train_seeds(const std::string& folder, const Recipe& recipe, int seeds, int threads,
                             const ProgressListener& listener);

// The rules a head is evaluated under, in this order: softmax, trained (if it was trained with a
// rule or another normalizer), paper, fixed, log_length, target_entropy, target_peak, refit (if its fit is
// possible), the extra ones, hard. Label-free: the targets are the mean entropy and the mean largest weight
// of the head itself, as it was trained, on sets of its largest training size, which no evaluation uses.
struct Study {
  std::vector<NamedWeighting> weightings;
  std::vector<FitPoint> points;
  PolynomialFit fit;    // no coefficients: the points determine none
  double accuracy = 0;  // as trained, on sets of the largest training size, which no evaluation uses
};
Study study_of(const Run& run, const StudyOptions& options,
               const std::function<void(std::int64_t items)>& progress = {});

// Evaluates each head that isn't cached, as study() would, and leaves its results where study() finds them;
// `first` says whether the first run is the first of the whole study, of which more is drawn.
void evaluate_heads(const std::vector<Run>& runs, const StudyOptions& options, bool first,
                    const ProgressListener& listener);

results::Reproduction study(const std::vector<Run>& runs, const StudyOptions& options,
                            const results::Provenance& provenance, const ProgressListener& listener);

}  // namespace whet::lab

#endif  // WHET_LAB_REPRODUCTION_H_
