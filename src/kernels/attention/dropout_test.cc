// Dropout: which weights it drops, how often, and that backward drops the same.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "targets.h"

namespace whet {
namespace {

constexpr double kDropout = 0.3;

// One head; values are the identity, so that outputs are weights.
struct Problem {
  std::int64_t N, M, D = 3;
  std::vector<double> q, k, v;

  Problem(std::int64_t queries, std::int64_t keys) : N(queries), M(keys) {
    const auto wave = [](std::int64_t n, double step) {
      std::vector<double> values(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(step * static_cast<double>(i + 1));
      return values;
    };
    q = wave(N * D, 0.7);
    k = wave(M * D, 1.3);
    v.assign(static_cast<std::size_t>(M * M), 0);
    for (std::int64_t j = 0; j < M; ++j) v[static_cast<std::size_t>(j * M + j)] = 1;
  }

  ConstView view(const std::vector<double>& values, std::int64_t n, std::int64_t d) const {
    return ConstView(values.data(), {1, 1, n, d});
  }

  std::vector<double> weights(const AttentionOptions& options, int threads = 1) const {
    std::vector<double> out(static_cast<std::size_t>(N * M));
    attention(view(q, N, D), view(k, M, D), view(v, M, M), View(out.data(), {1, 1, N, M}), options, {},
              {.threads = threads});
    return out;
  }
};

AttentionOptions dropping(std::uint64_t seed) { return {.dropout = kDropout, .dropout_seed = seed}; }

TEST(Dropout, DropsItsShareAndScalesTheRest) {
  for_each_target([] {
    for (const std::int64_t queries : {5, 60}) {
      const Problem p(queries, 300);
      const std::vector<double> plain = p.weights({}), dropped = p.weights(dropping(7));
      double zeros = 0;
      for (std::size_t i = 0; i < plain.size(); ++i) {
        if (dropped[i] == 0) {
          ++zeros;
        } else {
          ASSERT_NEAR(dropped[i], plain[i] / (1 - kDropout), 1e-14) << i;
        }
      }
      const double n = static_cast<double>(plain.size());
      EXPECT_NEAR(zeros / n, kDropout, 5 * std::sqrt(kDropout * (1 - kDropout) / n));
    }
  });
}

TEST(Dropout, IsAFunctionOfSeedRowAndKey) {
  const Problem p(60, 300);
  const std::vector<double> first = p.weights(dropping(7));
  EXPECT_EQ(p.weights(dropping(7), 3), first);
  EXPECT_NE(p.weights(dropping(8)), first);
  // The first rows alone take the path of few queries.
  const Problem few(5, 300);
  const std::vector<double> start = few.weights(dropping(7));
  for (std::size_t i = 0; i < start.size(); ++i) ASSERT_EQ(start[i] == 0, first[i] == 0) << i;
}

TEST(Dropout, AllOrNothing) {
  const Problem p(20, 50);
  for (const double weight : p.weights({.dropout = 1})) ASSERT_EQ(weight, 0);
  EXPECT_EQ(p.weights({.dropout = 0, .dropout_seed = 5}), p.weights({}));
}

// L = sum of dout out; its gradients by finite differences, with the same seed and so the same weights
// dropped.
TEST(Dropout, BackwardDropsTheSame) {
  Problem p(20, 40);
  AttentionOptions options = dropping(11);
  options.rule = Rule::paper();
  std::vector<double> dout(static_cast<std::size_t>(p.N * p.M));
  for (std::size_t i = 0; i < dout.size(); ++i) dout[i] = std::cos(2.1 * static_cast<double>(i));
  std::vector<double> dq(p.q.size()), dk(p.k.size()), dv(p.v.size());
  attention_backward(p.view(p.q, p.N, p.D), p.view(p.k, p.M, p.D), p.view(p.v, p.M, p.M),
                     p.view(dout, p.N, p.M),
                     {.dq = View(dq.data(), {1, 1, p.N, p.D}),
                      .dk = View(dk.data(), {1, 1, p.M, p.D}),
                      .dv = View(dv.data(), {1, 1, p.M, p.M})},
                     options);
  const auto loss = [&] {
    const std::vector<double> out = p.weights(options);
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += dout[i] * out[i];
    return sum;
  };
  const auto expect_slopes = [&](std::vector<double>& at, const std::vector<double>& gradient) {
    const double step = 1e-5;
    for (std::size_t i = 0; i < at.size(); i += at.size() / 30) {
      const double value = at[i];
      at[i] = value + step;
      const double above = loss();
      at[i] = value - step;
      const double below = loss();
      at[i] = value;
      ASSERT_NEAR(gradient[i], (above - below) / (2 * step), 1e-8) << i;
    }
  };
  expect_slopes(p.q, dq);
  expect_slopes(p.k, dk);
  expect_slopes(p.v, dv);
}

}  // namespace
}  // namespace whet
