// The paper's head: encoders of items and query, one attention head, a read-out.
//
//     h1 = gelu(item1 x)      x: the priority, then the class one-hot
//     h2 = gelu(item2 h1)     one per item
//     e  = gelu(query2 gelu(query1 query))
//     logit_i = q . k_i / sqrt(128),  q = Q e,  k_i = K h2_i        weights = normalize(logits)
//     scores = output gelu(hidden O V sum_i weight_i h2_i)
//
// There is one query per set, so K and V act on sets instead of items: q . K h = (K^T q) . h, and V of the
// weighted sum is the weighted sum of V. The same function and gradients at a third of the products.
//
// Two variations (Architecture) keep the parameters and change what is done with them: a step after the GELU
// of both item layers, and two attention heads of 64 elements each instead of one of 128.
#ifndef WHET_LAB_MODEL_H_
#define WHET_LAB_MODEL_H_

#include <whet/normalizer.h>
#include <whet/row.h>
#include <whet/rule.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/dense/dense.h"
#include "lab/task.h"

namespace whet::lab {

inline constexpr std::int64_t kWidth = 128;
// Distance of rows of activations: see kernels/dense/dense.h.
inline constexpr std::int64_t kStride = kWidth + 16;

// A dense layer y = x kernel + bias: kernel (in, out) and bias (out) in the vector of all parameters.
struct Layer {
  const char* name;  // its tensors are name.kernel and name.bias
  std::int64_t in;
  std::int64_t out;
  std::int64_t kernel;  // offsets
  std::int64_t bias;
};

enum LayerId { kItem1, kItem2, kQuery1, kQuery2, kQ, kK, kV, kO, kHidden, kOutput, kLayers };

// Every layer in order, kernel before bias, without gaps.
extern const std::array<Layer, kLayers> kModel;
inline constexpr std::int64_t kParameters = 118666;

// Kernels from a normal distribution of variance 1 / in, cut at two standard deviations; biases 0.
std::vector<float> initial_parameters(std::uint64_t seed);

// How rows of logits become weights: the rule's beta scales them, the normalizer does the rest.
struct Weighting {
  Rule rule{};
  Normalizer normalizer{};

  // The rule if the normalizer is softmax, the normalizer if there is no rule, else both: "entmax15 with
  // ssmax:0.43".
  std::string name() const;

  friend bool operator==(const Weighting&, const Weighting&) = default;
};

// All weight to the largest logit, shared by those that tie: the ceiling. Its gradient is 0.
Weighting hard_weighting();

enum class Activation {
  gelu,
  // gelu(x) + [x > 0] in both item layers. Its gradient is straight-through: the step counts as the ramp from
  // -1/2 to 1/2, derivative 1 where |x| <= 1/2 and 0 elsewhere.
  step
};

// What is done with the parameters, whose number is the same for all.
struct Architecture {
  Activation activation = Activation::gelu;
  // 2: the columns of Q, K and V are split in two heads of 64 elements, logits are divided by sqrt(64), and
  // the outputs are concatenated before O. The first head is the one that weightings are of; the second
  // always has the normalizer straight-through, hard forward, without a rule.
  int heads = 1;

  friend bool operator==(const Architecture&, const Architecture&) = default;
};

// What forward() remembers of the items.
enum class Keep {
  all,      // what backward() needs
  encoded,  // the encoded items: 576 bytes per item
  nothing   // encoded again where needed: any number of items in 9 bytes each, and 4 more per weighting
};

// A batch's way through the model and back. T is float, or double for checks and precision studies.
// Buffers grow to the largest batch seen and are kept.
template <typename T>
class Head {
 public:
  explicit Head(const Architecture& architecture = {}) : architecture_(architecture) {}

  // The class scores of every set under each of the weightings, which share the logits. Of two attention
  // heads everything below is of the first, scores and what follows from them excepted. `parameters` holds
  // kParameters values; they, the batch and the weightings must stay until backward().
  void forward(const T* parameters, const Batch& batch, std::span<const Weighting> weightings,
               Keep keep = Keep::all);

  // Of the last forward(); by weighting, then set.
  double loss(std::size_t weighting = 0) const { return loss_[weighting]; }  // mean cross-entropy
  std::int64_t correct(std::size_t weighting = 0) const { return correct_[weighting]; }
  std::span<const T> logits() const { return std::span(logits_).first(count(items())); }  // sets x items
  std::span<const T> weights() const {  // weightings x sets x items
    return std::span(weights_).first(count(items()) * weightings_.size());
  }
  std::span<const RowStats> stats() const { return stats_; }           // weightings x sets
  std::span<const T> scores() const { return scores_; }                // weightings x sets x kClasses
  std::span<const T> encoded_items() const { return encoded_items_; }  // kStride apart, unless Keep::nothing
  std::span<const T> encoded_queries() const { return encoded_query_; }  // kStride apart

  // gradients = d loss / d parameters after a forward() with one weighting and Keep::all; overwrites all
  // kParameters of them. Items whose weight and whose gradient of the logit both vanish beside their set's
  // largest in the arithmetic of T are left out.
  void backward(T* gradients);

 private:
  void resize_buffers();
  void encode_query();
  void encode_items();
  void encode_block(std::int64_t row, std::int64_t rows);
  void find_logits(std::int64_t row, std::int64_t rows);
  void weigh();
  void pool();
  void pool_block(std::int64_t row, std::int64_t rows);
  void add_step(const T* x, std::int64_t n, T* y) const;
  void find_values(int head, std::int64_t attention, std::int64_t output, std::int64_t rows);
  void read_out();
  void score();
  void read_out_backward(T* gradients);
  void values_backward(int head, const T* dv, T* gradients);
  void weights_backward(int head);
  void keys_backward(int head, T* gradients);
  void encode_items_backward(T* gradients);
  void find_active();
  void item2_backward(std::int64_t row, T* ditem2);
  void step1_backward(const kernels::FirstLayer<T>& layer, T* dslope, T* doffsets) const;
  void encode_query_backward(T* gradients);

  // y = x kernel + bias, and its gradients: d kernel and d bias (overwritten), dx unless null.
  void dense(LayerId layer, const T* x, std::int64_t rows, T* y) const;
  void dense_backward(LayerId layer, const T* x, const T* dy, std::int64_t rows, T* gradients, T* dx) const;

  const T* at(std::int64_t offset) const { return parameters_ + offset; }
  std::int64_t items() const { return batch_->sets * batch_->items; }
  static std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }
  int heads() const { return architecture_.heads; }
  std::int64_t head_width() const { return kWidth / heads(); }
  // How many sets of weights there are: one per weighting, of the first head, and one of each other head.
  std::int64_t attentions() const { return static_cast<std::int64_t>(weightings_.size()) + heads() - 1; }
  // Which of them a head has in training: there is one weighting then.
  std::int64_t item_row(int head) const { return head * items(); }
  std::int64_t set_row(int head) const { return head * batch_->sets; }
  // Rows of the read-out: one per set and weighting.
  std::int64_t outputs() const { return batch_->sets * static_cast<std::int64_t>(weightings_.size()); }
  // The offset of an item in encoded_items_, which has only the block that begins with item `first` if
  // nothing is kept.
  std::int64_t encoded_offset(std::int64_t row, std::int64_t first) const {
    return (keep_ == Keep::nothing ? row - first : row) * kStride;
  }

  Architecture architecture_;
  kernels::DenseKernels<T> kernels_{};
  const T* parameters_ = nullptr;
  const Batch* batch_ = nullptr;
  std::span<const Weighting> weightings_;
  Keep keep_ = Keep::all;
  std::vector<double> loss_;
  std::vector<std::int64_t> correct_;

  // One row per set, kStride apart.
  std::vector<T> query1_, query2_, encoded_query_, q_, dsets_[2];

  // One row per head and set.
  std::vector<T> key_direction_;  // K^T q
  std::vector<T> dpooled_, dkey_direction_;
  std::vector<T> dtotals_;    // one number: what every weight of the set gains through V's bias
  std::vector<T> dkey_bias_;  // one number: the gradient of the logits' common q . b_K

  // One row per attention and set.
  std::vector<T> pooled_;
  std::vector<double> wide_pooled_;  // pooled_ while it is summed; empty if sets are small
  std::vector<T> totals_;            // one number: the sum of the weights

  // One row per weighting and set.
  std::vector<T> v_, o_, hidden_, hidden_out_;
  std::vector<T> scores_, dscores_;  // kClasses apart
  std::vector<RowStats> stats_;

  // One row per item.
  std::vector<T> class_offsets_;  // kClasses x kWidth: what the first item layer adds for a class
  std::vector<T> item1_;          // the block at hand
  std::vector<T> item2_, encoded_items_;
  std::vector<T> logits_, weights_, dlogits_;  // one number; of every head, attention, head
  struct Active {                              // items that count in backward()
    std::vector<std::int64_t> rows;
    std::vector<float> priorities;
    std::vector<std::uint8_t> classes;
    std::vector<T> item1, ditem1, ditem2;
  } active_;
};

}  // namespace whet::lab

#endif  // WHET_LAB_MODEL_H_
