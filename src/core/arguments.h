// Checks that every entry point shares. Each failure is a whet::Error that names the argument.
#ifndef WHET_CORE_ARGUMENTS_H_
#define WHET_CORE_ARGUMENTS_H_

#include <whet/view.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace whet::core {

std::int64_t element_bytes(DType dtype);

std::string text(const Dims& dims);
const char* text(DType dtype);
std::string text(double value);                       // the shortest that reads back the same
std::optional<double> number(std::string_view text);  // all of it a number, or nullopt

[[noreturn]] void fail(const char* name, const std::string& what);

// a * b or a + b, Error if that isn't an int64.
std::int64_t times(std::int64_t a, std::int64_t b, const char* name);
std::int64_t plus(std::int64_t a, std::int64_t b, const char* name);

// At least one axis, no negative size, and a product that fits 64 bits.
void check_sizes(const Dims& sizes, const char* name);

// The strides of a view, those of a contiguous one if it gives none.
Dims strides_of(const ConstView& view, const char* name);

// True if no two indices can meet: each axis steps over all that the finer ones reach.
bool holds_each_once(const Dims& sizes, const Dims& strides, const char* name);

// Bytes of an argument, by name.
struct Extent {
  const std::byte* begin;
  const std::byte* end;
  const char* name;

  // An array that knows the bytes it may touch.
  template <typename Array>
  requires requires(const Array& array) {
    { array.begin } -> std::convertible_to<const std::byte*>;
  }
  Extent(const Array& array, const char* name_) : begin(array.begin), end(array.end), name(name_) {}
  template <typename T>
  Extent(std::span<T> span, const char* name_)
      : begin(std::as_bytes(span).data()), end(begin + span.size_bytes()), name(name_) {}
};

// Error if what is written shares a byte with what is read.
void check_apart(const Extent& written, const Extent& read);

}  // namespace whet::core

#endif  // WHET_CORE_ARGUMENTS_H_
