// Names of files, rules and runs as text: they may hold any bytes, JSON and terminals only some.
#ifndef WHET_FILES_TEXT_H_
#define WHET_FILES_TEXT_H_

#include <string>
#include <string_view>

namespace whet::files {

// The name as it is, but for bytes that aren't UTF-8 and control characters, which become \xNN: valid in
// JSON, one line, and no command to a terminal.
std::string escaped(std::string_view name);

}  // namespace whet::files

#endif  // WHET_FILES_TEXT_H_
