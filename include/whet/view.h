// Views: a pointer, an element type, sizes and strides. They own nothing.
#ifndef WHET_VIEW_H_
#define WHET_VIEW_H_

#include <whet/export.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace whet {

// 16-bit storage. Arithmetic happens in f32; results are rounded to nearest, ties to even.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

enum class DType : std::int32_t { f32 = 0, f64 = 1, bf16 = 2, f16 = 3, boolean = 4 };

template <typename T>
struct DTypeOf;  // no value: this element type has no view
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};

inline constexpr std::size_t kMaxDims = 8;

// Up to kMaxDims sizes, or strides. More throw whet::Error.
class WHET_API Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  explicit Dims(std::span<const std::int64_t> values);

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t operator[](std::size_t i) const { return values_[i]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }

 private:
  std::array<std::int64_t, kMaxDims> values_{};
  std::size_t size_ = 0;
};

// Strides count elements, not bytes, and may be negative or 0 (but an output never holds one
// element twice). Empty strides mean contiguous with the last axis fastest.
struct ConstView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Dims sizes;
  Dims strides;

  ConstView() = default;
  template <typename T>
  ConstView(const T* data_, Dims sizes_, Dims strides_ = {})
      : data(data_), dtype(DTypeOf<T>::value), sizes(sizes_), strides(strides_) {}
  ConstView(const void* data_, DType dtype_, Dims sizes_, Dims strides_ = {})
      : data(data_), dtype(dtype_), sizes(sizes_), strides(strides_) {}
};

struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  Dims sizes;
  Dims strides;

  View() = default;
  template <typename T>
  View(T* data_, Dims sizes_, Dims strides_ = {})
      : data(data_), dtype(DTypeOf<T>::value), sizes(sizes_), strides(strides_) {}
  View(void* data_, DType dtype_, Dims sizes_, Dims strides_ = {})
      : data(data_), dtype(dtype_), sizes(sizes_), strides(strides_) {}

  operator ConstView() const { return {data, dtype, sizes, strides}; }
};

}  // namespace whet

#endif  // WHET_VIEW_H_
