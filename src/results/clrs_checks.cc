// Results on CLRS-Text: what no page or table has to check again.
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "results/checks.h"
#include "results/json_fields.h"

namespace whet::results {
namespace {

template <typename T>
void require_count(const std::vector<T>& list, std::size_t most, const std::string& path,
                   const std::string& what) {
  require(!list.empty(), path, "is empty, must hold at least one " + what);
  require(list.size() <= most, path,
          "has " + std::to_string(list.size()) + " entries, may have " + std::to_string(most));
}

void require_positive(std::int64_t value, const std::string& path) {
  require(value > 0, path, "is 0, must be 1 or more");
}

void require_size(std::int64_t value, const std::string& path) {
  require(value > 0 && value <= kLargestClrsSize, path,
          "is " + std::to_string(value) + ", must be 1 to " + std::to_string(kLargestClrsSize));
}

void require_share(double value, const std::string& path) {
  require_finite(value, path);
  require(value >= 0 && value <= 1, path, "is " + Json(value).dump() + ", must be 0 to 1");
}

void check_shares(const ClrsShares& shares, const std::string& path) {
  require_share(shares.exact, path + ".exact");
  require_share(shares.tokens, path + ".tokens");
}

void check_variant(const ClrsVariant& variant, const std::string& path) {
  require_positive(variant.runs, path + ".runs");
  require_share(variant.exact.mean, path + ".exact.mean");
  require_share(variant.tokens.mean, path + ".tokens.mean");
  require_share(variant.forced, path + ".forced");
  require_count(variant.errors, kMostClrsPlaces, path + ".errors", "place");
  for (std::size_t i = 0; i < variant.errors.size(); ++i)
    require_share(variant.errors[i], at(path + ".errors", i));
  if (variant.entropy) require_count(*variant.entropy, kMostClrsLayers, path + ".entropy", "layer");
  if (!variant.sharp_entropy) return;
  require_count(*variant.sharp_entropy, kMostClrsLayers, path + ".sharp_entropy", "layer");
  require(variant.entropy && variant.entropy->size() == variant.sharp_entropy->size(),
          path + ".sharp_entropy", "must have the layers of entropy");
}

void check_size(const ClrsSize& size, const std::string& path) {
  require_positive(size.problems, path + ".problems");
  check_shares(size.chance, path + ".chance");
  check_shares(size.copy, path + ".copy");
  require_count(size.variants, kMostClrsVariants, path + ".variants", "variant");
  std::set<std::pair<std::string, std::string>> seen;
  for (std::size_t i = 0; i < size.variants.size(); ++i) {
    const ClrsVariant& variant = size.variants[i];
    const std::string where = at(path + ".variants", i);
    check_variant(variant, where);
    require(seen.emplace(variant.variant, variant.setting).second, where,
            "is " + Json(variant.variant).dump() + ", " + Json(variant.setting).dump() +
                " once more, must be another variant or setting");
  }
}

void check_task(const ClrsTask& task, const std::string& path) {
  require_count(task.trained_sizes, kMostClrsSizes, path + ".trained_sizes", "size");
  for (std::size_t i = 0; i < task.trained_sizes.size(); ++i)
    require_size(task.trained_sizes[i], at(path + ".trained_sizes", i));
  require_count(task.sizes, kMostClrsSizes, path + ".sizes", "size");
  std::int64_t before = 0;
  for (std::size_t i = 0; i < task.sizes.size(); ++i) {
    const std::string where = at(path + ".sizes", i);
    require_size(task.sizes[i].size, where + ".size");
    require(task.sizes[i].size > before, where + ".size", "must be more than the size before");
    before = task.sizes[i].size;
    check_size(task.sizes[i], where);
  }
}

}  // namespace

void check_clrs(const Clrs& clrs) {
  require_count(clrs.runs, kMostClrsRuns, "runs", "run");
  for (std::size_t i = 0; i < clrs.runs.size(); ++i) {
    const std::string path = at("runs", i) + ".metrics";
    const std::size_t lines = clrs.runs[i].metrics.size();
    require(lines <= kMostClrsMetrics, path,
            "has " + std::to_string(lines) + " entries, may have " + std::to_string(kMostClrsMetrics));
  }
  require_count(clrs.tasks, kMostClrsTasks, "tasks", "algorithm");
  std::set<std::string> seen;
  for (std::size_t i = 0; i < clrs.tasks.size(); ++i) {
    check_task(clrs.tasks[i], at("tasks", i));
    require(seen.insert(clrs.tasks[i].algorithm).second, at("tasks", i) + ".algorithm",
            "is " + Json(clrs.tasks[i].algorithm).dump() + " once more, must be another");
  }
}

}  // namespace whet::results
