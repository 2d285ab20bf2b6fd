// Softmax, the normalizer: weights e^(beta y).
//
// Limit: one exponential per key and sweep, 11 operations each in f32 (exp-inl.h); reads and writes beside
// that stay in cache up to its size.
#if defined(WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
#undef WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
#else
#define WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
#endif

#include <whet/rule.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/normalizer.h"
#include "kernels/row/row-inl.h"
#include "kernels/row/sweep-inl.h"
#include "kernels/softmax/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Softmax {
  static constexpr const char* kName = "softmax";
  static constexpr std::optional<core::ParameterRange> kParameter{};
  static constexpr bool kUsesBeta = true;
  static constexpr bool kIsExponential = true;
  static constexpr bool kNeedsCount = false;
  static constexpr bool kNeedsScratch = false;
  static constexpr bool kNeedsLargest = false;
  static constexpr bool kSavesThreshold = false;
  static constexpr bool kIsSparse = false;
  static constexpr bool kMergesShards = true;
  static constexpr bool kSharesThreshold = false;
  static constexpr bool kParameterGradient = false;

  // n keys that deep weigh at most n e^(-beta depth) beside the 1 of the maximum.
  template <typename T>
  static double Reach(const RowInput<T>& row, const RowResult<T>& result, double epsilon) {
    return (std::log(static_cast<double>(row.n + 1)) - std::log(epsilon)) / result.beta;
  }

  template <typename T>
  static HWY_INLINE void Weigh(const Runs<T>& runs, const Needs& needs, T* out, const T* next,
                               RowResult<T>& result) {
    Sums sums;
    const T top = result.top;
    const double beta = result.beta;
    runs.ForEach([&](std::int64_t begin, std::int64_t end) HWY_ATTR {
      const T* x = runs.row.x + begin;
      T* to = out == nullptr ? nullptr : out + begin;
      const Sums more = needs.mean ? Measure<1>(x, to, end - begin, top, beta, next)
                                   : Measure<0>(x, to, end - begin, top, beta, next);
      sums.z += more.z;
      sums.t += more.t;
    });
    result.sums = sums;
  }

  template <typename T>
  static double Peak(const RowInput<T>& /*row*/, const RowResult<T>& result) {
    return std::exp(result.beta * (static_cast<double>(result.key_max) - static_cast<double>(result.top)));
  }

  // Every key has weight or gradient.
  template <typename T>
  static double Least(double /*parameter*/, const SavedRow& /*saved*/) {
    return -std::numeric_limits<double>::infinity();
  }

  template <typename T>
  static HWY_INLINE void Backward(const RowGradient<T>& row, const Rule& rule, bool moves) {
    SoftmaxBackward(row, rule, moves);
  }

  template <typename T>
  static HWY_INLINE HWY_NAMESPACE::PartSums PartSums(const RowGradient<T>& row) {
    return SoftmaxPartSums(row);
  }

  template <typename T>
  static HWY_INLINE void PartBackward(const RowGradient<T>& row, const PartLine& line) {
    SoftmaxPartBackward(row, line.line);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_SOFTMAX_SOFTMAX_INL_H_
