// What is known of all normalizers outside of the kernels.
#ifndef WHET_KERNELS_ROW_NORMALIZERS_H_
#define WHET_KERNELS_ROW_NORMALIZERS_H_

#include <whet/normalizer.h>
#include <whet/rule.h>

#include <cstdint>
#include <span>

#include "core/normalizer.h"

namespace whet::kernels {

// In the order of Normalizer::index().
std::span<const core::NormalizerEntry> normalizers();
const core::NormalizerEntry& entry_of(const Normalizer& normalizer);

// Error unless the keys of a shard can be weighed once maximum, beta and perhaps a threshold are known.
void check_merges_shards(const Normalizer& normalizer);

// Error unless needs_threshold(normalizer) is what is wanted.
void check_threshold(const Normalizer& normalizer, bool wanted);

// Error unless the parameter of the normalizer has a gradient; for `dparameter`.
void check_parameter_gradient(const Normalizer& normalizer);

// Numbers per row that forward saves for backward.
std::int64_t saved_size(const Rule& rule, const Normalizer& normalizer);

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ROW_NORMALIZERS_H_
