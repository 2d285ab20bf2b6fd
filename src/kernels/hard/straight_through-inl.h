// Hard attention that can be trained through: weights are those of `hard`, their gradient is that of softmax
// at the row's beta (the straight-through estimator of Bengio, Léonard, Courville, 2013).
//
// The gradient isn't that of the function, which has none. Limit: as hard, and one exponential per key for
// the sum of softmax, which backward needs.
#if defined(WHET_KERNELS_HARD_STRAIGHT_THROUGH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_HARD_STRAIGHT_THROUGH_INL_H_
#undef WHET_KERNELS_HARD_STRAIGHT_THROUGH_INL_H_
#else
#define WHET_KERNELS_HARD_STRAIGHT_THROUGH_INL_H_
#endif

#include <whet/rule.h>

#include <cstdint>
#include <limits>

#include "kernels/hard/hard-inl.h"
#include "kernels/row/row-inl.h"
#include "kernels/softmax/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

struct StraightThrough : Hard {
  static constexpr const char* kName = "straight-through";
  static constexpr bool kUsesBeta = true;
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = true;  // 1 / the sum of softmax
  static constexpr bool kMergesShards = false;

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                               RowResult<T>& result) {
    // All keys, not only those at the maximum; before `out` takes the place of the logits.
    const RowInput<T>& row = runs.row;
    const Sums soft = Measure<1>(row.x, static_cast<T*>(nullptr), row.size(), result.top, result.beta, next);
    Hard::Weigh(runs, needs, out, next, result);
    result.threshold = soft.z > 0 ? 1 / soft.z : 0;
    if (soft.z > 0) result.sums.t = soft.t / soft.z * result.sums.z;  // the mean that Saved() finds
  }

  // The gradient is that of softmax: every key has one.
  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& /*saved*/) {
    return -std::numeric_limits<double>::infinity();
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    RowGradient<T> soft = row;
    soft.saved.scale = row.saved.threshold;
    soft.weights = nullptr;
    SoftmaxBackward(soft, rule, moves);
    if (row.weights != nullptr) Mark(row.x, row.n, static_cast<T>(row.saved.top), row.weights);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_HARD_STRAIGHT_THROUGH_INL_H_
