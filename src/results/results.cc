#include "results/results.h"

#include <whet/error.h>

#include <cmath>
#include <span>

#include "results/checks.h"
#include "results/json_fields.h"

namespace whet::results {

// ---- the fields, in the order of the file

template <typename T, typename Struct>
concept Is = std::is_same_v<std::remove_const_t<T>, Struct>;

template <typename Visit>
void fields(Is<Provenance> auto& p, const Visit& visit) {
  visit("command", p.command);
  visit("whet", p.whet);
  visit("machine", p.machine);
  visit("target", p.target);
  visit("threads", p.threads);
}

template <typename Visit>
void fields(Is<Difference> auto& d, const Visit& visit) {
  visit("difference", d.difference);
  visit("low", d.low);
  visit("high", d.high);
  visit("p", d.p);
}

template <typename Visit>
void fields(Is<EvaluationOptions> auto& o, const Visit& visit) {
  visit("sets_seed", o.sets_seed);
  visit("sets", o.sets);
  visit("precision", o.precision);
}

template <typename Visit>
void fields(Is<PaperLine> auto& line, const Visit& visit) {
  visit("items", line.items);
  visit("softmax", line.softmax);
  visit("paper", line.paper);
  visit("p", line.p);
}

template <typename Visit>
void fields(Is<RuleSummary> auto& rule, const Visit& visit) {
  visit("accuracy", rule.accuracy);
  visit("deviation", rule.deviation);
  visit("against_softmax", rule.against_softmax);
  visit("against_ceiling", rule.against_ceiling);
}

template <typename Visit>
void fields(Is<SizeSummary> auto& size, const Visit& visit) {
  visit("items", size.items);
  visit("sets", size.sets);
  visit("rules", size.rules);
}

template <typename Visit>
void fields(Is<RuleOutcome> auto& rule, const Visit& visit) {
  visit("accuracy", rule.accuracy);
  visit("beta", rule.beta);
  visit("sharpened", rule.sharpened);
  visit("entropy", rule.entropy);
  visit("peak", rule.peak);
}

template <typename Visit>
void fields(Is<Size> auto& size, const Visit& visit) {
  visit("items", size.items);
  visit("sets", size.sets);
  visit("redrawn", size.redrawn);
  visit("entropy", size.entropy);
  visit("spread", size.spread);
  visit("largest_spread", size.largest_spread);
  visit("largest_weight", size.largest_weight);
  visit("weight_bound", size.weight_bound);
  visit("paper_bound", size.paper_bound);
  visit("ranked", size.ranked);
  visit("predicted", size.predicted);
  visit("rules", size.rules);
}

template <typename Visit>
void fields(Is<Diagnosis> auto& d, const Visit& visit) {
  visit("slope", d.slope);
  visit("offsets", d.offsets);
  visit("deviation", d.deviation);
  visit("resolution", d.resolution);
}

template <typename Visit>
void fields(Is<Fit> auto& fit, const Visit& visit) {
  visit("coefficients", fit.coefficients);
  visit("lowest_entropy", fit.lowest_entropy);
  visit("highest_entropy", fit.highest_entropy);
  visit("rms_residual", fit.rms_residual);
  visit("r_squared", fit.r_squared);
  visit("points", fit.points);
  visit("rule", fit.rule);
}

template <typename Visit>
void fields(Is<CalibratedHead> auto& head, const Visit& visit) {
  visit("edit", head.edit);
  visit("directions", head.directions);
  visit("diagnosis", head.diagnosis);
  visit("sizes", head.sizes);
}

template <typename T>
concept IsByMethod = Is<T, ByMethod<CalibratedHead>> || Is<T, ByMethod<std::vector<SizeSummary>>>;

template <typename Visit>
void fields(IsByMethod auto& methods, const Visit& visit) {
  visit("classes", methods.classes);
  visit("pairs", methods.pairs);
}

template <typename Visit>
void fields(Is<Model> auto& model, const Visit& visit) {
  visit("seed", model.seed);
  visit("recipe", model.recipe);
  visit("step", model.step);
  visit("rules", model.rules);
  visit("diagnosis", model.diagnosis);
  visit("spread_allowed", model.spread_allowed);
  visit("fit", model.fit);
  visit("sizes", model.sizes);
  visit("metrics", model.metrics);
  visit("edit", model.edit);
  visit("did_not_learn", model.did_not_learn);
  visit("calibrated", model.calibrated);
}

template <typename Visit>
void fields(Is<HeatMapFrame> auto& frame, const Visit& visit) {
  visit("items", frame.items);
  visit("rules", frame.rules);
}

template <typename Visit>
void fields(Is<HeatMap> auto& map, const Visit& visit) {
  visit("seed", map.seed);
  visit("sets", map.sets);
  visit("columns", map.columns);
  visit("frames", map.frames);
}

template <typename Visit>
void fields(Is<Reproduction> auto& r, const Visit& visit) {
  visit("provenance", r.provenance);
  visit("options", r.options);
  visit("paper", r.paper);
  visit("summary", r.summary);
  visit("models", r.models);
  visit("fit_scatter", r.fit_scatter);
  visit("heat_map", r.heat_map);
  visit("calibrated_summary", r.calibrated_summary);
}

template <typename Visit>
void fields(Is<Bar> auto& bar, const Visit& visit) {
  visit("text", bar.text);
  visit("value", bar.value);
  visit("limit", bar.limit);
  visit("at_most", bar.at_most);
}

template <typename Visit>
void fields(Is<BenchmarkSection> auto& section, const Visit& visit) {
  visit("title", section.title);
  visit("note", section.note);
  visit("headers", section.headers);
  visit("rows", section.rows);
  visit("bars", section.bars);
}

template <typename Visit>
void fields(Is<Benchmark> auto& benchmark, const Visit& visit) {
  visit("provenance", benchmark.provenance);
  visit("facts", benchmark.facts);
  visit("sections", benchmark.sections);
}

template <typename Visit>
void fields(Is<ProbedModel> auto& model, const Visit& visit) {
  visit("name", model.name);
  visit("architecture", model.architecture);
  visit("layers", model.layers);
  visit("heads", model.heads);
  visit("key_heads", model.key_heads);
  visit("parameters", model.parameters);
  visit("context", model.context);
}

template <typename Visit>
void fields(Is<ProbePrompts> auto& prompts, const Visit& visit) {
  visit("kind", prompts.kind);
  visit("example", prompts.example);
  visit("per_length", prompts.per_length);
  visit("seed", prompts.seed);
  visit("rows", prompts.rows);
}

template <typename Visit>
void fields(Is<ClassThresholds> auto& thresholds, const Visit& visit) {
  visit("sink", thresholds.sink);
  visit("uniform", thresholds.uniform);
  visit("dispersing", thresholds.dispersing);
}

template <typename Visit>
void fields(Is<HeadStatistic> auto& statistic, const Visit& visit) {
  visit("mean", statistic.mean);
  visit("error", statistic.error);
}

template <typename Visit>
void fields(Is<HeadStatistics> auto& s, const Visit& visit) {
  visit("entropy", s.entropy);
  visit("relative_entropy", s.relative_entropy);
  visit("peak", s.peak);
  visit("first", s.first);
  visit("spread", s.spread);
  visit("beta", s.beta);
  visit("sharp_entropy", s.sharp_entropy);
  visit("sharp_peak", s.sharp_peak);
}

template <typename Visit>
void fields(Is<ProbedLength> auto& length, const Visit& visit) {
  visit("tokens", length.tokens);
  visit("prompts", length.prompts);
  visit("statistics", length.statistics);
}

template <typename Visit>
void fields(Is<ProbedHead> auto& head, const Visit& visit) {
  visit("layer", head.layer);
  visit("head", head.head);
  visit("class", head.head_class);
  visit("slope", head.slope);
  visit("low", head.low);
  visit("high", head.high);
  visit("horizon", head.horizon);
}

template <typename Visit>
void fields(Is<ProbedSetting> auto& setting, const Visit& visit) {
  visit("name", setting.name);
  visit("perplexity", setting.perplexity);
  visit("perplexity_low", setting.perplexity_low);
  visit("perplexity_high", setting.perplexity_high);
  visit("difference", setting.difference);
  visit("low", setting.low);
  visit("high", setting.high);
  visit("needle", setting.needle);
  visit("needle_low", setting.needle_low);
  visit("needle_high", setting.needle_high);
  visit("tokens", setting.tokens);
}

template <typename Visit>
void fields(Is<Probe> auto& probe, const Visit& visit) {
  visit("provenance", probe.provenance);
  visit("model", probe.model);
  visit("prompts", probe.prompts);
  visit("rule", probe.rule);
  visit("horizon_weight", probe.horizon_weight);
  visit("thresholds", probe.thresholds);
  visit("lengths", probe.lengths);
  visit("heads", probe.heads);
  visit("settings", probe.settings);
  visit("verdict", probe.verdict);
}

template <typename Visit>
void fields(Is<ClrsRun> auto& run, const Visit& visit) {
  visit("name", run.name);
  visit("variant", run.variant);
  visit("seed", run.seed);
  visit("step", run.step);
  visit("parameters", run.parameters);
  visit("recipe", run.recipe);
  visit("metrics", run.metrics);
}

template <typename Visit>
void fields(Is<ClrsShares> auto& shares, const Visit& visit) {
  visit("exact", shares.exact);
  visit("tokens", shares.tokens);
}

template <typename Visit>
void fields(Is<ShareEstimate> auto& share, const Visit& visit) {
  visit("mean", share.mean);
  visit("low", share.low);
  visit("high", share.high);
}

template <typename Visit>
void fields(Is<ClrsDifferences> auto& differences, const Visit& visit) {
  visit("exact", differences.exact);
  visit("tokens", differences.tokens);
}

template <typename Visit>
void fields(Is<ClrsVariant> auto& variant, const Visit& visit) {
  visit("variant", variant.variant);
  visit("setting", variant.setting);
  visit("runs", variant.runs);
  visit("exact", variant.exact);
  visit("tokens", variant.tokens);
  visit("forced", variant.forced);
  visit("errors", variant.errors);
  visit("entropy", variant.entropy);
  visit("sharp_entropy", variant.sharp_entropy);
  visit("against_softmax", variant.against_softmax);
}

template <typename Visit>
void fields(Is<ClrsSize> auto& size, const Visit& visit) {
  visit("size", size.size);
  visit("problems", size.problems);
  visit("chance", size.chance);
  visit("copy", size.copy);
  visit("variants", size.variants);
}

template <typename Visit>
void fields(Is<ClrsTask> auto& task, const Visit& visit) {
  visit("algorithm", task.algorithm);
  visit("hints", task.hints);
  visit("trained_sizes", task.trained_sizes);
  visit("sizes", task.sizes);
}

template <typename Visit>
void fields(Is<Clrs> auto& clrs, const Visit& visit) {
  visit("provenance", clrs.provenance);
  visit("runs", clrs.runs);
  visit("tasks", clrs.tasks);
}

template <typename Visit>
void fields(Is<HeadResults> auto& head, const Visit& visit) {
  visit("model", head.model);
  visit("fit_scatter", head.fit_scatter);
  visit("heat_map", head.heat_map);
}

template <typename Visit>
void fields(Is<SizeComparison> auto& size, const Visit& visit) {
  visit("items", size.items);
  visit("rules", size.rules);
}

template <typename Visit>
void fields(Is<Comparison> auto& c, const Visit& visit) {
  visit("run", c.run);
  visit("against", c.against);
  visit("seeds", c.seeds);
  visit("sizes", c.sizes);
}

// ---- whole files

namespace {

constexpr const char* kSchema = "whet results";

template <typename Kind>
Kind read_kind(const Json& json) {
  Kind results;
  read(json, "", results);
  return results;
}

Reproduction read_reproduction(const Json& json) {
  Reproduction results = read_kind<Reproduction>(json);
  if (results.summary.empty()) throw Error("summary: is empty, must hold at least one size");
  if (results.models.empty()) throw Error("models: is empty, must hold at least one head");
  return results;
}

// ---- a probe: shapes that agree, so that no reader has to check an index

void require_one_of(const std::string& text, std::span<const std::string_view> allowed,
                    const std::string& path) {
  if (std::ranges::find(allowed, text) != allowed.end()) return;
  std::string names;
  for (std::size_t i = 0; i < allowed.size(); ++i)
    names.append(i == 0 ? "" : i + 1 < allowed.size() ? ", " : " or ").append(allowed[i]);
  throw Error(path + ": is " + Json(text).dump() + ", must be " + names);
}

struct GridCheck {
  const ProbedModel& model;
  std::string path;

  void operator()(const char* name, const HeadStatistic& statistic) const {
    check(statistic.mean, path + "." + name + ".mean");
    check(statistic.error, path + "." + name + ".error");
  }
  void check(const HeadGrid& grid, const std::string& where) const {
    check_size(grid.size(), model.layers, where, "layers");
    for (std::size_t i = 0; i < grid.size(); ++i)
      check_size(grid[i].size(), model.heads, at(where, i), "heads");
  }
  static void check_size(std::size_t size, std::int64_t expected, const std::string& where, const char* of) {
    require(std::cmp_equal(size, expected), where,
            "has " + std::to_string(size) + " entries, must have one for each of the model's " +
                std::to_string(expected) + " " + of);
  }
};

void check_lengths(const Probe& probe) {
  require(!probe.lengths.empty(), "lengths", "is empty, must hold at least one length");
  double before = 0;
  for (std::size_t i = 0; i < probe.lengths.size(); ++i) {
    const ProbedLength& length = probe.lengths[i];
    const std::string path = at("lengths", i);
    require_finite(length.tokens, path + ".tokens");
    require(length.tokens > before, path + ".tokens",
            i == 0 ? "must be positive" : "must be more than at the length before");
    before = length.tokens;
    fields(length.statistics, GridCheck{probe.model, path + ".statistics"});
  }
}

// After check_lengths(), which bounds layers and heads by what the file holds.
void check_heads(const Probe& probe) {
  const ProbedModel& model = probe.model;
  require(std::cmp_equal(probe.heads.size(), model.layers * model.heads), "heads",
          "has " + std::to_string(probe.heads.size()) + " entries, must have one for each of the model's " +
              std::to_string(model.layers) + " x " + std::to_string(model.heads) + " heads");
  std::vector<bool> seen(probe.heads.size());
  for (std::size_t i = 0; i < probe.heads.size(); ++i) {
    const ProbedHead& head = probe.heads[i];
    const std::string path = at("heads", i);
    const auto below = [&](std::int64_t value, std::int64_t end, const char* name) {
      require(value < end, path + "." + name,
              "is " + std::to_string(value) + ", must be below " + std::to_string(end));
    };
    below(head.layer, model.layers, "layer");
    below(head.head, model.heads, "head");
    require_one_of(head.head_class, kHeadClasses, path + ".class");
    const auto index = static_cast<std::size_t>(head.layer * model.heads + head.head);
    require(!seen[index], path,
            "is layer " + std::to_string(head.layer) + ", head " + std::to_string(head.head) +
                " once more, must be another head");
    seen[index] = true;
  }
}

void check_probe(const Probe& probe) {
  static constexpr std::string_view kPrompts[] = {"max", "needle", "text"}, kRows[] = {"last", "all"};
  require(probe.model.layers > 0, "model.layers", "is 0, must be 1 or more");
  require(probe.model.heads > 0, "model.heads", "is 0, must be 1 or more");
  require_one_of(probe.prompts.kind, kPrompts, "prompts.kind");
  if (probe.prompts.rows) require_one_of(*probe.prompts.rows, kRows, "prompts.rows");
  require_finite(probe.horizon_weight, "horizon_weight");
  require_finite(probe.thresholds.sink, "thresholds.sink");
  require_finite(probe.thresholds.uniform, "thresholds.uniform");
  require_finite(probe.thresholds.dispersing, "thresholds.dispersing");
  check_lengths(probe);
  check_heads(probe);
  if (probe.settings) require(!probe.settings->empty(), "settings", "is empty, must hold at least one");
}

Probe read_probe(const Json& json) {
  Probe results = read_kind<Probe>(json);
  check_probe(results);
  return results;
}

Clrs read_clrs(const Json& json) {
  Clrs results = read_kind<Clrs>(json);
  check_clrs(results);
  return results;
}

}  // namespace

std::string kind_of(const Results& results) {
  return std::visit([](const auto& content) { return std::string(content.kKind); }, results);
}

Json to_json(const Results& results) {
  Json json{{"schema", kSchema}, {"version", kVersion}, {"kind", kind_of(results)}};
  std::visit([&](const auto& content) { fields(content, Writer{json}); }, results);
  return json;
}

Results results_from_json(const Json& json) {
  if (!json.is_object() || json.value("schema", Json()) != kSchema) {
    throw Error(R"(is not from whet: it has no "schema": "whet results")");
  }
  const Json version = json.value("version", Json()), kind = json.value("kind", Json());
  if (!version.is_number_integer()) throw Error("version: is missing or not a whole number");
  if (version != kVersion) {
    throw Error("version: is " + version.dump() + ", this whet reads version " + std::to_string(kVersion) +
                "; use the whet that wrote it, or a newer one");
  }
  if (kind == Reproduction::kKind) return read_reproduction(json);
  if (kind == Benchmark::kKind) return read_kind<Benchmark>(json);
  if (kind == Probe::kKind) return read_probe(json);
  if (kind == Clrs::kKind) return read_clrs(json);
  throw Error("kind: is " + kind.dump() + ", this whet knows " + Reproduction::kKind + ", " +
              Benchmark::kKind + ", " + Probe::kKind + " and " + Clrs::kKind + "; use a newer whet");
}

Json to_json(const HeadResults& head) { return write(head); }

HeadResults head_from_json(const Json& json) { return read_kind<HeadResults>(json); }

Json to_json(const std::vector<Comparison>& comparisons) { return write(comparisons); }

}  // namespace whet::results
