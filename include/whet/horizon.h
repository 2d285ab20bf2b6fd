// How far a head can stay sharp: what the spread of its logits allows, whatever the logits are, and what
// spread its weights allow, whatever the input is.
//
// The spread d of a row is its largest minus its smallest visible logit. A softmax over n keys of spread d
// can give no key more than 1 / (1 + (n - 1) e^-d): with more keys every weight must fall. A head's weights
// and the norms of what it reads bound d for every n, so every softmax over all keys disperses (arXiv
// 2410.01104).
//
// `beta` is the inverse temperature (the paper's 1 / theta), finite and above 0: it makes every spread beta
// times as large. A spread is 0 or more, and may be infinite. Arguments outside their range throw Error.
// Results are those of the formulas in float64, a few roundings off; infinity is a right answer of horizon().
#ifndef WHET_HORIZON_H_
#define WHET_HORIZON_H_

#include <whet/export.h>
#include <whet/view.h>

namespace whet {

// The number of keys beyond which a head of this spread can give no key more than this weight, 0 < weight <=
// 1:
//     1 + e^(beta spread) (1 / weight - 1)
WHET_API double horizon(double spread, double weight, double beta = 1);

// The largest weight that a softmax over this many keys (1 or more) of this spread can give any of them:
//     1 / (1 + (keys - 1) e^(-beta spread))
// the other way round of horizon(). Reached by one key at the top of the range and all others at its bottom.
// Infinitely many keys: 0, as they leave nothing to any of them, unless the spread is infinite too: 1.
WHET_API double largest_weight(double keys, double spread, double beta = 1);

// The paper's lemma: every weight of such a softmax lies between
//     e^(-beta spread) / keys   and   e^(beta spread) / keys,
// the upper one cut at 1, which no weight exceeds. It is never below largest_weight(). Infinitely many keys:
// as there.
struct WeightBounds {
  double lower;
  double upper;
};
WHET_API WeightBounds paper_bounds(double keys, double spread, double beta = 1);

// An upper bound of the largest singular value of a matrix (f32 or f64, two axes, any strides): never below
// it and, up to 1024 x 1024, above it by less than 1e-9 of it. With d the smaller size and r the larger, the
// cost is d^2 r and a dozen times d^3 (45 times at worst), and memory for d (r + 2 d) doubles. Without
// elements: 0.
WHET_API double largest_singular_value(ConstView matrix);

// What bounds the logits scale <Q y + b_q, K x_i + b_k> of one query y over all keys x_i; norms are
// Euclidean. b_k isn't among them: it moves all logits of a row alike.
struct HeadNorms {
  double query_gain;      // the largest singular value of Q
  double query_bias = 0;  // |b_q|
  double query_input;     // |y|
  double key_gain;        // the largest singular value of K
  double key_input;       // the largest |x_i|
  double scale = 1;       // usually 1 / sqrt(D)
};

// The paper's proposition: no row of such a head has a larger spread than
//     2 (query_gain query_input + query_bias) key_gain key_input scale,
// however many keys there are. All norms finite and 0 or more.
WHET_API double spread_bound(const HeadNorms& norms);

}  // namespace whet

#endif  // WHET_HORIZON_H_
