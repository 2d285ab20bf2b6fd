// A table of text: Markdown that also reads well on a terminal.
#ifndef WHET_REPORT_TABLE_H_
#define WHET_REPORT_TABLE_H_

#include <string>
#include <vector>

namespace whet::report {

class Table {
 public:
  using Cells = std::vector<std::string>;

  explicit Table(Cells head) : rows_{std::move(head)} {}
  // As many cells as the head has.
  void add(Cells row) { rows_.push_back(std::move(row)); }
  // Columns as wide as their widest cell, cells to the right.
  std::string text() const;

 private:
  std::vector<Cells> rows_;
};

}  // namespace whet::report

#endif  // WHET_REPORT_TABLE_H_
