// The arithmetic of small dense networks on one thread: products of small matrices, GELU, a first layer whose
// input is a number and a class, sums over rows, Adam. Used by the lab, one model a core; not part of
// libwhet.
//
// Everything is row-major, rows a stride apart. Give activations a stride that isn't a power of two (144 for
// a width of 128): walking down a column, as products with a transposed matrix do, would otherwise fall on a
// few sets of the first-level cache.
#ifndef WHET_KERNELS_DENSE_DENSE_H_
#define WHET_KERNELS_DENSE_DENSE_H_

#include <cstdint>

namespace whet::kernels {

// c = a b, or c += a b. a is (rows, depth), b (depth, columns), c (rows, columns). Either of a's strides and
// of b's may be 1: that is how a transposed matrix comes in. An element of c is the sum over depth in order
// and depends on nothing else. c overlaps neither a nor b.
template <typename T>
struct Product {
  std::int64_t rows, columns, depth;
  const T* a;
  std::int64_t a_row_stride, a_step_stride;
  const T* b;
  std::int64_t b_step_stride, b_column_stride;
  T* c;
  std::int64_t c_stride;
  bool add = false;
};

// rows of z = value * slope + offsets[class], `width` wide: what a dense layer does with a number and a
// one-hot class. No classes: every row has class 0.
template <typename T>
struct FirstLayer {
  std::int64_t rows, width;
  const float* values;
  const std::uint8_t* classes;
  const T* slope;
  const T* offsets;  // classes x width
};

struct AdamStep {
  double rate = 0;   // learning rate of this step
  double l2 = 0;     // added to the gradient: l2 * p
  double decay = 0;  // decoupled: p -= rate * decay * p
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
  double correction1 = 1, correction2 = 1;  // 1 - beta^step
};

// The versions of one SIMD target. GELU is its tanh form, x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715
// x^3).
template <typename T>
struct DenseKernels {
  void (*multiply)(const Product<T>& product);
  // y = gelu(x), n values; y may be x.
  void (*gelu)(const T* x, std::int64_t n, T* y);
  // d *= gelu'(x), n values.
  void (*gelu_backward)(const T* x, std::int64_t n, T* d);
  // out = gelu(z), rows out_stride apart.
  void (*first_layer)(const FirstLayer<T>& layer, T* out, std::int64_t out_stride);
  // With dz = dout * gelu'(z): dslope += sum value * dz, doffsets[class] += dz.
  void (*first_layer_backward)(const FirstLayer<T>& layer, const T* dout, std::int64_t dout_stride, T* dslope,
                               T* doffsets);
  // out[r] = x_r . y
  void (*dot_rows)(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t width, const T* y,
                   T* out);
  // sum += sum over r of weight_r x_r; without weights, of x_r. Rows of weight 0 aren't read.
  void (*add_rows)(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t width, const T* weights,
                   T* sum);
  // out = a x + b y, n values
  void (*combine)(T a, const T* x, T b, const T* y, std::int64_t n, T* out);
  // One step of Adam over n parameters with their gradient and moments.
  void (*adam)(const AdamStep& step, const T* gradient, std::int64_t n, T* parameters, T* m, T* v);
};

// Those of the current target (whet::target()).
template <typename T>
DenseKernels<T> dense_kernels();

}  // namespace whet::kernels

#endif  // WHET_KERNELS_DENSE_DENSE_H_
