#include "cli/scale_model.h"

#include <gtest/gtest.h>

namespace whet::cli {
namespace {

constexpr ScaleProblem kProblem{.tokens = 65536, .ranks = 16, .heads = 8, .key_heads = 2, .head_size = 64};

TEST(ScaleModel, SendsNothingOnOneRank) {
  ScaleProblem one = kProblem;
  one.ranks = 1;
  for (const RuleKind rule : {RuleKind::known, RuleKind::state, RuleKind::search}) {
    for (const Scheme scheme : {Scheme::in_place, Scheme::ring}) {
      for (const Cost& cost : {forward_cost(one, scheme, rule), backward_cost(one, scheme, rule)}) {
        EXPECT_EQ(cost.bytes, 0);
        EXPECT_EQ(cost.messages, 0);
        EXPECT_DOUBLE_EQ(cost.time, cost.compute);
      }
    }
  }
}

// By hand: 8 heads of 65,536 rows, of which 15 of 16 leave a rank, twice, as 56 + 4 * 64 bytes.
TEST(ScaleModel, CountsTheRecordsOfRows) {
  const double rows = 8 * 65536.0, leaving = 2 * rows * 15 / 16;
  EXPECT_DOUBLE_EQ(forward_cost(kProblem, Scheme::in_place, RuleKind::known).bytes, leaving * 312 + 24 * 15);
  EXPECT_DOUBLE_EQ(forward_cost(kProblem, Scheme::in_place, RuleKind::state).bytes,
                   leaving * (48 + 264) + 24 * 15);
  // Keys and values of 2 heads, 2 bytes each, past 15 ranks.
  EXPECT_DOUBLE_EQ(forward_cost(kProblem, Scheme::ring, RuleKind::known).bytes,
                   65536.0 / 16 * 15 * 2 * 2 * 64 * 2 + 24 * 15);
}

TEST(ScaleModel, RulesCostWhatTheyExchange) {
  for (const Scheme scheme : {Scheme::in_place, Scheme::ring}) {
    const Cost known = forward_cost(kProblem, scheme, RuleKind::known),
               state = forward_cost(kProblem, scheme, RuleKind::state),
               search = forward_cost(kProblem, scheme, RuleKind::search);
    EXPECT_LT(known.time, state.time);
    EXPECT_LT(state.time, search.time);
    EXPECT_LE(known.bytes, state.bytes);
    EXPECT_LT(state.bytes, search.bytes);
  }
}

// Few queries are cheaper to merge than keys to send; many of grouped heads are not.
TEST(ScaleModel, EachSchemeWinsSomewhere) {
  ScaleProblem few = kProblem;
  few.queries = 64;
  EXPECT_LT(forward_cost(few, Scheme::in_place, RuleKind::known).bytes,
            forward_cost(few, Scheme::ring, RuleKind::known).bytes);
  EXPECT_GT(forward_cost(kProblem, Scheme::in_place, RuleKind::known).bytes,
            forward_cost(kProblem, Scheme::ring, RuleKind::known).bytes);
}

TEST(ScaleModel, DecodingGathersInAFewMessages) {
  ScaleProblem p = kProblem;
  p.ranks = 8;
  EXPECT_EQ(decode_cost(p, RuleKind::known).messages, 2 * 3);  // agreement, partial outputs
  EXPECT_EQ(decode_cost(p, RuleKind::state).messages, 3 * 3);
}

TEST(ScaleModel, BoundsTheRoundingOfMerges) { EXPECT_LT(merge_error_bound(1000), 5e-13); }

}  // namespace
}  // namespace whet::cli
