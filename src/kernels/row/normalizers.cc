#include "kernels/row/normalizers.h"

#include <whet/normalizer.h>

#include <cstddef>

#include "core/saved_rows.h"
#include "kernels/row/normalizers-inl.h"

namespace whet {

std::span<const core::NormalizerEntry> kernels::normalizers() {
#define WHET_ENTRY(N) {HWY_NAMESPACE::N::kName, HWY_NAMESPACE::N::kParameter, HWY_NAMESPACE::N::kUsesBeta},
  static constexpr core::NormalizerEntry kNormalizers[] = {WHET_FOR_EACH_NORMALIZER(WHET_ENTRY)};
#undef WHET_ENTRY
  return kNormalizers;
}

std::int64_t kernels::saved_size(const Rule& rule, const Normalizer& normalizer) {
  const bool uses_beta = normalizers()[static_cast<std::size_t>(normalizer.index())].uses_beta;
  return core::saved_size(uses_beta ? rule : Rule{});
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
