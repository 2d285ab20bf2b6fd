#include "files/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <whet/error.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "files/file.h"
#include "temporary_folder.h"

namespace whet::files {
namespace {

namespace fs = std::filesystem;

class SafetensorsFile : public TemporaryFolder {};

std::string with_length(std::uint64_t length, const std::string& rest) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(length >> (8 * i) & 0xff));
  return file + rest;
}

std::string file_of(const std::string& header, const std::string& data = "") {
  return with_length(header.size(), header + data);
}

// One tensor "a", as the header has it.
std::string entry(const std::string& type, const std::string& shape, const std::string& offsets) {
  return "\"a\":{\"dtype\":\"" + type + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

Safetensors parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "x.safetensors");
}

// The text of the error that parsing gives, "" if there is none.
std::string error_of(const std::string& file) {
  try {
    parse(file);
  } catch (const FileError& e) {
    return e.what();
  }
  return "";
}

void expect_refused(const std::string& file, const std::string& reason) {
  const std::string error = error_of(file);
  EXPECT_TRUE(error.starts_with("x.safetensors: ")) << error;
  EXPECT_NE(error.find(reason), std::string::npos) << error << "\nshould say: " << reason;
  EXPECT_TRUE(std::all_of(error.begin(), error.end(), [](char c) { return c >= ' ' && c <= '~'; })) << error;
}

void expect_header_refused(const std::string& header, const std::string& reason,
                           const std::string& data = "abcd") {
  expect_refused(file_of(header, data), reason);
}

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

Safetensors example() {
  Safetensors content;
  content.metadata = {{"step", "12"}, {"note", "a \"quoted\" \\ line\nand \xc3\xa9"}};
  content.add<std::uint8_t>("flags", std::vector<std::uint8_t>{1, 2, 3}, {3});
  content.add<float>("weights", std::vector<float>{1, 2, 3, 4, 5, -0.0F}, {2, 3});
  content.add<double>("scalar", std::vector<double>{0.5}, {});
  content.add<float>("empty", {}, {4, 0, 2});
  content.add<std::int64_t>("", std::vector<std::int64_t>{-1}, {1});
  return content;
}

void expect_equal(const Safetensors& a, const Safetensors& b) {
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_EQ(a.tensors[i].name, b.tensors[i].name);
    EXPECT_EQ(a.tensors[i].type, b.tensors[i].type);
    EXPECT_TRUE(std::ranges::equal(a.tensors[i].sizes, b.tensors[i].sizes));
    EXPECT_EQ(a.tensors[i].bytes, b.tensors[i].bytes);
  }
}

TEST_F(SafetensorsFile, RoundTripKeepsContentOrderAndBits) {
  const Safetensors written = example();
  OutputFile file(path("a.safetensors"));
  write_safetensors(file, written);
  file.commit();
  const Safetensors read = read_safetensors(path("a.safetensors"));
  expect_equal(read, written);
  EXPECT_EQ(read.path, path("a.safetensors"));
  EXPECT_EQ(content_of(path("a.safetensors")), serialize_safetensors(written));
  EXPECT_EQ(serialize_safetensors(read), serialize_safetensors(written));
}

TEST_F(SafetensorsFile, BytesAreThese) {
  Safetensors content;
  content.add<std::uint8_t>("b", std::vector<std::uint8_t>{7}, {1});
  content.add<float>("a", std::vector<float>{1}, {1, 1});
  const std::string header =
      R"({"__metadata__":{"whet.checksum":"cc01a2f5e56f1fe1","whet.checksum.method":"fnv1a-64"},)"
      R"("b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},)"
      R"("a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(serialize_safetensors(content), file_of(header + padding, std::string("\0\0\x80\x3f\7", 5)));
}

TEST_F(SafetensorsFile, EveryTensorIsAlignedToItsElements) {
  Safetensors content;
  content.add<std::uint8_t>("u8", std::vector<std::uint8_t>(3), {3});
  content.add<bf16>("bf16", std::vector<bf16>(3), {3});
  content.add<double>("f64", std::vector<double>(1), {1});
  content.add<float>("f32", std::vector<float>(3), {3});
  content.add<f16>("f16", std::vector<f16>(1), {1});
  const std::string file = serialize_safetensors(content);
  const SafetensorsHeader header = parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "x");
  ASSERT_EQ(header.tensors.size(), 5U);
  for (const TensorRange& tensor : header.tensors) {
    EXPECT_EQ((header.data_offset + tensor.begin) % tensor_item_bytes(tensor.type), 0U) << tensor.name;
  }
}

TEST_F(SafetensorsFile, NoTensorsAndNoElements) {
  EXPECT_TRUE(parse(file_of("{}")).tensors.empty());
  EXPECT_TRUE(parse(file_of("{\"__metadata__\":{}}  ")).metadata.empty());
  expect_equal(parse(serialize_safetensors({})), {});
  const Safetensors empty = parse(file_of("{" + entry("F32", "[0,7]", "[0,0]") + "}"));
  EXPECT_TRUE(empty.values<float>("a", {0, 7}).empty());
  EXPECT_EQ(parse(file_of("{" + entry("F32", "[]", "[0,4]") + "}", "abcd")).tensors[0].bytes.size(), 4U);
  // Empty tensors may lie between others, and several in one place.
  EXPECT_EQ(parse(file_of(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                          R"("c":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},)"
                          R"("d":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},)"
                          R"("e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},)"
                          R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                          "xy"))
                .tensors.size(),
            5U);
}

TEST_F(SafetensorsFile, FilesOfOtherProgramsInAnyOrderAndSpacing) {
  const Safetensors content =
      parse(file_of("{ \"w\" :\n{ \"data_offsets\":[ 0 ,8 ],\t\"shape\" : [2], \"dtype\":\"F32\"} ,\r\n"
                    "\"__metadata__\": {\"format\":\"pt\", \"\\u0061\": \"\\u00e9\"} }   ",
                    std::string(8, '\0')));
  EXPECT_EQ(content.metadata, (std::map<std::string, std::string>{{"format", "pt"}, {"a", "\xc3\xa9"}}));
  EXPECT_EQ(content.values<float>("w", {2})[1], 0.0F);
}

TEST_F(SafetensorsFile, EveryType) {
  const std::pair<const char*, std::size_t> types[] = {
      {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2},
      {"I8", 1},  {"U64", 8}, {"U32", 4}, {"U16", 2},  {"U8", 1},  {"BOOL", 1}};
  for (const auto& [name, bytes] : types) {
    const std::string end = std::to_string(3 * bytes);
    const std::string data(3 * bytes, '\1');
    const Tensor tensor =
        parse(file_of("{" + entry(name, "[3]", "[0," + end + "]") + "}", data)).tensors.at(0);
    EXPECT_STREQ(tensor_type_name(tensor.type), name);
    EXPECT_EQ(tensor_item_bytes(tensor.type), bytes);
    EXPECT_EQ(tensor.bytes, std::vector<std::byte>(3 * bytes, std::byte{1}));
  }
  for (const char* name : {"F8_E4M3", "F8_E5M2", "F4", "C64", "f32", "F32 ", "", "F32\\u0000"}) {
    expect_header_refused("{" + entry(name, "[1]", "[0,4]") + "}", std::string("elements of type '"));
  }
  expect_header_refused("{" + entry("F8_E4M3", "[1]", "[0,1]") + "}", "type 'F8_E4M3'; whet reads F64, F32,",
                        "a");
}

TEST_F(SafetensorsFile, BooleansAreZeroOrOne) {
  const std::string header = "{" + entry("BOOL", "[2]", "[0,2]") + "}";
  EXPECT_EQ(error_of(file_of(header, std::string("\0\1", 2))), "");
  expect_header_refused(header, "the byte 2 among the booleans of its tensor 'a'", "\1\2");
}

TEST_F(SafetensorsFile, FindSaysWhatWasFoundAndWhatWasExpected) {
  Safetensors content = example();
  content.path = "run/w.safetensors";
  EXPECT_EQ(content.values<float>("weights", {2, 3})[2], 3.0F);
  EXPECT_EQ(content.values<double>("scalar", {})[0], 0.5);
  EXPECT_EQ(content.find("flags", TensorType::u8, {3}).bytes[1], std::byte{2});
  EXPECT_EQ(message_of([&] { content.values<float>("bias", {3}); }),
            "run/w.safetensors: has no tensor 'bias'; expected F32 (3,)");
  EXPECT_EQ(message_of([&] {
              content.values<float>("weights", {3, 2});
            }),
            "run/w.safetensors: has the tensor 'weights' as F32 (2, 3); expected F32 (3, 2)");
  EXPECT_EQ(message_of([&] {
              content.values<double>("weights", {2, 3});
            }),
            "run/w.safetensors: has the tensor 'weights' as F32 (2, 3); expected F64 (2, 3)");
  EXPECT_THROW(content.values<float>("weights", {2, 3, 1}), FileError);
}

TEST_F(SafetensorsFile, RefusesLengthsBeyondTheFileOrTheFormat) {
  expect_refused("", "no 8 bytes");
  expect_refused("1234567", "no 8 bytes");
  expect_refused(with_length(3, "{}"), "ends before");
  expect_refused(with_length(~std::uint64_t{0}, "{}"), "ends before");
  expect_refused(with_length(std::uint64_t{1} << 63, "{}"), "ends before");
  expect_refused(with_length(0, ""), "begin with '{'");
  // A file this large has room for its header, which is refused before anything is allocated for it.
  const std::string start = with_length(kMaxSafetensorsText + 1, "");
  EXPECT_NE(message_of([&] {
              safetensors_header_bytes(std::as_bytes(std::span(start)), std::uint64_t{1} << 40, "x");
            }).find("the format allows 100000000"),
            std::string::npos);
  // A header that was longer when its length was read.
  const std::string changed = with_length(100, "{}");
  EXPECT_NE(message_of([&] {
              parse_safetensors_header(std::as_bytes(std::span(changed)), 1000, "x");
            }).find("changed while it was read"),
            std::string::npos);
}

TEST_F(SafetensorsFile, RefusesWhatIsNoJson) {
  for (const char* text : {" {}", "[]", "\"a\"", "1", "null", "", "\xef\xbb\xbf{}", "x{}"}) {
    expect_header_refused(text, "begin with '{'", "");
  }
  for (const char* text : {"{",
                           "{]",
                           "{}}",
                           "{} x",
                           "{}{}",
                           "{,}",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":{}",
                           "{\"a\" {}}",
                           "{a:{}}",
                           "{'a':{}}",
                           "{/**/}",
                           "{}//",
                           "{\"\xff\":{}}",
                           "{\"\xc3\":{}}",
                           "{\"\\ud800\":{}}",
                           "{\"\\x\":{}}",
                           "{\"a\nb\":{}}",
                           "{\"\xed\xa0\x80\":{}}",
                           "{\"__metadata__\":{\"a\":\"b\",}}",
                           "{\"a"}) {
    expect_header_refused(text, "", "");
  }
  expect_header_refused(std::string("{}\0", 3), "zero byte", "");
  expect_header_refused(std::string("{}\0 {\"a\":1}", 11), "zero byte", "");
}

TEST_F(SafetensorsFile, RefusesNestingAtAnyDepth) {
  const std::string deep(1'000'000, '[');
  expect_header_refused("{\"a\":" + deep, "'a' is a list instead of an object");
  expect_header_refused("{\"a\":{\"shape\":" + deep, "a list in its shape");
  std::string objects = "{";
  for (int i = 0; i < 100'000; ++i) objects += "\"a\":{";
  expect_header_refused(objects, "an object for 'a'");
}

TEST_F(SafetensorsFile, RefusesWrongEntries) {
  const std::string good = entry("F32", "[1]", "[0,4]");
  ASSERT_EQ(error_of(file_of("{" + good + "}", "abcd")), "");
  for (const char* value : {"1", "-1", "1.5", "null", "true", "\"x\"", "[]"}) {
    expect_header_refused("{\"a\":" + std::string(value) + "}", "'a' is ");
  }
  expect_header_refused("{\"a\":{}}", "lacks dtype, shape or data_offsets");
  expect_header_refused(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "lacks");
  expect_header_refused(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "lacks");
  expect_header_refused(R"({"a":{"dtype":"F32","shape":[1]}})", "lacks");
  for (const char* more : {"\"dtype\":\"F32\"", "\"shape\":[1]", "\"data_offsets\":[0,4]", "\"more\":\"x\"",
                           "\"more\":[1]", "\"more\":{}", "\"more\":1", "\"dtype\":1", "\"dtype\":null",
                           "\"shape\":1", "\"shape\":\"x\"", "\"shape\":-1", "\"data_offsets\":0.5"}) {
    expect_header_refused("{" + good.substr(0, good.size() - 1) + "," + more + "}}",
                          "twice or where it shouldn't be");
  }
  expect_header_refused("{" + good + "," + good + "}", "two tensors 'a'");
  expect_header_refused(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                        R"("\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                        "two tensors 'a'", "");
  for (const char* value : {"\"1\"", "null", "true", "[1]", "{}"}) {
    const std::string list = "[" + std::string(value) + "]";
    expect_header_refused("{" + entry("F32", list, "[0,4]") + "}", " in its shape");
    expect_header_refused("{" + entry("F32", "[1]", list) + "}", " in its data_offsets");
  }
}

TEST_F(SafetensorsFile, RefusesWrongMetadata) {
  EXPECT_EQ(error_of(file_of(R"({"__metadata__":{"a":"b"}})")), "");
  for (const char* value : {"1", "null", "\"x\"", "[]"}) {
    expect_header_refused("{\"__metadata__\":" + std::string(value) + "}", "'__metadata__' is ", "");
  }
  for (const char* value : {"1", "-1", "0.5", "null", "true", "[]", "{}"}) {
    expect_header_refused("{\"__metadata__\":{\"a\":" + std::string(value) + "}}", "its metadata has ", "");
  }
  expect_header_refused(R"({"__metadata__":{"a":"b","a":"b"}})", "its metadata has 'a' twice", "");
  expect_header_refused(R"({"__metadata__":{},"__metadata__":{}})", "'__metadata__' twice", "");
}

TEST_F(SafetensorsFile, RefusesSizesThatAreNone) {
  for (const char* size : {"-1", "-0", "1.0", "1e0", "9223372036854775808", "18446744073709551615",
                           "18446744073709551616", "99999999999999999999999999999", "1e400"}) {
    // 1e400 is beyond what the JSON parser takes as a number.
    const char* reason = std::string_view(size) == "1e400" ? "no JSON" : "that isn't whole, from 0";
    expect_header_refused("{" + entry("F32", "[" + std::string(size) + "]", "[0,4]") + "}", reason);
    expect_header_refused("{" + entry("F32", "[1]", "[0," + std::string(size) + "]") + "}", reason);
  }
  expect_header_refused("{" + entry("F32", "[01]", "[0,4]") + "}", "no JSON");
  expect_header_refused("{" + entry("F32", "[NaN]", "[0,4]") + "}", "no JSON");
  EXPECT_EQ(error_of(file_of("{" + entry("F32", "[1,1,1,1,1,1,1,1]", "[0,4]") + "}", "abcd")), "");
  expect_header_refused("{" + entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") + "}", "more than 8 axes");
  for (const char* offsets : {"[]", "[0]", "[0,4,4]", "[0,4,4,4]"}) {
    expect_header_refused("{" + entry("F32", "[1]", offsets) + "}", "aren't two numbers");
  }
}

TEST_F(SafetensorsFile, RefusesSizesThatOverflowOrDisagree) {
  for (const char* shape : {"[4294967296,4294967296]", "[9223372036854775807]", "[4294967296,4294967296,0]",
                            "[0,4294967296,4294967296]", "[4611686018427387904,4]"}) {
    for (const char* offsets : {"[0,0]", "[0,4]"}) {
      expect_header_refused("{" + entry("F32", shape, offsets) + "}", "more than 63 bits of bytes");
    }
  }
  expect_header_refused("{" + entry("F32", "[2]", "[0,4]") + "}", "F32 (2,) takes 8 bytes");
  expect_header_refused("{" + entry("F32", "[0]", "[0,4]") + "}", "F32 (0,) takes 0 bytes");
  expect_header_refused("{" + entry("U8", "[3]", "[0,4]") + "}", "U8 (3,) takes 3 bytes");
  expect_header_refused("{" + entry("F32", "[1]", "[4,0]") + "}", "from 4 to 0");
  expect_header_refused("{" + entry("F32", "[1]", "[9223372036854775807,3]") + "}", "to 3");
}

TEST_F(SafetensorsFile, RefusesGapsOverlapsAndWrongEnds) {
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}";
  };
  EXPECT_EQ(error_of(file_of(two("[0,2]", "[2,4]"), "abcd")), "");
  EXPECT_EQ(error_of(file_of(two("[2,4]", "[0,2]"), "abcd")), "");
  expect_header_refused(two("[0,2]", "[1,3]"), "a second use of bytes");
  expect_header_refused(two("[0,2]", "[0,2]"), "a second use of bytes");
  expect_header_refused(two("[0,2]", "[3,5]"), "a gap");
  expect_header_refused(two("[1,3]", "[3,5]"), "'a' begins at byte 1 of the data, where 0 is next: a gap");
  expect_header_refused(two("[0,2]", "[2,4]"), "cut short: its tensors take 4 bytes, there are 3", "abc");
  expect_header_refused(two("[0,2]", "[2,4]"), "goes on after its data", "abcde");
  expect_header_refused("{}", "goes on after its data", "a");
  expect_header_refused("{" + entry("U8", "[0]", "[5,5]") + "}", "a gap");
  expect_header_refused("{" + entry("F32", "[2305843009213693951]", "[0,9223372036854775804]") + "}",
                        "cut short");
}

TEST_F(SafetensorsFile, HostileNamesStayOneShortLine) {
  const std::string name = "a\\nb\\u001b[31m\\u2028\xc3\xa9\\u0000";
  expect_header_refused("{\"" + name + "\":1}", "'a\\nb\\u001b[31m\\u2028\\u00e9\\u0000' is a number");
  const std::string error = error_of(file_of("{\"" + std::string(1'000'000, 'x') + "\":1}"));
  EXPECT_LT(error.size(), 200U) << error;
  // Shortened within a character of two bytes.
  expect_header_refused("{\"" + std::string(63, 'x') + "\xc3\xa9\":1}", "x\\ufffd...' is a number");
}

TEST_F(SafetensorsFile, EveryTruncationIsRefused) {
  const std::string good = serialize_safetensors(example());
  for (std::size_t length = 0; length < good.size(); ++length) expect_refused(good.substr(0, length), "");
  expect_refused(good + '\0', "goes on after its data");
}

TEST_F(SafetensorsFile, EveryFlippedBitIsRefused) {
  const std::string good = serialize_safetensors(example());
  ASSERT_EQ(error_of(good), "");
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string file = good;
      file[i] = static_cast<char>(file[i] ^ (1 << bit));
      expect_refused(file, "");
    }
  }
}

TEST_F(SafetensorsFile, AlteredContentIsRefusedByItsChecksum) {
  const std::string good = serialize_safetensors(example());
  std::string altered = good;
  altered.back() = static_cast<char>(altered.back() ^ 1);
  expect_refused(altered, "was altered or damaged: its checksum is '");
  expect_refused(altered, "', its content has '");

  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string file = good;
    return file.replace(file.find(from), from.size(), to);
  };
  expect_refused(replaced("\"step\":\"12\"", "\"step\":\"13\""), "altered or damaged");
  expect_refused(replaced("\"weights\"", "\"weightt\""), "altered or damaged");
  expect_refused(replaced("[2,3]", "[3,2]"), "altered or damaged");
  expect_refused(replaced("[4,0,2]", "[4,0,3]"), "altered or damaged");
  expect_refused(replaced("\"I64\"", "\"U64\""), "altered or damaged");
  expect_refused(replaced("\"whet.checksum\"", "\"what.checksum\""), "but no whet.checksum");
  expect_refused(replaced("\"whet.checksum.method\"", "\"what.checksum.method\""), "altered or damaged");
  expect_refused(replaced("\"fnv1a-64\"", "\"fnv1a-65\""), "the method 'fnv1a-65'");
}

// What a program does that sorts tensors its own way and keeps the metadata.
TEST_F(SafetensorsFile, ChecksumHoldsInAnotherOrder) {
  const Safetensors content = example();
  Safetensors sorted = content;
  std::ranges::sort(sorted.tensors, {}, &Tensor::name);
  const std::string a = serialize_safetensors(content), b = serialize_safetensors(sorted);
  EXPECT_NE(a, b);
  const auto checksum = [](const std::string& file) {
    const auto bytes = std::as_bytes(std::span(file));
    return parse_safetensors_header(bytes, file.size(), "x").metadata.at(std::string(kChecksumKey));
  };
  EXPECT_EQ(checksum(a), checksum(b));
}

TEST_F(SafetensorsFile, WritesNothingThatCannotBeRead) {
  Safetensors content;
  EXPECT_THROW(content.add<float>("a", std::vector<float>(3), {2}), Error);
  EXPECT_THROW(content.add<float>("a", {}, {-1}), Error);
  EXPECT_THROW(content.add<float>("a", {}, {std::int64_t{1} << 40, std::int64_t{1} << 40}), Error);
  EXPECT_THROW(content.add<float>("__metadata__", {}, {0}), Error);
  EXPECT_TRUE(content.tensors.empty());

  content.add<float>("a", {}, {0});
  content.add<float>("a", {}, {0});
  EXPECT_EQ(message_of([&] { serialize_safetensors(content); }), "tensors: two have the name 'a'");
  content.tensors.resize(1);
  content.tensors[0].bytes.resize(1);
  EXPECT_EQ(message_of([&] { serialize_safetensors(content); }),
            "tensors: 'a' has 1 bytes, where F32 (0,) takes 0");
  content.tensors[0] = {"\xff", TensorType::f32, {0}, {}};
  EXPECT_THROW(serialize_safetensors(content), Error);
  content.tensors.clear();
  content.metadata = {{"a", "\xff"}};
  EXPECT_THROW(serialize_safetensors(content), Error);
  for (const std::string_view key : {kChecksumKey, kChecksumMethodKey}) {
    content.metadata = {{std::string(key), "x"}};
    EXPECT_THROW(serialize_safetensors(content), Error);
  }
}

TEST_F(SafetensorsFile, ReadsOnlyRegularFiles) {
  EXPECT_THROW(read_safetensors(path("missing")), FileError);
  EXPECT_THROW(read_safetensors(folder_), FileError);
  EXPECT_THROW(read_safetensors("/dev/zero"), FileError);
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_THROW(read_safetensors(path("fifo")), FileError);  // and doesn't wait for a writer
}

TEST_F(SafetensorsFile, AllocatesNothingForWhatIsNotThere) {
  std::ofstream(path("a"), std::ios::binary) << with_length(std::uint64_t{1} << 62, "{}");  // 4 exabytes
  EXPECT_THROW(read_safetensors(path("a")), FileError);
  std::ofstream(path("b"), std::ios::binary);
  EXPECT_THROW(read_safetensors(path("b")), FileError);
}

}  // namespace
}  // namespace whet::files
