// Attention over keys that are kept apart: on several devices, in several files, on several ranks. Each
// holds a shard, a contiguous range of the keys; together they give attention over all keys, in two exchanges
// of a few numbers per row:
//
//     every shard    shard_states(q, k)                        one RowState per row
//     exchange 1     merge() the states of a row, in a fixed order; beta = rule.beta(state)
//     every shard    shard_attention(q, k, v, {max, beta})     unnormalised output and mass per row
//     exchange 2     merge_outputs()                           out = sum of outputs / sum of masses
//
// A rule that needs_search() takes one exchange more at the start and one per step: shard_sums() at
// {max, search.beta()} in every shard, add() the sums of a row, give them to its BetaSearch.
//
// Options are those of attention for the whole problem, with k, v, bias and mask cut to the shard; lengths,
// causal and window count keys of the whole. rule and head_rules aren't used: the caller applies them to the
// merged states. Nor is execution.workspace.
#ifndef WHET_SHARD_H_
#define WHET_SHARD_H_

#include <whet/attention.h>
#include <whet/export.h>
#include <whet/row.h>
#include <whet/rule.h>
#include <whet/runtime.h>
#include <whet/view.h>

#include <cstdint>
#include <memory>
#include <span>

namespace whet {

// The keys of a shard: [first_key, first_key + M) of all_keys. Packed sequences can't be cut (Error).
// Sinks belong to the shard that holds key 0.
struct Shard {
  std::int64_t first_key = 0;
  std::int64_t all_keys = 0;
};

// What every shard needs of a row to compute weights: the merged maximum and the chosen beta.
struct RowScale {
  double max;
  double beta;
};

// The sums of two shards, measured from the same max and at the same beta.
WHET_API RowSums add(const RowSums& a, const RowSums& b);

// The states of all rows over the keys of this shard: `out` holds one per row, rows as in attention.h. Merged
// over shards they are the states of the whole rows. A sink counts in max, z, t, u only.
WHET_API void shard_states(ConstView q, ConstView k, const Shard& shard, std::span<RowState> out,
                           const AttentionOptions& options = {}, const Execution& execution = {});

// The sums of all rows over the keys of this shard, measured from rows[i].max at rows[i].beta: `rows` and
// `out` hold one per row.
WHET_API void shard_sums(ConstView q, ConstView k, const Shard& shard, std::span<const RowScale> rows,
                         std::span<RowSums> out, const AttentionOptions& options = {},
                         const Execution& execution = {});

// out = sum of e v, unnormalised, in the type of the arithmetic (f32; f64 for f64), and mass = sum of e, with
// e = exp(rows[i].beta (x - rows[i].max)); `rows` and `mass` hold one per row. A row whose beta is NaN gives
// NaN. One whose merged max is -inf or NaN gives 0 otherwise: no shard has a visible key for it.
WHET_API void shard_attention(ConstView q, ConstView k, ConstView v, const Shard& shard,
                              std::span<const RowScale> rows, View out, std::span<double> mass,
                              const AttentionOptions& options = {}, const Execution& execution = {});

// The output of attention from those of the shards: outs[s] and masses[s] are what shard_attention wrote for
// shard s. `out` (B, H, N, E) has any element type. A row without mass is 0.
WHET_API void merge_outputs(std::span<const ConstView> outs, std::span<const std::span<const double>> masses,
                            View out);

// The search of target_entropy and target_peak for one row whose keys are cut into shards. Its first
// beta() is 1 and needs all five sums there; later ones don't need w. Ends within 1e-6 of the target
// or where a beta can't come closer (ties at the maximum: a large one, up to 2^60). A row of NaN: NaN.
class WHET_API BetaSearch {
 public:
  BetaSearch(const Rule& rule, const RowState& merged);  // Error unless rule.needs_search()
  BetaSearch(BetaSearch&& other) noexcept;
  BetaSearch& operator=(BetaSearch&& other) noexcept;
  ~BetaSearch();

  bool done() const;
  double beta() const;               // at which absorb() takes the next sums; once done, the result
  void absorb(const RowSums& sums);  // the sums of all shards at beta()

 private:
  struct Search;
  std::unique_ptr<Search> search_;
};

}  // namespace whet

#endif  // WHET_SHARD_H_
