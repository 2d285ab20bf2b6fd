// Results as tables: what a person reads on a terminal or in a file, from results.json alone
// (docs/results.md).
#ifndef WHET_REPORT_TABLES_H_
#define WHET_REPORT_TABLES_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace whet::report {

// Markdown, aligned so that it also reads well on a terminal.
std::string markdown_tables(const nlohmann::ordered_json& results);

// One line a model, size and rule: seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak.
std::string csv_table(const nlohmann::ordered_json& results);

// Several runs: page_data() of theirs, every other run against the first.
std::string markdown_comparison(const nlohmann::ordered_json& data);

}  // namespace whet::report

#endif  // WHET_REPORT_TABLES_H_
