// Rules: the facts of the published polynomial, every rule's beta and slope, names and their errors.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <whet/error.h>
#include <whet/rule.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "cases.h"
#include "oracle.h"

namespace whet {
namespace {

// A row of equal keys: z = e^H, whether or not that is a whole number.
RowState state_of_entropy(double h, std::int64_t count = 100) {
  RowState state;
  state.count = count;
  state.min = state.max = 0;
  state.z = std::exp(h);
  return state;
}

RowState uniform_state(std::int64_t count) {
  return state_of_entropy(std::log(static_cast<double>(count)), count);
}

double beta_at(const Rule& rule, double h) { return rule.beta(state_of_entropy(h)); }

TEST(PaperRule, IsThePublishedPolynomialHighestPowerFirst) {
  EXPECT_NEAR(beta_at(Rule::paper(), 2), 2.099, 5e-4);
  for (double h = 0.9; h < 5.9; h += 0.01) {
    EXPECT_NEAR(beta_at(Rule::paper(), h), oracle::polynomial(oracle::paper_coefficients(), h), 1e-13) << h;
  }
}

TEST(PaperRule, CrossesOneAtTwoEntropies) {
  EXPECT_EQ(beta_at(Rule::paper(), 0.8485), 1);
  EXPECT_GT(beta_at(Rule::paper(), 0.8495), 1);
  EXPECT_GT(beta_at(Rule::paper(), 5.9445), 1);
  EXPECT_EQ(beta_at(Rule::paper(), 5.9455), 1);
}

TEST(PaperRule, PeaksAt4412) {
  double best = 0;
  double best_h = 0;
  for (double h = 0; h < 12; h += 1e-4) {
    const double b = beta_at(Rule::paper(), h);
    if (b > best) {
      best = b;
      best_h = h;
    }
  }
  EXPECT_NEAR(best_h, 4.412, 5e-4);
  EXPECT_NEAR(best, 2.421, 5e-4);
}

TEST(PaperRule, SwitchesItselfOffForUniformRowsOf382Keys) {
  EXPECT_GT(Rule::paper().beta(uniform_state(381)), 1);
  for (std::int64_t count : {382, 1000, 100000, 100000000}) {
    EXPECT_EQ(Rule::paper().beta(uniform_state(count)), 1) << count;
  }
}

TEST(PaperRule, GateNeverChangesTheResult) {
  const Rule without_gate = Rule::polynomial(oracle::paper_coefficients(), 0);
  for (double h = 0; h < 12; h += 1e-3) {
    EXPECT_EQ(beta_at(Rule::paper(), h), beta_at(without_gate, h)) << h;
    EXPECT_EQ(Rule::paper().slope(state_of_entropy(h)), without_gate.slope(state_of_entropy(h))) << h;
  }
}

// The published code takes the entropy with ln(p + 1e-9), off by 1e-9 a key of a row and no more.
TEST(PaperRule, EqualsThePublishedFormula) {
  Random random(1);
  for (std::size_t n : Sizes{4, 30, 300}) {
    const oracle::Row row(to_double(gaussian_row<double>(random, n)));
    double h = 0;
    for (double p : oracle::weights<double>(row, 1)) h -= p * std::log(p + 1e-9);
    const double published =
        h > 0.5 ? std::max(oracle::polynomial(oracle::paper_coefficients(), h), 1.0) : 1.0;
    const oracle::State<double> s = oracle::state<double>(row);
    EXPECT_NEAR(Rule::paper().beta({s.count, s.min, s.max, s.z, s.t, s.u}), published,
                3e-9 * static_cast<double>(n));
  }
}

TEST(Rules, BetaEqualsTheOracle) {
  Random random(2);
  for (const RuleCase& rule : rule_cases()) {
    if (rule.rule.needs_search()) continue;
    SCOPED_TRACE(rule.rule.name());
    for (std::size_t n : Sizes{1, 2, 3, 50, 3000}) {
      for (double sd : {0.1, 1.0, 4.0}) {
        const oracle::Row row(to_double(gaussian_row<double>(random, n, sd)));
        const oracle::State<double> s = oracle::state<double>(row);
        const double expected = oracle::beta<double>(row, rule.plain);
        EXPECT_NEAR(rule.rule.beta({s.count, s.min, s.max, s.z, s.t, s.u}), expected, 1e-13 * expected);
      }
    }
  }
}

TEST(Rules, RowsOfNoOrOneKeyHaveBetaOne) {
  for (const RuleCase& rule : rule_cases()) {
    if (rule.rule.needs_search()) continue;
    EXPECT_EQ(rule.rule.beta({}), 1) << rule.rule.name();
    EXPECT_EQ(rule.rule.slope({}), 0) << rule.rule.name();
    EXPECT_EQ(rule.rule.beta(uniform_state(1)), 1) << rule.rule.name();
  }
}

TEST(Rules, BetaIsNaNForABrokenRow) {
  RowState broken{3, kNaN, kNaN, kNaN, kNaN, kNaN};
  EXPECT_TRUE(std::isnan(Rule::paper().beta(broken)));
  broken.count = 1;
  EXPECT_TRUE(std::isnan(Rule::paper().beta(broken)));
  broken.count = 0;  // a sink of NaN and no key
  EXPECT_EQ(Rule::paper().beta(broken), 1);
}

TEST(Rules, PolynomialHoldsItsLastValue) {
  const Rule rule = Rule::polynomial(std::vector{1.0, 0.5}, 0.5, 2);  // H + 0.5
  EXPECT_DOUBLE_EQ(beta_at(rule, 1.5), 2);
  EXPECT_DOUBLE_EQ(beta_at(rule, 2), 2.5);
  EXPECT_DOUBLE_EQ(beta_at(rule, 9), 2.5);
  EXPECT_EQ(rule.slope(state_of_entropy(9)), 0);
}

TEST(Rules, PolynomialIsGatedAndNeverBelowOne) {
  const Rule rule = Rule::polynomial(std::vector{-1.0, 4.0}, 1.25);  // 4 - H
  EXPECT_EQ(beta_at(rule, 1.24), 1);
  EXPECT_DOUBLE_EQ(beta_at(rule, 1.5), 2.5);
  EXPECT_EQ(beta_at(rule, 3.5), 1);
  EXPECT_EQ(rule.slope(state_of_entropy(1.24)), 0);
  EXPECT_EQ(rule.slope(state_of_entropy(3.5)), 0);
  EXPECT_DOUBLE_EQ(rule.slope(state_of_entropy(1.5)), -1);
}

TEST(Rules, LogPowerHasKnownValues) {
  const Rule rule = Rule::log_power(1, 0.5, 2);
  EXPECT_DOUBLE_EQ(rule.beta(uniform_state(100)), 11.603796220956796);  // 1 + (ln 100)^2 / 2
  EXPECT_EQ(Rule::log_power(1.5, 0, 1e308).beta(uniform_state(100)), 1.5);
  EXPECT_DOUBLE_EQ(Rule::log_power(1.5, 0.25, 0).beta(uniform_state(100)), 1.75);
  EXPECT_DOUBLE_EQ(Rule::log_power(0, 0.4, 1).beta(uniform_state(100)),
                   Rule::ssmax(0.4).beta(uniform_state(100)));
}

TEST(Rules, Llama4HasKnownValues) {
  const Rule rule = Rule::llama4(8192, 0.1);
  EXPECT_EQ(rule.beta(uniform_state(2)), 1);
  EXPECT_EQ(rule.beta(uniform_state(8191)), 1);
  EXPECT_DOUBLE_EQ(rule.beta(uniform_state(8192)), 1.0693147180559945);  // 1 + 0.1 ln 2
  EXPECT_DOUBLE_EQ(rule.beta(uniform_state(16383)), 1.0693147180559945);
  EXPECT_DOUBLE_EQ(rule.beta(uniform_state(16384)), 1.109861228866811);  // 1 + 0.1 ln 3
  EXPECT_DOUBLE_EQ(Rule::llama4(1, 2).beta(uniform_state(5)), 1 + 2 * std::log(6.0));
}

// A quotient that rounded up to a whole number would count one step too many.
TEST(Rules, Llama4CountsWholeSteps) {
  for (const std::int64_t n0 : {3, 7, 49, 8191, 8192, 1000003}) {
    for (const std::int64_t steps : {1, 2, 3, 11, 93, 65537}) {
      const Rule rule = Rule::llama4(static_cast<double>(n0), 1);
      const double below = 1 + std::log(static_cast<double>(steps));
      const double at = 1 + std::log(static_cast<double>(steps + 1));
      EXPECT_DOUBLE_EQ(rule.beta(uniform_state(n0 * steps - 1)), below) << n0 << " * " << steps;
      EXPECT_DOUBLE_EQ(rule.beta(uniform_state(n0 * steps)), at) << n0 << " * " << steps;
    }
  }
}

TEST(Rules, OnlyFixedSsmaxAndLogPowerGoBelowOne) {
  const RowState state = uniform_state(5);
  EXPECT_EQ(Rule::fixed(0.25).beta(state), 0.25);
  EXPECT_DOUBLE_EQ(Rule::ssmax(0.1).beta(state), 0.1 * std::log(5.0));
  EXPECT_DOUBLE_EQ(Rule::log_power(0.2, 0.1, 2).beta(state), 0.2 + 0.1 * std::log(5.0) * std::log(5.0));
  EXPECT_EQ(Rule::llama4(6, 1e-300).beta(state), 1);
  EXPECT_EQ(Rule::log_length(100).beta(state), 1);
  EXPECT_EQ(Rule::log_length(2, 0.01).beta(state), 1);
}

TEST(Rules, BetaStaysWithinItsLimits) {
  const RowState state = state_of_entropy(4);
  EXPECT_EQ(Rule::polynomial(std::vector{1e300}).beta(state), 0x1p60);
  EXPECT_EQ(Rule::polynomial(std::vector{1e300}).slope(state), 0);
  EXPECT_EQ(Rule::ssmax(1e300).beta(state), 0x1p60);
  EXPECT_EQ(Rule::ssmax(1e-300).beta(state), 0x1p-60);
  EXPECT_EQ(Rule::log_length(1 + 1e-15, 1e300).beta(state), 0x1p60);
  EXPECT_EQ(Rule::log_power(1e300, 1, 1).beta(state), 0x1p60);
  EXPECT_EQ(Rule::log_power(0, 1e-300, 1e308).beta(uniform_state(100)), 0x1p60);
  EXPECT_EQ(Rule::log_power(0, 1, 1e308).beta(uniform_state(2)), 0x1p-60);
  EXPECT_EQ(Rule::log_power(1e-300, 0, 1).beta(state), 0x1p-60);
  EXPECT_EQ(Rule::llama4(1, 1e300).beta(uniform_state(100)), 0x1p60);
}

TEST(Rules, SlopeEqualsFiniteDifferences) {
  for (const RuleCase& rule : rule_cases()) {
    if (rule.rule.needs_search()) continue;
    SCOPED_TRACE(rule.rule.name());
    for (double h : {0.2, 0.6, 1.0, 2.0, 3.3, 3.9, 4.5, 5.5, 7.0}) {
      const double step = 1e-5;
      const double difference = (beta_at(rule.rule, h + step) - beta_at(rule.rule, h - step)) / (2 * step);
      EXPECT_NEAR(rule.rule.slope(state_of_entropy(h)), difference, 1e-8) << h;
    }
  }
}

TEST(Rules, TargetsNeedTheRowItself) {
  EXPECT_TRUE(Rule::target_entropy(0.2).needs_search());
  EXPECT_TRUE(Rule::target_peak(0.2).needs_search());
  EXPECT_THROW(Rule::target_entropy(0.2).beta(uniform_state(9)), Error);
  EXPECT_THROW(Rule::target_peak(0.2).beta(uniform_state(9)), Error);
}

TEST(Rules, DefaultIsNone) {
  EXPECT_EQ(Rule(), Rule::none());
  EXPECT_EQ(Rule().kind(), Rule::Kind::none);
  EXPECT_EQ(beta_at(Rule(), 3), 1);
}

TEST(Rules, RefuseParametersOutOfRange) {
  const double bad_everywhere[] = {kNaN, kInfinity, -kInfinity, 0.0, -1.0};
  for (double bad : bad_everywhere) {
    EXPECT_THROW(Rule::fixed(bad), Error) << bad;
    EXPECT_THROW(Rule::ssmax(bad), Error) << bad;
    EXPECT_THROW(Rule::log_length(bad), Error) << bad;
    EXPECT_THROW(Rule::log_length(16, bad), Error) << bad;
    EXPECT_THROW(Rule::llama4(bad), Error) << bad;
    EXPECT_THROW(Rule::llama4(8192, bad), Error) << bad;
    EXPECT_THROW(Rule::target_peak(bad), Error) << bad;
    EXPECT_THROW(Rule::target_entropy(bad), Error) << bad;
  }
  EXPECT_THROW(Rule::fixed(0x1p61), Error);
  EXPECT_THROW(Rule::fixed(0x1p-61), Error);
  EXPECT_THROW(Rule::log_length(1), Error);
  for (double bad : {kNaN, kInfinity, -kInfinity, -1.0}) {
    EXPECT_THROW(Rule::log_power(bad, 1, 1), Error) << bad;
    EXPECT_THROW(Rule::log_power(1, bad, 1), Error) << bad;
    EXPECT_THROW(Rule::log_power(1, 1, bad), Error) << bad;
  }
  EXPECT_THROW(Rule::log_power(0, 0, 1), Error);
  EXPECT_THROW(Rule::llama4(0.5), Error);
  EXPECT_THROW(Rule::llama4(8192.5), Error);
  EXPECT_THROW(Rule::llama4(0x1p54), Error);
  EXPECT_THROW(Rule::target_peak(1), Error);
  EXPECT_THROW(Rule::polynomial({}), Error);
  EXPECT_THROW(Rule::polynomial(std::vector<double>(9, 1.0)), Error);
  EXPECT_THROW(Rule::polynomial(std::vector{1.0, kNaN}), Error);
  EXPECT_THROW(Rule::polynomial(std::vector{1.0, kInfinity}), Error);
  EXPECT_THROW(Rule::polynomial(std::vector{1.0}, kNaN), Error);
  EXPECT_THROW(Rule::polynomial(std::vector{1.0}, 0.5, kNaN), Error);
}

TEST(RuleNames, AreTheDocumentedOnes) {
  EXPECT_EQ(Rule::parse("none"), Rule::none());
  EXPECT_EQ(Rule::parse("paper"), Rule::paper());
  EXPECT_EQ(Rule::parse("fixed:1.5"), Rule::fixed(1.5));
  EXPECT_EQ(Rule::parse("log-length:16"), Rule::log_length(16));
  EXPECT_EQ(Rule::parse("log-length:16,0.5"), Rule::log_length(16, 0.5));
  EXPECT_EQ(Rule::parse("ssmax:0.4"), Rule::ssmax(0.4));
  EXPECT_EQ(Rule::parse("log-power:1,0.5,2"), Rule::log_power(1, 0.5, 2));
  EXPECT_EQ(Rule::parse("llama4:8192"), Rule::llama4(8192));
  EXPECT_EQ(Rule::parse("llama4:8192"), Rule::llama4(8192, 0.1));
  EXPECT_EQ(Rule::parse("llama4:8192,0.2"), Rule::llama4(8192, 0.2));
  EXPECT_EQ(Rule::parse("target-entropy:0.2"), Rule::target_entropy(0.2));
  EXPECT_EQ(Rule::parse("target-peak:0.9"), Rule::target_peak(0.9));
  const std::vector<double> c = {-0.037, 0.481, -2.3, 4.917, -1.791};
  EXPECT_EQ(Rule::parse("polynomial:-0.037,0.481,-2.3,4.917,-1.791"), Rule::polynomial(c));
  EXPECT_EQ(Rule::parse("polynomial:1,2:gate=0.25"), Rule::polynomial(std::vector{1.0, 2.0}, 0.25));
  EXPECT_EQ(Rule::parse("polynomial:1,2:hold=3"), Rule::polynomial(std::vector{1.0, 2.0}, 0.5, 3));
  EXPECT_EQ(Rule::parse("polynomial:1,2:gate=0.25:hold=3"), Rule::polynomial(std::vector{1.0, 2.0}, 0.25, 3));
}

TEST(RuleNames, RoundTripBitForBit) {
  Random random(3);
  const auto positive = [&] { return std::exp(gaussian(random, 10)); };
  const auto whole = [&] { return std::min(std::ceil(positive()), 0x1p53); };
  const auto fraction = [&] { return std::uniform_real_distribution<double>(0x1p-52, 1)(random); };
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<double> c(1 + static_cast<std::size_t>(trial) % Rule::kMaxCoefficients);
    for (double& value : c) value = gaussian(random) * positive();
    for (const Rule& rule :
         {Rule::fixed(positive()), Rule::ssmax(positive()), Rule::log_length(1 + positive()),
          Rule::log_length(1 + positive(), positive()), Rule::log_power(positive(), positive(), positive()),
          Rule::llama4(whole()), Rule::llama4(whole(), positive()), Rule::target_entropy(positive()),
          Rule::target_peak(fraction()), Rule::polynomial(c), Rule::polynomial(c, positive()),
          Rule::polynomial(c, 0.5, positive()), Rule::polynomial(c, positive(), positive())}) {
      const Rule again = Rule::parse(rule.name());
      EXPECT_EQ(again, rule) << rule.name();
      EXPECT_EQ(again.name(), rule.name());
      EXPECT_EQ(std::bit_cast<std::uint64_t>(again.parameter()),
                std::bit_cast<std::uint64_t>(rule.parameter()));
      EXPECT_EQ(again.factor(), rule.factor());
      EXPECT_EQ(again.exponent(), rule.exponent());
    }
  }
  EXPECT_EQ(Rule::parse(Rule::none().name()), Rule::none());
  EXPECT_EQ(Rule::parse(Rule::paper().name()), Rule::paper());
}

TEST(RuleNames, DontDependOnTheLocaleOrPrecision) {
  EXPECT_EQ(Rule::fixed(1.5).name(), "fixed:1.5");
  EXPECT_EQ(Rule::log_length(16).name(), "log-length:16");
  EXPECT_EQ(Rule::log_power(1, 0.5, 2).name(), "log-power:1,0.5,2");
  EXPECT_EQ(Rule::llama4(8192).name(), "llama4:8192");
  EXPECT_EQ(Rule::llama4(8192, 0.25).name(), "llama4:8192,0.25");
  EXPECT_EQ(Rule::target_entropy(0.2).name(), "target-entropy:0.2");
}

class PolynomialFile : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    // A name of its own for each test and process: ctest runs them side by side.
    const std::string path = testing::TempDir() + "whet_rule_" +
                             testing::UnitTest::GetInstance()->current_test_info()->name() +
                             std::to_string(getpid()) + ".txt";
    std::ofstream(path) << text;
    return path;
  }
};

TEST_F(PolynomialFile, HoldsOneLineBesideComments) {
  const std::string path =
      write("# fitted on 16 keys\n# a second comment\npolynomial:0.5,1.25:gate=0.75:hold=3\n");
  EXPECT_EQ(Rule::load(path), Rule::polynomial(std::vector{0.5, 1.25}, 0.75, 3));
}

TEST_F(PolynomialFile, OfARuleByItsOwnName) {
  const Rule rule = Rule::polynomial(std::vector{0.1, -0.7, 2.0 / 3}, 0.4, 2.2);
  EXPECT_EQ(Rule::load(write(rule.name())), rule);
}

TEST_F(PolynomialFile, ErrorsNameTheFile) {
  for (const char* text :
       {"", "# nothing but a comment\n", "polynomial:1,x\n", "paper\n", "polynomial:1,2:gate=\n"}) {
    const std::string path = write(text);
    try {
      Rule::load(path);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
    }
  }
  try {
    Rule::load("/no/such/file");
    ADD_FAILURE() << "accepted a file that doesn't exist";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/no/such/file"), std::string::npos) << error.what();
  }
}

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// And no waiting for a writer, nor for the end of what has none.
TEST_F(PolynomialFile, IsARegularFileOfBoundedSize) {
  const std::string fifo = write("") + ".fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, std::string("/dev/zero"), testing::TempDir()}) {
    EXPECT_EQ(error_of([&] { Rule::load(path); }), "rule: the file '" + path + "' isn't a regular file");
  }
  ::unlink(fifo.c_str());
  const std::string large = write("polynomial:1,2\n" + std::string(65536, '#'));
  EXPECT_EQ(error_of([&] { Rule::load(large); }), "rule: the file '" + large + "' has more than 65536 bytes");
}

TEST_F(PolynomialFile, IsNotOpenedByParse) {
  const std::string path = write("polynomial:1,2\n");
  EXPECT_EQ(error_of([&] { Rule::parse("polynomial:" + path); }),
            "rule: 'polynomial:" + path +
                "' names a file, where only polynomial:C4,C3,C2,C1,C0[:gate=G][:hold=H] is allowed");
}

TEST(RuleNames, FilesDifferFromCoefficients) {
  EXPECT_EQ(Rule::file_of("polynomial:my.rule"), "my.rule");
  EXPECT_EQ(Rule::file_of("polynomial:./1,2"), "./1,2");
  EXPECT_EQ(Rule::file_of("polynomial:1,2 "), "1,2 ");
  EXPECT_EQ(Rule::file_of("polynomial:a:gate=1"), "a:gate=1");
  for (const char* name : {"", "paper", "fixed:x", "polynomial", "polynomial:", "polynomial:1,2",
                           "polynomial:1:gate=x", "Polynomial:file"}) {
    EXPECT_EQ(Rule::file_of(name), std::nullopt) << name;
  }
}

struct BadName {
  const char* name;
  const char* allowed;  // a part of the text that says what would have been right
};

TEST(RuleNames, ErrorsSayWhatIsAllowed) {
  const BadName bad_names[] = {
      {"", "target-entropy"},
      {"papper", "target-entropy"},
      {"Paper", "paper"},
      {"paper ", "paper"},
      {" paper", "paper"},
      {"paper:1", "paper"},
      {"none:", "none"},
      {"fixed", "fixed:"},
      {"fixed:", "fixed:"},
      {"fixed:abc", "fixed:"},
      {"fixed:1.5x", "fixed:"},
      {"fixed:1.5,2", "fixed:"},
      {"fixed:nan", "2^-60"},
      {"fixed:inf", "2^60"},
      {"fixed:-1", "2^-60"},
      {"fixed:0", "2^-60"},
      {"fixed:1e30", "2^60"},
      {"log-length", "log-length:"},
      {"log-length:1", "1"},
      {"log-length:16,", "log-length:"},
      {"log-length:16,0", "0"},
      {"log-length:16,1,2", "log-length:"},
      {"log_length:16", "log-length"},
      {"ssmax:", "ssmax:"},
      {"ssmax:-0.1", "0"},
      {"log-power", "log-power:"},
      {"log-power:1", "log-power:"},
      {"log-power:1,0.5", "log-power:"},
      {"log-power:1,0.5,2,3", "log-power:"},
      {"log-power:1,0.5,", "log-power:"},
      {"log-power:-1,0.5,2", "log-power: d is -1, must be finite and 0 or more"},
      {"log-power:1,inf,2", "log-power: b is inf"},
      {"log-power:1,0.5,nan", "log-power: g is nan"},
      {"log-power:0,0,2", "log-power: d and b are both 0"},
      {"log_power:1,0.5,2", "log-power:"},
      {"llama4", "llama4:"},
      {"llama4:", "llama4:"},
      {"llama4:0", "a whole number from 1 to 2^53"},
      {"llama4:8192.5", "a whole number from 1 to 2^53"},
      {"llama4:8192,0", "above 0"},
      {"llama4:8192,0.1,1", "llama4:"},
      {"target-entropy", "target-entropy:"},
      {"target-entropy:0", "0"},
      {"target-entropy:-2", "0"},
      {"target-peak:0", "1"},
      {"target-peak:1", "1"},
      {"target-peak:0.5:0.5", "target-peak:"},
      {"polynomial", "polynomial:"},
      {"polynomial:", "polynomial:"},
      {"polynomial:1,2,3,4,5,6,7,8,9", "8"},
      {"polynomial:1,,2", "polynomial:"},
      {"polynomial:1,2:gate=x", "gate"},
      {"polynomial:1,2:gate=nan", "gate"},
      {"polynomial:1,2:hold=", "hold"},
      {"polynomial:1,2:bend=3", "gate"},
      {"polynomial:1,2:gate=1:gate=2", "gate"},
  };
  for (const BadName& bad : bad_names) {
    try {
      Rule::parse(bad.name);
      ADD_FAILURE() << "accepted: '" << bad.name << "'";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(bad.allowed), std::string::npos)
          << "'" << bad.name << "' gave: " << error.what();
    }
  }
}

}  // namespace
}  // namespace whet
