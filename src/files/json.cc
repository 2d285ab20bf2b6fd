#include "files/json.h"

#include <nlohmann/json.hpp>

#include "files/file.h"

namespace whet::files {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void fail_at(std::size_t byte, const std::string& path) {
  throw FileError(path, "is not JSON from byte " + std::to_string(byte) +
                            " on, maybe cut short; restore it, or run the command that made it again");
}

}  // namespace

Json parse_json(std::string_view text, const std::string& path) {
  // To nlohmann's parser a zero byte is the end: what follows it would go unread.
  if (const std::size_t zero = text.find('\0'); zero != text.npos) fail_at(zero + 1, path);
  const auto shallow = [&](int around, Json::parse_event_t event, const Json&) {
    const bool begins =
        event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (begins && around >= kDeepestJson) {
      throw FileError(
          path, "is nested deeper than the " + std::to_string(kDeepestJson) + " levels that whet reads");
    }
    return true;
  };
  try {
    return Json::parse(text, shallow);
  } catch (const Json::parse_error& e) {
    fail_at(e.byte, path);
  } catch (const Json::exception&) {
    throw FileError(path, "holds a number beyond the range of a double");
  }
}

Json read_json(const std::string& path) { return parse_json(read_text(path), path); }

}  // namespace whet::files
