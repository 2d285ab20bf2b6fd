#include "values.h"

#include <limits>

namespace whet_python {

void wrong_type(const char* name, const std::string& what) {
  throw nb::type_error((std::string(name) + ": " + what).c_str());
}

void wrong_value(const char* name, const std::string& what) {
  throw nb::value_error((std::string(name) + ": " + what).c_str());
}

std::string class_of(nb::handle object) { return nb::str(object.type().attr("__name__")).c_str(); }

double number_of(nb::handle object, const char* name) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    wrong_type(name, "is a " + class_of(object) + ", must be a number");
  }
  return value;
}

std::int64_t integer_of(nb::handle object, const char* name) {
  const nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    wrong_type(name, "is a " + class_of(object) + ", must be an integer");
  }
  const std::int64_t value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    wrong_value(name, "doesn't fit 64 bits");
  }
  return value;
}

int small_integer_of(nb::handle object, const char* name) {
  const std::int64_t value = integer_of(object, name);
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    wrong_value(name, "is " + std::to_string(value) + ", which doesn't fit 32 bits");
  }
  return static_cast<int>(value);
}

bool flag_of(nb::handle object, const char* name) {
  if (PyBool_Check(object.ptr())) return object.is(Py_True);
  // NumPy's own, "bool" or before NumPy 2 "bool_", isn't Python's. Anything else is more likely a mistake.
  if (!class_of(object).starts_with("bool")) {
    wrong_type(name, "is a " + class_of(object) + ", must be True or False");
  }
  return PyObject_IsTrue(object.ptr()) == 1;
}

std::string_view text_of(nb::handle object, const char* name) {
  if (!PyUnicode_Check(object.ptr())) wrong_type(name, "is a " + class_of(object) + ", must be a str");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    wrong_value(name, "isn't valid text");
  }
  return {text, static_cast<std::size_t>(size)};
}

}  // namespace whet_python
