#include "lab/reproduction.h"

#include <whet/error.h>
#include <whet/horizon.h>
#include <whet/runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
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

constexpr int kVersion = 1;
constexpr std::size_t kMostScatter = 4000;  // points of the fit kept for drawing
constexpr std::int64_t kMapSets = 32, kMapColumns = 16, kLargestMap = 65536;

const char* name_of(Precision precision) { return precision == Precision::f64 ? "f64" : "f32"; }

double mean_of(const SizeOutcome& size, std::int64_t count) {
  return static_cast<double>(count) / static_cast<double>(size.sets);
}

Json to_json(const SizeOutcome& size, std::span<const NamedNormalizer> normalizers) {
  Json rules = Json::object();
  for (std::size_t r = 0; r < normalizers.size(); ++r) {
    const Outcome& o = size.outcomes[r];
    rules[normalizers[r].name] = {{"accuracy", mean_of(size, o.correct)},
                                  {"beta", o.beta},
                                  {"sharpened", o.sharpened},
                                  {"entropy", o.entropy},
                                  {"peak", o.peak}};
  }
  return {{"items", size.items},
          {"sets", size.sets},
          {"redrawn", size.redrawn},
          {"entropy", size.entropy},
          {"spread", size.spread},
          {"largest_spread", size.largest_spread},
          {"largest_weight", size.outcomes.front().largest_peak},
          {"weight_bound", largest_weight(static_cast<double>(size.items), size.largest_spread)},
          {"paper_bound", paper_bounds(static_cast<double>(size.items), size.largest_spread).upper},
          {"predicted", mean_of(size, size.predicted)},
          {"rules", rules}};
}

Json to_json(const Diagnosis& d) {
  return {
      {"slope", d.slope}, {"offsets", d.offsets}, {"deviation", d.deviation}, {"resolution", d.resolution}};
}

Json to_json(const PolynomialFit& fit) {
  if (fit.coefficients.empty()) return nullptr;
  return {{"coefficients", fit.coefficients},
          {"lowest_entropy", fit.lowest_entropy},
          {"highest_entropy", fit.highest_entropy},
          {"rms_residual", fit.rms_residual},
          {"r_squared", fit.r_squared},
          {"points", fit.points},
          {"rule", fit.rule().name()}};
}

Json sizes_json(const std::vector<SizeOutcome>& outcomes, std::span<const NamedNormalizer> normalizers) {
  Json sizes = Json::array();
  for (const SizeOutcome& outcome : outcomes) sizes.push_back(to_json(outcome, normalizers));
  return sizes;
}

EvaluationOptions evaluation_of(const StudyOptions& options, const Watcher& watcher) {
  return {.sizes = options.sizes,
          .sets = options.sets,
          .seed = options.seed,
          .stream = Stream::evaluation,
          .precision = options.precision,
          .threads = options.threads,
          .progress = watcher.advance};
}

EvaluationOptions calibrated_evaluation_of(const StudyOptions& options, const Watcher& watcher) {
  EvaluationOptions fewer = evaluation_of(options, watcher);
  fewer.share = 4;
  return fewer;
}

FitPointsOptions fit_of(const StudyOptions& options,
                        const std::function<void(std::int64_t items)>& progress = {}) {
  FitPointsOptions fit{.seed = options.seed, .threads = options.threads, .progress = progress};
  if (options.sets > 0) fit.sets = std::min(fit.sets, options.sets);
  return fit;
}

std::vector<NamedNormalizer> rules_without_fit(const Run& run, const StudyOptions& options) {
  const std::int64_t trained = run.recipe.sets.largest;
  const Rule& own = run.recipe.normalizer.rule;
  const std::vector<NamedNormalizer> as_trained{{"trained", {.rule = own}}};
  const Outcome in_distribution = evaluate(run.parameters, as_trained,
                                           {.sizes = {trained},
                                            .sets = 4096,
                                            .seed = options.seed,
                                            .stream = Stream::calibration,
                                            .precision = options.precision,
                                            .threads = options.threads,
                                            .progress = {}})
                                      .front()
                                      .outcomes.front();
  std::vector<NamedNormalizer> rules{{"softmax", {}}};
  if (own != Rule::none()) rules.push_back(as_trained.front());
  rules.push_back({"paper", {.rule = Rule::paper()}});
  rules.push_back({"fixed", {.rule = Rule::fixed(2)}});
  rules.push_back({"log_length", {.rule = Rule::log_length(std::max(2.0, static_cast<double>(trained)))}});
  // A head that gives all weight to one item on small sets has no target to hold: then these two are left
  // out.
  if (in_distribution.entropy > 0) {
    rules.push_back({"target_entropy", {.rule = Rule::target_entropy(in_distribution.entropy)}});
  }
  if (in_distribution.peak < 1) {
    rules.push_back({"target_peak", {.rule = Rule::target_peak(in_distribution.peak)}});
  }
  return rules;
}

// The head with its keys calibrated: what is left of its loss is dispersion.
Json calibrated_json(const Run& run, const StudyOptions& options, CalibrationMethod method,
                     const Watcher& watcher) {
  Run edited = run;
  const Calibration calibration = calibrate(run.parameters, method, options.seed);
  edited.parameters = calibration.parameters;
  std::vector<NamedNormalizer> normalizers = rules_without_fit(edited, options);
  normalizers.push_back({"hard", {.rule = {}, .hard = true}});
  const auto outcomes = evaluate(edited.parameters, normalizers, calibrated_evaluation_of(options, watcher));
  return {{"what", calibration.text},
          {"directions", calibration.directions},
          {"diagnosis", to_json(diagnose(edited.parameters))},
          {"sizes", sizes_json(outcomes, normalizers)}};
}

// Of one head; more digits than these no picture shows.
Json map_json(const Run& run, const Study& study, const StudyOptions& options) {
  Json frames = Json::array();
  for (const std::int64_t items : options.sizes) {
    if (items > kLargestMap) continue;
    const std::vector<float> map =
        heat_map(run.parameters, study.normalizers, options.seed, items, kMapSets, kMapColumns);
    Json rules = Json::object();
    for (std::size_t r = 0; r < study.normalizers.size(); ++r) {
      Json rows = Json::array();
      for (std::size_t set = 0; set < kMapSets; ++set) {
        Json row = Json::array();
        for (std::size_t c = 0; c < kMapColumns; ++c) {
          const double weight = map[(r * kMapSets + set) * kMapColumns + c];
          row.push_back(std::round(weight * 1e4) / 1e4);
        }
        rows.push_back(row);
      }
      rules[study.normalizers[r].name] = rows;
    }
    frames.push_back({{"items", items}, {"rules", rules}});
  }
  return {{"seed", run.recipe.seed}, {"sets", kMapSets}, {"columns", kMapColumns}, {"frames", frames}};
}

Json scatter_json(const std::vector<FitPoint>& points) {
  Json scatter = Json::array();
  const std::size_t step = points.size() / kMostScatter + 1;
  for (std::size_t i = 0; i < points.size(); i += step) {
    scatter.push_back(Json::array(
        {std::round(points[i].entropy * 1e5) / 1e5, std::round(points[i].best_beta * 1e4) / 1e4}));
  }
  return scatter;
}

Json model_json(const Run& run, const Study& study, const std::vector<SizeOutcome>& outcomes) {
  Json rules = Json::object(), metrics = Json::array();
  for (const NamedNormalizer& n : study.normalizers)
    rules[n.name] = n.normalizer.hard ? "hard" : n.normalizer.rule.name();
  for (const Metrics& m : run.metrics) metrics.push_back(Json::array({m.step, m.loss, m.accuracy}));
  Json json{{"seed", run.recipe.seed},
            {"recipe", to_json(run.recipe)},
            {"step", run.step},
            {"rules", rules},
            {"diagnosis", to_json(diagnose(run.parameters))},
            {"spread_allowed", spread_allowed(run.parameters)},
            {"fit", to_json(study.fit)},
            {"sizes", sizes_json(outcomes, study.normalizers)},
            {"metrics", metrics}};
  if (!run.edit.empty()) json["edit"] = run.edit;
  return json;
}

// Over the seeds, at every size and for every rule that all models have.
Json summary_json(const Json& models, const char* part = nullptr) {
  const auto sizes_of = [&](const Json& model) -> const Json& {
    return part == nullptr ? model.at("sizes") : model.at("calibrated").at(part).at("sizes");
  };
  const auto accuracies = [&](std::size_t size, const std::string& rule) {
    std::vector<double> values;
    for (const Json& model : models) {
      const Json& rules = sizes_of(model).at(size).at("rules");
      if (rules.contains(rule)) values.push_back(rules.at(rule).at("accuracy").get<double>());
    }
    return values;
  };
  Json summary = Json::array();
  for (std::size_t size = 0; size < sizes_of(models.at(0)).size(); ++size) {
    const Json& first = sizes_of(models.at(0)).at(size);
    const std::vector<double> softmax = accuracies(size, "softmax"), ceiling = accuracies(size, "hard");
    Json rules = Json::object();
    for (const auto& [rule, ignored] : first.at("rules").items()) {
      const std::vector<double> values = accuracies(size, rule);
      if (values.size() != models.size()) continue;
      const Summary accuracy = summarize(values);
      rules[rule] = {{"accuracy", accuracy.mean},
                     {"deviation", accuracy.deviation},
                     {"against_softmax", difference_json(values, softmax)},
                     {"against_ceiling", difference_json(values, ceiling)}};
    }
    summary.push_back({{"items", first.at("items")}, {"sets", first.at("sets")}, {"rules", rules}});
  }
  return summary;
}

// All that the results say of one head: "model" and, of the first head only, what is drawn of it.
Json head_json(const Run& run, const StudyOptions& options, bool first, const Watcher& watcher) {
  const Study study = study_of(run, options, watcher.advance);
  Json head{
      {"model",
       model_json(run, study, evaluate(run.parameters, study.normalizers, evaluation_of(options, watcher)))}};
  if (options.calibrate) {
    head["model"]["calibrated"] = {
        {"classes", calibrated_json(run, options, CalibrationMethod::classes, watcher)},
        {"pairs", calibrated_json(run, options, CalibrationMethod::pairs, watcher)}};
  }
  if (first) {
    head["map"] = map_json(run, study, options);
    head["scatter"] = scatter_json(study.points);
  }
  return head;
}

// The items that head_json() reports.
std::int64_t items_of_head(const StudyOptions& options) {
  return items_to_fit(fit_of(options)) + items_to_evaluate(evaluation_of(options, {})) +
         (options.calibrate ? 2 * items_to_evaluate(calibrated_evaluation_of(options, {})) : 0);
}

// What a kept head_json() depends on.
Json circumstances(const Run& run, const StudyOptions& options, bool first) {
  files::Checksum weights;
  weights.add_bytes(std::as_bytes(std::span(run.parameters)));
  Json extra = Json::object();
  for (const NamedNormalizer& n : options.extra) extra[n.name] = n.normalizer.rule.name();
  return {{"version", kVersion},    {"whet", version()},
          {"target", target()},     {"weights", weights.digits()},
          {"sizes", options.sizes}, {"sets", options.sets},
          {"seed", options.seed},   {"precision", name_of(options.precision)},
          {"extra", extra},         {"calibrate", options.calibrate},
          {"first", first}};
}

std::string kept_path(const Run& run) {
  return (std::filesystem::path(run.folder) / "evaluation.json").string();
}

std::string checksum_of(const Json& json) {
  files::Checksum checksum;
  checksum.add_text(json.dump());
  return checksum.digits();
}

Json read_kept(const Run& run) {
  try {
    return files::read_json(kept_path(run));
  } catch (const files::FileError&) {  // not there, not readable, too large, not JSON
    return nullptr;
  }
}

// null if nothing was kept, or it is of other circumstances, or damaged: then it is found again.
Json kept_head(const Run& run, const StudyOptions& options, bool first) {
  if (!options.keep) return nullptr;
  const Json file = read_kept(run);
  if (!file.is_object() || !file.contains("head")) return nullptr;
  if (file.value("of", Json()) != circumstances(run, options, first)) return nullptr;
  return file.value("checksum", Json()) == checksum_of(file.at("head")) ? file.at("head") : nullptr;
}

void keep_head(const Run& run, const StudyOptions& options, bool first, const Json& head) {
  const Json file{
      {"of", circumstances(run, options, first)}, {"checksum", checksum_of(head)}, {"head", head}};
  files::write_text(kept_path(run), file.dump() + "\n");
}

// Table 1 of arXiv 2410.01104; percent. null: not in the paper, or not verified.
Json paper_json() {
  return {{"source", "arXiv 2410.01104, Table 1"},
          {"items", {16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}},
          {"softmax", {98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4}},
          {"paper", {98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0}},
          {"p", {0.4, nullptr, 2e-3, nullptr, 2e-4, nullptr, 1e-4, nullptr, 0.02, nullptr, 4e-3}},
          {"unverified", {32, 128, 8192}}};
}

}  // namespace

std::vector<Run> train_runs(const std::vector<Training>& trainings, int threads, const Watcher& watcher) {
  std::int64_t found = 0, total = 0;
  for (const Training& training : trainings) {
    found += prepare_run(training.folder, training.recipe);
    total += training.recipe.steps;
  }
  watcher.begin("training", total, found);
  struct Stopped {};  // thrown inside a run when another has failed
  std::atomic<bool> failed{false};
  const auto advance = [&](std::int64_t steps) {
    if (failed) throw Stopped();
    watcher.advance(steps);
  };
  for_each_task(
      static_cast<std::int64_t>(trainings.size()), core::resolve_threads(threads),
      [&](std::int64_t task, int) {
        const Training& training = trainings[static_cast<std::size_t>(task)];
        train_run(training.folder, training.recipe, advance);
      },
      &failed);
  watcher.end();
  std::vector<Run> runs;
  runs.reserve(trainings.size());
  for (const Training& training : trainings) runs.push_back(load_run(training.folder));
  return runs;
}

std::vector<Run> train_seeds(const std::string& folder, const Recipe& recipe, int seeds, int threads,
                             const Watcher& watcher) {
  if (seeds < 1 || seeds > 10000) throw Error("seeds: is " + std::to_string(seeds) + ", must be 1 to 10000");
  if (recipe.seed + static_cast<std::uint64_t>(seeds) < recipe.seed) {
    throw Error("seed: is " + std::to_string(recipe.seed) + ", must leave room for " + std::to_string(seeds) +
                " seeds");
  }
  std::vector<Training> trainings;
  for (int i = 0; i < seeds; ++i) {
    Recipe own = recipe;
    own.seed += static_cast<std::uint64_t>(i);
    trainings.push_back(
        {(std::filesystem::path(folder) / ("seed-" + std::to_string(own.seed))).string(), own});
  }
  return train_runs(trainings, threads, watcher);
}

Study study_of(const Run& run, const StudyOptions& options,
               const std::function<void(std::int64_t items)>& progress) {
  Study study{.normalizers = rules_without_fit(run, options),
              .points = fit_points(run.parameters, fit_of(options, progress)),
              .fit = {}};
  // A head that misranks hardly anything, or is so sharp that its entropies are all 0, leaves nothing to fit
  // on.
  const auto fit = study.points.size() >= kFewestPoints ? fit_if_determined(study.points) : std::nullopt;
  if (fit) {
    study.fit = *fit;
    study.normalizers.push_back({"refit", {.rule = study.fit.rule()}});
  }
  study.normalizers.insert(study.normalizers.end(), options.extra.begin(), options.extra.end());
  study.normalizers.push_back({"hard", {.rule = {}, .hard = true}});
  return study;
}

Json study(const std::vector<Run>& runs, const StudyOptions& options, const Json& made,
           const Watcher& watcher) {
  std::vector<Json> heads;
  std::int64_t kept = 0;
  for (const Run& run : runs) {
    heads.push_back(kept_head(run, options, heads.empty()));
    kept += heads.back().is_null() ? 0 : 1;
  }
  const std::int64_t each = items_of_head(options);
  watcher.begin("evaluating", each * static_cast<std::int64_t>(runs.size()), each * kept);
  Json models = Json::array();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (heads[i].is_null()) {
      heads[i] = head_json(runs[i], options, i == 0, watcher);
      if (options.keep) keep_head(runs[i], options, i == 0, heads[i]);
    }
    models.push_back(heads[i].at("model"));
  }
  watcher.end();
  Json json{
      {"schema", "whet results"},
      {"version", kVersion},
      {"kind", "reproduction"},
      {"made", made},
      {"options",
       {{"sets_seed", options.seed}, {"sets", options.sets}, {"precision", name_of(options.precision)}}},
      {"paper", paper_json()},
      {"summary", summary_json(models)},
      {"models", models},
      {"fit_scatter", heads.at(0).at("scatter")},
      {"heat_map", heads.at(0).at("map")}};
  if (options.calibrate) {
    json["calibrated_summary"] = {{"classes", summary_json(models, "classes")},
                                  {"pairs", summary_json(models, "pairs")}};
  }
  return json;
}

}  // namespace whet::lab
