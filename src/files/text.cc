#include "files/text.h"

#include <algorithm>
#include <cstddef>

namespace whet::files {
namespace {

constexpr char32_t kControlEnd = 0x20, kDelete = 0x7f, kHighControlEnd = 0xa0;

// The bytes of the printable UTF-8 character that `text` begins with; 0 if it begins with none.
std::size_t printable_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= kControlEnd && first != kDelete ? 1 : 0;
  const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
  char32_t code = first & (0x7fU >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr char32_t kSmallest[] = {0, 0, kHighControlEnd, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return code >= kSmallest[size] && code <= 0x10ffff && !surrogate ? size : 0;
}

}  // namespace

std::string escaped(std::string_view name) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  while (!name.empty()) {
    const std::size_t size = printable_bytes(name);
    if (size > 0) {
      text += name.substr(0, size);
    } else {
      const auto byte = static_cast<unsigned char>(name.front());
      text += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 15U]};
    }
    name.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return text;
}

}  // namespace whet::files
