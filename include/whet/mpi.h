// Attention over keys that the ranks of an MPI communicator hold, each a contiguous range of them in the
// order of the ranks: any number, 0 too. A target of its own, whet::mpi (library whetmpi), on the functions
// of shard.h; libwhet doesn't link MPI, and whet.h doesn't include this header.
//
//     whet::mpi::attention(q, k_shard, v_shard, out, {.rule = Rule::paper(), .causal = true});
//
// Every rank of the communicator calls the same function with arguments that fit together: element types, all
// sizes but those given below as of one rank, options, and which optional outputs are wanted. What they hold
// is that rank's own. If they don't fit, or an argument of one rank is wrong, all ranks get the same Error,
// which names the argument and the rank; nothing is written then. That costs one exchange of 24 bytes, the
// first of a call.
//
// Normalizers are softmax, hard, sparsemax, entmax15 and entmax (Error for others), rules all. The results of
// a call have the same bits on every rank that has them, for a given number of ranks and of keys on each;
// another number adds in another order. Accuracy is that of attention and attention_backward.
//
// Calls are collective, as those of MPI are: with several threads per rank, those that use one communicator
// come one after the other, in the same order everywhere. MPI must have been initialised, by the caller. What
// MPI reports is thrown as std::runtime_error; after that, or where a rank alone throws std::bad_alloc, the
// communicator can't be used any more, and the program should end by MPI_Abort.
#ifndef WHET_MPI_H_
#define WHET_MPI_H_

#include <mpi.h>
#include <whet/attention.h>
#include <whet/export.h>
#include <whet/row.h>
#include <whet/runtime.h>
#include <whet/shard.h>
#include <whet/view.h>

#include <cstddef>
#include <vector>

namespace whet::mpi {

struct Ranks {
  MPI_Comm comm = MPI_COMM_WORLD;  // the first call copies it; the copy lives as long as it does
  // Bytes per rank in which the logits of a rule that searches its beta, or of few queries, may stay from one
  // exchange to the next: those of all queries if they fit; else, where keys stay in place, those of some
  // queries at a time. What isn't kept is computed again.
  std::size_t keep_logits = std::size_t{256} << 20;
};

// What forward leaves of its rows, one of each per row: for backward, and to look at.
struct Rows {
  std::vector<RowState> states;     // over all keys
  std::vector<WeighedRow> weighed;  // maximum, beta and threshold
  std::vector<double> masses;       // of the weights, measured from that maximum at that beta
  std::vector<std::byte> out;       // (B, H, N, E), contiguous, in the type of the arithmetic
};

// out = attention of q over the keys of all ranks, the same on every rank. q (B, H, N, D) and `out` are whole
// and the same on every rank; k (B, K, M, D) and v (B, K, M, E) are those of this rank, M is its own. Bias
// and mask are for the keys of this rank; lengths, causal and window count keys of all. `rows`, if given, is
// overwritten. execution.workspace isn't used.
//
// Exchanged, per row: with rules none and fixed one partial output and 3 numbers, nothing before; with others
// first a state (6 numbers), and 5 numbers for each step of a rule that searches. Sparsemax and entmax: a
// state with all rules, and 3 numbers for each step of the search for the threshold. Each rank sends and
// receives every row about twice, whatever the number of ranks (few rows: once, to all).
WHET_API void attention(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options = {},
                        const Ranks& ranks = {}, Rows* rows = nullptr, const Execution& execution = {});

// The gradients from dout = dL/dout (as out), the same on every rank. dq, dsinks and dquery_scale are whole
// and the same on every rank; dk, dv and dbias are those of this rank's arrays. `rows` is what forward left;
// null: found again. Exchanged, per row: D numbers for dq, and 5 where beta follows the logits (sparsemax and
// entmax: 9 always).
WHET_API void attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                                 const AttentionGradients& gradients, const AttentionOptions& options = {},
                                 BetaGradient beta_gradient = BetaGradient::through_rule,
                                 const Ranks& ranks = {}, const Rows* rows = nullptr,
                                 const Execution& execution = {});

// The same with queries cut as well: q (B, H, N, D), `out`, query_scale, and `rows` are those of this rank,
// whose queries follow those of the ranks before it; N is its own, and may be 0. Keys and values go round,
// from each rank to the next, while those that are there are worked on. Bias and mask are for the queries of
// this rank and the keys of all; lengths are one per batch entry. No rank needs memory for more than its own
// queries and the keys of two ranks.
//
// Keys go round once with rules none and fixed; with others once more, without values; with a rule that
// searches, and with sparsemax and entmax, once more for each step, unless the logits of all queries are
// kept.
WHET_API void ring_attention(ConstView q, ConstView k, ConstView v, View out,
                             const AttentionOptions& options = {}, const Ranks& ranks = {},
                             Rows* rows = nullptr, const Execution& execution = {});

// dk and dv, those of this rank's keys, go round with them and gather what every rank adds. dsinks is that of
// all ranks; so is dquery_scale where query_scale is the same for all queries. dbias is that of this rank's
// bias. 16-bit keys and values go round as f32.
WHET_API void ring_attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                                      const AttentionGradients& gradients,
                                      const AttentionOptions& options = {},
                                      BetaGradient beta_gradient = BetaGradient::through_rule,
                                      const Ranks& ranks = {}, const Rows* rows = nullptr,
                                      const Execution& execution = {});

}  // namespace whet::mpi

#endif  // WHET_MPI_H_
