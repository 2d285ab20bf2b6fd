// The normalizer `hard` against what it says: the largest logit takes all, ties share, nothing has a gradient
// through it. It also shows what a normalizer gets from the row engine: rows, attention on both paths, masks,
// sinks, statistics, shards, backward.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "targets.h"

namespace whet {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const Normalizer kHard = Normalizer::parse("hard");

template <typename T>
std::vector<T> draw_logits(std::size_t n, unsigned seed) {
  std::vector<T> values(n);
  for (T& value : values) {
    seed = seed * 1664525 + 1013904223;
    value = static_cast<T>(static_cast<double>(seed >> 24) / 16 - 8);  // 256 values: ties among many
  }
  return values;
}

// Weights of one row, as the definition says; all 0 without visible keys.
template <typename T>
std::vector<double> hard_weights(const T* x, std::size_t n) {
  double max = -kInf, ties = 0;
  for (std::size_t i = 0; i < n; ++i) max = std::max(max, static_cast<double>(x[i]));
  for (std::size_t i = 0; i < n; ++i) ties += static_cast<double>(x[i]) == max ? 1 : 0;
  std::vector<double> weights(n, 0);
  for (std::size_t i = 0; i < n && max > -kInf; ++i) {
    if (static_cast<double>(x[i]) == max) weights[i] = 1 / ties;
  }
  return weights;
}

template <typename T>
View row_view(std::vector<T>& values) {
  return View(values.data(), {static_cast<std::int64_t>(values.size())});
}

template <typename T>
void check_rows() {
  for (const std::size_t n : {1u, 2u, 7u, 16u, 63u, 1000u, 5000u}) {
    std::vector<T> x = draw_logits<T>(n, static_cast<unsigned>(n)), out(n, T(7)), dout(n, T(3)), din(n, T(7));
    if (n > 2) x[1] = -static_cast<T>(kInf);
    std::vector<RowStats> stats(1);
    softmax(row_view(x), row_view(out), {.rule = Rule::paper(), .normalizer = kHard}, {.stats = stats});
    const std::vector<double> expected = hard_weights(x.data(), n);
    double ties = 0;
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_NEAR(static_cast<double>(out[i]), expected[i], 1e-7) << n << " keys, key " << i;
      ties += expected[i] > 0 ? 1 : 0;
    }
    EXPECT_EQ(stats[0].beta, 1);  // no rule is asked
    EXPECT_NEAR(stats[0].sharp_entropy, std::log(ties), 1e-12);
    EXPECT_NEAR(stats[0].sharp_peak, 1 / ties, 1e-12);
    softmax_backward(row_view(x), row_view(dout), row_view(din), {.normalizer = kHard});
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(din[i], T(0));
  }
}

TEST(Hard, RowsGiveAllToTheLargest) {
  for_each_target([] {
    check_rows<float>();
    check_rows<double>();
  });
}

TEST(Hard, EdgesOfRows) {
  for_each_target([] {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (const float bad : {nan, inf}) {
      std::vector<float> x = {1, bad, 3}, out(3);
      softmax(row_view(x), row_view(out), {.normalizer = kHard});
      for (const float weight : out) EXPECT_TRUE(std::isnan(weight));
    }
    std::vector<float> hidden = {-inf, -inf}, out(2, 7.0f);
    softmax(row_view(hidden), row_view(out), {.normalizer = kHard});
    EXPECT_EQ(out, std::vector<float>({0, 0}));
  });
}

struct Problem {
  std::int64_t H = 2, N, M, D = 4, E = 3;
  std::vector<float> q, k, v, out, dout, dq, dk, dv;

  Problem(std::int64_t queries, std::int64_t keys) : N(queries), M(keys) {
    const auto size = [&](std::int64_t n, std::int64_t d) { return static_cast<std::size_t>(H * n * d); };
    q = draw_logits<float>(size(N, D), 1);
    k = draw_logits<float>(size(M, D), 2);
    v = draw_logits<float>(size(M, E), 3);
    dout = draw_logits<float>(size(N, E), 4);
    // Products that are exact, with ties: few values.
    for (std::vector<float>* values : {&q, &k}) {
      for (float& value : *values) value = std::nearbyint(value / 4);
    }
    out.resize(size(N, E));
    dq.resize(q.size(), 7);
    dk.resize(k.size(), 7);
    dv.resize(v.size(), 7);
  }

  View view(std::vector<float>& values, std::int64_t n, std::int64_t d) {
    return View(values.data(), {1, H, n, d});
  }

  // Weights of query i of head h over the keys, causal or not.
  std::vector<double> weights(std::int64_t h, std::int64_t i, bool causal, double sink = -kInf) const {
    std::vector<double> x(static_cast<std::size_t>(M) + 1, -kInf);
    for (std::int64_t j = 0; j < (causal ? std::min(i + 1, M) : M); ++j) {
      x[static_cast<std::size_t>(j)] = 0;
      for (std::int64_t d = 0; d < D; ++d) {
        x[static_cast<std::size_t>(j)] +=
            static_cast<double>(q[static_cast<std::size_t>((h * N + i) * D + d)]) *
            static_cast<double>(k[static_cast<std::size_t>((h * M + j) * D + d)]);
      }
    }
    x.back() = sink;
    return hard_weights(x.data(), x.size());
  }
};

void check_attention(std::int64_t queries, std::int64_t keys, bool causal) {
  Problem p(queries, keys);
  AttentionOptions options{
      .rule = Rule::target_entropy(0.5), .normalizer = kHard, .scale = 1, .causal = causal};
  attention(p.view(p.q, p.N, p.D), p.view(p.k, p.M, p.D), p.view(p.v, p.M, p.E), p.view(p.out, p.N, p.E),
            options);
  attention_backward(
      p.view(p.q, p.N, p.D), p.view(p.k, p.M, p.D), p.view(p.v, p.M, p.E), p.view(p.dout, p.N, p.E),
      {.dq = p.view(p.dq, p.N, p.D), .dk = p.view(p.dk, p.M, p.D), .dv = p.view(p.dv, p.M, p.E)}, options);
  std::vector<double> dv(p.v.size(), 0);
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t i = 0; i < p.N; ++i) {
      const std::vector<double> w = p.weights(h, i, causal);
      for (std::int64_t e = 0; e < p.E; ++e) {
        double expected = 0;
        for (std::int64_t j = 0; j < p.M; ++j) {
          const auto value = static_cast<std::size_t>((h * p.M + j) * p.E + e);
          expected += w[static_cast<std::size_t>(j)] * static_cast<double>(p.v[value]);
          dv[value] += w[static_cast<std::size_t>(j)] *
                       static_cast<double>(p.dout[static_cast<std::size_t>((h * p.N + i) * p.E + e)]);
        }
        ASSERT_NEAR(static_cast<double>(p.out[static_cast<std::size_t>((h * p.N + i) * p.E + e)]), expected,
                    1e-5)
            << "head " << h << ", query " << i;
      }
    }
  }
  for (const float gradient : p.dq) ASSERT_EQ(gradient, 0);
  for (const float gradient : p.dk) ASSERT_EQ(gradient, 0);
  for (std::size_t i = 0; i < dv.size(); ++i) ASSERT_NEAR(static_cast<double>(p.dv[i]), dv[i], 1e-3);
}

TEST(Hard, AttentionWithFewAndManyQueries) {
  for_each_target([] {
    check_attention(3, 1500, false);
    check_attention(40, 700, false);
    check_attention(40, 700, true);
  });
}

TEST(Hard, TilesWithoutTheMaximumAreSkipped) {
  Problem p(40, 2048);
  TileCounts counts;
  attention(p.view(p.q, p.N, p.D), p.view(p.k, p.M, p.D), p.view(p.v, p.M, p.E), p.view(p.out, p.N, p.E),
            {.normalizer = kHard}, {.tile_counts = &counts});
  EXPECT_GT(counts.tiles, 0);
  EXPECT_GT(counts.skipped, 0);
}

TEST(Hard, ASinkAboveAllLogitsTakesAll) {
  for (const std::int64_t queries : {3, 40}) {
    Problem p(queries, 300);
    std::vector<float> sinks = {1e6f, -1e6f};
    std::vector<RowStats> stats(static_cast<std::size_t>(p.H * p.N));
    attention(p.view(p.q, p.N, p.D), p.view(p.k, p.M, p.D), p.view(p.v, p.M, p.E), p.view(p.out, p.N, p.E),
              {.normalizer = kHard, .scale = 1, .sinks = View(sinks.data(), {2})}, {.stats = stats});
    EXPECT_EQ(stats.front().sharp_peak, 0);
    EXPECT_GT(stats.back().sharp_peak, 0);
    for (std::size_t i = 0; i < p.out.size(); ++i) {
      const auto h = static_cast<std::int64_t>(i) / (p.N * p.E),
                 at = static_cast<std::int64_t>(i) / p.E % p.N;
      const std::vector<double> w =
          p.weights(h, at, false, static_cast<double>(sinks[static_cast<std::size_t>(h)]));
      double expected = 0;
      for (std::int64_t j = 0; j < p.M; ++j) {
        expected += w[static_cast<std::size_t>(j)] *
                    static_cast<double>(p.v[static_cast<std::size_t>((h * p.M + j) * p.E) + i % 3]);
      }
      ASSERT_NEAR(static_cast<double>(p.out[i]), expected, 1e-5) << i;
    }
  }
}

TEST(Hard, ShardsGiveTheSame) {
  Problem p(20, 600);
  const AttentionOptions options{.normalizer = kHard, .scale = 1};
  attention(p.view(p.q, p.N, p.D), p.view(p.k, p.M, p.D), p.view(p.v, p.M, p.E), p.view(p.out, p.N, p.E),
            options);
  const auto rows = static_cast<std::size_t>(p.H * p.N);
  const std::int64_t half = p.M / 2;
  std::vector<RowState> merged(rows);
  const auto part = [&](std::vector<float>& values, std::int64_t size, std::int64_t first) {
    return View(values.data() + first * size, {1, p.H, half, size}, {p.H * p.M * size, p.M * size, size, 1});
  };
  for (const std::int64_t first : {std::int64_t{0}, half}) {
    std::vector<RowState> states(rows);
    shard_states(p.view(p.q, p.N, p.D), part(p.k, p.D, first), {first, p.M}, states, options);
    for (std::size_t r = 0; r < rows; ++r) merged[r] = merge(merged[r], states[r]);
  }
  std::vector<RowScale> scales;
  for (const RowState& state : merged) scales.push_back({state.max, 1});
  std::vector<std::vector<float>> outs;
  std::vector<std::vector<double>> masses;
  for (const std::int64_t first : {std::int64_t{0}, half}) {
    outs.emplace_back(p.out.size());
    masses.emplace_back(rows);
    shard_attention(p.view(p.q, p.N, p.D), part(p.k, p.D, first), part(p.v, p.E, first), {first, p.M}, scales,
                    p.view(outs.back(), p.N, p.E), masses.back(), options);
  }
  std::vector<float> out(p.out.size());
  const std::vector<ConstView> views = {p.view(outs[0], p.N, p.E), p.view(outs[1], p.N, p.E)};
  const std::vector<std::span<const double>> parts = {masses[0], masses[1]};
  merge_outputs(views, parts, p.view(out, p.N, p.E));
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], p.out[i], 1e-5f);
}

}  // namespace
}  // namespace whet
