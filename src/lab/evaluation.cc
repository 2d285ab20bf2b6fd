#include "lab/evaluation.h"

#include <whet/error.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/runtime.h"
#include "lab/parallel.h"

namespace whet::lab {
namespace {

// Items whose encodings are kept between the two passes over a batch: 19 MB per thread. Beyond, they are
// encoded twice.
constexpr std::int64_t kKeptItems = 32768;
// Sets that go through the model together: enough for products near full speed, few enough to stay in cache.
constexpr std::int64_t kItemsAtOnce = 4096;

std::int64_t sets_at_once(std::int64_t items) {
  return std::clamp<std::int64_t>(kItemsAtOnce / items, 1, 128);
}

std::int64_t sets_of(const EvaluationOptions& options, std::int64_t items) {
  const std::int64_t all = options.sets > 0 ? options.sets : default_sets(items);
  return std::max<std::int64_t>(1, all / options.share);
}

// A head of nothing but the diagnosed slope and class offsets, on one set.
bool predicts_right(const Diagnosis& diagnosis, const Batch& batch, std::int64_t set) {
  const float* priorities = batch.priorities.data() + set * batch.items;
  const std::uint8_t* classes = batch.classes.data() + set * batch.items;
  std::int64_t best = 0;
  double largest = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < batch.items; ++i) {
    const double logit = diagnosis.slope * priorities[i] + diagnosis.offsets[classes[i]];
    if (logit > largest) {
      largest = logit;
      best = i;
    }
  }
  return classes[best] == batch.targets[static_cast<std::size_t>(set)];
}

template <typename T>
bool ranks_right(std::span<const T> all, const Batch& batch, std::int64_t set) {
  const auto items = static_cast<std::size_t>(batch.items), first = static_cast<std::size_t>(set) * items;
  const auto logits = all.subspan(first, items);
  const auto best = static_cast<std::size_t>(std::ranges::max_element(logits) - logits.begin());
  return batch.classes[first + best] == batch.targets[static_cast<std::size_t>(set)];
}

// Sums over the sets of one batch; means come at the end, in the order of batches, whichever thread made
// them.
SizeOutcome& operator+=(SizeOutcome& sum, const SizeOutcome& part) {
  sum.sets += part.sets;
  sum.redrawn += part.redrawn;
  sum.entropy += part.entropy;
  sum.spread += part.spread;
  sum.largest_spread = std::max(sum.largest_spread, part.largest_spread);
  sum.ranked += part.ranked;
  sum.predicted += part.predicted;
  for (std::size_t r = 0; r < sum.outcomes.size(); ++r) {
    sum.outcomes[r].correct += part.outcomes[r].correct;
    sum.outcomes[r].beta += part.outcomes[r].beta;
    sum.outcomes[r].sharpened += part.outcomes[r].sharpened;
    sum.outcomes[r].entropy += part.outcomes[r].entropy;
    sum.outcomes[r].peak += part.outcomes[r].peak;
    sum.outcomes[r].largest_peak = std::max(sum.outcomes[r].largest_peak, part.outcomes[r].largest_peak);
  }
  return sum;
}

void divide_by_sets(SizeOutcome& outcome) {
  const auto sets = static_cast<double>(outcome.sets);
  outcome.entropy /= sets;
  outcome.spread /= sets;
  for (Outcome& o : outcome.outcomes) {
    for (double* mean : {&o.beta, &o.sharpened, &o.entropy, &o.peak}) *mean /= sets;
  }
}

template <typename T>
SizeOutcome measure(const Head<T>& head, const Batch& batch, const Diagnosis& diagnosis,
                    std::span<const Weighting> weightings) {
  SizeOutcome sum{.items = batch.items, .sets = batch.sets, .redrawn = batch.redrawn};
  sum.outcomes.resize(weightings.size());
  for (std::int64_t set = 0; set < batch.sets; ++set) {
    const RowStats& plain =
        head.stats()[static_cast<std::size_t>(set)];  // every weighting has these at beta = 1
    sum.entropy += plain.entropy;
    sum.spread += plain.spread;
    sum.largest_spread = std::max(sum.largest_spread, plain.spread);
    sum.ranked += ranks_right(head.logits(), batch, set) ? 1 : 0;
    sum.predicted += predicts_right(diagnosis, batch, set) ? 1 : 0;
    for (std::size_t r = 0; r < weightings.size(); ++r) {
      const RowStats& stats =
          head.stats()[r * static_cast<std::size_t>(batch.sets) + static_cast<std::size_t>(set)];
      Outcome& outcome = sum.outcomes[r];
      outcome.beta += stats.beta;
      outcome.sharpened += stats.beta > 1 ? 1 : 0;
      outcome.entropy += stats.sharp_entropy;
      outcome.peak += stats.sharp_peak;
      outcome.largest_peak = std::max(outcome.largest_peak, stats.sharp_peak);
    }
  }
  for (std::size_t r = 0; r < weightings.size(); ++r) sum.outcomes[r].correct = head.correct(r);
  return sum;
}

std::vector<Weighting> plain(std::span<const NamedWeighting> named) {
  std::vector<Weighting> weightings;
  for (const NamedWeighting& n : named) weightings.push_back(n.weighting);
  return weightings;
}

template <typename T>
SizeOutcome evaluate_size(const std::vector<T>& parameters, const Diagnosis& diagnosis,
                          std::span<const Weighting> weightings, const EvaluationOptions& options,
                          std::int64_t items) {
  const std::int64_t sets = sets_of(options, items), at_once = sets_at_once(items);
  const std::int64_t tasks = (sets + at_once - 1) / at_once;
  const int threads = core::resolve_threads(options.threads);
  std::vector<Head<T>> heads(static_cast<std::size_t>(threads), Head<T>(options.architecture));
  std::vector<Batch> batches(static_cast<std::size_t>(threads));
  std::vector<SizeOutcome> parts(static_cast<std::size_t>(tasks));
  for_each_task(tasks, threads, [&](std::int64_t task, int worker) {
    Head<T>& head = heads[static_cast<std::size_t>(worker)];
    Batch& batch = batches[static_cast<std::size_t>(worker)];
    const std::int64_t first = task * at_once, count = std::min(at_once, sets - first);
    draw_sets(options.seed, options.stream, items, first, count, batch);
    head.forward(parameters.data(), batch, weightings, keep_of(count * items));
    parts[static_cast<std::size_t>(task)] = measure(head, batch, diagnosis, weightings);
    if (options.progress) options.progress(count * items);
  });
  SizeOutcome total{.items = items};
  total.outcomes.resize(weightings.size());
  for (const SizeOutcome& part : parts) total += part;
  divide_by_sets(total);
  return total;
}

}  // namespace

void check_sizes(std::span<const std::int64_t> sizes) {
  for (const std::int64_t items : sizes) {
    if (items < 1 || items > 1 << 24) {
      throw Error("sizes: has " + std::to_string(items) + ", must be 1 to 16777216 items");
    }
  }
}

Keep keep_of(std::int64_t items) { return items <= kKeptItems ? Keep::encoded : Keep::nothing; }

std::int64_t default_sets(std::int64_t items) { return items <= 4096 ? 4096 : 1024; }

std::int64_t items_to_evaluate(const EvaluationOptions& options) {
  return std::accumulate(
      options.sizes.begin(), options.sizes.end(), std::int64_t{0},
      [&](std::int64_t sum, std::int64_t items) { return sum + items * sets_of(options, items); });
}

std::vector<SizeOutcome> evaluate(const std::vector<float>& parameters,
                                  std::span<const NamedWeighting> weightings,
                                  const EvaluationOptions& options) {
  check_sizes(options.sizes);
  const Diagnosis diagnosis = diagnose(parameters, options.architecture);
  const std::vector<Weighting> unnamed = plain(weightings);
  const std::vector<double> exact(parameters.begin(), parameters.end());
  std::vector<SizeOutcome> outcomes;
  outcomes.reserve(options.sizes.size());
  for (const std::int64_t items : options.sizes) {
    outcomes.push_back(options.precision == Precision::f64
                           ? evaluate_size(exact, diagnosis, unnamed, options, items)
                           : evaluate_size(parameters, diagnosis, unnamed, options, items));
  }
  return outcomes;
}

files::Safetensors evaluation_sets(const EvaluationOptions& options) {
  check_sizes(options.sizes);
  files::Safetensors content;
  Batch batch;
  for (const std::int64_t items : options.sizes) {
    const std::int64_t sets = sets_of(options, items);
    draw_sets(options.seed, options.stream, items, 0, sets, batch);
    const auto add = [&](const char* name, const auto& values, const Dims& sizes) {
      content.add(std::to_string(items) + "." + name, std::span(values), sizes);
    };
    add("priorities", batch.priorities, {sets, items});
    add("classes", batch.classes, {sets, items});
    add("queries", batch.queries, {sets});
    add("targets", batch.targets, {sets});
  }
  return content;
}

std::vector<float> heat_map(const std::vector<float>& parameters, std::span<const NamedWeighting> weightings,
                            std::uint64_t seed, std::int64_t items, std::int64_t sets, std::int64_t columns,
                            const Architecture& architecture) {
  const std::vector<Weighting> unnamed = plain(weightings);
  const auto rules = static_cast<std::int64_t>(unnamed.size());
  std::vector<float> map(static_cast<std::size_t>(rules * sets * columns), 0.0F);
  Head<float> head(architecture);
  Batch batch;
  std::vector<std::int64_t> order(static_cast<std::size_t>(items));
  for (std::int64_t set = 0; set < sets; ++set) {
    draw_sets(seed, Stream::evaluation, items, set, 1, batch);
    head.forward(parameters.data(), batch, unnamed, keep_of(items));
    std::iota(order.begin(), order.end(), 0);
    const std::int64_t shown = std::min(items, columns);
    std::partial_sort(order.begin(), order.begin() + shown, order.end(), [&](std::int64_t a, std::int64_t b) {
      return batch.priorities[static_cast<std::size_t>(a)] > batch.priorities[static_cast<std::size_t>(b)];
    });
    for (std::int64_t r = 0; r < rules; ++r) {
      for (std::int64_t c = 0; c < shown; ++c) {
        map[static_cast<std::size_t>((r * sets + set) * columns + c)] =
            head.weights()[static_cast<std::size_t>(r * items + order[static_cast<std::size_t>(c)])];
      }
    }
  }
  return map;
}

}  // namespace whet::lab
