#include "core/target_search.h"

#include <algorithm>
#include <cmath>

#include "core/beta.h"

namespace whet::core {

namespace {

constexpr int kHalleySweeps = 12;  // then bisection alone, which ends after ln(2^60)/resolution halvings
constexpr int kMaxSweeps = 90;
constexpr double kMaxLogStep = 2;

// From a point with value g and two derivatives to where g may be 0; Newton's step if the curve misses.
double halley(double g, double g1, double g2) {
  const double denominator = 2 * g1 * g1 - g * g2;
  return denominator > 0 ? -2 * g * g1 / denominator : -g / g1;
}

}  // namespace

TargetSearch::TargetSearch(const Rule& rule, double tolerance, double resolution)
    : entropy_(rule.kind() == Rule::Kind::target_entropy),
      goal_(entropy_ ? rule.parameter() : -std::log(rule.parameter())),
      tolerance_(tolerance),
      resolution_(resolution) {}

TargetSearch::TargetSearch(const Rule& rule, const Progress& progress, double tolerance, double resolution)
    : TargetSearch(rule, tolerance, resolution) {
  proposal_ = progress.proposal;
  low_ = progress.low;
  high_ = progress.high;
  sweeps_ = progress.sweeps;
}

TargetSearch::TargetSearch(const Rule& rule, const Sums& at_one, double tolerance, double resolution)
    : TargetSearch(rule, tolerance, resolution) {
  const double f = value(1, at_one);
  if (f <= goal_) {
    done_ = true;  // sharp enough as it is
    return;
  }
  const Point p = point(1, f, at_one);
  const double householder = -3 * p.g * (2 * p.g1 * p.g1 - p.g * p.g2) /
                             (6 * p.g1 * p.g1 * p.g1 - 6 * p.g * p.g1 * p.g2 + p.g * p.g * p.g3);
  distance_ = p.g;
  propose(1, householder > 0 ? householder : halley(p.g, p.g1, p.g2));
}

double TargetSearch::value(double beta, const Sums& s) const {
  return entropy_ ? entropy_of(s, beta) : std::log(s.z);
}

TargetSearch::Point TargetSearch::point(double beta, double f, const Sums& s) const {
  const double scale = 1 / s.z;
  const double mean = s.t * scale, square = s.u * scale, cube = s.v * scale;
  const double k2 = square - mean * mean;
  const double k3 = cube - mean * (3 * square - 2 * mean * mean);
  const double k4 = s.w * scale - mean * (4 * cube - mean * (6 * square - 3 * mean * mean)) - 3 * k2 * k2;
  // Derivatives of f in beta, each times its power of beta and over f.
  const double b = beta, r = 1 / f;
  const double f1 = b * r * (entropy_ ? -b * k2 : mean);
  const double f2 = b * b * r * (entropy_ ? -(k2 + b * k3) : k2);
  const double f3 = b * b * b * r * (entropy_ ? -(2 * k3 + b * k4) : k3);
  // The same in ln beta, then of ln f.
  const double u2 = f2 + f1, u3 = f3 + 3 * f2 + f1;
  return {std::log(f / goal_), f1, u2 - f1 * f1, u3 - 3 * f1 * u2 + 2 * f1 * f1 * f1};
}

void TargetSearch::absorb(double beta, const Sums& s) {
  const double f = value(beta, s);
  (f > goal_ ? low_ : high_) = beta;
  done_ = std::abs(f - goal_) <= tolerance_ || high_ <= low_ * (1 + resolution_) || ++sweeps_ >= kMaxSweeps;
  if (done_) return;
  const Point p = point(beta, f, s);
  distance_ = std::abs(p.g);
  propose(beta, halley(p.g, p.g1, p.g2));
}

void TargetSearch::propose(double beta, double log_step) {
  proposal_ = beta * std::exp(std::clamp(log_step, -kMaxLogStep, kMaxLogStep));
  // f = 0, or noise in the moments, makes NaN: the comparison then fails too.
  const bool inside = proposal_ > low_ && proposal_ < high_;
  if (!inside || sweeps_ > kHalleySweeps) {
    proposal_ = unbounded() ? low_ * std::exp(kMaxLogStep) : std::sqrt(low_) * std::sqrt(high_);
  }
  proposal_ = std::min(proposal_, kMaxBeta);
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
