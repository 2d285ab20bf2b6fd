// How a head is trained: everything its weights depend on.
#ifndef WHET_LAB_RECIPE_H_
#define WHET_LAB_RECIPE_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "lab/model.h"
#include "lab/task.h"

namespace whet::lab {

// The paper says "L2 regularisation with 0.001" and no more. With w all regularised parameters:
enum class L2 {
  none,
  sum,       // loss + l2 * sum w^2: gradient 2 l2 w
  half,      // loss + l2 / 2 * sum w^2: gradient l2 w
  decoupled  // w -= rate * l2 * w beside Adam's step, as AdamW
};

// With t the share of steps done, the rate falls as 1 - t, (1 + cos pi t) / 2 or (1 - t)^4.
enum class Schedule { constant, linear, cosine, quartic };

struct Recipe {
  std::uint64_t seed = 0;
  std::int64_t steps = 100'000;
  std::int64_t batch = 128;
  TrainingSets sets{};
  double rate = 0.001;
  double warmup = 0;       // share of the steps in which the rate grows from 0 to what the schedule has
  double zoom_warmup = 0;  // the same of sets.zoom
  Schedule schedule = Schedule::constant;
  L2 l2_form = L2::half;
  double l2 = 0.001;
  bool l2_biases = false;
  Weighting weighting{};
  Architecture architecture{};

  double rate_at(std::int64_t step) const;  // these two: of steps 0 .. steps - 1
  TrainingSets sets_at(std::int64_t step) const;

  friend bool operator==(const Recipe&, const Recipe&);
};

// "paper": the defaults above. "sharp": what keeps a head's order in large sets. Error for other names.
Recipe named_recipe(std::string_view name);

// Error naming the field if one is out of range.
void check(const Recipe& recipe);

std::string_view name_of(L2 form);
std::string_view name_of(Schedule schedule);
std::string_view name_of(Activation activation);
L2 parse_l2(std::string_view name);  // these three: Error that lists the names
Schedule parse_schedule(std::string_view name);
Activation parse_activation(std::string_view name);

// Both ways, bit for bit. From JSON: a missing field is what it was by default when the format of runs got
// its number ("whet run 1"), whatever the default is now; Error naming the field if one is unknown or wrong.
nlohmann::ordered_json to_json(const Recipe& recipe);
Recipe recipe_from_json(const nlohmann::ordered_json& json);

// One line on the first field in which two recipes differ: "steps is 1000 there and 2000 here".
std::string difference(const Recipe& there, const Recipe& here);

}  // namespace whet::lab

#endif  // WHET_LAB_RECIPE_H_
