// Training one head, step by step.
#ifndef WHET_LAB_TRAINER_H_
#define WHET_LAB_TRAINER_H_

#include <cstdint>
#include <vector>

#include "lab/model.h"
#include "lab/recipe.h"

namespace whet::lab {

// All that one step hands to the next: with the recipe, the rest of a run follows from it bit for bit.
struct TrainingState {
  std::int64_t step = 0;          // steps done
  std::vector<float> parameters;  // these three: kParameters values
  std::vector<float> m, v;        // Adam's moments
};

TrainingState initial_state(const Recipe& recipe);

class Trainer {
 public:
  Trainer(const Recipe& recipe, TrainingState state);

  // One step of Adam; the state's step must be below the recipe's steps.
  void step();

  const TrainingState& state() const { return state_; }
  const std::vector<float>& gradients() const { return gradients_; }  // of the last step, without the L2 term
  const Batch& batch() const { return batch_; }                       // these too: of the last step
  double loss() const { return head_.loss(); }  // mean cross-entropy, without the L2 term
  std::int64_t correct() const { return head_.correct(); }

 private:
  Recipe recipe_;
  TrainingState state_;
  Head<float> head_;
  Batch batch_;
  std::vector<float> gradients_;
};

}  // namespace whet::lab

#endif  // WHET_LAB_TRAINER_H_
