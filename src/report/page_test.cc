// The page carries any data, and no data can leave its element.
#include "report/page.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "results_example.h"

namespace whet::report {
namespace {

using Json = nlohmann::ordered_json;

// What stands in the page's element for data.
std::string data_in(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const std::size_t from = page.find(begin) + begin.size();
  return page.substr(from, page.find("</script>", from) - from);
}

TEST(Page, CarriesItsDataAndNothingToFillIn) {
  const Json data = page_data({{"run", results::example()}}, {});
  const std::string page = html_page(data);
  EXPECT_EQ(Json::parse(data_in(page)).dump(), data.dump());
  for (const char* placeholder : {"@data@", "@d3@", "@scripts@", "@licence@", "@page.css@"}) {
    EXPECT_EQ(page.find(placeholder), page.npos) << placeholder;
  }
  EXPECT_NE(page.find("Mike Bostock"), page.npos);
}

TEST(Page, CarriesAProbe) {
  const Json data = page_data({{"run", results::advised_probe_example()}}, {});
  EXPECT_EQ(Json::parse(data_in(html_page(data))).dump(), data.dump());
  EXPECT_EQ(data.at("runs").at(0).at("results").at("kind"), "probe");
}

TEST(Page, CarriesResultsOnClrsText) {
  const Json data = page_data({{"run", results::clrs_example()}}, {});
  EXPECT_EQ(Json::parse(data_in(html_page(data))).dump(), data.dump());
  EXPECT_EQ(data.at("runs").at(0).at("results").at("kind"), "clrs");
}

TEST(Page, LetsNoNameOut) {
  const Json data = page_data({{"</script><!--\xe2\x80\xa8&@data@", results::example()}}, {});
  const std::string text = data_in(html_page(data));
  EXPECT_EQ(text.find_first_of("<>&"), text.npos);
  EXPECT_EQ(text.find("\xe2\x80\xa8"), text.npos);
  EXPECT_EQ(Json::parse(text).dump(), data.dump());
}

TEST(Page, TakesNamesThatAreNoText) {
  const Json data = page_data({{"\xff", results::example()}}, {});
  EXPECT_EQ(Json::parse(data_in(html_page(data))).at("runs").at(0).at("name"), "\\xff");
}

}  // namespace
}  // namespace whet::report
