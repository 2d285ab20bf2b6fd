// The head against a plain evaluation of its definition, and its gradients against differences.
#include "lab/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "targets.h"

namespace whet::lab {
namespace {

Batch small_batch(std::int64_t sets, std::int64_t items) {
  Batch batch;
  draw_sets(3, Stream::evaluation, items, 0, sets, batch);
  return batch;
}

// Weights with every bias off zero, so that none is untested.
std::vector<double> some_parameters(std::uint64_t seed) {
  const std::vector<float> initial = initial_parameters(seed);
  std::vector<double> parameters(initial.begin(), initial.end());
  Random random(seed, Stream::fit, 0);
  for (double& p : parameters) p = 1.5 * p + 0.1 * (random.uniform() - 0.5);
  return parameters;
}

double plain_gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

using Values = std::vector<double>;

Values plain_dense(const std::vector<double>& parameters, LayerId id, const Values& x) {
  const Layer& layer = kModel[id];
  Values y(parameters.begin() + layer.bias, parameters.begin() + layer.bias + layer.out);
  for (std::int64_t i = 0; i < layer.in; ++i) {
    for (std::int64_t j = 0; j < layer.out; ++j) {
      y[static_cast<std::size_t>(j)] +=
          x[static_cast<std::size_t>(i)] *
          parameters[static_cast<std::size_t>(layer.kernel + i * layer.out + j)];
    }
  }
  return y;
}

Values gelu_of(Values x) {
  for (double& value : x) value = plain_gelu(value);
  return x;
}

Values softmax_of(const Values& logits, double beta) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double x : logits) sum += std::exp(beta * (x - largest));
  Values weights;
  for (const double x : logits) weights.push_back(std::exp(beta * (x - largest)) / sum);
  return weights;
}

Values hard_of(const Values& logits) {
  Values weights(logits.size(), 0.0);
  weights[static_cast<std::size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())] = 1;
  return weights;
}

// What a set goes through, where straight-through gradients need it.
struct PlainSet {
  std::vector<Values> item1, item2;  // before the activation, one per item
  std::vector<Values> logits;        // one per head
};

// One set as the definition has it: a key and a value for every item and head. Jumps (the step, hard weights)
// are those of the set itself. Around `anchor` they are what gives straight-through gradients by differences:
// the jump of the anchor, and what its stand-in (ramp, softmax) has changed since.
struct PlainHead {
  Architecture architecture{};
  double beta = 1;
  bool straight_through = false;  // the first head

  Values activate(const Values& x, const Values& anchor) const {
    Values y = gelu_of(x);
    if (architecture.activation != Activation::step) return y;
    const auto ramp = [](double v) { return std::clamp(v, -0.5, 0.5); };
    for (std::size_t i = 0; i < x.size(); ++i) y[i] += (anchor[i] > 0 ? 1 : 0) + ramp(x[i]) - ramp(anchor[i]);
    return y;
  }

  Values weights(std::size_t head, const Values& logits, const Values& anchor) const {
    if (head == 0 && !straight_through) return softmax_of(logits, beta);
    Values result = hard_of(anchor);
    const Values now = softmax_of(logits, 1), then = softmax_of(anchor, 1);
    for (std::size_t i = 0; i < result.size(); ++i) result[i] += now[i] - then[i];
    return result;
  }

  Values scores(const std::vector<double>& parameters, const Batch& batch, std::int64_t set,
                const PlainSet* anchor = nullptr, PlainSet* seen = nullptr) const {
    const Values query{batch.queries[static_cast<std::size_t>(set)]};
    const Values encoded =
        gelu_of(plain_dense(parameters, kQuery2, gelu_of(plain_dense(parameters, kQuery1, query))));
    const Values q = plain_dense(parameters, kQ, encoded);
    const auto heads = static_cast<std::size_t>(architecture.heads), width = kWidth / heads;
    PlainSet here;
    here.logits.resize(heads);
    std::vector<Values> values;
    for (std::int64_t i = 0; i < batch.items; ++i) {
      const auto at = static_cast<std::size_t>(set * batch.items + i), number = static_cast<std::size_t>(i);
      Values item(1 + kClasses, 0.0);
      item[0] = batch.priorities[at];
      item[1U + batch.classes[at]] = 1;
      const auto pass = [&](LayerId layer, const Values& x, std::vector<Values>& kept,
                            const std::vector<Values>* of_anchor) {
        kept.push_back(plain_dense(parameters, layer, x));
        return activate(kept.back(), of_anchor == nullptr ? kept.back() : of_anchor->at(number));
      };
      const Values h1 = pass(kItem1, item, here.item1, anchor == nullptr ? nullptr : &anchor->item1);
      const Values h2 = pass(kItem2, h1, here.item2, anchor == nullptr ? nullptr : &anchor->item2);
      const Values k = plain_dense(parameters, kK, h2);
      for (std::size_t head = 0; head < heads; ++head) {
        double logit = 0;
        for (std::size_t j = head * width; j < (head + 1) * width; ++j) logit += q[j] * k[j];
        here.logits[head].push_back(logit / std::sqrt(static_cast<double>(width)));
      }
      values.push_back(plain_dense(parameters, kV, h2));
    }
    Values mixed(kWidth, 0.0);
    for (std::size_t head = 0; head < heads; ++head) {
      const Values& logits = here.logits[head];
      const Values w = weights(head, logits, anchor == nullptr ? logits : anchor->logits[head]);
      for (std::size_t j = head * width; j < (head + 1) * width; ++j) {
        for (std::size_t i = 0; i < values.size(); ++i) mixed[j] += w[i] * values[i][j];
      }
    }
    if (seen != nullptr) *seen = here;
    return plain_dense(parameters, kOutput,
                       gelu_of(plain_dense(parameters, kHidden, plain_dense(parameters, kO, mixed))));
  }

  double loss(const std::vector<double>& parameters, const Batch& batch,
              const std::vector<PlainSet>& anchors) const {
    double sum = 0;
    for (std::int64_t set = 0; set < batch.sets; ++set) {
      const Values shares =
          softmax_of(scores(parameters, batch, set, &anchors[static_cast<std::size_t>(set)]), 1);
      sum -= std::log(shares[batch.targets[static_cast<std::size_t>(set)]]);
    }
    return sum / static_cast<double>(batch.sets);
  }
};

double loss_of(const std::vector<double>& parameters, const Batch& batch, const Weighting& weighting) {
  Head<double> head;
  head.forward(parameters.data(), batch, std::span(&weighting, 1));
  return head.loss();
}

std::vector<double> gradients_of(const std::vector<double>& parameters, const Batch& batch,
                                 const Weighting& weighting, const Architecture& architecture = {}) {
  Head<double> head(architecture);
  head.forward(parameters.data(), batch, std::span(&weighting, 1));
  std::vector<double> gradients(kParameters, NAN);
  head.backward(gradients.data());
  return gradients;
}

// Each tensor in one random direction.
template <typename Loss>
void expect_gradients(const std::vector<double>& gradients, const std::vector<double>& parameters,
                      const Loss& loss) {
  Random random(5, Stream::fit, 1);
  for (const Layer& layer : kModel) {
    for (const auto& [begin, end] :
         {std::pair{layer.kernel, layer.bias}, {layer.bias, layer.bias + layer.out}}) {
      std::vector<double> plus = parameters, minus = parameters;
      double expected = 0;
      for (std::int64_t i = begin; i < end; ++i) {
        const double direction = random.uniform() - 0.5;
        plus[static_cast<std::size_t>(i)] += 1e-6 * direction;
        minus[static_cast<std::size_t>(i)] -= 1e-6 * direction;
        expected += gradients[static_cast<std::size_t>(i)] * direction;
      }
      const double measured = (loss(plus) - loss(minus)) / 2e-6;
      EXPECT_NEAR(measured, expected, 1e-8 + 1e-6 * std::abs(expected)) << layer.name << " from " << begin;
    }
  }
}

TEST(Model, HasThePapersParameters) {
  EXPECT_EQ(kModel.front().kernel, 0);
  for (std::size_t l = 0; l + 1 < kModel.size(); ++l) {
    EXPECT_EQ(kModel[l].bias, kModel[l].kernel + kModel[l].in * kModel[l].out);
    EXPECT_EQ(kModel[l + 1].kernel, kModel[l].bias + kModel[l].out);
  }
  EXPECT_EQ(kModel.back().bias + kModel.back().out, 118666);
}

TEST(Model, BeginsWithCutNormalKernelsAndNoBias) {
  const std::vector<float> parameters = initial_parameters(7);
  for (const Layer& layer : kModel) {
    double square = 0, largest = 0;
    for (std::int64_t i = layer.kernel; i < layer.bias; ++i) {
      const double p = parameters[static_cast<std::size_t>(i)];
      square += p * p;
      largest = std::max(largest, std::abs(p));
    }
    const auto count = static_cast<double>(layer.bias - layer.kernel);
    const double variance = 1 / static_cast<double>(layer.in);
    EXPECT_NEAR(square / count / variance, 1, 5 / std::sqrt(count)) << layer.name;
    EXPECT_LE(largest, 2 / 0.8796 * std::sqrt(variance)) << layer.name;
    for (std::int64_t i = 0; i < layer.out; ++i)
      EXPECT_EQ(parameters[static_cast<std::size_t>(layer.bias + i)], 0);
  }
  EXPECT_EQ(parameters, initial_parameters(7));
  EXPECT_NE(parameters, initial_parameters(8));
}

TEST(Model, IsThePapersHead) {
  const std::vector<double> parameters = some_parameters(1);
  const std::vector<float> rounded(parameters.begin(), parameters.end());
  const Batch batch = small_batch(5, 37);
  const std::vector<Weighting> weightings{{}, {.rule = Rule::fixed(3)}, hard_weighting()};
  for_each_target([&] {
    Head<double> exact;
    exact.forward(parameters.data(), batch, weightings);
    Head<float> head;
    head.forward(rounded.data(), batch, weightings);
    const double betas[] = {1, 3, 1e9};
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t set = 0; set < batch.sets; ++set) {
        const Values expected = PlainHead{.beta = betas[r]}.scores(parameters, batch, set);
        for (std::int64_t c = 0; c < kClasses; ++c) {
          const auto at = static_cast<std::size_t>((r * batch.sets + set) * kClasses + c);
          EXPECT_NEAR(exact.scores()[at], expected[static_cast<std::size_t>(c)], 1e-11) << r << " " << set;
          EXPECT_NEAR(head.scores()[at], expected[static_cast<std::size_t>(c)], 2e-4) << r << " " << set;
        }
      }
    }
  });
}

TEST(Model, GivesTheSameBitsWhateverIsKept) {
  const std::vector<float> parameters = initial_parameters(2);
  const std::vector<Weighting> weightings{{}, {.rule = Rule::paper()}};
  for (const std::int64_t items : {1, 16, 1000}) {
    const Batch batch = small_batch(3, items);
    Head<float> all, encoded, nothing;
    all.forward(parameters.data(), batch, weightings, Keep::all);
    encoded.forward(parameters.data(), batch, weightings, Keep::encoded);
    nothing.forward(parameters.data(), batch, weightings, Keep::nothing);
    for (std::size_t i = 0; i < all.scores().size(); ++i) {
      EXPECT_EQ(all.scores()[i], encoded.scores()[i]);
      EXPECT_EQ(all.scores()[i], nothing.scores()[i]);
    }
  }
}

TEST(Model, SumsAMillionSmallWeightsWithoutLosingThem) {
  // Nearly equal weights, the worst case: each is a millionth of the sum.
  std::vector<float> parameters = initial_parameters(3);
  for (std::int64_t i = kModel[kK].kernel; i < kModel[kK].bias; ++i)
    parameters[static_cast<std::size_t>(i)] *= 1e-3F;
  const std::vector<double> exact(parameters.begin(), parameters.end());
  const Batch batch = small_batch(1, 1 << 20);
  const Weighting weighting{};
  Head<float> head;
  head.forward(parameters.data(), batch, std::span(&weighting, 1), Keep::nothing);
  Head<double> wide;
  wide.forward(exact.data(), batch, std::span(&weighting, 1), Keep::nothing);
  for (std::size_t c = 0; c < kClasses; ++c) EXPECT_NEAR(head.scores()[c], wide.scores()[c], 2e-6) << c;
}

class Gradients : public testing::TestWithParam<std::pair<const char*, const char*>> {};  // rule, normalizer

TEST_P(Gradients, AreThoseOfDifferences) {
  const auto [rule, normalizer] = GetParam();
  const Weighting weighting{.rule = Rule::parse(rule), .normalizer = Normalizer::parse(normalizer)};
  const Batch batch = small_batch(7, 11);
  const std::vector<double> parameters = some_parameters(4);
  for_each_target([&] {
    expect_gradients(gradients_of(parameters, batch, weighting), parameters,
                     [&](const std::vector<double>& p) { return loss_of(p, batch, weighting); });
  });
}

INSTANTIATE_TEST_SUITE_P(
    Rules, Gradients,
    testing::Values(std::pair{"none", "softmax"}, std::pair{"paper", "softmax"},
                    std::pair{"fixed:2.5", "softmax"}, std::pair{"log-length:8", "softmax"},
                    std::pair{"target-entropy:0.7", "softmax"}, std::pair{"target-peak:0.6", "softmax"},
                    std::pair{"ssmax:0.8", "softmax"}, std::pair{"log-power:0.5,0.3,1.5", "softmax"},
                    std::pair{"llama4:4,0.5", "softmax"}));
INSTANTIATE_TEST_SUITE_P(Normalizers, Gradients,
                         testing::Values(std::pair{"none", "sparsemax"}, std::pair{"none", "entmax15"},
                                         std::pair{"none", "entmax:1.3"}, std::pair{"none", "top-k:4"},
                                         std::pair{"none", "sigmoid"}, std::pair{"none", "relu"},
                                         std::pair{"none", "softpick"},
                                         std::pair{"log-power:1,0.5,2", "entmax15"},
                                         std::pair{"ssmax:0.43", "sigmoid"}));

// Heads with a jump somewhere: scores by their definition, gradients by differences of the stand-ins.
struct Variant {
  Architecture architecture{};
  const char* normalizer = "softmax";
};

class Variants : public testing::TestWithParam<Variant> {
 protected:
  const Weighting weighting{.rule = {}, .normalizer = Normalizer::parse(GetParam().normalizer)};
  const PlainHead plain{.architecture = GetParam().architecture,
                        .straight_through = weighting.normalizer != Normalizer()};
  const std::vector<double> parameters = some_parameters(4);
};

TEST_P(Variants, HaveTheScoresOfTheirDefinition) {
  const std::vector<float> rounded(parameters.begin(), parameters.end());
  const Batch batch = small_batch(5, 37);
  const std::vector<Weighting> weightings{weighting, hard_weighting()};
  for_each_target([&] {
    Head<double> exact(GetParam().architecture);
    exact.forward(parameters.data(), batch, weightings);
    Head<float> head(GetParam().architecture);
    head.forward(rounded.data(), batch, weightings, Keep::nothing);
    for (std::int64_t r = 0; r < 2; ++r) {
      PlainHead expected = plain;
      expected.straight_through = plain.straight_through || r == 1;
      for (std::int64_t set = 0; set < batch.sets; ++set) {
        const Values scores = expected.scores(parameters, batch, set);
        for (std::int64_t c = 0; c < kClasses; ++c) {
          const auto at = static_cast<std::size_t>((r * batch.sets + set) * kClasses + c);
          EXPECT_NEAR(exact.scores()[at], scores[static_cast<std::size_t>(c)], 1e-11) << r << " " << set;
          EXPECT_NEAR(head.scores()[at], scores[static_cast<std::size_t>(c)], 2e-4) << r << " " << set;
        }
      }
    }
  });
}

TEST_P(Variants, HaveStraightThroughGradients) {
  const Batch batch = small_batch(4, 7);
  std::vector<PlainSet> anchors(static_cast<std::size_t>(batch.sets));
  for (std::int64_t set = 0; set < batch.sets; ++set)
    plain.scores(parameters, batch, set, nullptr, &anchors[static_cast<std::size_t>(set)]);
  expect_gradients(gradients_of(parameters, batch, weighting, GetParam().architecture), parameters,
                   [&](const std::vector<double>& p) { return plain.loss(p, batch, anchors); });
}

INSTANTIATE_TEST_SUITE_P(
    Model, Variants,
    testing::Values(Variant{.normalizer = "straight-through"},
                    Variant{.architecture = {.activation = Activation::step}},
                    Variant{.architecture = {.heads = 2}},
                    Variant{.architecture = {.activation = Activation::step, .heads = 2}},
                    Variant{.architecture = {.heads = 2}, .normalizer = "straight-through"}));

TEST(Model, FloatGradientsAreNearDoubleOnes) {
  const std::vector<double> parameters = some_parameters(6);
  const std::vector<float> rounded(parameters.begin(), parameters.end());
  const std::vector<double> same(rounded.begin(), rounded.end());
  const Batch batch = small_batch(64, 16);
  const Weighting weighting{};
  Head<double> exact;
  exact.forward(same.data(), batch, std::span(&weighting, 1));
  std::vector<double> expected(kParameters);
  exact.backward(expected.data());
  for_each_target([&] {
    Head<float> head;
    head.forward(rounded.data(), batch, std::span(&weighting, 1));
    std::vector<float> gradients(kParameters, NAN);
    head.backward(gradients.data());
    for (const Layer& layer : kModel) {
      if (&layer == &kModel[kK]) continue;  // its bias has a gradient of 0, all rounding; its kernel is below
      double largest = 0, error = 0;
      for (std::int64_t i = layer.kernel; i < layer.bias + layer.out; ++i) {
        const auto at = static_cast<std::size_t>(i);
        largest = std::max(largest, std::abs(expected[at]));
        error = std::max(error, std::abs(static_cast<double>(gradients[at]) - expected[at]));
      }
      EXPECT_LE(error, 2e-5 * largest) << layer.name;
    }
    for (std::int64_t i = kModel[kK].kernel; i < kModel[kK].bias; ++i) {
      EXPECT_NEAR(gradients[static_cast<std::size_t>(i)], expected[static_cast<std::size_t>(i)], 1e-6);
    }
  });
}

TEST(Model, LeavesOutOnlyItemsThatDontCount) {
  // Sharpened a thousandfold all but one or two items of a set have no weight; the gradient is that of
  // differences.
  const Weighting weighting{.rule = Rule::fixed(1000)};
  const Batch batch = small_batch(9, 16);
  const std::vector<double> parameters = some_parameters(8);
  Head<double> head;
  head.forward(parameters.data(), batch, std::span(&weighting, 1));
  std::vector<double> gradients(kParameters);
  head.backward(gradients.data());
  const Layer& layer = kModel[kItem2];
  std::vector<double> plus = parameters, minus = parameters;
  double expected = 0;
  for (std::int64_t i = layer.kernel; i < layer.bias; ++i) {
    const double direction = i % 3 == 0 ? 1 : -0.5;
    plus[static_cast<std::size_t>(i)] += 1e-9 * direction;
    minus[static_cast<std::size_t>(i)] -= 1e-9 * direction;
    expected += gradients[static_cast<std::size_t>(i)] * direction;
  }
  const double measured = (loss_of(plus, batch, weighting) - loss_of(minus, batch, weighting)) / 2e-9;
  EXPECT_NEAR(measured, expected, 1e-4 * std::abs(expected) + 1e-5);
}

TEST(Model, CountsItemsWhoseWeightsAreAllSmall) {
  // Logits near -30: weights of sigmoid are about 1e-14 each, and so is what they pass on.
  std::vector<double> parameters = some_parameters(8);
  const Layer& q = kModel[kQ];
  const Layer& k = kModel[kK];
  for (std::int64_t i = 0; i < kWidth; ++i) {
    parameters[static_cast<std::size_t>(q.bias + i)] = 1;
    parameters[static_cast<std::size_t>(k.bias + i)] = -30 / std::sqrt(static_cast<double>(kWidth));
  }
  for (std::int64_t i = q.kernel; i < q.bias; ++i) parameters[static_cast<std::size_t>(i)] *= 0.01;
  const std::vector<float> rounded(parameters.begin(), parameters.end());
  const std::vector<double> same(rounded.begin(), rounded.end());
  const Batch batch = small_batch(9, 16);
  const Weighting weighting{.rule = {}, .normalizer = Normalizer::parse("sigmoid")};
  const std::vector<double> expected = gradients_of(same, batch, weighting);
  Head<float> head;
  head.forward(rounded.data(), batch, std::span(&weighting, 1));
  ASSERT_LT(*std::max_element(head.weights().begin(), head.weights().end()), 1e-10);
  std::vector<float> gradients(kParameters, NAN);
  head.backward(gradients.data());
  const Layer& layer = kModel[kItem2];
  double largest = 0, error = 0;
  for (auto i = static_cast<std::size_t>(layer.kernel); i < static_cast<std::size_t>(layer.bias); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    error = std::max(error, std::abs(static_cast<double>(gradients[i]) - expected[i]));
  }
  EXPECT_GT(largest, 0);
  EXPECT_LE(error, 1e-4 * largest);
}

TEST(Model, GivesNoItemAGradientWhereNoneHasWeight) {
  std::vector<double> parameters = some_parameters(8);
  const Layer& k = kModel[kK];
  std::fill(parameters.begin() + k.kernel, parameters.begin() + k.bias + k.out, 0.0);  // logits of 0
  const Weighting weighting{.rule = {}, .normalizer = Normalizer::parse("relu")};
  const std::vector<double> gradients = gradients_of(parameters, small_batch(9, 16), weighting);
  for (const LayerId id : {kItem1, kItem2, kQuery1, kQuery2, kQ, kK, kV}) {
    const Layer& layer = kModel[id];
    for (std::int64_t i = layer.kernel; i < layer.bias + layer.out; ++i)
      ASSERT_EQ(gradients[static_cast<std::size_t>(i)], 0) << layer.name;
  }
  EXPECT_NE(gradients[static_cast<std::size_t>(kModel[kOutput].bias)], 0);
}

}  // namespace
}  // namespace whet::lab
