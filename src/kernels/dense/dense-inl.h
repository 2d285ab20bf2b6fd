// The loops of dense.h for one SIMD target.
//
// multiply: b goes through a packed panel on the stack, kDepthBlock rows of PanelColumns() values, 8 KiB of
// f32 on AVX2, that stays in the first-level cache while every strip of a passes by (matmul-inl.h). Packing
// costs one read and write of b for `rows` multiply-adds of each of its values, so products of a hundred rows
// and more run near the limit of the multiply-adds.
#if defined(WHET_KERNELS_DENSE_DENSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHET_KERNELS_DENSE_DENSE_INL_H_
#undef WHET_KERNELS_DENSE_DENSE_INL_H_
#else
#define WHET_KERNELS_DENSE_DENSE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/dense/dense.h"
#include "kernels/dense/matmul-inl.h"
#include "kernels/elements/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using kernels::AdamStep;
using kernels::FirstLayer;
using kernels::Product;

// Calls body(d, i) for i = 0, lanes, ... with the widest vectors, then one by one.
template <typename T, class Body>
HWY_INLINE void ForVectors(std::int64_t n, const Body& body) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(d, i);
  for (; i < n; ++i) body(hn::CappedTag<T, 1>(), i);
}

inline constexpr std::int64_t kDepthBlock = 128;

// The longest row of a panel.
template <typename T>
inline constexpr std::size_t kMaxPanel = kPanelVectors* hn::MaxLanes(ProductTag<T>());

// A full panel of rows of b that lie in order. Vectors, since a copy of this size as the compiler makes it
// costs more.
template <typename T>
HWY_INLINE void PackRows(const T* b, std::int64_t step_stride, std::int64_t depth, T* HWY_RESTRICT panel) {
  const ProductTag<T> d;
  const std::int64_t lanes = ProductLanes<T>();
  for (std::int64_t step = 0; step < depth; ++step, b += step_stride, panel += kPanelVectors * lanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) hn::StoreU(hn::LoadU(d, b + v * lanes), d, panel + v * lanes);
  }
}

// `columns` columns of b, `depth` of its rows, zeros up to the panel's width.
template <typename T>
HWY_INLINE void PackPanel(const T* b, std::int64_t step_stride, std::int64_t column_stride,
                          std::int64_t depth, std::int64_t columns, T* HWY_RESTRICT panel) {
  const std::int64_t width = PanelColumns<T>();
  if (column_stride == 1 && columns == width) return PackRows(b, step_stride, depth, panel);
  if (columns < width) std::fill_n(panel, depth * width, T(0));
  for (std::int64_t column = 0; column < columns; ++column) {
    for (std::int64_t step = 0; step < depth; ++step) {
      panel[step * width + column] = b[column * column_stride + step * step_stride];
    }
  }
}

// The rows of one panel's columns. A panel that is wider than what is left of c goes through a tile.
template <bool kAdd, typename T>
HWY_INLINE void MultiplyPanel(const Product<T>& p, const T* a, const T* panel, std::int64_t depth,
                              std::int64_t columns, T* c) {
  const std::int64_t width = PanelColumns<T>();
  HWY_ALIGN T tile[kStripRows * kMaxPanel<T>];
  for (std::int64_t row = 0; row < p.rows; row += kStripRows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(kStripRows, p.rows - row));
    const Strip<T> strip{a + row * p.a_row_stride, p.a_row_stride, p.a_step_stride};
    T* target = c + row * p.c_stride;
    if (columns == width) {
      Multiply<kAdd ? Into::kContinue : Into::kReplace>(rows, strip, Panel<T>{panel, width}, depth, target,
                                                        p.c_stride);
      continue;
    }
    for (int r = 0; kAdd && r < rows; ++r) std::copy_n(target + r * p.c_stride, columns, tile + r * width);
    if (kAdd) {
      for (int r = 0; r < rows; ++r) std::fill(tile + r * width + columns, tile + (r + 1) * width, T(0));
    }
    Multiply<kAdd ? Into::kContinue : Into::kReplace>(rows, strip, Panel<T>{panel, width}, depth, tile,
                                                      width);
    for (int r = 0; r < rows; ++r) std::copy_n(tile + r * width, columns, target + r * p.c_stride);
  }
}

template <typename T>
void DenseMultiply(const Product<T>& p) {
  const std::int64_t width = PanelColumns<T>();
  HWY_ALIGN T panel[kDepthBlock * kMaxPanel<T>];
  if (p.depth == 0 && !p.add) {
    for (std::int64_t row = 0; row < p.rows; ++row) std::fill_n(p.c + row * p.c_stride, p.columns, T(0));
  }
  for (std::int64_t start = 0; start < p.depth; start += kDepthBlock) {
    const std::int64_t depth = std::min(kDepthBlock, p.depth - start);
    const T* a = p.a + start * p.a_step_stride;
    for (std::int64_t column = 0; column < p.columns; column += width) {
      const std::int64_t columns = std::min(width, p.columns - column);
      PackPanel(p.b + start * p.b_step_stride + column * p.b_column_stride, p.b_step_stride,
                p.b_column_stride, depth, columns, panel);
      if (p.add || start > 0) {
        MultiplyPanel<true>(p, a, panel, depth, columns, p.c + column);
      } else {
        MultiplyPanel<false>(p, a, panel, depth, columns, p.c + column);
      }
    }
  }
}

// e^-|s| of s = 2 sqrt(2/pi) (x + 0.044715 x^3), from which GELU and its derivative follow without
// cancellation.
inline constexpr double kGeluSlope = 1.5957691216057308;  // 2 sqrt(2/pi)
inline constexpr double kGeluCube = 0.044715;

template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpMinusAbs(D d, V s) {
  using T = hn::TFromD<D>;
  const V y = hn::Neg(hn::Abs(s));
  if constexpr (std::is_same_v<D, hn::ScalableTag<T>>) {
    const Exponential<T> exponential(1.0);
    return exponential(d, exponential.limit(d, y));
  } else {
    // A lone value takes the path of the vectors, so that its position in an array can't change its bits.
    const hn::ScalableTag<T> wide;
    const Exponential<T> exponential(1.0);
    const auto e = exponential(wide, exponential.limit(wide, hn::Set(wide, hn::GetLane(y))));
    return hn::Set(d, hn::GetLane(e));
  }
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Gelu(D d, V x) {
  using T = hn::TFromD<D>;
  const V one = hn::Set(d, T(1));
  const V x2 = hn::Mul(x, x);
  const V s = hn::Mul(hn::Mul(x, hn::Set(d, T(kGeluSlope))), hn::MulAdd(x2, hn::Set(d, T(kGeluCube)), one));
  const V e = ExpMinusAbs(d, s);
  const V top = hn::IfThenElse(hn::Lt(s, hn::Zero(d)), e, one);
  return hn::Div(hn::Mul(x, top), hn::Add(one, e));
}

// sigma(s) + x s' sigma(s) (1 - sigma(s))
template <class D, class V = hn::Vec<D>>
HWY_INLINE V GeluDerivative(D d, V x) {
  using T = hn::TFromD<D>;
  const V one = hn::Set(d, T(1));
  const V x2 = hn::Mul(x, x);
  const V slope = hn::Set(d, T(kGeluSlope));
  const V s = hn::Mul(hn::Mul(x, slope), hn::MulAdd(x2, hn::Set(d, T(kGeluCube)), one));
  const V ds = hn::Mul(slope, hn::MulAdd(x2, hn::Set(d, T(3 * kGeluCube)), one));
  const V e = ExpMinusAbs(d, s);
  const V inverse = hn::Div(one, hn::Add(one, e));
  const V sigma = hn::Mul(hn::IfThenElse(hn::Lt(s, hn::Zero(d)), e, one), inverse);
  const V bell = hn::Mul(hn::Mul(e, inverse), inverse);
  // Where the bell is 0, its factor may be infinite.
  const V factor = hn::IfThenElseZero(hn::Ne(bell, hn::Zero(d)), hn::Mul(x, ds));
  return hn::MulAdd(factor, bell, sigma);
}

template <typename T>
void DenseGelu(const T* x, std::int64_t n, T* y) {
  ForVectors<T>(n, [&](auto d, std::int64_t i) { hn::StoreU(Gelu(d, hn::LoadU(d, x + i)), d, y + i); });
}

template <typename T>
void DenseGeluBackward(const T* x, std::int64_t n, T* dy) {
  ForVectors<T>(n, [&](auto d, std::int64_t i) {
    hn::StoreU(hn::Mul(hn::LoadU(d, dy + i), GeluDerivative(d, hn::LoadU(d, x + i))), d, dy + i);
  });
}

template <typename T>
HWY_INLINE const T* OffsetsOf(const FirstLayer<T>& layer, std::int64_t row) {
  return layer.offsets + (layer.classes != nullptr ? layer.classes[row] : 0) * layer.width;
}

template <typename T>
void DenseFirstLayer(const FirstLayer<T>& layer, T* out, std::int64_t out_stride) {
  for (std::int64_t row = 0; row < layer.rows; ++row) {
    const T value = layer.values[row];
    const T* offsets = OffsetsOf(layer, row);
    T* target = out + row * out_stride;
    ForVectors<T>(layer.width, [&](auto d, std::int64_t i) {
      const auto z = hn::MulAdd(hn::Set(d, value), hn::LoadU(d, layer.slope + i), hn::LoadU(d, offsets + i));
      hn::StoreU(Gelu(d, z), d, target + i);
    });
  }
}

template <typename T>
void DenseFirstLayerBackward(const FirstLayer<T>& layer, const T* dout, std::int64_t dout_stride, T* dslope,
                             T* doffsets) {
  for (std::int64_t row = 0; row < layer.rows; ++row) {
    const T value = layer.values[row];
    const T* offsets = OffsetsOf(layer, row);
    T* target = doffsets + (offsets - layer.offsets);
    ForVectors<T>(layer.width, [&](auto d, std::int64_t i) {
      const auto v = hn::Set(d, value);
      const auto z = hn::MulAdd(v, hn::LoadU(d, layer.slope + i), hn::LoadU(d, offsets + i));
      const auto dz = hn::Mul(hn::LoadU(d, dout + row * dout_stride + i), GeluDerivative(d, z));
      hn::StoreU(hn::MulAdd(v, dz, hn::LoadU(d, dslope + i)), d, dslope + i);
      hn::StoreU(hn::Add(dz, hn::LoadU(d, target + i)), d, target + i);
    });
  }
}

template <typename T>
void DenseDotRows(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t width, const T* y,
                  T* out) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* values = x + row * stride;
    auto even = hn::Zero(d), odd = hn::Zero(d);
    std::int64_t i = 0;
    for (; i + 2 * lanes <= width; i += 2 * lanes) {
      even = hn::MulAdd(hn::LoadU(d, values + i), hn::LoadU(d, y + i), even);
      odd = hn::MulAdd(hn::LoadU(d, values + i + lanes), hn::LoadU(d, y + i + lanes), odd);
    }
    T sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
    for (; i < width; ++i) sum += values[i] * y[i];
    out[row] = sum;
  }
}

// kVectors (1 or 8) vectors of the sum stay in registers while the rows pass by.
template <int kVectors, typename T>
HWY_INLINE void AddColumns(const T* x, std::int64_t stride, std::int64_t rows, const T* weights, T* sum) {
  static_assert(kVectors == 1 || kVectors == 8);
  constexpr int kHalf = kVectors == 8 ? 4 : 1;
  const hn::ScalableTag<T> d;
  using V = hn::Vec<hn::ScalableTag<T>>;
  const std::int64_t half = kHalf * static_cast<std::int64_t>(hn::Lanes(d));
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  V x0 = s0, x1 = s0, x2 = s0, x3 = s0;
  LoadRowVectors<kHalf>(d, sum, s0, s1, s2, s3);
  if constexpr (kVectors == 8) LoadRowVectors<kHalf>(d, sum + half, s4, s5, s6, s7);
  for (std::int64_t row = 0; row < rows; ++row) {
    const T weight = weights != nullptr ? weights[row] : T(1);
    if (weight == T(0)) continue;
    const V factor = hn::Set(d, weight);
    LoadRowVectors<kHalf>(d, x + row * stride, x0, x1, x2, x3);
    AddProducts<kHalf>(factor, x0, x1, x2, x3, s0, s1, s2, s3);
    if constexpr (kVectors == 8) {
      LoadRowVectors<kHalf>(d, x + row * stride + half, x0, x1, x2, x3);
      AddProducts<kHalf>(factor, x0, x1, x2, x3, s4, s5, s6, s7);
    }
  }
  StoreRowVectors<kHalf>(d, s0, s1, s2, s3, sum);
  if constexpr (kVectors == 8) StoreRowVectors<kHalf>(d, s4, s5, s6, s7, sum + half);
}

template <typename T>
void DenseAddRows(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t width, const T* weights,
                  T* sum) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  std::int64_t i = 0;
  for (; i + 8 * lanes <= width; i += 8 * lanes) AddColumns<8>(x + i, stride, rows, weights, sum + i);
  for (; i + lanes <= width; i += lanes) AddColumns<1>(x + i, stride, rows, weights, sum + i);
  for (; i < width; ++i) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const T weight = weights != nullptr ? weights[row] : T(1);
      if (weight != T(0)) sum[i] += weight * x[row * stride + i];
    }
  }
}

template <typename T>
void DenseCombine(T a, const T* x, T b, const T* y, std::int64_t n, T* out) {
  ForVectors<T>(n, [&](auto d, std::int64_t i) {
    const auto scaled = hn::Mul(hn::Set(d, b), hn::LoadU(d, y + i));
    hn::StoreU(hn::MulAdd(hn::Set(d, a), hn::LoadU(d, x + i), scaled), d, out + i);
  });
}

template <typename T>
void DenseAdam(const AdamStep& step, const T* gradient, std::int64_t n, T* parameters, T* m, T* v) {
  const auto scalar = [](double value) { return static_cast<T>(value); };
  const T scale = scalar(1 / std::sqrt(step.correction2));
  const T rate = scalar(step.rate / step.correction1);
  ForVectors<T>(n, [&](auto d, std::int64_t i) {
    const auto p = hn::LoadU(d, parameters + i);
    const auto g = hn::MulAdd(hn::Set(d, scalar(step.l2)), p, hn::LoadU(d, gradient + i));
    const auto first = hn::MulAdd(hn::Set(d, scalar(step.beta1)), hn::LoadU(d, m + i),
                                  hn::Mul(hn::Set(d, scalar(1 - step.beta1)), g));
    const auto second = hn::MulAdd(hn::Set(d, scalar(step.beta2)), hn::LoadU(d, v + i),
                                   hn::Mul(hn::Set(d, scalar(1 - step.beta2)), hn::Mul(g, g)));
    hn::StoreU(first, d, m + i);
    hn::StoreU(second, d, v + i);
    const auto root = hn::MulAdd(hn::Sqrt(second), hn::Set(d, scale), hn::Set(d, scalar(step.epsilon)));
    // p - (rate decay) p: 1 - rate decay would lose the digits of a small decay.
    const auto kept = hn::NegMulAdd(hn::Set(d, scalar(step.rate * step.decay)), p, p);
    hn::StoreU(hn::NegMulAdd(hn::Set(d, rate), hn::Div(first, root), kept), d, parameters + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#endif  // WHET_KERNELS_DENSE_DENSE_INL_H_
