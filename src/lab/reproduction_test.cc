// Studies of heads that leave something out.
#include "lab/reproduction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "lab/model.h"
#include "lab/trainer.h"

namespace whet::lab {
namespace {

// An untrained head whose logits are so far apart that every row has one weight of 1.
Run sharp_run() {
  const Recipe recipe{.steps = 1};
  Run run;
  run.recipe = recipe;
  run.parameters = initial_state(recipe).parameters;
  const Layer& queries = kModel[kQ];
  const auto kernel = std::span(run.parameters)
                          .subspan(static_cast<std::size_t>(queries.kernel),
                                   static_cast<std::size_t>(queries.in * queries.out));
  for (float& weight : kernel) weight *= 1e9F;
  return run;
}

StudyOptions small_options() {
  StudyOptions options;
  options.sizes = {16, 64};
  options.sets = 8;
  options.calibrate = false;
  options.threads = 1;
  return options;
}

TEST(Study, OfAHeadWhoseEntropiesAreAllZeroLeavesTheFitOut) {
  const Study study = study_of(sharp_run(), small_options());
  ASSERT_GE(study.points.size(), kFewestPoints);
  ASSERT_TRUE(std::ranges::all_of(study.points, [](const FitPoint& p) { return p.entropy == 0; }));
  EXPECT_TRUE(study.fit.coefficients.empty());
  for (const NamedWeighting& n : study.weightings) EXPECT_NE(n.name, "refit");
}

TEST(Study, OfSuchAHeadHasResults) {
  const ProgressListener nobody{.begin = [](const std::string&, std::int64_t, std::int64_t) {},
                                .advance = [](std::int64_t) {},
                                .end = [] {}};
  const results::Reproduction results = study({sharp_run()}, small_options(), {}, nobody);
  EXPECT_FALSE(results.models.at(0).fit);
  EXPECT_NE(results.summary.at(1).rules.find("hard"), nullptr);
  EXPECT_EQ(results.summary.at(1).rules.find("refit"), nullptr);
}

}  // namespace
}  // namespace whet::lab
