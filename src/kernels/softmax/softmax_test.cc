// Softmax and states: the documented accuracy for every rule, kind of row and size, on every target;
// 16-bit types; and the same bits whatever the number of threads.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "targets.h"

namespace whet {
namespace {

// Small ones, around every vector width, primes, around the tile of 2,048 keys.
const std::size_t kSizes[] = {1,  2,  3,  4,  5,  6,   7,   8,   9,    15,   16,   17,   31,  32,
                              33, 63, 64, 65, 97, 127, 257, 521, 1031, 2047, 2048, 2049, 4099};

// Fewer where the oracle runs in long double, which is slow.
const std::size_t kSizesF64[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65, 257, 1031, 2049};

template <typename T>
std::int64_t signed_size(const std::vector<T>& values) {
  return static_cast<std::int64_t>(values.size());
}

template <typename T>
void check_softmax(const std::vector<T>& x, const RuleCase& rule) {
  std::vector<T> w(x.size(), T{-1});
  RowStats stats{};
  softmax(ConstView(x.data(), {signed_size(x)}), View(w.data(), {signed_size(w)}), {.rule = rule.rule},
          {.stats = std::span(&stats, 1)});
  expect_contract<T>(oracle::Row(to_double(x)), rule.plain, w, stats);
}

template <typename T>
void check_every_kind_and_rule(std::span<const std::size_t> sizes, unsigned seed) {
  for_each_target([&] {
    Random random(seed);
    for (std::size_t n : sizes) {
      for (RowKind kind : kRowKinds) {
        const std::vector<T> x = make_row<T>(kind, n, random);
        for (const RuleCase& rule : rule_cases()) {
          SCOPED_TRACE(describe(n, kind, rule.rule));
          check_softmax<T>(x, rule);
        }
      }
    }
  });
}

TEST(SoftmaxContract, HoldsInF32) { check_every_kind_and_rule<float>(kSizes, 1); }

TEST(SoftmaxContract, HoldsInF64) { check_every_kind_and_rule<double>(kSizesF64, 2); }

// Several draws of small rows: rounding differs from draw to draw.
TEST(SoftmaxContract, HoldsForManySmallRows) {
  const std::size_t sizes[] = {2, 3, 5, 8, 13};
  for (unsigned seed = 10; seed < 20; ++seed) {
    check_every_kind_and_rule<float>(sizes, seed);
    check_every_kind_and_rule<double>(sizes, seed);
  }
}

template <typename T>
void check_long_rows(std::initializer_list<RowKind> kinds, const std::vector<RuleCase>& rules) {
  Random random(3);
  for (RowKind kind : kinds) {
    const std::vector<T> x = make_row<T>(kind, 131072, random);
    for (const RuleCase& rule : rules) {
      SCOPED_TRACE(describe(x.size(), kind, rule.rule));
      check_softmax<T>(x, rule);
    }
  }
}

TEST(SoftmaxContract, HoldsForLongRowsInF32) {
  using Kind = Rule::Kind;
  for_each_target([] {
    check_long_rows<float>({RowKind::gaussian, RowKind::uniform, RowKind::wide, RowKind::offset},
                           {paper_case(), {Rule::target_entropy(0.2), {Kind::target_entropy, 0.2}}});
    check_long_rows<float>({RowKind::sharp}, rule_cases());
  });
}

TEST(SoftmaxContract, HoldsForLongRowsInF64) {
  for_each_target([] {
    check_long_rows<double>({RowKind::gaussian}, {paper_case()});
    check_long_rows<double>({RowKind::uniform}, {{Rule::none(), {}}});
    std::vector<double> x(131072, -0.1);  // every addition rounds the same way
    x[0] = 0;
    check_softmax<double>(x, {Rule::none(), {}});
    check_softmax<double>(x, {Rule::fixed(30), {Rule::Kind::fixed, 30}});
  });
}

// An underflow costs a core several times what other arithmetic does: hidden keys must not make one each.
template <typename T>
void check_hidden_keys_dont_underflow(const Rule& rule) {
  Random random(8);
  std::vector<T> x = gaussian_row<T>(random, 300);
  for (std::size_t i = 0; i < x.size(); i += 3) x[i] = -std::numeric_limits<T>::infinity();
  const std::vector<T> g(x.size(), T{1});
  std::vector<T> w(x.size()), dx(x.size());
  const Dims sizes = {signed_size(x)};
  std::feclearexcept(FE_UNDERFLOW);
  softmax(ConstView(x.data(), sizes), View(w.data(), sizes), {.rule = rule}, {}, {.threads = 1});
  EXPECT_FALSE(std::fetestexcept(FE_UNDERFLOW)) << "forward, rule " << rule.name();
  softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(dx.data(), sizes),
                   {.rule = rule}, {}, {.threads = 1});
  EXPECT_FALSE(std::fetestexcept(FE_UNDERFLOW)) << "backward, rule " << rule.name();
}

TEST(SoftmaxContract, HiddenKeysDontUnderflow) {
  for_each_target([] {
    for (const Rule& rule : {Rule::none(), Rule::paper(), Rule::target_entropy(3)}) {
      check_hidden_keys_dont_underflow<float>(rule);
      check_hidden_keys_dont_underflow<double>(rule);
    }
  });
}

// Equal small terms added to a larger sum all round the same way: random rows never show it.
TEST(SoftmaxContract, HoldsWhereEveryAdditionRoundsTheSameWay) {
  for_each_target([] {
    for (int step = 2; step < 36; ++step) {
      const float below = 0.25F * static_cast<float>(step) + 0.03F;
      std::vector<float> x(2048, -below);
      std::fill(x.begin(), x.begin() + 32, 0.0F);
      SCOPED_TRACE("32 keys at 0, 2016 at -" + std::to_string(below));
      check_softmax<float>(x, {Rule::none(), {}});
      check_softmax<float>(x, {Rule::fixed(0.3), {Rule::Kind::fixed, 0.3}});
    }
  });
}

// One key above many equal ones: every term of a sum is off by the same, and entropy moves with that times ln
// n.
TEST(SoftmaxContract, HoldsForTargetsAboveManyEqualKeys) {
  for_each_target([] {
    for (std::size_t n : Sizes{2, 1023, 131072}) {
      for (double target : {0.3, 0.5, 0.7}) {  // of ln n
        for (float below : {0.01F, 0.37F, 3.0F}) {
          std::vector<float> x(n, -below);
          x[0] = 0;
          const double h = target * std::log(static_cast<double>(n));
          SCOPED_TRACE(std::to_string(n) + " keys, one higher by " + std::to_string(below));
          check_softmax<float>(x, {Rule::target_entropy(h), {Rule::Kind::target_entropy, h}});
          check_softmax<float>(x, {Rule::target_peak(target), {Rule::Kind::target_peak, target}});
        }
      }
    }
  });
}

TEST(SoftmaxContract, HoldsForTargetsOfRandomRows) {
  for_each_target([] {
    Random random(6);
    for (std::size_t n : Sizes{3, 64, 1023, 20000}) {
      for (int draw = 0; draw < 12; ++draw) {
        const std::vector<float> x = gaussian_row<float>(random, n, std::exp(gaussian(random)));
        const double part = std::uniform_real_distribution<double>(0.02, 0.98)(random);
        const double h = part * std::log(static_cast<double>(n));
        SCOPED_TRACE(describe(n, RowKind::gaussian, Rule::target_entropy(h)));
        check_softmax<float>(x, {Rule::target_entropy(h), {Rule::Kind::target_entropy, h}});
        check_softmax<float>(x, {Rule::target_peak(part), {Rule::Kind::target_peak, part}});
      }
    }
  });
}

// A beta so close to 1 that float rounds it: never below.
TEST(SoftmaxContract, BetaOfATargetIsNeverBelowOne) {
  for_each_target([] {
    Random random(7);
    for (std::size_t n : Sizes{2, 40, 1000}) {
      const std::vector<float> x = gaussian_row<float>(random, n);
      const double h = oracle::entropy<double>(oracle::Row(to_double(x)));
      const double peak = oracle::peak<double>(oracle::Row(to_double(x)));
      for (double nearer : {1e-12, 1e-9, 1e-8, 3e-8, 1e-7, 1e-6}) {
        SCOPED_TRACE(std::to_string(n) + " keys, " + std::to_string(nearer));
        const double below = h * (1 - nearer), above = peak * (1 + nearer);
        check_softmax<float>(x, {Rule::target_entropy(below), {Rule::Kind::target_entropy, below}});
        check_softmax<float>(x, {Rule::target_peak(above), {Rule::Kind::target_peak, above}});
      }
    }
  });
}

TEST(SoftmaxContract, OracleSolvesToTheSameBeta) {
  Random random(4);
  for (const RuleCase& rule : rule_cases()) {
    if (!rule.rule.needs_search()) continue;
    const std::vector<double> x = gaussian_row<double>(random, 60);
    std::vector<double> w(x.size());
    RowStats stats{};
    softmax(ConstView(x.data(), {60}), View(w.data(), {60}), {.rule = rule.rule},
            {.stats = std::span(&stats, 1)});
    // A residual r moves beta by r beta / |d target / d ln beta|, here at most a few r.
    EXPECT_NEAR(stats.beta, oracle::beta<double>(oracle::Row(x), rule.plain),
                100 * residual_bound<double>(rule.plain, 60))
        << rule.rule.name();
  }
}

template <typename Storage>
class SoftmaxOf16Bits : public testing::Test {};
using StorageTypes = testing::Types<bf16, f16>;
TYPED_TEST_SUITE(SoftmaxOf16Bits, StorageTypes);

TYPED_TEST(SoftmaxOf16Bits, IsTheRoundedResultOfF32) {
  using Storage = TypeParam;
  for_each_target([] {
    Random random(5);
    for (std::size_t n : Sizes{1, 2, 3, 7, 8, 9, 33, 255, 2049}) {
      for (RowKind kind :
           {RowKind::gaussian, RowKind::sharp, RowKind::steep, RowKind::ties, RowKind::equal}) {
        std::vector<Storage> x;
        std::vector<float> x32;
        for (float value : make_row<float>(kind, n, random)) {
          x.push_back(to_storage(value, Storage{}));
          x32.push_back(to_float(x.back()));
        }
        const Dims sizes = {static_cast<std::int64_t>(n)};
        for (const RuleCase& rule : rule_cases()) {
          SCOPED_TRACE(describe(n, kind, rule.rule));
          std::vector<Storage> w(n);
          std::vector<float> w32(n);
          RowStats stats{}, stats32{};
          softmax(ConstView(x.data(), sizes), View(w.data(), sizes), {.rule = rule.rule},
                  {.stats = std::span(&stats, 1)});
          // A search may end at another beta within its tolerance: then the f32 result at that beta.
          const Rule same = rule.rule.needs_search() ? Rule::fixed(stats.beta) : rule.rule;
          softmax(ConstView(x32.data(), sizes), View(w32.data(), sizes), {.rule = same},
                  {.stats = std::span(&stats32, 1)});
          EXPECT_EQ(stats.beta, stats32.beta);
          EXPECT_EQ(stats.entropy, stats32.entropy);
          for (std::size_t i = 0; i < n; ++i) {
            ASSERT_EQ(w[i].bits, to_storage(w32[i], Storage{}).bits) << "key " << i << ", f32 " << w32[i];
          }
        }
      }
    }
  });
}

template <typename T>
void check_states(std::span<const std::size_t> sizes) {
  for_each_target([&] {
    Random random(6);
    for (std::size_t n : sizes) {
      for (RowKind kind : kRowKinds) {
        SCOPED_TRACE(describe(n, kind));
        const std::vector<T> x = make_row<T>(kind, n, random);
        RowState got;
        states(ConstView(x.data(), {signed_size(x)}), std::span(&got, 1));
        expect_states_close<T>(oracle::Row(to_double(x)), got);
      }
    }
  });
}

TEST(States, EqualTheOracleInF32) { check_states<float>(kSizes); }

TEST(States, EqualTheOracleInF64) { check_states<double>(kSizesF64); }

TEST(States, EqualTheOracleForLongRows) {
  const std::size_t sizes[] = {131072};
  check_states<float>(sizes);
}

TEST(States, OfPartsMergeToTheWhole) {
  Random random(7);
  const std::vector<float> x = gaussian_row<float>(random, 6000, 3);
  for (std::size_t part : Sizes{1, 100, 2048, 5999}) {
    RowState merged;
    for (std::size_t begin = 0; begin < x.size(); begin += part) {
      const std::size_t length = std::min(part, x.size() - begin);
      RowState state;
      states(ConstView(x.data() + begin, {static_cast<std::int64_t>(length)}), std::span(&state, 1));
      merged = merge(merged, state);
    }
    expect_states_close<float>(oracle::Row(to_double(x)), merged);
  }
}

TEST(States, OfA16BitRowAreThoseOfItsValues) {
  Random random(8);
  std::vector<f16> x;
  std::vector<float> x32;
  for (float value : gaussian_row<float>(random, 77)) {
    x.push_back(to_storage(value, f16{}));
    x32.push_back(to_float(x.back()));
  }
  RowState state;
  states(ConstView(x.data(), {77}), std::span(&state, 1));
  expect_states_close<float>(oracle::Row(to_double(x32)), state);
}

// Everything a call writes, as bytes.
struct Bits {
  std::vector<std::uint8_t> weights;
  std::vector<std::uint8_t> stats;
  std::vector<std::uint8_t> states;
  std::vector<std::uint8_t> gradient;

  friend bool operator==(const Bits&, const Bits&) = default;
};

template <typename T>
std::vector<std::uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<std::uint8_t> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename T>
Bits bits_of(const std::vector<T>& x, const std::vector<T>& g, const Dims& sizes, const Rule& rule,
             int threads) {
  const std::size_t rows = static_cast<std::size_t>(sizes[0]);
  std::vector<T> w(x.size());
  std::vector<T> dx(x.size());
  std::vector<RowStats> stats(rows);
  std::vector<RowState> row_states(rows);
  softmax(ConstView(x.data(), sizes), View(w.data(), sizes), {.rule = rule}, {.stats = std::span(stats)},
          {.threads = threads});
  states(ConstView(x.data(), sizes), std::span(row_states), {}, {.threads = threads});
  softmax_backward(ConstView(x.data(), sizes), ConstView(g.data(), sizes), View(dx.data(), sizes),
                   {.rule = rule}, {}, {.threads = threads});
  return {bytes_of(w), bytes_of(stats), bytes_of(row_states), bytes_of(dx)};
}

template <typename T>
void check_bits(std::int64_t rows, std::int64_t keys, const std::vector<RuleCase>& rules) {
  Random random(9);
  const std::vector<T> x = gaussian_row<T>(random, static_cast<std::size_t>(rows * keys), 2);
  const std::vector<T> g = gaussian_row<T>(random, static_cast<std::size_t>(rows * keys));
  for (const RuleCase& rule : rules) {
    const Bits one = bits_of(x, g, {rows, keys}, rule.rule, 1);
    for (int threads : {1, 2, 3, 7, 0}) {
      EXPECT_TRUE(bits_of(x, g, {rows, keys}, rule.rule, threads) == one)
          << rows << " x " << keys << ", " << threads << " threads, rule " << rule.rule.name();
    }
  }
}

TEST(SoftmaxBits, DontDependOnThreadsOrRepetition) {
  for_each_target([] {
    check_bits<float>(37, 501, rule_cases());
    check_bits<double>(37, 501, rule_cases());
    check_bits<float>(3, 20000, {paper_case()});
  });
}

TEST(SoftmaxBits, OfOneLongRowDontDependOnThreads) {
  check_bits<float>(1, 131072, {paper_case(), {Rule::target_peak(0.2), {}}});
}

TEST(SoftmaxBits, DontDependOnTheDefaultNumberOfThreads) {
  Random random(10);
  const std::vector<float> x = gaussian_row<float>(random, 64 * 300);
  set_threads(1);
  const Bits one = bits_of(x, x, {64, 300}, Rule::paper(), 0);
  set_threads(5);
  const Bits five = bits_of(x, x, {64, 300}, Rule::paper(), 0);
  set_threads(0);
  EXPECT_TRUE(one == five);
}

}  // namespace
}  // namespace whet
