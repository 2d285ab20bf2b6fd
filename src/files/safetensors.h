// Named tensors and a few words about them in one file, in the safetensors format that PyTorch, JAX and NumPy
// users already have a reader for.
#ifndef WHET_FILES_SAFETENSORS_H_
#define WHET_FILES_SAFETENSORS_H_

#include <whet/view.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/file.h"

namespace whet::files {

// The element types whet reads and writes; the format's others (8-bit floats, complex) are refused by name.
enum class TensorType { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

std::size_t tensor_item_bytes(TensorType type);
// As the format spells it: "F32", "BOOL", ...
const char* tensor_type_name(TensorType type);

template <typename T>
struct TensorTypeOf;  // no value: Safetensors has no elements of this type
template <>
struct TensorTypeOf<double> {
  static constexpr TensorType value = TensorType::f64;
};
template <>
struct TensorTypeOf<float> {
  static constexpr TensorType value = TensorType::f32;
};
template <>
struct TensorTypeOf<f16> {
  static constexpr TensorType value = TensorType::f16;
};
template <>
struct TensorTypeOf<bf16> {
  static constexpr TensorType value = TensorType::bf16;
};
template <>
struct TensorTypeOf<std::int64_t> {
  static constexpr TensorType value = TensorType::i64;
};
template <>
struct TensorTypeOf<std::int32_t> {
  static constexpr TensorType value = TensorType::i32;
};
template <>
struct TensorTypeOf<std::uint64_t> {
  static constexpr TensorType value = TensorType::u64;
};
template <>
struct TensorTypeOf<std::uint8_t> {
  static constexpr TensorType value = TensorType::u8;
};

struct Tensor {
  std::string name;
  TensorType type = TensorType::f32;
  Dims sizes;                    // 0..8 axes, sizes >= 0
  std::vector<std::byte> bytes;  // the elements, last axis fastest, little-endian
};

// The content of a file.
struct Safetensors {
  std::string path;  // the file it was read from, for messages; no part of the content
  std::map<std::string, std::string> metadata;
  std::vector<Tensor> tensors;
  bool verified = false;  // whether it was read with a checksum, which then was right; no part of the content

  // Appends a copy of `values`. Error if they aren't as many as `sizes` say.
  template <typename T>
  void add(std::string_view name, std::span<const T> values, const Dims& sizes) {
    add(name, TensorTypeOf<T>::value, std::as_bytes(values), sizes);
  }
  void add(std::string_view name, TensorType type, std::span<const std::byte> bytes, const Dims& sizes);

  // The tensor of this name. FileError, with `path` in its text, if there is none or if it has another type
  // or other sizes.
  const Tensor& find(std::string_view name, TensorType type, const Dims& sizes) const;
  // Its elements; they live as long as the tensor.
  template <typename T>
  std::span<const T> values(std::string_view name, const Dims& sizes) const {
    const Tensor& tensor = find(name, TensorTypeOf<T>::value, sizes);
    return {reinterpret_cast<const T*>(tensor.bytes.data()), tensor.bytes.size() / sizeof(T)};
  }
};

// What write_safetensors adds to the metadata, and the reader checks and takes away again: the FNV-1a hash
// (64 bits, 16 hexadecimal digits) of names, types, sizes, elements and all other metadata. Two keys, because
// damage to a single one would turn the file into one without a checksum, and those are accepted: other
// programs write none. The hash doesn't depend on the order of tensors or the spelling of the JSON, so a
// program that loads a file and saves all of it again leaves it valid.
inline constexpr std::string_view kChecksumKey = "whet.checksum";
inline constexpr std::string_view kChecksumMethodKey = "whet.checksum.method";
inline constexpr std::string_view kChecksumMethod = "fnv1a-64";

// Reads a whole file. Nothing that its header says is believed beyond what is there: every field is checked
// before memory is allocated for it, and the tensors fill the rest of the file without gap or overlap, as the
// format demands. FileError for anything else, and for content that doesn't have the checksum it claims.
Safetensors read_safetensors(const std::string& path);

// Writes and finishes `file`; the caller commits it. The same content gives the same bytes. The header names
// the tensors in their order; the data has wide elements before narrow ones, so that all are aligned for
// those who map the file into memory. Error, with nothing written, if a tensor's bytes don't fit its sizes, a
// name occurs twice or is reserved ("__metadata__" and the keys above), or a text is not UTF-8.
void write_safetensors(OutputFile& file, const Safetensors& content);

// The same from and to memory. `path` is for messages.
Safetensors parse_safetensors(std::span<const std::byte> file, const std::string& path);
std::string serialize_safetensors(const Safetensors& content);

// Where a tensor's bytes are, counted from the end of the header.
struct TensorRange {
  std::string name;
  TensorType type = TensorType::f32;
  Dims sizes;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;  // with the checksum, not yet checked
  std::vector<TensorRange> tensors;             // in the header's order
  std::uint64_t data_offset = 0;                // where the elements begin in the file
};

// The bytes of length and text of the header of a file of `file_size` bytes that begins with `start`: its
// first kSafetensorsLengthBytes, or all of it if it is shorter. FileError if that is more than the file has
// or than kMaxSafetensorsText.
std::size_t safetensors_header_bytes(std::span<const std::byte> start, std::uint64_t file_size,
                                     const std::string& path);

// The header of such a file, of which `start` has safetensors_header_bytes or more.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> start, std::uint64_t file_size,
                                           const std::string& path);

inline constexpr std::size_t kSafetensorsLengthBytes = 8;
inline constexpr std::size_t kMaxSafetensorsText = 100'000'000;  // as the reference implementation

}  // namespace whet::files

#endif  // WHET_FILES_SAFETENSORS_H_
