#include "mpi/elements.h"

#include <whet/shard.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace whet::mpi {
namespace {

Dims contiguous_strides(const Dims& sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= sizes[i];
  }
  return Dims(strides);
}

Dims strides_of(const ConstView& view) {
  return view.strides.empty() ? contiguous_strides(view.sizes) : view.strides;
}

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

float from_f16(std::uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
  if (exponent == 31) return sign * (fraction == 0 ? HUGE_VALF : std::nanf(""));
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

template <typename T>
T element(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

double load(const std::byte* at, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return element<float>(at);
    case DType::f64:
      return element<double>(at);
    case DType::bf16:
      return from_bf16(element<std::uint16_t>(at));
    case DType::f16:
      return from_f16(element<std::uint16_t>(at));
    case DType::boolean:
      return element<bool>(at) ? 1 : 0;
  }
  return 0;
}

// Calls body(first element, stride in elements, count) for every run along the last axis, in order.
template <typename Body>
void for_each_run(const ConstView& view, const Body& body) {
  const std::size_t axes = view.sizes.size();
  if (axes == 0 || count_of(view.sizes) == 0) return;
  const Dims strides = strides_of(view);
  const auto bytes = static_cast<std::int64_t>(bytes_of(view.dtype));
  std::array<std::int64_t, kMaxDims> index{};
  const auto* data = static_cast<const std::byte*>(view.data);
  const std::int64_t runs = count_of(view.sizes) / view.sizes[axes - 1];
  for (std::int64_t run = 0; run < runs; ++run) {
    std::int64_t offset = 0;
    for (std::size_t a = 0; a + 1 < axes; ++a) offset += index[a] * strides[a];
    body(data + offset * bytes, strides[axes - 1], view.sizes[axes - 1]);
    for (std::size_t a = axes - 1; a-- > 0;) {
      if (++index[a] < view.sizes[a]) break;
      index[a] = 0;
    }
  }
}

template <typename T>
void add_elements(const ConstView& view, T* sums) {
  const auto bytes = static_cast<std::int64_t>(bytes_of(view.dtype));
  for_each_run(view, [&](const std::byte* from, std::int64_t stride, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      *sums = static_cast<T>(static_cast<double>(*sums) + load(from + i * stride * bytes, view.dtype));
      ++sums;
    }
  });
}

}  // namespace

std::size_t bytes_of(DType dtype) {
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

std::int64_t count_of(const Dims& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

Array::Array(DType dtype, const Dims& sizes)
    : dtype_(dtype), sizes_(sizes), bytes_(static_cast<std::size_t>(count_of(sizes)) * bytes_of(dtype)) {}

Array Array::copy(const ConstView& view, bool widens) {
  const bool converts = widens && (view.dtype == DType::bf16 || view.dtype == DType::f16);
  Array array(converts ? DType::f32 : view.dtype, view.sizes);
  if (converts) {
    add_elements(view, array.elements<float>().data());
    return array;
  }
  const std::size_t bytes = bytes_of(view.dtype);
  std::byte* to = array.bytes_.data();
  for_each_run(view, [&](const std::byte* from, std::int64_t stride, std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    if (stride == 1) {
      std::memcpy(to, from, n * bytes);
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(to + static_cast<std::size_t>(i) * bytes,
                    from + i * stride * static_cast<std::int64_t>(bytes), bytes);
      }
    }
    to += n * bytes;
  });
  return array;
}

template <typename AnyView>
AnyView cut(AnyView view, std::size_t axis, std::int64_t first, std::int64_t size) {
  const Dims strides = strides_of(view);
  std::vector<std::int64_t> sizes(view.sizes.begin(), view.sizes.end());
  sizes[axis] = size;
  view.sizes = Dims(sizes);
  view.strides = strides;
  if (view.data != nullptr && size > 0) {
    using Byte = std::conditional_t<std::is_same_v<AnyView, View>, std::byte, const std::byte>;
    view.data = static_cast<Byte*>(view.data) +
                first * strides[axis] * static_cast<std::int64_t>(bytes_of(view.dtype));
  }
  return view;
}
template View cut(View view, std::size_t axis, std::int64_t first, std::int64_t size);
template ConstView cut(ConstView view, std::size_t axis, std::int64_t first, std::int64_t size);

void add_to(const ConstView& view, View sums) {
  sums.dtype == DType::f64 ? add_elements(view, static_cast<double*>(sums.data))
                           : add_elements(view, static_cast<float*>(sums.data));
}

// merge_outputs() rounds to every type; one "shard" of mass 1 leaves the values as they are.
void store(const ConstView& from, View to) {
  const Dims strides = strides_of(to);
  std::vector<std::int64_t> sizes(4 - to.sizes.size(), 1), steps(4 - to.sizes.size(), 0);
  sizes.insert(sizes.end(), to.sizes.begin(), to.sizes.end());
  steps.insert(steps.end(), strides.begin(), strides.end());
  const ConstView out(from.data, from.dtype, Dims(sizes));
  const std::vector<double> ones(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2]), 1.0);
  const std::span<const double> mass = ones;
  merge_outputs(std::span(&out, 1), std::span(&mass, 1), {to.data, to.dtype, Dims(sizes), Dims(steps)});
}

}  // namespace whet::mpi
