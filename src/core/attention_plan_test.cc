// The cut of a call into tasks: a pure function, so its promises can be asked of many shapes.
#include "core/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace whet::core {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

template <typename Body>
void for_each_input(const Body& body) {
  for (const std::int64_t units : {0, 1, 3, 8, 512}) {
    for (const std::int64_t rows : {0, 1, 6, 16, 17, 47, 48, 49, 512, 4096, 131072}) {
      for (const std::int64_t keys : {0, 1, 255, 512, 4096, 8192, 131072}) {
        for (const std::int64_t cache : {256 << 10, 512 << 10, 2 << 20}) {
          for (const int threads : {1, 2, 7}) {
            const PlanInput in{units, rows, keys, 64, 64, 4, cache, threads};
            SCOPED_TRACE(testing::Message() << units << " units, " << rows << " rows, " << keys
                                            << " keys, cache " << cache << ", threads " << threads);
            body(in);
          }
        }
      }
    }
  }
}

TEST(AttentionPlan, CoversAllRowsAndKeysInWholeStrips) {
  for_each_input([](const PlanInput& in) {
    const AttentionPlan plan = forward_plan(in);
    EXPECT_EQ(plan.few, in.rows <= kFewRows);
    EXPECT_LE(plan.wave, in.units);
    if (in.units > 0) {
      EXPECT_GE(plan.wave, 1);
    }
    if (plan.few) {
      EXPECT_GE(plan.blocks * kChunkKeys, in.keys);
      EXPECT_LT((plan.blocks - 1) * kChunkKeys, std::max<std::int64_t>(in.keys, 1));
      return;
    }
    EXPECT_EQ(plan.block_rows % kBlockStep, 0);
    EXPECT_GE(plan.block_rows, kBlockStep);
    EXPECT_LE(plan.block_rows, kMaxBlockRows);
    EXPECT_GE(plan.blocks * plan.block_rows, in.rows);
    EXPECT_LT((plan.blocks - 1) * plan.block_rows, in.rows);
  });
}

TEST(AttentionPlan, KeepsScratchSmall) {
  for_each_input([](const PlanInput& in) {
    const AttentionPlan plan = forward_plan(in);
    const std::int64_t packed = in.key_size + (plan.packs_values ? in.value_size : 0);
    const std::int64_t wave = plan.wave * in.keys * 4 * (plan.few ? in.rows : packed);
    if (plan.wave > 1 || plan.packs_values) {
      EXPECT_LE(wave, 32 * kMiB);
    }
    const std::int64_t logits = plan.few ? 0 : in.threads * plan.block_rows * in.keys * 4;
    if (plan.block_rows > kBlockStep) {
      EXPECT_LE(logits, std::max(24 * kMiB, in.threads * in.cache_bytes));
    }
  });
}

TEST(AttentionPlan, TakesMoreRowsWhereTheyFitTheCache) {
  const auto rows = [](std::int64_t keys, std::int64_t cache) {
    return forward_plan({8, 131072, keys, 64, 64, 4, cache, 1}).block_rows;
  };
  EXPECT_EQ(rows(512, 512 << 10), kMaxBlockRows);
  EXPECT_GE(rows(4096, 2 << 20), rows(4096, 256 << 10));
  EXPECT_GE(rows(1024, 256 << 10), rows(131072, 256 << 10));
}

TEST(AttentionPlan, PacksValuesUnlessTheyAreTooLarge) {
  const auto packs = [](std::int64_t keys) {
    return forward_plan({1, 4096, keys, 64, 64, 4, 512 << 10, 1}).packs_values;
  };
  EXPECT_TRUE(packs(4096));
  EXPECT_TRUE(packs(65536));
  EXPECT_FALSE(packs(131072));
}

TEST(AttentionPlan, BackwardDoesNotLookAtThreads) {
  for_each_input([](const PlanInput& in) {
    PlanInput other = in;
    other.threads = 5;
    const BackwardPlan a = backward_plan(in), b = backward_plan(other);
    EXPECT_EQ(a.block_rows, b.block_rows);
    EXPECT_EQ(a.parts, b.parts);
    EXPECT_EQ(a.block_rows % kBlockStep, 0);
    EXPECT_LE(a.block_rows, kMaxBlockRows);
    EXPECT_GE(a.parts, 1);
    // A part has rows of its own.
    EXPECT_LE((a.parts - 1) * a.block_rows, std::max<std::int64_t>(in.rows, 0));
  });
}

TEST(AttentionPlan, BackwardCutsFewUnitsIntoParts) {
  const auto parts = [](std::int64_t units, std::int64_t keys) {
    return backward_plan({units, 4096, keys, 64, 64, 4, 512 << 10, 1}).parts;
  };
  EXPECT_EQ(parts(8, 4096), 1);
  EXPECT_GT(parts(1, 4096), 1);
  EXPECT_EQ(parts(1, std::int64_t{1} << 22), 1);  // their sums would be too large
}

TEST(AttentionPlan, SizesThatNobodyHasDoNotOverflow) {
  const PlanInput huge{
      std::int64_t{1} << 40, std::int64_t{1} << 40, std::int64_t{1} << 60, 256, 256, 8, 512 << 10, 1024};
  EXPECT_EQ(forward_plan(huge).block_rows, kBlockStep);
  EXPECT_EQ(forward_plan(huge).wave, 1);
  EXPECT_FALSE(forward_plan(huge).packs_values);
  EXPECT_EQ(backward_plan(huge).parts, 1);
}

TEST(AttentionPlan, WakesNobodyForLittleWork) {
  const auto threads = [](std::int64_t units, std::int64_t rows, std::int64_t keys) {
    return useful_threads({units, rows, keys, 64, 64, 4, 512 << 10, 1});
  };
  EXPECT_EQ(threads(0, 0, 0), 1);
  EXPECT_EQ(threads(2, 4, 4), 1);
  EXPECT_GE(threads(3, 3, 8192), 8);
  EXPECT_EQ(threads(std::int64_t{1} << 40, std::int64_t{1} << 40, std::int64_t{1} << 60), 1024);
}

TEST(AttentionPlan, KnowsSomeCache) { EXPECT_GE(cache_bytes(), 64 << 10); }

}  // namespace
}  // namespace whet::core
