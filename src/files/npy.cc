#include "files/npy.h"

#include <whet/error.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

namespace whet::files {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are used as they lie in the file");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeaderBytes = 65535;
constexpr std::size_t kHeaderAlignment = 64;  // of the first element, as NumPy writes it

struct TypeFacts {
  NpyType type;
  std::size_t bytes;
  const char* name;
  std::string_view descr;
};

constexpr std::array<TypeFacts, 6> kTypes{{{NpyType::f32, 4, "float32", "<f4"},
                                           {NpyType::f64, 8, "float64", "<f8"},
                                           {NpyType::f16, 2, "float16", "<f2"},
                                           {NpyType::bf16, 2, "bfloat16", "<V2"},
                                           {NpyType::boolean, 1, "bool", "|b1"},
                                           {NpyType::i64, 8, "int64", "<i8"}}};

const TypeFacts& facts(NpyType type) {
  return *std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeFacts& f) { return f.type == type; });
}

std::string quoted(std::string_view text) {
  constexpr std::size_t kShown = 32;
  return "'" + std::string(text.substr(0, kShown)) + (text.size() > kShown ? "...'" : "'");
}

// The header's text: a Python dictionary with exactly the keys descr, fortran_order and shape.
class HeaderText {
 public:
  HeaderText(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  NpyHeader parse() {
    NpyHeader header;
    bool has_descr = false, has_order = false, has_shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string_view key = parse_string();
      expect(':');
      if (key == "descr" && !has_descr) {
        header.type = parse_type();
        has_descr = true;
      } else if (key == "fortran_order" && !has_order) {
        header.fortran_order = parse_bool();
        has_order = true;
      } else if (key == "shape" && !has_shape) {
        header.sizes = parse_shape();
        has_shape = true;
      } else {
        fail("the header has the key " + quoted(key) + " twice or shouldn't have it");
      }
      if (!accept(',') && peek() != '}') fail_here("',' or '}'");
    }
    if (peek() != '\0' || position_ != text_.size()) fail("the header goes on after its '}'");
    if (!has_descr || !has_order || !has_shape) fail("the header lacks descr, fortran_order or shape");
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw FileError(path_, "not a .npy file that whet can read: " + problem);
  }

  [[noreturn]] void fail_here(const std::string& expected) const {
    fail("the header should have " + expected + " at its byte " + std::to_string(position_));
  }

  // The next character that isn't white space, not consumed; '\0' at the end.
  char peek() {
    while (position_ < text_.size() && std::string_view(" \t\r\n").find(text_[position_]) != text_.npos) {
      ++position_;
    }
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  bool accept(char c) {
    if (peek() != c) return false;
    ++position_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail_here(std::string("'") + c + "'");
  }

  bool accept_word(std::string_view word) {
    peek();
    if (!text_.substr(position_).starts_with(word)) return false;
    position_ += word.size();
    return true;
  }

  std::string_view parse_string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail_here("a string");
    const std::size_t begin = ++position_;
    const std::size_t end = text_.find(quote, begin);
    if (end == text_.npos) fail("the header has a string without an end");
    position_ = end + 1;
    return text_.substr(begin, end - begin);
  }

  bool parse_bool() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    fail_here("True or False");
  }

  NpyType parse_type() {
    if (peek() == '[') fail("it has named fields (a structured array); save the field you need by itself");
    const std::string_view descr = parse_string();
    for (const TypeFacts& type : kTypes) {
      if (descr == type.descr) return type.type;
    }
    // Some C++ writers give even single bytes a byte order.
    if (descr == "<b1") return NpyType::boolean;
    refuse_type(descr);
  }

  [[noreturn]] void refuse_type(std::string_view descr) const {
    if (descr == "|O" || descr == "O") {
      fail("it holds Python objects ('|O'), which whet never unpickles; save it as float32");
    }
    if (descr.starts_with('>')) {
      fail("it is big-endian (" + quoted(descr) + "); save it little-endian, as array.astype('<f4')");
    }
    if (descr == "|V2") {
      fail(
          "its elements are two bytes without a meaning ('|V2'); for bfloat16 save "
          "array.view(ml_dtypes.bfloat16)");
    }
    fail("it has elements of type " + quoted(descr) +
         "; whet reads float32, float64, float16, bfloat16, bool and int64");
  }

  Dims parse_shape() {
    std::vector<std::int64_t> sizes;
    expect('(');
    bool comma = true;
    while (!accept(')')) {
      if (!comma) fail_here("',' or ')'");
      if (sizes.size() == kMaxDims) fail("it has more than " + std::to_string(kMaxDims) + " axes");
      sizes.push_back(parse_size());
      comma = accept(',');
    }
    // In Python (3) is a number, (3,) a shape.
    if (sizes.size() == 1 && !comma) fail("its shape is a number, not a tuple");
    return Dims(sizes);
  }

  std::int64_t parse_size() {
    if (peek() == '-') fail("its shape has a negative size");
    const std::size_t begin = position_;
    std::int64_t size = 0;
    for (; position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9'; ++position_) {
      if (__builtin_mul_overflow(size, 10, &size) ||
          __builtin_add_overflow(size, text_[position_] - '0', &size)) {
        fail("its shape has a size beyond 63 bits");
      }
    }
    if (position_ == begin) fail_here("a size");
    if (text_[begin] == '0' && position_ > begin + 1) fail("its shape has a size with a leading 0");
    return size;
  }

  std::string_view text_;
  std::size_t position_ = 0;
  const std::string& path_;
};

// Bytes of an array. Empty if they, or a stride, don't fit into 63 bits: a size of 0 hides no overflow.
std::optional<std::size_t> array_bytes(NpyType type, const Dims& sizes) {
  std::int64_t bytes = static_cast<std::int64_t>(npy_item_bytes(type));
  bool has_elements = true;
  for (const std::int64_t size : sizes) {
    has_elements = has_elements && size > 0;
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) return {};
  }
  return has_elements ? static_cast<std::size_t>(bytes) : 0;
}

// Where the header's text lies in the file.
struct TextRange {
  std::size_t offset;
  std::size_t length;
};

TextRange find_header_text(std::string_view start, std::uint64_t file_size, const std::string& path) {
  const auto byte_at = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(start[i]));
  };
  if (!start.starts_with(kMagic)) {
    throw FileError(path, "not a .npy file: it doesn't begin with \\x93NUMPY; write it with numpy.save");
  }
  if (start.size() < 12) throw FileError(path, "not a whole .npy file: it ends within its header");
  const std::size_t major = byte_at(6), minor = byte_at(7);
  if (major < 1 || major > 3 || minor != 0) {
    throw FileError(path, "has .npy version " + std::to_string(major) + "." + std::to_string(minor) +
                              "; whet reads 1.0, 2.0 and 3.0");
  }
  TextRange range{.offset = 10, .length = byte_at(8) | byte_at(9) << 8};
  if (major > 1) range = {.offset = 12, .length = range.length | byte_at(10) << 16 | byte_at(11) << 24};
  if (range.length > file_size - range.offset) {
    throw FileError(path, "not a whole .npy file: it ends within its header");
  }
  if (range.length > kMaxHeaderBytes) {
    throw FileError(path, "has a header of " + std::to_string(range.length) + " bytes; whet reads up to " +
                              std::to_string(kMaxHeaderBytes));
  }
  return range;
}

std::string header_bytes(NpyType type, const Dims& sizes) {
  std::string text = "{'descr': '" + std::string(facts(type).descr) +
                     "', 'fortran_order': False, 'shape': " + npy_shape_text(sizes) + ", }";
  constexpr std::size_t kTextOffset = 10;
  text.append(kHeaderAlignment - 1 - (kTextOffset + text.size()) % kHeaderAlignment, ' ');
  text.push_back('\n');
  const std::size_t length = text.size();  // 8 axes of 63 bits end far below 65536
  std::string header(kMagic);
  header.push_back('\x01');
  header.push_back('\x00');
  header.push_back(static_cast<char>(length & 0xff));
  header.push_back(static_cast<char>(length >> 8));
  return header + text;
}

// Other bytes than 0 and 1 would be undefined behaviour as a bool.
void check_booleans(const NpyArray& array, const std::string& path) {
  const auto bytes = array.bytes();
  const auto wrong = std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b > std::byte{1}; });
  if (wrong == bytes.end()) return;
  throw FileError(path, "has the byte " + std::to_string(std::to_integer<int>(*wrong)) +
                            " among its booleans, which are 0 or 1; save it with numpy.save(array != 0)");
}

}  // namespace

std::size_t npy_item_bytes(NpyType type) { return facts(type).bytes; }

const char* npy_type_name(NpyType type) { return facts(type).name; }

std::string npy_shape_text(const Dims& sizes) {
  std::string text = "(";
  for (std::size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

NpyHeader parse_npy_header(std::span<const std::byte> start, std::uint64_t file_size,
                           const std::string& path) {
  const std::string_view text(reinterpret_cast<const char*>(start.data()), start.size());
  const TextRange range = find_header_text(text, file_size, path);
  NpyHeader header = HeaderText(text.substr(range.offset, range.length), path).parse();
  const std::optional<std::size_t> bytes = array_bytes(header.type, header.sizes);
  if (!bytes)
    throw FileError(path, "has the shape " + npy_shape_text(header.sizes) + ", beyond 63 bits of bytes");
  header.data_offset = range.offset + range.length;
  header.data_bytes = *bytes;
  const std::uint64_t there = file_size - header.data_offset;
  if (there != header.data_bytes) {
    throw FileError(path, std::string(there < *bytes ? "is cut short" : "goes on after its data") +
                              ": shape " + npy_shape_text(header.sizes) + " of " +
                              npy_type_name(header.type) + " takes " + std::to_string(*bytes) +
                              " bytes, there are " + std::to_string(there) + "; write it again");
  }
  return header;
}

NpyArray::NpyArray(const NpyHeader& header)
    : header_(header), data_(static_cast<std::byte*>(::operator new[](header.data_bytes, kAlignment))) {}

NpyArray::NpyArray(NpyType type, const Dims& sizes)
    : NpyArray([&] {
        const std::optional<std::size_t> bytes = array_bytes(type, sizes);
        if (!bytes) throw std::bad_alloc();
        return NpyHeader{.type = type, .sizes = sizes, .data_bytes = *bytes};
      }()) {}

Dims NpyArray::strides() const {
  const std::size_t dims = header_.sizes.size();
  std::vector<std::int64_t> strides(dims);
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < dims; ++i) {
    const std::size_t axis = header_.fortran_order ? i : dims - 1 - i;
    strides[axis] = stride;
    stride *= std::max<std::int64_t>(header_.sizes[axis], 1);
  }
  return Dims(strides);
}

bool NpyArray::is_contiguous() const { return !header_.fortran_order || header_.sizes.size() < 2; }

View NpyArray::view() {
  switch (header_.type) {
    case NpyType::f32:
      return {data_.get(), DType::f32, sizes(), strides()};
    case NpyType::f64:
      return {data_.get(), DType::f64, sizes(), strides()};
    case NpyType::f16:
      return {data_.get(), DType::f16, sizes(), strides()};
    case NpyType::bf16:
      return {data_.get(), DType::bf16, sizes(), strides()};
    case NpyType::boolean:
      return {data_.get(), DType::boolean, sizes(), strides()};
    case NpyType::i64:
      break;
  }
  throw Error("view: int64 elements have no view");
}

NpyArray read_npy(const std::string& path) {
  const InputFile file(path);
  std::vector<std::byte> start(
      static_cast<std::size_t>(std::min<std::uint64_t>(file.size(), kNpyStartBytes)));
  file.read(0, start);
  NpyArray array(parse_npy_header(start, file.size(), path));
  // Small files are whole in `start` already, but one more read keeps one way.
  file.read(file.size() - array.bytes().size(), array.bytes());
  if (array.type() == NpyType::boolean) check_booleans(array, path);
  return array;
}

void write_npy(OutputFile& file, NpyType type, const Dims& sizes, std::span<const std::byte> bytes) {
  const std::string header = header_bytes(type, sizes);
  file.write(std::as_bytes(std::span(header)));
  file.write(bytes);
  file.finish();
}

}  // namespace whet::files
