// JSON from files: whatever others left in them is a value of bounded size and depth, or a FileError.
#ifndef WHET_FILES_JSON_H_
#define WHET_FILES_JSON_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace whet::files {

// What whet writes nests less than half as deep. Copying, comparing and writing JSON takes stack for every
// level.
inline constexpr int kDeepestJson = 32;

// One value, with nothing but white space around it. FileError, beginning with `path`, if the text isn't
// that, nests deeper than kDeepestJson or holds a number that no double does.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& path);

// The same of a whole file, of at most 64 MiB.
nlohmann::ordered_json read_json(const std::string& path);

}  // namespace whet::files

#endif  // WHET_FILES_JSON_H_
