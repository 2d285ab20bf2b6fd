// Why a head fails at size, read off its weights: the logit as a function of priority and class.
//
// The order of items is the order of their logits, slope * priority + offset of the class near priority 1.
// The largest of n priorities lie about 1/n apart, so where n is beyond resolution = slope / deviation of the
// offsets, classes decide and not priorities: misranking, which no temperature mends.
#ifndef WHET_LAB_DIAGNOSIS_H_
#define WHET_LAB_DIAGNOSIS_H_

#include <array>
#include <vector>

#include "lab/model.h"
#include "lab/task.h"

namespace whet::lab {

struct Diagnosis {
  double slope = 0;  // d logit / d priority at priority 1, mean over classes and queries
  std::array<double, kClasses>
      offsets{};          // logit of each class at priority 1, mean over queries, from their mean
  double deviation = 0;   // of the offsets (divisor kClasses)
  double resolution = 0;  // slope / deviation
};

// Of two attention heads, this and the next are of the first. With steps in the encoder the slope is that of
// a secant, over a priority step of 2^-13, jumps included.
Diagnosis diagnose(const std::vector<float>& parameters, const Architecture& architecture = {});

// About the largest spread that the weights allow a row of any size (whet/horizon.h): from the singular
// values of Q and K, which are bounds, and the largest norms of encoded queries and items, which are those of
// a grid of 257 queries and 257 priorities of each class: a norm between two points may be a little larger.
double spread_allowed(const std::vector<float>& parameters, const Architecture& architecture = {});

}  // namespace whet::lab

#endif  // WHET_LAB_DIAGNOSIS_H_
