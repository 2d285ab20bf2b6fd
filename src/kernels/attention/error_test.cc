// Arguments that the attention functions refuse: the error begins with the argument's name and nothing
// is written. What the errors say is in core/attention_job_test.cc.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cases.h"

namespace whet {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 40;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

// The arguments of calls that are right until a test bends one of them: B 2, H 4, K 2, N 3, M 5, D 4, E 3,
// so 24 rows. All memory of a call is one block, of which nothing may change.
class Call {
 public:
  Call() : memory_(4096, 0.5), before_(memory_) {
    q = ConstView(take<float>(96), {2, 4, 3, 4});
    k = ConstView(take<float>(80), {2, 2, 5, 4});
    v = ConstView(take<float>(60), {2, 2, 5, 3});
    dout = ConstView(take<float>(72), {2, 4, 3, 3});
    out = View(take<float>(72), {2, 4, 3, 3});
    options.bias = ConstView(take<float>(120), {2, 4, 3, 5});
    options.sinks = ConstView(take<float>(4), {4});
    options.query_scale = ConstView(take<float>(24), {2, 4, 3});
    execution.threads = 1;
    gradients = {.dq = View(take<float>(96), {2, 4, 3, 4}),
                 .dk = View(take<float>(80), {2, 2, 5, 4}),
                 .dv = View(take<float>(60), {2, 2, 5, 3}),
                 .dbias = View(take<float>(120), {2, 4, 3, 5}),
                 .dsinks = View(take<float>(4), {4}),
                 .dquery_scale = View(take<float>(24), {2, 4, 3})};
    outputs.stats = std::span(take<RowStats>(24), 24);
    outputs.saved = View(take<float>(72), {24, 3});
    outputs.weight_rows = kRows;
    outputs.weights = View(take<float>(10), {2, 5});
    outputs.top_k = 2;
    outputs.top_keys = std::span(take<std::int64_t>(48), 48);
    outputs.top_weights = std::span(take<float>(48), 48);
    outputs.column_sums = std::span(take<double>(40), 40);
    outputs.tile_counts = take<TileCounts>(1);
    scales = std::span(take<RowScale>(24), 24);
    states = std::span(take<RowState>(24), 24);
    sums = std::span(take<RowSums>(24), 24);
    shard.logits = View(take<float>(120), {2, 4, 3, 5});
    mass = std::span(take<double>(24), 24);
    weighed = std::span(take<WeighedRow>(24), 24);
    gradient_sums = std::span(take<GradientSums>(24), 24);
    slopes = std::span(take<RowSlope>(24), 24);
  }
  Call(const Call&) = delete;

  template <typename T>
  T* take(std::size_t count) {
    T* result = reinterpret_cast<T*>(memory_.data() + used_);
    used_ += (count * sizeof(T) + sizeof(double) - 1) / sizeof(double);
    return result;
  }

  bool untouched() const { return memory_ == before_; }

  void forward() const { attention(q, k, v, out, options, outputs, execution); }
  void forward_workspace() const { attention_workspace(q, k, v, options, outputs, execution); }
  void backward() const {
    attention_backward(q, k, v, dout, gradients, options, backward_options, execution);
  }
  void backward_workspace() const {
    attention_backward_workspace(q, k, v, gradients, options, backward_options, execution);
  }
  void run_states() const { shard_states(q, k, shard, states, options, execution); }
  void run_sums() const { shard_sums(q, k, shard, scales, sums, options, execution); }
  void run_shard() const { shard_attention(q, k, v, shard, scales, out, mass, options, execution); }
  void run_gradient_sums() const {
    shard_gradient_sums(q, k, v, dout, shard, weighed, gradient_sums, options, execution);
  }
  void run_shard_backward() const {
    shard_backward(q, k, v, dout, shard, slopes, gradients, options, execution);
  }

  static constexpr RowIndex kRows[] = {{0, 0, 0}, {1, 3, 2}};

  ConstView q, k, v, dout;
  View out;  // of attention and of shard_attention
  AttentionOptions options;
  AttentionOutputs outputs;
  AttentionBackwardOptions backward_options;
  Execution execution;
  AttentionGradients gradients;
  Shard shard{5, 20};
  std::span<RowScale> scales;
  std::span<RowState> states;
  std::span<RowSums> sums;
  std::span<double> mass;
  std::span<WeighedRow> weighed;
  std::span<GradientSums> gradient_sums;
  std::span<RowSlope> slopes;

 private:
  std::vector<double> memory_, before_;
  std::size_t used_ = 0;
};

struct Entry {
  const char* name;
  void (Call::*run)() const;
};
constexpr Entry kForward = {"attention", &Call::forward};
constexpr Entry kForwardWorkspace = {"attention_workspace", &Call::forward_workspace};
constexpr Entry kBackward = {"attention_backward", &Call::backward};
constexpr Entry kBackwardWorkspace = {"attention_backward_workspace", &Call::backward_workspace};
constexpr Entry kStates = {"shard_states", &Call::run_states};
constexpr Entry kSums = {"shard_sums", &Call::run_sums};
constexpr Entry kShard = {"shard_attention", &Call::run_shard};
constexpr Entry kGradientSums = {"shard_gradient_sums", &Call::run_gradient_sums};
constexpr Entry kShardBackward = {"shard_backward", &Call::run_shard_backward};

using Entries = std::vector<Entry>;
const Entries kShards = {kStates, kSums, kShard, kGradientSums, kShardBackward};
const Entries kWhole = {kForward, kForwardWorkspace, kBackward, kBackwardWorkspace};
const Entries kWithValues = {kForward, kForwardWorkspace, kBackward,     kBackwardWorkspace,
                             kShard,   kGradientSums,     kShardBackward};
const Entries kAll = {kForward, kForwardWorkspace, kBackward,     kBackwardWorkspace, kStates, kSums,
                      kShard,   kGradientSums,     kShardBackward};
// Workspace queries don't.
const Entries kThatRead = {kForward, kBackward, kStates, kSums, kShard, kGradientSums, kShardBackward};

// Calls one after the other, each with arguments bent by `bend`.
template <typename Bend>
void refuse(const Entries& entries, const std::string& argument, Bend bend) {
  for (const Entry& entry : entries) {
    SCOPED_TRACE(std::string(entry.name) + " and " + argument);
    Call call;
    bend(call);
    try {
      (call.*entry.run)();
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_TRUE(what.starts_with(argument + ":") || what.starts_with(argument + " is ")) << what;
    }
    EXPECT_TRUE(call.untouched());
  }
}

TEST(AttentionErrors, AreNotGivenForARightCall) {
  for (const Entry& entry : kAll) {
    const Call call;
    EXPECT_NO_THROW((call.*entry.run)()) << entry.name;
  }
}

TEST(AttentionErrors, NumberOfAxes) {
  for (const Dims& sizes : {Dims{}, Dims{4}, Dims{2, 4, 3}, Dims{2, 4, 3, 4, 1}}) {
    refuse(kAll, "q", [&](Call& c) { c.q.sizes = sizes; });
    refuse(kAll, "k", [&](Call& c) { c.k.sizes = sizes; });
    refuse(kWithValues, "v", [&](Call& c) { c.v.sizes = sizes; });
    refuse({kForward, kShard}, "out", [&](Call& c) { c.out.sizes = sizes; });
    refuse({kBackward}, "dout", [&](Call& c) { c.dout.sizes = sizes; });
  }
}

TEST(AttentionErrors, SizesThatDiffer) {
  for (const Dims& sizes : {Dims{1, 2, 5, 4}, Dims{3, 2, 5, 4}, Dims{2, 2, 5, 3}}) {
    refuse(kAll, "k", [&](Call& c) { c.k.sizes = sizes; });
  }
  for (const Dims& sizes : {Dims{1, 2, 5, 3}, Dims{2, 1, 5, 3}, Dims{2, 2, 4, 3}}) {
    refuse(kWithValues, "v", [&](Call& c) { c.v.sizes = sizes; });
  }
  for (const Dims& sizes : {Dims{1, 4, 3, 3}, Dims{2, 2, 3, 3}, Dims{2, 4, 2, 3}, Dims{2, 4, 3, 4}}) {
    refuse({kForward, kShard}, "out", [&](Call& c) { c.out.sizes = sizes; });
    refuse({kBackward}, "dout", [&](Call& c) { c.dout.sizes = sizes; });
  }
  const Entries backwards = {kBackward, kBackwardWorkspace};
  refuse(backwards, "dq", [](Call& c) { c.gradients.dq.sizes = {2, 4, 3, 3}; });
  refuse(backwards, "dk", [](Call& c) { c.gradients.dk.sizes = {2, 4, 5, 4}; });
  refuse(backwards, "dv", [](Call& c) { c.gradients.dv.sizes = {2, 2, 5, 4}; });
  refuse(backwards, "dsinks", [](Call& c) { c.gradients.dsinks.sizes = {1}; });
  // Sizes of 1 are right for a bias, but not where the bias has more.
  refuse(backwards, "dbias", [](Call& c) { c.gradients.dbias.sizes = {1, 1, 1, 5}; });
  refuse(backwards, "dquery_scale", [](Call& c) { c.gradients.dquery_scale.sizes = {2, 4, 1}; });
  refuse(backwards, "dquery_scale", [](Call& c) { c.gradients.dquery_scale.sizes = {24}; });
}

TEST(AttentionErrors, HeadsThatDontDivide) {
  for (const std::int64_t key_heads : {0, 3, 8}) {
    refuse(kAll, "k", [&](Call& c) {
      c.k.sizes = {2, key_heads, 5, 4};
      c.v.sizes = {2, key_heads, 5, 3};
    });
  }
  refuse(kAll, "k", [](Call& c) {
    c.q.sizes = {2, 0, 3, 4};
    c.out.sizes = c.dout.sizes = {2, 0, 3, 3};
  });
}

TEST(AttentionErrors, HeadSizes) {
  for (const std::int64_t size : {std::int64_t{0}, kMaxHeadSize + 1}) {
    refuse(kAll, "q", [&](Call& c) { c.q.sizes = {2, 4, 3, size}, c.k.sizes = {2, 2, 5, size}; });
    refuse(kWithValues, "v", [&](Call& c) {
      c.v.sizes = {2, 2, 5, size};
      c.out.sizes = c.dout.sizes = {2, 4, 3, size};
    });
  }
}

TEST(AttentionErrors, NegativeSizes) {
  refuse(kAll, "q", [](Call& c) { c.q.sizes = {2, 4, -3, 4}; });
  refuse(kAll, "k", [](Call& c) { c.k.sizes = {2, 2, -5, 4}; });
  refuse(kWithValues, "v", [](Call& c) { c.v.sizes = {2, 2, -5, 3}; });
}

TEST(AttentionErrors, SizesThatOverflow) {
  refuse(kAll, "q", [](Call& c) { c.q.sizes = {kHuge, kHuge, 3, 4}; });
  refuse(kAll, "q", [](Call& c) { c.q.sizes = {kHuge, 4, 0, kHuge}; });
  refuse(kAll, "k", [](Call& c) { c.k.sizes = {2, 2, kMax, 4}; });
  refuse(kWithValues, "v", [](Call& c) { c.v.sizes = {2, kHuge, kHuge, 3}; });
}

TEST(AttentionErrors, RowsTimesKeysThatOverflow) {
  // Every view is possible (one element, repeated), but nobody can count the logits.
  refuse(kWhole, "k", [](Call& c) {
    c.q = ConstView(c.q.data, c.q.dtype, {1, 1, kHuge, 1}, {0, 0, 0, 0});
    c.k = c.v = ConstView(c.k.data, c.k.dtype, {1, 1, kHuge, 1}, {0, 0, 0, 0});
    c.options = {};
  });
  refuse(kShards, "shard", [](Call& c) { c.shard = {0, kMax}; });
}

TEST(AttentionErrors, StridesThatOverflow) {
  const Dims strides = {std::int64_t{1} << 62, 1, 1, 1},
             spread = {std::int64_t{1} << 60, 1, -(std::int64_t{1} << 60), 1};
  for (const Dims& bad : {strides, spread, Dims{kMin, 1, 1, 1}}) {
    refuse(kAll, "q", [&](Call& c) { c.q.strides = bad; });
    refuse(kAll, "k", [&](Call& c) { c.k.strides = bad; });
    refuse(kWithValues, "v", [&](Call& c) { c.v.strides = bad; });
    refuse({kForward, kShard}, "out", [&](Call& c) { c.out.strides = bad; });
    refuse({kBackward}, "dq", [&](Call& c) { c.gradients.dq.strides = bad; });
    refuse(kAll, "bias", [&](Call& c) { c.options.bias.strides = bad; });
  }
}

TEST(AttentionErrors, AsManyStridesAsAxes) {
  refuse(kAll, "q", [](Call& c) { c.q.strides = {1}; });
  refuse(kAll, "sinks", [](Call& c) { c.options.sinks.strides = {1, 1}; });
  refuse({kForward, kShard}, "out", [](Call& c) { c.out.strides = {12, 6, 1}; });
}

TEST(AttentionErrors, ElementTypes) {
  for (const DType dtype : {DType::boolean, static_cast<DType>(77), static_cast<DType>(-1)}) {
    refuse(kAll, "q", [&](Call& c) { c.q.dtype = dtype; });
  }
  for (const DType dtype : {DType::f64, DType::bf16, DType::f16, DType::boolean}) {
    refuse(kAll, "k", [&](Call& c) { c.k.dtype = dtype; });
    refuse(kWithValues, "v", [&](Call& c) { c.v.dtype = dtype; });
    refuse({kForward, kShard}, "out", [&](Call& c) { c.out.dtype = dtype; });
    refuse({kBackward}, "dout", [&](Call& c) { c.dout.dtype = dtype; });
    refuse({kBackward, kBackwardWorkspace}, "dq", [&](Call& c) { c.gradients.dq.dtype = dtype; });
    refuse({kBackward, kBackwardWorkspace}, "dk", [&](Call& c) { c.gradients.dk.dtype = dtype; });
    refuse({kBackward, kBackwardWorkspace}, "dv", [&](Call& c) { c.gradients.dv.dtype = dtype; });
    refuse({kBackward, kBackwardWorkspace}, "dbias", [&](Call& c) { c.gradients.dbias.dtype = dtype; });
    refuse({kBackward, kBackwardWorkspace}, "dsinks", [&](Call& c) { c.gradients.dsinks.dtype = dtype; });
    refuse({kBackward, kBackwardWorkspace}, "dquery_scale",
           [&](Call& c) { c.gradients.dquery_scale.dtype = dtype; });
    refuse(kAll, "bias", [&](Call& c) { c.options.bias.dtype = dtype; });
    refuse(kAll, "sinks", [&](Call& c) { c.options.sinks.dtype = dtype; });
    refuse(kAll, "query_scale", [&](Call& c) { c.options.query_scale.dtype = dtype; });
    refuse({kForward, kForwardWorkspace}, "weights", [&](Call& c) { c.outputs.weights.dtype = dtype; });
  }
}

TEST(AttentionErrors, ShardOutputIsInTheTypeOfTheArithmetic) {
  refuse({kShard}, "out", [](Call& c) {
    c.q.dtype = c.k.dtype = c.v.dtype = c.out.dtype = DType::bf16;
    c.options = {};
  });
}

TEST(AttentionErrors, NoData) {
  refuse(kThatRead, "q", [](Call& c) { c.q.data = nullptr; });
  refuse(kThatRead, "k", [](Call& c) { c.k.data = nullptr; });
  refuse({kForward, kBackward, kShard}, "v", [](Call& c) { c.v.data = nullptr; });
  refuse({kForward, kShard}, "out", [](Call& c) { c.out.data = nullptr; });
  refuse({kBackward}, "dout", [](Call& c) { c.dout.data = nullptr; });
  refuse({kBackward}, "dk", [](Call& c) { c.gradients.dk.data = nullptr; });
  refuse({kBackward}, "dquery_scale", [](Call& c) { c.gradients.dquery_scale.data = nullptr; });
  refuse(kThatRead, "bias", [](Call& c) { c.options.bias.data = nullptr; });
  refuse(kThatRead, "query_scale", [](Call& c) { c.options.query_scale.data = nullptr; });
  refuse({kForward}, "weights", [](Call& c) { c.outputs.weights.data = nullptr; });
}

TEST(AttentionErrors, NotGiven) {
  refuse(kAll, "q", [](Call& c) { c.q = {}; });
  refuse(kAll, "k", [](Call& c) { c.k = {}; });
  refuse(kWithValues, "v", [](Call& c) { c.v = {}; });
  refuse({kForward, kShard}, "out", [](Call& c) { c.out = {}; });
  refuse({kBackward}, "dout", [](Call& c) { c.dout = {}; });
  refuse({kShard}, "v", [](Call& c) { c.v = {}, c.out = {}; });
}

TEST(AttentionErrors, WorkspaceQueriesLookAtNoData) {
  Call call;
  call.q.data = call.k.data = call.v.data = nullptr;
  call.options.bias.data = reinterpret_cast<const void*>(std::uintptr_t{1});
  call.gradients.dq.data = nullptr;
  call.outputs.weights.data = nullptr;
  EXPECT_NO_THROW(call.forward_workspace());
  EXPECT_NO_THROW(call.backward_workspace());
}

TEST(AttentionErrors, MisalignedData) {
  const auto off_by_one = [](auto& view) {
    view.data = reinterpret_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data))) + 1;
  };
  refuse(kThatRead, "q", [&](Call& c) { off_by_one(c.q); });
  refuse({kForward, kShard}, "out", [&](Call& c) { off_by_one(c.out); });
  refuse({kBackward}, "dv", [&](Call& c) { off_by_one(c.gradients.dv); });
  refuse(kThatRead, "sinks", [&](Call& c) { off_by_one(c.options.sinks); });
}

TEST(AttentionErrors, OutputsThatHoldAnElementTwice) {
  for (const Dims& strides : {Dims{0, 9, 3, 1}, Dims{36, 9, 3, 0}, Dims{36, 9, 2, 1}, Dims{1, 1, 1, 1}}) {
    refuse({kForward, kShard}, "out", [&](Call& c) { c.out.strides = strides; });
  }
  const Dims once = {1, 1, 1, 1};
  refuse({kBackward}, "dq", [&](Call& c) { c.gradients.dq.strides = once; });
  refuse({kBackward}, "dk", [&](Call& c) { c.gradients.dk.strides = once; });
  refuse({kBackward}, "dv", [&](Call& c) { c.gradients.dv.strides = once; });
  refuse({kBackward}, "dbias", [&](Call& c) { c.gradients.dbias.strides = once; });
  refuse({kBackward}, "dsinks", [&](Call& c) { c.gradients.dsinks.strides = {0}; });
  refuse({kBackward}, "dquery_scale", [&](Call& c) { c.gradients.dquery_scale.strides = {1, 1, 1}; });
  refuse({kForward}, "weights", [&](Call& c) { c.outputs.weights.strides = {2, 1}; });
}

TEST(AttentionErrors, OutputsThatOverlapWhatIsRead) {
  const auto float_of = [](const ConstView& view) {
    return const_cast<float*>(static_cast<const float*>(view.data));
  };
  refuse({kForward, kShard}, "out", [&](Call& c) { c.out.data = float_of(c.q); });
  refuse({kForward, kShard}, "out", [&](Call& c) { c.out.data = float_of(c.k) + 79; });
  refuse({kForward, kShard}, "out", [&](Call& c) { c.out.data = float_of(c.options.sinks); });
  refuse({kForward}, "weights", [&](Call& c) { c.outputs.weights.data = float_of(c.v); });
  refuse({kForward}, "top_weights", [&](Call& c) { c.outputs.top_weights = {float_of(c.options.bias), 48}; });
  refuse({kForward}, "stats", [](Call& c) {
    c.outputs.stats = {c.take<RowStats>(24), 24}, c.q.data = c.outputs.stats.data();
  });
  refuse({kForward}, "saved", [&](Call& c) { c.outputs.saved.data = float_of(c.k); });
  refuse({kForward}, "column_sums", [](Call& c) { c.k.data = c.outputs.column_sums.data(); });
  refuse({kForward}, "top_keys", [](Call& c) { c.v.data = c.outputs.top_keys.data(); });
  refuse({kForward}, "tile_counts", [](Call& c) { c.options.sinks.data = c.outputs.tile_counts; });
  refuse({kBackward}, "dq", [&](Call& c) { c.gradients.dq.data = float_of(c.q); });
  refuse({kBackward}, "dk", [&](Call& c) { c.gradients.dk.data = float_of(c.dout); });
  refuse({kBackward}, "dbias", [&](Call& c) { c.gradients.dbias.data = float_of(c.options.bias); });
  refuse({kBackward}, "dquery_scale",
         [&](Call& c) { c.gradients.dquery_scale.data = float_of(c.options.query_scale); });
  refuse({kBackward}, "dv", [](Call& c) {
    c.backward_options.saved = c.outputs.saved;
    c.gradients.dv.data = c.outputs.saved.data;
  });
  refuse({kBackward}, "tile_counts", [](Call& c) {
    c.backward_options.tile_counts = c.outputs.tile_counts;
    c.options.sinks.data = c.outputs.tile_counts;
  });
}

TEST(AttentionErrors, OutputsThatOverlapEachOther) {
  refuse({kForward}, "weights", [](Call& c) { c.outputs.weights.data = c.out.data; });
  refuse({kForward}, "stats", [](Call& c) { c.out.data = c.outputs.stats.data(); });
  refuse({kForward}, "top_weights", [](Call& c) {
    c.outputs.top_weights = {reinterpret_cast<float*>(c.outputs.top_keys.data()), 48};
  });
  refuse({kBackward}, "dk", [](Call& c) { c.gradients.dk.data = c.gradients.dq.data; });
  refuse({kBackward}, "dsinks", [](Call& c) { c.gradients.dsinks.data = c.gradients.dbias.data; });
  refuse({kBackward}, "dquery_scale", [](Call& c) { c.gradients.dquery_scale.data = c.gradients.dq.data; });
}

TEST(AttentionErrors, WorkspaceThatOverlaps) {
  for (const Entry& entry : {kForward, kBackward}) {
    refuse({entry}, "workspace", [](Call& c) {
      auto* bytes = static_cast<std::byte*>(const_cast<void*>(c.k.data));
      c.execution.workspace = {bytes, 16};
    });
  }
}

TEST(AttentionErrors, WorkspaceThatIsTooSmall) {
  refuse({kForward, kBackward}, "workspace", [](Call& c) {
    c.execution.workspace = {c.take<std::byte>(8), 8};
  });
}

TEST(AttentionErrors, SideArraysOfWrongShape) {
  const bool flags[240] = {};
  for (const Dims& sizes : {Dims{5}, Dims{2, 4, 3}, Dims{2, 4, 3, 4}, Dims{2, 2, 3, 5}, Dims{0, 4, 3, 5},
                            Dims{2, 4, 3, 5, 1}, Dims{2, 4, 3, -1}}) {
    refuse(kAll, "mask", [&](Call& c) { c.options.mask = ConstView(flags, sizes); });
    refuse(kAll, "bias", [&](Call& c) { c.options.bias.sizes = sizes; });
  }
  for (const Dims& sizes : {Dims{3}, Dims{4, 3}, Dims{2, 4, 3, 1}, Dims{2, 4, 5}, Dims{2, 2, 3}}) {
    refuse(kAll, "query_scale", [&](Call& c) { c.options.query_scale.sizes = sizes; });
  }
  for (const Dims& sizes : {Dims{1}, Dims{2}, Dims{1, 4}}) {
    refuse(kAll, "sinks", [&](Call& c) { c.options.sinks.sizes = sizes; });
  }
  refuse(kAll, "mask", [](Call& c) { c.options.mask = c.options.bias; });  // not boolean
}

TEST(AttentionErrors, HeadRules) {
  const std::vector<Rule> rules(5);
  for (const std::size_t count : Sizes{1, 3, 5}) {
    refuse(kWhole, "head_rules", [&](Call& c) { c.options.head_rules = std::span(rules).first(count); });
  }
}

TEST(AttentionErrors, Numbers) {
  for (const double bad : {kInfinity, -kInfinity, kNaN}) {
    refuse(kAll, "scale", [&](Call& c) { c.options.scale = bad; });
    refuse(kAll, "softcap", [&](Call& c) { c.options.softcap = bad; });
    refuse(kAll, "skip_epsilon", [&](Call& c) { c.options.skip_epsilon = bad; });
  }
  for (const double bad : {-1.0, 1e-45, 1e-310}) {
    refuse(kAll, "softcap", [&](Call& c) { c.options.softcap = bad; });
  }
  refuse(kAll, "skip_epsilon", [](Call& c) { c.options.skip_epsilon = -1e-9; });
  refuse(kAll, "skip_epsilon", [](Call& c) { c.options.skip_epsilon = 1; });
  for (const std::int64_t bad : {std::int64_t{-2}, kMin}) {
    refuse(kAll, "window_left", [&](Call& c) { c.options.window_left = bad; });
    refuse(kAll, "window_right", [&](Call& c) { c.options.window_right = bad; });
  }
  for (const int bad : {-1, 1025}) {
    refuse(kThatRead, "threads", [&](Call& c) { c.execution.threads = bad; });
  }
}

TEST(AttentionErrors, Lengths) {
  const std::vector<std::int64_t> many(25, 1);
  for (const std::size_t count : Sizes{1, 3, 23, 25}) {
    refuse(kAll, "lengths", [&](Call& c) { c.options.lengths = std::span(many).first(count); });
  }
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{6}, kMax, kMin}) {
    const std::int64_t lengths[] = {5, bad};
    refuse(kWhole, "lengths", [&](Call& c) { c.options.lengths = lengths; });
  }
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{21}, kMax, kMin}) {
    const std::int64_t lengths[] = {5, bad};
    refuse(kShards, "lengths", [&](Call& c) { c.options.lengths = lengths; });
  }
}

TEST(AttentionErrors, PackedSequences) {
  const std::int64_t queries[] = {0, 1, 3}, keys[] = {0, 5, 5}, late[] = {1, 2, 3}, back[] = {0, 4, 3},
                     early[] = {0, 1, 2}, one[] = {0}, two[] = {0, 5};
  const auto packed = [](Call& c, std::span<const std::int64_t> query_starts,
                         std::span<const std::int64_t> key_starts) {
    const Dims batch_of_one = {1, 4, 3, 4};
    c.q.sizes = c.gradients.dq.sizes = batch_of_one;
    c.k.sizes = c.gradients.dk.sizes = {1, 2, 5, 4};
    c.v.sizes = c.gradients.dv.sizes = {1, 2, 5, 3};
    c.out.sizes = c.dout.sizes = {1, 4, 3, 3};
    c.options = {.query_starts = query_starts, .key_starts = key_starts};
    c.gradients.dbias = c.gradients.dsinks = c.gradients.dquery_scale = {};
    c.outputs = {};
  };
  for (const Entry& entry : kWhole) {
    Call call;
    packed(call, queries, keys);
    EXPECT_NO_THROW((call.*entry.run)()) << entry.name;
  }
  refuse(kWhole, "key_starts", [&](Call& c) { packed(c, queries, {}); });
  refuse(kWhole, "query_starts", [&](Call& c) { packed(c, {}, keys); });
  refuse(kWhole, "key_starts", [&](Call& c) { packed(c, queries, two); });
  refuse(kWhole, "query_starts", [&](Call& c) { packed(c, one, one); });
  for (const std::span<const std::int64_t> bad : {std::span(late), std::span(back), std::span(early)}) {
    refuse(kWhole, "query_starts", [&](Call& c) { packed(c, bad, keys); });
    refuse(kWhole, "key_starts", [&](Call& c) { packed(c, queries, bad); });
  }
  refuse(kWhole, "lengths", [&](Call& c) {
    packed(c, queries, keys);
    c.options.lengths = one;
  });
  refuse(kAll, "query_starts", [&](Call& c) {  // a batch of two, or a shard
    c.options.query_starts = queries;
    c.options.key_starts = keys;
  });
}

TEST(AttentionErrors, Stats) {
  std::vector<RowStats> stats(25);
  for (const std::size_t count : Sizes{1, 23, 25}) {
    refuse({kForward, kForwardWorkspace}, "stats",
           [&](Call& c) { c.outputs.stats = std::span(stats).first(count); });
  }
}

TEST(AttentionErrors, Saved) {
  std::vector<float> memory(24 * 6 + 1);
  float* const data = memory.data();
  const View wrong[] = {{data, {24, 4}},         {data, {23, 3}},          {data, DType::f64, {24, 3}},
                        {data, {24, 3}, {4, 1}}, {data, {24, 3}, {1, 24}}, {data, {3}}};
  for (const View& saved : wrong) {
    refuse({kForward, kForwardWorkspace}, "saved", [&](Call& c) { c.outputs.saved = saved; });
    refuse({kBackward, kBackwardWorkspace}, "saved", [&](Call& c) { c.backward_options.saved = saved; });
  }
  const std::vector<Rule> rules = {Rule::none(), Rule::paper(), Rule::none(), Rule::target_entropy(1)};
  refuse({kForward, kForwardWorkspace}, "saved",
         [&](Call& c) { c.options.head_rules = rules; });  // of 6 numbers
  refuse({kForward}, "saved", [](Call& c) { c.outputs.saved.data = nullptr; });
}

TEST(AttentionErrors, WeightsOfRows) {
  const Entries forwards = {kForward, kForwardWorkspace};
  for (const RowIndex bad : {RowIndex{2, 0, 0}, RowIndex{0, 4, 0}, RowIndex{0, 0, 3}, RowIndex{-1, 0, 0},
                             RowIndex{0, -1, 0}, RowIndex{0, 0, kMin}, RowIndex{kMax, 0, 0}}) {
    const RowIndex rows[] = {{0, 0, 0}, bad};
    refuse(forwards, "weight_rows", [&](Call& c) { c.outputs.weight_rows = rows; });
  }
  for (const Dims& sizes : {Dims{1, 5}, Dims{2, 4}, Dims{10}, Dims{2, 1}, Dims{2, 5, 1}}) {
    refuse(forwards, "weights", [&](Call& c) { c.outputs.weights.sizes = sizes; });
  }
  refuse(forwards, "weights", [](Call& c) { c.outputs.weights = {}; });
  refuse(forwards, "weights", [](Call& c) { c.outputs.weight_rows = {}; });
}

TEST(AttentionErrors, HeaviestKeysAndColumnSums) {
  const Entries forwards = {kForward, kForwardWorkspace};
  refuse(forwards, "top_k", [](Call& c) { c.outputs.top_k = -1; });
  refuse(forwards, "top_k", [](Call& c) { c.outputs.top_k = kMax; });
  refuse(forwards, "top_keys", [](Call& c) { c.outputs.top_k = 3; });
  refuse(forwards, "top_keys", [](Call& c) { c.outputs.top_k = 0; });
  refuse(forwards, "top_keys", [](Call& c) { c.outputs.top_keys = {}; });
  refuse(forwards, "top_weights", [](Call& c) { c.outputs.top_weights = c.outputs.top_weights.first(47); });
  refuse(forwards, "top_weights", [](Call& c) { c.outputs.top_weights = {}; });
  refuse(forwards, "column_sums", [](Call& c) { c.outputs.column_sums = c.outputs.column_sums.first(39); });
}

TEST(AttentionErrors, GradientsOfWhatWasNotGiven) {
  const Entries backwards = {kBackward, kBackwardWorkspace};
  refuse(backwards, "dbias", [](Call& c) { c.options.bias = {}; });
  refuse(backwards, "dsinks", [](Call& c) { c.options.sinks = {}; });
  refuse(backwards, "dquery_scale", [](Call& c) { c.options.query_scale = {}; });
}

TEST(AttentionErrors, Shards) {
  for (const Shard& bad : {Shard{-1, 20}, Shard{16, 20}, Shard{0, 4}, Shard{kMax, kMax}, Shard{0, -1}}) {
    refuse(kShards, "shard", [&](Call& c) { c.shard = bad; });
  }
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{1}, kMax}) {
    refuse(kShards, "shard", [&](Call& c) { c.shard.first_query = bad; });
  }
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{2}, kMax}) {
    refuse(kShards, "shard", [&](Call& c) { c.shard.all_queries = bad; });
  }
  refuse({kSums, kShard}, "rows", [](Call& c) { c.scales = c.scales.first(23); });
  refuse({kStates}, "out", [](Call& c) { c.states = c.states.first(23); });
  refuse({kSums}, "out", [](Call& c) { c.sums = c.sums.first(23); });
  refuse({kShard}, "mass", [](Call& c) { c.mass = c.mass.first(23); });
  refuse({kGradientSums}, "rows", [](Call& c) { c.weighed = c.weighed.first(23); });
  refuse({kGradientSums}, "out", [](Call& c) { c.gradient_sums = c.gradient_sums.first(23); });
  refuse({kShardBackward}, "rows", [](Call& c) { c.slopes = c.slopes.first(23); });
  for (const Dims& sizes : {Dims{2, 4, 3, 4}, Dims{2, 4, 3}, Dims{1, 4, 3, 5}}) {
    refuse({kStates, kSums, kShard}, "logits", [&](Call& c) { c.shard.logits.sizes = sizes; });
  }
  refuse({kStates, kSums, kShard}, "logits", [](Call& c) { c.shard.logits.dtype = DType::f64; });
  refuse({kStates, kSums, kShard}, "logits", [](Call& c) { c.shard.logits.data = nullptr; });
  double parameter[24] = {};
  refuse({kShardBackward}, "dparameter", [&](Call& c) { c.gradients.dparameter = parameter; });
  refuse({kShardBackward}, "dsinks", [](Call& c) { c.options.sinks = {}; });
  // What is a part of a sum is in the type of the arithmetic.
  for (const auto of :
       {&AttentionGradients::dq, &AttentionGradients::dsinks, &AttentionGradients::dquery_scale}) {
    const std::string name = of == &AttentionGradients::dq       ? "dq"
                             : of == &AttentionGradients::dsinks ? "dsinks"
                                                                 : "dquery_scale";
    refuse({kShardBackward}, name, [&](Call& c) { (c.gradients.*of).dtype = DType::bf16; });
  }
}

TEST(AttentionErrors, ShardResultsThatOverlap) {
  refuse({kStates}, "out", [](Call& c) { c.q.data = c.states.data(); });
  refuse({kSums}, "out", [](Call& c) { c.k.data = c.sums.data(); });
  refuse({kSums}, "out", [](Call& c) { c.sums = {reinterpret_cast<RowSums*>(c.scales.data()), 24}; });
  refuse({kShard}, "out", [](Call& c) { c.out.data = c.scales.data(); });
  refuse({kShard}, "mass", [](Call& c) { c.v.data = c.mass.data(); });
  refuse({kShard}, "mass", [](Call& c) { c.out.data = c.mass.data(); });
  refuse({kShard}, "mass", [](Call& c) { c.mass = {reinterpret_cast<double*>(c.scales.data()), 24}; });
  refuse({kStates, kSums, kShard}, "logits", [](Call& c) { c.q.data = c.shard.logits.data; });
  refuse({kGradientSums}, "out", [](Call& c) { c.dout.data = c.gradient_sums.data(); });
  refuse({kGradientSums}, "out", [](Call& c) {
    c.gradient_sums = {reinterpret_cast<GradientSums*>(c.weighed.data()), 24};
  });
  refuse({kShardBackward}, "dq", [](Call& c) { c.gradients.dq.data = c.slopes.data(); });
  refuse({kShardBackward}, "dk", [](Call& c) { c.gradients.dk.data = c.gradients.dq.data; });
}

}  // namespace
}  // namespace whet
