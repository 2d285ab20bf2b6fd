// Arrays in NumPy's .npy format, versions 1.0, 2.0 and 3.0.
#ifndef WHET_FILES_NPY_H_
#define WHET_FILES_NPY_H_

#include <whet/view.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "files/file.h"

namespace whet::files {

// The element types whet reads and writes, all little-endian. bf16 is what NumPy writes for
// ml_dtypes.bfloat16: '<V2'. (NumPy's own two raw bytes are '|V2' and are refused.)
enum class NpyType { f32, f64, f16, bf16, boolean, i64 };

std::size_t npy_item_bytes(NpyType type);
// The name NumPy users know: "float32", "bool", ...
const char* npy_type_name(NpyType type);
// "(2, 3)", "(4,)" and "()", as Python writes them.
std::string npy_shape_text(const Dims& sizes);

struct NpyHeader {
  NpyType type = NpyType::f32;
  bool fortran_order = false;   // the first axis is fastest, not the last
  Dims sizes;                   // 0..8 axes, sizes >= 0
  std::size_t data_offset = 0;  // where the elements begin in the file
  std::size_t data_bytes = 0;   // they fill the rest of it exactly
};

// The header of a file of `file_size` bytes that begins with `start`: its first kNpyStartBytes, or
// all of it if it is shorter. Every field is checked, and the sizes against the size of the file:
// nothing that a header says is believed beyond what is there. FileError, with `path` in its text.
NpyHeader parse_npy_header(std::span<const std::byte> start, std::uint64_t file_size,
                           const std::string& path);

// Magic, version and length of a header, then as much text as version 1.0 can have.
inline constexpr std::size_t kNpyStartBytes = 12 + 65535;

// Elements in memory, aligned to a cache line.
class NpyArray {
 public:
  // Not initialised; last axis fastest.
  NpyArray(NpyType type, const Dims& sizes);
  explicit NpyArray(const NpyHeader& header);

  NpyType type() const { return header_.type; }
  const Dims& sizes() const { return header_.sizes; }
  Dims strides() const;        // counted in elements
  bool is_contiguous() const;  // the last axis is fastest
  std::span<std::byte> bytes() { return {data_.get(), header_.data_bytes}; }
  std::span<const std::byte> bytes() const { return {data_.get(), header_.data_bytes}; }

  // The elements where they are. Error for i64, which has no view.
  View view();

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Release {
    void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
  };

  NpyHeader header_;
  std::unique_ptr<std::byte[], Release> data_;
};

// Reads a whole file. Allocates what its data takes, after the header has been checked.
NpyArray read_npy(const std::string& path);

// Writes and finishes `file`; the caller commits it. `bytes` are the elements, last axis fastest.
void write_npy(OutputFile& file, NpyType type, const Dims& sizes, std::span<const std::byte> bytes);

}  // namespace whet::files

#endif  // WHET_FILES_NPY_H_
