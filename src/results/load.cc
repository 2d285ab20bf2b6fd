#include "results/load.h"

#include <whet/error.h>

#include <filesystem>
#include <system_error>

#include "files/file.h"
#include "files/json.h"

namespace whet::results {

using files::FileError;

NamedResults load_results(const std::string& path) {
  if (path.empty()) throw FileError("''", "is no folder and no file; name one that holds results");
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const std::string file = folder ? (std::filesystem::path(path) / "results.json").string() : path;
  if (folder && !std::filesystem::exists(file, ignored)) {
    throw FileError(
        path,
        "holds no results.json; 'whet reproduce', 'whet eval --out', 'whet probe' and 'whet clrs' make one");
  }
  const nlohmann::ordered_json json = files::read_json(file);
  try {
    return {name_of_results(path), results_from_json(json), file};
  } catch (const Error& e) {
    throw FileError(file, e.what());
  }
}

std::string name_of_results(const std::string& path) {
  std::filesystem::path named = std::filesystem::absolute(path).lexically_normal();
  if (named.filename() == "results.json" || named.filename().empty()) named = named.parent_path();
  const std::string name = named.extension() == ".json" ? named.stem().string() : named.filename().string();
  return name.empty() ? path : name;
}

}  // namespace whet::results
