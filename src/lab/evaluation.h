// How well a trained head does on sets of any size, and under which weighting.
#ifndef WHET_LAB_EVALUATION_H_
#define WHET_LAB_EVALUATION_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "lab/diagnosis.h"
#include "lab/model.h"
#include "lab/task.h"

namespace whet::lab {

struct NamedWeighting {
  std::string name;  // in results: "softmax", "paper", ...
  Weighting weighting{};
};

enum class Precision { f32, f64 };

struct EvaluationOptions {
  std::vector<std::int64_t> sizes{};
  std::int64_t sets = 0;   // of each size; 0: default_sets(size)
  std::int64_t share = 1;  // of those, one in so many
  std::uint64_t seed = 1;  // of the sets; every model sees the same ones
  Stream stream = Stream::evaluation;
  Precision precision = Precision::f32;
  Architecture architecture{};                         // of the head
  int threads = 0;                                     // 0 = whet::threads(); no bit depends on it
  std::function<void(std::int64_t items)> progress{};  // items done; called from several threads
};

std::int64_t default_sets(std::int64_t items);  // 4,096 up to 4,096 items, 1,024 above

// Under one weighting: means over sets unless said otherwise.
struct Outcome {
  std::int64_t correct = 0;  // sets
  double beta = 0;
  double sharpened = 0;     // share of rows with beta > 1
  double entropy = 0;       // at that beta, nats
  double peak = 0;          // largest weight at that beta; unlike entropy, not a share of the weights' sum
  double largest_peak = 0;  // of any set
};

struct SizeOutcome {
  std::int64_t items = 0;
  std::int64_t sets = 0;
  std::int64_t redrawn = 0;  // priorities drawn again because of a tie for the largest
  double entropy = 0;        // at beta = 1
  double spread = 0;         // mean, and largest
  double largest_spread = 0;
  std::int64_t ranked = 0;          // sets whose largest logit (the first of equals) is of the right class
  std::int64_t predicted = 0;       // sets that a head of only slope and class offsets would get right
  std::vector<Outcome> outcomes{};  // one per weighting
};

// Error naming `sizes` unless every one is 1 to 16,777,216 items.
void check_sizes(std::span<const std::int64_t> sizes);

// What forward() should keep of so many items: beyond 32,768 (19 MB) they are encoded twice instead.
Keep keep_of(std::int64_t items);

// A progress total: the items that evaluate() will report.
std::int64_t items_to_evaluate(const EvaluationOptions& options);

std::vector<SizeOutcome> evaluate(const std::vector<float>& parameters,
                                  std::span<const NamedWeighting> weightings,
                                  const EvaluationOptions& options);

// The sets that evaluate() draws, for other programs. For every size N: N.priorities (f32) and N.classes
// (u8), sets x items; N.queries (f32) and N.targets (u8), one per set.
files::Safetensors evaluation_sets(const EvaluationOptions& options);

// The weights of the `columns` items of largest priority, largest first, in the first `sets` evaluation sets
// of a size: weightings x sets x columns.
std::vector<float> heat_map(const std::vector<float>& parameters, std::span<const NamedWeighting> weightings,
                            std::uint64_t seed, std::int64_t items, std::int64_t sets, std::int64_t columns,
                            const Architecture& architecture = {});

}  // namespace whet::lab

#endif  // WHET_LAB_EVALUATION_H_
