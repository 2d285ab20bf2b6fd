#include "lab/trainer.h"

#include <cmath>
#include <span>
#include <utility>

namespace whet::lab {

TrainingState initial_state(const Recipe& recipe) {
  return {.step = 0,
          .parameters = initial_parameters(recipe.seed),
          .m = std::vector<float>(kParameters, 0.0F),
          .v = std::vector<float>(kParameters, 0.0F)};
}

Trainer::Trainer(const Recipe& recipe, TrainingState state)
    : recipe_(recipe), state_(std::move(state)), head_(recipe.architecture), gradients_(kParameters) {}

void Trainer::step() {
  draw_training_batch(recipe_.sets_at(state_.step), recipe_.seed, static_cast<std::uint64_t>(state_.step),
                      recipe_.batch, batch_);
  head_.forward(state_.parameters.data(), batch_, std::span(&recipe_.weighting, 1));
  head_.backward(gradients_.data());

  kernels::AdamStep adam{.rate = recipe_.rate_at(state_.step)};
  const auto number = static_cast<double>(state_.step + 1);
  adam.correction1 = 1 - std::pow(adam.beta1, number);
  adam.correction2 = 1 - std::pow(adam.beta2, number);
  const auto kernels = kernels::dense_kernels<float>();
  const auto update = [&](std::int64_t offset, std::int64_t count, bool regularised) {
    const double l2 = regularised ? recipe_.l2 : 0;
    adam.l2 = recipe_.l2_form == L2::sum ? 2 * l2 : recipe_.l2_form == L2::half ? l2 : 0;
    adam.decay = recipe_.l2_form == L2::decoupled ? l2 : 0;
    kernels.adam(adam, gradients_.data() + offset, count, state_.parameters.data() + offset,
                 state_.m.data() + offset, state_.v.data() + offset);
  };
  for (const Layer& layer : kModel) {
    update(layer.kernel, layer.bias - layer.kernel, true);
    update(layer.bias, layer.out, recipe_.l2_biases);
  }
  ++state_.step;
}

}  // namespace whet::lab
