#include "report/table.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>

#include "files/text.h"

namespace whet::report {
namespace {

// On a terminal: bytes that don't continue a UTF-8 character.
std::size_t columns(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

// A bar would end the cell, and a backslash before one would undo its escape.
std::string as_cell(const std::string& text) {
  std::string cell;
  std::size_t backslashes = 0;
  for (const char c : files::escaped(text)) {
    if (c == '|') cell.append(backslashes + 1, '\\');
    backslashes = c == '\\' ? backslashes + 1 : 0;
    cell += c;
  }
  return cell;
}

}  // namespace

std::string fixed(double value, int decimals) {
  std::string text(400, '\0');  // the largest double has 309 digits
  text.resize(static_cast<std::size_t>(std::snprintf(text.data(), text.size(), "%.*f", decimals, value)));
  const bool zero = std::isfinite(value) && text.find_first_of("123456789") == text.npos;
  return zero && text.starts_with('-') ? text.substr(1) : text;
}

Table::Table(const Cells& head) { add(head); }

void Table::add(const Cells& row) {
  rows_.emplace_back();
  for (const std::string& text : row) rows_.back().push_back(as_cell(text));
}

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
