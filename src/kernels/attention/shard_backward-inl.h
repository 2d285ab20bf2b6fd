// The gradient of a row of which a shard has some keys. What couples them to the others comes from outside:
// for sums the row's maximum, beta and mean, for the gradient itself the line that all sums gave.
#if defined(WHET_KERNELS_ATTENTION_SHARD_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_ATTENTION_SHARD_BACKWARD_INL_H_
#undef WHET_KERNELS_ATTENTION_SHARD_BACKWARD_INL_H_
#else
#define WHET_KERNELS_ATTENTION_SHARD_BACKWARD_INL_H_
#endif

#include <whet/shard.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/attention/backward_run.h"
#include "kernels/row/normalizers-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
using kernels::BackwardPass;
using kernels::BackwardRun;

// 1 for a row that some shard has keys of, 0 for one that none has, NaN for one of NaN.
HWY_INLINE double ScaleOfSums(const WeighedRow& row) {
  if (std::isnan(row.beta)) return row.beta;
  return row.max > -std::numeric_limits<double>::infinity() ? 1 : 0;
}

HWY_INLINE SavedRow GivenRow(const BackwardRun& run, std::int64_t row) {
  const auto index = static_cast<std::size_t>(row);
  if (run.pass == BackwardPass::sums) {
    const WeighedRow& given = run.weighed[index];
    return {.top = given.max,
            .beta = given.beta,
            .scale = ScaleOfSums(given),
            .threshold = given.tau,
            .mean = given.mean};
  }
  const RowSlope& given = run.slopes[index];
  return {.top = given.max,
          .beta = given.beta,
          .scale = given.scale,
          .threshold = given.tau,
          .mean = given.mean,
          .plain_mean = given.plain_mean};
}

// v^(p-1) of a key with a threshold. `power`: p.
HWY_INLINE double SlopeAt(double power, double beta, double y, double tau) {
  const double v = beta / power * y - tau;
  return v > 0 ? std::pow(v, power - 1) : 0;
}

// A sink is a key with value 0, so that g = 0; -inf is none. `power`: p of a normalizer with a threshold,
// else 0.
HWY_INLINE GradientSums SumsOfSink(double sink, const WeighedRow& row, double power) {
  const double scale = ScaleOfSums(row);
  if (std::isnan(scale)) return {.wg = scale};
  if (scale == 0 || sink == -std::numeric_limits<double>::infinity()) return {};
  const double y = sink - row.max, e = std::exp(row.beta * y), d = y - row.mean;
  const double ties = y == 0 ? 1 : 0;
  if (power == 0) return {.wd = e * d, .wdd = e * d * d, .ties = ties};
  const double w = SlopeAt(power, row.beta, y, row.tau);
  return {.wd = w * d, .ties = ties, .w = w, .e = e, .ey = e * y, .eyy = e * y * y};
}

HWY_INLINE double GradientOfSink(double sink, const RowSlope& row, double power) {
  if (row.scale == 0 || sink == -std::numeric_limits<double>::infinity()) return 0;
  const double y = sink - row.max;
  const double w = (power == 0 ? row.scale : row.soft_scale) * std::exp(row.beta * y);
  const double own = power == 0 ? 0 : -row.beta * SlopeAt(power, row.beta, y, row.tau) * row.coupling;
  return own + w * (row.constant + row.y_factor * (y - row.mean)) +
         row.p_factor * std::exp(y) * (y - row.plain_mean) - (y == 0 ? row.peak_share : 0);
}

// Adds the sums of the keys, or turns them and dL/dw into weights and dL/dx.
template <typename T>
HWY_INLINE void GradientOfPart(const BackwardRun& run, std::int64_t row, const RowGradient<T>& keys) {
  const RowFunctions<T>& functions = FunctionsOf<T>(run.job.options.normalizer);
  const auto index = static_cast<std::size_t>(row);
  if (run.pass == BackwardPass::sums) {
    const PartSums part = functions.sums_of_part(keys);
    run.sums[index] =
        add(run.sums[index], {part.sums.wg, part.sums.wyg, part.sums.wy, part.sums.wyy,
                              static_cast<double>(part.ties), part.w, part.soft.z, part.soft.t, part.soft.u});
    return;
  }
  const RowSlope& slope = run.slopes[index];
  functions.backward_part(keys, {.line = {.constant = slope.constant,
                                          .g_factor = slope.g_factor,
                                          .y_factor = slope.y_factor,
                                          .p_factor = slope.p_factor,
                                          .peak_share = slope.peak_share},
                                 .coupling = slope.coupling,
                                 .soft_scale = slope.soft_scale});
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_ATTENTION_SHARD_BACKWARD_INL_H_
