#include "report/table.h"

#include <algorithm>
#include <cstddef>

namespace whet::report {
namespace {

// On a terminal: bytes that don't continue a UTF-8 character.
std::size_t columns(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

}  // namespace

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_.front().size(), 1);
  for (const Cells& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], columns(row[c]));
  }
  std::string text;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    text += "|";
    for (std::size_t c = 0; c < widths.size(); ++c) {
      text += " " + std::string(widths[c] - columns(rows_[r][c]), ' ') + rows_[r][c] + " |";
    }
    text += "\n";
    if (r > 0) continue;
    text += "|";
    for (const std::size_t width : widths) text += std::string(width + 1, '-') + ":|";
    text += "\n";
  }
  return text;
}

}  // namespace whet::report
