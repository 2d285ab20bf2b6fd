// Any bytes as JSON: refused with a FileError that names the file, or a value that, written again, reads back
// as the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "files/file.h"
#include "files/json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto value = whet::files::parse_json(text, "fuzz.json");
    if (whet::files::parse_json(value.dump(), "again") != value) std::abort();
  } catch (const whet::files::FileError& e) {
    if (!std::string(e.what()).starts_with("fuzz.json: ")) std::abort();
  }
  return 0;
}
