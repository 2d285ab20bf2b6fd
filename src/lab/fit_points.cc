#include "lab/fit_points.h"

#include <whet/error.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>

#include "core/runtime.h"
#include "lab/evaluation.h"
#include "lab/model.h"
#include "lab/parallel.h"

namespace whet::lab {
namespace {

// No row asks for more: beyond, the second of two items would have to be told apart from the first by
// rounding alone.
constexpr double kLargestBeta = 0x1p20;

void append_point(const Head<float>& head, const Batch& batch, std::int64_t set,
                  std::vector<FitPoint>& points) {
  const auto items = static_cast<std::size_t>(batch.items), begin = static_cast<std::size_t>(set) * items;
  const auto priorities = std::span(batch.priorities).subspan(begin, items);
  const auto logits = head.logits().subspan(begin, items);
  const auto first =
      static_cast<std::size_t>(std::max_element(priorities.begin(), priorities.end()) - priorities.begin());
  if (logits[first] >= *std::max_element(logits.begin(), logits.end())) return;
  points.push_back(
      {head.stats()[static_cast<std::size_t>(set)].entropy, best_beta(logits, first, kLargestBeta)});
}

}  // namespace

std::int64_t items_to_fit(const FitPointsOptions& options) {
  return options.sets * std::accumulate(options.sizes.begin(), options.sizes.end(), std::int64_t{0});
}

std::vector<FitPoint> fit_points(const std::vector<float>& parameters, const FitPointsOptions& options) {
  check_sizes(options.sizes);
  if (options.sets < 1) throw Error("sets: is " + std::to_string(options.sets) + ", must be 1 or more");
  constexpr std::int64_t kSetsAtOnce = 8;
  const Weighting weighting{};
  const int threads = core::resolve_threads(options.threads);
  const std::int64_t per_size = (options.sets + kSetsAtOnce - 1) / kSetsAtOnce;
  const std::int64_t tasks = per_size * static_cast<std::int64_t>(options.sizes.size());
  std::vector<Head<float>> heads(static_cast<std::size_t>(threads), Head<float>(options.architecture));
  std::vector<Batch> batches(static_cast<std::size_t>(threads));
  std::vector<std::vector<FitPoint>> parts(static_cast<std::size_t>(tasks));
  for_each_task(tasks, threads, [&](std::int64_t task, int worker) {
    Head<float>& head = heads[static_cast<std::size_t>(worker)];
    Batch& batch = batches[static_cast<std::size_t>(worker)];
    const std::int64_t first = task % per_size * kSetsAtOnce;
    draw_sets(options.seed, Stream::fit, options.sizes[static_cast<std::size_t>(task / per_size)], first,
              std::min(kSetsAtOnce, options.sets - first), batch);
    head.forward(parameters.data(), batch, std::span(&weighting, 1), keep_of(batch.sets * batch.items));
    for (std::int64_t set = 0; set < batch.sets; ++set) {
      append_point(head, batch, set, parts[static_cast<std::size_t>(task)]);
    }
    if (options.progress) options.progress(batch.sets * batch.items);
  });
  std::vector<FitPoint> points;
  for (const auto& part : parts) points.insert(points.end(), part.begin(), part.end());
  return points;
}

}  // namespace whet::lab
