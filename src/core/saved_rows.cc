#include "core/saved_rows.h"

#include <string>

#include "core/arguments.h"

namespace whet::core {

SavedRows saved_rows(const ConstView& view, DType arithmetic, std::int64_t rows, std::int64_t size,
                     bool data_is_looked_at) {
  if (view.data == nullptr && view.sizes.empty()) return {};
  check_sizes(view.sizes, "saved");
  if (view.dtype != arithmetic) {
    fail("saved", std::string("its element type is ") + text(view.dtype) + ", must be " + text(arithmetic));
  }
  const Dims strides = strides_of(view, "saved");
  std::int64_t elements = 1;
  bool contiguous = true;
  for (std::size_t i = view.sizes.size(); i-- > 0;) {
    contiguous = contiguous && (view.sizes[i] <= 1 || strides[i] == elements);
    elements *= view.sizes[i];
  }
  if (elements != times(rows, size, "saved")) {
    fail("saved", "its sizes are " + text(view.sizes) + ", must be " + std::to_string(rows) + " rows of " +
                      std::to_string(size));
  }
  if (elements == 0) return {};
  if (!contiguous) fail("saved", "its strides are " + text(strides) + ", must be contiguous");
  if (view.data == nullptr) {
    if (data_is_looked_at) fail("saved", "its data is null");
    return {};
  }
  auto* data = static_cast<std::byte*>(const_cast<void*>(view.data));
  return {.data = data, .size = size, .begin = data, .end = data + elements * element_bytes(arithmetic)};
}

}  // namespace whet::core
