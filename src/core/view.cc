#include <whet/error.h>
#include <whet/view.h>

#include <algorithm>
#include <string>

namespace whet {

Dims::Dims(std::span<const std::int64_t> values) : size_(values.size()) {
  if (values.size() > kMaxDims) {
    throw Error("sizes: " + std::to_string(values.size()) + " axes given, at most " +
                std::to_string(kMaxDims) + " allowed");
  }
  std::ranges::copy(values, values_.begin());
}

}  // namespace whet
