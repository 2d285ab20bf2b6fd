// Max retrieval: given a set of items, each with a priority and a class, name the class of the item of
// largest priority.
#ifndef WHET_LAB_TASK_H_
#define WHET_LAB_TASK_H_

#include <cstdint>
#include <vector>

#include "lab/random.h"

namespace whet::lab {

inline constexpr int kClasses = 10;

// Sets of one size. Item i of set s stands at s * items + i; priorities and queries lie in (0, 1].
struct Batch {
  std::int64_t sets = 0;
  std::int64_t items = 0;
  std::vector<float> priorities{};
  std::vector<std::uint8_t> classes{};
  std::vector<float> queries{};         // one per set; it means nothing
  std::vector<std::uint8_t> targets{};  // one per set: the class of its largest priority
  std::int64_t redrawn = 0;             // priorities drawn again because two tied for the largest
};

// What training sets look like.
struct TrainingSets {
  int smallest = 5;  // items, drawn once per batch, both ends included
  int largest = 16;
  // Squeezes the priorities of each set into [1 - s, 1], log10 s ~ U(-zoom, 0): a training distribution
  // of its own, in which the largest priorities lie as close as they do in large sets. 0 = off.
  double zoom = 0;
};

// The batch of a training step: a function of (seed, step) alone.
void draw_training_batch(const TrainingSets& sets, std::uint64_t seed, std::uint64_t step, std::int64_t count,
                         Batch& batch);

// `count` evaluation sets of `items` items, numbers first, first + 1, ... of their stream: a function of
// (seed, stream, items, number) alone, so that any split over threads or calls gives the same sets.
void draw_sets(std::uint64_t seed, Stream stream, std::int64_t items, std::int64_t first, std::int64_t count,
               Batch& batch);

}  // namespace whet::lab

#endif  // WHET_LAB_TASK_H_
