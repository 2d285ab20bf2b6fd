// The random numbers, and the sets drawn from them.
#include "lab/task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "lab/random.h"

namespace whet::lab {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Philox 4x32-10, written from its paper.
Words philox(Words counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<std::uint32_t>(second >> 32U) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(second),
        static_cast<std::uint32_t>(first >> 32U) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(first)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

Words next_words(Random& random) {
  Words words{};
  for (std::uint32_t& word : words) word = random.bits();
  return words;
}

TEST(Random, HasTheKnownAnswersOfPhilox) {
  Random random(0, Stream::weights, 0);
  EXPECT_EQ(next_words(random), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  // The other known answers begin at counters that Random doesn't: they are for the function above.
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The counter is (block, stream, draw, draw >> 32), the key the seed: saved runs depend on it.
TEST(Random, CountsBlocksStreamsAndDraws) {
  const std::uint64_t seed = 0x0123456789abcdef, draw = 0xfedcba9876543210;
  for (const Stream stream : {Stream::weights, Stream::training, Stream::evaluation, Stream::fit,
                              Stream::calibration, Stream::theorem}) {
    Random random(seed, stream, draw);
    for (std::uint32_t block = 0; block < 3; ++block) {
      EXPECT_EQ(next_words(random),
                philox({block, static_cast<std::uint32_t>(stream), 0x76543210, 0xfedcba98},
                       {0x89abcdef, 0x01234567}));
    }
  }
}

// Five standard deviations of a share p of n.
double spread(double p, double n) { return 5 * std::sqrt(p * (1 - p) / n); }

TEST(Random, BelowIsInRangeAndEven) {
  constexpr int kDraws = 50'000;
  for (const std::uint32_t bound : {1U, 2U, 10U, 12U, 1000U}) {
    Random random(1, Stream::fit, bound);
    std::vector<int> counts(bound, 0);
    for (int i = 0; i < kDraws; ++i) {
      const std::uint32_t value = random.below(bound);
      ASSERT_LT(value, bound);
      ++counts[value];
    }
    const double share = 1.0 / bound;
    for (std::uint32_t value = 0; value < bound; ++value) {
      EXPECT_NEAR(counts[value] / double{kDraws}, share, spread(share, kDraws)) << value << " of " << bound;
    }
  }
}

// Of 2^32 numbers on 3 * 2^30 places a third gets two: without rejection every third place comes up half the
// time.
TEST(Random, BelowHasNoBiasForLargeBounds) {
  constexpr int kDraws = 30'000;
  Random random(2, Stream::fit, 0);
  std::array<int, 3> counts{};
  for (int i = 0; i < kDraws; ++i) {
    const std::uint32_t value = random.below(3U << 30U);
    ASSERT_LT(value, 3U << 30U);
    ++counts[value % 3];
  }
  for (const int count : counts) EXPECT_NEAR(count / double{kDraws}, 1.0 / 3, spread(1.0 / 3, kDraws));
}

TEST(Random, UniformIsTheMiddleOfItsCell) {
  Random random(3, Stream::fit, 0), twin(3, Stream::fit, 0);
  constexpr int kDraws = 50'000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double value = random.uniform();
    ASSERT_EQ(value, (twin.bits() + 0.5) / 4294967296.0);
    ASSERT_GT(value, 0);
    ASSERT_LT(value, 1);
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * std::sqrt(1.0 / 12 / kDraws));
  EXPECT_NEAR(squares / kDraws, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / kDraws));
}

// What holds for every batch: one largest priority a set, the target its class, everything in range.
void expect_valid(const Batch& batch) {
  ASSERT_EQ(batch.priorities.size(), static_cast<std::size_t>(batch.sets * batch.items));
  ASSERT_EQ(batch.classes.size(), batch.priorities.size());
  ASSERT_EQ(batch.queries.size(), static_cast<std::size_t>(batch.sets));
  ASSERT_EQ(batch.targets.size(), static_cast<std::size_t>(batch.sets));
  for (std::int64_t set = 0; set < batch.sets; ++set) {
    const auto begin = batch.priorities.begin() + set * batch.items, end = begin + batch.items;
    const auto largest = std::max_element(begin, end);
    ASSERT_EQ(std::count(begin, end, *largest), 1) << "set " << set;
    ASSERT_EQ(batch.targets[static_cast<std::size_t>(set)],
              batch.classes[static_cast<std::size_t>(largest - batch.priorities.begin())])
        << "set " << set;
    ASSERT_GT(*std::min_element(begin, end), 0);
    ASSERT_LE(*largest, 1);
  }
  for (const std::uint8_t c : batch.classes) ASSERT_LT(c, kClasses);
  for (const float query : batch.queries) ASSERT_TRUE(query > 0 && query <= 1);
}

void expect_same(const Batch& a, const Batch& b) {
  EXPECT_EQ(a.sets, b.sets);
  EXPECT_EQ(a.items, b.items);
  EXPECT_EQ(a.priorities, b.priorities);
  EXPECT_EQ(a.classes, b.classes);
  EXPECT_EQ(a.queries, b.queries);
  EXPECT_EQ(a.targets, b.targets);
  EXPECT_EQ(a.redrawn, b.redrawn);
}

Batch training_batch(const TrainingSets& sets, std::uint64_t seed, std::uint64_t step, std::int64_t count) {
  Batch batch;
  draw_training_batch(sets, seed, step, count, batch);
  return batch;
}

TEST(TrainingBatch, HasEverySizeOfItsRangeEvenly) {
  constexpr int kSteps = 6000;
  std::vector<int> counts(32, 0);
  std::array<int, kClasses> targets{};
  Batch batch;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    draw_training_batch({}, 4, step, 3, batch);
    ASSERT_NO_FATAL_FAILURE(expect_valid(batch));
    ASSERT_TRUE(batch.items >= 5 && batch.items <= 16) << batch.items;
    ++counts[static_cast<std::size_t>(batch.items)];
    ++targets[batch.targets[0]];
  }
  for (std::size_t items = 5; items <= 16; ++items) {
    EXPECT_NEAR(counts[items] / double{kSteps}, 1.0 / 12, spread(1.0 / 12, kSteps)) << items << " items";
  }
  for (const int count : targets) EXPECT_NEAR(count / double{kSteps}, 0.1, spread(0.1, kSteps));
  EXPECT_EQ(training_batch({.smallest = 7, .largest = 7}, 4, 0, 3).items, 7);
}

TEST(TrainingBatch, IsAFunctionOfSeedAndStep) {
  const Batch batch = training_batch({.zoom = 2}, 5, 77, 16);
  Batch again = training_batch({.zoom = 2}, 6, 78, 40);
  draw_training_batch({.zoom = 2}, 5, 77, 16, again);
  expect_same(batch, again);
  EXPECT_NE(batch.priorities, training_batch({.zoom = 2}, 5, 78, 16).priorities);
  EXPECT_NE(batch.priorities, training_batch({.zoom = 2}, 6, 77, 16).priorities);
}

// log10 of the width ~ U(-4, 0): a quarter of the sets lies within 1e-3 of 1, a quarter reaches below 0.9.
TEST(TrainingBatch, ZoomSqueezesSetsTowardsOne) {
  constexpr int kSets = 4000;
  const Batch batch = training_batch({.smallest = 200, .largest = 200, .zoom = 4}, 7, 0, kSets);
  ASSERT_NO_FATAL_FAILURE(expect_valid(batch));
  std::array<int, 4> decades{};
  for (std::int64_t set = 0; set < kSets; ++set) {
    const auto begin = batch.priorities.begin() + set * batch.items;
    // Of 200 items the lowest is a few thousandths of the width short of the end.
    const double width = 1 - static_cast<double>(*std::min_element(begin, begin + batch.items));
    ASSERT_GT(width, 0.9e-4) << "set " << set;
    ++decades[static_cast<std::size_t>(std::clamp(-std::floor(std::log10(width)), 1.0, 4.0)) - 1];
  }
  for (const int count : decades) EXPECT_NEAR(count / double{kSets}, 0.25, spread(0.25, kSets) + 0.005);
}

TEST(TrainingBatch, WithoutZoomFillsTheUnitInterval) {
  const Batch batch = training_batch({.smallest = 16, .largest = 16}, 8, 0, 2000);
  std::array<int, 10> tenths{};
  for (const float p : batch.priorities) ++tenths[static_cast<std::size_t>(std::min(p * 10, 9.0F))];
  for (const int count : tenths) EXPECT_NEAR(count / 32000.0, 0.1, spread(0.1, 32000));
}

// At seven decades only two or three floats are left, and nearly every set ties at first.
TEST(TrainingBatch, HasNoTiesWhereFloatsRunOut) {
  const Batch batch = training_batch({.smallest = 16, .largest = 16, .zoom = 7}, 9, 0, 500);
  ASSERT_NO_FATAL_FAILURE(expect_valid(batch));
  EXPECT_GT(batch.redrawn, 0);
}

Batch sets_of(std::uint64_t seed, Stream stream, std::int64_t items, std::int64_t first, std::int64_t count) {
  Batch batch;
  draw_sets(seed, stream, items, first, count, batch);
  return batch;
}

TEST(Sets, DontDependOnHowTheyAreSplit) {
  const std::int64_t items = 37;
  const Batch whole = sets_of(10, Stream::evaluation, items, 100, 12);
  ASSERT_NO_FATAL_FAILURE(expect_valid(whole));
  Batch part;
  for (const std::int64_t step : {1, 5, 12}) {
    for (std::int64_t first = 0; first < 12; first += step) {
      const std::int64_t count = std::min<std::int64_t>(step, 12 - first);
      draw_sets(10, Stream::evaluation, items, 100 + first, count, part);
      for (std::int64_t i = 0; i < count; ++i) {
        const auto set = static_cast<std::size_t>(first + i), own = static_cast<std::size_t>(i);
        EXPECT_EQ(part.queries[own], whole.queries[set]);
        EXPECT_EQ(part.targets[own], whole.targets[set]);
      }
      EXPECT_TRUE(std::equal(part.priorities.begin(), part.priorities.end(),
                             whole.priorities.begin() + first * items));
      EXPECT_TRUE(
          std::equal(part.classes.begin(), part.classes.end(), whole.classes.begin() + first * items));
    }
  }
}

// The query comes after the items, so that a longer set would show the same first priority if its numbers
// were shared.
TEST(Sets, DifferBySeedStreamSizeAndNumber) {
  std::set<float> first;
  int drawn = 0;
  for (const std::uint64_t seed : {11U, 12U}) {
    for (const Stream stream : {Stream::training, Stream::evaluation, Stream::fit, Stream::calibration}) {
      for (const std::int64_t items : {1, 2, 16, 17, 4096}) {
        for (const std::int64_t number : {0, 1, 2, 1'000'000}) {
          first.insert(sets_of(seed, stream, items, number, 1).priorities[0]);
          ++drawn;
        }
      }
    }
  }
  EXPECT_EQ(first.size(), static_cast<std::size_t>(drawn));
}

// The largest size that commands take needs one bit more than the smaller ones.
TEST(Sets, DifferByNumberAtTheLargestSize) {
  const std::int64_t items = 1 << 24;
  const float second = sets_of(13, Stream::evaluation, items, 1, 1).priorities[0];
  EXPECT_NE(sets_of(13, Stream::evaluation, items, 0, 1).priorities[0], second);
}

// Among a million priorities the largest are a few steps of float below 1. Set 4 of this seed ties there, 0
// doesn't.
TEST(Sets, DrawAgainWhatTiesForTheLargest) {
  const std::int64_t items = 1 << 20;
  EXPECT_EQ(sets_of(14, Stream::evaluation, items, 0, 1).redrawn, 0);
  const std::int64_t number = 74;
  const Batch batch = sets_of(14, Stream::evaluation, items, number, 1);
  ASSERT_NO_FATAL_FAILURE(expect_valid(batch));

  Random random(14, Stream::evaluation, (static_cast<std::uint64_t>(number) << 24U) + (1U << 20U));
  std::vector<float> priorities;
  for (std::int64_t i = 0; i < items; ++i) {
    priorities.push_back(static_cast<float>(random.uniform()));
    ASSERT_EQ(batch.classes[static_cast<std::size_t>(i)], random.below(kClasses)) << "item " << i;
  }
  EXPECT_EQ(batch.queries[0], static_cast<float>(random.uniform()));
  const float largest = *std::max_element(priorities.begin(), priorities.end());
  std::int64_t ties = 0;
  for (std::size_t i = 0; i < priorities.size(); ++i) {
    if (priorities[i] == largest && ties++ > 0) {
      EXPECT_EQ(batch.priorities[i], static_cast<float>(random.uniform())) << "item " << i;
    } else {
      ASSERT_EQ(batch.priorities[i], priorities[i]) << "item " << i;
    }
  }
  EXPECT_GE(ties, 2);
  EXPECT_EQ(batch.redrawn, ties - 1);
}

}  // namespace
}  // namespace whet::lab
