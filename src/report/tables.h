// Results as tables: what a person reads on a terminal or in a file, from results alone.
#ifndef WHET_REPORT_TABLES_H_
#define WHET_REPORT_TABLES_H_

#include <string>
#include <vector>

#include "results/load.h"

namespace whet::report {

// Markdown, aligned so that it also reads well on a terminal.
std::string markdown_tables(const results::Reproduction& results);
std::string markdown_tables(const results::Probe& probe);
std::string markdown_tables(const results::Clrs& clrs);

// One line per head, size and rule: seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak.
std::string csv_table(const results::Reproduction& results);

// Several runs of kind reproduction, every other one against the first.
std::string markdown_comparison(const std::vector<results::NamedResults>& runs,
                                const std::vector<results::Comparison>& comparisons);

}  // namespace whet::report

#endif  // WHET_REPORT_TABLES_H_
