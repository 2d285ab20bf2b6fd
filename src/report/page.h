// One page of HTML that draws results: style, scripts and D3 inside, nothing from a network. Its source is
// src/report/page.
#ifndef WHET_REPORT_PAGE_H_
#define WHET_REPORT_PAGE_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "results/load.h"

namespace whet::report {

// What the page draws, also as JSON for others: "runs", each with "name" and "results", and "comparison",
// null without any.
nlohmann::ordered_json page_data(const std::vector<results::NamedResults>& runs,
                                 const std::vector<results::Comparison>& comparisons);

// Names in the data may hold markup: it is shown, never run.
std::string html_page(const nlohmann::ordered_json& data);

}  // namespace whet::report

#endif  // WHET_REPORT_PAGE_H_
