// The paper's fit: a polynomial from the entropy of a row to the inverse temperature it needs.
#ifndef WHET_LAB_FIT_H_
#define WHET_LAB_FIT_H_

#include <whet/rule.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace whet::lab {

// The beta >= 0 at which softmax(beta x) gives `item` its largest weight, at most beta_max.
//
// d/dbeta ln w_j = x_j - E_beta[x], where E_beta[x] = sum_i w_i x_i rises with beta (its slope is the
// variance) from the mean of x to its maximum. So ln w_j has one peak, where E_beta[x] = x_j: at 0 if x_j is
// no larger than the mean, at infinity (here: beta_max) if x_j is the maximum, in between otherwise.
//
// In between, |E_beta[x] - x_j| is at most 1e-12 of the row's spread. If all logits are equal, beta changes
// nothing: 0. Error if a logit isn't finite, `item` isn't in the row, or beta_max isn't finite and above 0.
double best_beta(std::span<const float> logits, std::size_t item, double beta_max);
double best_beta(std::span<const double> logits, std::size_t item, double beta_max);

// A row that should have been sharper: its entropy at beta = 1 and the beta that suits it best. The paper
// takes rows in which the item of largest priority hasn't the largest logit; in others best_beta has no
// bound.
struct FitPoint {
  double entropy = 0;  // nats
  double best_beta = 0;
};

// Least squares of best_beta against entropy.
struct PolynomialFit {
  std::vector<double> coefficients;  // of powers of the entropy, highest first
  double lowest_entropy = 0;         // of the points
  double highest_entropy = 0;
  double rms_residual = 0;  // this and R^2 with the coefficients as they stand here, rounding and all
  double r_squared = 0;     // NaN if best_beta is the same at all points
  std::size_t points = 0;

  // The polynomial is never used outside the entropies it was fitted on: at the lowest and below beta = 1,
  // above the highest the value there is held.
  Rule rule() const;
};

// degree 1 to 7. Error if it isn't, if a point isn't finite or is negative, or if there are too few of them.
// Nothing if too few of their entropies differ, or differ by too little, to determine degree + 1
// coefficients.
std::optional<PolynomialFit> fit_if_determined(std::span<const FitPoint> points, int degree = 4);

// The same where nothing is an Error too.
PolynomialFit fit_polynomial(std::span<const FitPoint> points, int degree = 4);

// Writes what Rule::load(path) reads as fit.rule(), bit for bit: the lines of `comment`,
// each behind "# ", then the rule's name. The file appears whole or not at all. Error if it would be larger
// than the 65536 bytes that Rule::load takes.
void write_rule_file(const std::string& path, const PolynomialFit& fit, std::string_view comment);

}  // namespace whet::lab

#endif  // WHET_LAB_FIT_H_
