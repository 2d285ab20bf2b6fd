#include "lab/random.h"

#include <Random123/philox.h>

namespace whet::lab {

Random::Random(std::uint64_t seed, Stream stream, std::uint64_t draw)
    : counter_{0, static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(draw),
               static_cast<std::uint32_t>(draw >> 32U)},
      key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32U)} {}

std::uint32_t Random::bits() {
  if (used_ == block_.size()) {
    const r123::Philox4x32 philox;
    const r123::Philox4x32::ctr_type block =
        philox({{counter_[0], counter_[1], counter_[2], counter_[3]}}, {{key_[0], key_[1]}});
    for (unsigned i = 0; i < 4; ++i) block_[i] = block[i];
    ++counter_[0];
    used_ = 0;
  }
  return block_[used_++];
}

std::uint32_t Random::below(std::uint32_t bound) {
  // Lemire's method: the high half of bits * bound, rejecting the few values that would favour some results.
  std::uint64_t product = std::uint64_t{bits()} * bound;
  if (static_cast<std::uint32_t>(product) < bound) {
    const std::uint32_t threshold = (0U - bound) % bound;
    while (static_cast<std::uint32_t>(product) < threshold) product = std::uint64_t{bits()} * bound;
  }
  return static_cast<std::uint32_t>(product >> 32U);
}

}  // namespace whet::lab
