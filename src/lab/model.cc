#include "lab/model.h"

#include <whet/softmax.h>

#include <algorithm>
#include <boost/math/special_functions/erf.hpp>
#include <cmath>
#include <limits>
#include <numeric>

namespace whet::lab {
namespace {

constexpr std::array<Layer, kLayers> lay_out() {
  std::array<Layer, kLayers> layers{{{"item1", 1 + kClasses, kWidth, 0, 0},
                                     {"item2", kWidth, kWidth, 0, 0},
                                     {"query1", 1, kWidth, 0, 0},
                                     {"query2", kWidth, kWidth, 0, 0},
                                     {"q", kWidth, kWidth, 0, 0},
                                     {"k", kWidth, kWidth, 0, 0},
                                     {"v", kWidth, kWidth, 0, 0},
                                     {"o", kWidth, kWidth, 0, 0},
                                     {"hidden", kWidth, kWidth, 0, 0},
                                     {"output", kWidth, kClasses, 0, 0}}};
  std::int64_t offset = 0;
  for (Layer& layer : layers) {
    layer.kernel = offset;
    layer.bias = offset + layer.in * layer.out;
    offset = layer.bias + layer.out;
  }
  return layers;
}

static_assert(lay_out().back().bias + kClasses == kParameters);

// The items that go through the encoder together: their activations stay in the second-level cache.
constexpr std::int64_t kItemBlock = 192;

double logit_scale(std::int64_t head_width) { return 1 / std::sqrt(static_cast<double>(head_width)); }

// How heads beyond the first turn logits into weights.
const Weighting& fixed_weighting() {
  static const Weighting weighting{.rule = {}, .normalizer = Normalizer::parse("straight-through")};
  return weighting;
}

// The derivative that a step at 0 is given: that of a ramp from -1/2 to 1/2.
template <typename T>
T ramp_slope(T x) {
  return std::abs(x) <= T(0.5) ? T(1) : T(0);
}

template <typename T>
void grow(std::vector<T>& values, std::int64_t size) {
  values.resize(static_cast<std::size_t>(size));
}

}  // namespace

const std::array<Layer, kLayers> kModel = lay_out();

std::string Weighting::name() const {
  if (normalizer == Normalizer()) return rule.name();
  return rule == Rule::none() ? normalizer.name() : normalizer.name() + " with " + rule.name();
}

Weighting hard_weighting() { return {.rule = {}, .normalizer = Normalizer::parse("hard")}; }

std::vector<float> initial_parameters(std::uint64_t seed) {
  // The standard deviation of a standard normal cut at +-2, and the share of it within them.
  constexpr double kCutDeviation = 0.87962566103423978;
  const double half = boost::math::erf(2 / std::sqrt(2.0));
  std::vector<float> parameters(kParameters, 0.0F);
  for (std::size_t l = 0; l < kModel.size(); ++l) {
    const Layer& layer = kModel[l];
    Random random(seed, Stream::weights, l);
    const double deviation = 1 / (std::sqrt(static_cast<double>(layer.in)) * kCutDeviation);
    for (std::int64_t i = layer.kernel; i < layer.bias; ++i) {
      const double normal = std::sqrt(2.0) * boost::math::erf_inv((2 * random.uniform() - 1) * half);
      parameters[static_cast<std::size_t>(i)] = static_cast<float>(deviation * normal);
    }
  }
  return parameters;
}

template <typename T>
void Head<T>::dense(LayerId id, const T* x, std::int64_t rows, T* y) const {
  const Layer& layer = kModel[id];
  const std::int64_t y_stride = id == kOutput ? kClasses : kStride;
  for (std::int64_t row = 0; row < rows; ++row) std::copy_n(at(layer.bias), layer.out, y + row * y_stride);
  kernels_.multiply({.rows = rows,
                     .columns = layer.out,
                     .depth = layer.in,
                     .a = x,
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(layer.kernel),
                     .b_step_stride = layer.out,
                     .b_column_stride = 1,
                     .c = y,
                     .c_stride = y_stride,
                     .add = true});
}

template <typename T>
void Head<T>::dense_backward(LayerId id, const T* x, const T* dy, std::int64_t rows, T* gradients,
                             T* dx) const {
  const Layer& layer = kModel[id];
  const std::int64_t dy_stride = id == kOutput ? kClasses : kStride;
  std::fill_n(gradients + layer.bias, layer.out, T(0));
  kernels_.add_rows(dy, dy_stride, rows, layer.out, nullptr, gradients + layer.bias);
  kernels_.multiply({.rows = layer.in,  // d kernel = x^T dy
                     .columns = layer.out,
                     .depth = rows,
                     .a = x,
                     .a_row_stride = 1,
                     .a_step_stride = kStride,
                     .b = dy,
                     .b_step_stride = dy_stride,
                     .b_column_stride = 1,
                     .c = gradients + layer.kernel,
                     .c_stride = layer.out});
  if (dx == nullptr) return;
  kernels_.multiply({.rows = rows,  // dx = dy kernel^T
                     .columns = layer.in,
                     .depth = layer.out,
                     .a = dy,
                     .a_row_stride = dy_stride,
                     .a_step_stride = 1,
                     .b = at(layer.kernel),
                     .b_step_stride = 1,
                     .b_column_stride = layer.out,
                     .c = dx,
                     .c_stride = kStride});
}

template <typename T>
void Head<T>::forward(const T* parameters, const Batch& batch, std::span<const Weighting> weightings,
                      Keep keep) {
  kernels_ = kernels::dense_kernels<T>();
  parameters_ = parameters;
  batch_ = &batch;
  weightings_ = weightings;
  keep_ = keep;
  resize_buffers();
  encode_query();
  encode_items();
  weigh();
  pool();
  read_out();
  score();
}

template <typename T>
void Head<T>::resize_buffers() {
  const std::int64_t sets = batch_->sets,
                     kept = keep_ == Keep::nothing ? std::min(items(), kItemBlock) : items();
  for (auto* buffer : {&query1_, &query2_, &encoded_query_, &q_, &dsets_[0], &dsets_[1]}) {
    grow(*buffer, sets * kStride);
  }
  for (auto* buffer : {&key_direction_, &dpooled_, &dkey_direction_}) {
    grow(*buffer, heads() * sets * kStride);
  }
  for (auto* buffer : {&v_, &o_, &hidden_, &hidden_out_}) grow(*buffer, outputs() * kStride);
  for (auto* buffer : {&scores_, &dscores_}) grow(*buffer, outputs() * kClasses);
  grow(pooled_, attentions() * sets * kStride);
  grow(totals_, attentions() * sets);
  grow(dtotals_, heads() * sets);
  grow(dkey_bias_, heads() * sets);
  grow(stats_, outputs());
  grow(class_offsets_, kClasses * kWidth);
  grow(item1_, std::min(items(), kItemBlock) * kStride);
  grow(item2_, (keep_ == Keep::all ? items() : std::min(items(), kItemBlock)) * kStride);
  grow(encoded_items_, kept * kStride);
  grow(logits_, heads() * items());
  grow(weights_, attentions() * items());
  if (keep_ == Keep::all) grow(dlogits_, heads() * items());
}

template <typename T>
void Head<T>::encode_query() {
  const std::int64_t sets = batch_->sets;
  kernels_.first_layer({.rows = sets,
                        .width = kWidth,
                        .values = batch_->queries.data(),
                        .classes = nullptr,
                        .slope = at(kModel[kQuery1].kernel),
                        .offsets = at(kModel[kQuery1].bias)},
                       query1_.data(), kStride);
  dense(kQuery2, query1_.data(), sets, query2_.data());
  kernels_.gelu(query2_.data(), sets * kStride, encoded_query_.data());
  dense(kQ, encoded_query_.data(), sets, q_.data());
  for (int head = 0; head < heads(); ++head) {
    kernels_.multiply({.rows = sets,  // K^T q
                       .columns = kWidth,
                       .depth = head_width(),
                       .a = q_.data() + head * head_width(),
                       .a_row_stride = kStride,
                       .a_step_stride = 1,
                       .b = at(kModel[kK].kernel + head * head_width()),
                       .b_step_stride = 1,
                       .b_column_stride = kWidth,
                       .c = key_direction_.data() + set_row(head) * kStride,
                       .c_stride = kStride});
  }
}

template <typename T>
void Head<T>::encode_items() {
  const Layer& first = kModel[kItem1];
  for (std::int64_t c = 0; c < kClasses; ++c) {
    kernels_.combine(1, at(first.kernel + (1 + c) * kWidth), 1, at(first.bias), kWidth,
                     class_offsets_.data() + c * kWidth);
  }
  for (std::int64_t row = 0; row < items(); row += kItemBlock) {
    const std::int64_t rows = std::min(kItemBlock, items() - row);
    encode_block(row, rows);
    find_logits(row, rows);
  }
}

template <typename T>
void Head<T>::encode_block(std::int64_t row, std::int64_t rows) {
  kernels_.first_layer({.rows = rows,
                        .width = kWidth,
                        .values = batch_->priorities.data() + row,
                        .classes = batch_->classes.data() + row,
                        .slope = at(kModel[kItem1].kernel),
                        .offsets = class_offsets_.data()},
                       item1_.data(), kStride);
  add_step(item1_.data(), rows * kStride, item1_.data());  // gelu(x) > 0 where x > 0
  T* item2 = item2_.data() + (keep_ == Keep::all ? row * kStride : 0);
  dense(kItem2, item1_.data(), rows, item2);
  T* encoded = encoded_items_.data() + encoded_offset(row, row);
  kernels_.gelu(item2, rows * kStride, encoded);
  add_step(item2, rows * kStride, encoded);
}

// y += [x > 0] if the architecture has steps; y may be x.
template <typename T>
void Head<T>::add_step(const T* x, std::int64_t n, T* y) const {
  if (architecture_.activation != Activation::step) return;
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i] > 0 ? T(1) : T(0);
}

// Calls body(set, row, rows) for the part of each set within these rows.
template <typename Body>
void for_sets(std::int64_t items, std::int64_t row, std::int64_t rows, const Body& body) {
  for (const std::int64_t end = row + rows; row < end;) {
    const std::int64_t set = row / items, part = std::min(end, (set + 1) * items) - row;
    body(set, row, part);
    row += part;
  }
}

template <typename T>
void Head<T>::find_logits(std::int64_t first, std::int64_t count) {
  const T scale = static_cast<T>(logit_scale(head_width()));
  for (int head = 0; head < heads(); ++head) {
    const std::int64_t column = head * head_width();
    for_sets(batch_->items, first, count, [&](std::int64_t set, std::int64_t row, std::int64_t rows) {
      T* logits = logits_.data() + item_row(head) + row;
      T bias = 0;  // the same for every item: it moves no weight of a softmax, but is part of the logit
      kernels_.dot_rows(q_.data() + set * kStride + column, kStride, 1, head_width(),
                        at(kModel[kK].bias + column), &bias);
      kernels_.dot_rows(encoded_items_.data() + encoded_offset(row, first), kStride, rows, kWidth,
                        key_direction_.data() + (set_row(head) + set) * kStride, logits);
      for (std::int64_t i = 0; i < rows; ++i) logits[i] = (logits[i] + bias) * scale;
    });
  }
}

template <typename T>
void Head<T>::weigh() {
  const auto sets = count(batch_->sets);
  const Dims sizes{batch_->sets, batch_->items};
  for (std::size_t r = 0; r < weightings_.size(); ++r) {
    softmax(ConstView(logits_.data(), sizes), View(weights_.data() + r * count(items()), sizes),
            {.rule = weightings_[r].rule, .normalizer = weightings_[r].normalizer},
            {.stats = std::span(stats_).subspan(r * sets, sets)}, {.threads = 1});
  }
  for (int head = 1; head < heads(); ++head) {
    T* weights = weights_.data() + (weightings_.size() + count(head - 1)) * count(items());
    softmax(ConstView(logits_.data() + item_row(head), sizes), View(weights, sizes),
            {.normalizer = fixed_weighting().normalizer}, {}, {.threads = 1});
  }
}

template <typename T>
void Head<T>::pool() {
  std::fill(pooled_.begin(), pooled_.end(), T(0));
  wide_pooled_.assign(batch_->items > kItemBlock ? pooled_.size() : 0, 0.0);
  for (std::int64_t row = 0; row < items(); row += kItemBlock) {
    const std::int64_t rows = std::min(kItemBlock, items() - row);
    if (keep_ == Keep::nothing) encode_block(row, rows);
    pool_block(row, rows);
  }
  std::transform(wide_pooled_.begin(), wide_pooled_.end(), pooled_.begin(),
                 [](double sum) { return static_cast<T>(sum); });
  for (std::int64_t row = 0; row < attentions() * batch_->sets; ++row) {
    const T* weights = weights_.data() + row * batch_->items;
    totals_[count(row)] = static_cast<T>(std::accumulate(weights, weights + batch_->items, 0.0));
  }
}

// A set of more than a block of items is summed block by block in double: a million small additions to one
// float would lose a percent of the sum.
template <typename T>
void Head<T>::pool_block(std::int64_t first, std::int64_t count) {
  for (std::int64_t r = 0; r < attentions(); ++r) {
    for_sets(batch_->items, first, count, [&](std::int64_t set, std::int64_t row, std::int64_t rows) {
      const std::int64_t offset = (r * batch_->sets + set) * kStride;
      std::array<T, kWidth> part{};
      T* sum = wide_pooled_.empty() ? pooled_.data() + offset : part.data();
      kernels_.add_rows(encoded_items_.data() + encoded_offset(row, first), kStride, rows, kWidth,
                        weights_.data() + r * items() + row, sum);
      for (std::size_t i = 0; !wide_pooled_.empty() && i < kWidth; ++i) {
        wide_pooled_[static_cast<std::size_t>(offset) + i] += static_cast<double>(part[i]);
      }
    });
  }
}

// V of what `attention` pooled, for the read-outs from `output` on: the columns of `head`. V acts on the sum
// of weighted items, so its bias comes in as often as there is weight.
template <typename T>
void Head<T>::find_values(int head, std::int64_t attention, std::int64_t output, std::int64_t rows) {
  const std::int64_t column = head * head_width(), pooled = attention * batch_->sets;
  T* v = v_.data() + output * kStride + column;
  kernels_.multiply({.rows = rows,
                     .columns = head_width(),
                     .depth = kWidth,
                     .a = pooled_.data() + pooled * kStride,
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(kModel[kV].kernel + column),
                     .b_step_stride = kWidth,
                     .b_column_stride = 1,
                     .c = v,
                     .c_stride = kStride});
  for (std::int64_t row = 0; row < rows; ++row) {
    kernels_.combine(totals_[count(pooled + row)], at(kModel[kV].bias + column), 1, v + row * kStride,
                     head_width(), v + row * kStride);
  }
}

template <typename T>
void Head<T>::read_out() {
  find_values(0, 0, 0, outputs());
  const auto weightings = static_cast<std::int64_t>(weightings_.size());
  for (int head = 1; head < heads(); ++head) {  // the same for every weighting
    for (std::int64_t r = 0; r < weightings; ++r) {
      find_values(head, weightings + head - 1, r * batch_->sets, batch_->sets);
    }
  }
  dense(kO, v_.data(), outputs(), o_.data());
  dense(kHidden, o_.data(), outputs(), hidden_.data());
  kernels_.gelu(hidden_.data(), outputs() * kStride, hidden_out_.data());
  dense(kOutput, hidden_out_.data(), outputs(), scores_.data());
}

// Cross-entropy of the scores, and its gradient while the exponentials are at hand.
template <typename T>
void Head<T>::score() {
  loss_.assign(weightings_.size(), 0);
  correct_.assign(weightings_.size(), 0);
  const auto sets = static_cast<double>(batch_->sets);
  for (std::int64_t output = 0; output < outputs(); ++output) {
    const auto r = static_cast<std::size_t>(output / batch_->sets);
    const int target = batch_->targets[static_cast<std::size_t>(output % batch_->sets)];
    const T* scores = scores_.data() + output * kClasses;
    T* dscores = dscores_.data() + output * kClasses;
    const T* best = std::max_element(scores, scores + kClasses);
    std::array<double, kClasses> exponentials{};
    double sum = 0;
    for (std::size_t c = 0; c < kClasses; ++c) {
      sum += exponentials[c] = std::exp(static_cast<double>(scores[c] - *best));
    }
    loss_[r] += (std::log(sum) - static_cast<double>(scores[target] - *best)) / sets;
    correct_[r] += best - scores == target ? 1 : 0;
    for (std::size_t c = 0; c < kClasses; ++c) {
      const double wanted = static_cast<int>(c) == target ? 1 : 0;
      dscores[c] = static_cast<T>((exponentials[c] / sum - wanted) / sets);
    }
  }
}

template <typename T>
void Head<T>::backward(T* gradients) {
  read_out_backward(gradients);
  for (int head = 0; head < heads(); ++head) {
    weights_backward(head);
    keys_backward(head, gradients);
  }
  encode_items_backward(gradients);
  encode_query_backward(gradients);
}

template <typename T>
void Head<T>::read_out_backward(T* gradients) {
  const std::int64_t sets = batch_->sets;
  T* dhidden = dsets_[0].data();
  T* dother = dsets_[1].data();
  dense_backward(kOutput, hidden_out_.data(), dscores_.data(), sets, gradients, dhidden);
  kernels_.gelu_backward(hidden_.data(), sets * kStride, dhidden);
  dense_backward(kHidden, o_.data(), dhidden, sets, gradients, dother);
  T* dv = dhidden;
  dense_backward(kO, v_.data(), dother, sets, gradients, dv);
  for (int head = 0; head < heads(); ++head) values_backward(head, dv, gradients);
}

template <typename T>
void Head<T>::values_backward(int head, const T* dv, T* gradients) {
  const std::int64_t sets = batch_->sets, column = head * head_width();
  const Layer& layer = kModel[kV];
  kernels_.multiply({.rows = kWidth,  // dV = pooled^T dv
                     .columns = head_width(),
                     .depth = sets,
                     .a = pooled_.data() + set_row(head) * kStride,
                     .a_row_stride = 1,
                     .a_step_stride = kStride,
                     .b = dv + column,
                     .b_step_stride = kStride,
                     .b_column_stride = 1,
                     .c = gradients + layer.kernel + column,
                     .c_stride = kWidth});
  kernels_.multiply({.rows = sets,  // dpooled = dv V^T
                     .columns = kWidth,
                     .depth = head_width(),
                     .a = dv + column,
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(layer.kernel + column),
                     .b_step_stride = 1,
                     .b_column_stride = kWidth,
                     .c = dpooled_.data() + set_row(head) * kStride,
                     .c_stride = kStride});
  std::fill_n(gradients + layer.bias + column, head_width(), T(0));
  kernels_.add_rows(dv + column, kStride, sets, head_width(), totals_.data() + set_row(head),
                    gradients + layer.bias + column);
  kernels_.dot_rows(dv + column, kStride, sets, head_width(), at(layer.bias + column),
                    dtotals_.data() + set_row(head));
}

// From the weighted sum to the logits, and to what all items of a set share of them.
template <typename T>
void Head<T>::weights_backward(int head) {
  const std::int64_t sets = batch_->sets, items = batch_->items;
  const T scale = static_cast<T>(logit_scale(head_width()));
  T* const dlogits_of_head = dlogits_.data() + item_row(head);
  for (std::int64_t set = 0; set < sets; ++set) {
    T* dweights = dlogits_of_head + set * items;
    kernels_.dot_rows(encoded_items_.data() + set * items * kStride, kStride, items, kWidth,
                      dpooled_.data() + (set_row(head) + set) * kStride, dweights);
    for (std::int64_t i = 0; i < items; ++i) dweights[i] += dtotals_[count(set_row(head) + set)];
  }
  const Dims sizes{sets, items};
  const Weighting& weighting = head == 0 ? weightings_[0] : fixed_weighting();
  softmax_backward(ConstView(logits_.data() + item_row(head), sizes), ConstView(dlogits_of_head, sizes),
                   View(dlogits_of_head, sizes), {.rule = weighting.rule, .normalizer = weighting.normalizer},
                   {}, {.threads = 1});
  for (std::int64_t set = 0; set < sets; ++set) {
    T* dlogits = dlogits_of_head + set * items;
    T sum = 0;
    for (std::int64_t i = 0; i < items; ++i) sum += dlogits[i] *= scale;
    dkey_bias_[count(set_row(head) + set)] = sum;
    T* ddirection = dkey_direction_.data() + (set_row(head) + set) * kStride;
    std::fill_n(ddirection, kStride, T(0));
    kernels_.add_rows(encoded_items_.data() + set * items * kStride, kStride, items, kWidth, dlogits,
                      ddirection);
  }
}

// On to K and to q, which is left in dsets_[0].
template <typename T>
void Head<T>::keys_backward(int head, T* gradients) {
  const std::int64_t sets = batch_->sets, column = head * head_width();
  const Layer& layer = kModel[kK];
  const T* ddirection = dkey_direction_.data() + set_row(head) * kStride;
  std::fill_n(gradients + layer.bias + column, head_width(), T(0));
  kernels_.add_rows(q_.data() + column, kStride, sets, head_width(), dkey_bias_.data() + set_row(head),
                    gradients + layer.bias + column);
  kernels_.multiply({.rows = kWidth,  // dK = d(K^T q) q^T over all sets
                     .columns = head_width(),
                     .depth = sets,
                     .a = ddirection,
                     .a_row_stride = 1,
                     .a_step_stride = kStride,
                     .b = q_.data() + column,
                     .b_step_stride = kStride,
                     .b_column_stride = 1,
                     .c = gradients + layer.kernel + column,
                     .c_stride = kWidth});
  T* dq = dsets_[0].data() + column;
  kernels_.multiply({.rows = sets,
                     .columns = head_width(),
                     .depth = kWidth,
                     .a = ddirection,
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(layer.kernel + column),
                     .b_step_stride = kWidth,
                     .b_column_stride = 1,
                     .c = dq,
                     .c_stride = kStride});
  for (std::int64_t set = 0; set < sets; ++set) {
    kernels_.combine(dkey_bias_[count(set_row(head) + set)], at(layer.bias + column), 1, dq + set * kStride,
                     head_width(), dq + set * kStride);
  }
}

// The gradient of an encoded item is, over heads, weight * dpooled + dlogit * key direction. Items of which
// all of these vanish beside those of their set don't move a sum: a trained head gives weight to few.
template <typename T>
void Head<T>::find_active() {
  constexpr T kVanishes = std::numeric_limits<T>::epsilon() / 32;
  const std::int64_t items = batch_->items, sets = batch_->sets;
  active_.rows.clear();
  for (std::int64_t set = 0; set < sets; ++set) {
    std::array<T, 2> weight_limit{}, dlogit_limit{};
    for (int head = 0; head < heads(); ++head) {
      const std::int64_t first = item_row(head) + set * items;
      const T* weights = weights_.data() + first;
      const T* dlogits = dlogits_.data() + first;
      T largest = 0;
      for (std::int64_t i = 0; i < items; ++i) largest = std::max(largest, std::abs(dlogits[i]));
      dlogit_limit[count(head)] = kVanishes * largest;
      // Weights of softmax sum to 1; others may all be small.
      const bool sums_to_1 = head == 0 && weightings_[0].normalizer == Normalizer();
      weight_limit[count(head)] =
          kVanishes * (sums_to_1 ? T(1) : *std::max_element(weights, weights + items));
    }
    for (std::int64_t row = set * items; row < (set + 1) * items; ++row) {
      bool counts = false;
      for (int head = 0; head < heads(); ++head) {
        const std::size_t at = count(item_row(head) + row);
        counts = counts || !(weights_[at] <= weight_limit[count(head)] &&
                             std::abs(dlogits_[at]) <= dlogit_limit[count(head)]);
      }
      if (counts) active_.rows.push_back(row);
    }
  }
}

// Of the input of the second item layer's activation.
template <typename T>
void Head<T>::item2_backward(std::int64_t row, T* ditem2) {
  const std::int64_t set = row / batch_->items;
  const auto direction = [&](const std::vector<T>& values, int head) {
    return values.data() + (set_row(head) + set) * kStride;
  };
  kernels_.combine(weights_[count(row)], direction(dpooled_, 0), dlogits_[count(row)],
                   direction(key_direction_, 0), kWidth, ditem2);
  for (int head = 1; head < heads(); ++head) {
    const std::size_t at = count(item_row(head) + row);
    kernels_.combine(weights_[at], direction(dpooled_, head), 1, ditem2, kWidth, ditem2);
    kernels_.combine(dlogits_[at], direction(key_direction_, head), 1, ditem2, kWidth, ditem2);
  }
  const T* item2 = item2_.data() + row * kStride;
  if (architecture_.activation != Activation::step) {
    kernels_.gelu_backward(item2, kWidth, ditem2);
    return;
  }
  std::array<T, kWidth> through_step;
  for (std::size_t i = 0; i < kWidth; ++i) through_step[i] = ditem2[i] * ramp_slope(item2[i]);
  kernels_.gelu_backward(item2, kWidth, ditem2);
  for (std::size_t i = 0; i < kWidth; ++i) ditem2[i] += through_step[i];
}

template <typename T>
void Head<T>::encode_items_backward(T* gradients) {
  find_active();
  const auto count = static_cast<std::int64_t>(active_.rows.size());
  active_.priorities.clear();
  active_.classes.clear();
  for (auto* buffer : {&active_.item1, &active_.ditem1, &active_.ditem2}) grow(*buffer, items() * kStride);
  T* ditem2 = active_.ditem2.data();
  for (const std::int64_t row : active_.rows) {
    item2_backward(row, ditem2);
    ditem2 += kStride;
    active_.priorities.push_back(batch_->priorities[static_cast<std::size_t>(row)]);
    active_.classes.push_back(batch_->classes[static_cast<std::size_t>(row)]);
  }
  const Layer& first = kModel[kItem1];
  const kernels::FirstLayer<T> layer{.rows = count,
                                     .width = kWidth,
                                     .values = active_.priorities.data(),
                                     .classes = active_.classes.data(),
                                     .slope = at(first.kernel),
                                     .offsets = class_offsets_.data()};
  kernels_.first_layer(layer, active_.item1.data(), kStride);
  add_step(active_.item1.data(), count * kStride, active_.item1.data());
  dense_backward(kItem2, active_.item1.data(), active_.ditem2.data(), count, gradients,
                 active_.ditem1.data());
  T* dkernel = gradients + first.kernel;
  std::fill_n(dkernel, first.bias - first.kernel, T(0));
  kernels_.first_layer_backward(layer, active_.ditem1.data(), kStride, dkernel, dkernel + kWidth);
  if (architecture_.activation == Activation::step) step1_backward(layer, dkernel, dkernel + kWidth);
  std::fill_n(gradients + first.bias, kWidth, T(0));
  kernels_.add_rows(dkernel + kWidth, kWidth, kClasses, kWidth, nullptr, gradients + first.bias);
}

// What the step adds to first_layer_backward().
template <typename T>
void Head<T>::step1_backward(const kernels::FirstLayer<T>& layer, T* dslope, T* doffsets) const {
  for (std::int64_t row = 0; row < layer.rows; ++row) {
    const T* dout = active_.ditem1.data() + row * kStride;
    const std::int64_t offset = layer.classes[row] * kWidth;
    const T value = static_cast<T>(layer.values[row]);
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const T dz = dout[i] * ramp_slope(value * layer.slope[i] + layer.offsets[offset + i]);
      dslope[i] += value * dz;
      doffsets[offset + i] += dz;
    }
  }
}

template <typename T>
void Head<T>::encode_query_backward(T* gradients) {
  const std::int64_t sets = batch_->sets;
  T* dq = dsets_[0].data();
  T* dencoded = dsets_[1].data();
  dense_backward(kQ, encoded_query_.data(), dq, sets, gradients, dencoded);
  kernels_.gelu_backward(query2_.data(), sets * kStride, dencoded);
  T* dquery1 = dsets_[0].data();
  dense_backward(kQuery2, query1_.data(), dencoded, sets, gradients, dquery1);
  const Layer& first = kModel[kQuery1];
  std::fill_n(gradients + first.kernel, 2 * kWidth, T(0));
  kernels_.first_layer_backward({.rows = sets,
                                 .width = kWidth,
                                 .values = batch_->queries.data(),
                                 .classes = nullptr,
                                 .slope = at(first.kernel),
                                 .offsets = at(first.bias)},
                                dquery1, kStride, gradients + first.kernel, gradients + first.bias);
}

template class Head<float>;
template class Head<double>;

}  // namespace whet::lab
