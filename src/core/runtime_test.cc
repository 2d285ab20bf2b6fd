#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <whet/error.h>
#include <whet/runtime.h>
#include <whet/softmax.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/softmax/softmax.h"
#include "targets.h"

namespace whet {
namespace {

TEST(Runtime, ListsTargetsBestFirstAndRunsTheBest) {
  const std::vector<std::string> names = targets();
  ASSERT_FALSE(names.empty());
  if (std::getenv("WHET_TARGET") == nullptr) {
    force_target("");
    EXPECT_EQ(target(), names.front());
  }
}

// The kernels' own word, from inside the code compiled for the target.
TEST(Runtime, TheForcedTargetIsTheOneThatRuns) {
  for_each_target([] {
    EXPECT_EQ(hwy::TargetName(kernels::softmax_target()), target());
    const float x[2] = {0, 0};
    float w[2] = {};
    softmax({x, {2}}, {w, {2}});
    EXPECT_EQ(w[0], 0.5F);
  });
}

TEST(Runtime, TheEnvironmentForcesATargetToo) {
  const char* before = std::getenv("WHET_TARGET");
  const std::string saved = before == nullptr ? "" : before;
  for (const std::string& name : targets()) {
    ASSERT_EQ(setenv("WHET_TARGET", name.c_str(), 1), 0);
    force_target("");
    EXPECT_EQ(hwy::TargetName(kernels::softmax_target()), name);
  }
  ASSERT_EQ(setenv("WHET_TARGET", "AVX9000", 1), 0);
  EXPECT_THROW(force_target(""), Error);
  ASSERT_EQ(setenv("WHET_TARGET", saved.c_str(), 1), 0);
  force_target("");
}

TEST(Runtime, RefusesAnUnknownTargetByName) {
  const std::string before = target();
  try {
    force_target("AVX9000");
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("AVX9000"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find(targets().front()), std::string::npos);
  }
  EXPECT_EQ(target(), before);
}

TEST(Runtime, ThreadsHaveADefaultAndARange) {
  EXPECT_GE(threads(), 1);
  set_threads(3);
  EXPECT_EQ(threads(), 3);
  set_threads(0);
  EXPECT_GE(threads(), 1);
  EXPECT_THROW(set_threads(-1), Error);
  EXPECT_THROW(set_threads(1025), Error);
}

}  // namespace
}  // namespace whet
