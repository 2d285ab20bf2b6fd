#include "core/arguments.h"

#include <whet/error.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace whet::core {

std::int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::f64:
      return 8;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::boolean:
      return 1;
  }
  return 0;
}

std::string text(const Dims& dims) {
  std::string s = "(";
  for (std::size_t i = 0; i < dims.size(); ++i) s += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return s + ")";
}

const char* text(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::boolean:
      return "boolean";
  }
  return "unknown";
}

std::string text(double value) {
  char buffer[32];
  return std::string(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
}

std::optional<double> number(std::string_view text) {
  double value = 0;
  const char *const first = text.data(), *const last = first + text.size();
  const auto [end, error] = std::from_chars(first, last, value);
  if (text.empty() || error != std::errc() || end != last) return std::nullopt;
  return value;
}

[[noreturn]] void fail(const char* name, const std::string& what) {
  throw Error(std::string(name) + ": " + what);
}

std::int64_t times(std::int64_t a, std::int64_t b, const char* name) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) fail(name, "its extent doesn't fit 64 bits");
  return result;
}

std::int64_t plus(std::int64_t a, std::int64_t b, const char* name) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) fail(name, "its extent doesn't fit 64 bits");
  return result;
}

void check_sizes(const Dims& sizes, const char* name) {
  if (sizes.empty()) fail(name, "has no axes, 1 to " + std::to_string(kMaxDims) + " are allowed");
  std::int64_t elements = 1;
  for (const std::int64_t size : sizes) {
    if (size < 0) fail(name, "sizes " + text(sizes) + " must not be negative");
    // A size of 0 must not hide an overflow of the others.
    elements = times(elements, std::max<std::int64_t>(size, 1), name);
  }
}

Dims strides_of(const ConstView& view, const char* name) {
  if (view.strides.empty()) {
    std::array<std::int64_t, kMaxDims> strides{};
    std::int64_t stride = 1;
    for (std::size_t i = view.sizes.size(); i-- > 0;) {
      strides[i] = stride;
      stride = times(stride, std::max<std::int64_t>(view.sizes[i], 1), name);
    }
    return Dims(std::span<const std::int64_t>(strides.data(), view.sizes.size()));
  }
  if (view.strides.size() != view.sizes.size()) {
    fail(name, "has " + std::to_string(view.strides.size()) + " strides for " +
                   std::to_string(view.sizes.size()) + " axes");
  }
  return view.strides;
}

bool holds_each_once(const Dims& sizes, const Dims& strides, const char* name) {
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxDims> axes;  // |stride|, size
  std::size_t used = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] > 1) axes[used++] = {strides[i] < 0 ? -strides[i] : strides[i], sizes[i]};
  }
  std::ranges::sort(std::span(axes).first(used));
  std::int64_t reach = 0;
  for (std::size_t i = 0; i < used; ++i) {
    if (axes[i].first <= reach) return false;
    reach = plus(reach, times(axes[i].first, axes[i].second - 1, name), name);
  }
  return true;
}

void check_apart(const Extent& written, const Extent& read) {
  const bool either_empty = written.begin == written.end || read.begin == read.end;
  if (either_empty || written.begin >= read.end || read.begin >= written.end) return;
  fail(written.name, std::string("overlaps ") + read.name);
}

}  // namespace whet::core
