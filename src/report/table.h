// A table of text: Markdown that also reads well on a terminal.
#ifndef WHET_REPORT_TABLE_H_
#define WHET_REPORT_TABLE_H_

#include <string>
#include <vector>

namespace whet::report {

// The number with so many decimals; one that rounds to 0 has no sign.
std::string fixed(double value, int decimals);

class Table {
 public:
  using Cells = std::vector<std::string>;

  explicit Table(const Cells& head);
  // As many cells as the head has.
  void add(const Cells& row);
  // Columns as wide as their widest cell, cells to the right. Whatever a cell holds, it stays one cell.
  std::string text() const;

 private:
  std::vector<Cells> rows_;
};

}  // namespace whet::report

#endif  // WHET_REPORT_TABLE_H_
