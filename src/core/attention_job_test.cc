#include "core/attention_job.h"

#include <gtest/gtest.h>
#include <whet/error.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace whet::core {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kHuge = std::int64_t{1} << 40;

// Which keys a query sees, against the definition.

// A call of which only shapes and what hides keys matter: D = E = 1, one key head.
struct Scene {
  std::int64_t batch = 1, heads = 1, queries = 0, keys = 0;
  std::int64_t first_key = 0, all_keys = 0;  // of a shard
  AttentionOptions options{};
  bool is_shard = false;

  AttentionJob job() const {
    static std::vector<float> data(64), out(64);
    const ConstView q(data.data(), {batch, heads, queries, 1}), k(data.data(), {batch, 1, keys, 1});
    if (is_shard) return shard_job(q, k, {}, {}, {first_key, all_keys}, options);
    return attention_job(q, k, k, View(out.data(), {batch, heads, queries, 1}), options);
  }
};

// Key `key` of a sequence of `queries` queries and `keys` keys, for its query `query`, word for word.
bool sees(const AttentionOptions& o, std::int64_t queries, std::int64_t keys, std::int64_t query,
          std::int64_t key) {
  const std::int64_t position = o.align == Align::end ? query + keys - queries : query;
  if (key >= keys) return false;
  if (o.causal && key > position) return false;
  if (o.window_left != -1 && position - key > o.window_left) return false;
  if (o.window_right != -1 && key - position > o.window_right) return false;
  return true;
}

// Error text if the range isn't exactly the keys of k for which `visible(key)`.
template <typename Visible>
std::string difference(const KeyRange& range, std::int64_t keys, Visible visible) {
  if (range.begin < 0 || range.begin > range.end || range.end > keys) return "out of range";
  for (std::int64_t key = 0; key < keys; ++key) {
    const bool inside = key >= range.begin && key < range.end;
    if (inside != visible(key)) return "key " + std::to_string(key);
  }
  return "";
}

// Every way to hide keys but lengths and packing.
std::vector<AttentionOptions> all_options() {
  std::vector<AttentionOptions> result;
  for (const bool causal : {false, true}) {
    for (const Align align : {Align::start, Align::end}) {
      for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{2}, kMax}) {
        for (const std::int64_t right : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}, kMax}) {
          result.push_back({.causal = causal, .align = align, .window_left = left, .window_right = right});
        }
      }
    }
  }
  return result;
}

std::vector<Scene> all_scenes() {
  std::vector<Scene> result;
  for (const AttentionOptions& options : all_options()) {
    for (std::int64_t queries = 0; queries <= 5; ++queries) {
      for (std::int64_t keys = 0; keys <= 5; ++keys) {
        result.push_back({.queries = queries, .keys = keys, .all_keys = keys, .options = options});
      }
    }
  }
  return result;
}

void expect_definition(const Scene& scene, const std::vector<std::int64_t>& lengths, bool one_a_row) {
  Scene s = scene;
  s.options.lengths = lengths;
  const AttentionJob job = s.job();
  ASSERT_EQ(job.sequences(), s.batch);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t sequence_keys =
        lengths.empty() || one_a_row ? s.all_keys : lengths[static_cast<std::size_t>(b)];
    const Sequence sequence = job.sequence(b);
    EXPECT_EQ(sequence.batch, b);
    EXPECT_EQ(sequence.queries, s.queries);
    EXPECT_EQ(sequence.keys, std::clamp<std::int64_t>(sequence_keys - s.first_key, 0, s.keys));
    for (std::int64_t h = 0; h < s.heads; ++h) {
      for (std::int64_t i = 0; i < s.queries; ++i) {
        const std::int64_t cut = one_a_row ? lengths[static_cast<std::size_t>(job.row(b, h, i))] : s.all_keys;
        const auto visible = [&](std::int64_t key) {
          const std::int64_t place = s.first_key + key;
          return place < cut && sees(s.options, s.queries, sequence_keys, i, place);
        };
        ASSERT_EQ(difference(job.visible(sequence, h, i), s.keys, visible), "")
            << s.queries << " queries, " << s.keys << " keys, query " << i << ", causal " << s.options.causal
            << ", end " << (s.options.align == Align::end) << ", window " << s.options.window_left << " "
            << s.options.window_right;
      }
    }
  }
}

TEST(AttentionVisible, FollowsTheDefinition) {
  for (const Scene& scene : all_scenes()) expect_definition(scene, {}, false);
}

TEST(AttentionVisible, LengthsOfBatchEntriesMoveTheEnd) {
  for (Scene scene : all_scenes()) {
    scene.batch = 2;
    scene.heads = 2;
    for (std::int64_t length = 0; length <= scene.keys; ++length) {
      expect_definition(scene, {length, scene.keys - length}, false);
    }
  }
}

TEST(AttentionVisible, LengthsOfRowsCutOnly) {
  for (Scene scene : all_scenes()) {
    scene.batch = 2;
    scene.heads = 2;
    std::vector<std::int64_t> lengths;
    for (std::int64_t row = 0; row < 4 * scene.queries; ++row) lengths.push_back(row % (scene.keys + 1));
    if (!lengths.empty()) expect_definition(scene, lengths, true);
  }
}

TEST(AttentionVisible, ShardsCountKeysOfTheWhole) {
  for (Scene scene : all_scenes()) {
    scene.is_shard = true;
    scene.batch = 2;
    for (std::int64_t first = 0; first <= scene.all_keys; ++first) {
      scene.first_key = first;
      for (scene.keys = 0; scene.keys <= scene.all_keys - first; ++scene.keys) {
        expect_definition(scene, {}, false);
        expect_definition(scene, {scene.all_keys, scene.all_keys / 2}, false);
      }
    }
  }
}

TEST(AttentionVisible, PackedSequencesSeeTheirOwnKeys) {
  const std::int64_t query_starts[] = {0, 3, 3, 4, 6}, key_starts[] = {0, 2, 5, 5, 9};
  for (const AttentionOptions& options : all_options()) {
    Scene scene{.queries = 6, .keys = 9, .options = options};
    scene.options.query_starts = query_starts;
    scene.options.key_starts = key_starts;
    const AttentionJob job = scene.job();
    ASSERT_EQ(job.sequences(), 4);
    for (std::size_t n = 0; n < 4; ++n) {
      const Sequence s = job.sequence(static_cast<std::int64_t>(n));
      EXPECT_EQ(s.batch, 0);
      EXPECT_EQ(s.first_query, query_starts[n]);
      EXPECT_EQ(s.queries, query_starts[n + 1] - query_starts[n]);
      EXPECT_EQ(s.first_key, key_starts[n]);
      EXPECT_EQ(s.keys, key_starts[n + 1] - key_starts[n]);
      for (std::int64_t i = s.first_query; i < s.first_query + s.queries; ++i) {
        const auto visible = [&](std::int64_t key) {
          return key >= s.first_key && sees(options, s.queries, s.keys, i - s.first_query, key - s.first_key);
        };
        ASSERT_EQ(difference(job.visible(s, 0, i), 9, visible), "") << "sequence " << n << ", query " << i;
      }
    }
  }
}

// What a job holds.

// Views that fit together: B 2, H 6, K 3, N 4, M 5, D 8, E 7.
struct Call {
  std::vector<float> q_data = std::vector<float>(2 * 6 * 4 * 8), k_data = std::vector<float>(2 * 3 * 5 * 8),
                     v_data = std::vector<float>(2 * 3 * 5 * 7), out_data = std::vector<float>(2 * 6 * 4 * 7),
                     side_data = std::vector<float>(2 * 6 * 4 * 5),
                     dside_data = std::vector<float>(2 * 6 * 4 * 5);
  ConstView q{q_data.data(), {2, 6, 4, 8}};
  ConstView k{k_data.data(), {2, 3, 5, 8}};
  ConstView v{v_data.data(), {2, 3, 5, 7}};
  View out{out_data.data(), {2, 6, 4, 7}};
  AttentionOptions options{};
  AttentionOutputs outputs{};

  AttentionJob job() const { return attention_job(q, k, v, out, options, outputs); }
};

TEST(AttentionJob, KnowsItsShape) {
  const Call call;
  const AttentionJob job = call.job();
  const AttentionShape& s = job.shape;
  EXPECT_EQ(s.batch, 2);
  EXPECT_EQ(s.heads, 6);
  EXPECT_EQ(s.key_heads, 3);
  EXPECT_EQ(s.group, 2);
  EXPECT_EQ(s.queries, 4);
  EXPECT_EQ(s.keys, 5);
  EXPECT_EQ(s.key_size, 8);
  EXPECT_EQ(s.value_size, 7);
  EXPECT_EQ(s.rows(), 48);
  EXPECT_FALSE(s.wide());
  EXPECT_EQ(job.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(job.shard.first_key, 0);
  EXPECT_EQ(job.shard.all_keys, 5);
  EXPECT_EQ(job.row(1, 2, 3), 24 + 2 * 4 + 3);
}

TEST(AttentionJob, AddressesElements) {
  const Call call;
  const AttentionJob job = call.job();
  const auto element = [](const std::vector<float>& data, std::size_t i) {
    return reinterpret_cast<const std::byte*>(data.data() + i);
  };
  EXPECT_EQ(job.q.at(1, 5, 3, 7), element(call.q_data, call.q_data.size() - 1));
  EXPECT_EQ(job.k.at(1, 0, 2), element(call.k_data, 3 * 5 * 8 + 2 * 8));
  EXPECT_EQ(job.out.begin, element(call.out_data, 0));
  EXPECT_EQ(job.out.end, element(call.out_data, call.out_data.size()));
  EXPECT_FALSE(job.bias.given);
  EXPECT_EQ(job.bias.at(1, 2, 3, 4), nullptr);
}

TEST(AttentionJob, StridesMayBeNegative) {
  Call call;
  call.q = ConstView(call.q_data.data() + 7, {2, 6, 4, 8}, {192, 32, 8, -1});
  const AttentionJob job = call.job();
  EXPECT_EQ(job.q.begin, reinterpret_cast<const std::byte*>(call.q_data.data()));
  EXPECT_EQ(job.q.end, reinterpret_cast<const std::byte*>(call.q_data.data() + call.q_data.size()));
  EXPECT_EQ(job.q.at(0, 0, 0, 7), job.q.begin);
}

TEST(AttentionJob, SideArraysRepeatAlongAxesOfSizeOne) {
  Call call;
  float* side = call.side_data.data();
  call.options.bias = ConstView(side, {1, 6, 1, 5});
  call.options.query_scale = ConstView(side, {2, 1, 4});
  call.options.sinks = ConstView(side, {6}, {2});
  const bool flags[8] = {};
  call.options.mask = ConstView(flags, {2, 1, 4, 1});
  const AttentionJob job = call.job();
  using Strides = std::array<std::int64_t, 4>;
  EXPECT_EQ(job.bias.strides, (Strides{0, 5, 0, 1}));
  EXPECT_EQ(job.query_scale.strides, (Strides{4, 0, 1, 0}));
  EXPECT_EQ(job.sinks.strides, (Strides{0, 2, 0, 0}));
  EXPECT_EQ(job.mask.strides, (Strides{4, 0, 1, 0}));
  EXPECT_EQ(job.bias.end - job.bias.begin, 30 * 4);
}

TEST(AttentionJob, AddressesWeights) {
  Call call;
  const RowIndex rows[] = {{0, 0, 0}, {1, 5, 3}};
  call.outputs.weight_rows = rows;
  call.outputs.weights = View(call.dside_data.data(), {2, 5}, {20, 2});
  const AttentionJob job = call.job();
  EXPECT_EQ(job.weights.strides, (std::array<std::int64_t, 4>{20, 0, 0, 2}));
}

TEST(AttentionJob, SideArraysMayBeInTheTypeOfTheArithmetic) {
  const std::vector<std::uint16_t> narrow(2 * 6 * 4 * 8);
  std::vector<std::uint16_t> out(2 * 6 * 4 * 7);
  Call call;
  call.q = ConstView(narrow.data(), DType::bf16, {2, 6, 4, 8});
  call.k = ConstView(narrow.data(), DType::bf16, {2, 3, 5, 8});
  call.v = ConstView(narrow.data(), DType::bf16, {2, 3, 5, 7});
  call.out = View(out.data(), DType::bf16, {2, 6, 4, 7});
  for (const DType dtype : {DType::bf16, DType::f32}) {
    call.options.bias = ConstView(call.side_data.data(), dtype, {1, 1, 1, 5});
    call.options.sinks = ConstView(call.side_data.data(), dtype, {6});
    call.options.query_scale = ConstView(call.side_data.data(), dtype, {1, 1, 4});
    EXPECT_EQ(call.job().bias.dtype, dtype);
  }
}

TEST(AttentionJob, EmptyCallsPointNowhere) {
  Call call;
  call.k = ConstView(static_cast<const float*>(nullptr), {2, 3, 0, 8});
  call.v = ConstView(static_cast<const float*>(nullptr), {2, 3, 0, 7});
  const AttentionJob job = call.job();
  EXPECT_TRUE(job.k.given);
  EXPECT_EQ(job.k.at(1, 2, 0, 0), nullptr);
  EXPECT_TRUE(job.visible(job.sequence(1), 5, 3).empty());

  const float* none = nullptr;
  const AttentionJob headless =
      attention_job(ConstView(none, {2, 0, 4, 8}), ConstView(none, {2, 0, 5, 8}),
                    ConstView(none, {2, 0, 5, 7}), View(static_cast<float*>(nullptr), {2, 0, 4, 7}), {});
  EXPECT_EQ(headless.shape.rows(), 0);
}

TEST(AttentionJob, GradientsOfRepeatedSidesAreFilledEvenWithoutQueries) {
  Call call;
  const float* none = nullptr;
  call.options.bias = ConstView(call.side_data.data(), {1, 6, 1, 5});
  const AttentionGradients gradients{.dbias = View(call.dside_data.data(), {1, 6, 1, 5})};
  const AttentionJob job =
      attention_backward_job(ConstView(none, {2, 6, 0, 8}), call.k, call.v, ConstView(none, {2, 6, 0, 7}),
                             gradients, call.options, {.beta_gradient = BetaGradient::held});
  EXPECT_FALSE(job.dq.given);
  EXPECT_EQ(job.dbias.end - job.dbias.begin, 30 * 4);
  EXPECT_FALSE(job.through_rule);
}

TEST(AttentionJob, ShapeJobsLookAtNoData) {
  const float* none = nullptr;
  const auto* odd = reinterpret_cast<const float*>(std::uintptr_t{3});
  AttentionOptions options{.bias = ConstView(none, {1, 6, 4, 5}), .sinks = ConstView(odd, {6})};
  const ConstView q(none, {2, 6, 4, 8}), k(odd, {2, 3, 5, 8}), v(none, {2, 3, 5, 7});
  const AttentionJob forward = attention_shape_job(q, k, v, options);
  EXPECT_EQ(forward.shape.value_size, 7);
  EXPECT_TRUE(forward.bias.given);
  const AttentionGradients gradients{.dk = View(static_cast<float*>(nullptr), {2, 3, 5, 8})};
  const AttentionJob backward = attention_backward_shape_job(q, k, v, gradients, options);
  EXPECT_TRUE(backward.dk.given);
  EXPECT_FALSE(backward.dq.given);
}

TEST(AttentionJob, LimitsWindowsToWhatTheyCanReach) {
  Call call;
  call.options.window_left = kMax;
  call.options.window_right = 3;
  EXPECT_EQ(call.job().options.window_left, 9);
  EXPECT_EQ(call.job().options.window_right, 3);
}

TEST(AttentionJob, ShardsUseNeitherRulesNorWorkspace) {
  const Call call;
  const Rule rules[] = {Rule::paper()};  // too few, which doesn't matter
  std::vector<std::byte> workspace(1);
  const AttentionOptions options{.rule = Rule::paper(), .head_rules = rules};
  const AttentionJob job =
      shard_job(call.q, call.k, {}, {}, {10, 20}, options, {.threads = 3, .workspace = workspace});
  EXPECT_EQ(job.options.rule, Rule::none());
  EXPECT_TRUE(job.options.head_rules.empty());
  EXPECT_TRUE(job.execution.workspace.empty());
  EXPECT_EQ(job.execution.threads, 3);
  EXPECT_EQ(job.shape.value_size, 0);
  EXPECT_FALSE(job.v.given);
  EXPECT_FALSE(job.out.given);
}

// Errors: what is said. Which calls are refused is in kernels/attention/error_test.cc.

template <typename Function>
std::string error_of(const Function& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(AttentionJob, ErrorsSayWhatWasGivenAndWhatIsAllowed) {
  const auto error = [](auto bend) {
    Call call;
    bend(call);
    return error_of([&] { call.job(); });
  };
  EXPECT_EQ(error([](Call&) {}), "accepted");
  EXPECT_EQ(error([](Call& c) { c.q.sizes = {2, 6, 4}; }), "q: has 3 axes, must have 4, (B, H, N, D)");
  EXPECT_EQ(error([](Call& c) {
              c.q.sizes = {2, 6, 4, 0};
            }),
            "q: its last axis has size 0, must be 1 to 1024");
  EXPECT_EQ(error([](Call& c) { c.options.softcap = 1e-45; }),
            "softcap: is 1e-45, must be 0 (none) or finite and at least 1.1754943508222875e-38");
  EXPECT_EQ(error([](Call& c) { c.k.sizes = {2, 4, 5, 8}; }), "k: has 4 heads, must divide those of q, 6");
  EXPECT_EQ(error([](Call& c) { c.k.sizes = {2, 0, 5, 8}; }), "k: has 0 heads, must divide those of q, 6");
  EXPECT_EQ(error([](Call& c) {
              c.k.sizes = {2, 3, 5, 7};
            }),
            "k: its sizes are (2, 3, 5, 7), must be (B, K, M, D) = (2, 3, 5, 8)");
  EXPECT_EQ(error([](Call& c) { c.out.dtype = DType::f64; }), "out: its element type is f64, must be f32");
  EXPECT_EQ(error([](Call& c) {
              c.options.bias = ConstView(c.side_data.data(), {2, 6, 3, 5});
            }),
            "bias: its sizes are (2, 6, 3, 5), must be (B, H, N, M) = (2, 6, 4, 5), each or 1");
  EXPECT_EQ(error([](Call& c) { c.options.scale = std::nan(""); }), "scale: is nan, must be finite");
  EXPECT_EQ(error([](Call& c) { c.options.dropout = 1.5; }), "dropout: is 1.5, must be 0..1");
  EXPECT_EQ(error([](Call& c) { c.options.skip_epsilon = -1e-9; }),
            "skip_epsilon: is -1e-09, must be 0 or more and below 1");
  EXPECT_EQ(error([](Call& c) { c.out.data = c.q_data.data(); }), "out: overlaps q");
}

TEST(AttentionJob, RefusesMoreLogitsThanCanBeCounted) {
  const ConstView q(static_cast<const float*>(nullptr), {0, 1, kHuge, 1}),
      k(q.data, q.dtype, {0, 1, kHuge, 1});
  EXPECT_EQ(error_of([&] { attention_shape_job(q, k, k, {}); }),
            "k: 1099511627776 keys times all rows is more than 2^60");
  EXPECT_EQ(error_of([&] {
              shard_job(q, ConstView(q.data, q.dtype, {0, 1, 1, 1}), {}, {}, {0, kMax}, {});
            }),
            "shard: 9223372036854775807 keys times all rows is more than 2^60");
}

TEST(AttentionJob, ShardsLieWithinAllKeys) {
  const Call call;
  const auto error = [&](const Shard& shard, const AttentionOptions& options = {}) {
    return error_of([&] { shard_job(call.q, call.k, {}, {}, shard, options); });
  };
  EXPECT_EQ(error({0, 5}), "accepted");
  EXPECT_EQ(error({10, 15}), "accepted");
  EXPECT_EQ(error({11, 15}),
            "shard: its first_key is 11 and its all_keys 15, must be a range that holds the 5 keys of k");
  for (const Shard& shard : {Shard{-1, 5}, Shard{0, 4}, Shard{kMax, 5}, Shard{0, -5}, Shard{kMax, kMax}}) {
    EXPECT_EQ(error(shard).substr(0, 6), "shard:");
  }
  const std::int64_t starts[] = {0, 4};
  EXPECT_EQ(error({0, 5}, {.query_starts = starts}).substr(0, 13), "query_starts:");
  EXPECT_EQ(error({0, 5}, {.key_starts = starts}).substr(0, 11), "key_starts:");
}

TEST(AttentionJob, ShardsCheckWhatTheyWriteBesideTheOutput) {
  Call call;
  const AttentionJob job = shard_job(call.q, call.k, call.v, call.out, {0, 5}, {});
  const auto error = [&](std::vector<float>& data) {
    return error_of([&] { check_apart(job, {std::span(data), "mass"}); });
  };
  EXPECT_EQ(error(call.side_data), "accepted");
  EXPECT_EQ(error(call.k_data), "mass: overlaps k");
  EXPECT_EQ(error(call.out_data), "mass: overlaps out");
}

}  // namespace
}  // namespace whet::core
