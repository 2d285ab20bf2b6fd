// All normalizers: the one table that a new one is added to.
#if defined(WHET_KERNELS_ROW_NORMALIZERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_NORMALIZERS_INL_H_
#undef WHET_KERNELS_ROW_NORMALIZERS_INL_H_
#else
#define WHET_KERNELS_ROW_NORMALIZERS_INL_H_
#endif

#include <whet/normalizer.h>

#include <cstddef>

#include "kernels/hard/hard-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/softmax/softmax-inl.h"

// The first is the default.
#undef WHET_FOR_EACH_NORMALIZER
#define WHET_FOR_EACH_NORMALIZER(X) X(Softmax) X(Hard)

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

// The row engine with one normalizer.
template <typename T>
struct RowFunctions {
  RowResult<T> (*weigh)(const RowInput<T>& row, const Rule& rule, Wanted wanted, T* out);
  SavedRow (*save)(const RowInput<T>& row, const Rule& rule);
  Sums (*weigh_part)(const RowInput<T>& row, T top, double beta, T* out);
  void (*backward)(const RowGradient<T>& row, const Rule& rule, bool through_rule);
};

template <typename T>
HWY_INLINE const RowFunctions<T>& FunctionsOf(const Normalizer& normalizer) {
#define WHET_ENTRY(N) {WeighRow<N, T>, SaveRow<N, T>, WeighPart<N, T>, BackwardRow<N, T>},
  static constexpr RowFunctions<T> kFunctions[] = {WHET_FOR_EACH_NORMALIZER(WHET_ENTRY)};
#undef WHET_ENTRY
  return kFunctions[static_cast<std::size_t>(normalizer.index())];
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_NORMALIZERS_INL_H_
