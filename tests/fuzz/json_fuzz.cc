// Any bytes as JSON: refused with a FileError that names the file, or a value that, written again, reads back
// as the same. Any value as results: refused with an Error, or results that read back as the same.
#include <whet/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "files/file.h"
#include "files/json.h"
#include "results/results.h"

namespace {

void read_results(const nlohmann::ordered_json& value) {
  try {
    const auto json = to_json(whet::results::results_from_json(value));
    const auto again = whet::files::parse_json(json.dump(), "again");
    if (to_json(whet::results::results_from_json(again)).dump() != json.dump()) std::abort();
  } catch (const whet::Error& e) {
    if (std::string(e.what()).empty()) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto value = whet::files::parse_json(text, "fuzz.json");
    if (whet::files::parse_json(value.dump(), "again") != value) std::abort();
    read_results(value);
  } catch (const whet::files::FileError& e) {
    if (!std::string(e.what()).starts_with("fuzz.json: ")) std::abort();
  }
  return 0;
}
