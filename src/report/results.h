// results.json as others left it: read, checked, and never trusted (docs/results.md).
#ifndef WHET_REPORT_RESULTS_H_
#define WHET_REPORT_RESULTS_H_

#include <nlohmann/json.hpp>
#include <string>

namespace whet::report {

constexpr int kNewestVersion = 1;  // of results.json

struct Results {
  std::string name;  // for people: the folder's
  nlohmann::ordered_json json;
  std::string file{};  // that they were read from
};

// From a folder that holds results.json, or from such a file. FileError, one sentence that begins with the
// file's name, if it can't be read, is no JSON, of another program, of a newer version or of a kind nobody
// draws, or lacks what tables and page stand on. Older versions are read.
Results load_results(const std::string& path);

// Of a folder, or of the folder a results.json lies in; other files have their own.
std::string name_of_results(const std::string& path);

}  // namespace whet::report

#endif  // WHET_REPORT_RESULTS_H_
