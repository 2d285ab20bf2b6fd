// The names of all normalizers.
#ifndef WHET_KERNELS_ROW_NORMALIZERS_H_
#define WHET_KERNELS_ROW_NORMALIZERS_H_

#include <span>

#include "core/normalizer.h"

namespace whet::kernels {

// In the order of Normalizer::index().
std::span<const core::NormalizerEntry> normalizers();

}  // namespace whet::kernels

#endif  // WHET_KERNELS_ROW_NORMALIZERS_H_
