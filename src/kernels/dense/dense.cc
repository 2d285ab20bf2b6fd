// Small dense networks: one table of functions for every SIMD target.
#include "kernels/dense/dense.h"

#include "kernels/row/row_job.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dense/dense.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/dense/dense-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whet {
namespace HWY_NAMESPACE {

template <typename T>
kernels::DenseKernels<T> KernelsOf() {
  return {.multiply = DenseMultiply<T>,
          .gelu = DenseGelu<T>,
          .gelu_backward = DenseGeluBackward<T>,
          .first_layer = DenseFirstLayer<T>,
          .first_layer_backward = DenseFirstLayerBackward<T>,
          .dot_rows = DenseDotRows<T>,
          .add_rows = DenseAddRows<T>,
          .combine = DenseCombine<T>,
          .adam = DenseAdam<T>};
}

kernels::DenseKernels<float> FloatKernels() { return KernelsOf<float>(); }
kernels::DenseKernels<double> DoubleKernels() { return KernelsOf<double>(); }

}  // namespace HWY_NAMESPACE
}  // namespace whet
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whet::kernels {

HWY_EXPORT(FloatKernels);
HWY_EXPORT(DoubleKernels);

template <>
DenseKernels<float> dense_kernels<float>() {
  return WHET_DISPATCH(FloatKernels)();
}

template <>
DenseKernels<double> dense_kernels<double>() {
  return WHET_DISPATCH(DoubleKernels)();
}

}  // namespace whet::kernels
#endif  // HWY_ONCE
