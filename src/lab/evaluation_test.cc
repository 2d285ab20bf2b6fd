// What is measured of a head, against a plain look at the same sets.
#include "lab/evaluation.h"

#include <gtest/gtest.h>
#include <whet/error.h>
#include <whet/horizon.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "lab/calibration.h"
#include "lab/diagnosis.h"
#include "lab/fit_points.h"
#include "lab/trainer.h"

namespace whet::lab {
namespace {

// A head that has learned something: a second of training.
const std::vector<float>& trained() {
  static const std::vector<float> parameters = [] {
    const Recipe recipe{.steps = 600, .batch = 32};
    Trainer trainer(recipe, initial_state(recipe));
    for (int step = 0; step < 600; ++step) trainer.step();
    return trainer.state().parameters;
  }();
  return parameters;
}

const std::vector<NamedWeighting>& rules() {
  static const std::vector<NamedWeighting> rules{{"softmax", {}},
                                                 {"paper", {.rule = Rule::paper()}},
                                                 {"target", {.rule = Rule::target_entropy(0.1)}},
                                                 {"hard", hard_weighting()}};
  return rules;
}

TEST(Evaluation, CountsWhatAPlainLookCounts) {
  const std::int64_t items = 40, sets = 150;  // more sets than go through the model at once
  const SizeOutcome outcome =
      evaluate(trained(), rules(), {.sizes = {items}, .sets = sets, .seed = 9}).front();
  Batch batch;
  draw_sets(9, Stream::evaluation, items, 0, sets, batch);
  Head<double> head;
  const std::vector<double> exact(trained().begin(), trained().end());
  const Weighting plain{};
  head.forward(exact.data(), batch, std::span(&plain, 1));
  double entropy = 0, spread = 0, largest = 0;
  std::int64_t ranked = 0;
  for (std::int64_t set = 0; set < sets; ++set) {
    const auto x = head.logits().subspan(static_cast<std::size_t>(set * items), items);
    const auto [low, high] = std::minmax_element(x.begin(), x.end());
    double z = 0, t = 0;
    for (const double logit : x) {
      z += std::exp(logit - *high);
      t += std::exp(logit - *high) * (logit - *high);
    }
    entropy += (std::log(z) - t / z) / static_cast<double>(sets);
    spread += (*high - *low) / static_cast<double>(sets);
    largest = std::max(largest, *high - *low);
    const auto best = static_cast<std::size_t>(set * items + std::distance(x.begin(), high));
    ranked += batch.classes[best] == batch.targets[static_cast<std::size_t>(set)] ? 1 : 0;
  }
  EXPECT_EQ(outcome.ranked, ranked);
  EXPECT_EQ(outcome.items, items);
  EXPECT_EQ(outcome.sets, sets);
  EXPECT_EQ(outcome.outcomes[0].correct, head.correct());
  EXPECT_NEAR(outcome.entropy, entropy, 1e-4);
  EXPECT_NEAR(outcome.spread, spread, 1e-3);
  EXPECT_NEAR(outcome.largest_spread, largest, 1e-3);
  EXPECT_NEAR(outcome.outcomes[0].entropy, outcome.entropy, 1e-9);
  EXPECT_EQ(outcome.outcomes[0].beta, 1);
  EXPECT_EQ(outcome.outcomes[0].sharpened, 0);
  EXPECT_NEAR(outcome.outcomes[2].entropy, 0.1, 0.03);  // but for rows that are sharper already
  EXPECT_EQ(outcome.outcomes[3].peak, 1);
  EXPECT_EQ(outcome.outcomes[3].entropy, 0);
  EXPECT_LE(outcome.outcomes[0].largest_peak, largest_weight(items, outcome.largest_spread) * (1 + 1e-6));
}

// What is said of the logits doesn't depend on what made weights of them.
TEST(Evaluation, MeasuresTheSameLogitsUnderEveryNormalizer) {
  const EvaluationOptions options{.sizes = {40}, .sets = 50, .seed = 9};
  const SizeOutcome plain = evaluate(trained(), rules(), options).front();
  for (const char* name : {"sparsemax", "entmax15", "entmax:1.3", "top-k:4", "hard", "straight-through",
                           "sigmoid", "relu", "softpick"}) {
    const std::vector<NamedWeighting> own{{name, {.rule = {}, .normalizer = Normalizer::parse(name)}}};
    const SizeOutcome outcome = evaluate(trained(), own, options).front();
    EXPECT_NEAR(outcome.entropy, plain.entropy, 1e-6) << name;
    EXPECT_NEAR(outcome.spread, plain.spread, 1e-5) << name;
    EXPECT_EQ(outcome.ranked, plain.ranked) << name;
    EXPECT_EQ(outcome.predicted, plain.predicted) << name;
  }
}

TEST(Evaluation, IsTheSameForAnyNumberOfThreads) {
  const EvaluationOptions one{.sizes = {16, 700}, .sets = 70, .seed = 2, .threads = 1};
  EvaluationOptions three = one;
  three.threads = 3;
  const auto a = evaluate(trained(), rules(), one), b = evaluate(trained(), rules(), three);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].entropy, b[i].entropy);
    EXPECT_EQ(a[i].predicted, b[i].predicted);
    for (std::size_t r = 0; r < rules().size(); ++r) {
      EXPECT_EQ(a[i].outcomes[r].correct, b[i].outcomes[r].correct);
      EXPECT_EQ(a[i].outcomes[r].beta, b[i].outcomes[r].beta);
      EXPECT_EQ(a[i].outcomes[r].entropy, b[i].outcomes[r].entropy);
    }
  }
}

TEST(Evaluation, ReportsEveryItemAsProgress) {
  std::atomic<std::int64_t> seen = 0;
  EvaluationOptions options{.sizes = {5, 33}, .sets = 20};
  options.progress = [&](std::int64_t items) { seen += items; };
  evaluate(trained(), rules(), options);
  EXPECT_EQ(seen, items_to_evaluate(options));
  EXPECT_EQ(seen, 20 * 38);
}

TEST(Evaluation, RefusesSizesThatAreNone) {
  EXPECT_THROW(evaluate(trained(), rules(), {.sizes = {16, 0}, .sets = 1}), Error);
  EXPECT_THROW(evaluate(trained(), rules(), {.sizes = {1LL << 40}, .sets = 1}), Error);
}

TEST(Evaluation, DoubleArithmeticAgrees) {
  const EvaluationOptions options{.sizes = {64}, .sets = 50, .seed = 3};
  EvaluationOptions exact = options;
  exact.precision = Precision::f64;
  const auto a = evaluate(trained(), rules(), options).front(),
             b = evaluate(trained(), rules(), exact).front();
  EXPECT_NEAR(a.entropy, b.entropy, 1e-4);
  EXPECT_NE(a.entropy, b.entropy);
}

TEST(HeatMap, HasTheWeightsOfTheLargestPriorities) {
  const std::vector<float> map = heat_map(trained(), rules(), 4, 50, 3, 8);
  ASSERT_EQ(map.size(), rules().size() * 3 * 8);
  Batch batch;
  draw_sets(4, Stream::evaluation, 50, 2, 1, batch);
  Head<float> head;
  const Weighting plain{};
  head.forward(trained().data(), batch, std::span(&plain, 1));
  std::vector<std::size_t> order(50);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](auto a, auto b) { return batch.priorities[a] > batch.priorities[b]; });
  for (std::size_t c = 0; c < 8; ++c) EXPECT_EQ(map[2 * 8 + c], head.weights()[order[c]]);
}

TEST(Diagnosis, PredictsTheCeiling) {
  // The offsets of ten classes and one slope say how often the largest logit has the wrong class.
  const auto outcomes = evaluate(trained(), rules(), {.sizes = {16, 128, 1024}, .sets = 400});
  for (const SizeOutcome& size : outcomes) {
    const double ceiling = static_cast<double>(size.outcomes[3].correct) / static_cast<double>(size.sets);
    const double predicted = static_cast<double>(size.predicted) / static_cast<double>(size.sets);
    EXPECT_NEAR(predicted, ceiling, 0.08) << size.items;
  }
  const Diagnosis diagnosis = diagnose(trained());
  EXPECT_GT(diagnosis.slope, 1);
  EXPECT_NEAR(std::accumulate(diagnosis.offsets.begin(), diagnosis.offsets.end(), 0.0), 0, 1e-9);
  EXPECT_NEAR(diagnosis.resolution, diagnosis.slope / diagnosis.deviation, 1e-9);
}

class Calibrated : public testing::TestWithParam<CalibrationMethod> {};

TEST_P(Calibrated, RanksByPriority) {
  const Calibration calibration = calibrate(trained(), GetParam(), 1);
  EXPECT_EQ(calibration.directions, kClasses - 1);  // pairs find the number by themselves
  for (std::int64_t i = 0; i < kParameters; ++i) {
    if (i >= kModel[kK].kernel && i < kModel[kK].bias) continue;
    ASSERT_EQ(calibration.parameters[static_cast<std::size_t>(i)], trained()[static_cast<std::size_t>(i)]);
  }
  const EvaluationOptions options{.sizes = {1024}, .sets = 200};
  const SizeOutcome before = evaluate(trained(), rules(), options).front();
  const SizeOutcome after = evaluate(calibration.parameters, rules(), options).front();
  EXPECT_GT(after.outcomes[3].correct, 150);
  EXPECT_LT(before.outcomes[3].correct, 120);
  EXPECT_GT(diagnose(calibration.parameters).resolution, 3 * diagnose(trained()).resolution);
}

INSTANTIATE_TEST_SUITE_P(Methods, Calibrated,
                         testing::Values(CalibrationMethod::classes, CalibrationMethod::pairs));

TEST(FitPoints, AreTheMisrankedSets) {
  const FitPointsOptions options{.sizes = {16, 256}, .sets = 60, .seed = 5, .threads = 2};
  const std::vector<FitPoint> points = fit_points(trained(), options);
  std::size_t expected = 0;
  for (const std::int64_t items : options.sizes) {
    Batch batch;
    draw_sets(5, Stream::fit, items, 0, 60, batch);
    Head<float> head;
    const Weighting plain{};
    head.forward(trained().data(), batch, std::span(&plain, 1));
    for (std::int64_t set = 0; set < 60; ++set) {
      const float* x = head.logits().data() + set * items;
      const float* p = batch.priorities.data() + set * items;
      const auto right = std::max_element(p, p + items) - p;
      if (std::max_element(x, x + items) - x == right) continue;
      const FitPoint& point = points.at(expected++);
      EXPECT_NEAR(point.entropy, head.stats()[static_cast<std::size_t>(set)].entropy, 1e-12);
      EXPECT_EQ(point.best_beta, best_beta(std::span(x, static_cast<std::size_t>(items)),
                                           static_cast<std::size_t>(right), 0x1p20));
    }
  }
  EXPECT_EQ(points.size(), expected);
  EXPECT_GT(expected, 10);
}

}  // namespace
}  // namespace whet::lab
