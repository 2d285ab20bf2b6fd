// What a few seeds can say: mean and deviation of a result, and whether two results differ on the same seeds.
#ifndef WHET_LAB_SIGNIFICANCE_H_
#define WHET_LAB_SIGNIFICANCE_H_

#include <cstddef>
#include <span>

namespace whet::lab {

struct Summary {
  std::size_t count = 0;
  double mean = 0;
  double deviation = 0;  // of the sample (divisor count - 1); NaN for one value
};

// Error if there is no value, or one that isn't finite.
Summary summarize(std::span<const double> values);

// Student's paired t-test of a - b, two-sided, with count - 1 degrees of freedom.
//
// As scipy.stats.ttest_rel has it: one pair says nothing (t, p, low and high are NaN); differences that are
// all the same number other than 0 leave no doubt (t = +-inf, p = 0, low = high = mean); differences that
// are all 0 make t the quotient 0 / 0 (t and p are NaN, low = high = 0).
struct PairedTest {
  std::size_t pairs = 0;
  double mean = 0;       // of a - b
  double deviation = 0;  // of the sample of a - b
  double t = 0;
  double p = 0;
  double low = 0;  // the 95 % confidence interval of the mean difference
  double high = 0;
};

// a[i] and b[i] are a pair: the same seed. Error if the lengths differ, or as for summarize().
PairedTest paired_test(std::span<const double> a, std::span<const double> b);

}  // namespace whet::lab

#endif  // WHET_LAB_SIGNIFICANCE_H_
