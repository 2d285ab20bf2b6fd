// Random calls against the oracle: what the checks share.
//
// A case is a seed: it draws the check, the sizes, element types, layouts, options, threads and SIMD target,
// and every number. Checks fail by EXPECT_... and count what they called.
#ifndef WHET_TESTS_SOAK_SOAK_H_
#define WHET_TESTS_SOAK_SOAK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "cases.h"
#include "oracle.h"

namespace whet::soak {

// `shrink`: sizes are halved this many times, everything else stays as the seed drew it.
struct Case {
  std::uint64_t seed = 0;
  int shrink = 0;
};

// Every part of a case has dice of its own: smaller sizes leave the other parts as they were.
class Dice {
 public:
  Dice(const Case& c, std::uint64_t part) : random_(c.seed * 64 + part), shrink_(c.shrink) {}

  Random& random() { return random_; }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  std::int64_t size(std::int64_t low, std::int64_t high) {
    return std::max(std::min<std::int64_t>(low, 1), between(low, high) >> shrink_);
  }
  double real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }
  // Every order of magnitude as likely as another.
  double magnitude(double low, double high) { return std::exp(real(std::log(low), std::log(high))); }
  template <typename T>
  T pick(const std::vector<T>& all) {
    return all[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(all.size()) - 1))];
  }

 private:
  Random random_;
  int shrink_;
};

inline DType draw_type(Dice& dice) {
  return dice.pick<DType>({DType::f32, DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
}

inline Layout draw_layout(Dice& dice, std::size_t axes) {
  Layout layout;
  if (dice.chance(0.4)) return layout;
  layout.order.resize(axes);
  std::iota(layout.order.begin(), layout.order.end(), std::size_t{0});
  std::shuffle(layout.order.begin(), layout.order.end(), dice.random());
  layout.spacing = dice.chance(0.7) ? 1 : dice.between(2, 3);
  layout.padding = dice.between(0, 3);
  layout.offset = static_cast<std::size_t>(dice.between(0, 3));
  for (std::size_t axis = 0; axis < axes; ++axis) {
    if (dice.chance(0.2)) layout.backwards.push_back(axis);
  }
  return layout;
}

// Each axis of a side array has its size, or 1.
inline std::vector<std::int64_t> draw_side_sizes(Dice& dice, std::vector<std::int64_t> sizes) {
  for (std::int64_t& size : sizes) {
    if (dice.chance(0.35)) size = 1;
  }
  return sizes;
}

// Rules with parameters as they are used.
inline oracle::Rule draw_rule(Dice& dice) {
  using Kind = Rule::Kind;
  switch (dice.between(0, 9)) {
    case 0:
      return {Kind::none};
    case 1:
      return {Kind::fixed, dice.real(0.2, 3)};
    case 2:
      return {Kind::paper, 1, 1, oracle::paper_coefficients()};
    case 3:
      return {Kind::polynomial, 1, 1, {dice.real(-0.3, 0.5), dice.real(0.5, 2)}, dice.real(0.2, 1),
              dice.real(1.5, 4)};
    case 4:
      return {Kind::log_length, dice.real(2, 20), dice.real(0.5, 2)};
    case 5:
      return {Kind::ssmax, dice.real(0.2, 1)};
    case 6:
      return {.kind = Kind::log_power,
              .parameter = dice.real(0, 1),
              .factor = dice.real(0.05, 0.5),
              .exponent = dice.real(0, 1.5)};
    case 7:
      return {Kind::llama4, static_cast<double>(dice.between(1, 40)), dice.real(0.05, 0.5)};
    case 8:
      return {Kind::target_entropy, dice.real(0.1, 2)};
    default:
      return {Kind::target_peak, dice.real(0.1, 0.95)};
  }
}

// How often each public function was called, and how many rows of it were compared.
struct Calls {
  std::int64_t calls = 0;
  std::int64_t rows = 0;
};
using Tally = std::map<std::string, Calls>;

inline void count(Tally& tally, const std::string& function, std::int64_t rows, std::int64_t calls = 1) {
  tally[function].calls += calls;
  tally[function].rows += rows;
}

struct Check {
  const char* name;
  int share;  // of 100 cases
  void (*run)(const Case& c, Tally& tally);
};

// rows.cc
void check_softmax(const Case& c, Tally& tally);
void check_sharpen(const Case& c, Tally& tally);
void check_states(const Case& c, Tally& tally);
void check_softmax_backward(const Case& c, Tally& tally);

// normalizers.cc
void check_normalizers(const Case& c, Tally& tally);
void check_normalizers_backward(const Case& c, Tally& tally);

// attention.cc
void check_attention(const Case& c, Tally& tally);
void check_attention_backward(const Case& c, Tally& tally);
void check_shards(const Case& c, Tally& tally);

// scalars.cc
void check_merge(const Case& c, Tally& tally);
void check_rule(const Case& c, Tally& tally);
void check_horizon(const Case& c, Tally& tally);

}  // namespace whet::soak

#endif  // WHET_TESTS_SOAK_SOAK_H_
