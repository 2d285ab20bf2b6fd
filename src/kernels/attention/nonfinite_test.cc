// Numbers that aren't finite, or nearly not: what they may reach and what they must leave alone.
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

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One head, D = E = 2, everything 0.5 to begin with.
struct Call {
  explicit Call(std::int64_t queries, std::int64_t keys)
      : N(queries),
        M(keys),
        q(2 * at(N), 0.5F),
        k(2 * at(M), 0.5F),
        v(2 * at(M), 0.5F),
        dout(2 * at(N), 0.5F) {}

  static std::size_t at(std::int64_t n) { return static_cast<std::size_t>(n); }
  static Dims four(std::int64_t n) { return {1, 1, n, 2}; }

  std::vector<float> forward() const {
    std::vector<float> out(2 * at(N));
    attention({q.data(), four(N)}, {k.data(), four(M)}, {v.data(), four(M)}, {out.data(), four(N)}, options);
    return out;
  }

  void backward() {
    dq.assign(2 * at(N), 7);
    dk.assign(2 * at(M), 7);
    dv.assign(2 * at(M), 7);
    attention_backward({q.data(), four(N)}, {k.data(), four(M)}, {v.data(), four(M)}, {dout.data(), four(N)},
                       {.dq = {dq.data(), four(N)}, .dk = {dk.data(), four(M)}, .dv = {dv.data(), four(M)}},
                       options);
  }

  std::int64_t N, M;
  std::vector<float> q, k, v, dout, dq{}, dk{}, dv{};
  AttentionOptions options{};
};

TEST(AttentionCare, MeansDontOverflowWhereSumsDo) {
  for_each_target([] {
    for (const std::int64_t N : {1, 20}) {
      Call call(N, 3);
      for (float& x : call.v) x = 3e38F;
      for (const float x : call.forward()) EXPECT_NEAR(x, 3e38F, 1e32F);
    }
  });
}

TEST(AttentionCare, ABrokenScaleReachesOnlyWhatItsQuerySees) {
  for_each_target([] {
    Call call(20, 20);
    std::vector<float> scale(20, 1);
    scale[0] = kNaN;
    call.options.causal = true;
    call.options.query_scale = {scale.data(), {1, 1, 20}};
    call.backward();
    EXPECT_TRUE(std::isnan(call.dk[0]) && std::isnan(call.dq[0]));
    for (std::size_t i = 2; i < 40; ++i) {
      EXPECT_TRUE(std::isfinite(call.dk[i])) << i;
      EXPECT_TRUE(std::isfinite(call.dv[i])) << i;
      EXPECT_TRUE(std::isfinite(call.dq[i])) << i;
    }
  });
}

TEST(AttentionCare, ARowThatSeesNothingHasNoGradientWhateverItsScale) {
  for_each_target([] {
    Call call(20, 4);
    const std::vector<float> scale(20, kNaN);
    const std::vector<std::int64_t> lengths = {0};
    call.options.query_scale = {scale.data(), {1, 1, 20}};
    call.options.lengths = lengths;
    call.backward();
    for (const float x : call.dq) EXPECT_EQ(x, 0);
    for (const float x : call.dk) EXPECT_EQ(x, 0);
    for (const float x : call.dv) EXPECT_EQ(x, 0);
  });
}

TEST(AttentionCare, ARowBrokenByItsBiasLeavesHiddenKeysAlone) {
  for_each_target([] {
    Call call(20, 3);
    std::vector<float> bias(60, 0);
    bias[0] = kNaN;
    const bool mask[] = {true, false, true};
    call.options.bias = {bias.data(), {1, 1, 20, 3}};
    call.options.mask = {mask, {1, 1, 1, 3}};
    call.backward();
    EXPECT_TRUE(std::isnan(call.dv[0]));
    EXPECT_EQ(call.dv[2], 0);
    EXPECT_EQ(call.dk[2], 0);
  });
}

TEST(AttentionCare, ACapBesideALargeBiasKeepsItsSlopeWithinBounds) {
  for_each_target([] {
    Call plain(20, 6), call(20, 6);
    const std::vector<float> bias(1, -1e9F);
    call.options.softcap = plain.options.softcap = 30;
    call.options.bias = {bias.data(), {1, 1, 1, 1}};
    for (std::size_t i = 0; i < 12; ++i) call.v[i] = plain.v[i] = static_cast<float>(i);
    plain.backward();
    call.backward();
    for (std::size_t i = 0; i < 12; ++i)
      EXPECT_LE(std::abs(call.dk[i]), 1.001F * std::abs(plain.dk[i]) + 1e-6F);
  });
}

// Sequences that share one element of bias would race for its gradient.
TEST(AttentionCare, PackedSequencesShareABiasInOrder) {
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i <= 40; ++i) starts.push_back(20 * i);
  Call call(800, 800);
  for (std::size_t i = 0; i < call.v.size(); ++i) {
    call.v[i] = static_cast<float>(i % 13);
    call.q[i] = static_cast<float>(i % 7) / 7;
    call.k[i] = static_cast<float>(i % 5) / 5;
  }
  const float bias = 0.25F;
  call.options.bias = {&bias, {1, 1, 1, 1}};
  call.options.query_starts = call.options.key_starts = starts;
  const auto gradient = [&](int threads) {
    float dbias = 7;
    attention_backward({call.q.data(), Call::four(800)}, {call.k.data(), Call::four(800)},
                       {call.v.data(), Call::four(800)}, {call.dout.data(), Call::four(800)},
                       {.dbias = {&dbias, {1, 1, 1, 1}}}, call.options, {}, {.threads = threads});
    return dbias;
  };
  const float one = gradient(1);
  for (int turn = 0; turn < 20; ++turn) EXPECT_EQ(gradient(4), one);
}

}  // namespace
}  // namespace whet
