#include "kernels/row/normalizers.h"

#include <gtest/gtest.h>
#include <whet/error.h>
#include <whet/normalizer.h>

#include <string>

namespace whet {
namespace {

constexpr core::NormalizerEntry kTable[] = {{"first"},
                                            {"power", core::ParameterRange{.above = 1, .most = 2}},
                                            {"top", core::ParameterRange{.whole = true}}};

std::string error_of(std::string_view name) {
  try {
    core::parse_normalizer(name, kTable);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Normalizer, IsSoftmaxByDefault) {
  EXPECT_EQ(Normalizer().name(), "softmax");
  EXPECT_EQ(Normalizer::parse("softmax"), Normalizer());
}

TEST(Normalizer, AllNamesOfTheTableDiffer) {
  for (const core::NormalizerEntry& a : kernels::normalizers()) {
    for (const core::NormalizerEntry& b : kernels::normalizers()) EXPECT_EQ(&a == &b, a.name == b.name);
  }
}

TEST(Normalizer, UnknownNamesAreRefusedWithAListOfTheKnown) {
  for (const char* name : {"", "soft", "softmax ", "Softmax", "softmax:", "softmax:1", ":1"}) {
    try {
      Normalizer::parse(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what())
                      .starts_with("normalizer: '" + std::string(name) +
                                   "' is not a normalizer; normalizers are softmax"))
          << error.what();
    }
  }
}

TEST(NormalizerTable, ParametersAreReadAndWritten) {
  for (const char* name : {"first", "power:1.3", "power:2", "power:1.0000000000000002", "top:32"}) {
    EXPECT_EQ(core::normalizer_name(core::parse_normalizer(name, kTable), kTable), name);
  }
  EXPECT_EQ(core::parse_normalizer("top:32", kTable).index, 2);
  EXPECT_EQ(core::parse_normalizer("top:32", kTable).parameter, 32);
}

TEST(NormalizerTable, ParametersOutsideTheirRangeAreRefused) {
  EXPECT_EQ(error_of("power:1"),
            "normalizer: the parameter of power is '1', must be a number above 1 and at most 2");
  EXPECT_EQ(error_of("top:1.5"), "normalizer: the parameter of top is '1.5', must be a whole number above 0");
  for (const char* name :
       {"power:", "power:nan", "power:2.1", "power:1.5x", "power:1.5:", "top:inf", "top:0", "top:-1"}) {
    EXPECT_TRUE(error_of(name).starts_with("normalizer: the parameter of "))
        << name << ": " << error_of(name);
  }
  EXPECT_EQ(error_of("power"),
            "normalizer: 'power' is not a normalizer; normalizers are first, power:P, top:P");
}

}  // namespace
}  // namespace whet
