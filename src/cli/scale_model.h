// What attention over several ranks sends and takes, on paper: the cost model of `whet scale`.
#ifndef WHET_CLI_SCALE_MODEL_H_
#define WHET_CLI_SCALE_MODEL_H_

namespace whet::cli {

// One layer, and the machine. Everything as double: 10^7 tokens squared are too many for an integer.
struct ScaleProblem {
  double tokens = 1e6;  // keys
  double queries = 0;   // 0: as many as tokens
  double ranks = 64;
  double bandwidth = 100e9;  // bytes per second that a rank sends, while it receives as many
  double latency = 5e-6;     // seconds per message
  double heads = 32;
  double key_heads = 8;
  double head_size = 128;
  double element_bytes = 2;  // of q, k, v; partial outputs are f32
  double flops = 1e12;       // per second and rank, in products
  double memory = 100e9;     // bytes per second at which a rank reads keys: decoding
  int steps = 8;             // of a rule that searches
};

enum class Scheme {
  in_place,  // mpi::attention: queries everywhere, rows merged between ranks
  ring       // mpi::ring_attention: queries cut too, keys passed round
};
enum class RuleKind { known, state, search };  // beta without a state (none, fixed); of a state; by a search

// Of one layer.
struct Cost {
  double bytes = 0;          // that a rank sends
  double messages = 0;       // that it sends one after the other
  double communication = 0;  // seconds, were nothing computed meanwhile
  double compute = 0;        // seconds
  double time = 0;           // seconds: the sum in place, the longer of both, step by step, round the ring
};

// The bytes of the records that a row is exchanged as: those of src/mpi/, for f32 arithmetic.
struct RowBytes {
  double state = 48;
  double sums = 40;
  double output(double head_size, RuleKind rule) const {
    return (rule == RuleKind::known ? 56 : 8) + 4 * head_size;
  }
};

Cost forward_cost(const ScaleProblem& problem, Scheme scheme, RuleKind rule);
// The gradient, forward's rows given.
Cost backward_cost(const ScaleProblem& problem, Scheme scheme, RuleKind rule);
// One more token of every head: keys in place.
Cost decode_cost(const ScaleProblem& problem, RuleKind rule);
// The largest relative error that merging the states of so many shards adds to z, in units of 1: each merge
// rounds an exponential, a product and a sum, in float64.
double merge_error_bound(double shards);

}  // namespace whet::cli

#endif  // WHET_CLI_SCALE_MODEL_H_
