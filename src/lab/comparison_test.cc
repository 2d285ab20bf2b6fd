// Experiments are compared on what both have, and tested only where their seeds match.
#include "lab/comparison.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

namespace whet::lab {
namespace {

using Json = nlohmann::ordered_json;

// One size; accuracies of one rule, a seed each from `first`.
Json results(int items, int first, const std::vector<double>& accuracies) {
  Json made{{"summary", Json::array()}, {"models", Json::array()}};
  double mean = 0;
  for (const double accuracy : accuracies) {
    mean += accuracy / static_cast<double>(accuracies.size());
    const Json size{{"items", items}, {"rules", {{"paper", {{"accuracy", accuracy}}}}}};
    made["models"].push_back({{"seed", first++}, {"sizes", Json::array({size})}});
  }
  made["summary"].push_back({{"items", items}, {"rules", {{"paper", {{"accuracy", mean}}}}}});
  return made;
}

TEST(Compare, PairsHeadsBySeed) {
  const Json a = results(16, 0, {0.5, 0.6, 0.7}), b = results(16, 1, {0.7, 0.9, 0.1});
  const Json comparison = compare({&a, &b});
  ASSERT_EQ(comparison.size(), 1U);
  EXPECT_EQ(comparison[0].at("seeds"), 2);
  const Json& test = comparison[0].at("sizes").at(0).at("rules").at("paper");
  EXPECT_NEAR(test.at("difference").get<double>(), 0.15, 1e-12);  // of 0.1 and 0.2, not of the third
  EXPECT_NEAR(test.at("p").get<double>(), 0.2048, 1e-4);          // t = 3, one degree of freedom
}

TEST(Compare, WithoutACommonSeedKnowsTheDifferenceOfMeansOnly) {
  const Json a = results(16, 0, {0.5}), b = results(16, 7, {0.75});
  const Json comparison = compare({&a, &b});
  EXPECT_EQ(comparison[0].at("seeds"), 0);
  const Json& test = comparison[0].at("sizes").at(0).at("rules").at("paper");
  EXPECT_EQ(test.at("difference"), 0.25);
  EXPECT_TRUE(test.at("p").is_null());
}

TEST(Compare, LeavesOutSizesThatOneLacks) {
  const Json a = results(16, 0, {0.5}), b = results(32, 0, {0.75});
  EXPECT_TRUE(compare({&a, &b})[0].at("sizes").empty());
}

}  // namespace
}  // namespace whet::lab
