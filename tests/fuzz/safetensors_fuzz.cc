// Any bytes as a safetensors file: refused with a FileError of one line that names it, or content that fits
// the file exactly and, written again, reads back as the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "files/safetensors.h"

namespace {

using whet::files::Safetensors;

void check(bool holds) {
  if (!holds) std::abort();
}

void check_header(const whet::files::SafetensorsHeader& header, std::size_t file_size) {
  std::uint64_t total = header.data_offset;
  for (const whet::files::TensorRange& tensor : header.tensors) {
    std::uint64_t bytes = whet::files::tensor_item_bytes(tensor.type);
    for (const std::int64_t size : tensor.sizes) {
      check(size >= 0);
      bytes *= static_cast<std::uint64_t>(size);
    }
    check(tensor.begin <= tensor.end && tensor.end - tensor.begin == bytes);
    check(tensor.end <= file_size - header.data_offset);
    total += bytes;
  }
  check(total == file_size);
}

bool same(const whet::files::Tensor& a, const whet::files::Tensor& b) {
  return a.name == b.name && a.type == b.type && std::ranges::equal(a.sizes, b.sizes) && a.bytes == b.bytes;
}

void check_round_trip(const Safetensors& content) {
  const std::string file = whet::files::serialize_safetensors(content);
  const Safetensors again = whet::files::parse_safetensors(std::as_bytes(std::span(file)), "again");
  check(again.metadata == content.metadata);
  check(std::ranges::equal(again.tensors, content.tensors, same));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const std::string path = "fuzz.safetensors";
  try {
    check_header(whet::files::parse_safetensors_header(bytes, size, path), size);
    const Safetensors content = whet::files::parse_safetensors(bytes, path);
    check_round_trip(content);
  } catch (const whet::files::FileError& e) {
    const std::string text = e.what();
    check(text.starts_with(path + ": "));
    check(std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; }));
  }
  return 0;
}
