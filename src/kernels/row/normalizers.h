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

// Error unless one exchange of maximum and beta is enough to weigh the keys of a shard.
void check_merges_shards(const Normalizer& normalizer);

// Error unless the parameter of the normalizer has a gradient; for `dparameter`.
void check_parameter_gradient(const Normalizer& normalizer);

// Numbers per row that forward saves for backward.
std::int64_t saved_size(const Rule& rule, const Normalizer& normalizer);

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ROW_NORMALIZERS_H_
