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

// One set as the paper has it: a key and a value for every item, plain softmax with inverse temperature beta.
Values plain_scores(const std::vector<double>& parameters, const Batch& batch, std::int64_t set,
                    double beta) {
  const Values query{batch.queries[static_cast<std::size_t>(set)]};
  const Values encoded =
      gelu_of(plain_dense(parameters, kQuery2, gelu_of(plain_dense(parameters, kQuery1, query))));
  const Values q = plain_dense(parameters, kQ, encoded);
  Values logits, mixed(kWidth, 0.0);
  std::vector<Values> values;
  for (std::int64_t i = set * batch.items; i < (set + 1) * batch.items; ++i) {
    Values item(1 + kClasses, 0.0);
    item[0] = batch.priorities[static_cast<std::size_t>(i)];
    item[1U + batch.classes[static_cast<std::size_t>(i)]] = 1;
    const Values h = gelu_of(plain_dense(parameters, kItem2, gelu_of(plain_dense(parameters, kItem1, item))));
    const Values k = plain_dense(parameters, kK, h);
    double logit = 0;
    for (std::size_t j = 0; j < k.size(); ++j) logit += q[j] * k[j];
    logits.push_back(beta * logit / std::sqrt(128.0));
    values.push_back(plain_dense(parameters, kV, h));
  }
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - largest);
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t j = 0; j < mixed.size(); ++j)
      mixed[j] += std::exp(logits[i] - largest) / sum * values[i][j];
  }
  return plain_dense(parameters, kOutput,
                     gelu_of(plain_dense(parameters, kHidden, plain_dense(parameters, kO, mixed))));
}

double loss_of(const std::vector<double>& parameters, const Batch& batch, const Weighting& weighting) {
  Head<double> head;
  head.forward(parameters.data(), batch, std::span(&weighting, 1));
  return head.loss();
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
  const std::vector<Weighting> weightings{{}, {.rule = Rule::fixed(3)}, {.rule = {}, .hard = true}};
  for_each_target([&] {
    Head<double> exact;
    exact.forward(parameters.data(), batch, weightings);
    Head<float> head;
    head.forward(rounded.data(), batch, weightings);
    const double betas[] = {1, 3, 1e9};
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t set = 0; set < batch.sets; ++set) {
        const Values expected = plain_scores(parameters, batch, set, betas[r]);
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

class Gradients : public testing::TestWithParam<std::string> {};

TEST_P(Gradients, AreThoseOfDifferences) {
  const Weighting weighting{.rule = Rule::parse(GetParam())};
  const Batch batch = small_batch(7, 11);
  std::vector<double> parameters = some_parameters(4);
  for_each_target([&] {
    Head<double> head;
    head.forward(parameters.data(), batch, std::span(&weighting, 1));
    std::vector<double> gradients(kParameters, NAN);
    head.backward(gradients.data());
    // A few of every tensor, and each tensor in one random direction.
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
        const double measured = (loss_of(plus, batch, weighting) - loss_of(minus, batch, weighting)) / 2e-6;
        EXPECT_NEAR(measured, expected, 1e-8 + 1e-6 * std::abs(expected)) << layer.name << " from " << begin;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rules, Gradients,
                         testing::Values("none", "paper", "fixed:2.5", "log-length:8", "target-entropy:0.7",
                                         "target-peak:0.6", "ssmax:0.8", "log-power:0.5,0.3,1.5",
                                         "llama4:4,0.5"));

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

}  // namespace
}  // namespace whet::lab
