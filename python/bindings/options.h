// Keyword arguments that fill a struct of options: a table says which name sets what. Only what a caller
// gives costs anything, and a name that isn't in the table is a TypeError.
#ifndef WHET_PYTHON_OPTIONS_H_
#define WHET_PYTHON_OPTIONS_H_

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "values.h"

namespace whet_python {

template <typename Options>
struct Option {
  const char* name;
  void (*set)(Options& options, nb::handle value, const char* name);
};

template <typename Options>
using OptionTables = std::initializer_list<std::span<const Option<Options>>>;

template <typename Options>
const Option<Options>& find_option(std::string_view name, OptionTables<Options> tables) {
  for (const auto& table : tables) {
    for (const Option<Options>& option : table) {
      if (name == option.name) return option;
    }
  }
  wrong_type(std::string(name).c_str(), "isn't an option of this function");
}

// An option of None counts as not given.
template <typename Options>
void set_options(Options& options, const nb::kwargs& given,
                 std::type_identity_t<OptionTables<Options>> tables) {
  for (const auto& [key, value] : given) {
    const Option<Options>& option = find_option<Options>(text_of(key, "options"), tables);
    if (!value.is_none()) option.set(options, value, option.name);
  }
}

}  // namespace whet_python

#endif  // WHET_PYTHON_OPTIONS_H_
