// Arguments that every row function refuses: the error names the argument and nothing is written.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cstddef>
#include <cstdint>
#include <regex>
#include <string>
#include <vector>

#include "cases.h"

namespace whet {
namespace {

constexpr float kCanary = -77;
constexpr std::int64_t kHuge = std::int64_t{1} << 40;

// The arguments of a call that is right (2 rows of 6 keys) until a test bends one of them.
struct Call {
  Call() : in_data(12, 0.5F), dout_data(12, 0.25F), out_data(12, kCanary), stats_data(2), states_data(2) {
    for (RowStats& s : stats_data) s.beta = kCanary;
    for (RowState& s : states_data) s.z = kCanary;
    in = ConstView(in_data.data(), {2, 6});
    dout = ConstView(dout_data.data(), {2, 6});
    out = View(out_data.data(), {2, 6});
    stats = stats_data;
    row_states = states_data;
  }

  SoftmaxOptions options() const { return {.axis = axis, .mask = mask, .lengths = lengths}; }
  void run_softmax() const {
    softmax(in, out, options(), {.stats = stats, .saved = saved}, {.threads = threads});
  }
  void run_sharpen() const { sharpen(in, out, options(), {.stats = stats}, {.threads = threads}); }
  void run_backward() const {
    softmax_backward(in, dout, out, options(), {.saved = saved}, {.threads = threads});
  }
  void run_states() const {
    states(in, row_states, {.axis = axis, .mask = mask, .lengths = lengths}, {.threads = threads});
  }

  bool untouched() const {
    bool same = true;
    for (float value : in_data) same = same && value == 0.5F;
    for (float value : dout_data) same = same && value == 0.25F;
    for (float value : out_data) same = same && value == kCanary;
    for (const RowStats& s : stats_data) same = same && s.beta == kCanary;
    for (const RowState& s : states_data) same = same && s.z == kCanary;
    return same;
  }

  std::vector<float> in_data, dout_data, out_data;
  std::vector<RowStats> stats_data;
  std::vector<RowState> states_data;
  ConstView in, dout;
  View out;
  std::span<RowStats> stats;
  View saved;
  std::span<RowState> row_states;
  int axis = -1;
  ConstView mask;
  std::span<const std::int64_t> lengths;
  int threads = 1;
};

template <typename Function>
void expect_error_naming(const std::string& argument, const Call& call, const std::string& function,
                         const Function& run) {
  SCOPED_TRACE(function);
  try {
    run();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_TRUE(std::regex_search(error.what(), std::regex("\\b" + argument + "\\b")))
        << "should name " << argument << ": " << error.what();
  }
  EXPECT_TRUE(call.untouched());
}

void forward_refuses(const std::string& argument, const Call& call) {
  expect_error_naming(argument, call, "softmax", [&] { call.run_softmax(); });
  expect_error_naming(argument, call, "sharpen", [&] { call.run_sharpen(); });
}

// In backward the output is called din.
void backward_refuses(const std::string& argument, const Call& call) {
  expect_error_naming(argument, call, "softmax_backward", [&] { call.run_backward(); });
}

void states_refuse(const std::string& argument, const Call& call) {
  expect_error_naming(argument, call, "states", [&] { call.run_states(); });
}

void all_refuse(const std::string& argument, const Call& call) {
  forward_refuses(argument, call);
  backward_refuses(argument, call);
  states_refuse(argument, call);
}

void outputs_refuse(const Call& call) {
  forward_refuses("out", call);
  backward_refuses("din", call);
}

TEST(SoftmaxErrors, AreNotGivenForARightCall) {
  Call call;
  EXPECT_NO_THROW(call.run_softmax());
  EXPECT_NO_THROW(call.run_sharpen());
  EXPECT_NO_THROW(call.run_backward());
  EXPECT_NO_THROW(call.run_states());
}

TEST(SoftmaxErrors, NineAxesDontFitAView) {
  EXPECT_THROW(Dims({1, 1, 1, 1, 1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(Dims(std::span<const std::int64_t>(std::vector<std::int64_t>(9, 1))), Error);
  EXPECT_NO_THROW(Dims({1, 1, 1, 1, 1, 1, 1, 1}));
}

TEST(SoftmaxErrors, NoAxes) {
  Call call;
  call.in.sizes = {};
  all_refuse("in", call);
}

TEST(SoftmaxErrors, ShapesThatDiffer) {
  for (const Dims& sizes : {Dims{2, 5}, Dims{3, 6}, Dims{12}, Dims{2, 6, 1}, Dims{6, 2}}) {
    Call call;
    call.out.sizes = sizes;
    outputs_refuse(call);
  }
  Call call;
  call.dout.sizes = {2, 5};
  backward_refuses("dout", call);
}

TEST(SoftmaxErrors, NegativeSize) {
  Call call;
  call.in.sizes = {2, -6};
  all_refuse("in", call);
}

TEST(SoftmaxErrors, SizesThatOverflow) {
  for (const Dims& sizes :
       {Dims{kHuge, kHuge}, Dims{std::int64_t{1} << 62}, Dims{2, std::int64_t{1} << 62}}) {
    Call call;
    call.in.sizes = call.out.sizes = call.dout.sizes = sizes;
    all_refuse("in", call);
  }
}

TEST(SoftmaxErrors, StridesThatOverflow) {
  Call call;
  call.in.strides = {std::int64_t{1} << 62, 1};
  all_refuse("in", call);
  call.in.strides = {std::int64_t{1} << 61, -(std::int64_t{1} << 61)};
  all_refuse("in", call);
}

TEST(SoftmaxErrors, AsManyStridesAsAxes) {
  Call call;
  call.in.strides = {1};
  all_refuse("in", call);
  Call other;
  other.out.strides = {12, 6, 1};
  outputs_refuse(other);
}

TEST(SoftmaxErrors, NoData) {
  Call call;
  call.in.data = nullptr;
  all_refuse("in", call);
  Call other;
  other.out.data = nullptr;
  outputs_refuse(other);
}

TEST(SoftmaxErrors, ElementTypes) {
  for (DType dtype : {DType::boolean, static_cast<DType>(77), static_cast<DType>(-1)}) {
    Call call;
    call.in.dtype = dtype;
    all_refuse("in", call);
  }
  for (DType dtype : {DType::f64, DType::bf16, DType::f16, DType::boolean}) {
    Call call;
    call.out.dtype = dtype;
    outputs_refuse(call);
    Call other;
    other.dout.dtype = dtype;
    backward_refuses("dout", other);
  }
}

TEST(SoftmaxErrors, OutputThatHoldsAnElementTwice) {
  for (const Dims& strides : {Dims{0, 1}, Dims{6, 0}, Dims{1, 1}, Dims{3, 1}}) {
    Call call;
    call.out.strides = strides;
    outputs_refuse(call);
  }
}

TEST(SoftmaxErrors, OverlapOfInputAndOutput) {
  Call call;
  call.out = View(call.in_data.data() + 1, {1, 6});
  call.in = ConstView(call.in_data.data(), {1, 6});
  call.dout = ConstView(call.dout_data.data(), {1, 6});
  call.stats = {};
  outputs_refuse(call);
  call.out = View(call.in_data.data() + 5, {1, 6});
  outputs_refuse(call);
  call.out = View(call.in_data.data() + 6, {1, 6});  // side by side
  EXPECT_NO_THROW(call.run_softmax());
}

TEST(SoftmaxErrors, OverlapWithOtherStrides) {
  Call call;
  call.in = ConstView(call.in_data.data(), {2, 2}, {2, 1});
  call.dout = ConstView(call.dout_data.data(), {2, 2}, {2, 1});
  call.out = View(call.in_data.data(), {2, 2}, {1, 2});
  outputs_refuse(call);
  // Interleaved: no shared element, but the byte ranges overlap.
  call.in = ConstView(call.in_data.data(), {2, 2}, {4, 2});
  call.out = View(call.in_data.data() + 1, {2, 2}, {4, 2});
  outputs_refuse(call);
}

TEST(SoftmaxErrors, OverlapOfGradientAndUpstream) {
  Call call;
  call.in = ConstView(call.in_data.data(), {1, 6});
  call.dout = ConstView(call.dout_data.data(), {1, 6});
  call.out = View(call.dout_data.data() + 1, {1, 6});
  call.stats = {};
  backward_refuses("din", call);
}

TEST(SoftmaxErrors, OverlapOfMaskAndOutput) {
  Call call;
  call.mask = ConstView(call.out_data.data(), DType::boolean, {2, 6});
  outputs_refuse(call);
}

TEST(SoftmaxErrors, AxisOutOfRange) {
  for (int axis : {2, -3, 100, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    Call call;
    call.axis = axis;
    all_refuse("axis", call);
  }
}

TEST(SoftmaxErrors, ThreadsOutOfRange) {
  for (int threads : {-1, 1025, std::numeric_limits<int>::min()}) {
    Call call;
    call.threads = threads;
    all_refuse("threads", call);
  }
  EXPECT_THROW(set_threads(-1), Error);
  EXPECT_THROW(set_threads(1025), Error);
}

TEST(SoftmaxErrors, MaskOfWrongShape) {
  const bool flags[36] = {};
  for (const Dims& sizes : {Dims{6}, Dims{2, 5}, Dims{3, 6}, Dims{2, 6, 1}, Dims{0, 6}, Dims{2, -1}}) {
    Call call;
    call.mask = ConstView(flags, sizes);
    all_refuse("mask", call);
  }
}

TEST(SoftmaxErrors, MaskOfWrongType) {
  Call call;
  call.mask = ConstView(call.dout_data.data(), {2, 6});
  all_refuse("mask", call);
}

TEST(SoftmaxErrors, MaskWithoutData) {
  Call call;
  call.mask = ConstView(static_cast<const bool*>(nullptr), {2, 6});
  all_refuse("mask", call);
}

TEST(SoftmaxErrors, NumberOfLengths) {
  const std::int64_t lengths[] = {1, 2, 3};
  for (std::size_t count : Sizes{1, 3}) {
    Call call;
    call.lengths = std::span(lengths, count);
    all_refuse("lengths", call);
  }
}

TEST(SoftmaxErrors, LengthsOutOfRange) {
  for (std::int64_t bad : {std::int64_t{-1}, std::int64_t{7}, std::numeric_limits<std::int64_t>::max(),
                           std::numeric_limits<std::int64_t>::min()}) {
    const std::int64_t lengths[] = {6, bad};  // the last row is wrong: the first must not be written either
    Call call;
    call.lengths = lengths;
    all_refuse("lengths", call);
  }
}

TEST(SoftmaxErrors, NumberOfStats) {
  std::vector<RowStats> three(3);
  for (std::size_t count : Sizes{1, 3}) {
    Call call;
    call.stats = std::span(three.data(), count);
    forward_refuses("stats", call);
  }
}

TEST(SoftmaxErrors, WhatIsSaved) {
  std::vector<float> memory(20, kCanary);
  const auto refused = [&](const View& saved, const char* what) {
    Call call;
    call.saved = saved;
    for (const auto run : {&Call::run_softmax, &Call::run_backward}) {
      try {
        (call.*run)();
        ADD_FAILURE() << what;
      } catch (const Error& error) {
        EXPECT_EQ(std::string(error.what()), std::string("saved: ") + what);
      }
    }
    EXPECT_TRUE(call.untouched());
  };
  float* const data = memory.data();
  refused({data, {2, 4}}, "its sizes are (2, 4), must be 2 rows of 3");
  refused({data, {3}}, "its sizes are (3), must be 2 rows of 3");
  refused({data, DType::f64, {2, 3}}, "its element type is f64, must be f32");
  refused({data, {2, 3}, {4, 1}}, "its strides are (4, 1), must be contiguous");
  refused({static_cast<float*>(nullptr), {2, 3}}, "its data is null");
  EXPECT_EQ(memory, std::vector<float>(20, kCanary));

  Call call;  // any axes will do
  call.saved = View(data, {2, 1, 3});
  EXPECT_NO_THROW(call.run_softmax());
  EXPECT_NO_THROW(call.run_backward());
  EXPECT_EQ(std::vector<float>(data, data + 6), (std::vector<float>{0.5F, 1, 1.0F / 6, 0.5F, 1, 1.0F / 6}));
}

TEST(SoftmaxErrors, SharpenSavesNothing) {
  Call call;
  std::vector<float> memory(6);
  EXPECT_THROW(sharpen(call.in, call.out, {}, {.saved = {memory.data(), {2, 3}}}), Error);
  EXPECT_TRUE(call.untouched());
}

TEST(SoftmaxErrors, NumberOfStates) {
  std::vector<RowState> three(3);
  for (std::size_t count : Sizes{0, 1, 3}) {
    Call call;
    call.row_states = std::span(three.data(), count);
    states_refuse("out", call);
  }
}

TEST(SoftmaxErrors, UnknownTarget) {
  EXPECT_THROW(force_target("AVX9"), Error);
  EXPECT_NO_THROW(force_target(""));
}

TEST(SoftmaxErrors, StatsAndStatesMayNotOverlapWhatIsRead) {
  std::vector<float> x(80), w(80);
  std::vector<std::int64_t> lengths(400, 2);
  const Dims sizes = {40, 2};
  const auto stats = std::span(reinterpret_cast<RowStats*>(lengths.data()), 40);
  EXPECT_THROW(softmax({x.data(), sizes}, {w.data(), sizes}, {.lengths = std::span(lengths).first(40)},
                       {.stats = stats}),
               Error);
  const auto states_of = std::span(reinterpret_cast<RowState*>(lengths.data()), 40);
  EXPECT_THROW(states({x.data(), sizes}, states_of, {.lengths = std::span(lengths).first(40)}), Error);
  std::vector<RowStats> big(40);
  EXPECT_THROW(softmax({x.data(), sizes}, {reinterpret_cast<float*>(big.data()), sizes}, {}, {.stats = big}),
               Error);
  for (const std::int64_t length : lengths) EXPECT_EQ(length, 2);
}

}  // namespace
}  // namespace whet
