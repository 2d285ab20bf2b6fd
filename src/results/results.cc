#include "results/results.h"

#include <whet/error.h>

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
  throw Error("kind: is " + kind.dump() + ", this whet knows " + Reproduction::kKind + " and " +
              Benchmark::kKind + "; use a newer whet");
}

Json to_json(const HeadResults& head) { return write(head); }

HeadResults head_from_json(const Json& json) { return read_kind<HeadResults>(json); }

Json to_json(const std::vector<Comparison>& comparisons) { return write(comparisons); }

}  // namespace whet::results
