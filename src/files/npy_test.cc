#include "files/npy.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <whet/error.h>

#include <cstring>
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

class Npy : public TemporaryFolder {
 protected:
  std::string save(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
};

std::string little_endian(std::size_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  return text;
}

std::string file_of(int version, const std::string& header, const std::string& data) {
  return std::string("\x93NUMPY") + static_cast<char>(version) + '\0' +
         little_endian(header.size(), version == 1 ? 2 : 4) + header + data;
}

std::string dictionary(const std::string& descr, const std::string& shape, const char* order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

NpyHeader parse(const std::string& file) {
  const auto bytes = std::as_bytes(std::span(file));
  return parse_npy_header(bytes.first(std::min(bytes.size(), kNpyStartBytes)), file.size(), "x.npy");
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
  EXPECT_TRUE(error.starts_with("x.npy: ")) << error;
  EXPECT_NE(error.find(reason), std::string::npos) << error << "\nshould say: " << reason;
}

std::vector<std::int64_t> list(const Dims& dims) { return {dims.begin(), dims.end()}; }

TEST_F(Npy, HeaderOfEveryVersionAndType) {
  const struct {
    const char* descr;
    NpyType type;
    std::size_t bytes;
  } cases[] = {{"<f4", NpyType::f32, 4},    {"<f8", NpyType::f64, 8},     {"<f2", NpyType::f16, 2},
               {"<V2", NpyType::bf16, 2},   {"|b1", NpyType::boolean, 1}, {"<i8", NpyType::i64, 8},
               {"<b1", NpyType::boolean, 1}};
  for (const auto& c : cases) {
    for (const int version : {1, 2, 3}) {
      const std::string file =
          file_of(version, dictionary(c.descr, "(2, 3)", "True"), std::string(6 * c.bytes, '\0'));
      const NpyHeader header = parse(file);
      EXPECT_EQ(header.type, c.type);
      EXPECT_TRUE(header.fortran_order);
      EXPECT_EQ(list(header.sizes), (std::vector<std::int64_t>{2, 3}));
      EXPECT_EQ(header.data_bytes, 6 * c.bytes);
      EXPECT_EQ(header.data_offset + header.data_bytes, file.size());
    }
  }
}

TEST_F(Npy, HeaderInAnyOrderAndSpacing) {
  for (const char* text :
       {"{'shape':(1,),'fortran_order':False,'descr':'<f4'}",
        " { \"descr\" : \"<f4\" ,\n\t'shape' : ( 1 , ) , 'fortran_order' : False , } \r\n \n"}) {
    EXPECT_EQ(list(parse(file_of(1, text, "abcd")).sizes), (std::vector<std::int64_t>{1})) << text;
  }
}

TEST_F(Npy, ShapesFromNoAxisToEight) {
  EXPECT_TRUE(parse(file_of(1, dictionary("<f4", "()"), "abcd")).sizes.empty());
  EXPECT_EQ(parse(file_of(1, dictionary("<f4", "()"), "abcd")).data_bytes, 4U);
  EXPECT_EQ(parse(file_of(1, dictionary("<f4", "(1, 1, 1, 1, 1, 1, 1, 1)"), "abcd")).sizes.size(), 8U);
  expect_refused(file_of(1, dictionary("<f4", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"), "abcd"), "more than 8 axes");
  EXPECT_EQ(parse(file_of(1, dictionary("<f4", "(0, 5)"), "")).data_bytes, 0U);
}

TEST_F(Npy, RefusesWhatIsNoNpyFile) {
  expect_refused("", "not a .npy file");
  expect_refused("\x93NUMP", "not a .npy file");
  expect_refused("PK\x03\x04 a zip archive", "not a .npy file");
  expect_refused("\x93NUMPY", "ends within its header");
  expect_refused(file_of(4, dictionary("<f4", "()"), "abcd"), "version 4.0");
  expect_refused(std::string("\x93NUMPY\x01\x01\x04\x00{}  ", 14), "version 1.1");
  expect_refused(std::string("\x93NUMPY\x01\x00\xff\xff{}  ", 14), "ends within its header");
  expect_refused(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}  ", 16), "ends within its header");
  expect_refused(file_of(2, dictionary("<f4", "()") + std::string(65536, ' '), "abcd"), "header of 65");
}

TEST_F(Npy, RefusesWrongDictionaries) {
  for (const char* text : {"",
                           "{",
                           "}",
                           "()",
                           "{}",
                           "{'descr'}",
                           "{'descr': '<f4'",
                           "{'descr': '<f4'}",
                           "{'descr': '<f4', 'shape': ()}",
                           "{'descr': '<f4', 'fortran_order': False}",
                           "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
                           "{'descr': '<f4' 'fortran_order': False, 'shape': ()}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}",
                           "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x",
                           "{'descr': '<f4, 'fortran_order': False, 'shape': ()}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': [1]}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,,)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (01,)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (1L,)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (+1,)}",
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
                           "{'descr': '<f4', 'fortran_order': Falsehood, 'shape': (1,)}",
                           "{,'descr': '<f4'}"}) {
    // Padded so that it is never too short to have a header.
    expect_refused(file_of(1, text + std::string(8, ' '), "abcd"), "whet can read");
  }
  expect_refused(file_of(1, dictionary("<f4", "()") + std::string(1, '\0'), "abcd"), "goes on");
}

TEST_F(Npy, RefusesTypesByName) {
  expect_refused(file_of(1, dictionary("|O", "(1,)"), "abcdefgh"), "Python objects");
  expect_refused(file_of(1, dictionary(">f4", "(1,)"), "abcd"), "big-endian");
  expect_refused(file_of(1, dictionary("|V2", "(1,)"), "ab"), "ml_dtypes.bfloat16");
  expect_refused(file_of(1, dictionary("<c8", "(1,)"), "abcdefgh"), "'<c8'");
  expect_refused(file_of(1, dictionary("<f16", "(1,)"), std::string(16, 'x')), "'<f16'");
  expect_refused(file_of(1, dictionary("", "(1,)"), ""), "type ''");
  expect_refused(file_of(1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", "abcd"),
                 "structured");
}

TEST_F(Npy, RefusesSizesBeyondTheFile) {
  expect_refused(file_of(1, dictionary("<f4", "(-1,)"), ""), "negative");
  expect_refused(file_of(1, dictionary("<f4", "(9223372036854775808,)"), ""), "beyond 63 bits");
  expect_refused(file_of(1, dictionary("<f4", "(99999999999999999999999999,)"), ""), "beyond 63 bits");
  expect_refused(file_of(1, dictionary("<f4", "(4294967296, 4294967296)"), ""), "beyond 63 bits");
  expect_refused(file_of(1, dictionary("<f4", "(4294967296, 4294967296, 0)"), ""), "beyond 63 bits");
  expect_refused(file_of(1, dictionary("<f8", "(2305843009213693952,)"), ""), "beyond 63 bits");
  expect_refused(file_of(1, dictionary("<f8", "(1000000000000,)"), "abcdefgh"), "cut short");
  expect_refused(file_of(1, dictionary("<f4", "(2,)"), "abcdefg"), "cut short");
  expect_refused(file_of(1, dictionary("<f4", "(2,)"), "abcdefghi"), "goes on");
}

// Every prefix of a good file, and every single byte of its header changed: refused or understood,
// never more data than there is.
TEST_F(Npy, DamagedFilesNeverPromiseMoreThanTheyHold) {
  const std::string good = file_of(1, dictionary("<f4", "(2, 3)"), std::string(24, 'x'));
  for (std::size_t length = 0; length < good.size(); ++length)
    EXPECT_NE(error_of(good.substr(0, length)), "");
  for (std::size_t i = 0; i < good.size() - 24; ++i) {
    for (int value = 0; value < 256; ++value) {
      std::string file = good;
      file[i] = static_cast<char>(value);
      try {
        const NpyHeader header = parse(file);
        EXPECT_EQ(header.data_offset + header.data_bytes, file.size());
      } catch (const FileError&) {
      }
    }
  }
}

TEST_F(Npy, RoundTripIsWhatNumpyWrites) {
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  OutputFile file(path("a.npy"));
  write_npy(file, NpyType::f32, {2, 3}, std::as_bytes(std::span(values)));
  file.commit();
  const std::string saved = content_of(path("a.npy"));
  EXPECT_EQ(saved.substr(0, 70), std::string("\x93NUMPY\x01\0v\0", 10) +
                                     "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }" + " ");
  EXPECT_EQ(saved[127], '\n');
  EXPECT_EQ(saved.size(), 128U + 24U);

  NpyArray array = read_npy(path("a.npy"));
  EXPECT_EQ(array.type(), NpyType::f32);
  EXPECT_TRUE(array.is_contiguous());
  const View view = array.view();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 64, 0U);
  EXPECT_EQ(list(view.strides), (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(std::memcmp(view.data, values.data(), 24), 0);
  EXPECT_EQ(files(), 1U);
}

TEST_F(Npy, FortranOrderIsAViewWithStrides) {
  NpyArray array =
      read_npy(save("f.npy", file_of(1, dictionary("<f4", "(2, 3)", "True"), std::string(24, 'x'))));
  EXPECT_FALSE(array.is_contiguous());
  EXPECT_EQ(list(array.view().strides), (std::vector<std::int64_t>{1, 2}));
  NpyArray line =
      read_npy(save("l.npy", file_of(1, dictionary("<f4", "(6,)", "True"), std::string(24, 'x'))));
  EXPECT_TRUE(line.is_contiguous());
  NpyArray empty = read_npy(save("e.npy", file_of(1, dictionary("<f8", "(3, 0, 2)", "True"), "")));
  EXPECT_EQ(list(empty.view().strides), (std::vector<std::int64_t>{1, 3, 3}));
}

TEST_F(Npy, ViewsOfEveryType) {
  const std::pair<NpyType, DType> types[] = {{NpyType::f32, DType::f32},
                                             {NpyType::f64, DType::f64},
                                             {NpyType::f16, DType::f16},
                                             {NpyType::bf16, DType::bf16},
                                             {NpyType::boolean, DType::boolean}};
  for (const auto& [type, dtype] : types) {
    NpyArray array(type, {3});
    EXPECT_EQ(array.view().dtype, dtype);
    EXPECT_EQ(array.bytes().size(), 3 * npy_item_bytes(type));
  }
  EXPECT_THROW(NpyArray(NpyType::i64, {3}).view(), Error);
  EXPECT_THROW(NpyArray(NpyType::f64, {std::int64_t{1} << 40, std::int64_t{1} << 40}), std::bad_alloc);
}

TEST_F(Npy, BooleansAreZeroOrOne) {
  EXPECT_NO_THROW(read_npy(save("m.npy", file_of(1, dictionary("|b1", "(2,)"), std::string("\0\1", 2)))));
  EXPECT_THROW(read_npy(save("m.npy", file_of(1, dictionary("|b1", "(2,)"), "\1\2"))), FileError);
}

TEST_F(Npy, ReadsOnlyRegularFiles) {
  EXPECT_THROW(read_npy(path("missing.npy")), FileError);
  EXPECT_THROW(read_npy(folder_), FileError);
  EXPECT_THROW(read_npy("/dev/zero"), FileError);
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_THROW(read_npy(path("fifo")), FileError);  // and doesn't wait for a writer
}

void write_text(OutputFile& file, std::string_view text) { file.write(std::as_bytes(std::span(text))); }

TEST_F(Npy, OutputAppearsOnlyWhenCommitted) {
  save("a", "old");
  {
    OutputFile file(path("a"));
    write_text(file, "new");
    file.finish();
    EXPECT_EQ(content_of(path("a")), "old");
    EXPECT_EQ(files(), 2U);
  }
  EXPECT_EQ(content_of(path("a")), "old");
  EXPECT_EQ(files(), 1U);

  OutputFile file(path("a"));
  write_text(file, "new");
  file.finish();
  file.commit();
  EXPECT_EQ(content_of(path("a")), "new");
  EXPECT_EQ(files(), 1U);
}

TEST_F(Npy, OutputKeepsPermissionsAndFollowsLinks) {
  save("a", "old");
  fs::permissions(path("a"), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("a", path("link"));
  OutputFile file(path("link"));
  write_text(file, "new");
  file.finish();
  file.commit();
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(content_of(path("a")), "new");
  EXPECT_EQ(fs::status(path("a")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(Npy, OutputsThatCannotBeWritten) {
  EXPECT_THROW(OutputFile(path("no/such/folder/a")), FileError);
  EXPECT_THROW(OutputFile{folder_}, FileError);
  OutputFile full("/dev/full");
  try {
    write_text(full, "x");
    FAIL() << "a full device took a byte";
  } catch (const FileError& e) {
    EXPECT_NE(std::string(e.what()).find("/dev/full: cannot write it: No space left"), std::string::npos)
        << e.what();
  }
  EXPECT_EQ(files(), 0U);
}

TEST_F(Npy, PipesAreWrittenStraight) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  const FileHandle reader(::open(path("fifo").c_str(), O_RDONLY | O_NONBLOCK));
  OutputFile file(path("fifo"));
  write_text(file, "abc");
  file.finish();
  file.commit();
  char buffer[8];
  EXPECT_EQ(::read(reader.get(), buffer, sizeof buffer), 3);
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
}

}  // namespace
}  // namespace whet::files
