#include "lab/reproduction.h"

#include <whet/error.h>
#include <whet/horizon.h>
#include <whet/runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/runtime.h"
#include "files/checksum.h"
#include "files/file.h"
#include "files/json.h"
#include "lab/calibration.h"
#include "lab/comparison.h"
#include "lab/parallel.h"
#include "lab/significance.h"

namespace whet::lab {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostScatter = 4000;    // points of the fit kept for drawing
constexpr std::int64_t kTrainingSets = 4096;  // that say how a head does at its training size
constexpr double kLearned = 0.5;              // the least accuracy there; chance is 0.1
constexpr std::int64_t kMapSets = 32, kMapColumns = 16, kLargestMap = 65536;

const char* name_of(Precision precision) { return precision == Precision::f64 ? "f64" : "f32"; }

double mean_of(const SizeOutcome& size, std::int64_t count) {
  return static_cast<double>(count) / static_cast<double>(size.sets);
}

results::Size size_results(const SizeOutcome& size, std::span<const NamedWeighting> weightings) {
  const auto items = static_cast<double>(size.items);
  results::Size results{.items = size.items,
                        .sets = size.sets,
                        .redrawn = size.redrawn,
                        .entropy = size.entropy,
                        .spread = size.spread,
                        .largest_spread = size.largest_spread,
                        .largest_weight = size.outcomes.front().largest_peak,
                        .weight_bound = largest_weight(items, size.largest_spread),
                        .paper_bound = paper_bounds(items, size.largest_spread).upper,
                        .ranked = mean_of(size, size.ranked),
                        .predicted = mean_of(size, size.predicted)};
  for (std::size_t r = 0; r < weightings.size(); ++r) {
    const Outcome& o = size.outcomes[r];
    results.rules.set(weightings[r].name, {.accuracy = mean_of(size, o.correct),
                                           .beta = o.beta,
                                           .sharpened = o.sharpened,
                                           .entropy = o.entropy,
                                           .peak = o.peak});
  }
  return results;
}

std::vector<results::Size> sizes_results(const std::vector<SizeOutcome>& outcomes,
                                         std::span<const NamedWeighting> weightings) {
  std::vector<results::Size> sizes;
  sizes.reserve(outcomes.size());
  for (const SizeOutcome& outcome : outcomes) sizes.push_back(size_results(outcome, weightings));
  return sizes;
}

results::Diagnosis diagnosis_results(const Run& run) {
  const Diagnosis d = diagnose(run.parameters, run.recipe.architecture);
  return {.slope = d.slope,
          .offsets = {d.offsets.begin(), d.offsets.end()},
          .deviation = d.deviation,
          .resolution = d.resolution};
}

std::optional<results::Fit> fit_results(const PolynomialFit& fit) {
  if (fit.coefficients.empty()) return std::nullopt;
  return results::Fit{.coefficients = fit.coefficients,
                      .lowest_entropy = fit.lowest_entropy,
                      .highest_entropy = fit.highest_entropy,
                      .rms_residual = fit.rms_residual,
                      .r_squared = fit.r_squared,
                      .points = static_cast<std::int64_t>(fit.points),
                      .rule = fit.rule().name()};
}

EvaluationOptions evaluation_of(const StudyOptions& options, const ProgressListener& listener,
                                const Architecture& architecture = {}) {
  return {.sizes = options.sizes,
          .sets = options.sets,
          .seed = options.seed,
          .stream = Stream::evaluation,
          .precision = options.precision,
          .architecture = architecture,
          .threads = options.threads,
          .progress = listener.advance};
}

EvaluationOptions calibrated_evaluation_of(const StudyOptions& options, const ProgressListener& listener,
                                           const Architecture& architecture = {}) {
  EvaluationOptions fewer = evaluation_of(options, listener, architecture);
  fewer.share = 4;
  return fewer;
}

FitPointsOptions fit_of(const StudyOptions& options, const Architecture& architecture = {},
                        const std::function<void(std::int64_t items)>& progress = {}) {
  FitPointsOptions fit{
      .seed = options.seed, .architecture = architecture, .threads = options.threads, .progress = progress};
  if (options.sets > 0) fit.sets = std::min(fit.sets, options.sets);
  return fit;
}

// Of the head as it was trained, on sets of its largest training size that no evaluation uses.
Outcome in_distribution(const Run& run, const StudyOptions& options) {
  const std::vector<NamedWeighting> as_trained{{"trained", run.recipe.weighting}};
  return evaluate(run.parameters, as_trained,
                  {.sizes = {run.recipe.sets.largest},
                   .sets = kTrainingSets,
                   .seed = options.seed,
                   .stream = Stream::calibration,
                   .precision = options.precision,
                   .architecture = run.recipe.architecture,
                   .threads = options.threads,
                   .progress = {}})
      .front()
      .outcomes.front();
}

std::vector<NamedWeighting> rules_without_fit(const Run& run, const Outcome& as_trained) {
  const std::int64_t trained = run.recipe.sets.largest;
  std::vector<NamedWeighting> rules{{"softmax", {}}};
  if (run.recipe.weighting != Weighting()) rules.push_back({"trained", run.recipe.weighting});
  rules.push_back({"paper", {.rule = Rule::paper()}});
  rules.push_back({"fixed", {.rule = Rule::fixed(2)}});
  rules.push_back({"log_length", {.rule = Rule::log_length(std::max(2.0, static_cast<double>(trained)))}});
  // A head that gives all weight to one item on small sets, or none to any, has no target to hold: then these
  // two are left out.
  if (as_trained.entropy > 0) {
    rules.push_back({"target_entropy", {.rule = Rule::target_entropy(as_trained.entropy)}});
  }
  if (as_trained.peak > 0 && as_trained.peak < 1) {
    rules.push_back({"target_peak", {.rule = Rule::target_peak(as_trained.peak)}});
  }
  return rules;
}

// The head with its keys calibrated: what is left of its loss is dispersion.
results::CalibratedHead calibrated_results(const Run& run, const StudyOptions& options,
                                           CalibrationMethod method, const ProgressListener& listener) {
  Run edited = run;
  Calibration calibration = calibrate(run.parameters, method, options.seed, run.recipe.architecture);
  edited.parameters = std::move(calibration.parameters);
  std::vector<NamedWeighting> weightings = rules_without_fit(edited, in_distribution(edited, options));
  weightings.push_back({"hard", hard_weighting()});
  const auto outcomes = evaluate(edited.parameters, weightings,
                                 calibrated_evaluation_of(options, listener, run.recipe.architecture));
  return {.edit = calibration.text,
          .directions = calibration.directions,
          .diagnosis = diagnosis_results(edited),
          .sizes = sizes_results(outcomes, weightings)};
}

// More digits than these no picture shows.
results::HeatMap map_results(const Run& run, const Study& study, const StudyOptions& options) {
  results::HeatMap results{.seed = run.recipe.seed, .sets = kMapSets, .columns = kMapColumns};
  for (const std::int64_t items : options.sizes) {
    if (items > kLargestMap) continue;
    const std::vector<float> map = heat_map(run.parameters, study.weightings, options.seed, items, kMapSets,
                                            kMapColumns, run.recipe.architecture);
    auto weight = map.begin();  // weightings x sets x columns
    results::HeatMapFrame frame{.items = items};
    for (const NamedWeighting& weighting : study.weightings) {
      std::vector<std::vector<double>> rows(kMapSets, std::vector<double>(kMapColumns));
      for (std::vector<double>& row : rows) {
        for (double& cell : row) cell = std::round(double{*weight++} * 1e4) / 1e4;
      }
      frame.rules.set(weighting.name, std::move(rows));
    }
    results.frames.push_back(std::move(frame));
  }
  return results;
}

results::FitScatter scatter_results(const std::vector<FitPoint>& points) {
  results::FitScatter scatter;
  const std::size_t step = points.size() / kMostScatter + 1;
  for (std::size_t i = 0; i < points.size(); i += step) {
    scatter.emplace_back(std::round(points[i].entropy * 1e5) / 1e5,
                         std::round(points[i].best_beta * 1e4) / 1e4);
  }
  return scatter;
}

// Nothing if the head answers its own training sets.
std::optional<std::string> why_not_learned(const Run& run, double accuracy) {
  if (run.diverged > 0) {
    return "loss no longer finite at step " + std::to_string(run.diverged) + ", weights are those of step " +
           std::to_string(run.step);
  }
  if (accuracy >= kLearned) return std::nullopt;
  char percent[16];
  std::snprintf(percent, sizeof percent, "%.1f", 100 * accuracy);
  return "accuracy " + std::string(percent) + " % on sets of " + std::to_string(run.recipe.sets.largest) +
         " items, the largest of training";
}

results::Model model_results(const Run& run, const Study& study, const std::vector<SizeOutcome>& outcomes) {
  results::Model model{.seed = run.recipe.seed,
                       .recipe = to_json(run.recipe),
                       .step = run.step,
                       .diagnosis = diagnosis_results(run),
                       .spread_allowed = spread_allowed(run.parameters, run.recipe.architecture),
                       .fit = fit_results(study.fit),
                       .sizes = sizes_results(outcomes, study.weightings)};
  for (const NamedWeighting& n : study.weightings) model.rules.set(n.name, n.weighting.name());
  for (const Metrics& m : run.metrics) model.metrics.emplace_back(m.step, m.loss, m.accuracy);
  if (!run.edit.empty()) model.edit = run.edit;
  model.did_not_learn = why_not_learned(run, study.accuracy);
  return model;
}

using Heads = std::vector<const std::vector<results::Size>*>;  // the sizes of each head

// Of the heads that have this rule.
std::vector<double> accuracies_of(const Heads& heads, std::size_t size, const std::string& rule) {
  std::vector<double> values;
  for (const std::vector<results::Size>* sizes : heads) {
    const results::RuleOutcome* outcome = sizes->at(size).rules.find(rule);
    if (outcome != nullptr) values.push_back(outcome->accuracy);
  }
  return values;
}

// Over the heads, at every size and for every rule that all of them have.
std::vector<results::SizeSummary> summary_of(const Heads& heads) {
  std::vector<results::SizeSummary> summary;
  for (std::size_t i = 0; i < heads.front()->size(); ++i) {
    const results::Size& first = heads.front()->at(i);
    const std::vector<double> softmax = accuracies_of(heads, i, "softmax");
    const std::vector<double> ceiling = accuracies_of(heads, i, "hard");
    results::SizeSummary size{.items = first.items, .sets = first.sets};
    for (const auto& [rule, ignored] : first.rules) {
      const std::vector<double> values = accuracies_of(heads, i, rule);
      if (values.size() != heads.size()) continue;
      const Summary accuracy = summarize(values);
      size.rules.set(rule, {.accuracy = accuracy.mean,
                            .deviation = accuracy.deviation,
                            .against_softmax = difference_of(values, softmax),
                            .against_ceiling = difference_of(values, ceiling)});
    }
    summary.push_back(std::move(size));
  }
  return summary;
}

// `sizes_of(model)` picks the sizes of a head.
template <typename SizesOf>
std::vector<results::SizeSummary> summary_of(const std::vector<results::Model>& models, SizesOf sizes_of) {
  Heads heads;
  for (const results::Model& model : models) heads.push_back(&sizes_of(model));
  return summary_of(heads);
}

// All that the results say of one head; of the first one also what is drawn of it.
results::HeadResults head_results(const Run& run, const StudyOptions& options, bool first,
                                  const ProgressListener& listener) {
  const Study study = study_of(run, options, listener.advance);
  results::HeadResults head{
      .model = model_results(run, study,
                             evaluate(run.parameters, study.weightings,
                                      evaluation_of(options, listener, run.recipe.architecture)))};
  if (options.calibrate) {
    head.model.calibrated = {calibrated_results(run, options, CalibrationMethod::classes, listener),
                             calibrated_results(run, options, CalibrationMethod::pairs, listener)};
  }
  if (first) {
    head.fit_scatter = scatter_results(study.points);
    head.heat_map = map_results(run, study, options);
  }
  return head;
}

// The items that head_results() reports.
std::int64_t items_of_head(const StudyOptions& options) {
  return items_to_fit(fit_of(options)) + items_to_evaluate(evaluation_of(options, {})) +
         (options.calibrate ? 2 * items_to_evaluate(calibrated_evaluation_of(options, {})) : 0);
}

// ---- evaluation.json: the results of one head, kept in its run

// All that head_results() depends on.
Json cache_key(const Run& run, const StudyOptions& options, bool first) {
  files::Checksum weights;
  weights.add_bytes(std::as_bytes(std::span(run.parameters)));
  Json extra = Json::object();
  for (const NamedWeighting& n : options.extra) extra[n.name] = n.weighting.name();
  return {{"version", results::kVersion},
          {"whet", version()},
          {"target", target()},
          {"weights", weights.digits()},
          {"recipe", to_json(run.recipe)},
          {"diverged", run.diverged},
          {"sizes", options.sizes},
          {"sets", options.sets},
          {"seed", options.seed},
          {"precision", name_of(options.precision)},
          {"extra", extra},
          {"calibrate", options.calibrate},
          {"first", first}};
}

std::string cache_path(const Run& run, const StudyOptions& options) {
  if (options.cache_folder.empty()) return (std::filesystem::path(run.folder) / kEvaluation).string();
  files::Checksum weights;  // every head is in a study once
  weights.add_bytes(std::as_bytes(std::span(run.parameters)));
  return (std::filesystem::path(options.cache_folder) / ("head-" + weights.digits() + ".json")).string();
}

std::string checksum_of(const Json& json) {
  files::Checksum checksum;
  checksum.add_text(json.dump());
  return checksum.digits();
}

// Nothing if there is no cache, or it has another key or is damaged: then the head is evaluated again.
std::optional<results::HeadResults> cached_head(const Run& run, const StudyOptions& options, bool first) {
  if (!options.cache) return std::nullopt;
  try {
    const Json file = files::read_json(cache_path(run, options));
    if (file.at("key") != cache_key(run, options, first)) return std::nullopt;
    if (file.at("checksum") != checksum_of(file.at("head"))) return std::nullopt;
    return results::head_from_json(file.at("head"));
  } catch (const files::FileError&) {  // not there, not readable, too large, not JSON
  } catch (const Json::exception&) {   // not an object with these fields
  } catch (const Error&) {             // not the results of a head
  }
  return std::nullopt;
}

void write_cache(const Run& run, const StudyOptions& options, bool first, const results::HeadResults& head) {
  const Json json = to_json(head);
  const Json file{{"key", cache_key(run, options, first)}, {"checksum", checksum_of(json)}, {"head", json}};
  files::write_text(cache_path(run, options), file.dump() + "\n");
}

// Table 1 of arXiv 2410.01104, the sizes that could be checked against the paper; in percent. NaN: the paper
// gives no p.
std::vector<results::PaperLine> paper_table() {
  return {{16, 98.6, 98.6, 0.4},    {64, 94.3, 94.5, 2e-3},   {256, 81.3, 82.1, 2e-4},
          {512, 70.1, 72.5, NAN},   {1024, 53.8, 57.7, 1e-4}, {2048, 35.7, 39.4, NAN},
          {4096, 22.6, 24.9, 0.02}, {16384, 12.4, 14.0, 4e-3}};
}

}  // namespace

std::vector<Run> train_runs(const std::vector<Training>& trainings, int threads,
                            const ProgressListener& listener) {
  std::int64_t found = 0, total = 0;
  for (const Training& training : trainings) {
    found += prepare_run(training.folder, training.recipe);
    total += training.recipe.steps;
  }
  listener.begin("training", total, found);
  struct Stopped {};  // thrown inside a run when another has failed
  std::atomic<bool> failed{false};
  std::vector<std::int64_t> diverged(trainings.size(), 0);
  const auto advance = [&](std::int64_t steps) {
    if (failed) throw Stopped();
    listener.advance(steps);
  };
  for_each_task(
      static_cast<std::int64_t>(trainings.size()), core::resolve_threads(threads),
      [&](std::int64_t task, int) {
        const Training& training = trainings[static_cast<std::size_t>(task)];
        try {
          train_run(training.folder, training.recipe, advance);
        } catch (const Diverged& e) {
          diverged[static_cast<std::size_t>(task)] = e.step();
          advance(training.recipe.steps - e.step());
        }
      },
      &failed);
  listener.end();
  std::vector<Run> runs;
  runs.reserve(trainings.size());
  for (std::size_t i = 0; i < trainings.size(); ++i) {
    runs.push_back(load_run(trainings[i].folder));
    runs.back().diverged = diverged[i];
  }
  return runs;
}

std::vector<Training> seed_trainings(const std::string& folder, const Recipe& recipe, int seeds) {
  if (seeds < 1 || seeds > 10000) throw Error("seeds: is " + std::to_string(seeds) + ", must be 1 to 10000");
  if (recipe.seed + static_cast<std::uint64_t>(seeds) < recipe.seed) {
    throw Error("seed: is " + std::to_string(recipe.seed) + ", must be at most " +
                std::to_string(~std::uint64_t{0} - static_cast<std::uint64_t>(seeds)) + " for " +
                std::to_string(seeds) + " seeds");
  }
  std::vector<Training> trainings;
  for (int i = 0; i < seeds; ++i) {
    Recipe own = recipe;
    own.seed += static_cast<std::uint64_t>(i);
    trainings.push_back(
        {(std::filesystem::path(folder) / ("seed-" + std::to_string(own.seed))).string(), own});
  }
  return trainings;
}

std::vector<Run> train_seeds(const std::string& folder, const Recipe& recipe, int seeds, int threads,
                             const ProgressListener& listener) {
  return train_runs(seed_trainings(folder, recipe, seeds), threads, listener);
}

Study study_of(const Run& run, const StudyOptions& options,
               const std::function<void(std::int64_t items)>& progress) {
  const Outcome as_trained = in_distribution(run, options);
  Study study{.weightings = rules_without_fit(run, as_trained),
              .points = fit_points(run.parameters, fit_of(options, run.recipe.architecture, progress)),
              .fit = {},
              .accuracy = static_cast<double>(as_trained.correct) / kTrainingSets};
  // A head that misranks hardly anything, or is so sharp that its entropies are all 0, leaves nothing to fit
  // on.
  const auto fit = study.points.size() >= kFewestPoints ? fit_if_determined(study.points) : std::nullopt;
  if (fit) {
    study.fit = *fit;
    study.weightings.push_back({"refit", {.rule = study.fit.rule()}});
  }
  study.weightings.insert(study.weightings.end(), options.extra.begin(), options.extra.end());
  study.weightings.push_back({"hard", hard_weighting()});
  return study;
}

void evaluate_heads(const std::vector<Run>& runs, const StudyOptions& options, bool first,
                    const ProgressListener& listener) {
  std::vector<bool> cached;
  cached.reserve(runs.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    cached.push_back(cached_head(runs[i], options, first && i == 0).has_value());
  }
  const std::int64_t each = items_of_head(options);
  listener.begin("evaluating", each * static_cast<std::int64_t>(runs.size()),
                 each * std::ranges::count(cached, true));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool is_first = first && i == 0;
    if (!cached[i])
      write_cache(runs[i], options, is_first, head_results(runs[i], options, is_first, listener));
  }
  listener.end();
}

results::Reproduction study(const std::vector<Run>& runs, const StudyOptions& options,
                            const results::Provenance& provenance, const ProgressListener& listener) {
  std::vector<std::optional<results::HeadResults>> heads;
  heads.reserve(runs.size());
  for (const Run& run : runs) heads.push_back(cached_head(run, options, heads.empty()));
  const auto cached = std::ranges::count_if(heads, [](const auto& head) { return head.has_value(); });
  const std::int64_t each = items_of_head(options);
  listener.begin("evaluating", each * static_cast<std::int64_t>(runs.size()), each * cached);
  results::Reproduction results{
      .provenance = provenance,
      .options = {.sets_seed = options.seed, .sets = options.sets, .precision = name_of(options.precision)},
      .paper = paper_table()};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    results::HeadResults head;
    if (std::optional<results::HeadResults>& found = heads[i]; found.has_value()) {
      head = std::move(found.value());
    } else {
      head = head_results(runs[i], options, i == 0, listener);
      if (options.cache) write_cache(runs[i], options, i == 0, head);
    }
    results.models.push_back(std::move(head.model));
    if (head.fit_scatter.has_value()) results.fit_scatter = std::move(head.fit_scatter.value());
    if (head.heat_map.has_value()) results.heat_map = std::move(head.heat_map.value());
  }
  listener.end();
  const auto summary = [&](auto sizes_of) { return summary_of(results.models, sizes_of); };
  results.summary = summary([](const results::Model& model) -> auto& { return model.sizes; });
  if (options.calibrate) {
    results.calibrated_summary = {
        summary([](const results::Model& model) -> auto& { return model.calibrated->classes.sizes; }),
        summary([](const results::Model& model) -> auto& { return model.calibrated->pairs.sizes; })};
  }
  return results;
}

}  // namespace whet::lab
