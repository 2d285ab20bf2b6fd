// results.json from a folder or a file, as others left it: read, checked, and never trusted.
#ifndef WHET_RESULTS_LOAD_H_
#define WHET_RESULTS_LOAD_H_

#include <string>

#include "results/results.h"

namespace whet::results {

struct NamedResults {
  std::string name;  // for people: the folder's
  Results results;
  std::string file{};  // that they were read from
};

// From a folder that holds results.json, or from such a file. FileError, one line that begins with the file's
// name, if it can't be read, is no JSON, or is refused by results_from_json().
NamedResults load_results(const std::string& path);

// Of a folder, or of the folder a results.json lies in; other files have their own.
std::string name_of_results(const std::string& path);

}  // namespace whet::results

#endif  // WHET_RESULTS_LOAD_H_
