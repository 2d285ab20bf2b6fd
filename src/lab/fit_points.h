// The inputs that the paper fits its polynomial on, gathered from a trained head.
#ifndef WHET_LAB_FIT_POINTS_H_
#define WHET_LAB_FIT_POINTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "lab/fit.h"
#include "lab/model.h"

namespace whet::lab {

// Fewer points than these say nothing of a polynomial of degree 4.
inline constexpr std::size_t kFewestPoints = 50;

struct FitPointsOptions {
  std::vector<std::int64_t> sizes{16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  std::int64_t sets = 1024;  // drawn of each size
  std::uint64_t seed = 1;
  Architecture architecture{};                         // of the head
  int threads = 0;                                     // no bit depends on it
  std::function<void(std::int64_t items)> progress{};  // items done; called from several threads
};

// A progress total: the items that fit_points() will report.
std::int64_t items_to_fit(const FitPointsOptions& options);

// A point for every drawn set whose item of largest priority hasn't the largest logit: its entropy at beta =
// 1, and the beta that gives that item most weight.
std::vector<FitPoint> fit_points(const std::vector<float>& parameters, const FitPointsOptions& options);

}  // namespace whet::lab

#endif  // WHET_LAB_FIT_POINTS_H_
