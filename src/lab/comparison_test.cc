// Experiments are compared on what both have, and tested only where their seeds match.
#include "lab/comparison.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace whet::lab {
namespace {

// One size; accuracies of one rule, a seed each from `first`.
results::Reproduction run(std::int64_t items, std::uint64_t first, const std::vector<double>& accuracies) {
  results::Reproduction run;
  double mean = 0;
  for (const double accuracy : accuracies) {
    mean += accuracy / static_cast<double>(accuracies.size());
    results::Size size{.items = items};
    size.rules.set("paper", {.accuracy = accuracy});
    results::Model& model = run.models.emplace_back();
    model.seed = first++;
    model.sizes = {size};
  }
  run.summary = {{.items = items, .sets = 1}};
  run.summary[0].rules.set("paper", {.accuracy = mean});
  return run;
}

TEST(Compare, PairsHeadsBySeed) {
  const results::Reproduction a = run(16, 0, {0.5, 0.6, 0.7}), b = run(16, 1, {0.7, 0.9, 0.1});
  const std::vector<results::Comparison> comparisons = compare({&a, &b});
  ASSERT_EQ(comparisons.size(), 1U);
  EXPECT_EQ(comparisons[0].seeds, 2);
  const results::Difference& test = *comparisons[0].sizes.at(0).rules.find("paper");
  EXPECT_NEAR(test.difference, 0.15, 1e-12);  // of 0.1 and 0.2, not of the third
  EXPECT_NEAR(test.p, 0.2048, 1e-4);          // t = 3, one degree of freedom
}

TEST(Compare, WithoutACommonSeedKnowsTheDifferenceOfMeansOnly) {
  const results::Reproduction a = run(16, 0, {0.5}), b = run(16, 7, {0.75});
  const std::vector<results::Comparison> comparisons = compare({&a, &b});
  EXPECT_EQ(comparisons[0].seeds, 0);
  const results::Difference& test = *comparisons[0].sizes.at(0).rules.find("paper");
  EXPECT_EQ(test.difference, 0.25);
  EXPECT_TRUE(std::isnan(test.p));
}

TEST(Compare, LeavesOutSizesThatOneLacks) {
  const results::Reproduction a = run(16, 0, {0.5}), b = run(32, 0, {0.75});
  EXPECT_TRUE(compare({&a, &b})[0].sizes.empty());
}

}  // namespace
}  // namespace whet::lab
