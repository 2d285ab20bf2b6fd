// The steps of entmax-inl.h for a row whose keys lie in shards: each takes sums that all of them exchange.
#include <whet/shard.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/arguments.h"
#include "kernels/row/normalizers.h"

namespace whet {
namespace {

constexpr int kMostSteps = 100;
constexpr double kMostBend = 0.5;
constexpr double kMostHalf =
    8;  // up to this p a search may begin in the middle: (1/2)^p of large ones is too small

// How small a step must be, relative to tau and times p, to be the last, as in entmax-inl.h.
struct Last {
  double step, halley, bend;
};

Last last_steps(double power, bool wide) {
  if (power < 1) return {0x1p-40, 0, 0};  // weights rise with infinite slope
  const Last narrow{0x1p-16, 0x1p-9, 0x1p-11}, exact{0x1p-30, 0x1p-18, 0x1p-22};
  const Last chosen = wide ? exact : narrow;
  return power < 2 ? Last{chosen.step, 0, 0} : chosen;
}

// Newton's step for the norm (sum v^p)^(1/p) = 1, which is convex in tau for p >= 1, and by how much Halley's
// is longer.
struct Step {
  double newton, bend;
};

Step step_from(double power, const ThresholdSums& sums) {
  const double gain = -std::expm1(-std::log(sums.high) / power), ratio = sums.high / sums.low;
  if (power < 2) return {gain * ratio, 0};
  return {gain * ratio, 0.5 * gain * (power - 1) * (sums.lowest * ratio / sums.low - 1)};
}

// About the sum of e^(beta y).
double sum_of_weights(const RowState& state, double beta) {
  return std::max(1.0, state.z * std::exp((beta - 1) * state.t / state.z));
}

// One key has all weight, whatever beta is.
bool is_alone(const RowState& state) { return state.count == 1 && state.z == 1 && state.t == 0; }

}  // namespace

ThresholdSums add(const ThresholdSums& a, const ThresholdSums& b) {
  return {a.high + b.high, a.low + b.low, a.lowest + b.lowest};
}

bool needs_threshold(const Normalizer& normalizer) {
  return kernels::entry_of(normalizer).threshold_power != nullptr;
}

ThresholdSearch::ThresholdSearch(const Normalizer& normalizer, const RowState& merged, double beta,
                                 DType arithmetic)
    : wide_(arithmetic == DType::f64) {
  if (!needs_threshold(normalizer)) {
    core::fail("normalizer", "is " + normalizer.name() + ", must be sparsemax, entmax15 or entmax:A");
  }
  if (arithmetic != DType::f32 && arithmetic != DType::f64) {
    core::fail("arithmetic", std::string("is ") + core::text(arithmetic) + ", must be f32 or f64");
  }
  power_ = kernels::entry_of(normalizer).threshold_power(normalizer.parameter());
  high_ = -std::pow(static_cast<double>(merged.count) + 1, -1 / power_);  // as if there were a sink
  if (merged.count == 0 || is_alone(merged)) {
    done_ = true;
  } else if (std::isnan(merged.z) || std::isnan(beta)) {
    done_ = true;
    tau_ = std::numeric_limits<double>::quiet_NaN();
  } else if (power_ > kMostHalf) {
    tau_ = std::clamp(-std::pow(sum_of_weights(merged, beta), -1 / power_), -1.0, high_);
  } else if (power_ >= 1 && sum_of_weights(merged, beta) > 2) {
    tau_ = std::min(-0.5, high_);
  }
}

void ThresholdSearch::absorb(const ThresholdSums& sums) {
  if (done_) return;
  if (!(sums.high > 0)) {  // NaN; else it can't be
    tau_ = sums.high;
    done_ = true;
    return;
  }
  ++steps_;
  const double log = std::log(sums.high);
  if (log >= 0) {
    low_ = tau_;
    low_log_ = log;
  } else {
    high_ = tau_;
    high_log_ = log;
  }
  const bool low_known = low_log_ >= 0, high_known = high_log_ < 0;
  const Step step = step_from(power_, sums);
  double to = tau_ + step.newton / (1 - std::min(step.bend, kMostBend));
  if (to >= high_ && high_known && tau_ < high_) to = tau_ + step.newton;  // which doesn't pass it
  const Last last = last_steps(power_, wide_);
  const double size = std::abs(to - tau_) * std::max(1.0, power_) / -tau_;
  done_ = size <= last.step || (size <= last.halley && std::abs(step.bend) <= last.bend);
  const bool leaves = (to <= low_ && low_known) || (to >= high_ && high_known);
  const bool slow = shrinks_slowly();
  to = std::clamp(to, low_, high_);
  if (!done_ && leaves && low_known && high_known) {
    to = low_ + (high_ - low_) * (low_log_ / (low_log_ - high_log_));  // the secant of the sum's logarithm
  }
  if (!done_ && slow) to = 0.5 * (low_ + high_);
  done_ = done_ || to == tau_ || steps_ == kMostSteps;
  tau_ = to;
}

// Every other step has to halve the bracket where the norm isn't convex.
bool ThresholdSearch::shrinks_slowly() {
  if (power_ >= 1 || steps_ % 2 != 0) return false;
  const double before = std::exchange(width_, high_ - low_);
  return width_ > 0.5 * before;
}

}  // namespace whet
