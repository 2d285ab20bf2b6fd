// A normalizer turns a row of logits into weights. It is chosen beside the rule, which chooses the inverse
// temperature of the row.
#ifndef WHET_NORMALIZER_H_
#define WHET_NORMALIZER_H_

#include <whet/export.h>

#include <string>
#include <string_view>

namespace whet {

// With s = beta x and n the visible keys of the row:
//
//   softmax           e^s / sum e^s
//   sparsemax         (s - tau)_+, tau such that the weights sum to 1
//   entmax15          (s/2 - tau)_+^2
//   entmax:A          ((A - 1) s - tau)_+^(1 / (A - 1)), 1 < A <= 4; 2 is sparsemax, towards 1 it is softmax
//   top-k:K           softmax over the K largest logits, and over those that tie with the K-th
//   hard              1 / (number of keys at the maximum) for those keys, 0 for others; gradient 0; no rule
//   straight-through  weights of hard, the gradient of softmax
//   sigmoid           1 / (1 + n e^-s)                            not divided by a sum
//   relu              max(0, s) / n                               not divided by a sum
//   softpick          max(0, e^s - 1) / sum |e^s - 1|             may sum to less than 1
//
// Gradients are those of the formula (straight-through excepted), not of the steps that found tau. The A of
// entmax:A has one too: `dparameter` of softmax_backward and attention_backward. The
// weights of all but softmax, hard and straight-through are within 4e-6 of the largest weight of the row
// (f64: 1e-12) plus 2e-6 (1 + |s|) of themselves; above A = 2 a weight rises with infinite slope at tau, and
// a rounding e of a logit may move it by e^(1 / (A - 1)). Shards of keys (shard.h) take softmax, sparsemax,
// entmax15, entmax:A and hard only.
class WHET_API Normalizer {
 public:
  Normalizer() = default;  // softmax

  // By its one-line name, the same in every interface: NAME, or NAME:PARAMETER for those that have one.
  // Error for anything else; its text lists the names.
  static Normalizer parse(std::string_view name);

  // The name again; parse(name()) is the same normalizer, bit for bit.
  std::string name() const;

  // What kernels read: the position in the library's table of normalizers, and the number after the colon, 0
  // where there is none.
  int index() const { return index_; }
  double parameter() const { return parameter_; }

  friend bool operator==(const Normalizer&, const Normalizer&) = default;

 private:
  int index_ = 0;
  double parameter_ = 0;
};

}  // namespace whet

#endif  // WHET_NORMALIZER_H_
