#include "core/rows.h"

#include <whet/error.h>

#include <algorithm>
#include <string>

namespace whet::core {

Rows::Rows(const ConstView& in, int axis) : sizes_(in.sizes), dtype_(in.dtype) {
  check_sizes(in.sizes, "in");
  if (element_bytes(in.dtype) < 2) {
    fail("in", std::string("its element type is ") + text(in.dtype) + ", must be f32, f64, bf16 or f16");
  }
  const int dims = static_cast<int>(sizes_.size());
  if (axis < -dims || axis >= dims) {
    throw Error("axis is " + std::to_string(axis) + ", must be " + std::to_string(-dims) + " to " +
                std::to_string(dims - 1) + " for " + std::to_string(dims) + " axes");
  }
  axis_ = static_cast<std::size_t>(axis < 0 ? axis + dims : axis);
  keys_ = sizes_[axis_];
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (i == axis_) continue;
    outer_sizes_[outer_dims_++] = sizes_[i];
    count_ *= sizes_[i];
  }
}

RowArray Rows::resolve(const ConstView& view, const char* name, bool broadcast) const {
  const Dims strides = strides_of(view, name);
  const std::int64_t bytes = element_bytes(view.dtype);
  RowArray a{.data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data)), .dtype = view.dtype};

  std::int64_t low = 0, high = 0;  // offsets of the first and the last byte
  bool empty = false;
  std::size_t outer = 0;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    empty |= sizes_[i] == 0;
    const bool repeats = broadcast && view.sizes[i] == 1;
    const std::int64_t stride = repeats ? 0 : strides[i];
    const std::int64_t last =
        times(times(stride, bytes, name), std::max<std::int64_t>(sizes_[i] - 1, 0), name);
    (last < 0 ? low : high) = plus(last < 0 ? low : high, last, name);
    (i == axis_ ? a.key_stride : a.row_strides[outer++]) = stride;
  }
  if (empty) {  // nothing to point to: offsets of a null pointer stay 0
    a.key_stride = 0;
    a.row_strides = {};
    return a;
  }
  if (view.data == nullptr) fail(name, "its data is null");
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(bytes) != 0) {
    fail(name, "its data isn't aligned to its element type");
  }
  a.begin = a.data + low;
  a.end = a.data + high + bytes;
  return a;
}

RowArray Rows::array(const ConstView& view, const char* name) const {
  check_sizes(view.sizes, name);
  if (!std::ranges::equal(view.sizes, sizes_)) {
    fail(name, "its sizes are " + text(view.sizes) + ", must be those of in, " + text(sizes_));
  }
  if (view.dtype != dtype_) {
    fail(name,
         std::string("its element type is ") + text(view.dtype) + ", must be that of in, " + text(dtype_));
  }
  return resolve(view, name, false);
}

RowArray Rows::output(const View& view, const char* name) const {
  const RowArray a = array(view, name);
  const Dims strides = strides_of(view, name);
  if (!holds_each_once(sizes_, strides, name)) {
    fail(name, "its strides " + text(strides) + " may hold an element twice");
  }
  return a;
}

RowArray Rows::mask(const ConstView& view) const {
  if (view.data == nullptr && view.sizes.empty()) return {};
  check_sizes(view.sizes, "mask");
  if (view.dtype != DType::boolean) {
    fail("mask", std::string("its element type is ") + text(view.dtype) + ", must be boolean");
  }
  bool fits = view.sizes.size() == sizes_.size();
  for (std::size_t i = 0; fits && i < sizes_.size(); ++i) {
    fits = view.sizes[i] == sizes_[i] || view.sizes[i] == 1;
  }
  if (!fits) {
    fail("mask", "its sizes are " + text(view.sizes) + ", must be those of in, " + text(sizes_) + ", or 1");
  }
  return resolve(view, "mask", true);
}

void Rows::check_lengths(std::span<const std::int64_t> lengths) const {
  if (lengths.empty()) return;
  check_per_row(lengths.size(), "lengths");
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || lengths[i] > keys_) {
      fail("lengths", "that of row " + std::to_string(i) + " is " + std::to_string(lengths[i]) +
                          ", must be 0 to " + std::to_string(keys_));
    }
  }
}

void Rows::check_per_row(std::size_t given, const char* name) const {
  if (given != static_cast<std::size_t>(count_)) {
    fail(name, std::to_string(given) + " given, must be one per row, " + std::to_string(count_));
  }
}

void check_same_or_apart(const Rows& rows, const RowArray& written, const char* written_name,
                         const RowArray& read, const char* read_name) {
  bool same = written.data == read.data && (rows.keys() <= 1 || written.key_stride == read.key_stride);
  for (std::size_t i = 0; i < rows.outer_dims(); ++i) {
    same = same && (rows.outer_size(i) <= 1 || written.row_strides[i] == read.row_strides[i]);
  }
  if (!same) check_apart({written, written_name}, {read, read_name});
}

}  // namespace whet::core
