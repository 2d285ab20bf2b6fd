#include "views.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace whet_python {

namespace {

using whet::Dims;
using whet::DType;

// NumPy's array interface protocol, version 3, as its documentation lays it out.
struct ArrayInterface {
  int two;
  int nd;
  char typekind;
  int itemsize;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  void* data;
  PyObject* descr;
};
constexpr int kNativeOrder = 0x200;
constexpr int kWritable = 0x400;

struct Array {
  void* data;
  std::int64_t code;  // a whet::DType or kInt64
  bool writable;
  Dims sizes;
  Dims strides;  // empty: contiguous
};

constexpr std::int64_t code(DType dtype) { return static_cast<std::int64_t>(dtype); }

constexpr std::size_t element_bytes(std::int64_t dtype_code) {
  return std::array<std::size_t, 6>{4, 8, 2, 2, 1, 8}[static_cast<std::size_t>(dtype_code)];
}

std::string dtype_text(nb::handle array) {
  const nb::object dtype = array.attr("dtype");
  return nb::str(nb::handle(dtype)).c_str();
}

// NumPy has no bfloat16 of its own; to it, that of ml_dtypes is two bytes of anything.
bool is_bfloat16(nb::handle array) {
  const nb::object name = array.attr("dtype").attr("type").attr("__name__");
  return std::string_view(nb::str(name).c_str()) == "bfloat16";
}

std::int64_t code_of(const ArrayInterface& a, nb::handle array, const char* name) {
  const auto is = [&](char kind, int bytes) { return a.typekind == kind && a.itemsize == bytes; };
  std::int64_t found = -1;
  if (is('f', 4)) found = code(DType::f32);
  if (is('f', 8)) found = code(DType::f64);
  if (is('f', 2)) found = code(DType::f16);
  if (is('b', 1)) found = code(DType::boolean);
  if (is('i', 8)) found = kInt64;
  if (is('V', 2) && is_bfloat16(array)) found = code(DType::bf16);
  if (found < 0) {
    wrong_type(name, "its dtype is " + dtype_text(array) + ", must be float32, float64, bfloat16 or float16");
  }
  if ((a.flags & kNativeOrder) == 0) {
    wrong_type(name, "its dtype is " + dtype_text(array) + ", must be in this machine's byte order");
  }
  return found;
}

void check_axes(std::size_t axes, const char* name) {
  if (axes <= whet::kMaxDims) return;
  wrong_value(name,
              "has " + std::to_string(axes) + " axes, must have 1 to " + std::to_string(whet::kMaxDims));
}

Dims element_strides(const ArrayInterface& a, const char* name) {
  std::array<std::int64_t, whet::kMaxDims> strides{};
  const auto axes = static_cast<std::size_t>(a.nd);
  for (std::size_t i = 0; i < axes; ++i) {
    // A stride along at most one element is never taken, and may be anything.
    if (a.shape[i] > 1 && a.strides[i] % a.itemsize != 0) {
      wrong_value(name, "its stride of " + std::to_string(a.strides[i]) + " bytes along axis " +
                            std::to_string(i) + " isn't a whole number of elements");
    }
    strides[i] = a.strides[i] / a.itemsize;
  }
  return Dims(std::span<const std::int64_t>(strides.data(), axes));
}

// Kept for ever: it would otherwise be released after the interpreter's end.
PyObject* array_struct_name() {
  static PyObject* const name = PyUnicode_InternFromString("__array_struct__");
  return name;
}

Array numpy_array(nb::handle object, const char* name) {
  const nb::object capsule = nb::steal(PyObject_GetAttr(object.ptr(), array_struct_name()));
  if (!capsule.is_valid()) {
    PyErr_Clear();
    wrong_type(name, "is a " + class_of(object) + ", must be a NumPy array");
  }
  const auto* a = static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (a == nullptr || a->two != 2) {
    PyErr_Clear();
    wrong_type(name, "its __array_struct__ isn't one");
  }
  check_axes(static_cast<std::size_t>(a->nd), name);
  const std::int64_t dtype_code = code_of(*a, object, name);
  std::array<std::int64_t, whet::kMaxDims> sizes{};
  std::copy(a->shape, a->shape + a->nd, sizes.begin());
  return {.data = a->data,
          .code = dtype_code,
          .writable = (a->flags & kWritable) != 0,
          .sizes = Dims(std::span<const std::int64_t>(sizes.data(), static_cast<std::size_t>(a->nd))),
          .strides = element_strides(*a, name)};
}

// A tuple of integers; torch.Size is one.
Dims dims_of(nb::handle object, const char* name) {
  if (!PyTuple_Check(object.ptr())) {
    wrong_type(name, "its sizes or strides are a " + class_of(object) + ", must be a tuple");
  }
  const auto axes = static_cast<std::size_t>(PyTuple_Size(object.ptr()));
  check_axes(axes, name);
  std::array<std::int64_t, whet::kMaxDims> values{};
  for (std::size_t i = 0; i < axes; ++i) {
    values[i] = integer_of(PyTuple_GetItem(object.ptr(), static_cast<Py_ssize_t>(i)), name);
  }
  return Dims(std::span<const std::int64_t>(values.data(), axes));
}

Array addressed_array(nb::handle tuple, const char* name) {
  if (PyTuple_Size(tuple.ptr()) != 4) {
    wrong_type(name, "is a tuple that isn't (address, dtype code, sizes, strides)");
  }
  const auto item = [&](Py_ssize_t i) { return nb::handle(PyTuple_GetItem(tuple.ptr(), i)); };
  void* const address = PyLong_AsVoidPtr(item(0).ptr());
  if (address == nullptr && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    wrong_type(name, "its address isn't one");
  }
  const std::int64_t dtype_code = integer_of(item(1), name);
  if (dtype_code < 0 || dtype_code > kInt64) {
    wrong_value(name, "its dtype code is " + std::to_string(dtype_code) + ", must be 0 to 5");
  }
  return {.data = address,
          .code = dtype_code,
          .writable = true,
          .sizes = dims_of(item(2), name),
          .strides = item(3).is_none() ? Dims() : dims_of(item(3), name)};
}

Array array_of(nb::handle object, const char* name) {
  return PyTuple_Check(object.ptr()) ? addressed_array(object, name) : numpy_array(object, name);
}

void check_writable(const Array& a, const char* name) {
  if (!a.writable) wrong_value(name, "is read-only");
}

whet::View view_of(const Array& a, const char* name) {
  if (a.code == kInt64) wrong_type(name, "its dtype is int64, must be float32, float64, bfloat16 or float16");
  return {a.data, static_cast<DType>(a.code), a.sizes, a.strides};
}

bool is_contiguous(const Array& a) {
  if (a.strides.empty() || std::ranges::count(a.sizes, 0) > 0) return true;
  if (a.strides.size() != a.sizes.size()) return false;
  std::int64_t expected = 1;
  for (std::size_t i = a.sizes.size(); i-- > 0;) {
    if (a.sizes[i] > 1 && a.strides[i] != expected) return false;
    if (__builtin_mul_overflow(expected, a.sizes[i], &expected)) return false;
  }
  return true;
}

std::size_t elements_of(const Array& a, const char* name) {
  std::size_t elements = 1;
  for (const std::int64_t size : a.sizes) {
    if (size < 0 || __builtin_mul_overflow(elements, static_cast<std::size_t>(size), &elements)) {
      wrong_value(name, "its sizes are negative or too large");
    }
  }
  return elements;
}

const char* text_of_code(std::int64_t dtype_code) {
  return std::array{
      "float32", "float64", "bfloat16", "float16", "bool", "int64"}[static_cast<std::size_t>(dtype_code)];
}

}  // namespace

whet::ConstView view_of(nb::handle object, const char* name) { return view_of(array_of(object, name), name); }

whet::View written_view_of(nb::handle object, const char* name) {
  const Array a = array_of(object, name);
  check_writable(a, name);
  return view_of(a, name);
}

Block block_of(nb::handle object, std::int64_t dtype_code, std::size_t record, bool written,
               const char* name) {
  if (object.is_none()) return {nullptr, 0};
  const Array a = array_of(object, name);
  if (a.code != dtype_code) {
    wrong_type(name,
               std::string("its dtype is ") + text_of_code(a.code) + ", must be " + text_of_code(dtype_code));
  }
  if (written) check_writable(a, name);
  const std::size_t elements = elements_of(a, name);
  if (!is_contiguous(a)) wrong_value(name, "isn't contiguous");
  if (elements % record != 0) {
    wrong_value(name, "has " + std::to_string(elements) + " elements, must have a multiple of " +
                          std::to_string(record));
  }
  if (elements > 0 &&
      (a.data == nullptr || reinterpret_cast<std::uintptr_t>(a.data) % element_bytes(a.code) != 0)) {
    wrong_value(name, "its data is null or isn't aligned to its element type");
  }
  return {a.data, elements};
}

}  // namespace whet_python
