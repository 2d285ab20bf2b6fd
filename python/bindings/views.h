// Arrays from Python, without copies. An array argument is either
//   - a NumPy array (anything with __array_struct__) in this machine's byte order, or
//   - a tuple (address, dtype code, sizes, strides): strides count elements, None = contiguous. That is
//     how tensors of other libraries come in; their owners keep the memory alive during the call.
#ifndef WHET_PYTHON_VIEWS_H_
#define WHET_PYTHON_VIEWS_H_

#include <nanobind/nanobind.h>
#include <whet/view.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "values.h"

namespace whet_python {

// Beyond whet::DType: what lists of lengths, row indices and states are made of.
inline constexpr std::int64_t kInt64 = 5;

whet::ConstView view_of(nb::handle object, const char* name);
whet::View written_view_of(nb::handle object, const char* name);

// A contiguous block, whatever its axes.
struct Block {
  void* data;
  std::size_t elements;
};
// Error unless `object` is contiguous, of this dtype code, a whole number of records of `record` elements
// and, if it is to be `written`, not read-only. None is an empty block.
Block block_of(nb::handle object, std::int64_t code, std::size_t record, bool written, const char* name);

template <typename Scalar>
inline constexpr std::int64_t kCodeOf = static_cast<std::int64_t>(whet::DTypeOf<Scalar>::value);
template <>
inline constexpr std::int64_t kCodeOf<std::int64_t> = kInt64;

// One record per row and the like: T is made of Scalars only.
template <typename T, typename Scalar = std::remove_const_t<T>>
std::span<T> span_of(nb::handle object, const char* name) {
  static_assert(sizeof(T) % sizeof(Scalar) == 0 && std::is_trivially_copyable_v<T>);
  constexpr std::size_t kRecord = sizeof(T) / sizeof(Scalar);
  const Block block = block_of(object, kCodeOf<Scalar>, kRecord, !std::is_const_v<T>, name);
  return {static_cast<T*>(block.data), block.elements / kRecord};
}

}  // namespace whet_python

#endif  // WHET_PYTHON_VIEWS_H_
