#include "kernels/row/normalizers.h"

#include <whet/normalizer.h>

#include "kernels/row/normalizers-inl.h"

namespace whet {

std::span<const core::NormalizerEntry> kernels::normalizers() {
#define WHET_ENTRY(N) {HWY_NAMESPACE::N::kName, HWY_NAMESPACE::N::kParameter},
  static constexpr core::NormalizerEntry kNormalizers[] = {WHET_FOR_EACH_NORMALIZER(WHET_ENTRY)};
#undef WHET_ENTRY
  return kNormalizers;
}

Normalizer Normalizer::parse(std::string_view name) {
  const auto [index, parameter] = core::parse_normalizer(name, kernels::normalizers());
  Normalizer result;
  result.index_ = index;
  result.parameter_ = parameter;
  return result;
}

std::string Normalizer::name() const {
  return core::normalizer_name({index_, parameter_}, kernels::normalizers());
}

}  // namespace whet
