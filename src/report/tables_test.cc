// Tables say what results.json says, also where it says little.
#include "report/tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

TEST(ProbeTables, SayWhatResultsSay) {
  const std::string text = markdown_tables(results::advised_probe_example());
  for (const char* part :
       {"tiny (llama): 2 layers of 2 heads, 1234567 parameters, trained for 8192 tokens. Prompts of kind "
        "max, 4 "
        "per length, of 64 and 256 tokens; of the last query row. Rule: paper.\n",
        "\nDon't sharpen this model: perplexity grows from 18.75 to 20.\n",
        " weight on the first key is 0.5 or more |\n|    uniform |     1 |",
        "|             none | 18.75 [18.00, 19.50] | 0.0000 [0.0000, 0.0000] | 75.0 [50.0, 90.0] |   1500 "
        "|\n",
        "| paper, all heads | 20.00 [19.00, 21.00] | 0.0645 [0.0500, 0.0800] |                 - |   1500 "
        "|\n"}) {
    EXPECT_NE(text.find(part), text.npos) << part << "\nis not in\n" << text;
  }
}

// Dispersing, sink, uniform, sharp, whatever their order in the file.
TEST(ProbeTables, HaveTheDispersingHeadsFirst) {
  const std::string text = markdown_tables(results::probe_example());
  EXPECT_EQ(text.find("setting"), text.npos);
  const std::size_t table = text.find("| layer |");
  ASSERT_NE(table, text.npos);
  EXPECT_EQ(text.substr(table),
            // clang-format off
      "| layer | head |      class | H at 64 | H at 256 | H / ln n |              slope |  peak | first | spread |  horizon |    β |\n"
      "|------:|-----:|-----------:|--------:|---------:|---------:|-------------------:|------:|------:|-------:|---------:|-----:|\n"
      "|     1 |    1 | dispersing |   2.079 |    2.774 |     0.50 |  0.50 [0.25, 0.75] | 0.250 | 0.125 |   12.0 |        - | 1.50 |\n"
      "|     0 |    1 |       sink |   2.079 |    2.774 |     0.50 |               0.00 | 0.250 | 0.125 |   12.0 | 1.0e+300 | 1.50 |\n"
      "|     1 |    0 |    uniform |   2.079 |    2.774 |     0.50 |  0.90 [0.88, 0.93] | 0.250 | 0.125 |   12.0 |       12 | 1.50 |\n"
      "|     0 |    0 |      sharp |   2.079 |    2.774 |     0.50 | 0.06 [-0.25, 0.38] | 0.250 | 0.125 |   12.0 |   162756 | 1.50 |\n");
  // clang-format on
}

TEST(ProbeTables, HaveTheSteepestOfAClassFirst) {
  results::Probe probe = results::probe_example();
  const double slopes[] = {NAN, 0.25, 0.75, 0.5};
  for (std::size_t i = 0; i < 4; ++i) {
    probe.heads[i].head_class = "dispersing";
    probe.heads[i].slope = slopes[i];
  }
  const std::string text = markdown_tables(probe);
  std::size_t at = text.find("| layer |");
  for (const char* head :
       {"\n|     1 |    0 |", "\n|     1 |    1 |", "\n|     0 |    1 |", "\n|     0 |    0 |"}) {
    const std::size_t next = text.find(head, at);
    EXPECT_NE(next, text.npos) << head << "\nis out of order in\n" << text;
    at = std::min(next, text.size());
  }
}

TEST(ClrsTables, SayWhatResultsSay) {
  const std::string text = markdown_tables(results::clrs_example());
  for (const char* part : {"## CLRS-Text: 4 runs on 1 algorithm\n",
                           "## insertion_sort with hints: exact matches by size\n\n"
                           "|                           size |   8* |   16 |\n"
                           "|-------------------------------:|-----:|-----:|\n"
                           "|                        softmax | 50.0 | 50.0 |\n"
                           "|                          paper | 75.0 | 75.0 |\n"
                           "| softmax, log-length:32 at test | 25.0 |    - |\n"
                           "|               another's answer |  0.0 |  0.0 |\n"
                           "|                 copy the input |  6.2 |  6.2 |\n",
                           "|   16 |       10 |                          paper |    2 | 75.0 [62.5, 87.5] |  "
                           " 75.0 |   87.5 |     "
                           "25.0 [12.5, 37.5] | 0.01 |                    0.0 | - |\n"}) {
    EXPECT_NE(text.find(part), text.npos) << part << "\nis not in\n" << text;
  }
}

// The first and the last size are among those of the short table.
TEST(ClrsTables, ShowTwelveSizesAtAGlance) {
  results::Clrs clrs = results::clrs_example();
  const results::ClrsSize one = clrs.tasks[0].sizes[0];
  clrs.tasks[0].sizes.assign(61, one);
  for (std::int64_t i = 0; i < 61; ++i) clrs.tasks[0].sizes[static_cast<std::size_t>(i)].size = 4 + i;
  const std::string text = markdown_tables(clrs);
  const std::size_t head = text.find("size |");
  const std::string line = text.substr(head, text.find('\n', head) - head);
  EXPECT_EQ(std::ranges::count(line, '|'), 13);
  EXPECT_NE(line.find("4* |"), line.npos);
  EXPECT_NE(line.find("64 |"), line.npos);
}

}  // namespace
}  // namespace whet::report
