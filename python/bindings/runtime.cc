// Version, threads and SIMD targets.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <whet/runtime.h>

#include "bindings.h"
#include "values.h"

namespace whet_python {

void add_runtime(nb::module_& module) {
  module.def("version", &whet::version);
  module.def("get_num_threads", &whet::threads);
  module.def(
      "set_num_threads", [](nb::handle count) { whet::set_threads(small_integer_of(count, "count")); },
      nb::arg("count").none());
  module.def("simd_target", &whet::target);
  module.def("simd_targets", &whet::targets);
}

}  // namespace whet_python
