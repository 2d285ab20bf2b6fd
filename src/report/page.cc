#include "report/page.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "files/text.h"
#include "report/page_template.h"

namespace whet::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPlaceholder = "@data@";

// JSON inside a script element: no < may begin its end. U+2028 and U+2029 end lines in older JavaScript.
std::string inside_html(const std::string& json) {
  std::string text;
  text.reserve(json.size() + json.size() / 16);
  for (std::size_t i = 0; i < json.size(); ++i) {
    const std::string_view rest = std::string_view(json).substr(i);
    if (rest.front() == '<') {
      text += "\\u003c";
    } else if (rest.front() == '>') {
      text += "\\u003e";
    } else if (rest.front() == '&') {
      text += "\\u0026";
    } else if (rest.starts_with("\xe2\x80\xa8") || rest.starts_with("\xe2\x80\xa9")) {
      text += rest[2] == '\xa8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else {
      text += rest.front();
    }
  }
  return text;
}

}  // namespace

Json page_data(const std::vector<results::NamedResults>& runs,
               const std::vector<results::Comparison>& comparisons) {
  Json data{{"runs", Json::array()}, {"comparison", nullptr}};
  for (const results::NamedResults& run : runs)
    data["runs"].push_back({{"name", files::escaped(run.name)}, {"results", to_json(run.results)}});
  if (!comparisons.empty()) data["comparison"] = results::to_json(comparisons);
  return data;
}

std::string html_page(const Json& data) {
  const auto bytes = page_template();
  std::string page(bytes.begin(), bytes.end());
  const std::string json = inside_html(data.dump());
  return page.replace(page.find(kPlaceholder), kPlaceholder.size(), json);
}

}  // namespace whet::report
