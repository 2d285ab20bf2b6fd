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

const double kLogitScale = 1 / std::sqrt(static_cast<double>(kWidth));

template <typename T>
void grow(std::vector<T>& values, std::int64_t size) {
  values.resize(static_cast<std::size_t>(size));
}

}  // namespace

const std::array<Layer, kLayers> kModel = lay_out();

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
  for (auto* buffer : {&query1_, &query2_, &encoded_query_, &q_, &key_direction_, &dpooled_, &dkey_direction_,
                       &dsets_[0], &dsets_[1]}) {
    grow(*buffer, sets * kStride);
  }
  for (auto* buffer : {&pooled_, &v_, &o_, &hidden_, &hidden_out_}) grow(*buffer, outputs() * kStride);
  for (auto* buffer : {&scores_, &dscores_}) grow(*buffer, outputs() * kClasses);
  grow(totals_, outputs());
  grow(dtotals_, sets);
  grow(dkey_bias_, sets);
  grow(stats_, outputs());
  grow(class_offsets_, kClasses * kWidth);
  grow(item1_, std::min(items(), kItemBlock) * kStride);
  grow(item2_, (keep_ == Keep::all ? items() : std::min(items(), kItemBlock)) * kStride);
  grow(encoded_items_, kept * kStride);
  grow(logits_, items());
  grow(weights_, items() * static_cast<std::int64_t>(weightings_.size()));
  if (keep_ == Keep::all) grow(dlogits_, items());
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
  kernels_.multiply({.rows = sets,  // K^T q
                     .columns = kWidth,
                     .depth = kWidth,
                     .a = q_.data(),
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(kModel[kK].kernel),
                     .b_step_stride = 1,
                     .b_column_stride = kWidth,
                     .c = key_direction_.data(),
                     .c_stride = kStride});
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
  T* item2 = item2_.data() + (keep_ == Keep::all ? row * kStride : 0);
  dense(kItem2, item1_.data(), rows, item2);
  kernels_.gelu(item2, rows * kStride, encoded_items_.data() + encoded_offset(row, row));
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
  const T scale = static_cast<T>(kLogitScale);
  for_sets(batch_->items, first, count, [&](std::int64_t set, std::int64_t row, std::int64_t rows) {
    T* logits = logits_.data() + row;
    T bias = 0;  // the same for every item: it moves no weight of a softmax, but is part of the logit
    kernels_.dot_rows(q_.data() + set * kStride, kStride, 1, kWidth, at(kModel[kK].bias), &bias);
    kernels_.dot_rows(encoded_items_.data() + encoded_offset(row, first), kStride, rows, kWidth,
                      key_direction_.data() + set * kStride, logits);
    for (std::int64_t i = 0; i < rows; ++i) logits[i] = (logits[i] + bias) * scale;
  });
}

template <typename T>
void Head<T>::weigh() {
  const std::int64_t sets = batch_->sets, size = batch_->items;
  for (std::size_t r = 0; r < weightings_.size(); ++r) {
    T* weights = weights_.data() + static_cast<std::int64_t>(r) * items();
    const std::span<RowStats> stats = std::span(stats_).subspan(r * static_cast<std::size_t>(sets));
    softmax(ConstView(logits_.data(), {sets, size}), View(weights, {sets, size}),
            {.rule = weightings_[r].rule}, {.stats = stats.first(static_cast<std::size_t>(sets))},
            {.threads = 1});
    for (std::int64_t set = 0; weightings_[r].hard && set < sets; ++set) {
      const T* logits = logits_.data() + set * size;
      std::fill_n(weights + set * size, size, T(0));
      weights[set * size + (std::max_element(logits, logits + size) - logits)] = T(1);
    }
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
  for (std::int64_t output = 0; output < outputs(); ++output) {
    const T* weights = weights_.data() + output * batch_->items;
    totals_[static_cast<std::size_t>(output)] =
        static_cast<T>(std::accumulate(weights, weights + batch_->items, 0.0));
  }
}

// A set of more than a block of items is summed block by block in double: a million small additions to one
// float would lose a percent of the sum.
template <typename T>
void Head<T>::pool_block(std::int64_t first, std::int64_t count) {
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(weightings_.size()); ++r) {
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

template <typename T>
void Head<T>::read_out() {
  // V acts on the sum of weighted items, so its bias comes in as often as there is weight.
  kernels_.multiply({.rows = outputs(),
                     .columns = kWidth,
                     .depth = kWidth,
                     .a = pooled_.data(),
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(kModel[kV].kernel),
                     .b_step_stride = kWidth,
                     .b_column_stride = 1,
                     .c = v_.data(),
                     .c_stride = kStride});
  for (std::int64_t output = 0; output < outputs(); ++output) {
    T* v = v_.data() + output * kStride;
    kernels_.combine(totals_[static_cast<std::size_t>(output)], at(kModel[kV].bias), 1, v, kWidth, v);
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
  attend_backward(gradients);
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
  dense_backward(kV, pooled_.data(), dv, sets, gradients, dpooled_.data());
  std::fill_n(gradients + kModel[kV].bias, kWidth, T(0));  // weighted by the totals
  kernels_.add_rows(dv, kStride, sets, kWidth, totals_.data(), gradients + kModel[kV].bias);
  kernels_.dot_rows(dv, kStride, sets, kWidth, at(kModel[kV].bias), dtotals_.data());
}

// From the weighted sum to the logits, and from those to K and q.
template <typename T>
void Head<T>::attend_backward(T* gradients) {
  const std::int64_t sets = batch_->sets, items = batch_->items;
  const T scale = static_cast<T>(kLogitScale);
  for (std::int64_t set = 0; set < sets; ++set) {
    T* dweights = dlogits_.data() + set * items;
    kernels_.dot_rows(encoded_items_.data() + set * items * kStride, kStride, items, kWidth,
                      dpooled_.data() + set * kStride, dweights);
    for (std::int64_t i = 0; i < items; ++i) dweights[i] += dtotals_[static_cast<std::size_t>(set)];
  }
  const Dims sizes{sets, items};
  softmax_backward(ConstView(logits_.data(), sizes), ConstView(dlogits_.data(), sizes),
                   View(dlogits_.data(), sizes), {.rule = weightings_[0].rule}, {}, {.threads = 1});
  for (std::int64_t set = 0; set < sets; ++set) {
    T* dlogits = dlogits_.data() + set * items;
    T sum = 0;
    for (std::int64_t i = 0; i < items; ++i) sum += dlogits[i] *= scale;
    dkey_bias_[static_cast<std::size_t>(set)] = sum;
    T* ddirection = dkey_direction_.data() + set * kStride;
    std::fill_n(ddirection, kStride, T(0));
    kernels_.add_rows(encoded_items_.data() + set * items * kStride, kStride, items, kWidth, dlogits,
                      ddirection);
  }
  std::fill_n(gradients + kModel[kK].bias, kWidth, T(0));
  kernels_.add_rows(q_.data(), kStride, sets, kWidth, dkey_bias_.data(), gradients + kModel[kK].bias);
  kernels_.multiply({.rows = kWidth,  // dK = d(K^T q) q^T over all sets
                     .columns = kWidth,
                     .depth = sets,
                     .a = dkey_direction_.data(),
                     .a_row_stride = 1,
                     .a_step_stride = kStride,
                     .b = q_.data(),
                     .b_step_stride = kStride,
                     .b_column_stride = 1,
                     .c = gradients + kModel[kK].kernel,
                     .c_stride = kWidth});
  T* dq = dsets_[0].data();
  kernels_.multiply({.rows = sets,
                     .columns = kWidth,
                     .depth = kWidth,
                     .a = dkey_direction_.data(),
                     .a_row_stride = kStride,
                     .a_step_stride = 1,
                     .b = at(kModel[kK].kernel),
                     .b_step_stride = kWidth,
                     .b_column_stride = 1,
                     .c = dq,
                     .c_stride = kStride});
  for (std::int64_t set = 0; set < sets; ++set) {
    kernels_.combine(dkey_bias_[static_cast<std::size_t>(set)], at(kModel[kK].bias), 1, dq + set * kStride,
                     kWidth, dq + set * kStride);
  }
}

// A trained head gives weight to few items of a set. The gradient of an encoded item is weight * dpooled +
// dlogit * key direction, so items where both vanish beside those of their set's largest don't move a sum.
template <typename T>
void Head<T>::encode_items_backward(T* gradients) {
  constexpr T kVanishes = std::numeric_limits<T>::epsilon() / 32;
  const std::int64_t items = batch_->items, rows = batch_->sets * items;
  active_.priorities.clear();
  active_.classes.clear();
  for (auto* buffer : {&active_.item1, &active_.ditem1, &active_.ditem2}) grow(*buffer, rows * kStride);
  std::int64_t count = 0;
  T largest = 0;  // |dlogit| of the set
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t set = row / items;
    const T* dlogits = dlogits_.data() + set * items;
    if (row % items == 0) {
      largest = 0;
      for (std::int64_t i = 0; i < items; ++i) largest = std::max(largest, std::abs(dlogits[i]));
    }
    const T weight = weights_[static_cast<std::size_t>(row)], dlogit = dlogits[row % items];
    if (weight <= kVanishes && std::abs(dlogit) <= kVanishes * largest) continue;
    T* ditem2 = active_.ditem2.data() + count++ * kStride;
    kernels_.combine(weight, dpooled_.data() + set * kStride, dlogit, key_direction_.data() + set * kStride,
                     kWidth, ditem2);
    kernels_.gelu_backward(item2_.data() + row * kStride, kWidth, ditem2);
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
  dense_backward(kItem2, active_.item1.data(), active_.ditem2.data(), count, gradients,
                 active_.ditem1.data());
  T* dkernel = gradients + first.kernel;
  std::fill_n(dkernel, first.bias - first.kernel, T(0));
  kernels_.first_layer_backward(layer, active_.ditem1.data(), kStride, dkernel, dkernel + kWidth);
  std::fill_n(gradients + first.bias, kWidth, T(0));
  kernels_.add_rows(dkernel + kWidth, kWidth, kClasses, kWidth, nullptr, gradients + first.bias);
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
