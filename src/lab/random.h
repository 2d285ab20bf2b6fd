// Random numbers by counter: Philox 4x32-10 (Salmon et al. 2011, Random123). The numbers of a draw depend on
// the seed, the stream and the position alone, never on what was drawn before or on which thread.
#ifndef WHET_LAB_RANDOM_H_
#define WHET_LAB_RANDOM_H_

#include <array>
#include <cstdint>

namespace whet::lab {

// What the numbers are for: the same seed gives unrelated numbers in each.
enum class Stream : std::uint32_t {
  weights = 0,
  training = 1,
  evaluation = 2,
  fit = 3,
  calibration = 4,
  theorem = 5
};

// A sequence of 32-bit numbers. `draw` separates the sequences of a stream: a training step, a set.
class Random {
 public:
  Random(std::uint64_t seed, Stream stream, std::uint64_t draw);

  std::uint32_t bits();
  // The next number of [0, bound), bound > 0, without the bias of a remainder.
  std::uint32_t below(std::uint32_t bound);
  // (bits + 1/2) / 2^32: strictly between 0 and 1, 32 random bits.
  double uniform() { return (static_cast<double>(bits()) + 0.5) * 0x1p-32; }

 private:
  std::array<std::uint32_t, 4> block_{};
  std::array<std::uint32_t, 4> counter_{};
  std::array<std::uint32_t, 2> key_{};
  unsigned used_ = 4;
};

}  // namespace whet::lab

#endif  // WHET_LAB_RANDOM_H_
