// Dropout of attention weights. Whether the weight of a row and a key is dropped is a function of the seed
// and their indices alone, so backward drops the same ones, and neither threads, blocks nor shards make a
// difference.
#if defined(WHET_KERNELS_ATTENTION_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_DROPOUT_INL_H_
#undef WHET_KERNELS_ATTENTION_DROPOUT_INL_H_
#else
#define WHET_KERNELS_ATTENTION_DROPOUT_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstdint>

#include "core/attention_job.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

// splitmix64: one step from an index to well-mixed bits.
HWY_INLINE std::uint64_t MixRow(std::uint64_t bits) {
  bits += 0x9E3779B97F4A7C15u;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// The same in 32 bits (the finalizer "lowbias32"), for keys: compilers make vectors of it.
HWY_INLINE std::uint32_t MixKey(std::uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

// Dropout of one row (in the order of attention.h), with keys counted from first_key of the whole.
template <typename T>
struct RowDropout {
  T factor;
  std::uint32_t dropped_below;  // of 31 bits
  std::uint32_t low, high, key;

  RowDropout(const core::AttentionJob& job, std::int64_t row, std::int64_t first_key) {
    const double p = job.options.dropout;
    factor = p < 1 ? static_cast<T>(1 / (1 - p)) : T(0);
    dropped_below = static_cast<std::uint32_t>(std::lround(p * 0x1p31));
    const auto number = static_cast<std::uint64_t>(job.whole_row(row));
    const std::uint64_t bits = MixRow(MixRow(job.options.dropout_seed) + number);
    low = static_cast<std::uint32_t>(bits);
    high = static_cast<std::uint32_t>(bits >> 32);
    key = static_cast<std::uint32_t>(job.shard.first_key + first_key);
  }

  // 0 with probability job.options.dropout, else the value divided by 1 - dropout.
  HWY_INLINE T operator()(std::int64_t i, T value) const {
    const std::uint32_t drawn = MixKey(MixKey((key + static_cast<std::uint32_t>(i)) ^ low) + high) >> 1;
    return drawn < dropped_below ? T(0) : value * factor;
  }
};

// Of n keys one after the other.
template <typename T>
HWY_NOINLINE void Drop(const core::AttentionJob& job, std::int64_t row, std::int64_t first_key,
                       std::int64_t n, T* HWY_RESTRICT values) {
  const RowDropout<T> dropout(job, row, first_key);
  for (std::int64_t i = 0; i < n; ++i) values[i] = dropout(i, values[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_DROPOUT_INL_H_
