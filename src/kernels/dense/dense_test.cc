// The dense kernels against plain loops in wider arithmetic, on every target; and what must hold bit for bit.
#include "kernels/dense/dense.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <type_traits>
#include <vector>

#include "targets.h"

namespace whet::kernels {
namespace {

// What results are compared with: its own rounding is nothing beside that of T.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;

// The relative error of one rounding to T.
template <typename T>
constexpr double kUnit = std::numeric_limits<T>::epsilon() / 2;

template <typename T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// A number in [-1, 1] for every place of every array, so that parts of an array have the numbers of the
// whole.
template <typename T>
T number(int array, std::int64_t i, std::int64_t j = 0) {
  std::uint32_t bits = static_cast<std::uint32_t>(array) * 0xC2B2AE3D +
                       static_cast<std::uint32_t>(i) * 0x9E3779B1 +
                       static_cast<std::uint32_t>(j) * 0x85EBCA77;
  for (const std::uint32_t factor : {0x2C1B3C6DU, 0x297A2D39U}) bits = (bits ^ bits >> 15U) * factor;
  return static_cast<T>(bits * 0x1p-31 - 1);
}

template <typename T>
std::vector<T> numbers(int array, std::int64_t count) {
  std::vector<T> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(number<T>(array, i));
  return values;
}

// Element (i, j) lies at i * row_stride + j * column_stride. Nothing is allocated behind the last element, so
// that a sanitizer sees a read beyond it.
template <typename T>
struct Matrix {
  Matrix(int array, std::int64_t rows, std::int64_t columns, bool transposed)
      : row_stride(transposed ? 1 : columns + 3), column_stride(transposed ? rows + 3 : 1) {
    if (rows == 0 || columns == 0) return;
    values.assign(static_cast<std::size_t>((rows - 1) * row_stride + (columns - 1) * column_stride + 1),
                  T(NAN));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        values[static_cast<std::size_t>(i * row_stride + j * column_stride)] = number<T>(array, i, j);
      }
    }
  }

  std::int64_t row_stride, column_stride;
  std::vector<T> values;
};

template <typename T>
class Dense : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(Dense, Types);

// Products: rows around strips of 6, columns around the panels of every target, depth around blocks of 128.
constexpr std::int64_t kRows[] = {0, 1, 5, 6, 7, 13};
constexpr std::int64_t kColumns[] = {1, 7, 10, 15, 16, 17, 64, 65, 128};
constexpr std::int64_t kDepths[] = {0, 1, 127, 128, 129, 300};
constexpr std::int64_t kMostRows = 20;
constexpr std::int64_t kMostColumns = 128;
constexpr int kA = 1, kB = 2, kC = 3;
constexpr std::int64_t kMargin = 5;

struct Shape {
  std::int64_t rows, columns, depth;
  bool a_transposed = false, b_transposed = false, add = false;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.rows << " x " << s.columns << " x " << s.depth << (s.a_transposed ? ", a transposed" : "")
             << (s.b_transposed ? ", b transposed" : "") << (s.add ? ", added" : "");
}

// c after the product: rows columns + kMargin apart. Before it, c held number(kC, i, j), and NaN beyond its
// columns.
template <typename T>
std::vector<T> product_of(const Shape& s) {
  const Matrix<T> a(kA, s.rows, s.depth, s.a_transposed), b(kB, s.depth, s.columns, s.b_transposed);
  std::vector<T> c(static_cast<std::size_t>(s.rows * (s.columns + kMargin)), T(NAN));
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.columns; ++j) {
      c[static_cast<std::size_t>(i * (s.columns + kMargin) + j)] = number<T>(kC, i, j);
    }
  }
  dense_kernels<T>().multiply({.rows = s.rows,
                               .columns = s.columns,
                               .depth = s.depth,
                               .a = a.values.data(),
                               .a_row_stride = a.row_stride,
                               .a_step_stride = a.column_stride,
                               .b = b.values.data(),
                               .b_step_stride = b.row_stride,
                               .b_column_stride = b.column_stride,
                               .c = c.data(),
                               .c_stride = s.columns + kMargin,
                               .add = s.add});
  return c;
}

// Exact sums, and what their error is measured by: the sum of the sizes of their terms.
template <typename T>
struct Sums {
  Sums(std::int64_t depth, bool add) {
    for (std::int64_t i = 0; i < kMostRows; ++i) {
      for (std::int64_t j = 0; j < kMostColumns; ++j) {
        Wide<T> sum = add ? number<T>(kC, i, j) : T(0), size = std::abs(sum);
        for (std::int64_t k = 0; k < depth; ++k) {
          const Wide<T> term = Wide<T>(number<T>(kA, i, k)) * number<T>(kB, k, j);
          sum += term;
          size += std::abs(term);
        }
        sums.push_back(sum);
        sizes.push_back(size);
      }
    }
  }
  std::vector<Wide<T>> sums, sizes;
};

// Every multiply-add rounds once or twice: |error| <= (depth + 1) units of the sum of the sizes of all terms.
template <typename T>
void check_product(const Shape& s, const std::vector<T>& c, const Sums<T>& exact) {
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.columns + kMargin; ++j) {
      const T got = c[static_cast<std::size_t>(i * (s.columns + kMargin) + j)];
      if (j >= s.columns) {
        ASSERT_TRUE(std::isnan(got)) << "beyond the columns at " << i << ", " << j << " of " << s;
        continue;
      }
      const auto at = static_cast<std::size_t>(i * kMostColumns + j);
      const auto error = static_cast<double>(std::abs(Wide<T>(got) - exact.sums[at]));
      const double bound = static_cast<double>(s.depth + 1) * kUnit<T> * static_cast<double>(exact.sizes[at]);
      ASSERT_LE(error, bound) << "element " << i << ", " << j << " of " << s;
    }
  }
}

TYPED_TEST(Dense, MultipliesEveryShapeAndLayout) {
  using T = TypeParam;
  for (const std::int64_t depth : kDepths) {
    for (const bool add : {false, true}) {
      const Sums<T> exact(depth, add);
      for_each_target([&] {
        for (const std::int64_t rows : kRows) {
          for (const std::int64_t columns : kColumns) {
            for (const int layout : {0, 1, 2, 3}) {
              const Shape shape{rows, columns, depth, (layout & 1) != 0, (layout & 2) != 0, add};
              ASSERT_NO_FATAL_FAILURE(check_product(shape, product_of<T>(shape), exact));
            }
          }
        }
      });
    }
  }
}

// Whatever stands beside it and however it is laid out, an element is what it is in a product of its row
// alone.
TYPED_TEST(Dense, ElementsDependOnTheirRowAndColumnOnly) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t depth : {1, 129, 300}) {
      for (const bool add : {false, true}) {
        const std::vector<T> one = product_of<T>({1, kMostColumns, depth, false, false, add});
        for (const std::int64_t columns : kColumns) {
          for (const int layout : {0, 1, 2, 3}) {
            const Shape shape{kMostRows, columns, depth, (layout & 1) != 0, (layout & 2) != 0, add};
            const std::vector<T> many = product_of<T>(shape);
            for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j) {
              ASSERT_TRUE(same_bits(one[j], many[j])) << "column " << j << " of " << shape;
            }
          }
        }
      }
    }
    // The last row, 2 of a strip of 6, against all of its kind: twenty rows that are the same.
    const std::int64_t depth = 300, columns = 17;
    const std::vector<T> row = numbers<T>(kA, depth);
    const Matrix<T> b(kB, depth, columns, false);
    std::vector<T> c(static_cast<std::size_t>(kMostRows * columns));
    dense_kernels<T>().multiply({.rows = kMostRows,
                                 .columns = columns,
                                 .depth = depth,
                                 .a = row.data(),
                                 .a_row_stride = 0,
                                 .a_step_stride = 1,
                                 .b = b.values.data(),
                                 .b_step_stride = b.row_stride,
                                 .b_column_stride = 1,
                                 .c = c.data(),
                                 .c_stride = columns});
    for (std::size_t i = 0; i < c.size(); ++i) {
      ASSERT_TRUE(same_bits(c[i], c[i % static_cast<std::size_t>(columns)])) << "element " << i;
    }
  });
}

// GELU and what its error is measured by.
struct ExactGelu {
  explicit ExactGelu(long double x) {
    const long double scale = 2 * std::sqrt(2 / std::numbers::pi_v<long double>);
    s = scale * (x + 0.044715L * x * x * x);
    const long double e = std::exp(-std::abs(s));
    const long double sigma = (s < 0 ? e : 1) / (1 + e);
    value = x * sigma;
    // Beyond 60 the bell is 0 in any arithmetic, but its factor may be infinite.
    const long double bell = e / ((1 + e) * (1 + e));
    const long double slope = std::abs(x) > 60 ? 0 : x * scale * (1 + 3 * 0.044715L * x * x);
    derivative = sigma + slope * bell;
    derivative_size = sigma + std::abs(slope) * bell;
    largest_slope = std::abs(slope);
  }
  long double s, value, derivative, derivative_size, largest_slope;
};

// The smallest e^-|s| that the kernels tell from 0: see exp-inl.h.
template <typename T>
constexpr double kLeastExp = std::is_same_v<T, float> ? 0x1p-100 : 0x1p-1022;

// x from -12 to 12, and beyond: where e^-|s| ends, where x^2 and x^3 overflow, denormals, zeros.
template <typename T>
std::vector<T> gelu_arguments() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> values;
  for (int i = -12 * 64; i <= 12 * 64; ++i) values.push_back(T(i) / 64);
  for (const double x : {13.7, 20.0, 21.3, 22.9, 1e2, 1e4, 1e12, 1e13, 1e19, 1e30}) {
    values.push_back(static_cast<T>(x));
    values.push_back(static_cast<T>(-x));
  }
  for (const T x : {T(0), Limits::denorm_min(), Limits::min() / 4, Limits::min(), Limits::epsilon(),
                    static_cast<T>(std::sqrt(static_cast<double>(Limits::max()))), Limits::max()}) {
    values.push_back(x);
    values.push_back(-x);
  }
  return values;
}

// s has a relative error of a few units, so that e^-|s| has |s| times as much:
//   |gelu error| <= (8 + 4 |s|) unit |gelu| + least |x|,  least the e^-|s| that are taken for 0, and a
//   denormal.
TYPED_TEST(Dense, GeluIsWithinItsBound) {
  using T = TypeParam;
  const std::vector<T> x = gelu_arguments<T>();
  for_each_target([&] {
    std::vector<T> y(x.size(), T(NAN));
    dense_kernels<T>().gelu(x.data(), static_cast<std::int64_t>(x.size()), y.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const ExactGelu exact(x[i]);
      // A result of 0 has no relative error left, however large s is.
      const long double relative =
          exact.value == 0
              ? 0
              : (8 + 4 * std::abs(exact.s)) * static_cast<long double>(kUnit<T>) * std::abs(exact.value);
      const long double bound = relative + std::abs(static_cast<long double>(x[i])) * kLeastExp<T> +
                                std::numeric_limits<T>::denorm_min();
      EXPECT_LE(std::abs(y[i] - exact.value), bound) << "gelu(" << x[i] << ") is " << y[i];
      EXPECT_TRUE(std::isfinite(y[i])) << "gelu(" << x[i] << ")";
    }
  });
}

// The same for the two terms of the derivative, sigma + x s' sigma (1 - sigma), which cancel near x = -0.75:
//   |error| <= (12 + 4 |s|) unit (sum of their sizes) + least (1 + |x s'|)
TYPED_TEST(Dense, GeluDerivativeIsWithinItsBound) {
  using T = TypeParam;
  const std::vector<T> x = gelu_arguments<T>();
  for_each_target([&] {
    std::vector<T> d(x.size(), T(1));
    dense_kernels<T>().gelu_backward(x.data(), static_cast<std::int64_t>(x.size()), d.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const ExactGelu exact(x[i]);
      const long double s = std::min(std::abs(exact.s), 1e4L);  // beyond, sigma is 0 or 1
      const long double bound =
          (12 + 4 * s) * static_cast<long double>(kUnit<T>) * (s == 1e4L ? 0 : exact.derivative_size) +
          kLeastExp<T> * (1 + exact.largest_slope);
      EXPECT_LE(std::abs(d[i] - exact.derivative), bound) << "gelu'(" << x[i] << ") is " << d[i];
    }
    // It is multiplied into d: halves are exact.
    std::vector<T> half(x.size(), T(-0.5));
    dense_kernels<T>().gelu_backward(x.data(), static_cast<std::int64_t>(x.size()), half.data());
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(half[i], T(-0.5) * d[i]) << "at " << x[i];
  });
}

TYPED_TEST(Dense, GeluKeepsNaN) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t n : {1, 40}) {
      const std::vector<T> x(static_cast<std::size_t>(n), T(NAN));
      std::vector<T> y(x.size(), T(0)), d(x.size(), T(1));
      dense_kernels<T>().gelu(x.data(), n, y.data());
      dense_kernels<T>().gelu_backward(x.data(), n, d.data());
      for (std::size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(std::isnan(y[i]) && std::isnan(d[i])) << i;
    }
  });
}

// The same x gives the same bits in a full vector, in the rest behind it, and alone; in place too.
TYPED_TEST(Dense, GeluDoesNotDependOnThePlace) {
  using T = TypeParam;
  const std::vector<T> x = gelu_arguments<T>();
  for_each_target([&] {
    const auto kernels = dense_kernels<T>();
    std::vector<T> alone(x.size()), alone_d(x.size(), T(1));
    for (std::size_t i = 0; i < x.size(); ++i) {
      kernels.gelu(&x[i], 1, &alone[i]);
      kernels.gelu_backward(&x[i], 1, &alone_d[i]);
    }
    for (std::size_t start = 0; start < 17; ++start) {
      const auto n = static_cast<std::int64_t>(x.size() - start);
      std::vector<T> y(x.begin() + static_cast<std::ptrdiff_t>(start), x.end()), d(y.size(), T(1));
      kernels.gelu_backward(y.data(), n, d.data());
      kernels.gelu(y.data(), n, y.data());
      for (std::size_t i = 0; i < y.size(); ++i) {
        ASSERT_TRUE(same_bits(y[i], alone[start + i]))
            << "gelu(" << x[start + i] << "), place " << i << " of " << n;
        ASSERT_TRUE(same_bits(d[i], alone_d[start + i])) << "gelu'(" << x[start + i] << "), place " << i;
      }
    }
  });
}

// A first layer whose numbers are sixteenths, so that z is exact with or without a fused multiply-add.
template <typename T>
struct FirstLayerCase {
  static constexpr std::int64_t kRowCount = 23;
  static constexpr std::uint8_t kClassCount = 5;  // the last one never occurs

  FirstLayerCase(std::int64_t width, bool with_classes) : classified(with_classes) {
    const auto sixteenth = [](int array, std::int64_t i) {
      return std::round(32 * number<double>(array, i)) / 16;
    };
    for (std::int64_t r = 0; r < kRowCount; ++r) {
      values.push_back(static_cast<float>(sixteenth(4, r)));
      classes.push_back(static_cast<std::uint8_t>(r * r % (kClassCount - 1)));
    }
    for (std::int64_t i = 0; i < width; ++i) slope.push_back(static_cast<T>(sixteenth(5, i)));
    for (std::int64_t i = 0; i < width * kClassCount; ++i) offsets.push_back(static_cast<T>(sixteenth(6, i)));
    layer = {kRowCount,    width,         values.data(), classified ? classes.data() : nullptr,
             slope.data(), offsets.data()};
  }

  std::int64_t class_of(std::int64_t row) const {
    return classified ? classes[static_cast<std::size_t>(row)] : 0;
  }

  std::vector<T> z(std::int64_t row) const {
    std::vector<T> result;
    for (std::int64_t i = 0; i < layer.width; ++i) {
      result.push_back(static_cast<T>(values[static_cast<std::size_t>(row)]) *
                           slope[static_cast<std::size_t>(i)] +
                       offsets[static_cast<std::size_t>(class_of(row) * layer.width + i)]);
    }
    return result;
  }

  bool classified;
  std::vector<float> values;
  std::vector<std::uint8_t> classes;
  std::vector<T> slope, offsets;
  FirstLayer<T> layer{};
};

constexpr std::int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 64, 65, 128, 133};

TYPED_TEST(Dense, FirstLayerIsGeluOfItsSum) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t width : kWidths) {
      for (const bool with_classes : {false, true}) {
        const FirstLayerCase<T> c(width, with_classes);
        const std::int64_t stride = width + 3;
        std::vector<T> out(static_cast<std::size_t>(c.layer.rows * stride), T(77));
        dense_kernels<T>().first_layer(c.layer, out.data(), stride);
        for (std::int64_t row = 0; row < c.layer.rows; ++row) {
          std::vector<T> expected = c.z(row);
          dense_kernels<T>().gelu(expected.data(), width, expected.data());
          expected.insert(expected.end(), 3, T(77));
          for (std::size_t i = 0; i < expected.size(); ++i) {
            ASSERT_TRUE(same_bits(out[static_cast<std::size_t>(row * stride) + i], expected[i]))
                << "row " << row << ", column " << i << " of " << width;
          }
        }
      }
    }
  });
}

// doffsets are plain sums in the order of rows, hence exact; dslope rounds once or twice a row.
TYPED_TEST(Dense, FirstLayerBackwardAddsTheGradients) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t width : kWidths) {
      for (const bool with_classes : {false, true}) {
        const FirstLayerCase<T> c(width, with_classes);
        const std::int64_t stride = width + 3;
        const std::vector<T> dout = numbers<T>(7, c.layer.rows * stride);
        const std::vector<T> before_slope = numbers<T>(8, width),
                             before = numbers<T>(9, width * c.kClassCount);
        std::vector<T> dslope = before_slope, doffsets = before, expected = before;
        dense_kernels<T>().first_layer_backward(c.layer, dout.data(), stride, dslope.data(), doffsets.data());

        std::vector<Wide<T>> sums(before_slope.begin(), before_slope.end()), sizes;
        for (const T value : before_slope) sizes.push_back(std::abs(value));
        for (std::int64_t row = 0; row < c.layer.rows; ++row) {
          const auto start = dout.begin() + row * stride;
          std::vector<T> dz(start, start + width);
          const std::vector<T> z = c.z(row);
          dense_kernels<T>().gelu_backward(z.data(), width, dz.data());
          for (std::size_t i = 0; i < dz.size(); ++i) {
            const Wide<T> term = Wide<T>(c.values[static_cast<std::size_t>(row)]) * dz[i];
            sums[i] += term;
            sizes[i] += std::abs(term);
            expected[static_cast<std::size_t>(c.class_of(row) * width) + i] += dz[i];
          }
        }
        for (std::size_t i = 0; i < dslope.size(); ++i) {
          const double bound = (c.kRowCount + 1) * kUnit<T> * static_cast<double>(sizes[i]);
          ASSERT_LE(static_cast<double>(std::abs(dslope[i] - sums[i])), bound)
              << "column " << i << " of " << width;
        }
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_TRUE(same_bits(doffsets[i], expected[i])) << "offset " << i << " of width " << width;
        }
      }
    }
  });
}

constexpr std::int64_t kSumRows[] = {0, 1, 2, 19};

TYPED_TEST(Dense, DotRowsAreWithinARoundingATerm) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t rows : kSumRows) {
      for (const std::int64_t width : kWidths) {
        const Matrix<T> x(10, rows, width, false);
        const std::vector<T> y = numbers<T>(11, width);
        std::vector<T> out(static_cast<std::size_t>(rows) + 1, T(77));
        dense_kernels<T>().dot_rows(x.values.data(), x.row_stride, rows, width, y.data(), out.data());
        for (std::int64_t r = 0; r < rows; ++r) {
          Wide<T> sum = 0, size = 0;
          for (std::int64_t i = 0; i < width; ++i) {
            const Wide<T> term = Wide<T>(number<T>(10, r, i)) * y[static_cast<std::size_t>(i)];
            sum += term;
            size += std::abs(term);
          }
          const double bound = static_cast<double>(width) * kUnit<T> * static_cast<double>(size);
          ASSERT_LE(static_cast<double>(std::abs(out[static_cast<std::size_t>(r)] - sum)), bound)
              << "row " << r << " of width " << width;
        }
        EXPECT_EQ(out.back(), T(77)) << "written beyond the rows";
      }
    }
  });
}

TYPED_TEST(Dense, AddRowsAreWithinARoundingARow) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t rows : kSumRows) {
      for (const std::int64_t width : kWidths) {
        for (const bool weighted : {false, true}) {
          Matrix<T> x(12, rows, width, false);
          std::vector<T> weights = numbers<T>(13, rows);
          // Every third row must not be read: one NaN would be in every sum.
          for (std::int64_t r = 0; weighted && r < rows; r += 3) {
            weights[static_cast<std::size_t>(r)] = r % 2 == 0 ? T(0) : T(-0.0);
            std::fill_n(x.values.begin() + r * x.row_stride, width, T(NAN));
          }
          const std::vector<T> before = numbers<T>(14, width + 1);
          std::vector<T> sum = before;
          dense_kernels<T>().add_rows(x.values.data(), x.row_stride, rows, width,
                                      weighted ? weights.data() : nullptr, sum.data());
          for (std::int64_t i = 0; i < width; ++i) {
            const auto at = static_cast<std::size_t>(i);
            Wide<T> expected = before[at], size = std::abs(expected);
            for (std::int64_t r = 0; r < rows; ++r) {
              const T weight = weighted ? weights[static_cast<std::size_t>(r)] : T(1);
              const Wide<T> term = Wide<T>(weight) * number<T>(12, r, i);
              expected += term;
              size += std::abs(term);
            }
            const double bound = static_cast<double>(rows + 1) * kUnit<T> * static_cast<double>(size);
            ASSERT_LE(static_cast<double>(std::abs(sum[at] - expected)), bound)
                << "column " << i << " of " << width << ", " << rows << (weighted ? " weighted" : "")
                << " rows";
          }
          EXPECT_EQ(sum.back(), before.back()) << "written beyond the width";
        }
      }
    }
  });
}

// Two roundings of at most |a x| + |b y| each.
TYPED_TEST(Dense, CombineIsWithinTwoRoundings) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t n : kWidths) {
      const std::vector<T> x = numbers<T>(15, n), y = numbers<T>(16, n);
      const T a = static_cast<T>(0.7), b = static_cast<T>(-1.9);
      std::vector<T> out(x.size() + 1, T(77));
      dense_kernels<T>().combine(a, x.data(), b, y.data(), n, out.data());
      for (std::size_t i = 0; i < x.size(); ++i) {
        const Wide<T> first = Wide<T>(a) * x[i], second = Wide<T>(b) * y[i];
        const double bound = 2 * kUnit<T> * static_cast<double>(std::abs(first) + std::abs(second));
        ASSERT_LE(static_cast<double>(std::abs(out[i] - (first + second))), bound) << i << " of " << n;
      }
      EXPECT_EQ(out.back(), T(77)) << "written beyond n";
    }
  });
}

// Adam as its paper has it, with the two forms of regularisation, one parameter.
template <typename W>
struct PlainAdam {
  W p, m = 0, v = 0;

  void step(const AdamStep& s, W gradient) {
    const W g = gradient + W(s.l2) * p;
    m = W(s.beta1) * m + (1 - W(s.beta1)) * g;
    v = W(s.beta2) * v + (1 - W(s.beta2)) * g * g;
    const W update = (m / W(s.correction1)) / (std::sqrt(v / W(s.correction2)) + W(s.epsilon));
    p = p - W(s.rate) * W(s.decay) * p - W(s.rate) * update;
  }
};

// 50 steps. Moments lose a few units of the largest gradient a step, parameters a unit of their own size and
// some tens of units of the rate: 50 times that is allowed.
TYPED_TEST(Dense, AdamFollowsThePlainOne) {
  using T = TypeParam;
  constexpr int kSteps = 50;
  const std::array<AdamStep, 4> kinds = {
      {{.rate = 0.01},
       {.rate = 0.01, .l2 = 0.3},
       {.rate = 0.01, .decay = 0.3},
       {.rate = 0.02, .l2 = 0.1, .decay = 0.2, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 0.1}}};
  for_each_target([&] {
    for (const AdamStep& kind : kinds) {
      for (const std::int64_t n : {1, 16, 37}) {
        const auto size = static_cast<std::size_t>(n);
        std::vector<T> p = numbers<T>(17, n), m(size, T(0)), v(size, T(0)), gradient(size);
        std::vector<PlainAdam<Wide<T>>> plain;
        for (const T value : p) plain.push_back({.p = value});
        AdamStep step = kind;
        for (int count = 1; count <= kSteps; ++count) {
          step.correction1 = 1 - std::pow(step.beta1, count);
          step.correction2 = 1 - std::pow(step.beta2, count);
          // Gradients from a thousandth to a thousand.
          for (std::int64_t i = 0; i < n; ++i) {
            const double scale = std::pow(10.0, static_cast<double>(i % 7 - 3));
            gradient[static_cast<std::size_t>(i)] =
                static_cast<T>((0.5 + number<double>(18, count, i)) * scale);
          }
          dense_kernels<T>().adam(step, gradient.data(), n, p.data(), m.data(), v.data());
          for (std::size_t i = 0; i < size; ++i) plain[i].step(step, gradient[i]);
        }
        for (std::size_t i = 0; i < size; ++i) {
          const double largest = 1.5 * std::pow(10.0, static_cast<double>(i % 7) - 3) + kind.l2;
          const double allowed = kSteps * kUnit<T>;
          EXPECT_NEAR(static_cast<double>(m[i]), static_cast<double>(plain[i].m), allowed * largest) << i;
          EXPECT_NEAR(static_cast<double>(v[i]), static_cast<double>(plain[i].v), allowed * largest * largest)
              << i;
          EXPECT_NEAR(static_cast<double>(p[i]), static_cast<double>(plain[i].p),
                      allowed * (1 + 50 * kind.rate))
              << i << " of " << n << ", l2 " << kind.l2 << ", decay " << kind.decay;
        }
      }
    }
  });
}

}  // namespace
}  // namespace whet::kernels
