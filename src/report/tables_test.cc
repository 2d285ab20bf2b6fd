// Tables say what results.json says, also where it says little.
#include "report/tables.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "report/table.h"
#include "results_example.h"

namespace whet::report {
namespace {

using results::example;

TEST(Table, PadsByCharactersNotBytes) {
  Table table({"a", "β"});
  table.add({"100 ±2", "x"});
  EXPECT_EQ(table.text(),
            "|      a | β |\n"
            "|-------:|--:|\n"
            "| 100 ±2 | x |\n");
}

TEST(Table, KeepsACellOneCell) {
  Table table({"a|b", "c"});
  table.add({"d\\|e", "f\n\xff"});
  EXPECT_EQ(table.text(),
            "|   a\\|b |         c |\n"
            "|-------:|----------:|\n"
            "| d\\\\\\|e | f\\x0a\\xff |\n");
}

TEST(Fixed, HasNoSignForZero) {
  EXPECT_EQ(fixed(-0.4, 0), "0");
  EXPECT_EQ(fixed(-0.0, 1), "0.0");
  EXPECT_EQ(fixed(-0.6, 0), "-1");
  EXPECT_EQ(fixed(-0.05, 2), "-0.05");
  EXPECT_EQ(fixed(1e308, 1).size(), 311U);
}

TEST(Tables, SayWhatTheResultsSay) {
  const std::string text = markdown_tables(example(0.0123, 2e-4));
  EXPECT_NE(text.find("|    64 | 50.0 ±1.2 | 62.5 ±1.2 |      75.0 ±1.2 | 80.0 ±1.2 |"), text.npos) << text;
  EXPECT_NE(text.find("| 50.0 ±1.2 |    94.3 | 62.5 ±1.2 |    94.5 | 0.0002 |       - |"), text.npos) << text;
  // Lost to misranking, as predicted, to dispersion under two rules, and the interval of the last.
  EXPECT_NE(text.find("20.0 |            18.0 |                30.0 |  17.5 |     -1.23 [-2.00, -0.50]"),
            text.npos)
      << text;
  EXPECT_NE(text.find(" 0.125 1.50 25% |"), text.npos) << text;
  EXPECT_NE(text.find("|    3 |   100 | 100.0 |             0.2500 |           400 |         0.0625 |        "
                      "     - |  - |"),
            text.npos)
      << text;
}

TEST(Tables, OfOneSeedHaveNeitherDeviationNorPValue) {
  const std::string text = markdown_tables(example());
  EXPECT_NE(text.find("|    64 |    50.0 |  62.5 |           75.0 | 80.0 |"), text.npos) << text;
  EXPECT_EQ(text.find("nan"), text.npos) << text;
}

TEST(Tables, OfResultsWithHolesSayNothingThere) {
  results::Reproduction some = example();
  some.summary[0].rules = {};
  some.summary[0].rules.set("paper", {.accuracy = NAN, .deviation = NAN});
  some.models[0].sizes[0].rules = {};
  some.models[0].rules.set("target_entropy", "target-entropy:x");
  const std::string text = markdown_tables(some);
  EXPECT_NE(text.find("|    64 |     - |\n"), text.npos) << text;
  some.models[0].sizes.clear();
  EXPECT_NE(markdown_tables(some), text);
}

TEST(Tables, RankRunsAsTheyWereTrained) {
  results::Reproduction plain = example(), sparse = example(), worse = example();
  for (auto& [run, accuracy] : {std::pair(&sparse, 0.7), std::pair(&worse, 0.3)}) {
    run->summary[0].rules.set("trained", {.accuracy = accuracy, .deviation = NAN});
  }
  worse.models[0].diagnosis.resolution = NAN;
  worse.summary[0].rules.set("hard", {.accuracy = NAN, .deviation = NAN});
  worse.models[0].did_not_learn = "it did not";
  sparse.models[0].sizes[0].ranked = 0.75;
  const std::string text = markdown_comparison({{"worse", worse}, {"plain", plain}, {"sparse", sparse}}, {});
  EXPECT_EQ(
      text,
      "## Runs ranked as they were trained, % of sets; the last columns at 64 items\n\n"
      "|    run |          heads |   64 | ceiling | lost to dispersion | lost to misranking | median n* |\n"
      "|-------:|---------------:|-----:|--------:|-------------------:|-------------------:|----------:|\n"
      "| sparse |              1 | 70.0 |    75.0 |                5.0 |               25.0 |       400 |\n"
      "|  plain |              1 | 50.0 |    80.0 |               30.0 |               20.0 |       400 |\n"
      "|  worse | 0 of 1 learned | 30.0 |       - |                  - |                  - |         - |\n");
}

TEST(Tables, CsvQuotesNames) {
  results::Reproduction some = example();
  some.models[0].sizes[0].rules = {};
  some.models[0].sizes[0].rules.set("polynomial:a \"b\",\\c", {0.5, 1.5, 0.25, 0.125, 0.75});
  EXPECT_EQ(csv_table(some),
            "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n"
            "3,64,10,\"polynomial:a \"\"b\"\",\\c\",0.5,1.5,0.25,0.125,0.75\n");
}

TEST(Tables, CsvHasALineForEverything) {
  EXPECT_EQ(csv_table(example()),
            "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n"
            "3,64,10,\"softmax\",0.5,1.5,0.25,0.125,0.75\n"
            "3,64,10,\"paper\",0.6255,1.5,0.25,0.125,0.75\n"
            "3,64,10,\"target_entropy\",0.75,1.5,0.25,0.125,0.75\n"
            "3,64,10,\"hard\",0.8,1.5,0.25,0.125,0.75\n");
}

}  // namespace
}  // namespace whet::report
