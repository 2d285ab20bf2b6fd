// Attention on views of every layout: bit for bit what the same numbers give in contiguous views, and nothing
// written beside the outputs.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "targets.h"

namespace whet {
namespace {

struct NamedLayout {
  const char* name;
  Layout layout;
};

// All but the first start at an odd element, so never at the alignment of a vector.
const std::vector<NamedLayout>& layouts() {
  static const std::vector<NamedLayout> all = {
      {"contiguous", {}},
      {"contiguous, misaligned", {.offset = 1}},
      {"heads within queries", {.order = {0, 2, 1, 3}, .offset = 3}},
      {"heads within queries, padded", {.order = {0, 2, 1, 3}, .padding = 5, .offset = 1}},
      {"padded rows", {.padding = 3, .offset = 7}},
      {"transposed", {.order = {0, 1, 3, 2}, .offset = 1}},
      {"transposed, padded", {.order = {1, 0, 3, 2}, .padding = 2, .offset = 5}},
      {"batch fastest", {.order = {3, 2, 1, 0}, .offset = 1}},
      {"every third element", {.spacing = 3, .offset = 1}},
      {"elements backwards", {.backwards = {3}, .offset = 1}},
      {"rows backwards", {.padding = 1, .backwards = {2}, .offset = 3}},
      {"all backwards", {.backwards = {0, 1, 2, 3}, .offset = 1}},
      {"heads within queries, all backwards, spaced",
       {.order = {0, 2, 1, 3}, .spacing = 2, .padding = 3, .backwards = {0, 1, 2, 3}, .offset = 9}},
  };
  return all;
}

std::vector<oracle::Rule> plain_rules() {
  std::vector<oracle::Rule> rules;
  for (const RuleCase& rule : rule_cases()) rules.push_back(rule.plain);
  return rules;
}

// Few keys, tiles that aren't full, and one query.
constexpr Shape kShapes[] = {{2, 4, 2, 7, 19, 9, 5}, {2, 2, 1, 9, 258, 7, 6}, {2, 3, 1, 1, 290, 17, 9}};

// ---- Tensors ----

TEST(AttentionAnyLayout, EachTensorAloneGivesTheSameBits) {
  for_each_target([] {
    for (const DType type : kTypes) {
      for (const Shape& shape : kShapes) {
        Random random(1);
        oracle::Attention p = draw_problem(random, shape, type, 0.5);
        p.rules = {paper_case().plain};
        const Result expected = run(p, type);
        for (const NamedLayout& named : layouts()) {
          SCOPED_TRACE(std::string(named.name) + ", " + name_of(type) + ", M " + std::to_string(shape.M));
          for (Layout Layouts::*tensor : {&Layouts::q, &Layouts::k, &Layouts::v, &Layouts::out}) {
            Layouts alone;
            alone.*tensor = named.layout;
            EXPECT_TRUE(same(run(p, type, 0, alone), expected));
          }
        }
      }
    }
  });
}

// Every tensor in another layout, every rule, and the default of skip_epsilon.
TEST(AttentionAnyLayout, AllTensorsTogetherGiveTheSameBits) {
  const std::vector<NamedLayout>& all = layouts();
  for_each_target([&] {
    for (const DType type : kTypes) {
      for (const oracle::Rule& rule : plain_rules()) {
        Random random(2);
        oracle::Attention p = draw_problem(random, {2, 4, 2, 9, 70, 9, 5}, type);
        p.rules = {rule};
        p.causal = true;
        p.align = Align::end;
        const Result expected = run(p, type, 0x1p-24);
        for (std::size_t n = 0; n < all.size(); n += 3) {
          SCOPED_TRACE(std::string(all[n].name) + ", " + name_of(type) + ", rule " +
                       library_rule(rule).name());
          const Layouts mixed{all[n].layout,
                              all[(n + 3) % all.size()].layout,
                              all[(n + 7) % all.size()].layout,
                              all[(n + 8) % all.size()].layout,
                              {}};
          EXPECT_TRUE(same(run(p, type, 0x1p-24, mixed), expected));
        }
      }
    }
  });
}

TEST(AttentionAnyLayout, SideArraysGiveTheSameBits) {
  const std::vector<oracle::Rule> rules = plain_rules();
  for_each_target([&] {
    std::size_t turn = 0;
    for (const DType type : kTypes) {
      for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{2, 4, 9, 258},
                                                     {2, 1, 9, 258},
                                                     {1, 4, 1, 258},
                                                     {2, 1, 9, 1},
                                                     {1, 1, 1, 258}}) {
        Random random(3);
        oracle::Attention p = draw_problem(random, {2, 4, 2, 9, 258, 2, 3}, type);
        p.rules = {rules[turn++ % rules.size()]};
        p.bias = draw_array(random, sizes, type);
        p.mask = draw_mask(random, sizes);
        const Result expected = run(p, type);
        for (const NamedLayout& named : layouts()) {
          SCOPED_TRACE(std::string(named.name) + ", " + name_of(type) + ", " + testing::PrintToString(sizes));
          EXPECT_TRUE(
              same(run(p, type, 0, {.q = {}, .k = {}, .v = {}, .out = {}, .sides = named.layout}), expected));
        }
      }
    }
  });
}

// query_scale and sinks have fewer axes than AttentionCall lays out.
TEST(AttentionAnyLayout, QueryScaleAndSinksGiveTheSameBits) {
  const Layout scale_layouts[] = {{.order = {2, 1, 0}, .padding = 1, .offset = 1},
                                  {.order = {1, 2, 0}, .spacing = 2, .backwards = {0, 2}, .offset = 3}};
  const Layout sink_layouts[] = {{.spacing = 3, .offset = 1}, {.backwards = {0}, .offset = 5}};
  for_each_target([&] {
    for (const DType type : kTypes) {
      Random random(4);
      oracle::Attention p = draw_problem(random, {2, 4, 2, 13, 40, 4, 3}, type);
      p.query_scale = draw_array(random, {2, 4, 13}, type);
      p.sinks = draw_array(random, {4}, type);
      const Result expected = run(p, type);
      for (const Layout& scale_layout : scale_layouts) {
        for (const Layout& sink_layout : sink_layouts) {
          AttentionCall call(p, type, type);
          Placed query_scale(type, p.query_scale, scale_layout), sinks(type, p.sinks, sink_layout);
          call.options.query_scale = query_scale.view();
          call.options.sinks = sinks.view();
          call.options.skip_epsilon = 0;
          call.forward();
          SCOPED_TRACE(name_of(type));
          EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
        }
      }
    }
  });
}

// ---- Strides of 0 ----

// The same tensor with an axis repeated by a stride of 0, and spelled out.
struct Repeated {
  Repeated(DType type, const oracle::Array& one, std::size_t axis, std::int64_t times)
      : held(type, one), full(one) {
    full.sizes[axis] = times;
    full.values.clear();
    std::int64_t inner = 1;
    for (std::size_t a = axis + 1; a < one.sizes.size(); ++a) inner *= one.sizes[a];
    for (std::size_t at = 0; at < one.values.size(); at += static_cast<std::size_t>(inner)) {
      for (std::int64_t n = 0; n < times; ++n) {
        const auto from = one.values.begin() + static_cast<std::ptrdiff_t>(at);
        full.values.insert(full.values.end(), from, from + inner);
      }
    }
    view = held.view();
    std::vector<std::int64_t> strides(view.strides.begin(), view.strides.end());
    strides[axis] = 0;
    view.sizes = Dims(std::span<const std::int64_t>(full.sizes));
    view.strides = Dims(std::span<const std::int64_t>(strides));
  }

  Placed held;
  oracle::Array full;
  ConstView view;
};

TEST(AttentionAnyLayout, StridesOfZeroRepeat) {
  const Shape shape{2, 4, 2, 13, 270, 6, 5};
  for_each_target([&] {
    for (const DType type : kTypes) {
      for (std::size_t axis = 0; axis < 4; ++axis) {
        Random random(5);
        oracle::Attention p = draw_problem(random, shape, type);
        p.rules = {paper_case().plain};
        const auto repeat = [&](const oracle::Array& array) {
          return Repeated(type, slice(array, axis, 0, 1), axis, array.sizes[axis]);
        };
        const Repeated q = repeat(p.q), k = repeat(p.k), v = repeat(p.v);
        p.q = q.full, p.k = k.full, p.v = v.full;
        const Result expected = run(p, type);
        AttentionCall call(p, type, type);
        call.options.skip_epsilon = 0;
        SCOPED_TRACE(name_of(type) + ", axis " + std::to_string(axis));
        attention(q.view, k.view, v.view, call.out.view(), call.options, call.outputs);
        EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
        // One of them at a time: no shortcut may take a repeated axis of one for that of another.
        attention(call.q.view(), k.view, call.v.view(), call.out.view(), call.options, call.outputs);
        EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
        attention(call.q.view(), call.k.view(), v.view, call.out.view(), call.options, call.outputs);
        EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
      }
    }
  });
}

TEST(AttentionAnyLayout, StridesOfZeroInSideArraysRepeat) {
  for_each_target([] {
    for (std::size_t axis = 0; axis < 4; ++axis) {
      Random random(6);
      oracle::Attention p = draw_problem(random, {2, 4, 2, 13, 270, 6, 5}, DType::f32);
      const std::vector<std::int64_t> sizes = {2, 4, 13, 270};
      const Repeated bias(DType::f32, slice(draw_array(random, sizes, DType::f32), axis, 0, 1), axis,
                          sizes[axis]);
      const Repeated mask(DType::boolean, slice(draw_mask(random, sizes, 0.8), axis, 0, 1), axis,
                          sizes[axis]);
      p.bias = bias.full;
      p.mask = mask.full;
      const Result expected = run(p);
      AttentionCall call(p, DType::f32, DType::f32);
      call.options.skip_epsilon = 0;
      call.options.bias = bias.view;
      call.options.mask = mask.view;
      call.forward();
      SCOPED_TRACE("axis " + std::to_string(axis));
      EXPECT_TRUE(same({call.out.values(), call.stats}, expected));
    }
  });
}

// ---- Alignment ----

TEST(AttentionAnyLayout, EveryMisalignmentGivesTheSameBits) {
  for_each_target([] {
    for (const DType type : kTypes) {
      Random random(7);
      oracle::Attention p = draw_problem(random, {1, 2, 1, 9, 40, 16, 16}, type);
      p.rules = {paper_case().plain};
      const Result expected = run(p, type);
      for (std::size_t shift = 0; shift < 17; ++shift) {
        Layouts shifted;
        shifted.q.offset = shift;
        shifted.k.offset = shift * 3 % 17;
        shifted.v.offset = shift * 5 % 17;
        shifted.out.offset = shift * 7 % 17;
        SCOPED_TRACE(name_of(type) + ", shift " + std::to_string(shift));
        EXPECT_TRUE(same(run(p, type, 0, shifted), expected));
      }
    }
  });
}

// ---- The other output in a view ----

TEST(AttentionAnyLayout, WeightsGoAnywhere) {
  const Layout weight_layouts[] = {{.offset = 1},
                                   {.padding = 3, .offset = 1},
                                   {.order = {1, 0}, .offset = 3},
                                   {.spacing = 2, .padding = 1, .backwards = {1}},
                                   {.order = {1, 0}, .backwards = {0, 1}}};
  const RowIndex rows[] = {{1, 3, 12}, {0, 0, 0}, {1, 2, 5}};
  for_each_target([&] {
    for (const DType type : kTypes) {
      Random random(8);
      oracle::Attention p = draw_problem(random, {2, 4, 2, 13, 270, 4, 3}, type);
      p.causal = true;
      p.align = Align::end;
      AttentionCall call(p, type, type);
      call.outputs.weight_rows = rows;
      Placed contiguous(type, {3, 270});
      call.outputs.weights = contiguous.view();
      call.forward();
      for (const Layout& layout : weight_layouts) {
        Placed weights(type, {3, 270}, layout);
        call.outputs.weights = weights.view();
        call.forward();
        EXPECT_TRUE(same_bits(weights.values(), contiguous.values()));
        EXPECT_TRUE(weights.gaps_are_intact());
      }
    }
  });
}

}  // namespace
}  // namespace whet
