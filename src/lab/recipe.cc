#include "lab/recipe.h"

#include <whet/error.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

namespace whet::lab {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<L2, std::string_view>, 4> kL2Names{
    {{L2::none, "none"}, {L2::sum, "sum"}, {L2::half, "half"}, {L2::decoupled, "decoupled"}}};
constexpr std::array<std::pair<Schedule, std::string_view>, 4> kScheduleNames{
    {{Schedule::constant, "constant"},
     {Schedule::linear, "linear"},
     {Schedule::cosine, "cosine"},
     {Schedule::quartic, "quartic"}}};

constexpr std::array<std::pair<Activation, std::string_view>, 2> kActivationNames{
    {{Activation::gelu, "gelu"}, {Activation::step, "step"}}};

template <typename Names, typename Value>
std::string_view name_in(const Names& names, Value value) {
  for (const auto& [known, name] : names) {
    if (known == value) return name;
  }
  return "";
}

template <typename Names>
auto value_in(const Names& names, std::string_view field, std::string_view text) {
  std::string allowed;
  for (const auto& [value, name] : names) {
    if (name == text) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  }
  throw Error(std::string(field) + ": is '" + std::string(text) + "', must be one of " + allowed);
}

void require(bool holds, const std::string& field, const std::string& value, const std::string& range) {
  if (!holds) throw Error(field + ": is " + value + ", must be " + range);
}

// What has grown from 0 to 1 over this share of the steps.
double grown(std::int64_t step, std::int64_t steps, double share) {
  const double end = share * static_cast<double>(steps), at = static_cast<double>(step + 1);
  return at < end ? at / end : 1;
}

}  // namespace

bool operator==(const Recipe& a, const Recipe& b) { return to_json(a) == to_json(b); }

double Recipe::rate_at(std::int64_t step) const {
  const double done = static_cast<double>(step) / static_cast<double>(steps);
  const double highest = rate * grown(step, steps, warmup);
  switch (schedule) {
    case Schedule::linear:
      return highest * (1 - done);
    case Schedule::cosine:
      return highest * 0.5 * (1 + std::cos(std::numbers::pi * done));
    case Schedule::quartic:
      return highest * (1 - done) * (1 - done) * (1 - done) * (1 - done);
    default:
      return highest;
  }
}

TrainingSets Recipe::sets_at(std::int64_t step) const {
  TrainingSets now = sets;
  now.zoom *= grown(step, steps, zoom_warmup);
  return now;
}

Recipe named_recipe(std::string_view name) {
  if (name == "paper") return {};
  if (name == "sharp") {
    return {.steps = 200'000,
            .batch = 32,
            .sets = {.zoom = 6},
            .rate = 0.003,
            .warmup = 0.02,
            .zoom_warmup = 0.5,
            .schedule = Schedule::quartic,
            .l2_form = L2::none,
            .l2 = 0};
  }
  throw Error("recipe: is '" + std::string(name) + "', must be paper or sharp");
}

void check(const Recipe& r) {
  const auto text = [](auto value) { return Json(value).dump(); };
  require(r.steps >= 1 && r.steps <= 1'000'000'000, "steps", text(r.steps), "1 to 1000000000");
  require(r.batch >= 1 && r.batch <= 65536, "batch", text(r.batch), "1 to 65536");
  require(r.sets.smallest >= 1 && r.sets.smallest <= r.sets.largest && r.sets.largest <= 4096, "items",
          text(r.sets.smallest) + " to " + text(r.sets.largest), "a range within 1 to 4096");
  require(r.sets.zoom >= 0 && r.sets.zoom <= 7, "zoom", text(r.sets.zoom), "0 to 7 decades");
  require(r.rate > 0 && r.rate <= 1, "rate", text(r.rate), "above 0 and at most 1");
  require(r.warmup >= 0 && r.warmup <= 1, "warmup", text(r.warmup), "0 to 1, a share of the steps");
  require(r.zoom_warmup >= 0 && r.zoom_warmup <= 1, "zoom_warmup", text(r.zoom_warmup),
          "0 to 1, a share of the steps");
  require((r.l2_form == L2::none) == (r.l2 == 0), "l2", text(r.l2),
          r.l2_form == L2::none ? "0 where l2-form is none" : "above 0, or l2-form none");
  require(r.weighting.normalizer != hard_weighting().normalizer, "normalizer", "hard",
          "one that has a gradient, such as straight-through");
  require(r.architecture.heads == 1 || r.architecture.heads == 2, "heads", text(r.architecture.heads),
          "1 or 2");
  require(r.l2 >= 0 && r.l2 <= 1, "l2", text(r.l2), "0 to 1");
}

std::string_view name_of(L2 form) { return name_in(kL2Names, form); }
std::string_view name_of(Schedule schedule) { return name_in(kScheduleNames, schedule); }
std::string_view name_of(Activation activation) { return name_in(kActivationNames, activation); }
L2 parse_l2(std::string_view name) { return value_in(kL2Names, "l2-form", name); }
Schedule parse_schedule(std::string_view name) { return value_in(kScheduleNames, "schedule", name); }
Activation parse_activation(std::string_view name) { return value_in(kActivationNames, "activation", name); }

Json to_json(const Recipe& r) {
  return {{"seed", r.seed},
          {"steps", r.steps},
          {"batch", r.batch},
          {"items", Json::array({r.sets.smallest, r.sets.largest})},
          {"zoom", r.sets.zoom},
          {"rate", r.rate},
          {"warmup", r.warmup},
          {"zoom_warmup", r.zoom_warmup},
          {"schedule", name_of(r.schedule)},
          {"l2_form", name_of(r.l2_form)},
          {"l2", r.l2},
          {"l2_biases", r.l2_biases},
          {"rule", r.weighting.rule.name()},
          {"normalizer", r.weighting.normalizer.name()},
          {"activation", name_of(r.architecture.activation)},
          {"heads", r.architecture.heads}};
}

namespace {

// What a field that a file doesn't have stands for. Never changed: new defaults of Recipe are for new runs. A
// field added later gets the value here that training without it had.
Recipe defaults_of_format_1() {
  return {.seed = 0,
          .steps = 100'000,
          .batch = 128,
          .sets = {.smallest = 5, .largest = 16, .zoom = 0},
          .rate = 0.001,
          .warmup = 0,
          .zoom_warmup = 0,
          .schedule = Schedule::constant,
          .l2_form = L2::half,
          .l2 = 0.001,
          .l2_biases = false,
          .weighting = {},
          .architecture = {.activation = Activation::gelu, .heads = 1}};
}

}  // namespace

Recipe recipe_from_json(const Json& json) {
  if (!json.is_object()) throw Error("recipe: must be a JSON object");
  Json whole = to_json(defaults_of_format_1());
  for (const auto& [name, value] : json.items()) {
    // It may change what training does; leaving it out would be another recipe.
    if (!whole.contains(name)) {
      throw Error(name + ": is not a field of a recipe that this whet knows; use a newer whet");
    }
    whole[name] = value;
  }
  Recipe recipe;
  std::string field;
  const auto wrong = [&] {
    return Error(field + ": is " + whole.at(field).dump() + ", not what a recipe has there");
  };
  try {
    const auto value = [&](const char* name) -> const Json& { return whole.at(field = name); };
    // get() would cut a fraction off.
    const auto integer = [&](const Json& number) -> const Json& {
      if (!number.is_number_integer()) throw wrong();
      return number;
    };
    if (!value("seed").is_number_unsigned()) throw wrong();
    recipe.seed = value("seed").get<std::uint64_t>();
    recipe.steps = integer(value("steps")).get<std::int64_t>();
    recipe.batch = integer(value("batch")).get<std::int64_t>();
    recipe.sets.smallest = integer(value("items").at(0)).get<int>();
    recipe.sets.largest = integer(value("items").at(1)).get<int>();
    if (value("items") != Json::array({recipe.sets.smallest, recipe.sets.largest})) throw wrong();
    recipe.sets.zoom = value("zoom").get<double>();
    recipe.rate = value("rate").get<double>();
    recipe.warmup = value("warmup").get<double>();
    recipe.zoom_warmup = value("zoom_warmup").get<double>();
    recipe.schedule = parse_schedule(value("schedule").get<std::string>());
    recipe.l2_form = parse_l2(value("l2_form").get<std::string>());
    recipe.l2 = value("l2").get<double>();
    recipe.l2_biases = value("l2_biases").get<bool>();
    recipe.weighting.rule = Rule::parse(value("rule").get<std::string>());
    recipe.weighting.normalizer = Normalizer::parse(value("normalizer").get<std::string>());
    recipe.architecture.activation = parse_activation(value("activation").get<std::string>());
    recipe.architecture.heads = integer(value("heads")).get<int>();
  } catch (const Json::exception&) {
    throw wrong();
  }
  check(recipe);
  return recipe;
}

std::string difference(const Recipe& there, const Recipe& here) {
  const Json a = to_json(there), b = to_json(here);
  for (const auto& [name, value] : a.items()) {
    if (value != b.at(name))
      return name + " is " + value.dump() + " there and " + b.at(name).dump() + " here";
  }
  return "";
}

}  // namespace whet::lab
