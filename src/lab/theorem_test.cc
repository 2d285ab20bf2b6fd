// The theorem's model: tokens counted equal tokens written out, bounds hold, and every head disperses.
#include <gtest/gtest.h>
#include <whet/attention.h>
#include <whet/error.h>
#include <whet/horizon.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lab/theorem.h"

namespace whet::lab {
namespace {

constexpr double kRounding = 1e-12;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- the model in the plainest way: every token a row of its own

using Row = std::vector<double>;
using Rows = std::vector<Row>;

Row plain_affine(const Affine& map, const Row& x) {
  Row y(at(map.out));
  for (std::int64_t j = 0; j < map.out; ++j) {
    y[at(j)] = map.bias[at(j)];
    for (std::int64_t i = 0; i < map.in; ++i) y[at(j)] += x[at(i)] * map.kernel[at(i * map.out + j)];
  }
  return y;
}

// One head by whet::attention on contiguous copies; its output goes to columns of `out`.
HeadSharpness plain_head(const TheoremModel& model, const TheoremLayer& layer, const Rows& x,
                         std::int64_t head, Rows& out) {
  const std::int64_t n = static_cast<std::int64_t>(x.size()), depth = kTheoremWidth / model.config.heads;
  Row q, k, v, o(at(n * depth));
  for (const Row& row : x) {
    for (const auto& [map, columns] : {std::pair{&layer.query, &q}, {&layer.key, &k}, {&layer.value, &v}}) {
      const Row y = plain_affine(*map, row);
      columns->insert(columns->end(), y.begin() + head * depth, y.begin() + (head + 1) * depth);
    }
  }
  for (double& value : q) value *= model.config.beta;
  std::vector<RowStats> stats(x.size());
  const Dims sizes{1, 1, n, depth};
  attention({q.data(), sizes}, {k.data(), sizes}, {v.data(), sizes}, {o.data(), sizes}, {}, {.stats = stats});
  HeadSharpness sharpest{0, 0};
  for (std::int64_t i = 0; i < n; ++i) {
    sharpest.largest_weight = std::max(sharpest.largest_weight, stats[at(i)].peak);
    sharpest.spread = std::max(sharpest.spread, stats[at(i)].spread);
    std::copy_n(o.begin() + i * depth, depth, out[at(i)].begin() + head * depth);
  }
  return sharpest;
}

std::vector<HeadSharpness> plain_measure(const TheoremModel& model, const std::vector<std::int64_t>& tokens) {
  Rows x;
  for (std::int64_t symbol : tokens) {
    const auto begin = model.embeddings.begin() + symbol * kTheoremWidth;
    x.emplace_back(begin, begin + kTheoremWidth);
  }
  std::vector<HeadSharpness> result;
  for (const TheoremLayer& layer : model.layers) {
    Rows heads(x.size(), Row(at(kTheoremWidth)));
    for (std::int64_t head = 0; head < model.config.heads; ++head) {
      result.push_back(plain_head(model, layer, x, head, heads));
    }
    for (std::size_t row = 0; row < x.size(); ++row) {
      const Row attended = plain_affine(layer.output, heads[row]);
      for (std::size_t i = 0; i < x[row].size(); ++i) x[row][i] += attended[i];
      Row hidden = plain_affine(layer.up, x[row]);
      for (double& value : hidden) value = 0.5 * value * (1 + std::erf(value / std::sqrt(2.0)));
      const Row down = plain_affine(layer.down, hidden);
      for (std::size_t i = 0; i < x[row].size(); ++i) x[row][i] += down[i];
    }
  }
  return result;
}

TEST(Theorem, CountedTokensEqualTokensWrittenOut) {
  for (std::int64_t n : {2, 3, 16, 17, 300}) {
    for (const TheoremConfig& config :
         {TheoremConfig{}, TheoremConfig{.vocabulary = 5, .layers = 2, .heads = 8, .seed = 7, .beta = 1.5}}) {
      const TheoremModel model = draw_theorem_model(config);
      const std::vector<Tokens> counted = needle_sequence(config.vocabulary, n);
      std::vector<std::int64_t> written;
      for (const Tokens& entry : counted) written.insert(written.end(), at(entry.count), entry.symbol);
      ASSERT_EQ(written.size(), at(n));

      const std::vector<HeadSharpness> fast = measure_heads(model, counted);
      const std::vector<HeadSharpness> plain = plain_measure(model, written);
      ASSERT_EQ(fast.size(), at(config.layers * config.heads));
      ASSERT_EQ(plain.size(), fast.size());
      for (std::size_t i = 0; i < fast.size(); ++i) {
        EXPECT_NEAR(fast[i].largest_weight, plain[i].largest_weight, 1e-10 * plain[i].largest_weight);
        EXPECT_NEAR(fast[i].spread, plain[i].spread, 1e-10 * plain[i].spread);
      }
    }
  }
}

TEST(Theorem, NoHeadExceedsWhatItsSpreadAllowsNorItsSpreadWhatItsWeightsAllow) {
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    for (std::int64_t layers : {2, 3, 4}) {
      for (const auto& [heads, beta] : {std::pair{1, 1.0}, {4, 0.25}, {4, 3.0}, {64, 1.0}}) {
        const TheoremModel model =
            draw_theorem_model({.layers = layers, .heads = heads, .seed = seed, .beta = beta});
        const std::vector<double> implied = implied_spreads(model);
        ASSERT_EQ(implied.size(), at(layers * heads));
        for (std::int64_t n : {2, 16, 1000, 16384, 1 << 30}) {
          const std::vector<HeadSharpness> measured = measure_heads(model, needle_sequence(16, n));
          const double keys = static_cast<double>(n);
          for (std::size_t i = 0; i < measured.size(); ++i) {
            EXPECT_LE(measured[i].spread, implied[i]);
            EXPECT_LE(measured[i].largest_weight, largest_weight(keys, measured[i].spread) * (1 + kRounding));
            EXPECT_GE(measured[i].largest_weight, 1 / keys * (1 - kRounding)) << "less than the mean weight";
          }
        }
      }
    }
  }
}

TEST(Theorem, EveryHeadDisperses) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    for (std::int64_t layers : {2, 3, 4}) {
      const TheoremModel model = draw_theorem_model({.layers = layers, .seed = seed});
      const std::vector<HeadSharpness> few = measure_heads(model, needle_sequence(16, 16));
      const std::vector<HeadSharpness> many = measure_heads(model, needle_sequence(16, 1 << 24));
      const std::vector<HeadSharpness> most = measure_heads(model, needle_sequence(16, 1 << 30));
      for (std::size_t i = 0; i < most.size(); ++i) {
        const double slope =
            std::log(most[i].largest_weight / many[i].largest_weight) / std::log(std::ldexp(1.0, 6));
        EXPECT_NEAR(slope, -1, 1e-3);
        EXPECT_LT(most[i].largest_weight, 1e-5 * few[i].largest_weight);
      }
    }
  }
}

// One head whose width carries a single number: both symbols lie on one axis, a and -a, and every map is a
// multiple of the identity, so that no inequality of the bound has room but that of the GELU.
TheoremModel identity_model(double a, double query_key, double value, double up, std::int64_t heads = 1) {
  TheoremModel model = draw_theorem_model({.vocabulary = 2, .layers = 2, .heads = heads});
  std::fill(model.embeddings.begin(), model.embeddings.end(), 0);
  model.embeddings[0] = a;
  model.embeddings[at(kTheoremWidth)] = -a;
  const auto set = [](Affine& map, double factor) {
    std::fill(map.kernel.begin(), map.kernel.end(), 0);
    std::fill(map.bias.begin(), map.bias.end(), 0);
    for (std::int64_t i = 0; i < kTheoremWidth; ++i) map.kernel[at(i * map.out + i)] = factor;
  };
  for (TheoremLayer& layer : model.layers) {
    set(layer.query, query_key);
    set(layer.key, query_key);
    set(layer.value, value);
    set(layer.output, 1);
    set(layer.up, up);
    set(layer.down, 1);
  }
  return model;
}

TEST(Theorem, ImpliedSpreadsAreReachedWhereNothingIsLost) {
  const std::vector<Tokens> both = {{0, 1}, {1, 1}};
  const TheoremModel attention_only = identity_model(10, 2, 0.5, 0);
  const std::vector<double> implied = implied_spreads(attention_only);
  const std::vector<HeadSharpness> measured = measure_heads(attention_only, both);
  EXPECT_NEAR(measured[0].spread, 2 * 20 * 20 / 8.0, 1e-9);
  EXPECT_NEAR(implied[0], measured[0].spread, 1e-9 * implied[0]);
  EXPECT_NEAR(measured[1].spread, 2 * 30 * 30 / 8.0, 1e-9);
  EXPECT_NEAR(implied[1], measured[1].spread, 1e-9 * implied[1]);

  // The GELU keeps the positive symbol, 15 + 3 15, and drops what it adds to the negative one.
  const TheoremModel whole = identity_model(10, 2, 0.5, 3);
  EXPECT_NEAR(measure_heads(whole, both)[1].spread, 120 * (120 + 30) / 8.0, 1e-9);
  EXPECT_NEAR(implied_spreads(whole)[1], 2 * 120 * 120 / 8.0, 1e-9 * 3600);
}

// Four heads that each look at another token can return four values at right angles: a row twice as long as
// any single value.
TEST(Theorem, ImpliedSpreadsAllowHeadsToChooseDifferentTokens) {
  const std::vector<double> implied = implied_spreads(identity_model(10, 2, 0.5, 0, 4));
  EXPECT_NEAR(implied[0], 2 * 20 * 20 / 4.0, 1e-9 * implied[0]);
  EXPECT_NEAR(implied[4], 2 * 40 * 40 / 4.0, 1e-9 * implied[4]);
}

TEST(Theorem, ImpliedSpreadsAreEachHeadsOwn) {
  TheoremModel model = identity_model(10, 2, 0.5, 0, 4);
  for (std::int64_t i = 32; i < 48; ++i) model.layers[0].query.kernel[at(i * kTheoremWidth + i)] *= 3;
  const std::vector<double> implied = implied_spreads(model);
  for (std::size_t head : {0U, 1U, 3U}) EXPECT_NEAR(implied[head], 200, 1e-6);
  EXPECT_NEAR(implied[2], 600, 1e-6);
}

TEST(Theorem, BiasesCount) {
  TheoremModel model = identity_model(10, 2, 0.5, 0);
  const double before = implied_spreads(model)[1];
  model.layers[0].query.bias[0] = 7;
  EXPECT_NEAR(implied_spreads(model)[0], 2 * (20 + 7) * 20 / 8.0, 1e-9 * 135);
  EXPECT_EQ(implied_spreads(model)[1], before) << "a query changes no norm";
  model.layers[0].key.bias[0] = 1000;
  EXPECT_NEAR(implied_spreads(model)[0], 2 * (20 + 7) * 20 / 8.0, 1e-9 * 135) << "moves all logits alike";
  for (Affine TheoremLayer::*map :
       {&TheoremLayer::value, &TheoremLayer::output, &TheoremLayer::up, &TheoremLayer::down}) {
    TheoremModel moved = identity_model(10, 2, 0.5, 1);
    const double without = implied_spreads(moved)[1];
    (moved.layers[0].*map).bias[0] = 7;
    EXPECT_GT(implied_spreads(moved)[1], without * 1.1);
  }
}

TEST(Theorem, BetaMultipliesTheSpread) {
  const TheoremModel one = draw_theorem_model({}), three = draw_theorem_model({.beta = 3});
  const std::vector<Tokens> sequence = needle_sequence(16, 1000);
  const HeadSharpness plain = measure_heads(one, sequence)[0], sharp = measure_heads(three, sequence)[0];
  EXPECT_NEAR(sharp.spread, 3 * plain.spread, 1e-9);
  EXPECT_GT(sharp.largest_weight, plain.largest_weight);
  EXPECT_NEAR(implied_spreads(three)[0], 3 * implied_spreads(one)[0], 1e-9);
}

TEST(Theorem, NeedleSequenceHoldsOneNeedle) {
  for (std::int64_t vocabulary : {2, 3, 16}) {
    for (std::int64_t n : {std::int64_t{2}, std::int64_t{5}, std::int64_t{1000}, std::int64_t{1} << 53}) {
      const std::vector<Tokens> sequence = needle_sequence(vocabulary, n);
      EXPECT_EQ(sequence.front().symbol, 0);
      EXPECT_EQ(sequence.front().count, 1);
      std::int64_t sum = 0, least = n, most = 0;
      for (const Tokens& entry : sequence) {
        sum += entry.count;
        if (entry.symbol == 0) continue;
        least = std::min(least, entry.count);
        most = std::max(most, entry.count);
      }
      EXPECT_EQ(sum, n);
      EXPECT_LE(most - least, 1);
      EXPECT_EQ(sequence.size(), at(std::min(vocabulary, n)));
    }
  }
}

TEST(Theorem, SeedsDecideTheWeights) {
  EXPECT_EQ(draw_theorem_model({.seed = 3}).embeddings, draw_theorem_model({.seed = 3}).embeddings);
  EXPECT_NE(draw_theorem_model({.seed = 3}).embeddings, draw_theorem_model({.seed = 4}).embeddings);
  const TheoremModel model = draw_theorem_model({});
  EXPECT_NE(model.layers[0].query.kernel, model.layers[0].key.kernel);
  EXPECT_NE(model.layers[0].query.kernel, model.layers[1].query.kernel);
  double sum = 0, squares = 0;
  for (double value : model.layers[0].up.kernel) {
    sum += value;
    squares += value * value;
  }
  const double count = static_cast<double>(model.layers[0].up.kernel.size());
  EXPECT_NEAR(sum / count, 0, 4 / std::sqrt(64 * count));
  EXPECT_NEAR(squares / count * 64, 1, 4 * std::sqrt(2 / count));
}

TEST(Theorem, RefusesModelsOutOfRange) {
  const auto refused = [](const TheoremConfig& config, const std::string& name) {
    try {
      draw_theorem_model(config);
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& e) {
      EXPECT_TRUE(std::string(e.what()).starts_with(name + ": ")) << e.what();
    }
  };
  for (std::int64_t wrong : {-1, 0, 1, 1025}) refused({.vocabulary = wrong}, "vocabulary");
  for (std::int64_t wrong : {-1, 0, 9}) refused({.layers = wrong}, "layers");
  for (std::int64_t wrong : {-4, 0, 3, 128}) refused({.heads = wrong}, "heads");
  for (double wrong : {-1.0, 0.0, HUGE_VAL, std::nan("")}) refused({.beta = wrong}, "beta");
  EXPECT_THROW(needle_sequence(16, 1), Error);
  EXPECT_THROW(needle_sequence(16, (std::int64_t{1} << 53) + 1), Error);
}

}  // namespace
}  // namespace whet::lab
