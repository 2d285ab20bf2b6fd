#include "lab/recipe.h"

#include <gtest/gtest.h>
#include <whet/error.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace whet::lab {
namespace {

using Json = nlohmann::ordered_json;

// The text of the Error that `act` throws, "" if there is none.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::string error_of_json(const Json& json) {
  return error_of([&] { recipe_from_json(json); });
}

bool begins_with(const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; }

// Every field off its default, every double one that decimal notation strains with.
Recipe odd_recipe() {
  return {.seed = std::numeric_limits<std::uint64_t>::max(),
          .steps = 999'999'999,
          .batch = 65535,
          .sets = {.smallest = 3, .largest = 4095, .zoom = 0x1.fffffffffffffp-1},
          .rate = 0x1.999999999999bp-11,
          .warmup = 0x1.3333333333333p-1,
          .zoom_warmup = 0x1.999999999999ap-4,
          .schedule = Schedule::cosine,
          .l2_form = L2::decoupled,
          .l2 = std::numeric_limits<double>::denorm_min(),
          .l2_biases = true,
          .weighting = {.rule = Rule::log_length(0x1.0000000000001p4, 0.1 + 0.2),
                        .normalizer = Normalizer::parse("entmax:1.3")},
          .architecture = {.activation = Activation::step, .heads = 2}};
}

void expect_same(const Recipe& a, const Recipe& b) {
  EXPECT_EQ(a.seed, b.seed);
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.batch, b.batch);
  EXPECT_EQ(a.sets.smallest, b.sets.smallest);
  EXPECT_EQ(a.sets.largest, b.sets.largest);
  EXPECT_EQ(a.sets.zoom, b.sets.zoom);
  EXPECT_EQ(a.rate, b.rate);
  EXPECT_EQ(a.warmup, b.warmup);
  EXPECT_EQ(a.zoom_warmup, b.zoom_warmup);
  EXPECT_EQ(a.schedule, b.schedule);
  EXPECT_EQ(a.l2_form, b.l2_form);
  EXPECT_EQ(a.l2, b.l2);
  EXPECT_EQ(a.l2_biases, b.l2_biases);
  EXPECT_TRUE(a.weighting == b.weighting);
  EXPECT_TRUE(a.architecture == b.architecture);
}

Recipe through_text(const Recipe& recipe) { return recipe_from_json(Json::parse(to_json(recipe).dump())); }

TEST(Recipe, SurvivesJsonBitForBit) {
  for (const Recipe& recipe : {Recipe{}, named_recipe("sharp"), odd_recipe()}) {
    const Recipe back = through_text(recipe);
    expect_same(recipe, back);
    EXPECT_TRUE(recipe == back);
    EXPECT_EQ(to_json(recipe).dump(), to_json(back).dump());
  }
  Recipe recipe;
  for (const double rate : {0.1, 1.0 / 3, 1e-300, 5e-324, 1 - 0x1p-53, 1.0}) {
    recipe.rate = rate;
    EXPECT_EQ(through_text(recipe).rate, rate);
  }
}

TEST(Recipe, KeepsEveryRule) {
  const std::vector<double> coefficients{-0.037, 0.481, -2.3, 4.917, -1.791};
  for (const Rule& rule :
       {Rule::none(), Rule::fixed(1.0 / 3), Rule::paper(), Rule::polynomial(coefficients, 0.75, 4.1),
        Rule::log_length(16), Rule::ssmax(0.43), Rule::log_power(1, 1.0 / 3, 0.7), Rule::llama4(16, 1.0 / 3),
        Rule::target_entropy(0.2), Rule::target_peak(0.9)}) {
    Recipe recipe;
    recipe.weighting.rule = rule;
    EXPECT_TRUE(through_text(recipe).weighting.rule == rule) << rule.name();
  }
}

TEST(Recipe, KeepsEveryNormalizer) {
  for (const char* name : {"softmax", "sparsemax", "entmax15", "entmax:1.3", "top-k:8", "straight-through",
                           "sigmoid", "relu", "softpick"}) {
    Recipe recipe;
    recipe.weighting.normalizer = Normalizer::parse(name);
    EXPECT_TRUE(through_text(recipe).weighting.normalizer == recipe.weighting.normalizer) << name;
  }
}

TEST(Recipe, EveryFieldCounts) {
  const Recipe base;
  const Recipe odd = odd_recipe();
  const std::vector<std::pair<std::string, std::function<void(Recipe&)>>> changes = {
      {"seed", [&](Recipe& r) { r.seed = odd.seed; }},
      {"steps", [&](Recipe& r) { r.steps = odd.steps; }},
      {"batch", [&](Recipe& r) { r.batch = odd.batch; }},
      {"items", [&](Recipe& r) { r.sets.smallest = odd.sets.smallest; }},
      {"items", [&](Recipe& r) { r.sets.largest = odd.sets.largest; }},
      {"zoom", [&](Recipe& r) { r.sets.zoom = odd.sets.zoom; }},
      {"rate", [&](Recipe& r) { r.rate = std::nextafter(r.rate, 1.0); }},
      {"warmup", [&](Recipe& r) { r.warmup = odd.warmup; }},
      {"zoom_warmup", [&](Recipe& r) { r.zoom_warmup = odd.zoom_warmup; }},
      {"schedule", [&](Recipe& r) { r.schedule = odd.schedule; }},
      {"l2_form", [&](Recipe& r) { r.l2_form = odd.l2_form; }},
      {"l2", [&](Recipe& r) { r.l2 = odd.l2; }},
      {"l2_biases", [&](Recipe& r) { r.l2_biases = odd.l2_biases; }},
      {"rule", [&](Recipe& r) { r.weighting.rule = odd.weighting.rule; }},
      {"normalizer", [&](Recipe& r) { r.weighting.normalizer = odd.weighting.normalizer; }},
      {"activation", [&](Recipe& r) { r.architecture.activation = odd.architecture.activation; }},
      {"heads", [&](Recipe& r) { r.architecture.heads = odd.architecture.heads; }}};
  for (const auto& [field, change] : changes) {
    Recipe other = base;
    change(other);
    EXPECT_FALSE(base == other) << field;
    EXPECT_TRUE(begins_with(difference(base, other), field + " is ")) << difference(base, other);
  }
}

TEST(Recipe, SaysWhereTwoDiffer) {
  Recipe there, here;
  EXPECT_EQ(difference(there, here), "");
  there.steps = 1000;
  here.steps = 2000;
  here.l2 = 0.5;  // only the first one is named
  EXPECT_EQ(difference(there, here), "steps is 1000 there and 2000 here");
  here.steps = there.steps;
  EXPECT_EQ(difference(there, here), "l2 is 0.001 there and 0.5 here");
  here.l2 = there.l2;
  here.weighting.rule = Rule::fixed(2);
  EXPECT_EQ(difference(there, here), "rule is \"none\" there and \"fixed:2\" here");
}

// Files keep their meaning when the defaults of new runs change: the values of format 1, spelled out.
TEST(RecipeJson, TakesAMissingFieldAsItsDefaultInTheFormat) {
  Json defaults = Json::parse(R"({"seed": 0, "steps": 100000, "batch": 128, "items": [5, 16], "zoom": 0.0,
      "rate": 0.001, "warmup": 0.0, "zoom_warmup": 0.0, "schedule": "constant", "l2_form": "half",
      "l2": 0.001, "l2_biases": false, "rule": "none", "normalizer": "softmax", "activation": "gelu",
      "heads": 1})");
  EXPECT_EQ(to_json(recipe_from_json(Json::object())), defaults);
  const Json whole = to_json(named_recipe("sharp"));
  for (const char* field : {"seed", "steps", "batch", "items", "zoom", "rate", "warmup", "zoom_warmup",
                            "schedule", "l2_biases", "rule", "normalizer", "activation", "heads"}) {
    Json expected = whole, json = whole;
    expected[field] = defaults.at(field);
    json.erase(field);
    EXPECT_EQ(to_json(recipe_from_json(json)), expected) << field;
  }
}

TEST(RecipeJson, NamesAnUnknownField) {
  Json json = to_json(Recipe{});
  json["momentum"] = 0.9;
  EXPECT_EQ(error_of_json(json),
            "momentum: is not a field of a recipe that this whet knows; use a newer whet");
}

// A value that isn't what the field holds is refused, not bent until it fits.
TEST(RecipeJson, NamesAFieldOfTheWrongKind) {
  const std::vector<std::pair<std::string, std::string>> wrong = {{"seed", "-1"},
                                                                  {"seed", "1.5"},
                                                                  {"seed", "\"1\""},
                                                                  {"seed", "true"},
                                                                  {"steps", "100.5"},
                                                                  {"steps", "1e300"},
                                                                  {"steps", "null"},
                                                                  {"steps", "true"},
                                                                  {"batch", "[128]"},
                                                                  {"batch", "128.25"},
                                                                  {"items", "5"},
                                                                  {"items", "[5]"},
                                                                  {"items", "[5,6,7]"},
                                                                  {"items", "[5.5,16]"},
                                                                  {"items", "{\"a\":1}"},
                                                                  {"items", "[4294967301,4294967302]"},
                                                                  {"zoom", "\"4\""},
                                                                  {"zoom", "true"},
                                                                  {"rate", "true"},
                                                                  {"rate", "[]"},
                                                                  {"warmup", "true"},
                                                                  {"zoom_warmup", "\"0\""},
                                                                  {"schedule", "1"},
                                                                  {"schedule", "\"step\""},
                                                                  {"l2_form", "\"l1\""},
                                                                  {"l2_form", "null"},
                                                                  {"l2", "null"},
                                                                  {"l2", "false"},
                                                                  {"l2_biases", "1"},
                                                                  {"l2_biases", "\"yes\""},
                                                                  {"rule", "3"},
                                                                  {"rule", "\"\""},
                                                                  {"rule", "\"none \""},
                                                                  {"normalizer", "1"},
                                                                  {"normalizer", "\"hard\""},
                                                                  {"normalizer", "\"entmax\""},
                                                                  {"activation", "\"relu\""},
                                                                  {"activation", "0"},
                                                                  {"heads", "\"2\""},
                                                                  {"heads", "1.5"},
                                                                  {"heads", "3"}};
  for (const auto& [field, value] : wrong) {
    Json json = to_json(Recipe{});
    json[field] = Json::parse(value);
    const std::string error = error_of_json(json);
    // parse_l2 speaks to the command line, which spells its options with a hyphen.
    EXPECT_TRUE(begins_with(error, field == "l2_form" ? "l2" : field))
        << field << " = " << value << ": " << error;
  }
}

TEST(RecipeJson, IsAnObject) {
  for (const char* text : {"null", "5", "\"paper\"", "[]", "[{\"seed\":1}]"}) {
    EXPECT_EQ(error_of_json(Json::parse(text)), "recipe: must be a JSON object") << text;
  }
}

TEST(RecipeCheck, AcceptsTheEndsOfEveryRange) {
  const auto accepts = [](const std::function<void(Recipe&)>& change) {
    Recipe recipe;
    change(recipe);
    return error_of([&] { check(recipe); });
  };
  EXPECT_EQ(accepts([](Recipe& r) { r.steps = r.batch = r.sets.smallest = r.sets.largest = 1; }), "");
  EXPECT_EQ(accepts([](Recipe& r) { r.steps = 1'000'000'000; }), "");
  EXPECT_EQ(accepts([](Recipe& r) { r.batch = 65536; }), "");
  EXPECT_EQ(accepts([](Recipe& r) { r.sets = {4096, 4096, 7.0}; }), "");
  EXPECT_EQ(accepts([](Recipe& r) { r.rate = r.l2 = 1; }), "");
  EXPECT_EQ(accepts([](Recipe& r) { r.rate = 5e-324; }), "");
  EXPECT_EQ(accepts([](Recipe& r) {
              r.l2 = r.sets.zoom = 0;
              r.l2_form = L2::none;
            }),
            "");
}

TEST(RecipeCheck, RefusesWhatIsBeyondAndSaysWhatMayBe) {
  const auto error = [](const std::function<void(Recipe&)>& change) {
    Recipe recipe;
    change(recipe);
    return error_of([&] { check(recipe); });
  };
  EXPECT_EQ(error([](Recipe& r) { r.steps = 0; }), "steps: is 0, must be 1 to 1000000000");
  EXPECT_EQ(error([](Recipe& r) { r.steps = 1'000'000'001; }),
            "steps: is 1000000001, must be 1 to 1000000000");
  EXPECT_EQ(error([](Recipe& r) { r.batch = -1; }), "batch: is -1, must be 1 to 65536");
  EXPECT_EQ(error([](Recipe& r) { r.batch = 65537; }), "batch: is 65537, must be 1 to 65536");
  EXPECT_EQ(error([](Recipe& r) { r.sets.smallest = 0; }),
            "items: is 0 to 16, must be a range within 1 to 4096");
  EXPECT_EQ(error([](Recipe& r) { r.sets.smallest = 17; }),
            "items: is 17 to 16, must be a range within 1 to 4096");
  EXPECT_EQ(error([](Recipe& r) { r.sets.largest = 4097; }),
            "items: is 5 to 4097, must be a range within 1 to 4096");
  EXPECT_EQ(error([](Recipe& r) { r.architecture.heads = 0; }), "heads: is 0, must be 1 or 2");
  EXPECT_EQ(error([](Recipe& r) { r.weighting = hard_weighting(); }),
            "normalizer: is hard, must be one that has a gradient, such as straight-through");
  for (const double zoom : {-0.1, 7.1, std::nan(""), double{INFINITY}}) {
    EXPECT_TRUE(begins_with(error([&](Recipe& r) { r.sets.zoom = zoom; }), "zoom: is ")) << zoom;
  }
  for (const double rate : {0.0, -0.001, 1.001, std::nan(""), double{INFINITY}}) {
    EXPECT_TRUE(begins_with(error([&](Recipe& r) { r.rate = rate; }), "rate: is ")) << rate;
  }
  for (const double l2 : {-1e-9, 1.001, std::nan(""), double{INFINITY}}) {
    EXPECT_TRUE(begins_with(error([&](Recipe& r) { r.l2 = l2; }), "l2: is ")) << l2;
  }
}

TEST(RecipeCheck, RefusesAFormWithoutStrengthAndAStrengthWithoutForm) {
  Recipe recipe;
  recipe.l2 = 0;
  EXPECT_EQ(error_of([&] { check(recipe); }), "l2: is 0.0, must be above 0, or l2-form none");
  recipe = {};
  recipe.l2_form = L2::none;
  EXPECT_EQ(error_of([&] { check(recipe); }), "l2: is 0.001, must be 0 where l2-form is none");
}

TEST(RecipeNames, AreTwoRecipes) {
  EXPECT_TRUE(named_recipe("paper") == Recipe{});
  EXPECT_EQ(named_recipe("paper").schedule, Schedule::constant);
  EXPECT_EQ(named_recipe("paper").l2, 0.001);
  const Recipe sharp = named_recipe("sharp");
  EXPECT_EQ(sharp.sets.zoom, 6);
  EXPECT_EQ(sharp.schedule, Schedule::quartic);
  EXPECT_EQ(sharp.l2_form, L2::none);
  for (const char* name : {"paper", "sharp"})
    EXPECT_EQ(error_of([&] { check(named_recipe(name)); }), "") << name;
  EXPECT_EQ(error_of([] { named_recipe("blunt"); }), "recipe: is 'blunt', must be paper or sharp");
}

TEST(RecipeNames, OfFormsAndSchedulesParseAgain) {
  for (const L2 form : {L2::none, L2::sum, L2::half, L2::decoupled}) EXPECT_EQ(parse_l2(name_of(form)), form);
  for (const Schedule schedule :
       {Schedule::constant, Schedule::linear, Schedule::cosine, Schedule::quartic}) {
    EXPECT_EQ(parse_schedule(name_of(schedule)), schedule);
  }
  EXPECT_EQ(error_of([] { parse_l2("l1"); }), "l2-form: is 'l1', must be one of none, sum, half, decoupled");
  EXPECT_EQ(error_of([] { parse_schedule(""); }),
            "schedule: is '', must be one of constant, linear, cosine, quartic");
}

TEST(RecipeRate, FollowsItsSchedule) {
  Recipe recipe{.steps = 1000, .rate = 0.25};
  for (const std::int64_t step : {0, 500, 999}) EXPECT_EQ(recipe.rate_at(step), 0.25);

  recipe.schedule = Schedule::linear;
  EXPECT_EQ(recipe.rate_at(0), 0.25);
  EXPECT_EQ(recipe.rate_at(500), 0.125);
  EXPECT_NEAR(recipe.rate_at(999), 0.25 / 1000, 1e-15);  // the step after the last would have none

  recipe.schedule = Schedule::cosine;
  EXPECT_EQ(recipe.rate_at(0), 0.25);
  EXPECT_NEAR(recipe.rate_at(250), 0.125 * (1 + std::sqrt(0.5)), 1e-15);
  EXPECT_NEAR(recipe.rate_at(500), 0.125, 1e-15);
  EXPECT_NEAR(recipe.rate_at(999), 0.25 * std::pow(M_PI / 2000, 2), 1e-11);
  EXPECT_GT(recipe.rate_at(999), 0);

  recipe.schedule = Schedule::quartic;
  EXPECT_EQ(recipe.rate_at(0), 0.25);
  EXPECT_EQ(recipe.rate_at(500), 0.25 / 16);
  EXPECT_NEAR(recipe.rate_at(999), 0.25e-12, 1e-18);

  recipe.warmup = 0.5;
  EXPECT_EQ(recipe.rate_at(0), 0.25 / 500);
  EXPECT_EQ(recipe.rate_at(500), 0.25 / 16);
  recipe.schedule = Schedule::constant;
  EXPECT_EQ(recipe.rate_at(249), 0.125);
  EXPECT_EQ(recipe.rate_at(499), 0.25);
}

TEST(RecipeZoom, GrowsOverItsWarmUp) {
  Recipe recipe{.steps = 1000, .sets = {.zoom = 4}};
  EXPECT_EQ(recipe.sets_at(0).zoom, 4);
  recipe.zoom_warmup = 0.5;
  EXPECT_EQ(recipe.sets_at(0).zoom, 4.0 / 500);
  EXPECT_EQ(recipe.sets_at(249).zoom, 2);
  EXPECT_EQ(recipe.sets_at(499).zoom, 4);
  EXPECT_EQ(recipe.sets_at(999).zoom, 4);
  EXPECT_EQ(recipe.sets_at(999).largest, 16);
}

}  // namespace
}  // namespace whet::lab
