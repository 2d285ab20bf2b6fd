#include <whet/horizon.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "core/arguments.h"

namespace whet {

namespace {

void require(bool ok, const char* name, double given, const char* allowed) {
  if (!ok) core::fail(name, "is " + core::text(given) + ", must be " + allowed);
}

// The spread at this inverse temperature.
double sharpened(double spread, double beta) {
  require(spread >= 0, "spread", spread, "0 or more");
  require(beta > 0 && std::isfinite(beta), "beta", beta, "finite and above 0");
  return beta * spread;
}

void check_keys(double keys) { require(keys >= 1, "keys", keys, "1 or more"); }

// `count` vectors of `length` numbers, one after the other.
struct Vectors {
  std::size_t count = 0;
  std::size_t length = 0;
  std::vector<double> values{};

  const double* operator[](std::size_t i) const { return values.data() + i * length; }
};

template <typename T>
void copy(const ConstView& matrix, const Dims& strides, bool by_column, Vectors& out) {
  const T* data = static_cast<const T*>(matrix.data);
  const std::int64_t outer = by_column ? strides[1] : strides[0];
  const std::int64_t inner = by_column ? strides[0] : strides[1];
  for (std::size_t i = 0; i < out.count; ++i) {
    for (std::size_t j = 0; j < out.length; ++j) {
      const T value = data[static_cast<std::int64_t>(i) * outer + static_cast<std::int64_t>(j) * inner];
      if (!std::isfinite(value)) core::fail("matrix", "holds NaN or infinity");
      out.values[i * out.length + j] = static_cast<double>(value);
    }
  }
}

// The rows of a matrix or its columns, whichever are fewer: both have the same singular values.
Vectors fewer_vectors(const ConstView& matrix) {
  core::check_sizes(matrix.sizes, "matrix");
  if (matrix.sizes.size() != 2) core::fail("matrix", "has sizes " + core::text(matrix.sizes) + ", needs two");
  if (matrix.dtype != DType::f32 && matrix.dtype != DType::f64) {
    core::fail("matrix", std::string("is ") + core::text(matrix.dtype) + ", must be f32 or f64");
  }
  const Dims strides = core::strides_of(matrix, "matrix");
  const bool by_column = matrix.sizes[1] < matrix.sizes[0];
  Vectors out{static_cast<std::size_t>(matrix.sizes[by_column ? 1 : 0]),
              static_cast<std::size_t>(matrix.sizes[by_column ? 0 : 1])};
  if (out.count == 0) return out;
  if (matrix.data == nullptr) core::fail("matrix", "has no data");
  out.values.resize(out.count * out.length);
  matrix.dtype == DType::f32 ? copy<float>(matrix, strides, by_column, out)
                             : copy<double>(matrix, strides, by_column, out);
  return out;
}

// The products of every vector with every other.
Vectors gram(const Vectors& a) {
  Vectors g{a.count, a.count, std::vector<double>(a.count * a.count)};
  for (std::size_t i = 0; i < a.count; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      const double product = std::inner_product(a[i], a[i] + a.length, a[j], 0.0);
      g.values[i * a.count + j] = g.values[j * a.count + i] = product;
    }
  }
  return g;
}

double frobenius_norm(const Vectors& a) {
  double sum = 0;
  for (const double value : a.values) sum += value * value;
  return std::sqrt(sum);
}

// An upper bound of the largest eigenvalue of a symmetric matrix G without negative ones. No eigenvalue
// exceeds the Frobenius norm, so with s_0 = |G| and s_j = |G_j|, where G_1 = (G / s_0)^2, G_2 = (G_1 /
// s_1)^2, ...,
//     eigenvalue <= s_0 s_1^(1/2) s_2^(1/4) ...
// wherever we stop. s_1, s_2, ... only rise, to at most 1, so that stopping at s_j gives away at most the
// factor s_j^(-1/2^j). (Power iteration would approach from below, and says nothing before it has converged.)
double eigenvalue_bound(Vectors g) {
  constexpr double kGivenAway = 1e-12;
  double scale = frobenius_norm(g);
  double bound = scale;
  for (double power = 0.5;; power /= 2) {
    for (double& value : g.values) value /= scale;
    g = gram(g);  // of a symmetric matrix: its square
    scale = frobenius_norm(g);
    bound *= std::pow(scale, power);
    if (!(-std::log(scale) * power > kGivenAway)) return bound;
  }
}

}  // namespace

double horizon(double spread, double weight, double beta) {
  const double d = sharpened(spread, beta);
  require(weight > 0 && weight <= 1, "weight", weight, "above 0 and at most 1");
  if (weight == 1) return 1;
  const double half = std::exp(d / 2);  // e^d may overflow where the product doesn't
  return 1 + half * ((1 - weight) / weight) * half;
}

double largest_weight(double keys, double spread, double beta) {
  check_keys(keys);
  const double least = std::exp(-sharpened(spread, beta));
  if (std::isinf(keys)) return std::isinf(spread) ? 1 : 0;
  return 1 / (1 + (keys - 1) * least);
}

WeightBounds paper_bounds(double keys, double spread, double beta) {
  check_keys(keys);
  const double d = sharpened(spread, beta);
  if (std::isinf(keys)) return {0, std::isinf(spread) ? 1.0 : 0.0};
  return {std::exp(-d) / keys, std::min(std::exp(d) / keys, 1.0)};
}

double largest_singular_value(ConstView matrix) {
  Vectors a = fewer_vectors(matrix);
  double largest = 0;
  for (const double value : a.values) largest = std::max(largest, std::abs(value));
  if (largest == 0) return 0;
  // A power of two takes the largest element near 1, without rounding: squares neither overflow nor vanish.
  int exponent = 0;
  std::frexp(largest, &exponent);
  for (double& value : a.values) value = std::ldexp(value, -exponent);

  // The sums of r products and of d, and their norms, may lie this much below the exact ones: each rounding
  // is at most half an epsilon of |.|_F^2 <= d times the square of what we look for, those of square j count
  // 1/2^j, and the root halves it all. Four times that.
  const double d = static_cast<double>(a.count), r = static_cast<double>(a.length);
  const double safety = 1 + std::numeric_limits<double>::epsilon() * (d * (r + 2 * d) + 64);
  return std::ldexp(std::sqrt(eigenvalue_bound(gram(a))) * safety, exponent);
}

double spread_bound(const HeadNorms& norms) {
  const auto check = [](double value, const char* name) {
    require(value >= 0 && std::isfinite(value), name, value, "finite and 0 or more");
  };
  check(norms.query_gain, "query_gain");
  check(norms.query_bias, "query_bias");
  check(norms.query_input, "query_input");
  check(norms.key_gain, "key_gain");
  check(norms.key_input, "key_input");
  check(norms.scale, "scale");
  // Part of the product may leave the range of double where the whole doesn't.
  using Wide = long double;
  const Wide query = Wide{norms.query_gain} * norms.query_input + norms.query_bias;
  const Wide key = Wide{norms.key_gain} * norms.key_input;
  return static_cast<double>(2 * query * key * norms.scale);
}

}  // namespace whet
