// Several experiments side by side: does one differ from another on the same seeds and sizes?
#ifndef WHET_LAB_COMPARISON_H_
#define WHET_LAB_COMPARISON_H_

#include <span>
#include <vector>

#include "results/results.h"

namespace whet::lab {

// paired_test(a, b) as results have it.
results::Difference difference_of(std::span<const double> a, std::span<const double> b);

// Every reproduction but the first against the first, at the sizes and under the rules that both have, over
// the seeds that both have. Without a common seed there is no test, and the difference is that of the means.
std::vector<results::Comparison> compare(const std::vector<const results::Reproduction*>& runs);

}  // namespace whet::lab

#endif  // WHET_LAB_COMPARISON_H_
