// Rules as people name them on the command line.
#ifndef WHET_CLI_RULES_H_
#define WHET_CLI_RULES_H_

#include <whet/rule.h>

#include <string_view>

namespace whet::cli {

// The rule of this name, polynomial:FILE included.
inline Rule rule_named(std::string_view name) {
  const auto file = Rule::file_of(name);
  return file ? Rule::load(*file) : Rule::parse(name);
}

}  // namespace whet::cli

#endif  // WHET_CLI_RULES_H_
