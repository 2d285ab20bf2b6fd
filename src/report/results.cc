#include "report/results.h"

#include <filesystem>
#include <system_error>

#include "files/file.h"
#include "files/json.h"

namespace whet::report {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void fail(const std::string& file, const std::string& problem) {
  throw files::FileError(file, problem);
}

bool is_list(const Json& json, const char* field) {
  return json.contains(field) && json.at(field).is_array();
}

bool is_map(const Json& json, const char* field) {
  return json.contains(field) && json.at(field).is_object();
}

bool is_size(const Json& json) {
  if (!json.is_object() || !json.contains("items") || !json.at("items").is_number() || !is_map(json, "rules"))
    return false;
  for (const auto& [name, rule] : json.at("rules").items()) {
    if (!rule.is_object() || !rule.contains("accuracy")) return false;
  }
  return true;
}

bool is_model(const Json& json) {
  if (!json.is_object() || !json.contains("seed") || !is_list(json, "sizes")) return false;
  for (const Json& size : json.at("sizes")) {
    if (!is_size(size)) return false;
  }
  return true;
}

// What stands in the way, or nothing.
std::string problem_of_reproduction(const Json& json) {
  if (!is_list(json, "summary") || json.at("summary").empty()) return "has no list 'summary'";
  for (const Json& size : json.at("summary")) {
    if (!is_size(size)) return "has a size in 'summary' without 'items' or 'rules'";
  }
  if (!is_list(json, "models") || json.at("models").empty()) return "has no list 'models'";
  for (const Json& model : json.at("models")) {
    if (!is_model(model)) return "has a head in 'models' without 'seed' or 'sizes'";
  }
  return "";
}

std::string problem_of_benchmark(const Json& json) {
  return is_list(json, "sections") ? "" : "has no list 'sections'";
}

void check(const std::string& file, const Json& json) {
  if (!json.is_object() || !json.contains("schema") || json.at("schema") != "whet results") {
    fail(file, R"(is not from whet: it has no "schema": "whet results")");
  }
  const Json version = json.value("version", Json());
  if (!version.is_number_integer()) fail(file, "does not say which version of results it holds");
  if (version > kNewestVersion) {
    fail(file, "holds results of version " + version.dump() + ", this whet knows versions up to " +
                   std::to_string(kNewestVersion) + "; use a newer whet");
  }
  const Json kind = json.value("kind", Json());
  if (kind != "reproduction" && kind != "benchmark") {
    fail(file, "holds results of kind " + kind.dump() + ", must be reproduction or benchmark");
  }
  const std::string problem =
      kind == "reproduction" ? problem_of_reproduction(json) : problem_of_benchmark(json);
  if (!problem.empty()) fail(file, problem + "; run the command that made it again");
}

}  // namespace

Results load_results(const std::string& path) {
  if (path.empty()) fail("''", "is no folder and no file; name one that holds results");
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const std::string file = folder ? (std::filesystem::path(path) / "results.json").string() : path;
  if (folder && !std::filesystem::exists(file, ignored)) {
    fail(path, "holds no results.json; 'whet reproduce' and 'whet eval --out' make one");
  }
  Results results{name_of_results(path), files::read_json(file), file};
  check(file, results.json);
  return results;
}

std::string name_of_results(const std::string& path) {
  std::filesystem::path named = std::filesystem::absolute(path).lexically_normal();
  if (named.filename() == "results.json" || named.filename().empty()) named = named.parent_path();
  const std::string name = named.extension() == ".json" ? named.stem().string() : named.filename().string();
  return name.empty() ? path : name;
}

}  // namespace whet::report
