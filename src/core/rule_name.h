// Names of rules that come from files of others.
#ifndef WHET_CORE_RULE_NAME_H_
#define WHET_CORE_RULE_NAME_H_

#include <whet/rule.h>

#include <string_view>

namespace whet::core {

// As Rule::parse(), but opens no file: polynomial:FILE is an Error.
Rule parse_inline_rule(std::string_view name);

}  // namespace whet::core

#endif  // WHET_CORE_RULE_NAME_H_
