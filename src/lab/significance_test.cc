// Expected numbers are those of scipy 1.17: scipy.stats.ttest_rel(a, b) and its confidence_interval(), and
// numpy's std(ddof=1). The cases of two and three pairs can be checked by hand.
#include "lab/significance.h"

#include <gtest/gtest.h>
#include <whet/error.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace whet::lab {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string error_of(const std::vector<double>& a, const std::vector<double>& b) {
  try {
    paired_test(a, b);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Summary, DividesByCountMinusOne) {
  const Summary s = summarize(std::vector<double>{1, 2, 3, 4});
  EXPECT_EQ(s.count, 4U);
  EXPECT_EQ(s.mean, 2.5);
  EXPECT_DOUBLE_EQ(s.deviation, std::sqrt(5.0 / 3));
}

TEST(Summary, KeepsDigitsFarFromZero) {
  const Summary s = summarize(std::vector<double>{1e9 + 1, 1e9 + 2, 1e9 + 3, 1e9 + 4});
  EXPECT_DOUBLE_EQ(s.deviation, std::sqrt(5.0 / 3));
}

TEST(Summary, OfEqualValuesHasNoDeviation) {
  const Summary s = summarize(std::vector<double>(10, 0.1));
  EXPECT_EQ(s.mean, 0.1);
  EXPECT_EQ(s.deviation, 0);
}

TEST(Summary, OfOneValueHasNoKnownDeviation) {
  const Summary s = summarize(std::vector<double>{7});
  EXPECT_EQ(s.mean, 7);
  EXPECT_TRUE(std::isnan(s.deviation));
}

TEST(Summary, RefusesNothingAndNonsense) {
  EXPECT_THROW(summarize({}), Error);
  EXPECT_THROW(summarize(std::vector<double>{1, kInfinity}), Error);
}

TEST(PairedTest, TenSeeds) {
  const PairedTest r =
      paired_test(std::vector{82.5, 81.25, 80.0, 83.75, 79.5, 82.0, 81.5, 84.0, 80.25, 82.75},
                  std::vector{81.25, 80.5, 80.25, 82.0, 79.0, 80.5, 81.75, 82.25, 79.75, 81.0});
  EXPECT_EQ(r.pairs, 10U);
  EXPECT_NEAR(r.mean, 0.925, 1e-14);
  EXPECT_NEAR(r.deviation, 0.7910084983389525, 1e-14);
  EXPECT_NEAR(r.t, 3.6979461558228706, 1e-13);
  EXPECT_NEAR(r.p, 0.004936238210527324, 1e-15);
  EXPECT_NEAR(r.low, 0.35914660803174536, 1e-13);
  EXPECT_NEAR(r.high, 1.4908533919682547, 1e-13);
}

TEST(PairedTest, FiveSeedsThatDecideNothing) {
  const PairedTest r = paired_test(std::vector{30.02, 29.99, 30.11, 29.97, 30.01},
                                   std::vector{29.89, 29.93, 29.72, 29.98, 30.02});
  EXPECT_NEAR(r.p, 0.20563995895071058, 1e-12);
  EXPECT_NEAR(r.low, -0.09398154143432672, 1e-12);
  EXPECT_NEAR(r.high, 0.3179815414343262, 1e-12);
}

// One degree of freedom is the Cauchy distribution: p = 1 - (2 / pi) atan(2).
TEST(PairedTest, TwoPairsAndANegativeDifference) {
  const PairedTest r = paired_test(std::vector{0.0, 0.0}, std::vector{1.0, 3.0});
  EXPECT_EQ(r.mean, -2);
  EXPECT_NEAR(r.t, -2, 1e-14);
  EXPECT_NEAR(r.p, 0.2951672353008665, 1e-14);
  EXPECT_NEAR(r.low, -14.706204736174694, 1e-11);
  EXPECT_NEAR(r.high, 10.706204736174694, 1e-11);
}

TEST(PairedTest, DifferencesThatCancel) {
  const PairedTest r = paired_test(std::vector{5.0, 6.0, 7.0}, std::vector{7.0, 6.0, 5.0});
  EXPECT_EQ(r.t, 0);
  EXPECT_NEAR(r.p, 1, 1e-15);
  EXPECT_NEAR(r.high, 4.96827542350066, 1e-12);
  EXPECT_EQ(r.low, -r.high);
}

TEST(PairedTest, OnePairSaysNothing) {
  const PairedTest r = paired_test(std::vector{1.0}, std::vector{2.0});
  EXPECT_EQ(r.mean, -1);
  for (const double value : {r.deviation, r.t, r.p, r.low, r.high}) EXPECT_TRUE(std::isnan(value));
}

TEST(PairedTest, TheSameDifferenceEverywhereLeavesNoDoubt) {
  const PairedTest r = paired_test(std::vector{1.0, 2.0, 3.0}, std::vector{2.5, 3.5, 4.5});
  EXPECT_EQ(r.t, -kInfinity);
  EXPECT_EQ(r.p, 0);
  EXPECT_EQ(r.low, -1.5);
  EXPECT_EQ(r.high, -1.5);
}

TEST(PairedTest, NoDifferenceAnywhereIsUndecided) {
  const PairedTest r = paired_test(std::vector{0.5, 0.25}, std::vector{0.5, 0.25});
  EXPECT_TRUE(std::isnan(r.t));
  EXPECT_TRUE(std::isnan(r.p));
  EXPECT_EQ(r.low, 0);
  EXPECT_EQ(r.high, 0);
}

TEST(PairedTest, ErrorsNameTheArgument) {
  EXPECT_EQ(error_of({1, 2}, {1}), "b: has 1 values, must have as many as a, 2");
  EXPECT_EQ(error_of({}, {}), "a: is empty, must hold at least one value");
  EXPECT_EQ(error_of({1, 2}, {1, kInfinity}), "b: value 1 is inf, must be finite");
}

}  // namespace
}  // namespace whet::lab
