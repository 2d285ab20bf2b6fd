#include "files/safetensors.h"

#include <whet/error.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "files/checksum.h"
#include "files/npy.h"

namespace whet::files {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "elements are used as they lie in the file");

constexpr std::string_view kMetadataName = "__metadata__";
constexpr std::size_t kHeaderAlignment =
    8;  // of the first element, as the reference implementation writes it

struct TypeFacts {
  TensorType type;
  std::size_t bytes;
  const char* name;
};

constexpr std::array<TypeFacts, 13> kTypes{{{TensorType::f64, 8, "F64"},
                                            {TensorType::f32, 4, "F32"},
                                            {TensorType::f16, 2, "F16"},
                                            {TensorType::bf16, 2, "BF16"},
                                            {TensorType::i64, 8, "I64"},
                                            {TensorType::i32, 4, "I32"},
                                            {TensorType::i16, 2, "I16"},
                                            {TensorType::i8, 1, "I8"},
                                            {TensorType::u64, 8, "U64"},
                                            {TensorType::u32, 4, "U32"},
                                            {TensorType::u16, 2, "U16"},
                                            {TensorType::u8, 1, "U8"},
                                            {TensorType::boolean, 1, "BOOL"}}};

const TypeFacts& facts(TensorType type) {
  return *std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeFacts& f) { return f.type == type; });
}

// For messages: short, and one line of printable ASCII whatever a file has for a name.
std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 64;
  const std::string shown = json(text.substr(0, kShown)).dump(-1, ' ', true, json::error_handler_t::replace);
  return "'" + shown.substr(1, shown.size() - 2) + (text.size() > kShown ? "...'" : "'");
}

std::string type_and_sizes(TensorType type, const Dims& sizes) {
  return std::string(tensor_type_name(type)) + " " + npy_shape_text(sizes);
}

// Empty if the bytes don't fit into 63 bits: a size of 0 hides no overflow.
std::optional<std::uint64_t> tensor_bytes(TensorType type, const Dims& sizes) {
  std::int64_t bytes = static_cast<std::int64_t>(tensor_item_bytes(type));
  bool has_elements = true;
  for (const std::int64_t size : sizes) {
    if (size < 0) return {};
    has_elements = has_elements && size > 0;
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) return {};
  }
  return has_elements ? static_cast<std::uint64_t>(bytes) : 0;
}

// A name that two tensors have.
template <typename Tensors>
std::optional<std::string_view> repeated_name(const Tensors& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  return twice == names.end() ? std::nullopt : std::optional(*twice);
}

[[noreturn]] void refuse(const std::string& path, const std::string& problem) {
  throw FileError(path, "not a safetensors file that whet can read: " + problem);
}

// The header's text, a JSON object of tensors. It is taken event by event, because a parser that builds a
// tree would keep only the last of two equal names, and would build whatever nesting a hostile file has.
class HeaderText final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderText(const std::string& path) : path_(path) {}

  SafetensorsHeader parse(std::string_view text) {
    if (!text.starts_with('{')) fail("the header doesn't begin with '{'");
    // To nlohmann's parser a zero byte is the end: what follows it would go unread.
    if (text.find('\0') != text.npos) fail("the header has a zero byte");
    json::sax_parse(text.begin(), text.end(), this);
    return std::move(header_);
  }

  bool start_object(std::size_t) override {
    if (context_ == Context::file) {
      context_ = Context::header;
    } else if (context_ == Context::header && name_ == kMetadataName) {
      if (std::exchange(has_metadata_, true)) fail("the header has " + in_quotes(kMetadataName) + " twice");
      context_ = Context::metadata;
    } else if (context_ == Context::header) {
      tensor_ = {};
      tensor_.name = name_;
      has_type_ = has_sizes_ = has_offsets_ = false;
      context_ = Context::tensor;
    } else {
      fail_value("an object");
    }
    return true;
  }

  bool key(std::string& text) override {
    (context_ == Context::header ? name_ : field_) = std::move(text);
    return true;
  }

  bool end_object() override {
    if (context_ == Context::tensor) {
      if (!has_type_ || !has_sizes_ || !has_offsets_) fail(owner() + " lacks dtype, shape or data_offsets");
      header_.tensors.push_back(std::move(tensor_));
    }
    context_ = Context::header;
    return true;
  }

  bool start_array(std::size_t) override {
    numbers_.clear();
    if (context_ == Context::tensor && field_ == "shape" && !has_sizes_) {
      context_ = Context::sizes;
    } else if (context_ == Context::tensor && field_ == "data_offsets" && !has_offsets_) {
      context_ = Context::offsets;
    } else {
      fail_value("a list");
    }
    return true;
  }

  bool end_array() override {
    if (context_ == Context::sizes) {
      tensor_.sizes = Dims(numbers_);
      has_sizes_ = true;
    } else {
      if (numbers_.size() != 2) fail(owner() + " has data_offsets that aren't two numbers");
      tensor_.begin = static_cast<std::uint64_t>(numbers_[0]);
      tensor_.end = static_cast<std::uint64_t>(numbers_[1]);
      has_offsets_ = true;
    }
    context_ = Context::tensor;
    return true;
  }

  bool string(std::string& text) override {
    if (context_ == Context::metadata) {
      if (!header_.metadata.try_emplace(field_, std::move(text)).second) {
        fail("its metadata has " + in_quotes(field_) + " twice");
      }
    } else if (context_ == Context::tensor && field_ == "dtype" && !has_type_) {
      tensor_.type = parse_type(text);
      has_type_ = true;
    } else {
      fail_value("a text");
    }
    return true;
  }

  bool number_unsigned(std::uint64_t number) override {
    if (context_ != Context::sizes && context_ != Context::offsets) fail_value("a number");
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) fail_number();
    if (context_ == Context::sizes && numbers_.size() == kMaxDims) {
      fail(owner() + " has more than " + std::to_string(kMaxDims) + " axes");
    }
    if (context_ == Context::offsets && numbers_.size() == 2) {
      fail(owner() + " has data_offsets that aren't two numbers");
    }
    numbers_.push_back(static_cast<std::int64_t>(number));
    return true;
  }

  bool number_integer(std::int64_t) override { fail_number(); }
  bool number_float(double, const std::string&) override { fail_number(); }
  bool null() override { fail_value("null"); }
  bool boolean(bool) override { fail_value("true or false"); }
  bool binary(json::binary_t&) override { fail_value("binary data"); }  // JSON has none

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail("the header is no JSON at its byte " + std::to_string(position));
  }

 private:
  enum class Context { file, header, metadata, tensor, sizes, offsets };

  [[noreturn]] void fail(const std::string& problem) const { refuse(path_, problem); }

  // A value where none of its kind may be, or a field that a tensor doesn't have or has already.
  [[noreturn]] void fail_value(const std::string& value) const {
    switch (context_) {
      case Context::file:
        fail("the header is " + value + " instead of an object");
      case Context::header:
        fail(in_quotes(name_) + " is " + value + " instead of an object");
      case Context::metadata:
        fail("its metadata has " + value + " for " + in_quotes(field_) + " instead of a text");
      case Context::tensor:
        fail(owner() + " has " + value + " for " + in_quotes(field_) + ", twice or where it shouldn't be");
      case Context::sizes:
      case Context::offsets:
        break;
    }
    fail(owner() + " has " + value + " in its " + field_);
  }

  [[noreturn]] void fail_number() const {
    if (context_ != Context::sizes && context_ != Context::offsets) fail_value("a number");
    fail(owner() + " has a number in its " + field_ + " that isn't whole, from 0 and within 63 bits");
  }

  std::string owner() const { return "its tensor " + in_quotes(name_); }

  TensorType parse_type(const std::string& text) const {
    for (const TypeFacts& type : kTypes) {
      if (text == type.name) return type.type;
    }
    std::string known;
    for (const TypeFacts& type : kTypes) known += (known.empty() ? "" : ", ") + std::string(type.name);
    fail(owner() + " has elements of type " + in_quotes(text) + "; whet reads " + known);
  }

  const std::string& path_;
  Context context_ = Context::file;
  SafetensorsHeader header_;
  TensorRange tensor_;
  std::string name_;   // of the tensor, or kMetadataName
  std::string field_;  // key within it
  std::vector<std::int64_t> numbers_;
  bool has_metadata_ = false, has_type_ = false, has_sizes_ = false, has_offsets_ = false;
};

// Names once, bytes as the sizes say, and no byte of the data in no tensor or in two.
void check_places(const SafetensorsHeader& header, std::uint64_t data_bytes, const std::string& path) {
  if (const auto name = repeated_name(header.tensors)) refuse(path, "it has two tensors " + in_quotes(*name));
  std::vector<const TensorRange*> sorted;
  for (const TensorRange& tensor : header.tensors) {
    const std::optional<std::uint64_t> bytes = tensor_bytes(tensor.type, tensor.sizes);
    if (tensor.begin > tensor.end || bytes != tensor.end - tensor.begin) {
      refuse(path, "its tensor " + in_quotes(tensor.name) + " has data_offsets from " +
                       std::to_string(tensor.begin) + " to " + std::to_string(tensor.end) + ", where " +
                       type_and_sizes(tensor.type, tensor.sizes) + " takes " +
                       (bytes ? std::to_string(*bytes) : "more than 63 bits of") + " bytes");
    }
    sorted.push_back(&tensor);
  }
  std::sort(sorted.begin(), sorted.end(), [](const TensorRange* a, const TensorRange* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t end = 0;
  for (const TensorRange* tensor : sorted) {
    if (tensor->begin != end) {
      refuse(path, "its tensor " + in_quotes(tensor->name) + " begins at byte " +
                       std::to_string(tensor->begin) + " of the data, where " + std::to_string(end) +
                       " is next: a " + (tensor->begin < end ? "second use of bytes" : "gap"));
    }
    end = tensor->end;
  }
  if (end == data_bytes) return;
  throw FileError(path, std::string(data_bytes < end ? "is cut short" : "goes on after its data") +
                            ": its tensors take " + std::to_string(end) + " bytes, there are " +
                            std::to_string(data_bytes) + "; write it again");
}

std::string checksum_of(const std::map<std::string, std::string>& metadata,
                        const std::vector<Tensor>& tensors) {
  Checksum checksum;
  checksum.add_number(metadata.size());
  for (const auto& [key, value] : metadata) {
    checksum.add_text(key);
    checksum.add_text(value);
  }
  std::vector<const Tensor*> sorted;
  sorted.reserve(tensors.size());
  for (const Tensor& tensor : tensors) sorted.push_back(&tensor);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  for (const Tensor* tensor : sorted) {
    checksum.add_text(tensor->name);
    checksum.add_text(tensor_type_name(tensor->type));
    checksum.add_number(tensor->sizes.size());
    for (const std::int64_t size : tensor->sizes) checksum.add_number(static_cast<std::uint64_t>(size));
    checksum.add_bytes(tensor->bytes);
  }
  return checksum.digits();
}

// Checks the checksum and takes it out of the metadata.
void verify(Safetensors& content) {
  const auto claimed = content.metadata.extract(std::string(kChecksumKey));
  const auto method = content.metadata.find(std::string(kChecksumMethodKey));
  const bool has_method = method != content.metadata.end();
  if (claimed.empty() && !has_method) return;
  if (claimed.empty()) {
    throw FileError(content.path, "was altered or damaged: its metadata has " +
                                      std::string(kChecksumMethodKey) + " but no " +
                                      std::string(kChecksumKey));
  }
  if (has_method && method->second != kChecksumMethod) {
    throw FileError(content.path, "has a checksum by the method " + in_quotes(method->second) +
                                      "; this version of whet knows only " + std::string(kChecksumMethod));
  }
  const std::string actual = checksum_of(content.metadata, content.tensors);
  if (claimed.mapped() != actual) {
    throw FileError(content.path, "was altered or damaged: its checksum is " + in_quotes(claimed.mapped()) +
                                      ", its content has '" + actual + "'");
  }
  if (has_method) content.metadata.erase(method);
  content.verified = true;
}

// Other bytes than 0 and 1 would be undefined behaviour as a bool.
void check_booleans(const Tensor& tensor, const std::string& path) {
  const auto wrong = std::find_if(tensor.bytes.begin(), tensor.bytes.end(),
                                  [](std::byte byte) { return byte > std::byte{1}; });
  if (wrong == tensor.bytes.end()) return;
  throw FileError(path, "has the byte " + std::to_string(std::to_integer<int>(*wrong)) +
                            " among the booleans of its tensor " + in_quotes(tensor.name) +
                            ", which are 0 or 1");
}

// Fills `bytes` from `offset` of a file.
using Fetch = std::function<void(std::uint64_t offset, std::span<std::byte> bytes)>;

Safetensors read_content(const Fetch& fetch, std::uint64_t file_size, const std::string& path) {
  std::vector<std::byte> start(
      static_cast<std::size_t>(std::min<std::uint64_t>(file_size, kSafetensorsLengthBytes)));
  fetch(0, start);
  start.resize(safetensors_header_bytes(start, file_size, path));
  fetch(0, start);
  SafetensorsHeader header = parse_safetensors_header(start, file_size, path);
  Safetensors content;
  content.path = path;
  content.metadata = std::move(header.metadata);
  content.tensors.reserve(header.tensors.size());
  for (TensorRange& range : header.tensors) {
    Tensor& tensor = content.tensors.emplace_back();
    tensor.name = std::move(range.name);
    tensor.type = range.type;
    tensor.sizes = range.sizes;
    tensor.bytes.resize(static_cast<std::size_t>(range.end - range.begin));
    fetch(header.data_offset + range.begin, tensor.bytes);
  }
  verify(content);
  for (const Tensor& tensor : content.tensors) {
    if (tensor.type == TensorType::boolean) check_booleans(tensor, path);
  }
  return content;
}

void check_tensor(const Tensor& tensor) {
  if (tensor.name == kMetadataName)
    throw Error("tensors: the name " + in_quotes(tensor.name) + " is reserved");
  const std::optional<std::uint64_t> bytes = tensor_bytes(tensor.type, tensor.sizes);
  if (bytes == tensor.bytes.size()) return;
  throw Error("tensors: " + in_quotes(tensor.name) + " has " + std::to_string(tensor.bytes.size()) +
              " bytes, where " + type_and_sizes(tensor.type, tensor.sizes) + " takes " +
              (bytes ? std::to_string(*bytes) : "more than 63 bits of them"));
}

void check_content(const Safetensors& content) {
  for (const std::string_view key : {kChecksumKey, kChecksumMethodKey}) {
    if (content.metadata.contains(std::string(key))) {
      throw Error("metadata: the key " + in_quotes(key) + " is reserved");
    }
  }
  for (const Tensor& tensor : content.tensors) check_tensor(tensor);
  if (const auto name = repeated_name(content.tensors)) {
    throw Error("tensors: two have the name " + in_quotes(*name));
  }
}

std::string json_text(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    throw Error("names and metadata: " + in_quotes(text) + " is not UTF-8");
  }
}

// The tensors in the order of their data: wide elements first. Each then begins at a multiple of its
// element's size, since all before it are of multiples of that size.
std::vector<std::size_t> data_order(const std::vector<Tensor>& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return tensor_item_bytes(tensors[a].type) > tensor_item_bytes(tensors[b].type);
  });
  return order;
}

std::string metadata_text(const Safetensors& content) {
  std::map<std::string, std::string> metadata = content.metadata;
  metadata.emplace(kChecksumMethodKey, kChecksumMethod);
  metadata.emplace(kChecksumKey, checksum_of(metadata, content.tensors));
  std::string text;
  for (const auto& [key, value] : metadata) {
    text += (text.empty() ? "" : ",") + json_text(key) + ":" + json_text(value);
  }
  return "{" + text + "}";
}

std::string header_bytes(const Safetensors& content, const std::vector<std::size_t>& order) {
  std::vector<std::uint64_t> begins(order.size());
  std::uint64_t end = 0;
  for (const std::size_t i : order) {
    begins[i] = end;
    end += content.tensors[i].bytes.size();
  }
  std::string text = "{\"" + std::string(kMetadataName) + "\":" + metadata_text(content);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Tensor& tensor = content.tensors[i];
    std::string sizes;
    for (const std::int64_t size : tensor.sizes) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    text += "," + json_text(tensor.name) + ":{\"dtype\":\"" + tensor_type_name(tensor.type) +
            "\",\"shape\":[" + sizes + "],\"data_offsets\":[" + std::to_string(begins[i]) + "," +
            std::to_string(begins[i] + tensor.bytes.size()) + "]}";
  }
  text += "}";
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  if (text.size() > kMaxSafetensorsText) {
    throw Error("names and metadata: they take " + std::to_string(text.size()) +
                " bytes; the format allows " + std::to_string(kMaxSafetensorsText));
  }
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  return length + text;
}

void write_content(const Safetensors& content, const std::function<void(std::span<const std::byte>)>& write) {
  check_content(content);
  const std::vector<std::size_t> order = data_order(content.tensors);
  const std::string header = header_bytes(content, order);
  write(std::as_bytes(std::span(header)));
  for (const std::size_t i : order) write(content.tensors[i].bytes);
}

}  // namespace

std::size_t tensor_item_bytes(TensorType type) { return facts(type).bytes; }

const char* tensor_type_name(TensorType type) { return facts(type).name; }

void Safetensors::add(std::string_view name, TensorType type, std::span<const std::byte> bytes,
                      const Dims& sizes) {
  Tensor tensor{
      .name = std::string(name), .type = type, .sizes = sizes, .bytes = {bytes.begin(), bytes.end()}};
  check_tensor(tensor);
  tensors.push_back(std::move(tensor));
}

const Tensor& Safetensors::find(std::string_view name, TensorType type, const Dims& sizes) const {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.name == name; });
  if (found == tensors.end()) {
    throw FileError(path, "has no tensor " + in_quotes(name) + "; expected " + type_and_sizes(type, sizes));
  }
  if (found->type != type || !std::ranges::equal(found->sizes, sizes)) {
    throw FileError(path, "has the tensor " + in_quotes(name) + " as " +
                              type_and_sizes(found->type, found->sizes) + "; expected " +
                              type_and_sizes(type, sizes));
  }
  return *found;
}

std::size_t safetensors_header_bytes(std::span<const std::byte> start, std::uint64_t file_size,
                                     const std::string& path) {
  if (start.size() < kSafetensorsLengthBytes || file_size < kSafetensorsLengthBytes) {
    refuse(path, "it has no 8 bytes for the length of a header");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(start[i]) << (8 * i);
  }
  if (length > file_size - kSafetensorsLengthBytes) {
    refuse(path, "it should have a header of " + std::to_string(length) + " bytes but ends before");
  }
  if (length > kMaxSafetensorsText) {
    refuse(path, "it has a header of " + std::to_string(length) + " bytes; the format allows " +
                     std::to_string(kMaxSafetensorsText));
  }
  return kSafetensorsLengthBytes + static_cast<std::size_t>(length);
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> start, std::uint64_t file_size,
                                           const std::string& path) {
  const std::size_t bytes = safetensors_header_bytes(start, file_size, path);
  // A file that another program writes to can have had another length a moment ago.
  if (bytes > start.size()) throw FileError(path, "changed while it was read; try again");
  const std::string_view text(reinterpret_cast<const char*>(start.data()), bytes);
  SafetensorsHeader header = HeaderText(path).parse(text.substr(kSafetensorsLengthBytes));
  header.data_offset = bytes;
  check_places(header, file_size - bytes, path);
  return header;
}

Safetensors read_safetensors(const std::string& path) {
  const InputFile file(path);
  return read_content([&](std::uint64_t offset, std::span<std::byte> bytes) { file.read(offset, bytes); },
                      file.size(), path);
}

Safetensors parse_safetensors(std::span<const std::byte> file, const std::string& path) {
  return read_content(
      [&](std::uint64_t offset, std::span<std::byte> bytes) {
        std::ranges::copy(file.subspan(static_cast<std::size_t>(offset), bytes.size()), bytes.begin());
      },
      file.size(), path);
}

void write_safetensors(OutputFile& file, const Safetensors& content) {
  write_content(content, [&](std::span<const std::byte> bytes) { file.write(bytes); });
  file.finish();
}

std::string serialize_safetensors(const Safetensors& content) {
  std::string file;
  write_content(content, [&](std::span<const std::byte> bytes) {
    file.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return file;
}

}  // namespace whet::files
