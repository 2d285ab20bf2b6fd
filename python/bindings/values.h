// Plain values from Python. Each failure is a TypeError or ValueError that names the argument.
#ifndef WHET_PYTHON_VALUES_H_
#define WHET_PYTHON_VALUES_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace whet_python {

namespace nb = nanobind;

[[noreturn]] void wrong_type(const char* name, const std::string& what);
[[noreturn]] void wrong_value(const char* name, const std::string& what);

std::string class_of(nb::handle object);

double number_of(nb::handle object, const char* name);
std::int64_t integer_of(nb::handle object, const char* name);
int small_integer_of(nb::handle object, const char* name);
bool flag_of(nb::handle object, const char* name);              // True or False, Python's or NumPy's
std::string_view text_of(nb::handle object, const char* name);  // lives as long as `object`

}  // namespace whet_python

#endif  // WHET_PYTHON_VALUES_H_
