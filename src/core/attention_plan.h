// How a call of attention is cut up: a pure function of its shape, the caches and the number of threads.
//
// The words for the pieces, from the largest to the smallest:
//
//     wave    units that are worked on at the same time
//     unit    what shares keys: one sequence and one key head. Its rows are the queries of all heads of the
//     group,
//             query by query: row r is query r / G of head r % G of the group
//     block   rows of a unit that one task computes against all keys of the unit
//     part    blocks of a unit that add to the same dk and dv (backward)
//     strip   kBlockStep rows of a block: as many as a product keeps in registers
//     tile    kTileKeys keys: what a row weighs, or skips, together
//     chunk   kChunkKeys keys: a task where queries are few
//     panel   some columns of a packed matrix, one or two vectors wide, all rows one after the other
//
// Many queries: K of a unit is packed once, and V where that doesn't cost too much memory; a task is a block
// of rows, whose logits over all keys are kept, so that beta is known before the first weight. Few queries:
// nothing is packed, a task is a chunk of keys, and the logits of all rows of a unit are kept. Either way
// units go in waves, so that what is kept for all of a wave stays small.
//
// Neither block_rows nor wave changes a bit of a forward result. Backward sums over blocks of rows, so
// there block_rows and parts are chosen without looking at threads.
#ifndef WHET_CORE_ATTENTION_PLAN_H_
#define WHET_CORE_ATTENTION_PLAN_H_

#include <cstddef>
#include <cstdint>

namespace whet::core {

inline constexpr std::int64_t kTileKeys = 256;  // keys whose weights are skipped together
inline constexpr std::int64_t kBlockStep = 6;   // rows of a strip: blocks are whole strips
inline constexpr std::int64_t kMaxBlockRows = 48;
inline constexpr std::int64_t kFewRows = 16;  // up to here nothing is packed
// Products go key by key where at most one key in so many counts: forward, where one product is saved, and
// backward, where four are.
inline constexpr std::int64_t kForwardListShare = 8;
inline constexpr std::int64_t kBackwardListShare = 6;
inline constexpr std::int64_t kChunkKeys = 1024;  // keys of a task when rows are few

// What the plan depends on. Elements are those of the arithmetic.
struct PlanInput {
  std::int64_t units = 0;
  std::int64_t rows = 0;        // of the largest unit
  std::int64_t keys = 0;        // of the largest unit
  std::int64_t key_size = 0;    // D
  std::int64_t value_size = 0;  // E
  std::int64_t element_bytes = 4;
  std::int64_t cache_bytes = 0;  // second-level cache of a core
  int threads = 1;
};

struct AttentionPlan {
  bool few = false;
  std::int64_t block_rows = 0;  // of one task; all rows of a unit if few
  std::int64_t blocks = 0;      // tasks of a unit: blocks of rows, or chunks of keys if few
  std::int64_t wave = 0;        // units at a time
  bool packs_values = false;
};

AttentionPlan forward_plan(const PlanInput& input);

struct BackwardPlan {
  std::int64_t block_rows = 0;
  std::int64_t parts = 1;  // a unit's rows are cut into so many tasks, each with its own dk and dv
};

BackwardPlan backward_plan(const PlanInput& input);

// How many threads a call of this shape is worth: waking one takes as long as some 2^19 multiply-adds.
int useful_threads(const PlanInput& input);

// The second-level cache of this machine's cores, or a guess.
std::int64_t cache_bytes();

}  // namespace whet::core

#endif  // WHET_CORE_ATTENTION_PLAN_H_
