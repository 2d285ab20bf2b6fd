#include "lab/task.h"

#include <algorithm>
#include <cmath>

namespace whet::lab {
namespace {

void resize(Batch& batch, std::int64_t sets, std::int64_t items) {
  batch.sets = sets;
  batch.items = items;
  batch.priorities.resize(static_cast<std::size_t>(sets * items));
  batch.classes.resize(static_cast<std::size_t>(sets * items));
  batch.queries.resize(static_cast<std::size_t>(sets));
  batch.targets.resize(static_cast<std::size_t>(sets));
  batch.redrawn = 0;
}

// 32 random bits, squeezed into [1 - squeeze, 1], rounded to the float that the model sees.
float draw_priority(Random& random, double squeeze) {
  return static_cast<float>(1 - squeeze * (1 - random.uniform()));
}

// One set: items, query, then whatever ties for the largest priority drawn again, but for the first, until
// nothing ties.
void draw_set(Random& random, double squeeze, std::int64_t set, Batch& batch) {
  float* priorities = batch.priorities.data() + set * batch.items;
  std::uint8_t* classes = batch.classes.data() + set * batch.items;
  for (std::int64_t i = 0; i < batch.items; ++i) {
    priorities[i] = draw_priority(random, squeeze);
    classes[i] = static_cast<std::uint8_t>(random.below(kClasses));
  }
  batch.queries[static_cast<std::size_t>(set)] = static_cast<float>(random.uniform());
  const float* largest = nullptr;
  for (bool tied = true; tied;) {
    tied = false;
    largest = std::max_element(priorities, priorities + batch.items);
    const float value = *largest;
    for (float* other = priorities + (largest - priorities) + 1; other < priorities + batch.items; ++other) {
      if (*other != value) continue;
      *other = draw_priority(random, squeeze);
      ++batch.redrawn;
      tied = true;
    }
  }
  batch.targets[static_cast<std::size_t>(set)] = classes[largest - priorities];
}

}  // namespace

void draw_training_batch(const TrainingSets& sets, std::uint64_t seed, std::uint64_t step, std::int64_t count,
                         Batch& batch) {
  Random random(seed, Stream::training, step);
  const auto sizes = static_cast<std::uint32_t>(sets.largest - sets.smallest + 1);
  resize(batch, count, sets.smallest + static_cast<std::int64_t>(random.below(sizes)));
  for (std::int64_t set = 0; set < count; ++set) {
    const double squeeze = sets.zoom > 0 ? std::pow(10.0, -sets.zoom * random.uniform()) : 1.0;
    draw_set(random, squeeze, set, batch);
  }
}

void draw_sets(std::uint64_t seed, Stream stream, std::int64_t items, std::int64_t first, std::int64_t count,
               Batch& batch) {
  resize(batch, count, items);
  for (std::int64_t set = 0; set < count; ++set) {
    const auto number = static_cast<std::uint64_t>(first + set);
    // A sum, since the largest size, 2^24, has the lowest bit of the number: no size is 0.
    Random random(seed, stream, (number << 24U) + static_cast<std::uint64_t>(items));
    draw_set(random, 1, set, batch);
  }
}

}  // namespace whet::lab
