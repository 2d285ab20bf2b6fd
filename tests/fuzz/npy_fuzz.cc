// Any bytes as a .npy file: refused with a FileError that names it, or a header that fits the file
// exactly, so that no allocation is larger than the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "cli/npy.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

void check_header(const whet::cli::NpyHeader& header, std::size_t file_size) {
  check(header.sizes.size() <= whet::kMaxDims);
  std::size_t elements = 1;
  for (const std::int64_t size : header.sizes) {
    check(size >= 0);
    elements *= static_cast<std::size_t>(size);
  }
  check(header.data_bytes == elements * whet::cli::npy_item_bytes(header.type));
  check(header.data_offset + header.data_bytes == file_size);

  whet::cli::NpyArray array(header);
  check(array.strides().size() == header.sizes.size());
  check(array.bytes().size() == header.data_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto start = bytes.first(std::min(size, whet::cli::kNpyStartBytes));
  try {
    check_header(whet::cli::parse_npy_header(start, size, "fuzz.npy"), size);
  } catch (const whet::cli::FileError& e) {
    check(std::string(e.what()).starts_with("fuzz.npy: "));
  }
  return 0;
}
