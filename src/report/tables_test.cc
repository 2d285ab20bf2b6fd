// Tables say what results.json says, also where it says little.
#include "report/tables.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "report/table.h"

namespace whet::report {
namespace {

using Json = nlohmann::ordered_json;

Json rule(double accuracy, const Json& deviation, const Json& p) {
  const Json difference{{"difference", -0.0123},
                        {"low", deviation.is_null() ? Json() : Json(-0.02)},
                        {"high", -0.005},
                        {"p", p}};
  return {{"accuracy", accuracy},
          {"deviation", deviation},
          {"against_softmax", difference},
          {"against_ceiling", difference}};
}

Json outcome(double accuracy) {
  return {{"accuracy", accuracy}, {"beta", 1.5}, {"sharpened", 0.25}, {"entropy", 0.125}, {"peak", 0.75}};
}

// One head of one size; `deviation` and `p` null as they are for one seed.
Json results(const Json& deviation, const Json& p) {
  return {{"paper",
           {{"items", {16, 64}}, {"softmax", {98.6, 94.3}}, {"paper", {98.6, 94.5}}, {"p", {0.4, nullptr}}}},
          {"summary",
           {{{"items", 64},
             {"sets", 10},
             {"rules",
              {{"softmax", rule(0.5, deviation, nullptr)},
               {"paper", rule(0.6255, deviation, p)},
               {"target_entropy", rule(0.75, deviation, p)},
               {"hard", rule(0.8, deviation, p)}}}}}},
          {"models",
           {{{"seed", 3},
             {"step", 100},
             {"rules", {{"target_entropy", "target-entropy:0.0625"}}},
             {"diagnosis", {{"slope", 100.0}, {"deviation", 0.25}, {"resolution", 400.0}}},
             {"fit", nullptr},
             {"sizes",
              {{{"items", 64},
                {"sets", 10},
                {"entropy", 0.5},
                {"predicted", 0.82},
                {"rules",
                 {{"softmax", outcome(0.5)},
                  {"paper", outcome(0.6255)},
                  {"target_entropy", outcome(0.75)},
                  {"hard", outcome(0.8)}}}}}}}}}};
}

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
  const std::string text = markdown_tables(results(0.0123, 2e-4));
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
  const std::string text = markdown_tables(results(nullptr, nullptr));
  EXPECT_NE(text.find("|    64 |    50.0 |  62.5 |           75.0 | 80.0 |"), text.npos) << text;
  EXPECT_EQ(text.find("nan"), text.npos) << text;
}

TEST(Tables, CsvQuotesNames) {
  Json some = results(nullptr, nullptr);
  Json& rules = some["models"][0]["sizes"][0]["rules"];
  rules = {{"polynomial:a \"b\",\\c", outcome(0.5)}};
  EXPECT_EQ(csv_table(some),
            "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n"
            "3,64,10,\"polynomial:a \"\"b\"\",\\c\",0.5,1.5,0.25,0.125,0.75\n");
}

TEST(Tables, CsvHasALineForEverything) {
  EXPECT_EQ(csv_table(results(nullptr, nullptr)),
            "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n"
            "3,64,10,\"softmax\",0.5,1.5,0.25,0.125,0.75\n"
            "3,64,10,\"paper\",0.6255,1.5,0.25,0.125,0.75\n"
            "3,64,10,\"target_entropy\",0.75,1.5,0.25,0.125,0.75\n"
            "3,64,10,\"hard\",0.8,1.5,0.25,0.125,0.75\n");
}

}  // namespace
}  // namespace whet::report
