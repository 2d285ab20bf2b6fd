// Inputs that several test files share: rules beside their plain description for the oracle, rows of
// every kind that has been trouble somewhere, strided tensors, and 16-bit numbers.
#ifndef WHET_TESTS_CASES_H_
#define WHET_TESTS_CASES_H_

#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "oracle.h"

namespace whet {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Sizes = std::vector<std::size_t>;

struct RuleCase {
  Rule rule;
  oracle::Rule plain;
};

inline RuleCase polynomial_case(const std::vector<double>& coefficients, double gate, double hold) {
  return {Rule::polynomial(coefficients, gate, hold),
          {Rule::Kind::polynomial, 1, 1, coefficients, gate, hold}};
}

inline RuleCase paper_case() {
  return {Rule::paper(), {Rule::Kind::paper, 1, 1, oracle::paper_coefficients()}};
}

// Every rule, with at least one value of each parameter that isn't its default.
inline std::vector<RuleCase> rule_cases() {
  using Kind = Rule::Kind;
  return {
      {Rule::none(), {}},
      {Rule::fixed(1.75), {Kind::fixed, 1.75}},
      {Rule::fixed(0.3), {Kind::fixed, 0.3}},
      paper_case(),
      polynomial_case({0.25, 0.9}, 0.75, 4.0),
      {Rule::log_length(16), {Kind::log_length, 16}},
      {Rule::log_length(4, 0.7), {Kind::log_length, 4, 0.7}},
      {Rule::ssmax(0.43), {Kind::ssmax, 0.43}},
      {Rule::log_power(0.7, 0.2, 1.5),
       {.kind = Kind::log_power, .parameter = 0.7, .factor = 0.2, .exponent = 1.5}},
      {Rule::llama4(7), {Kind::llama4, 7, 0.1}},
      {Rule::llama4(16, 0.6), {Kind::llama4, 16, 0.6}},
      {Rule::target_entropy(0.2), {Kind::target_entropy, 0.2}},
      {Rule::target_entropy(1.5), {Kind::target_entropy, 1.5}},
      {Rule::target_peak(0.9), {Kind::target_peak, 0.9}},
      {Rule::target_peak(0.2), {Kind::target_peak, 0.2}},
  };
}

enum class RowKind {
  narrow,     // differences near the rounding of f32
  gaussian,   // sd 1
  sharp,      // sd 6
  steep,      // sd 30: most weights underflow
  wide,       // sd 1000
  offset,     // sd 1 around 9990: many ties in f32
  uniform,    // [-1, 1)
  ties,       // three keys share the maximum
  two_level,  // half the keys 2 below the other half
  equal,      // one value
  outlier,    // one key 1e4 above the rest
};

inline constexpr RowKind kRowKinds[] = {RowKind::narrow, RowKind::gaussian,  RowKind::sharp,   RowKind::steep,
                                        RowKind::wide,   RowKind::offset,    RowKind::uniform, RowKind::ties,
                                        RowKind::equal,  RowKind::two_level, RowKind::outlier};

// In the order of RowKind.
inline constexpr const char* kRowKindNames[] = {"narrow",    "gaussian", "sharp",   "steep",
                                                "wide",      "offset",   "uniform", "ties",
                                                "two_level", "equal",    "outlier"};

// What a failing case was, for SCOPED_TRACE.
inline std::string describe(std::size_t n, RowKind kind) {
  return "n " + std::to_string(n) + ", " + kRowKindNames[static_cast<std::size_t>(kind)] + " row";
}
inline std::string describe(std::size_t n, RowKind kind, const Rule& rule) {
  return describe(n, kind) + ", rule " + rule.name();
}

using Random = std::mt19937_64;

inline double gaussian(Random& random, double sd = 1) {
  return std::normal_distribution<double>(0, sd)(random);
}

template <typename T>
std::vector<T> gaussian_row(Random& random, std::size_t n, double sd = 1) {
  std::vector<T> x(n);
  for (T& value : x) value = static_cast<T>(gaussian(random, sd));
  return x;
}

template <typename T>
std::vector<T> make_row(RowKind kind, std::size_t n, Random& random) {
  const auto around = [&](double center, double sd) {
    std::vector<T> x(n);
    for (T& value : x) value = static_cast<T>(center + gaussian(random, sd));
    return x;
  };
  std::vector<T> x;
  switch (kind) {
    case RowKind::narrow:
      return around(0, 1e-3);
    case RowKind::gaussian:
      return around(0, 1);
    case RowKind::sharp:
      return around(0, 6);
    case RowKind::steep:
      return around(0, 30);
    case RowKind::wide:
      return around(0, 1000);
    case RowKind::offset:
      return around(9990, 1);
    case RowKind::uniform:
      x = around(0, 0);
      for (T& value : x) value = static_cast<T>(std::uniform_real_distribution<double>(-1, 1)(random));
      return x;
    case RowKind::ties:
      x = around(0, 1);
      for (std::size_t i = 0; i < n && i < 3; ++i) x[(i * 7) % n] = T{4.5};
      return x;
    case RowKind::two_level:
      x = around(0, 0);
      for (std::size_t i = 0; i < n; i += 2) x[i] = T{-2};
      return x;
    case RowKind::equal:
      return std::vector<T>(n, T{0.7F});
    case RowKind::outlier:
      x = around(0, 1);
      if (n > 0) x[n / 2] = T{1e4};
      return x;
  }
  return x;
}

template <typename T>
std::vector<double> to_double(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

// A tensor that owns a buffer larger than it needs; elements between its own hold `fill`.
template <typename T>
class Tensor {
 public:
  Tensor(std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides, T fill, std::int64_t margin = 1)
      : sizes_(std::move(sizes)), strides_(std::move(strides)) {
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (std::size_t d = 0; d < sizes_.size(); ++d) {
      const std::int64_t reach = (sizes_[d] - 1) * strides_[d];
      (reach < 0 ? low : high) += reach;
    }
    origin_ = margin - low;
    buffer.assign(static_cast<std::size_t>(high - low + 1 + 2 * margin), fill);
  }

  View view() { return {buffer.data() + origin_, Dims(std::span(sizes_)), Dims(std::span(strides_))}; }

  std::int64_t rows(std::size_t axis) const {
    std::int64_t count = 1;
    for (std::size_t d = 0; d < sizes_.size(); ++d) count *= d == axis ? 1 : sizes_[d];
    return count;
  }
  std::int64_t keys(std::size_t axis) const { return sizes_[axis]; }

  // Position in `buffer` of key `key` of row `row`, rows in row-major order of the other axes.
  std::size_t position(std::size_t axis, std::int64_t row, std::int64_t key) const {
    std::int64_t at = origin_ + key * strides_[axis];
    for (std::size_t d = sizes_.size(); d-- > 0;) {
      if (d == axis) continue;
      at += row % sizes_[d] * strides_[d];
      row /= sizes_[d];
    }
    return static_cast<std::size_t>(at);
  }

  std::vector<T> row(std::size_t axis, std::int64_t index) const {
    std::vector<T> values;
    for (std::int64_t key = 0; key < keys(axis); ++key) values.push_back(buffer[position(axis, index, key)]);
    return values;
  }

  std::vector<T> buffer;

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::int64_t origin_ = 0;
};

// A 16-bit float of `kDigits` significant bits and smallest normal exponent `kLowest`, by definition
// rather than by bit tricks.
template <int kDigits, int kLowest>
struct Half {
  static constexpr int kFraction = kDigits - 1;

  static std::uint16_t encode(float value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::abs(static_cast<double>(value));
    const int top = 1 - kLowest;  // largest exponent
    const std::uint16_t infinity = static_cast<std::uint16_t>((2 * top + 1) << kFraction);
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | (1 << (kFraction - 1)));
    if (size == 0) return sign;
    if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
    const int exponent = std::max(std::ilogb(size), kLowest);
    // nearbyint rounds to nearest, ties to even; the sum carries into the exponent by itself.
    const int fraction = static_cast<int>(std::nearbyint(std::ldexp(size, kFraction - exponent)));
    const int bits = ((exponent - kLowest) << kFraction) + fraction;
    return static_cast<std::uint16_t>(sign | std::min<int>(bits, infinity));
  }

  static float decode(std::uint16_t bits) {
    const int fraction = bits & ((1 << kFraction) - 1);
    const int biased = (bits & 0x7FFF) >> kFraction;
    const float sign = bits & 0x8000 ? -1.0F : 1.0F;
    const int top = 1 - kLowest;
    if (biased == 2 * top + 1) {
      return fraction ? std::numeric_limits<float>::quiet_NaN()
                      : sign * std::numeric_limits<float>::infinity();
    }
    const int exponent = std::max(biased, 1) - 1 + kLowest - kFraction;
    return sign * static_cast<float>(std::ldexp(biased ? fraction + (1 << kFraction) : fraction, exponent));
  }
};

inline bf16 to_storage(float value, bf16) { return {Half<8, -126>::encode(value)}; }
inline f16 to_storage(float value, f16) { return {Half<11, -14>::encode(value)}; }
inline float to_float(bf16 value) { return Half<8, -126>::decode(value.bits); }
inline float to_float(f16 value) { return Half<11, -14>::decode(value.bits); }

// Memory for what forward saves of rows of this type for backward; NaN until it does.
class SavedRows {
 public:
  SavedRows(DType type, std::int64_t rows, std::int64_t size)
      : memory_(static_cast<std::size_t>(rows * size), kNaN),
        view_(memory_.data(), type == DType::f64 ? DType::f64 : DType::f32, {rows, size}) {
    if (type != DType::f64) std::memset(memory_.data(), 0xff, memory_.size() * sizeof(double));
  }
  SavedRows(const SavedRows&) = delete;

  View view() const { return view_; }

 private:
  std::vector<double> memory_;
  View view_;
};

}  // namespace whet

#endif  // WHET_TESTS_CASES_H_
