// results.json is what the structs say: both ways bit for bit, and every wrong field named.
#include "results/results.h"

#include <gtest/gtest.h>
#include <whet/error.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "results_example.h"

namespace whet::results {
namespace {

using Json = nlohmann::ordered_json;

std::string error_of(const Json& json) {
  try {
    results_from_json(json);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::vector<Results> one_of_each_kind() {
  return {example(), benchmark_example(), probe_example(), advised_probe_example(), clrs_example()};
}

TEST(Results, ComeBackFromJson) {
  for (const Results& results : one_of_each_kind()) {
    const Json json = Json::parse(to_json(results).dump());
    EXPECT_EQ(to_json(results_from_json(json)).dump(), json.dump());
  }
}

TEST(Results, HaveNullForWhatIsNotFinite) {
  Reproduction results = example();
  results.models[0].diagnosis.resolution = INFINITY;
  const Json json = Json::parse(to_json(results).dump());
  EXPECT_TRUE(json.at("models").at(0).at("diagnosis").at("resolution").is_null());
  EXPECT_TRUE(json.at("summary").at(0).at("rules").at("softmax").at("against_softmax").at("p").is_null());
  const auto back = std::get<Reproduction>(results_from_json(json));
  EXPECT_TRUE(std::isnan(back.models[0].diagnosis.resolution));
}

TEST(Results, LackWhatAHeadDoesNotHave) {
  const Json model = to_json(example()).at("models").at(0);
  EXPECT_FALSE(model.contains("fit") || model.contains("edit") || model.contains("calibrated"));
}

// The names of `json`'s fields that aren't data (a rule's, a fact's), wherever they are.
void collect_keys(const Json& json, std::vector<std::string>& keys) {
  for (const auto& [name, value] : json.items()) {
    if (json.is_object()) keys.push_back(name);
    if (value.is_structured() && name != "facts") collect_keys(value, keys);
  }
}

TEST(Results, HaveKeysInSnakeCase) {
  std::vector<std::string> keys;
  for (const Results& results : one_of_each_kind()) collect_keys(to_json(results), keys);
  ASSERT_GT(keys.size(), 50U);
  for (const std::string& key : keys)
    EXPECT_EQ(key.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"), key.npos) << key;
}

// Every field of every object on the way to a leaf is either there or an error that names it.
TEST(Results, NameTheFieldThatIsMissing) {
  const Json whole = to_json(example());
  for (const auto& [path, name] : std::vector<std::pair<std::string, std::string>>{
           {"/provenance", "provenance"},
           {"/provenance/command", "provenance.command"},
           {"/options/precision", "options.precision"},
           {"/paper/0/softmax", "paper[0].softmax"},
           {"/summary", "summary"},
           {"/summary/0/rules/paper/against_ceiling/p", "summary[0].rules.paper.against_ceiling.p"},
           {"/models/0/seed", "models[0].seed"},
           {"/models/0/sizes/0/predicted", "models[0].sizes[0].predicted"},
           {"/models/0/sizes/0/rules/hard/peak", "models[0].sizes[0].rules.hard.peak"},
           {"/heat_map/frames", "heat_map.frames"}}) {
    Json json = whole;
    const Json::json_pointer pointer(path);
    json.at(pointer.parent_pointer()).erase(pointer.back());
    EXPECT_EQ(error_of(json), name + ": is missing");
  }
}

TEST(Results, NameTheFieldThatIsWrong) {
  const Json whole = to_json(example());
  for (const auto& [path, value, error] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"/provenance/threads", "-1", "provenance.threads: is -1, must be a whole number of 0 or more"},
           {"/provenance/whet", "2", "provenance.whet: is 2, must be text"},
           {"/summary/0", "[]", "summary[0]: is a list, must be an object"},
           {"/summary", "[]", "summary: is empty, must hold at least one size"},
           {"/models", "[]", "models: is empty, must hold at least one head"},
           {"/models/0/seed", "1.5", "models[0].seed: is 1.5, must be a whole number of 0 or more"},
           {"/models/0/metrics/0", "[1, 2]", "models[0].metrics[0]: is a list, must be a list of 3 numbers"},
           {"/models/0/sizes/0/items", "9223372036854775808",
            "models[0].sizes[0].items: is 9223372036854775808, must be below 2^63"},
           {"/models/0/sizes/0/rules/paper/beta", "true",
            "models[0].sizes[0].rules.paper.beta: is true, must be a number or null"},
           {"/models/0/recipe", "3", "models[0].recipe: is 3, must be an object"}}) {
    Json json = whole;
    json.at(Json::json_pointer(path)) = Json::parse(value);
    EXPECT_EQ(error_of(json), error);
  }
}

TEST(Results, OfAnotherKindOrVersionAreRefusedByName) {
  Json json = to_json(example());
  json["kind"] = "weather";
  EXPECT_EQ(
      error_of(json),
      "kind: is \"weather\", this whet knows reproduction, benchmark, probe and clrs; use a newer whet");
  json["version"] = kVersion + 1;
  EXPECT_EQ(error_of(json),
            "version: is 2, this whet reads version 1; use the whet that wrote it, or a newer one");
  json["version"] = "1";
  EXPECT_EQ(error_of(json), "version: is missing or not a whole number");
}

TEST(Results, IgnoreFieldsThatTheyDoNotKnow) {
  Json json = to_json(example());
  json["summary"][0]["weather"] = "fine";
  EXPECT_EQ(to_json(results_from_json(json)).dump(), to_json(example()).dump());
}

TEST(Probe, NamesTheFieldThatIsMissing) {
  const Json whole = to_json(advised_probe_example());
  for (const auto& [path, name] : std::vector<std::pair<std::string, std::string>>{
           {"/model/key_heads", "model.key_heads"},
           {"/prompts/example", "prompts.example"},
           {"/rule", "rule"},
           {"/thresholds/uniform", "thresholds.uniform"},
           {"/lengths/1/tokens", "lengths[1].tokens"},
           {"/lengths/0/statistics/sharp_peak", "lengths[0].statistics.sharp_peak"},
           {"/lengths/0/statistics/first/error", "lengths[0].statistics.first.error"},
           {"/heads/2/class", "heads[2].class"},
           {"/settings/1/high", "settings[1].high"}}) {
    Json json = whole;
    const Json::json_pointer pointer(path);
    json.at(pointer.parent_pointer()).erase(pointer.back());
    EXPECT_EQ(error_of(json), name + ": is missing");
  }
}

TEST(Probe, NamesTheFieldThatIsWrong) {
  const Json whole = to_json(advised_probe_example());
  for (const auto& [path, value, error] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"/model/layers", "0", "model.layers: is 0, must be 1 or more"},
           {"/model/heads", "0", "model.heads: is 0, must be 1 or more"},
           {"/model/context", "-1", "model.context: is -1, must be a whole number of 0 or more"},
           {"/model/layers", "9223372036854775807",
            "lengths[0].statistics.entropy.mean: has 2 entries, must have one for each of the model's "
            "9223372036854775807 layers"},
           {"/prompts/kind", "\"poem\"", "prompts.kind: is \"poem\", must be max, needle or text"},
           {"/prompts/rows", "\"first\"", "prompts.rows: is \"first\", must be last or all"},
           {"/horizon_weight", "null", "horizon_weight: is null, must be a number"},
           {"/thresholds/sink", "null", "thresholds.sink: is null, must be a number"},
           {"/lengths", "[]", "lengths: is empty, must hold at least one length"},
           {"/lengths/0/tokens", "null", "lengths[0].tokens: is null, must be a number"},
           {"/lengths/0/tokens", "0", "lengths[0].tokens: must be positive"},
           {"/lengths/1/tokens", "64", "lengths[1].tokens: must be more than at the length before"},
           {"/lengths/1/statistics/peak/mean", "[[1, 1]]",
            "lengths[1].statistics.peak.mean: has 1 entries, must have one for each of the model's 2 layers"},
           {"/lengths/1/statistics/beta/error/1", "[1, 1, 1]",
            "lengths[1].statistics.beta.error[1]: has 3 entries, must have one for each of the model's 2 "
            "heads"},
           {"/lengths/0/statistics/spread/mean/0/1", "\"wide\"",
            "lengths[0].statistics.spread.mean[0][1]: is \"wide\", must be a number or null"},
           {"/heads", "[]", "heads: has 0 entries, must have one for each of the model's 2 x 2 heads"},
           {"/heads/0/layer", "2", "heads[0].layer: is 2, must be below 2"},
           {"/heads/0/head", "7", "heads[0].head: is 7, must be below 2"},
           {"/heads/1/head", "0", "heads[1]: is layer 0, head 0 once more, must be another head"},
           {"/heads/3/class", "\"bold\"",
            "heads[3].class: is \"bold\", must be dispersing, sink, uniform or sharp"},
           {"/settings", "[]", "settings: is empty, must hold at least one"},
           {"/settings/0/needle", "\"most\"", "settings[0].needle: is \"most\", must be a number or null"},
           {"/verdict", "3", "verdict: is 3, must be text"}}) {
    Json json = whole;
    json[Json::json_pointer(path)] = Json::parse(value);
    EXPECT_EQ(error_of(json), error);
  }
}

TEST(Probe, HasNullForWhatOneLengthOrPromptDoesNotGive) {
  Json json = to_json(probe_example());
  json["lengths"].erase(1);
  for (Json& head : json["heads"]) head["slope"] = head["low"] = head["high"] = nullptr;
  json["model"]["context"] = json["settings"] = nullptr;
  const auto back = std::get<Probe>(results_from_json(json));
  EXPECT_TRUE(std::isnan(back.heads[0].slope) && std::isnan(back.lengths[0].statistics.first.error[0][0]));
  EXPECT_FALSE(back.model.context || back.settings || back.verdict);
}

TEST(Clrs, NamesTheFieldThatIsMissing) {
  const Json whole = to_json(clrs_example());
  for (const auto& [path, name] : std::vector<std::pair<std::string, std::string>>{
           {"/runs", "runs"},
           {"/runs/1/metrics", "runs[1].metrics"},
           {"/tasks/0/hints", "tasks[0].hints"},
           {"/tasks/0/sizes/1/copy/tokens", "tasks[0].sizes[1].copy.tokens"},
           {"/tasks/0/sizes/0/variants/2/setting", "tasks[0].sizes[0].variants[2].setting"},
           {"/tasks/0/sizes/0/variants/0/exact/low", "tasks[0].sizes[0].variants[0].exact.low"},
           {"/tasks/0/sizes/1/variants/1/against_softmax/exact/p",
            "tasks[0].sizes[1].variants[1].against_softmax.exact.p"}}) {
    Json json = whole;
    const Json::json_pointer pointer(path);
    json.at(pointer.parent_pointer()).erase(pointer.back());
    EXPECT_EQ(error_of(json), name + ": is missing");
  }
}

TEST(Clrs, NamesTheFieldThatIsWrong) {
  const Json whole = to_json(clrs_example());
  for (const auto& [path, value, error] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"/runs", "[]", "runs: is empty, must hold at least one run"},
           {"/runs/0/recipe", "[]", "runs[0].recipe: is a list, must be an object"},
           {"/runs/0/metrics/1", "[1]", "runs[0].metrics[1]: is a list, must be a list of 3 numbers"},
           {"/tasks", "[]", "tasks: is empty, must hold at least one algorithm"},
           {"/tasks/0/hints", "1", "tasks[0].hints: is 1, must be true or false"},
           {"/tasks/0/trained_sizes", "[]", "tasks[0].trained_sizes: is empty, must hold at least one size"},
           {"/tasks/0/trained_sizes/1", "0", "tasks[0].trained_sizes[1]: is 0, must be 1 to 1000000000"},
           {"/tasks/0/sizes", "[]", "tasks[0].sizes: is empty, must hold at least one size"},
           {"/tasks/0/sizes/0/size", "9000000000",
            "tasks[0].sizes[0].size: is 9000000000, must be 1 to 1000000000"},
           {"/tasks/0/sizes/1/size", "8", "tasks[0].sizes[1].size: must be more than the size before"},
           {"/tasks/0/sizes/0/problems", "0", "tasks[0].sizes[0].problems: is 0, must be 1 or more"},
           {"/tasks/0/sizes/0/chance/exact", "2", "tasks[0].sizes[0].chance.exact: is 2.0, must be 0 to 1"},
           {"/tasks/0/sizes/0/copy/tokens", "null",
            "tasks[0].sizes[0].copy.tokens: is null, must be a number"},
           {"/tasks/0/sizes/0/variants", "[]",
            "tasks[0].sizes[0].variants: is empty, must hold at least one variant"},
           {"/tasks/0/sizes/1/variants/1/variant", "\"softmax\"",
            "tasks[0].sizes[1].variants[1]: is \"softmax\", \"as trained\" once more, must be another "
            "variant "
            "or setting"},
           {"/tasks/0/sizes/1/variants/1/runs", "0",
            "tasks[0].sizes[1].variants[1].runs: is 0, must be 1 or more"},
           {"/tasks/0/sizes/1/variants/1/exact/mean", "-0.5",
            "tasks[0].sizes[1].variants[1].exact.mean: is -0.5, must be 0 to 1"},
           {"/tasks/0/sizes/1/variants/1/errors", "[]",
            "tasks[0].sizes[1].variants[1].errors: is empty, must hold at least one place"},
           {"/tasks/0/sizes/1/variants/1/errors/1", "null",
            "tasks[0].sizes[1].variants[1].errors[1]: is null, must be a number"},
           {"/tasks/0/sizes/1/variants/1/sharp_entropy", "[1]",
            "tasks[0].sizes[1].variants[1].sharp_entropy: must have the layers of entropy"}}) {
    Json json = whole;
    json[Json::json_pointer(path)] = Json::parse(value);
    EXPECT_EQ(error_of(json), error);
  }
}

TEST(Clrs, HasEndsToItsLists) {
  Json json = to_json(clrs_example());
  json["tasks"][0]["sizes"][0]["variants"][0]["errors"] = std::vector<double>(65);
  EXPECT_EQ(error_of(json), "tasks[0].sizes[0].variants[0].errors: has 65 entries, may have 64");
  json = to_json(clrs_example());
  json["tasks"][0]["trained_sizes"] = std::vector<int>(10001, 4);
  EXPECT_EQ(error_of(json), "tasks[0].trained_sizes: has 10001 entries, may have 10000");
  json = to_json(clrs_example());
  json["tasks"].push_back(json["tasks"][0]);
  EXPECT_EQ(error_of(json), "tasks[1].algorithm: is \"insertion_sort\" once more, must be another");
}

}  // namespace
}  // namespace whet::results
