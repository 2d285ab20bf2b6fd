// Any bytes as a .npy file: refused with a FileError that names it, or a header that fits the file
// exactly, so that no allocation is larger than the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "files/npy.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

void check_header(const whet::files::NpyHeader& header, std::size_t file_size) {
  check(header.sizes.size() <= whet::kMaxDims);
  std::size_t elements = 1;
  for (const std::int64_t size : header.sizes) {
    check(size >= 0);
    elements *= static_cast<std::size_t>(size);
  }
  check(header.data_bytes == elements * whet::files::npy_item_bytes(header.type));
  check(header.data_offset + header.data_bytes == file_size);

  whet::files::NpyArray array(header);
  check(array.strides().size() == header.sizes.size());
  check(array.bytes().size() == header.data_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto start = bytes.first(std::min(size, whet::files::kNpyStartBytes));
  try {
    check_header(whet::files::parse_npy_header(start, size, "fuzz.npy"), size);
  } catch (const whet::files::FileError& e) {
    check(std::string(e.what()).starts_with("fuzz.npy: "));
  }
  return 0;
}
