// whet for JAX: the handlers that XLA calls on a CPU, from threads of its own and without Python.
//
// All have one signature: operands, results and attributes, of which two name the others in their order, as
// in operands = "query,key,value,bias" and results = "out,saved". python/whet/jax checks what a user gives;
// what comes here wrong all the same is for whet to refuse.
//
// vmap puts an axis in front of every array (JAX's "expand_dims"), of size 1 where an operand doesn't vary.
// So all arrays of a call have the same number of leading axes, and an operand is broadcast along those where
// it has size 1: that is a stride of 0, never a copy.

#include <whet/attention.h>
#include <whet/error.h>
#include <whet/linear_attention.h>
#include <whet/softmax.h>
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"

namespace whet_python {

namespace {

namespace nb = nanobind;
namespace ffi = xla::ffi;
using std::int64_t;

// ---- A call

struct Array {
  std::string_view name;
  std::byte* data;
  ffi::DataType type;
  std::span<const int64_t> sizes;

  int64_t size_from_end(std::size_t i) const { return sizes[sizes.size() - i]; }
  int64_t elements() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }
  std::byte* at(int64_t element) const { return data + element * int64_t(ffi::ByteWidth(type)); }
};

whet::DType dtype_of(const Array& array) {
  switch (array.type) {
    case ffi::DataType::F32:
      return whet::DType::f32;
    case ffi::DataType::F64:
      return whet::DType::f64;
    case ffi::DataType::BF16:
      return whet::DType::bf16;
    case ffi::DataType::F16:
      return whet::DType::f16;
    case ffi::DataType::PRED:
      return whet::DType::boolean;
    default:
      throw whet::Error(std::string(array.name) + ": no element type that whet knows");
  }
}

std::vector<std::string_view> split(std::string_view text, char mark) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; !text.empty(); text.remove_prefix(std::min(end + 1, text.size()))) {
    end = std::min(text.find(mark), text.size());
    parts.push_back(text.substr(0, end));
  }
  return parts;
}

class Call {
 public:
  Call(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
       const ffi::Dictionary& attributes)
      : attributes_(attributes) {
    std::size_t i = 0;
    for (const auto name : split(attribute<std::string_view>("operands"), ',')) {
      add(name, operands.get<ffi::AnyBuffer>(i++).value());
    }
    i = 0;
    for (const auto name : split(attribute<std::string_view>("results"), ',')) {
      add(name, **results.get<ffi::AnyBuffer>(i++));
    }
  }

  std::span<const Array> arrays() const { return arrays_; }

  // The index of an array in arrays(); -1 if the call doesn't have it.
  std::ptrdiff_t index(std::string_view name) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      if (arrays_[i].name == name) return std::ptrdiff_t(i);
    }
    return -1;
  }

  const Array* find(std::string_view name) const {
    const std::ptrdiff_t i = index(name);
    return i < 0 ? nullptr : &arrays_[std::size_t(i)];
  }

  template <typename T>
  T attribute(std::string_view name) const {
    const ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_error()) throw whet::Error(std::string(name) + ": no such attribute of this type");
    return *value;
  }

  whet::BetaGradient beta_gradient() const {
    return attribute<bool>("hold_beta") ? whet::BetaGradient::held : whet::BetaGradient::through_rule;
  }

 private:
  void add(std::string_view name, const ffi::AnyBuffer& buffer) {
    const auto sizes = buffer.dimensions();
    arrays_.push_back({name,
                       static_cast<std::byte*>(buffer.untyped_data()),
                       buffer.element_type(),
                       {sizes.begin(), sizes.size()}});
  }

  const ffi::Dictionary& attributes_;
  std::vector<Array> arrays_;
};

// ---- Axes that several arrays share

struct Axis {
  int64_t size;
  std::vector<int64_t> steps;  // from element to element, of each array of the call; 0 where it doesn't vary
};

// The axes of `arrays`, each broadcast to the largest. `own` axes at the end of an array, one number each,
// don't count.
std::vector<Axis> shared_axes(std::span<const Array> arrays, std::span<const std::size_t> own) {
  std::vector<Axis> axes(arrays[0].sizes.size() - own[0], {1, std::vector<int64_t>(arrays.size())});
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    int64_t step = 1;
    for (std::size_t i = arrays[a].sizes.size(); i-- > 0;) {
      const int64_t size = arrays[a].sizes[i];
      if (i < axes.size() && size != 1) {
        axes[i].size = size;
        axes[i].steps[a] = step;
      }
      step *= size;
    }
  }
  return axes;
}

// True if all arrays go through `outer` and `inner` as through one axis.
bool are_one(const Axis& outer, const Axis& inner) {
  for (std::size_t a = 0; a < outer.steps.size(); ++a) {
    if (outer.steps[a] != inner.steps[a] * inner.size) return false;
  }
  return true;
}

// The same axes, fewer of them: none of size 1, and neighbours made one where they can be.
std::vector<Axis> merged(std::span<const Axis> axes) {
  std::vector<Axis> result;
  for (const Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (!result.empty() && are_one(result.back(), axis)) {
      result.back() = {result.back().size * axis.size, axis.steps};
    } else {
      result.push_back(axis);
    }
  }
  return result;
}

// Goes through axes, one call of whet for each of their positions, and keeps where each array is.
class Walk {
 public:
  Walk(std::vector<Axis> axes, std::size_t arrays) : axes_(std::move(axes)), at_(arrays) {}

  // The offset of an array, in elements.
  int64_t at(std::size_t array) const { return at_[array]; }

  int64_t positions() const {
    int64_t all = 1;
    for (const Axis& axis : axes_) all *= axis.size;
    return all;
  }

  template <typename Function>
  void for_each(const Function& function, std::size_t depth = 0) {
    if (depth == axes_.size()) {
      function();
      return;
    }
    const Axis& axis = axes_[depth];
    for (int64_t i = 0; i < axis.size; ++i) {
      for_each(function, depth + 1);
      for (std::size_t a = 0; a < at_.size(); ++a) at_[a] += axis.steps[a];
    }
    for (std::size_t a = 0; a < at_.size(); ++a) at_[a] -= axis.size * axis.steps[a];
  }

 private:
  std::vector<Axis> axes_;
  std::vector<int64_t> at_;
};

// ---- The alpha of entmax, where it is an operand

// The normalizer of a call of whet, the element `offset` of alpha being its parameter.
whet::Normalizer normalizer_of(const Call& call, int64_t offset) {
  const Array* alpha = call.find("alpha");
  if (!alpha) return whet::Normalizer::parse(call.attribute<std::string_view>("normalizer"));
  const std::byte* at = alpha->at(offset);
  const bool wide = dtype_of(*alpha) == whet::DType::f64;
  const double value = wide ? *reinterpret_cast<const double*>(at) : *reinterpret_cast<const float*>(at);
  char text[32];
  const std::string number(text, std::to_chars(text, std::end(text), value).ptr);
  if (!(value > 1 && value <= 4)) {
    throw whet::Error("alpha: is " + number + ", must be above 1 and at most 4");
  }
  return whet::Normalizer::parse("entmax:" + number);
}

// The gradient to alpha: sums of as many rows each. Without the result "dalpha" no rows are wanted.
class AlphaResult {
 public:
  explicit AlphaResult(const Call& call) : dalpha_(call.find("dalpha")) {}

  // Where the gradient of each of so many rows belongs.
  std::span<double> rows(int64_t count) {
    if (dalpha_) rows_.assign(std::size_t(count), 0);
    return rows_;
  }

  // Writes so many sums, from the element `offset` on.
  void write(int64_t offset, int64_t sums) const {
    if (!dalpha_ || sums == 0) return;
    const std::size_t each = rows_.size() / std::size_t(sums);
    for (std::size_t i = 0; i < std::size_t(sums); ++i) {
      const auto own = std::span(rows_).subspan(i * each, each);
      const double sum = std::accumulate(own.begin(), own.end(), 0.0);
      std::byte* at = dalpha_->at(offset + int64_t(i));
      if (dtype_of(*dalpha_) == whet::DType::f64) {
        *reinterpret_cast<double*>(at) = sum;
      } else {
        *reinterpret_cast<float*>(at) = float(sum);
      }
    }
  }

 private:
  const Array* dalpha_;
  std::vector<double> rows_;
};

// ---- Statistics

// The result "stats": float64, a type that JAX has only with jax_enable_x64, or rounded to float32.
class StatsResult {
 public:
  StatsResult(const Call& call, std::size_t rows) : stats_(call.find("stats")) {
    if (stats_ && stats_->type == ffi::DataType::F64) {
      buffer_ = {reinterpret_cast<whet::RowStats*>(stats_->data), rows};
    } else if (stats_) {
      own_.resize(rows);
      buffer_ = own_;
    }
  }

  // The buffer for the next so many rows; empty if the call doesn't have the result.
  std::span<whet::RowStats> next(std::size_t rows) {
    const auto part = buffer_.empty() ? buffer_ : buffer_.subspan(used_, rows);
    used_ += rows;
    return part;
  }

  void finish() const {
    if (own_.empty()) return;
    const double* from = &own_[0].count;
    std::transform(from, from + own_.size() * kFields, reinterpret_cast<float*>(stats_->data),
                   [](double value) { return float(value); });
  }

 private:
  static constexpr std::size_t kFields = sizeof(whet::RowStats) / sizeof(double);

  const Array* stats_;
  std::vector<whet::RowStats> own_;
  std::span<whet::RowStats> buffer_;
  std::size_t used_ = 0;
};

// ---- Rows

// The arrays of a call that have the shape of x, with their axes merged around that of the rows. alpha has
// those axes only that vmap put in front of x, which are walked through if it varies.
class Rows {
 public:
  explicit Rows(const Call& call) : Rows(call, arrays_of(call)) {}

  int axis() const { return int(axis_); }

  // Of the current position; all positions have as many.
  int64_t rows() const {
    int64_t rows = 1;
    for (std::size_t i = 0; i < axes_.size(); ++i) rows *= i == axis_ ? 1 : axes_[i].size;
    return rows;
  }

  int64_t positions() const { return walk_.positions(); }
  int64_t all_rows() const { return positions() * rows(); }

  // Calls function(number of the position) for each.
  template <typename Function>
  void for_each(const Function& function) {
    int64_t position = 0;
    walk_.for_each([&] { function(position++); });
  }

  whet::View view(std::string_view name) const {
    const std::ptrdiff_t a = index(name);
    if (a < 0) return {};
    std::vector<int64_t> sizes, steps;
    for (const Axis& axis : axes_) {
      sizes.push_back(axis.size);
      steps.push_back(axis.steps[std::size_t(a)]);
    }
    const Array& array = arrays_[std::size_t(a)];
    return {array.at(offset(a)), dtype_of(array), whet::Dims(std::span<const int64_t>(sizes)),
            whet::Dims(std::span<const int64_t>(steps))};
  }

  whet::SoftmaxOptions options(const Call& call) const {
    const std::ptrdiff_t alpha = index("alpha");
    return {.rule = whet::Rule::parse(call.attribute<std::string_view>("rule")),
            .normalizer = normalizer_of(call, alpha < 0 ? 0 : offset(alpha)),
            .axis = axis(),
            .mask = view("where")};
  }

 private:
  static std::vector<Array> arrays_of(const Call& call) {
    std::vector<Array> arrays;
    for (const Array& array : call.arrays()) {
      if (array.name != "stats" && array.name != "saved" && array.name != "dalpha") arrays.push_back(array);
    }
    return arrays;
  }

  static std::size_t walked_axes(const Call& call) {
    const Array* alpha = call.find("alpha");
    return alpha && alpha->elements() != 1 ? alpha->sizes.size() : 0;
  }

  Rows(const Call& call, std::vector<Array> arrays)
      : Rows(call, arrays, shared_axes(arrays, std::vector<std::size_t>(arrays.size(), 0))) {}

  Rows(const Call& call, std::vector<Array> arrays, const std::vector<Axis>& all)
      : arrays_(std::move(arrays)),
        walk_({all.begin(), all.begin() + std::ptrdiff_t(walked_axes(call))}, arrays_.size()) {
    const std::size_t walked = walked_axes(call);
    const auto axis = std::size_t(int64_t(all.size()) + call.attribute<int64_t>("axis"));
    axes_ = merged(std::span(all).subspan(walked, axis - walked));
    axis_ = axes_.size();
    axes_.push_back(all[axis]);
    for (const Axis& after : merged(std::span(all).subspan(axis + 1))) axes_.push_back(after);
  }

  std::ptrdiff_t index(std::string_view name) const {
    const auto found = std::ranges::find(arrays_, name, &Array::name);
    return found == arrays_.end() ? -1 : found - arrays_.begin();
  }
  int64_t offset(std::ptrdiff_t a) const { return walk_.at(std::size_t(a)); }

  std::vector<Array> arrays_;
  Walk walk_;
  std::vector<Axis> axes_;
  std::size_t axis_ = 0;
};

// What is saved of the rows of a position. Without data if the call doesn't have it, or has it of fewer rows:
// under vmap there may be many gradients of one softmax, for which it is found again.
whet::View saved_view(const Call& call, const Rows& rows, int64_t position) {
  const Array* saved = call.find("saved");
  if (!saved) return {};
  const int64_t size = saved->size_from_end(1);
  if (saved->elements() != rows.all_rows() * size) return {};
  return {saved->at(position * rows.rows() * size), dtype_of(*saved), {rows.rows(), size}};
}

void softmax(const Call& call) {
  Rows rows(call);
  StatsResult stats(call, std::size_t(rows.all_rows()));
  rows.for_each([&](int64_t position) {
    whet::softmax(rows.view("x"), rows.view("out"), rows.options(call),
                  {.stats = stats.next(std::size_t(rows.rows())), .saved = saved_view(call, rows, position)});
  });
  stats.finish();
}

void softmax_backward(const Call& call) {
  Rows rows(call);
  AlphaResult dalpha(call);
  const Array* result = call.find("dalpha");
  const int64_t sums = result ? result->elements() / std::max<int64_t>(rows.positions(), 1) : 0;
  rows.for_each([&](int64_t position) {
    whet::softmax_backward(rows.view("x"), rows.view("dout"), rows.view("dx"), rows.options(call),
                           {.beta_gradient = call.beta_gradient(),
                            .saved = saved_view(call, rows, position),
                            .dparameter = dalpha.rows(rows.rows())});
    dalpha.write(position * sums, sums);
  });
}

// ---- Attention

// How many axes a batch entry of an array has.
std::size_t own_axes(const Array& array) {
  constexpr std::pair<std::string_view, std::size_t> kNot3[] = {
      {"query_lengths", 0}, {"key_lengths", 0}, {"sinks", 1},       {"dsinks", 1},
      {"query_starts", 1},  {"key_starts", 1},  {"column_sums", 2}, {"query_scale", 2},
      {"dquery_scale", 2},  {"alpha", 1},       {"dalpha", 1}};
  for (const auto& [name, axes] : kNot3) {
    if (array.name == name) return axes;
  }
  return 3;
}

// The leading axes of an attention call. whet takes one, the batch; others that can't be merged with it are
// walked through, one call of whet each.
class Batch {
 public:
  explicit Batch(const Call& call)
      : call_(call), entries_{1, std::vector<int64_t>(call.arrays().size())}, walk_({}, 0) {
    std::vector<std::size_t> own;
    for (const Array& array : call.arrays()) own.push_back(own_axes(array));
    std::vector<Axis> axes = merged(shared_axes(call.arrays(), own));
    if (!axes.empty() && whet_takes(axes.back())) {
      entries_ = axes.back();
      axes.pop_back();
    }
    walk_ = Walk(std::move(axes), call.arrays().size());
  }

  int64_t entries() const { return entries_.size; }
  int64_t all_entries() const { return entries_.size * walk_.positions(); }

  template <typename Function>
  void for_each(const Function& function) {
    walk_.for_each(function);
  }

  // (B, N, H, D) as whet wants it, (B, H, N, D); without data if the call doesn't have it.
  whet::View heads_last(std::string_view name) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t n = array.size_from_end(3), h = array.size_from_end(2), d = array.size_from_end(1);
    return {here(a), dtype_of(array), {entries_.size, h, n, d}, {step(a), d, h * d, 1}};
  }

  // (B, H, N, M), of which any may be 1. A gradient that all entries share has one entry, and so must have
  // what it is the gradient of.
  whet::View heads_first(std::string_view name, std::string_view gradient = "") const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t h = array.size_from_end(3), n = array.size_from_end(2), m = array.size_from_end(1);
    return {here(a), dtype_of(array), {entries_with(gradient), h, n, m}, {step(a), n * m, m, 1}};
  }

  // (B, N, H) as whet wants it, (B, H, N), of which any may be 1; a gradient as in heads_first.
  whet::View rows_of_heads(std::string_view name, std::string_view gradient = "") const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t n = array.size_from_end(2), h = array.size_from_end(1);
    return {here(a), dtype_of(array), {entries_with(gradient), h, n}, {step(a), 1, h}};
  }

  whet::View heads(std::string_view name) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    return {here(a), dtype_of(array), {array.size_from_end(1)}};
  }

  // One integer per entry, kept within [0, most]; `most` if the call doesn't have them.
  int64_t length(std::string_view name, int64_t entry, int64_t most) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return most;
    const int64_t value = *reinterpret_cast<const std::int32_t*>(
        call_.arrays()[std::size_t(a)].at(offset(a) + entry * step(a)));
    return std::clamp<int64_t>(value, 0, most);
  }

  // Integers that all entries share; none if the call doesn't have them.
  std::vector<int64_t> integers(std::string_view name) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const auto* first = reinterpret_cast<const std::int32_t*>(here(a));
    return {first, first + call_.arrays()[std::size_t(a)].size_from_end(1)};
  }

  whet::Normalizer normalizer() const {
    const std::ptrdiff_t alpha = call_.index("alpha");
    return normalizer_of(call_, alpha < 0 ? 0 : offset(alpha));
  }

  // The gradient to alpha of the current entries: one number each, or one for all.
  void write(const AlphaResult& dalpha) const {
    const std::ptrdiff_t a = call_.index("dalpha");
    if (a >= 0) dalpha.write(offset(a), step(a) == 0 ? 1 : entries_.size);
  }

  // The elements of a result that belong to the current entries; it must be there.
  template <typename T>
  T* result(std::string_view name) const {
    return reinterpret_cast<T*>(here(call_.index(name)));
  }

  // What is saved of the rows of the current entries; without data if the call doesn't have it.
  whet::View saved(std::size_t rows) const {
    const std::ptrdiff_t a = call_.index("saved");
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    return {here(a), dtype_of(array), {int64_t(rows), array.size_from_end(1)}};
  }

 private:
  int64_t entries_with(std::string_view gradient) const {
    const std::ptrdiff_t g = call_.index(gradient);
    return g >= 0 && step(g) == 0 ? 1 : entries_.size;
  }
  int64_t step(std::ptrdiff_t a) const { return entries_.steps[std::size_t(a)]; }
  int64_t offset(std::ptrdiff_t a) const { return walk_.at(std::size_t(a)); }
  std::byte* here(std::ptrdiff_t a) const { return call_.arrays()[std::size_t(a)].at(offset(a)); }

  // All entries of whet's batch share what has one axis (sinks, alpha; not dalpha, which is summed here), no
  // two share what is saved of a row, and packed sequences are a batch of one.
  bool whet_takes(const Axis& axis) const {
    for (std::size_t a = 0; a < axis.steps.size(); ++a) {
      const Array& array = call_.arrays()[a];
      if (own_axes(array) == 1 && array.name != "dalpha" && axis.steps[a] != 0) return false;
      if (array.name == "saved" && axis.steps[a] == 0) return false;
      if (array.name == "query_starts") return false;
    }
    return true;
  }

  const Call& call_;
  Axis entries_;
  Walk walk_;
};

// What a call of attention says for all its entries.
struct AttentionSettings {
  explicit AttentionSettings(const Call& call) {
    for (const auto name : split(call.attribute<std::string_view>("rules"), ';')) {
      rules.push_back(whet::Rule::parse(name));
    }
    options.scale = call.attribute<double>("scale");
    options.softcap = call.attribute<double>("softcap");
    options.causal = call.attribute<bool>("causal");
    options.window_left = call.attribute<int64_t>("window_left");
    options.window_right = call.attribute<int64_t>("window_right");
    if (rules.size() == 1) {
      options.rule = rules[0];
    } else {
      options.head_rules = rules;
    }
  }

  std::vector<whet::Rule> rules;
  whet::AttentionOptions options{};
};

// A query at or after its sequence's end sees nothing, so lengths of queries make lengths of rows.
std::vector<int64_t> lengths_of(const Call& call, const Batch& batch, int64_t heads, int64_t queries,
                                int64_t keys) {
  std::vector<int64_t> lengths;
  const bool by_row = call.find("query_lengths");
  if (!by_row && !call.find("key_lengths")) return lengths;
  for (int64_t b = 0; b < batch.entries(); ++b) {
    const int64_t length = batch.length("key_lengths", b, keys);
    if (!by_row) {
      lengths.push_back(length);
      continue;
    }
    const int64_t visible = batch.length("query_lengths", b, queries);
    for (int64_t row = 0; row < heads * queries; ++row)
      lengths.push_back(row % queries < visible ? length : 0);
  }
  return lengths;
}

// Calls function(views of q, k, v, their options, number of rows) for each part of the batch.
template <typename Function>
void for_each_part(const Call& call, Batch& batch, const Function& function) {
  const AttentionSettings settings(call);
  batch.for_each([&] {
    const whet::View q = batch.heads_last("query"), k = batch.heads_last("key"),
                     v = batch.heads_last("value");
    const int64_t heads = q.sizes[1], queries = q.sizes[2], keys = k.sizes[2];
    const std::vector<int64_t> lengths = lengths_of(call, batch, heads, queries, keys);
    const std::vector<int64_t> query_starts = batch.integers("query_starts");
    const std::vector<int64_t> key_starts = batch.integers("key_starts");
    whet::AttentionOptions options = settings.options;
    options.normalizer = batch.normalizer();
    options.bias = batch.heads_first("bias", "dbias");
    options.mask = batch.heads_first("mask");
    options.query_scale = batch.rows_of_heads("query_scale", "dquery_scale");
    options.sinks = batch.heads("sinks");
    options.lengths = lengths;
    options.query_starts = query_starts;
    options.key_starts = key_starts;
    function(q, k, v, options, std::size_t(batch.entries() * heads * queries));
  });
}

// Optional outputs of attention beside stats, in types that JAX has without jax_enable_x64.
class OptionalResults {
 public:
  explicit OptionalResults(const Call& call)
      : top_(call.find("top_keys")),
        sums_(call.find("column_sums")),
        top_k_(top_ ? top_->size_from_end(1) : 0) {}

  void add_to(whet::AttentionOutputs& outputs, const Batch& batch, std::size_t rows, int64_t keys) {
    if (top_) {
      top_keys_.resize(rows * std::size_t(top_k_));
      outputs.top_k = top_k_;
      outputs.top_keys = top_keys_;
      outputs.top_weights = {batch.result<float>("top_weights"), top_keys_.size()};
    }
    if (sums_) {
      column_sums_.resize(std::size_t(batch.entries() * sums_->size_from_end(2) * keys));
      outputs.column_sums = column_sums_;
    }
  }

  void finish(const Batch& batch) const {
    if (top_) std::ranges::copy(top_keys_, batch.result<std::int32_t>("top_keys"));
    if (sums_ && sums_->type == ffi::DataType::F64) {
      std::ranges::copy(column_sums_, batch.result<double>("column_sums"));
    } else if (sums_) {
      std::ranges::transform(column_sums_, batch.result<float>("column_sums"),
                             [](double value) { return float(value); });
    }
  }

 private:
  const Array* top_;
  const Array* sums_;
  int64_t top_k_;
  std::vector<int64_t> top_keys_;
  std::vector<double> column_sums_;
};

void attention(const Call& call) {
  Batch batch(call);
  const Array& query = *call.find("query");
  const int64_t rows = batch.all_entries() * query.size_from_end(3) * query.size_from_end(2);
  StatsResult stats(call, std::size_t(rows));
  OptionalResults optional(call);
  for_each_part(call, batch, [&](auto q, auto k, auto v, auto& options, std::size_t part) {
    whet::AttentionOutputs outputs{.stats = stats.next(part), .saved = batch.saved(part)};
    optional.add_to(outputs, batch, part, k.sizes[2]);
    whet::attention(q, k, v, batch.heads_last("out"), options, outputs);
    optional.finish(batch);
  });
  stats.finish();
}

void attention_backward(const Call& call) {
  Batch batch(call);
  AlphaResult dalpha(call);
  for_each_part(call, batch, [&](auto q, auto k, auto v, auto& options, std::size_t part) {
    whet::attention_backward(q, k, v, batch.heads_last("dout"),
                             {.dq = batch.heads_last("dquery"),
                              .dk = batch.heads_last("dkey"),
                              .dv = batch.heads_last("dvalue"),
                              .dbias = batch.heads_first("dbias", "dbias"),
                              .dsinks = batch.heads("dsinks"),
                              .dquery_scale = batch.rows_of_heads("dquery_scale", "dquery_scale"),
                              .dparameter = dalpha.rows(int64_t(part))},
                             options, {.beta_gradient = call.beta_gradient(), .saved = batch.saved(part)});
    batch.write(dalpha);
  });
}

// ---- Linear attention

// Calls function(views of q, k, v, their options) for each part of the batch.
template <typename Function>
void for_each_linear_part(const Call& call, Batch& batch, const Function& function) {
  batch.for_each([&] {
    const whet::View q = batch.heads_last("query"), k = batch.heads_last("key"),
                     v = batch.heads_last("value");
    const std::vector<int64_t> lengths = lengths_of(call, batch, q.sizes[1], q.sizes[2], k.sizes[2]);
    function(q, k, v,
             whet::LinearAttentionOptions{.causal = call.attribute<bool>("causal"), .lengths = lengths});
  });
}

void linear_attention(const Call& call) {
  Batch batch(call);
  for_each_linear_part(call, batch, [&](auto q, auto k, auto v, const auto& options) {
    whet::linear_attention(q, k, v, batch.heads_last("out"), options);
  });
}

void linear_attention_backward(const Call& call) {
  Batch batch(call);
  for_each_linear_part(call, batch, [&](auto q, auto k, auto v, const auto& options) {
    whet::linear_attention_backward(
        q, k, v, batch.heads_last("dout"),
        {.dq = batch.heads_last("dquery"), .dk = batch.heads_last("dkey"), .dv = batch.heads_last("dvalue")},
        options);
  });
}

// What a GPU's program calls in place of the above: arrays there are out of reach.
void refuse(const Call&) {
  throw whet::Error("whet.jax runs on CPUs only; put its arrays on jax.devices('cpu')");
}

// ---- Handlers

template <void function(const Call&)>
ffi::Error guarded(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  try {
    function(Call(operands, results, attributes));
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return {ffi::ErrorCode::kResourceExhausted, "whet: out of memory"};
  } catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(error.what());
  }
}

template <void function(const Call&)>
nb::capsule handler() {
  XLA_FFI_DEFINE_HANDLER(entry, guarded<function>,
                         ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());
  return nb::capsule(reinterpret_cast<void*>(entry));
}

}  // namespace

void add_jax(nb::module_& module) {
  module.attr("_jax_api_minor") = XLA_FFI_API_MINOR;
  module.def("_jax_handlers", [] {
    nb::dict handlers;
    handlers["whet_softmax"] = handler<softmax>();
    handlers["whet_softmax_backward"] = handler<softmax_backward>();
    handlers["whet_attention"] = handler<attention>();
    handlers["whet_attention_backward"] = handler<attention_backward>();
    handlers["whet_linear_attention"] = handler<linear_attention>();
    handlers["whet_linear_attention_backward"] = handler<linear_attention_backward>();
    handlers["whet_refuse"] = handler<refuse>();
    return handlers;
  });
}

}  // namespace whet_python
