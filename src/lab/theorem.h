// The paper's theorem as a program: in a transformer over a finite vocabulary every head disperses.
//
// The model: embeddings without positions, then layers of
//     x += O heads(Q x, K x, V x)        every token attends to every token, logits times beta / sqrt(D)
//     x += Down gelu(Up x)
// with biases, random weights and no normalization layers.
//
// Why every head disperses, in three steps that are three functions here:
//  1. There are finitely many symbols, so what enters has a largest norm; every layer is a continuous map, so
//  what
//     enters any layer has one too, however long the sequence. With it Q and K bound the spread of every row
//     (implied_spreads; the bound holds for every input, and is astronomically loose after a few layers).
//  2. A row of spread d over n keys gives no key more than 1 / (1 + (n - 1) e^-d)  (whet::largest_weight).
//  3. So the largest weight of every head falls as 1 / n in the end (measure_heads shows when).
//
// Step 3 needs no long sequence. Without positions, equal symbols have equal rows at every layer: n tokens
// are at most as many distinct rows as there are symbols. A row that stands for c tokens counts c times in
// the softmax, which is a logit raised by ln c. Sequences of 2^30 tokens cost what those of one token per
// symbol cost.
#ifndef WHET_LAB_THEOREM_H_
#define WHET_LAB_THEOREM_H_

#include <cstdint>
#include <span>
#include <vector>

namespace whet::lab {

struct TheoremConfig {
  std::int64_t vocabulary = 16;  // 2 to 1024
  std::int64_t layers = 3;       // 1 to 8
  std::int64_t heads = 4;        // a divisor of kTheoremWidth
  std::uint64_t seed = 0;
  double beta = 1;  // inverse temperature of every head
};

inline constexpr std::int64_t kTheoremWidth = 64;
inline constexpr std::int64_t kTheoremHidden = 4 * kTheoremWidth;

// y = x kernel + bias, kernel (in, out).
struct Affine {
  std::int64_t in;
  std::int64_t out;
  std::vector<double> kernel;
  std::vector<double> bias;
};

struct TheoremLayer {
  Affine query, key, value, output;  // head h owns columns h D to (h + 1) D of the first three
  Affine up, down;
};

struct TheoremModel {
  TheoremConfig config;
  std::vector<double> embeddings;  // (vocabulary, width), standard normal
  std::vector<TheoremLayer> layers;
};

// Kernels and biases from a normal distribution of variance 1 / in. Error if the config is out of range.
TheoremModel draw_theorem_model(const TheoremConfig& config);

// `count` tokens of one symbol.
struct Tokens {
  std::int64_t symbol;
  std::int64_t count;
};

// A sequence of n tokens (2 to 2^53): one of symbol 0, all others in turn.
std::vector<Tokens> needle_sequence(std::int64_t vocabulary, std::int64_t n);

// What a head does with a sequence: the extremes over its rows.
struct HeadSharpness {
  double largest_weight;  // of a single token
  double spread;          // times beta
};

// Every head, layer by layer. Entries of `sequence` may repeat a symbol; counts are 1 or more.
std::vector<HeadSharpness> measure_heads(const TheoremModel& model, std::span<const Tokens> sequence);

// The largest spread (times beta) that the weights allow each head, layer by layer, for any sequence at all.
std::vector<double> implied_spreads(const TheoremModel& model);

}  // namespace whet::lab

#endif  // WHET_LAB_THEOREM_H_
