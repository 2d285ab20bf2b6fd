#include "core/target_search.h"

#include <algorithm>
#include <cmath>

#include "core/beta.h"

namespace whet::core {

namespace {

constexpr int kHalleySweeps = 12;  // then bisection alone, which ends after ln(2^60)/resolution halvings
constexpr int kMaxSweeps = 90;
constexpr double kMaxLogStep = 2;

}  // namespace

TargetSearch::TargetSearch(const Rule& rule, const Sums& at_one, double tolerance, double resolution)
    : entropy_(rule.kind() == Rule::Kind::target_entropy),
      goal_(entropy_ ? rule.parameter() : -std::log(rule.parameter())),
      tolerance_(tolerance),
      resolution_(resolution) {
  const double f = value(1, at_one);
  if (f <= goal_) {
    done_ = true;  // sharp enough as it is
    return;
  }
  const double mean = at_one.t / at_one.z;
  const double square = at_one.u / at_one.z;
  const double variance = square - mean * mean;
  const double third = at_one.v / at_one.z - 3 * mean * square + 2 * mean * mean * mean;
  last_ = point(0, 1, f, at_one);
  // f'' over f, then the same of ln f in ln beta; beta is 1.
  const double f_bb = (entropy_ ? -(variance + third) : variance) / f;
  propose(last_, f_bb - last_.slope * last_.slope + last_.slope);
}

double TargetSearch::value(double beta, const Sums& s) const {
  return entropy_ ? entropy_of(s, beta) : std::log(s.z);
}

TargetSearch::Point TargetSearch::point(double u, double beta, double f, const Sums& s) const {
  const double mean = s.t / s.z;
  const double variance = s.u / s.z - mean * mean;
  const double slope = entropy_ ? -beta * variance : mean;  // f' in beta
  return {u, std::log(f / goal_), beta * slope / f};
}

void TargetSearch::absorb(double beta, const Sums& s) {
  const double f = value(beta, s);
  (f > goal_ ? low_ : high_) = beta;
  done_ = std::abs(f - goal_) <= tolerance_ || high_ <= low_ * (1 + resolution_) || ++sweeps_ >= kMaxSweeps;
  if (done_) return;
  // The curvature at this end of the cubic through both points with both slopes.
  const Point at = point(log_proposal_, beta, f, s);
  const double step = at.u - last_.u;
  const double curvature = (6 * (last_.g - at.g) / step + 2 * last_.slope + 4 * at.slope) / step;
  propose(at, curvature);
  last_ = at;
}

void TargetSearch::propose(const Point& at, double curvature) {
  const double halley = 2 * at.slope * at.slope - at.g * curvature;
  const double step = halley > 0 ? -2 * at.g * at.slope / halley : -at.g / at.slope;
  log_proposal_ = at.u + std::clamp(step, -kMaxLogStep, kMaxLogStep);
  proposal_ = std::exp(log_proposal_);

  // f = 0, or noise in the moments, makes NaN: the comparison then fails too.
  const bool inside = proposal_ > low_ && proposal_ < high_;
  if (!inside || sweeps_ > kHalleySweeps) {
    proposal_ = unbounded() ? low_ * std::exp(kMaxLogStep) : std::sqrt(low_) * std::sqrt(high_);
    proposal_ = std::min(proposal_, kMaxBeta);
    log_proposal_ = std::log(proposal_);
  }
}

bool unreachable(const Rule& rule, std::int64_t ties) {
  if (ties < 2) return false;
  const double n = static_cast<double>(ties);
  return rule.kind() == Rule::Kind::target_entropy ? rule.parameter() <= std::log(n)
                                                   : rule.parameter() * n >= 1;
}

double hard_beta(std::int64_t count, double gap) {
  if (std::isinf(gap)) return 1;
  const double beta = (std::log(static_cast<double>(count)) + 24 * std::log(2.0)) / gap;
  return std::clamp(beta, 1.0, kMaxBeta);
}

}  // namespace whet::core
