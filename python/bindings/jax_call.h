// whet for JAX: the handlers that XLA calls on a CPU, from threads of its own and without Python.
//
// All have one signature: operands, results and attributes, of which two name the others in their order, as
// in operands = "query,key,value,bias" and results = "out,saved". python/whet/jax checks what a user gives;
// what comes here wrong all the same is for whet to refuse.
//
// vmap puts an axis in front of every array (JAX's "expand_dims"), of size 1 where an operand doesn't vary.
// So all arrays of a call have the same number of leading axes, and an operand is broadcast along those where
// it has size 1: that is a stride of 0, never a copy.
#ifndef WHET_PYTHON_JAX_CALL_H_
#define WHET_PYTHON_JAX_CALL_H_

#include <nanobind/nanobind.h>
#include <whet/attention.h>
#include <whet/error.h>
#include <whet/view.h>
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace whet_python {

namespace nb = nanobind;
namespace ffi = xla::ffi;
using std::int64_t;

// ---- A call

struct Array {
  std::string_view name;
  std::byte* data;
  ffi::DataType type;
  std::span<const int64_t> sizes;

  int64_t size_from_end(std::size_t i) const { return sizes[sizes.size() - i]; }
  int64_t elements() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }
  std::byte* at(int64_t element) const { return data + element * int64_t(ffi::ByteWidth(type)); }
};

inline whet::DType dtype_of(const Array& array) {
  switch (array.type) {
    case ffi::DataType::F32:
      return whet::DType::f32;
    case ffi::DataType::F64:
      return whet::DType::f64;
    case ffi::DataType::BF16:
      return whet::DType::bf16;
    case ffi::DataType::F16:
      return whet::DType::f16;
    case ffi::DataType::PRED:
      return whet::DType::boolean;
    default:
      throw whet::Error(std::string(array.name) + ": no element type that whet knows");
  }
}

inline std::vector<std::string_view> split(std::string_view text, char mark) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; !text.empty(); text.remove_prefix(std::min(end + 1, text.size()))) {
    end = std::min(text.find(mark), text.size());
    parts.push_back(text.substr(0, end));
  }
  return parts;
}

class Call {
 public:
  Call(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
       const ffi::Dictionary& attributes)
      : attributes_(attributes) {
    std::size_t i = 0;
    for (const auto name : split(attribute<std::string_view>("operands"), ',')) {
      add(name, operands.get<ffi::AnyBuffer>(i++).value());
    }
    i = 0;
    for (const auto name : split(attribute<std::string_view>("results"), ',')) {
      add(name, **results.get<ffi::AnyBuffer>(i++));
    }
  }

  std::span<const Array> arrays() const { return arrays_; }

  // The index of an array in arrays(); -1 if the call doesn't have it.
  std::ptrdiff_t index(std::string_view name) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      if (arrays_[i].name == name) return std::ptrdiff_t(i);
    }
    return -1;
  }

  const Array* find(std::string_view name) const {
    const std::ptrdiff_t i = index(name);
    return i < 0 ? nullptr : &arrays_[std::size_t(i)];
  }

  template <typename T>
  T attribute(std::string_view name) const {
    const ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_error()) throw whet::Error(std::string(name) + ": no such attribute of this type");
    return *value;
  }

  whet::BetaGradient beta_gradient() const {
    return attribute<bool>("hold_beta") ? whet::BetaGradient::held : whet::BetaGradient::through_rule;
  }

 private:
  void add(std::string_view name, const ffi::AnyBuffer& buffer) {
    const auto sizes = buffer.dimensions();
    arrays_.push_back({name,
                       static_cast<std::byte*>(buffer.untyped_data()),
                       buffer.element_type(),
                       {sizes.begin(), sizes.size()}});
  }

  const ffi::Dictionary& attributes_;
  std::vector<Array> arrays_;
};

// ---- Axes that several arrays share

struct Axis {
  int64_t size;
  std::vector<int64_t> steps;  // from element to element, of each array of the call; 0 where it doesn't vary
};

// The axes of `arrays`, each broadcast to the largest. `own` axes at the end of an array, one number each,
// don't count.
inline std::vector<Axis> shared_axes(std::span<const Array> arrays, std::span<const std::size_t> own) {
  std::vector<Axis> axes(arrays[0].sizes.size() - own[0], {1, std::vector<int64_t>(arrays.size())});
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    int64_t step = 1;
    for (std::size_t i = arrays[a].sizes.size(); i-- > 0;) {
      const int64_t size = arrays[a].sizes[i];
      if (i < axes.size() && size != 1) {
        axes[i].size = size;
        axes[i].steps[a] = step;
      }
      step *= size;
    }
  }
  return axes;
}

// True if all arrays go through `outer` and `inner` as through one axis.
inline bool are_one(const Axis& outer, const Axis& inner) {
  for (std::size_t a = 0; a < outer.steps.size(); ++a) {
    if (outer.steps[a] != inner.steps[a] * inner.size) return false;
  }
  return true;
}

// The same axes, fewer of them: none of size 1, and neighbours made one where they can be.
inline std::vector<Axis> merged(std::span<const Axis> axes) {
  std::vector<Axis> result;
  for (const Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (!result.empty() && are_one(result.back(), axis)) {
      result.back() = {result.back().size * axis.size, axis.steps};
    } else {
      result.push_back(axis);
    }
  }
  return result;
}

// Goes through axes, one call of whet for each of their positions, and keeps where each array is.
class Walk {
 public:
  Walk(std::vector<Axis> axes, std::size_t arrays) : axes_(std::move(axes)), at_(arrays) {}

  // The offset of an array, in elements.
  int64_t at(std::size_t array) const { return at_[array]; }

  int64_t positions() const {
    int64_t all = 1;
    for (const Axis& axis : axes_) all *= axis.size;
    return all;
  }

  template <typename Function>
  void for_each(const Function& function, std::size_t depth = 0) {
    if (depth == axes_.size()) {
      function();
      return;
    }
    const Axis& axis = axes_[depth];
    for (int64_t i = 0; i < axis.size; ++i) {
      for_each(function, depth + 1);
      for (std::size_t a = 0; a < at_.size(); ++a) at_[a] += axis.steps[a];
    }
    for (std::size_t a = 0; a < at_.size(); ++a) at_[a] -= axis.size * axis.steps[a];
  }

 private:
  std::vector<Axis> axes_;
  std::vector<int64_t> at_;
};

// ---- Handlers

template <void function(const Call&)>
ffi::Error guarded(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  try {
    function(Call(operands, results, attributes));
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return {ffi::ErrorCode::kResourceExhausted, "whet: out of memory"};
  } catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(error.what());
  }
}

template <void function(const Call&)>
nb::capsule handler() {
  XLA_FFI_DEFINE_HANDLER(entry, guarded<function>,
                         ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());
  return nb::capsule(reinterpret_cast<void*>(entry));
}

// Each adds the handlers of a file by their names.
void add_jax_rows(nb::dict& handlers);
void add_jax_attention(nb::dict& handlers);
void add_jax_shards(nb::dict& handlers);

}  // namespace whet_python

#endif  // WHET_PYTHON_JAX_CALL_H_
