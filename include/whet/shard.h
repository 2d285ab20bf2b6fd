// Attention over keys that are kept apart: on several devices, in several files, on several ranks. Each
// holds a shard, a contiguous range of the keys; together they give attention over all keys, in two exchanges
// of a few numbers per row:
//
//     every shard    shard_states(q, k)                        one RowState per row
//     exchange 1     merge() the states of a row, in a fixed order; beta = rule.beta(state)
//     every shard    shard_attention(q, k, v, {max, beta})     unnormalised output and mass per row
//     exchange 2     merge_outputs()                           out = sum of outputs / sum of masses
//
// Where no state decides beta, shard_partial_attention() is both steps at once, and exchange 2 the only one.
// A rule that needs_search() takes one exchange more at the start and one per step: shard_sums() at
// {max, search.beta()} in every shard, add() the sums of a row, give them to its BetaSearch.
//
// Normalizers are softmax and hard, and those that needs_threshold(): sparsemax, entmax15, entmax:A. Their
// rows have one more number, tau, which a ThresholdSearch finds from the merged state and beta in a few more
// exchanges: shard_threshold_sums() at {max, beta, search.tau()} in every shard, add() the sums of a row,
// give them to its search. The others (top-k, straight-through, sigmoid, relu, softpick) are an Error.
//
// The gradient, where beta_moves(rule, beta), needs an exchange before the one of its result:
//
//     every shard    shard_gradient_sums(q, k, v, dout, row)   GradientSums per row
//     exchange 3     add() them; otherwise only wg counts, and that is mass <dout, out> (but with a
//                    threshold: then they are always needed)
//     every shard    shard_backward(q, k, v, dout, slope)      dk, dv and dbias of its keys; a part of dq
//     exchange 4     add the dq
//
// Everything that is exchanged is a sum but min and max of a RowState, so that an all-reduce does it; in
// which order it adds then decides the last bits.
//
// Options are those of attention for the whole problem, with k, v, bias and mask cut to the shard; lengths,
// causal and window count keys of the whole. rule and head_rules aren't used: the caller applies them to the
// merged states. Nor is execution.workspace. A call with few queries reads keys and values where they lie, as
// attention does.
#ifndef WHET_SHARD_H_
#define WHET_SHARD_H_

#include <whet/attention.h>
#include <whet/export.h>
#include <whet/row.h>
#include <whet/rule.h>
#include <whet/runtime.h>
#include <whet/view.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <span>

namespace whet {

// Keys and values as kernels read them, for several calls on the same shard: the first that has many queries
// packs them, later ones needn't. They must be the same arrays in all calls (Error), with the same contents
// and lengths, on one SIMD target, and calls that share it come one after the other. Takes as much memory as
// k and v in the type of the arithmetic.
class WHET_API PackedShard {
 public:
  PackedShard();
  PackedShard(PackedShard&& other) noexcept;
  PackedShard& operator=(PackedShard&& other) noexcept;
  ~PackedShard();

  class Memory;
  Memory& memory() const { return *memory_; }  // the kernels'

 private:
  std::unique_ptr<Memory> memory_;
};

// The keys of a shard: [first_key, first_key + M) of all_keys. Packed sequences can't be cut (Error).
// Sinks belong to the shard that holds key 0. The queries of a call may be a part, too: [first_query,
// first_query + N) of all_queries, for whom causal, window, align and dropout are as in a call with all.
struct Shard {
  std::int64_t first_key = 0;
  std::int64_t all_keys = 0;
  std::int64_t first_query = 0;
  std::int64_t all_queries = 0;  // 0: those of q
  // (B, H, N, M) in the type of the arithmetic (f32; f64 for f64), any strides: shard_states leaves the
  // logits there, and shard_sums and shard_attention read them instead of computing q k again. Empty: they
  // do.
  View logits{};
  PackedShard* packed = nullptr;  // read and written by the forward functions
};

// What every shard needs of a row to compute weights: the merged maximum, the chosen beta and, with a
// normalizer that needs_threshold(), its threshold.
struct RowScale {
  double max;
  double beta;
  double tau = 0;
};

// Whether rows of the normalizer have a threshold that all keys decide: sparsemax, entmax15 and entmax:A,
// with weights v^p, v = ((A - 1) beta (x - max) - tau)_+, p = 1 / (A - 1), and tau such that they sum to 1.
WHET_API bool needs_threshold(const Normalizer& normalizer);

// Sums of a row at some tau, over the keys (and the sink) with v > 0: of v^p, v^(p-1) and, where p >= 2,
// v^(p-2).
struct ThresholdSums {
  double high = 0;
  double low = 0;
  double lowest = 0;
};
WHET_API ThresholdSums add(const ThresholdSums& a, const ThresholdSums& b);

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

// The same at rows[i].tau for a ThresholdSearch. Error unless needs_threshold(options.normalizer).
WHET_API void shard_threshold_sums(ConstView q, ConstView k, const Shard& shard,
                                   std::span<const RowScale> rows, std::span<ThresholdSums> out,
                                   const AttentionOptions& options = {}, const Execution& execution = {});

// out = sum of e v, unnormalised, in the type of the arithmetic, and mass = sum of e, with
// e = exp(rows[i].beta (x - rows[i].max)), or the weight at rows[i].tau if needs_threshold(); `rows` and
// `mass` hold one per row. A row whose beta is NaN gives NaN. One whose merged max is -inf or NaN gives 0
// otherwise: no shard has a visible key for it.
WHET_API void shard_attention(ConstView q, ConstView k, ConstView v, const Shard& shard,
                              std::span<const RowScale> rows, View out, std::span<double> mass,
                              const AttentionOptions& options = {}, const Execution& execution = {});

// shard_states and shard_attention in one pass, for rules whose beta no state decides (none, fixed): betas[i]
// is that of row i. `out` and `mass` are measured from the maximum of this shard, states[i].max; all three
// are overwritten and hold one per row. With m the largest max of a row,
//     c_s = exp(beta (max_s - m))        (hard: 1 where max_s = m, else 0; no keys: 0)
//     out = sum of c_s out_s / sum of c_s mass_s
// Shard::logits isn't used. Error if needs_threshold(options.normalizer): that comes after all maxima.
WHET_API void shard_partial_attention(ConstView q, ConstView k, ConstView v, const Shard& shard,
                                      std::span<const double> betas, View out, std::span<RowState> states,
                                      std::span<double> mass, const AttentionOptions& options = {},
                                      const Execution& execution = {});

// Error, naming the argument, where attention of all shards can't be had with these: for a transport, which
// has to know before it communicates. `out` and the gradients are those of the caller, in the types of
// attention and attention_backward.
WHET_API void check_shard(ConstView q, ConstView k, ConstView v, ConstView out, const Shard& shard,
                          const AttentionOptions& options = {});
WHET_API void check_shard_backward(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                                   const AttentionGradients& gradients, const AttentionOptions& options = {});

// The output of attention from those of the shards: outs[s] and masses[s] are what shard_attention wrote for
// shard s, or one of each, added up elsewhere. `out` (B, H, N, E) has any element type. A row without mass is
// 0.
WHET_API void merge_outputs(std::span<const ConstView> outs, std::span<const std::span<const double>> masses,
                            View out);

// ---- The gradient ----

// A row as forward left it: its merged maximum, its beta, and where y = x - max is measured from, the same in
// all shards. Any `mean` gives the same gradient but for rounding, which is least near the mean of y under
// the weights: t / z of the last sums of a search, t / z of the merged state with other rules.
struct WeighedRow {
  double max;
  double beta;
  double mean;
  double tau = 0;
};

// Sums of a row over keys: with w = exp(beta y), g = <dout, v> (after dropout; 0 for a sink) and d = y -
// mean, those of w g, w d g, w d and w d^2; and how many keys, the sink too, are at the maximum. With a
// threshold w is v^(p-1), the slope of a weight, wdd isn't used, and the last four count: the sum of w, and,
// with e = exp(beta y), those of e, e y and e y^2.
struct GradientSums {
  double wg = 0;
  double wdg = 0;
  double wd = 0;
  double wdd = 0;
  double ties = 0;
  double w = 0;
  double e = 0;
  double ey = 0;
  double eyy = 0;
};
WHET_API GradientSums add(const GradientSums& a, const GradientSums& b);

// Whether the gradient of a row with this beta needs all of its GradientSums, not wg alone: with a rule whose
// beta follows the logits, through_rule. (With a normalizer that needs_threshold() it always does.)
WHET_API bool beta_moves(const Rule& rule, double beta,
                         BetaGradient beta_gradient = BetaGradient::through_rule);

// What a shard needs of a row for its gradient. With y = x - max and w = scale exp(beta y),
//     dL/dx = w (constant + g_factor g + y_factor (y - mean)) + p_factor exp(y) (y - plain_mean)
//             - peak_share where x = max
// With a threshold (tau < 0) the first term is beta v^(p-1) (g - coupling) + w (constant + y_factor (y -
// mean)), w = soft_scale exp(beta y), and weights are scale v^p.
// A scale of 0 is a row without keys, one of NaN a row of NaN.
struct RowSlope {
  double max = 0;
  double beta = 1;
  double scale = 0;
  double mean = 0;
  double constant = 0;
  double g_factor = 0;
  double y_factor = 0;
  double p_factor = 0;
  double plain_mean = 0;
  double peak_share = 0;
  double tau = 0;
  double coupling = 0;
  double soft_scale = 0;
};

// The slope of a row: its merged state, its masses and its gradient sums, added up; of these wg alone counts
// unless beta_moves() or row.tau < 0.
WHET_API RowSlope row_slope(const Rule& rule, const RowState& merged, const WeighedRow& row, double mass,
                            const GradientSums& sums,
                            BetaGradient beta_gradient = BetaGradient::through_rule);

// The gradient sums of all rows over the keys of this shard; `rows` and `out` hold one per row. With the
// normalizer hard they are 0: its weights have no gradient.
WHET_API void shard_gradient_sums(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                                  std::span<const WeighedRow> rows, std::span<GradientSums> out,
                                  const AttentionOptions& options = {}, const Execution& execution = {});

// dk, dv and dbias of this shard's keys, whole; dsinks in the shard of key 0, 0 elsewhere; and this shard's
// part of dq and dquery_scale, which are to be added. Gradients as in attention_backward, but dq, dsinks and
// dquery_scale are in the type of the arithmetic, and there is no dparameter.
WHET_API void shard_backward(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                             std::span<const RowSlope> rows, const AttentionGradients& gradients,
                             const AttentionOptions& options = {}, const Execution& execution = {});

// A BetaSearch between two steps, as numbers: for callers that can't keep an object from one exchange to the
// next, such as programs of XLA.
struct BetaSearchState {
  double beta = 1;
  double low = 1;  // the target lies between these
  double high = std::numeric_limits<double>::infinity();
  std::int64_t sweeps = 0;
  std::int64_t stage = 0;  // 0 before the sums at beta = 1, 1 after them, 2 done
};

// The search of target_entropy and target_peak for one row whose keys are cut into shards. Its first
// beta() is 1 and needs all five sums there; later ones don't need w. Ends within 1e-6 of the target
// or where a beta can't come closer (ties at the maximum: a large one, up to 2^60). A row of NaN: NaN.
class WHET_API BetaSearch {
 public:
  BetaSearch(const Rule& rule, const RowState& merged);        // Error unless rule.needs_search()
  BetaSearch(const Rule& rule, const BetaSearchState& state);  // goes on from there, with the same bits
  BetaSearch(BetaSearch&& other) noexcept;
  BetaSearch& operator=(BetaSearch&& other) noexcept;
  ~BetaSearch();

  bool done() const;
  double beta() const;               // at which absorb() takes the next sums; once done, the result
  void absorb(const RowSums& sums);  // the sums of all shards at beta()
  BetaSearchState state() const;

 private:
  struct Search;
  std::unique_ptr<Search> search_;
};

// The search of tau for one row whose keys are cut into shards, at the beta that was chosen: to the rounding
// of `arithmetic` (f32 or f64, that of the shards). It takes up to six steps mostly, up to 12 where
// thousands of keys have weight, and up to 40 above A = 2. A row without keys: -1, which weighs nothing. A
// row of NaN, and beta of NaN: NaN.
class WHET_API ThresholdSearch {
 public:
  // Error unless needs_threshold(normalizer).
  ThresholdSearch(const Normalizer& normalizer, const RowState& merged, double beta, DType arithmetic);

  bool done() const { return done_; }
  double tau() const { return tau_; }      // at which absorb() takes the next sums; once done, the result
  void absorb(const ThresholdSums& sums);  // the sums of all shards at tau()

 private:
  bool shrinks_slowly();

  double power_ = 1;  // p
  double tau_ = -1;
  double low_ = -1;  // the result lies between these
  double high_ = 0;
  double low_log_ = -1;  // of the sum v^p there; signs say whether it's known
  double high_log_ = 0;
  double width_ = 1;  // between them, two steps ago
  int steps_ = 0;
  bool wide_ = false;
  bool done_ = false;
};

}  // namespace whet

#endif  // WHET_SHARD_H_
