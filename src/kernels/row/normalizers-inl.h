// The row engine with any normalizer. The table of them is in normalizers.cc.
#if defined(WHET_KERNELS_ROW_NORMALIZERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ROW_NORMALIZERS_INL_H_
#undef WHET_KERNELS_ROW_NORMALIZERS_INL_H_
#else
#define WHET_KERNELS_ROW_NORMALIZERS_INL_H_
#endif

#include <whet/normalizer.h>
#include <whet/shard.h>

#include <cstdint>

#include "kernels/row/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

// The row engine with one normalizer. They are compiled in normalizers.cc, once per target.
template <typename T>
struct RowFunctions {
  void (*normalise)(const RowInput<T>& row, const Rule& rule, Wanted wanted, T* out, RowResult<T>& result);
  RowResult<T> (*weigh)(const RowInput<T>& row, const Rule& rule, Wanted wanted, T* out);
  SavedRow (*save)(const RowInput<T>& row, const Rule& rule);
  Sums (*weigh_part)(const RowInput<T>& row, T top, const RowScale& scale, T* out);
  ThresholdSums (*threshold_part)(const RowInput<T>& row, T top, const RowScale& scale);
  void (*backward)(const RowGradient<T>& row, const Rule& rule, bool through_rule);
  PartSums (*sums_of_part)(const RowGradient<T>& row);
  void (*backward_part)(const RowGradient<T>& row, const PartLine& line);
  double (*parameter_gradient)(const RowGradient<T>& row);  // dL/dparameter; 0 if it has no gradient
  double (*least)(double parameter, const SavedRow& saved);
  bool saves_threshold;
  bool is_sparse;
};

template <typename T>
const RowFunctions<T>& FunctionsOf(const Normalizer& normalizer);

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ROW_NORMALIZERS_INL_H_
