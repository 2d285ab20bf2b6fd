// What forward saves of each row for backward: a few numbers in the type of the arithmetic, which
// kernels/row/row-inl.h gives their meaning.
#ifndef WHET_CORE_SAVED_ROWS_H_
#define WHET_CORE_SAVED_ROWS_H_

#include <whet/rule.h>
#include <whet/view.h>

#include <cstddef>
#include <cstdint>

namespace whet::core {

// What a rule must see before it can choose.
inline bool needs_entropy(const Rule& rule) {
  return rule.kind() == Rule::Kind::paper || rule.kind() == Rule::Kind::polynomial || rule.needs_search();
}

inline bool needs_count(const Rule& rule) {
  return rule.kind() == Rule::Kind::log_length || rule.kind() == Rule::Kind::ssmax ||
         rule.kind() == Rule::Kind::log_power || rule.kind() == Rule::Kind::llama4 || rule.needs_search();
}

// Numbers per row: where logits are measured from, beta and the scale of the weights; a beta that moves with
// the logits needs the mean of the row too, and one that the entropy gives, its slope.
inline std::int64_t saved_size(const Rule& rule) {
  return needs_entropy(rule) ? (rule.needs_search() ? 4 : 6) : 3;
}

struct SavedRows {
  std::byte* data = nullptr;  // null: not given
  std::int64_t size = 0;      // numbers per row
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  bool given() const { return data != nullptr; }
  template <typename T>
  T* row(std::int64_t row) const {
    return reinterpret_cast<T*>(data) + row * size;
  }
};

// The argument `saved` of a call of so many rows; an empty view is none. Error if it has another element
// type, isn't contiguous or holds another number of elements. Its data may be null if `data_is_looked_at` is
// false.
SavedRows saved_rows(const ConstView& view, DType arithmetic, std::int64_t rows, std::int64_t size,
                     bool data_is_looked_at = true);

}  // namespace whet::core

#endif  // WHET_CORE_SAVED_ROWS_H_
