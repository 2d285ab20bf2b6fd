// What a reader asks of results beyond the type of each field: shapes that agree and lists that end.
#ifndef WHET_RESULTS_CHECKS_H_
#define WHET_RESULTS_CHECKS_H_

#include <whet/error.h>

#include <cmath>
#include <string>

#include "results/results.h"

namespace whet::results {

inline std::string at(const std::string& list, std::size_t i) { return list + "[" + std::to_string(i) + "]"; }

// Error that begins with the field's path.
inline void require(bool holds, const std::string& path, const std::string& problem) {
  if (!holds) throw Error(path + ": " + problem);
}

inline void require_finite(double value, const std::string& path) {
  require(std::isfinite(value), path, "is null, must be a number");
}

// After it, every task has sizes, every size variants, and every share lies between 0 and 1.
void check_clrs(const Clrs& clrs);

}  // namespace whet::results

#endif  // WHET_RESULTS_CHECKS_H_
