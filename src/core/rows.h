// The rows of a call: its views checked once, at the boundary, and turned into what a kernel walks.
#ifndef WHET_CORE_ROWS_H_
#define WHET_CORE_ROWS_H_

#include <whet/row.h>
#include <whet/view.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/arguments.h"

namespace whet::core {

inline constexpr std::size_t kMaxOuterDims = kMaxDims - 1;

// One array of a call, addressed by row and key. Strides count elements.
struct RowArray {
  std::byte* data = nullptr;  // null: not given
  DType dtype = DType::f32;
  std::int64_t key_stride = 0;
  std::array<std::int64_t, kMaxOuterDims> row_strides{};
  const std::byte* begin = nullptr;  // the bytes it may touch: [begin, end)
  const std::byte* end = nullptr;
};

// Sizes of a call. Every function below throws whet::Error naming the argument.
class Rows {
 public:
  Rows(const ConstView& in, int axis);

  std::int64_t count() const { return count_; }
  std::int64_t keys() const { return keys_; }
  std::size_t outer_dims() const { return outer_dims_; }
  std::int64_t outer_size(std::size_t i) const { return outer_sizes_[i]; }

  // An array of the same sizes and element type as `in`.
  RowArray array(const ConstView& view, const char* name) const;
  // The same for one that is written: no element twice.
  RowArray output(const View& view, const char* name) const;
  // A boolean mask whose sizes are those of `in` or 1; an empty view is no mask.
  RowArray mask(const ConstView& view) const;
  void check_lengths(std::span<const std::int64_t> lengths) const;
  void check_per_row(std::size_t given, const char* name) const;  // one per row

 private:
  RowArray resolve(const ConstView& view, const char* name, bool broadcast) const;

  Dims sizes_;
  std::size_t axis_ = 0;
  DType dtype_ = DType::f32;
  std::int64_t count_ = 1;
  std::int64_t keys_ = 0;
  std::size_t outer_dims_ = 0;
  std::array<std::int64_t, kMaxOuterDims> outer_sizes_{};
};

// check_apart for two arrays of the call that may be one: same pointer and strides.
void check_same_or_apart(const Rows& rows, const RowArray& written, const char* written_name,
                         const RowArray& read, const char* read_name);

// Walks rows in order and keeps the offset of each array (in elements) without divisions.
template <std::size_t kArrays>
class RowCursor {
 public:
  RowCursor(const Rows& rows, const std::array<const RowArray*, kArrays>& arrays, std::int64_t row)
      : rows_(rows), arrays_(arrays) {
    for (std::size_t i = rows.outer_dims(); i-- > 0;) {
      index_[i] = row % rows.outer_size(i);
      row /= rows.outer_size(i);
      for (std::size_t a = 0; a < kArrays; ++a) offsets_[a] += index_[i] * arrays[a]->row_strides[i];
    }
  }

  std::int64_t offset(std::size_t array) const { return offsets_[array]; }

  // Always inlined: a call per row would show in short rows.
  [[gnu::always_inline]] void next() {
    for (std::size_t i = rows_.outer_dims(); i-- > 0;) {
      const bool wraps = ++index_[i] == rows_.outer_size(i);
      const std::int64_t steps = wraps ? 1 - rows_.outer_size(i) : 1;
      for (std::size_t a = 0; a < kArrays; ++a) offsets_[a] += steps * arrays_[a]->row_strides[i];
      if (!wraps) return;
      index_[i] = 0;
    }
  }

 private:
  const Rows& rows_;
  const std::array<const RowArray*, kArrays> arrays_;
  std::array<std::int64_t, kMaxOuterDims> index_{};
  std::array<std::int64_t, kArrays> offsets_{};
};

}  // namespace whet::core

#endif  // WHET_CORE_ROWS_H_
