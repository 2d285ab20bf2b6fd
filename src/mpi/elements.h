// Arrays that own their elements: copies of views, contiguous, to be sent or summed.
#ifndef WHET_MPI_ELEMENTS_H_
#define WHET_MPI_ELEMENTS_H_

#include <whet/view.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace whet::mpi {

std::size_t bytes_of(DType dtype);
std::int64_t count_of(const Dims& sizes);
inline bool is_given(const ConstView& view) { return view.data != nullptr || !view.sizes.empty(); }

// f64 for f64, f32 for the others.
inline DType arithmetic(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

class Array {
 public:
  Array() = default;
  Array(DType dtype, const Dims& sizes);  // zeros

  // The elements of a view, in order; with `widens` 16-bit ones become f32.
  static Array copy(const ConstView& view, bool widens = false);

  View view() { return {bytes_.data(), dtype_, sizes_}; }
  ConstView view() const { return {bytes_.data(), dtype_, sizes_}; }
  std::span<std::byte> bytes() { return bytes_; }
  template <typename T>
  std::span<T> elements() {
    return {reinterpret_cast<T*>(bytes_.data()), bytes_.size() / sizeof(T)};
  }

 private:
  DType dtype_ = DType::f32;
  Dims sizes_;
  std::vector<std::byte> bytes_;
};

// View or ConstView with indices [first, first + size) of one axis.
template <typename AnyView>
AnyView cut(AnyView view, std::size_t axis, std::int64_t first, std::int64_t size);

// The same where that axis has more than one index, which a view that repeats hasn't.
template <typename AnyView>
AnyView cut_if_long(const AnyView& view, std::size_t axis, std::int64_t first, std::int64_t size) {
  return !is_given(view) || view.sizes[axis] == 1 ? view : cut(view, axis, first, size);
}

// Adds the elements of `view` to those of `sums` (f32 or f64, of the same sizes).
void add_to(const ConstView& view, View sums);

// to = from, which is f32 or f64, contiguous, and has as many elements, rounded to the type of `to`.
void store(const ConstView& from, View to);

}  // namespace whet::mpi

#endif  // WHET_MPI_ELEMENTS_H_
