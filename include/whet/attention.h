// Exact attention whose normalizer is the softmax with a rule, and its gradient.
//
// Shapes: B batch, H query heads, K key heads (H a multiple of K; query head h reads key head
// h / (H / K)), N queries, M keys, D and E the sizes of a key and of a value (1..kMaxHeadSize).
//     q (B, H, N, D)   k (B, K, M, D)   v (B, K, M, E)   out (B, H, N, E)
// A *row* is what one query of one head sees. Rows are numbered as (B, H, N) in row-major order.
//
// The logit of query i and key j, in this order:
//     s = scale query_scale_i <q_i, k_j>;   if softcap: s = softcap tanh(s / softcap);   x = s + bias_ij
// A key is visible to a row if none of mask, lengths, causal, window hides it and x isn't -inf (so a
// bias of -inf hides too). Only visible keys exist for the row: NaN in hidden keys and values has no effect.
// A row without visible keys gives output and gradients 0, stats 0 with max and log_sum_exp -inf and beta 1.
// NaN or +inf in a visible logit makes its row NaN and no other.
//
// A sink is one logit per head that takes mass and has no value: it enters max, log_sum_exp, entropy,
// varentropy and spread = max - min, beta scales it, but it isn't a key: not in count, min, peak,
// sharp_peak or the weights. Rules see that count and that entropy; target_peak counts the sink as one more
// key. A row without visible keys ignores it; -inf is no sink.
//
// Views have any strides; q, k, v, out (and gradients) share one element type: f32, f64, bf16 or f16.
// 16-bit types compute in f32. Outputs overlap nothing (Error).
//
// Accuracy, f32: that of a plain, unblocked f32 evaluation at the same betas. Over the rows of the tests, the
// largest error divided by the row's beta is at most twice the plain one's, plus 4 2^-24 max|v|. (Products of
// size D round by about D 2^-24 |q| |k|, which a large beta multiplies, in any evaluation: a row where the
// plain one happens to be exact says nothing.) 16-bit: the same for the arithmetic on the rounded inputs,
// then rounded. f64: skips at 2^-53 at most. Weights that aren't divided by their sum (sigmoid, relu,
// softpick) may sum to far more than 1, and errors grow with that sum: they are outside of this bound. A
// forward call gives the same bits for every number of threads and with or without any of the optional
// outputs.
#ifndef WHET_ATTENTION_H_
#define WHET_ATTENTION_H_

#include <whet/export.h>
#include <whet/normalizer.h>
#include <whet/row.h>
#include <whet/rule.h>
#include <whet/runtime.h>
#include <whet/softmax.h>
#include <whet/view.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace whet {

// The largest size of a key and of a value (D and E).
inline constexpr std::int64_t kMaxHeadSize = 1024;

// The position of query i among the keys of its sequence: key i (as torch and transformers count), or
// counted from the end, so that the last query is at the last key (as FlashAttention does; decoding with a
// cache).
enum class Align { start, end };

// A row by its indices.
struct RowIndex {
  std::int64_t batch;
  std::int64_t head;
  std::int64_t query;
};

// Tiles of a call: groups of rows by ranges of keys, of a size that the library chooses. Fit for ratios, not
// for comparison between versions.
struct TileCounts {
  std::int64_t tiles = 0;  // with at least one key that causal, window and lengths leave visible
  // Of those, tiles whose weights are certain not to matter. Backward: whose products were left out, or taken
  // over the few keys alone that count.
  std::int64_t skipped = 0;
};

// The problem: what is computed. The same for attention, attention_backward and the functions of shard.h.
struct AttentionOptions {
  Rule rule{};                         // chooses beta of each row; default none: beta = 1
  std::span<const Rule> head_rules{};  // if not empty: one per query head, instead of `rule`
  Normalizer normalizer{};             // turns a row of logits into weights; default softmax
  std::optional<double> scale{};       // default 1 / sqrt(D)
  ConstView query_scale{};             // (B, H, N), sizes equal or 1; multiplies scale
  double softcap = 0;                  // 0: none; else a normal number of the arithmetic (f32, f64)
  ConstView bias{};                    // (B, H, N, M), sizes equal or 1; added to the logits
  ConstView mask{};                    // the same in boolean, true = visible
  ConstView sinks{};                   // (H)
  bool causal = false;                 // keys after the query's position are hidden
  Align align = Align::start;          // how positions are counted, for causal and window
  std::int64_t window_left = -1;       // keys more than this before the position are hidden; -1: none
  std::int64_t window_right = -1;      // the same after the position
  std::span<const std::int64_t>
      lengths{};  // one per batch entry (also if B = B H N), or one per row: only the first keys exist
  std::span<const std::int64_t> query_starts{};  // packed sequences (B = 1): 0, ..., N, as cu_seqlens;
  std::span<const std::int64_t> key_starts{};    // 0, ..., M. Queries see keys of their own sequence.
  // attention skips a tile when its weights together are certain to be below skip_epsilon in every row, which
  // moves no output by more than 2 skip_epsilon max|v|; 0: never. Calls of few queries (up to 16 rows that
  // share their keys) skip nothing, and neither do attention_backward and shards.
  double skip_epsilon = 0x1p-24;
  // Training: a weight becomes 0 with this probability, 0..1, and is divided by 1 - dropout otherwise, after
  // it was normalised. Which ones depends on the seed, the row and the key alone: the same in
  // attention_backward. Optional outputs are those of the weights before.
  double dropout = 0;
  std::uint64_t dropout_seed = 0;
};

// Optional outputs of attention, each overwritten if given.
struct AttentionOutputs {
  std::span<RowStats> stats{};  // one per row
  View saved{};  // for attention_backward: saved_size(options) numbers per row, contiguous, in the type of
                 // the arithmetic
  std::span<const RowIndex> weight_rows{};  // rows whose weights are written to
  View weights{};                           // (number of weight_rows, M), in q's element type
  std::int64_t top_k = 0;  // this many heaviest keys per row, heaviest first (ties: lowest key first), into
  std::span<std::int64_t> top_keys{};  // rows * top_k; -1 where a row has fewer visible keys
  std::span<float> top_weights{};      // rows * top_k; 0 there
  std::span<double> column_sums{};     // (B, H, M): the weights of a key, summed over queries
  TileCounts* tile_counts = nullptr;
};

// out = softmax(beta x) v, row by row; overwrites `out` (B, H, N, E). q (B, H, N, D), k (B, K, M, D),
// v (B, K, M, E) and `out` share one element type and have any strides. query_scale, bias and sinks are in
// that type or in that of the arithmetic (f32; f64 for f64). Nothing written may overlap anything else.
// Align::end counts from the end of each packed sequence, or of each batch entry's length: query i is at
// i + (keys of the sequence) - (queries of the sequence). Without execution.workspace the call allocates its
// scratch memory, once.
// Error, naming the argument, for any that doesn't fit; nothing is written then.
WHET_API void attention(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options = {},
                        const AttentionOutputs& outputs = {}, const Execution& execution = {});

// As for softmax; the largest of all heads.
WHET_API std::int64_t saved_size(const AttentionOptions& options);

// Bytes that execution.workspace needs for this call: linear in N + M. Sizes and options decide; the data of
// views isn't read, and execution.workspace is ignored.
WHET_API std::size_t attention_workspace(ConstView q, ConstView k, ConstView v,
                                         const AttentionOptions& options = {},
                                         const AttentionOutputs& outputs = {},
                                         const Execution& execution = {});

// Outputs of attention_backward; those without data are not computed. Overwritten, never added to.
struct AttentionGradients {
  View dq{};  // as q
  View dk{};  // as k
  View dv{};  // as v
  // As the bias given: summed over the axes where its size is 1, by one thread if batch entries, heads or
  // packed sequences share it. 16 bits: summed in f32, in the workspace. Computing it may move dk and dv by
  // rounding.
  View dbias{};
  View dsinks{};  // as sinks
  // As the query_scale given: summed over the axes where its size is 1, in f64 and then rounded. Also right
  // where query_scale is 0.
  View dquery_scale{};
  // One per row: dL/dparameter, where the parameter is the A of entmax:A, as in softmax_backward. Error for
  // other normalizers.
  std::span<double> dparameter{};
};

struct AttentionBackwardOptions {
  BetaGradient beta_gradient = BetaGradient::through_rule;
  ConstView saved{};  // what attention wrote; empty: found again
  TileCounts* tile_counts = nullptr;
};

// The gradients from dout = dL/dout (as out) and what attention was given: q, k, v and options. Keys whose
// weight and gradient are exactly 0 (those outside the support of sparsemax, entmax, top-k, hard and relu,
// at a beta that doesn't follow the logits) are left out of the products, unless skip_epsilon is 0; no other
// is (but what attention saved lacks what it skipped). At a kink of the rule the derivative of the constant
// side is taken; an unreachable target counts as constant. Gradients have the same bits for every number of
// threads. Nothing written may overlap anything else.
// Error, naming the argument, for any that doesn't fit; nothing is written then.
WHET_API void attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                                 const AttentionGradients& gradients, const AttentionOptions& options = {},
                                 const AttentionBackwardOptions& backward = {},
                                 const Execution& execution = {});

// Bytes that execution.workspace needs for this call of attention_backward, as attention_workspace() for
// attention.
WHET_API std::size_t attention_backward_workspace(ConstView q, ConstView k, ConstView v,
                                                  const AttentionGradients& gradients,
                                                  const AttentionOptions& options = {},
                                                  const AttentionBackwardOptions& backward = {},
                                                  const Execution& execution = {});

}  // namespace whet

#endif  // WHET_ATTENTION_H_
