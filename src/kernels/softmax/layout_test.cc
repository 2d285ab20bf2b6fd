// Softmax and states on views of every layout, with masks and lengths, in place and not.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cases.h"
#include "contract.h"
#include "oracle.h"
#include "targets.h"

namespace whet {
namespace {

using Shape = std::vector<std::int64_t>;

struct Layout {
  const char* name;
  Shape sizes;
  Shape in_strides;
  Shape out_strides;
  int axis;
};

const Layout kLayouts[] = {
    {"contiguous", {5, 37}, {37, 1}, {37, 1}, -1},
    {"padded rows", {5, 37}, {40, 1}, {48, 1}, 1},
    {"every third element", {4, 19}, {57, 3}, {19, 1}, -1},
    {"into every third element", {4, 19}, {19, 1}, {57, 3}, -1},
    {"rows down the columns", {37, 5}, {5, 1}, {5, 1}, 0},
    {"rows down many columns", {9, 70}, {70, 1}, {70, 1}, -2},
    {"transposed", {5, 37}, {1, 5}, {37, 1}, 1},
    {"into transposed", {5, 37}, {37, 1}, {1, 5}, 1},
    {"axis in the middle", {3, 23, 4}, {92, 4, 1}, {92, 4, 1}, 1},
    {"axes permuted", {3, 4, 23}, {23, 69, 1}, {4, 1, 12}, 2},
    {"keys backwards", {3, 33}, {33, -1}, {33, 1}, 1},
    {"into keys backwards", {3, 33}, {33, 1}, {33, -1}, 1},
    {"everything backwards", {3, 33}, {-33, -1}, {-40, -1}, 1},
    {"one row for all", {6, 20}, {0, 1}, {20, 1}, 1},
    {"one value for all keys", {6, 20}, {1, 0}, {20, 1}, 1},
    {"one axis", {65}, {1}, {1}, 0},
    {"eight axes",
     {2, 1, 3, 1, 2, 1, 9, 2},
     {108, 108, 36, 36, 18, 18, 2, 1},
     {1, 5, 2, 3, 6, 7, 12, 108},
     6},
    {"axis of one key", {4, 1, 3}, {3, 3, 1}, {3, 3, 1}, 1},
};

template <typename T>
void fill_gaussian(std::vector<T>& values, Random& random, double sd = 2) {
  for (T& value : values) value = static_cast<T>(gaussian(random, sd));
}

std::size_t axis_of(const Layout& layout) {
  return static_cast<std::size_t>(layout.axis < 0 ? layout.axis + static_cast<int>(layout.sizes.size())
                                                  : layout.axis);
}

// Elements of the buffer that aren't the tensor's.
template <typename T>
void expect_rest_untouched(const Tensor<T>& tensor, std::size_t axis, T canary) {
  std::vector<bool> own(tensor.buffer.size(), false);
  for (std::int64_t row = 0; row < tensor.rows(axis); ++row) {
    for (std::int64_t key = 0; key < tensor.keys(axis); ++key) own[tensor.position(axis, row, key)] = true;
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i]) continue;
    ASSERT_EQ(tensor.buffer[i], canary) << "element " << i << " isn't part of the output";
  }
}

template <typename T>
void check_layout(const Layout& layout, const RuleCase& rule) {
  constexpr T kCanary{-77};
  const std::size_t axis = axis_of(layout);
  Random random(1);
  Tensor<T> in(layout.sizes, layout.in_strides, T{0}, 1);  // a margin of one element: never aligned
  Tensor<T> out(layout.sizes, layout.out_strides, kCanary, 3);
  fill_gaussian(in.buffer, random);
  const std::size_t rows = static_cast<std::size_t>(in.rows(axis));
  std::vector<RowStats> stats(rows);
  std::vector<RowState> row_states(rows);
  softmax(in.view(), out.view(), {.rule = rule.rule, .axis = layout.axis}, {.stats = std::span(stats)});
  states(in.view(), std::span(row_states), {.axis = layout.axis});
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int64_t row = static_cast<std::int64_t>(r);
    SCOPED_TRACE("row " + std::to_string(r));
    const oracle::Row expected(to_double(in.row(axis, row)));
    expect_contract<T>(expected, rule.plain, out.row(axis, row), stats[r]);
    expect_states_close<T>(expected, row_states[r]);
  }
  expect_rest_untouched(out, axis, kCanary);
}

TEST(SoftmaxLayout, AnyStridesGiveTheContract) {
  for_each_target([] {
    for (const Layout& layout : kLayouts) {
      for (const RuleCase& rule : rule_cases()) {
        SCOPED_TRACE(std::string(layout.name) + ", rule " + rule.rule.name());
        check_layout<float>(layout, rule);
        check_layout<double>(layout, rule);
      }
    }
  });
}

TEST(SoftmaxLayout, InPlaceGivesTheSameBits) {
  for_each_target([] {
    for (const Layout& layout : kLayouts) {
      const std::size_t axis = axis_of(layout);
      for (const RuleCase& rule : rule_cases()) {
        SCOPED_TRACE(std::string(layout.name) + ", rule " + rule.rule.name());
        Random random(2);
        // Output strides serve for both: an output never holds one element twice.
        Tensor<float> in(layout.sizes, layout.out_strides, 0);
        Tensor<float> out(layout.sizes, layout.out_strides, 0);
        fill_gaussian(in.buffer, random);
        softmax(in.view(), out.view(), {.rule = rule.rule, .axis = layout.axis});
        softmax(in.view(), in.view(), {.rule = rule.rule, .axis = layout.axis});
        for (std::int64_t row = 0; row < in.rows(axis); ++row) {
          ASSERT_EQ(in.row(axis, row), out.row(axis, row)) << "row " << row;
        }
      }
    }
  });
}

TEST(SoftmaxLayout, EveryMisalignmentGivesTheSameBits) {
  for_each_target([] {
    Random random(3);
    const std::vector<float> x = gaussian_row<float>(random, 100);
    std::vector<float> first(100);
    softmax(ConstView(x.data(), {100}), View(first.data(), {100}), {.rule = Rule::paper()});
    for (std::size_t shift = 0; shift < 17; ++shift) {
      std::vector<float> in(200), out(200);
      std::copy(x.begin(), x.end(), in.begin() + static_cast<std::ptrdiff_t>(shift));
      float* to = out.data() + (shift * 5) % 19;
      softmax(ConstView(in.data() + shift, {100}), View(to, {100}), {.rule = Rule::paper()});
      EXPECT_EQ(std::vector<float>(to, to + 100), first) << shift;
    }
  });
}

// std::vector<bool> has no pointer.
struct Flags {
  explicit Flags(std::size_t n) : size(n), data(std::make_unique<bool[]>(n)) {}
  std::size_t size;
  std::unique_ptr<bool[]> data;
};

Flags random_flags(std::size_t n, Random& random) {
  Flags flags(n);
  for (std::size_t i = 0; i < n; ++i) flags.data[i] = random() % 3 != 0;
  return flags;
}

struct MaskLayout {
  const char* name;
  Shape sizes;
  Shape strides;
};

const MaskLayout kMasks[] = {
    {"full", {3, 4, 21}, {84, 21, 1}},
    {"one for all rows", {1, 1, 21}, {21, 21, 1}},
    {"one for a batch", {3, 1, 21}, {21, 21, 1}},
    {"one flag a row", {3, 4, 1}, {4, 1, 1}},
    {"one flag", {1, 1, 1}, {1, 1, 1}},
    {"full, transposed", {3, 4, 21}, {1, 3, 12}},
    {"full, backwards", {3, 4, 21}, {-84, -21, -1}},
};

template <typename T>
void check_mask(const MaskLayout& layout, const RuleCase& rule, int axis, bool with_lengths) {
  const std::size_t axis_index = static_cast<std::size_t>(axis);
  const Shape sizes = {3, 4, 21};
  Random random(4);
  Tensor<T> in(sizes, {84, 21, 1}, T{0});
  Tensor<T> out(sizes, {84, 21, 1}, T{-1});
  fill_gaussian(in.buffer, random);
  in.buffer[in.position(axis_index, 2, 1)] = -static_cast<T>(kInfinity);
  const Flags flags = random_flags(3 * 4 * 21, random);
  std::int64_t origin = 0;
  for (std::size_t d = 0; d < 3; ++d)
    origin += layout.strides[d] < 0 ? (1 - layout.sizes[d]) * layout.strides[d] : 0;
  const ConstView mask(flags.data.get() + origin, Dims(std::span(layout.sizes)),
                       Dims(std::span(layout.strides)));
  // The same flags, spread to the full shape by the definition of broadcasting.
  Tensor<char> spread(sizes, {84, 21, 1}, 0);
  for (std::int64_t a = 0; a < 3; ++a) {
    for (std::int64_t b = 0; b < 4; ++b) {
      for (std::int64_t c = 0; c < 21; ++c) {
        const std::int64_t at = origin + (layout.sizes[0] > 1 ? a * layout.strides[0] : 0) +
                                (layout.sizes[1] > 1 ? b * layout.strides[1] : 0) +
                                (layout.sizes[2] > 1 ? c * layout.strides[2] : 0);
        spread.buffer[spread.position(2, a * 4 + b, c)] = flags.data[static_cast<std::size_t>(at)];
      }
    }
  }
  // Behind a masked key may lie anything.
  for (std::size_t i = 0; i < in.buffer.size(); ++i) {
    if (!spread.buffer[i]) in.buffer[i] = static_cast<T>(i % 2 ? kNaN : kInfinity);
  }
  const std::size_t rows = static_cast<std::size_t>(in.rows(axis_index));
  std::vector<std::int64_t> lengths;
  for (std::size_t r = 0; with_lengths && r < rows; ++r) {
    lengths.push_back(static_cast<std::int64_t>(r * 5) % (in.keys(axis_index) + 1));
  }
  std::vector<RowStats> stats(rows);
  std::vector<RowState> row_states(rows);
  softmax(in.view(), out.view(), {.rule = rule.rule, .axis = axis, .mask = mask, .lengths = lengths},
          {.stats = std::span(stats)});
  states(in.view(), std::span(row_states), {.axis = axis, .mask = mask, .lengths = lengths});
  for (std::size_t r = 0; r < rows; ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    const std::int64_t row = static_cast<std::int64_t>(r);
    oracle::Row expected(to_double(in.row(axis_index, row)));
    const std::vector<char> row_flags = spread.row(axis_index, row);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected.flags[i] = row_flags[i] && (!with_lengths || static_cast<std::int64_t>(i) < lengths[r]);
    }
    expect_contract<T>(expected, rule.plain, out.row(axis_index, row), stats[r]);
    expect_states_close<T>(expected, row_states[r]);
  }
}

TEST(SoftmaxMask, HidesKeysWhateverItsLayout) {
  for_each_target([] {
    for (const MaskLayout& layout : kMasks) {
      for (const RuleCase& rule : rule_cases()) {
        for (int axis : {0, 1, 2}) {
          SCOPED_TRACE(std::string(layout.name) + ", axis " + std::to_string(axis) + ", rule " +
                       rule.rule.name());
          check_mask<float>(layout, rule, axis, false);
          check_mask<float>(layout, rule, axis, true);
          check_mask<double>(layout, rule, axis, true);
        }
      }
    }
  });
}

// Three ways to hide the same keys, and a row that never had them.
TEST(SoftmaxMask, EqualsMinusInfinityAndLengths) {
  for_each_target([] {
    Random random(5);
    for (std::size_t n : Sizes{1, 5, 16, 100}) {
      const std::size_t padded = n + 9;
      const std::vector<float> x = gaussian_row<float>(random, padded);
      std::vector<float> hidden = x;
      Flags flags(padded);
      for (std::size_t i = 0; i < padded; ++i) {
        flags.data[i] = i < n;
        if (i >= n) hidden[i] = -static_cast<float>(kInfinity);
      }
      const std::vector<std::int64_t> length = {static_cast<std::int64_t>(n)};
      const Dims sizes = {static_cast<std::int64_t>(padded)};
      for (const RuleCase& rule : rule_cases()) {
        SCOPED_TRACE("n " + std::to_string(n) + ", rule " + rule.rule.name());
        std::vector<float> by_mask(padded), by_infinity(padded), by_length(padded);
        RowStats stats[3];
        const oracle::Row expected(to_double(hidden));
        softmax(ConstView(x.data(), sizes), View(by_mask.data(), sizes),
                {.rule = rule.rule, .mask = {flags.data.get(), sizes}}, {.stats = std::span(&stats[0], 1)});
        softmax(ConstView(hidden.data(), sizes), View(by_infinity.data(), sizes), {.rule = rule.rule},
                {.stats = std::span(&stats[1], 1)});
        softmax(ConstView(x.data(), sizes), View(by_length.data(), sizes),
                {.rule = rule.rule, .lengths = length}, {.stats = std::span(&stats[2], 1)});
        expect_contract<float>(expected, rule.plain, by_mask, stats[0]);
        expect_contract<float>(expected, rule.plain, by_infinity, stats[1]);
        expect_contract<float>(expected, rule.plain, by_length, stats[2]);
      }
    }
  });
}

TEST(SoftmaxMask, LengthsGoByRowsInRowMajorOrder) {
  const std::vector<float> x(2 * 5 * 3, 1.0F);  // rows along the middle axis
  std::vector<float> w(x.size());
  const std::vector<std::int64_t> lengths = {0, 1, 2, 3, 4, 5};
  softmax(ConstView(x.data(), {2, 5, 3}), View(w.data(), {2, 5, 3}), {.axis = 1, .lengths = lengths});
  for (std::size_t a = 0; a < 2; ++a) {
    for (std::size_t key = 0; key < 5; ++key) {
      for (std::size_t c = 0; c < 3; ++c) {
        const std::int64_t length = lengths[a * 3 + c];
        const float expected =
            static_cast<std::int64_t>(key) < length ? 1.0F / static_cast<float>(length) : 0.0F;
        EXPECT_EQ(w[(a * 5 + key) * 3 + c], expected) << a << ' ' << key << ' ' << c;
      }
    }
  }
}

TEST(SoftmaxBits, DoNotDependOnStats) {
  for_each_target([] {
    Random random(12);
    for (const RuleCase& rule : rule_cases()) {
      const std::vector<float> x = make_row<float>(RowKind::gaussian, 1000, random);
      std::vector<float> with(1000), without(1000);
      RowStats stats[1];
      softmax({x.data(), {1000}}, {without.data(), {1000}}, {.rule = rule.rule});
      softmax({x.data(), {1000}}, {with.data(), {1000}}, {.rule = rule.rule}, {.stats = stats});
      EXPECT_EQ(with, without) << rule.rule.name();
      const SavedRows saved(DType::f32, 1, saved_size(SoftmaxOptions{.rule = rule.rule}));
      softmax({x.data(), {1000}}, {with.data(), {1000}}, {.rule = rule.rule}, {.saved = saved.view()});
      EXPECT_EQ(with, without) << rule.rule.name() << ", saved";
    }
  });
}

}  // namespace
}  // namespace whet
