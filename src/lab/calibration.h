// Key calibration: an edit of a trained head's K that makes its logits blind to what isn't the priority.
//
// The logit is (K^T q) . h with h the encoded item. Where encoded items differ in a nuisance only (their
// class), the difference spans a few directions of h; K' = (I - P) K, P the projection onto those, ranks by
// priority alone there, for every query. No set, no target and no loss is used.
#ifndef WHET_LAB_CALIBRATION_H_
#define WHET_LAB_CALIBRATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "lab/model.h"

namespace whet::lab {

enum class CalibrationMethod {
  classes,  // with class labels: the encodings of the ten classes at priority 1 become equal for K
  pairs     // without them: directions in which random pairs of items close in priority differ most
};

struct Calibration {
  std::vector<float> parameters{};
  std::int64_t directions = 0;  // of encoded items that K no longer sees
  std::string text{};           // one line on what was done
};

Calibration calibrate(const std::vector<float>& parameters, CalibrationMethod method, std::uint64_t seed,
                      const Architecture& architecture = {});

}  // namespace whet::lab

#endif  // WHET_LAB_CALIBRATION_H_
