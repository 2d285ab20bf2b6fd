#include "files/text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace whet::files {
namespace {

TEST(Escaped, LeavesUtf8AsItIs) {
  const std::string name = "a b/\xc3\xa9\xe2\x80\xa6\xf0\x9f\x98\x80\xc2\xa0~\\x41";
  EXPECT_EQ(escaped(name), name);
}

TEST(Escaped, ShowsOtherBytesAndControlCharacters) {
  EXPECT_EQ(escaped("bad\xff"), "bad\\xff");
  EXPECT_EQ(escaped("\xc3"), "\\xc3");                    // cut short
  EXPECT_EQ(escaped("\xc0\xaf"), "\\xc0\\xaf");           // longer than need be
  EXPECT_EQ(escaped("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(escaped("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(escaped("a\n\x1b[2J\x7f"), "a\\x0a\\x1b[2J\\x7f");
  EXPECT_EQ(escaped("\xc2\x9b"), "\\xc2\\x9b");  // to a terminal as good as ESC [
}

// Of any two bytes: JSON takes it, and a second time changes nothing.
TEST(Escaped, IsAlwaysJson) {
  for (int i = 0; i < 65536; ++i) {
    const std::string text = escaped(std::string{static_cast<char>(i >> 8), static_cast<char>(i & 255)});
    EXPECT_NO_THROW(nlohmann::json(text).dump()) << i;
    EXPECT_EQ(escaped(text), text);
  }
}

}  // namespace
}  // namespace whet::files
