// Random problems of attention, tensors laid out in every way a view can describe, and calls of the library
// with what the oracle was given.
#ifndef WHET_TESTS_ATTENTION_CASES_H_
#define WHET_TESTS_ATTENTION_CASES_H_

#include <whet/whet.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention_oracle.h"
#include "cases.h"

namespace whet {

// ---- Elements ----

inline std::size_t bytes_of(DType type) {
  switch (type) {
    case DType::f32:
      return sizeof(float);
    case DType::f64:
      return sizeof(double);
    case DType::bf16:
    case DType::f16:
      return sizeof(std::uint16_t);
    case DType::boolean:
      return sizeof(bool);
  }
  return 0;
}

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
T get(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(DType type, std::byte* to, double value) {
  switch (type) {
    case DType::f32:
      return put(to, static_cast<float>(value));
    case DType::f64:
      return put(to, value);
    case DType::bf16:
      return put(to, to_storage(static_cast<float>(value), bf16{}));
    case DType::f16:
      return put(to, to_storage(static_cast<float>(value), f16{}));
    case DType::boolean:
      return put(to, value != 0);
  }
}

inline double load(DType type, const std::byte* from) {
  switch (type) {
    case DType::f32:
      return get<float>(from);
    case DType::f64:
      return get<double>(from);
    case DType::bf16:
      return to_float(get<bf16>(from));
    case DType::f16:
      return to_float(get<f16>(from));
    case DType::boolean:
      return get<bool>(from) ? 1 : 0;
  }
  return kNaN;
}

// The value a tensor of this type holds when it is given `value`.
inline double rounded(DType type, double value) {
  std::byte element[sizeof(double)];
  store(type, element, value);
  return load(type, element);
}

inline DType arithmetic_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

// ---- Tensors ----

// Where the elements of a tensor lie.
struct Layout {
  std::vector<std::size_t> order = {};      // axes, slowest first; empty: in their own order
  std::int64_t spacing = 1;                 // stride of the fastest axis
  std::int64_t padding = 0;                 // elements left out after each run of an axis
  std::vector<std::size_t> backwards = {};  // axes with a negative stride
  std::size_t offset = 0;                   // elements before the first: alignment
};

// A tensor in a buffer of its own. Elements of the buffer that aren't its own hold NaN (true, if boolean),
// which an input must not show and an output must not lose.
class Placed {
 public:
  Placed() = default;  // not given
  Placed(DType type, std::vector<std::int64_t> sizes, const Layout& layout = {})
      : type_(type), sizes_(std::move(sizes)), strides_(sizes_.size()) {
    std::vector<std::size_t> order = layout.order;
    for (std::size_t a = 0; layout.order.empty() && a < sizes_.size(); ++a) order.push_back(a);
    std::int64_t step = layout.spacing;
    std::int64_t origin = static_cast<std::int64_t>(layout.offset);
    for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
      const bool backwards = std::ranges::find(layout.backwards, *axis) != layout.backwards.end();
      const std::int64_t size = std::max<std::int64_t>(sizes_[*axis], 1);
      strides_[*axis] = backwards ? -step : step;
      if (backwards) origin += step * (size - 1);
      step = step * size + layout.padding;
    }
    origin_ = static_cast<std::size_t>(origin);
    elements_ = static_cast<std::size_t>(step) + layout.offset + 1;
    buffer_ = std::make_unique<std::byte[]>(elements_ * bytes_of(type_));
    fill(kNaN);
  }
  Placed(DType type, const oracle::Array& array, const Layout& layout = {})
      : Placed(type, array.sizes, layout) {
    set(array.values);
  }

  DType type() const { return type_; }
  const std::vector<std::int64_t>& sizes() const { return sizes_; }
  View view() {
    if (!buffer_) return {};
    return {buffer_.get() + origin_ * bytes_of(type_), type_, Dims(std::span<const std::int64_t>(sizes_)),
            Dims(std::span<const std::int64_t>(strides_))};
  }

  // In row-major order.
  void set(const std::vector<double>& values) {
    const std::vector<std::size_t> own = positions();
    for (std::size_t n = 0; n < own.size(); ++n) store(type_, element(own[n]), values[n]);
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (std::size_t at : positions()) all.push_back(load(type_, element(at)));
    return all;
  }
  // Everything, gaps too.
  void fill(double value) {
    for (std::size_t at = 0; at < elements_; ++at) store(type_, element(at), value);
  }
  bool gaps_are_intact() const {
    std::vector<bool> own(elements_, false);
    for (std::size_t at : positions()) own[at] = true;
    for (std::size_t at = 0; at < elements_; ++at) {
      const double value = load(type_, element(at));
      if (!own[at] && !(value != value)) return false;
    }
    return true;
  }
  std::vector<std::byte> bits() const { return {buffer_.get(), buffer_.get() + elements_ * bytes_of(type_)}; }

 private:
  std::byte* element(std::size_t at) const { return buffer_.get() + at * bytes_of(type_); }

  std::vector<std::size_t> positions() const {
    std::vector<std::int64_t> at = {static_cast<std::int64_t>(origin_)};
    for (std::size_t a = 0; a < sizes_.size(); ++a) {
      std::vector<std::int64_t> next;
      for (std::int64_t from : at) {
        for (std::int64_t i = 0; i < sizes_[a]; ++i) next.push_back(from + i * strides_[a]);
      }
      at = std::move(next);
    }
    return {at.begin(), at.end()};
  }

  DType type_ = DType::f32;
  std::vector<std::int64_t> sizes_ = {};
  std::vector<std::int64_t> strides_ = {};
  std::size_t origin_ = 0;
  std::size_t elements_ = 0;
  std::unique_ptr<std::byte[]> buffer_ = {};
};

// ---- Problems ----

struct Shape {
  std::int64_t B = 1, H = 1, K = 1, N = 1, M = 1, D = 1, E = 1;
};

inline oracle::Array draw_array(Random& random, std::vector<std::int64_t> sizes, DType type, double sd = 1) {
  std::int64_t count = 1;
  for (std::int64_t size : sizes) count *= size;
  oracle::Array array{std::move(sizes), std::vector<double>(static_cast<std::size_t>(count))};
  for (double& value : array.values) value = rounded(type, gaussian(random, sd));
  return array;
}

// true with probability `visible`.
inline oracle::Array draw_mask(Random& random, std::vector<std::int64_t> sizes, double visible = 0.7) {
  oracle::Array mask = draw_array(random, std::move(sizes), DType::f64);
  std::bernoulli_distribution flip(visible);
  for (double& value : mask.values) value = flip(random) ? 1 : 0;
  return mask;
}

// No options yet. Logits have a standard deviation of about `sharpness`.
inline oracle::Attention draw_problem(Random& random, const Shape& s, DType type, double sharpness = 1) {
  oracle::Attention p;
  p.B = s.B, p.H = s.H, p.K = s.K, p.N = s.N, p.M = s.M, p.D = s.D, p.E = s.E;
  p.q = draw_array(random, {s.B, s.H, s.N, s.D}, type, sharpness);
  p.k = draw_array(random, {s.B, s.K, s.M, s.D}, type);
  p.v = draw_array(random, {s.B, s.K, s.M, s.E}, type);
  p.dout = draw_array(random, {s.B, s.H, s.N, s.E}, type);
  return p;
}

inline Rule library_rule(const oracle::Rule& rule) {
  switch (rule.kind) {
    case Rule::Kind::none:
      return Rule::none();
    case Rule::Kind::fixed:
      return Rule::fixed(rule.parameter);
    case Rule::Kind::paper:
      return Rule::paper();
    case Rule::Kind::polynomial:
      return Rule::polynomial(rule.coefficients, rule.gate, rule.hold);
    case Rule::Kind::log_length:
      return Rule::log_length(rule.parameter, rule.factor);
    case Rule::Kind::ssmax:
      return Rule::ssmax(rule.parameter);
    case Rule::Kind::log_power:
      return Rule::log_power(rule.parameter, rule.factor, rule.exponent);
    case Rule::Kind::llama4:
      return Rule::llama4(rule.parameter, rule.factor);
    case Rule::Kind::target_entropy:
      return Rule::target_entropy(rule.parameter);
    case Rule::Kind::target_peak:
      return Rule::target_peak(rule.parameter);
  }
  return {};
}

// One option, or several that meet, set on a problem. `side` is the type of side arrays.
struct OptionCase {
  std::string name;
  void (*set)(oracle::Attention& p, Random& random, DType side);
};

// Every option that changes what is computed, away from its default. For problems of 4 query heads,
// N, M >= 8 and B > 1, but for those named "packed": B = 1.
inline std::vector<OptionCase> option_cases() {
  using P = oracle::Attention;
  return {
      {"scale", [](P& p, Random&, DType) { p.scale = 0.37; }},
      {"query_scale",
       [](P& p, Random& random, DType side) {
         p.query_scale = draw_array(random, {p.B, p.H, p.N}, side);
       }},
      {"query_scale of a head, with scale",
       [](P& p, Random& random, DType side) {
         p.query_scale = draw_array(random, {1, p.H, 1}, side);
         p.scale = -0.6;
       }},
      {"softcap", [](P& p, Random&, DType) { p.softcap = 1.25; }},
      {"bias",
       [](P& p, Random& random, DType side) {
         p.bias = draw_array(random, {p.B, p.H, p.N, p.M}, side);
       }},
      {"bias of head and key, with softcap",
       [](P& p, Random& random, DType side) {
         p.bias = draw_array(random, {1, p.H, 1, p.M}, side);
         p.softcap = 3;
       }},
      {"bias of a query",
       [](P& p, Random& random, DType side) {
         p.bias = draw_array(random, {p.B, 1, p.N, 1}, side);
       }},
      {"bias with -inf, also for a whole row",
       [](P& p, Random& random, DType side) {
         p.bias = draw_array(random, {p.B, 1, p.N, p.M}, side);
         for (std::size_t n = 0; n < p.bias.values.size(); ++n) {
           if (n % 3 == 0 || n < static_cast<std::size_t>(p.M)) p.bias.values[n] = -kInfinity;
         }
       }},
      {"mask",
       [](P& p, Random& random, DType) {
         p.mask = draw_mask(random, {p.B, p.H, p.N, p.M});
       }},
      {"mask of query and key, one row hidden",
       [](P& p, Random& random, DType) {
         p.mask = draw_mask(random, {1, 1, p.N, p.M}, 0.3);
         for (std::int64_t j = 0; j < p.M; ++j) p.mask.values[static_cast<std::size_t>(p.M + j)] = 0;
       }},
      {"sinks: small, none, large",
       [](P& p, Random&, DType) {
         p.sinks = {{p.H}, {-1.5, -kInfinity, 0.75, 6}};
       }},
      {"causal", [](P& p, Random&, DType) { p.causal = true; }},
      {"causal from the end",
       [](P& p, Random&, DType) {
         p.causal = true;
         p.align = Align::end;
       }},
      {"window",
       [](P& p, Random&, DType) {
         p.window_left = 5;
         p.window_right = 2;
       }},
      {"window to the left, from the end",
       [](P& p, Random&, DType) {
         p.window_left = 0;
         p.align = Align::end;
       }},
      {"window to the right", [](P& p, Random&, DType) { p.window_right = 0; }},
      {"lengths of batch entries",
       [](P& p, Random&, DType) {
         for (std::int64_t b = 0; b < p.B; ++b) p.lengths.push_back(b * (p.M - 3));
       }},
      {"lengths of batch entries, causal window from the end",
       [](P& p, Random&, DType) {
         for (std::int64_t b = 0; b < p.B; ++b) p.lengths.push_back(p.M - 2 - b);
         p.causal = true;
         p.align = Align::end;
         p.window_left = 7;
       }},
      {"lengths of rows, causal from the end",
       [](P& p, Random&, DType) {
         for (std::int64_t r = 0; r < p.rows(); ++r) p.lengths.push_back(r * 5 % (p.M + 1));
         p.causal = true;
         p.align = Align::end;
       }},
      {"packed",
       [](P& p, Random&, DType) {
         p.query_starts = {0, 3, 3, 4, 7, p.N};
         p.key_starts = {0, 2, 5, 6, 6, p.M};
       }},
      {"packed, causal from the end",
       [](P& p, Random&, DType) {
         p.query_starts = {0, 5, p.N};
         p.key_starts = {0, p.M - 6, p.M};
         p.causal = true;
         p.align = Align::end;
         p.window_left = 8;
       }},
      {"packed, causal window",
       [](P& p, Random&, DType) {
         p.query_starts = {0, 1, p.N};
         p.key_starts = {0, 4, p.M};
         p.causal = true;
         p.window_left = 3;
       }},
      {"a rule for each head",
       [](P& p, Random&, DType) {
         p.rules = {{Rule::Kind::target_peak, 0.6},
                    {Rule::Kind::paper, 1, 1, oracle::paper_coefficients()},
                    {Rule::Kind::ssmax, 0.8},
                    {Rule::Kind::target_entropy, 0.9}};
       }},
      {"a rule of the length for each head",
       [](P& p, Random&, DType) {
         p.causal = true;
         p.rules = {{.kind = Rule::Kind::log_power, .parameter = 0.5, .factor = 0.3, .exponent = 1.5},
                    {Rule::Kind::llama4, 3, 0.4},
                    {Rule::Kind::log_length, 4, 1.2},
                    {Rule::Kind::llama4, 8192, 0.1}};
       }},
      {"all at once",
       [](P& p, Random& random, DType side) {
         p.scale = 0.8;
         p.query_scale = draw_array(random, {p.B, 1, p.N}, side);
         p.softcap = 4;
         p.bias = draw_array(random, {1, p.H, p.N, p.M}, side);
         p.mask = draw_mask(random, {p.B, 1, 1, p.M}, 0.8);
         p.sinks = {{p.H}, {0.5, -1, 2, -kInfinity}};
         p.causal = true;
         p.align = Align::end;
         p.window_left = p.M / 2;
         for (std::int64_t b = 0; b < p.B; ++b) p.lengths.push_back(p.M - b);
       }},
  };
}

// The problem `option` is for.
inline oracle::Attention draw_with(const OptionCase& option, Random& random, Shape shape, DType type,
                                   DType side) {
  if (option.name.starts_with("packed")) shape.B = 1;
  oracle::Attention p = draw_problem(random, shape, type, 1.5);
  option.set(p, random, side);
  return p;
}

// ---- Calls ----

struct Layouts {
  Layout q, k, v;
  Layout out;    // also of dout
  Layout sides;  // bias and mask
};

// A problem as the library takes it. Options may be changed before a call; they point into this object.
class AttentionCall {
 public:
  // Side arrays are of `side_type`: that of q or that of the arithmetic.
  AttentionCall(const oracle::Attention& p, DType type, DType side_type, const Layouts& layouts = {})
      : q(type, p.q, layouts.q),
        k(type, p.k, layouts.k),
        v(type, p.v, layouts.v),
        dout(type, p.dout, layouts.out),
        out(type, p.dout.sizes, layouts.out),
        dq(type, p.q.sizes, layouts.q),
        dk(type, p.k.sizes, layouts.k),
        dv(type, p.v.sizes, layouts.v),
        stats(static_cast<std::size_t>(p.rows())),
        saved_(type, p.rows(), largest_saved_size(p)),
        lengths_(p.lengths),
        query_starts_(p.query_starts),
        key_starts_(p.key_starts) {
    for (const oracle::Rule& rule : p.rules) rules_.push_back(library_rule(rule));
    if (p.query_scale.given()) query_scale = Placed(side_type, p.query_scale);
    if (p.query_scale.given()) dquery_scale = Placed(side_type, p.query_scale.sizes);
    if (p.bias.given()) bias = Placed(side_type, p.bias, layouts.sides);
    if (p.bias.given()) dbias = Placed(side_type, p.bias.sizes, layouts.sides);
    if (p.mask.given()) mask = Placed(DType::boolean, p.mask, layouts.sides);
    if (p.sinks.given()) sinks = Placed(side_type, p.sinks);
    if (p.sinks.given()) dsinks = Placed(side_type, p.sinks.sizes);
    options.rule = rules_.front();
    if (rules_.size() > 1) options.head_rules = rules_;
    options.scale = p.scale;
    options.query_scale = query_scale.view();
    options.softcap = p.softcap;
    options.bias = bias.view();
    options.mask = mask.view();
    options.sinks = sinks.view();
    options.causal = p.causal;
    options.align = p.align;
    options.window_left = p.window_left;
    options.window_right = p.window_right;
    options.lengths = lengths_;
    options.query_starts = query_starts_;
    options.key_starts = key_starts_;
    outputs.stats = stats;
    outputs.saved = saved_.view();
  }
  AttentionCall(const AttentionCall&) = delete;

  void forward() { attention(q.view(), k.view(), v.view(), out.view(), options, outputs, execution); }

  // Every gradient there is. With outputs.saved left in place what the last forward() saved is read.
  void backward(BetaGradient mode = BetaGradient::through_rule) {
    attention_backward(q.view(), k.view(), v.view(), dout.view(), gradients(), options,
                       {.beta_gradient = mode, .saved = outputs.saved}, execution);
  }
  AttentionGradients gradients() {
    return {dq.view(), dk.view(), dv.view(), dbias.view(), dsinks.view(), dquery_scale.view()};
  }
  std::vector<Placed*> written_gradients() { return {&dq, &dk, &dv, &dbias, &dsinks, &dquery_scale}; }

  std::vector<double> betas() const {
    std::vector<double> all;
    for (const RowStats& row : stats) all.push_back(row.beta);
    return all;
  }

  Placed q, k, v, dout;
  Placed out, dq, dk, dv;
  Placed query_scale, bias, mask, sinks;
  Placed dbias, dsinks, dquery_scale;
  std::vector<RowStats> stats;
  AttentionOptions options;
  AttentionOutputs outputs;
  Execution execution;

 private:
  static std::int64_t largest_saved_size(const oracle::Attention& p) {
    std::int64_t size = 0;
    for (const oracle::Rule& rule : p.rules) {
      size = std::max(size, saved_size(SoftmaxOptions{.rule = library_rule(rule)}));
    }
    return size;
  }

  std::vector<Rule> rules_;
  SavedRows saved_;
  std::vector<std::int64_t> lengths_, query_starts_, key_starts_;
};

}  // namespace whet

#endif  // WHET_TESTS_ATTENTION_CASES_H_
