// The search for the beta at which a row's entropy, or its largest weight, is a given number.
//
// Both rules ask for the root of f(beta) = goal with f positive and falling:
//     target_entropy(h)   f = H(beta)             goal = h
//     target_peak(w)      f = ln Z(beta)          goal = -ln w
// ln f is close to a line or a gentle curve in ln beta, from rows of near-equal logits to rows with
// one winner, so Halley's method there, which needs one moment more than Newton's, takes two or three
// sweeps over the row. The first step, from beta = 1, is the longest and uses a fourth moment
// (Householder's method). A bracket and bisection in ln beta guard both. The caller sweeps; this
// class only sees the sums, so it is the same for one row in cache and for a row spread over files
// or ranks.
#ifndef WHET_CORE_TARGET_SEARCH_H_
#define WHET_CORE_TARGET_SEARCH_H_

#include <whet/rule.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/sums.h"

namespace whet::core {

class TargetSearch {
 public:
  // A search that isn't done, between two steps.
  struct Progress {
    double proposal, low, high;
    int sweeps;
  };

  // `at_one` holds the row's sums at beta = 1, all five. `tolerance` bounds |f - goal|;
  // `resolution` is the relative step of beta that still changes a weight.
  TargetSearch(const Rule& rule, const Sums& at_one, double tolerance, double resolution);
  // Goes on from there; distance() is known after the next step.
  TargetSearch(const Rule& rule, const Progress& progress, double tolerance, double resolution);

  // True once the last sums meet the goal, or can't come closer.
  bool done() const { return done_; }
  // Where to sweep next, and how far off (in ln f) the last sweep was.
  double proposal() const { return proposal_; }
  double distance() const { return distance_; }
  // True while no beta tried was sharp enough: the goal may be out of reach.
  bool unbounded() const { return std::isinf(high_); }
  int sweeps() const { return sweeps_; }
  Progress progress() const { return {proposal_, low_, high_, sweeps_}; }

  // Takes z, t, u, v at `beta`, which should be proposal() up to rounding.
  void absorb(double beta, const Sums& sums);

 private:
  TargetSearch(const Rule& rule, double tolerance, double resolution);

  // g = ln f - ln goal and its derivatives in ln beta.
  struct Point {
    double g, g1, g2, g3;
  };

  double value(double beta, const Sums& sums) const;
  Point point(double beta, double f, const Sums& sums) const;
  void propose(double beta, double log_step);

  const bool entropy_;
  const double goal_;
  const double tolerance_;
  const double resolution_;
  double proposal_ = 1;
  double distance_ = std::numeric_limits<double>::infinity();
  double low_ = 1;
  double high_ = std::numeric_limits<double>::infinity();
  int sweeps_ = 0;
  bool done_ = false;
};

// With several keys at the maximum there is a limit to how sharp a row can be. True if the rule
// asks for more (or exactly that).
bool unreachable(const Rule& rule, std::int64_t ties);

// The beta for such a row: so large that all other keys together keep less than 2^-24.
// `gap`: from the maximum to the next distinct logit; infinite if there is none.
double hard_beta(std::int64_t count, double gap);

}  // namespace whet::core

#endif  // WHET_CORE_TARGET_SEARCH_H_
