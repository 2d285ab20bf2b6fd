// JSON that others left: a value, or an error that names the file; never a crash.
#include "files/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "files/file.h"
#include "temporary_folder.h"

namespace whet::files {
namespace {

using Json = nlohmann::ordered_json;

std::string error_of(const std::string& text) {
  try {
    parse_json(text, "a.json");
  } catch (const FileError& e) {
    return e.what();
  }
  return "";
}

std::string nested(std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(ParseJson, GivesTheValueInItsOrder) {
  const Json json = parse_json(" {\"b\": [1, -2.5, null], \"a\": \"\xc3\xa9\"}\n", "a.json");
  EXPECT_EQ(json.dump(), "{\"b\":[1,-2.5,null],\"a\":\"\xc3\xa9\"}");
  EXPECT_EQ(parse_json("3", "a.json"), 3);
}

TEST(ParseJson, RefusesWhatIsNoneByTheByte) {
  const std::string rest = " on, maybe cut short; restore it, or run the command that made it again";
  EXPECT_EQ(error_of(""), "a.json: is not JSON from byte 1" + rest);
  EXPECT_EQ(error_of("{\"a\": 1"), "a.json: is not JSON from byte 8" + rest);
  EXPECT_EQ(error_of("[1] 2"), "a.json: is not JSON from byte 5" + rest);
  EXPECT_EQ(error_of(std::string("[1]\0 2", 6)), "a.json: is not JSON from byte 4" + rest);
  EXPECT_EQ(error_of("[\"\xff\"]"), "a.json: is not JSON from byte 3" + rest);
  EXPECT_EQ(error_of("[1e999]"), "a.json: holds a number beyond the range of a double");
}

TEST(ParseJson, BoundsTheDepth) {
  EXPECT_EQ(parse_json(nested(kDeepestJson), "a.json").dump(), nested(kDeepestJson));
  const std::string error = "a.json: is nested deeper than the 32 levels that whet reads";
  EXPECT_EQ(error_of(nested(kDeepestJson + 1)), error);
  EXPECT_EQ(error_of(std::string(200'000, '[')), error);
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_EQ(error_of(objects), error);
}

class ReadJson : public TemporaryFolder {};

TEST_F(ReadJson, BoundsTheSize) {
  write_text(path("a.json"), "[1]");
  EXPECT_EQ(read_json(path("a.json")).dump(), "[1]");
  std::filesystem::resize_file(path("a.json"), (64 << 20) + 1);
  EXPECT_THROW(read_json(path("a.json")), FileError);
  EXPECT_THROW(read_json(path("missing.json")), FileError);
}

}  // namespace
}  // namespace whet::files
