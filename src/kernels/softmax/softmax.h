// What tests may ask of the row kernels beyond the public headers.
#ifndef WHET_KERNELS_SOFTMAX_SOFTMAX_H_
#define WHET_KERNELS_SOFTMAX_SOFTMAX_H_

#include <cstdint>

namespace whet::kernels {

// The Highway target that softmax runs on, answered by the code compiled for it.
std::int64_t softmax_target();

}  // namespace whet::kernels

#endif  // WHET_KERNELS_SOFTMAX_SOFTMAX_H_
