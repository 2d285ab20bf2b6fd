// whet._core's handlers for JAX, by the names that XLA knows them by.

#include <whet/error.h>

#include "bindings.h"
#include "jax_call.h"

namespace whet_python {

namespace {

// What a GPU's program calls in place of the above: arrays there are out of reach.
void refuse(const Call&) {
  throw whet::Error("whet.jax runs on CPUs only; put its arrays on jax.devices('cpu')");
}

}  // namespace

void add_jax(nb::module_& module) {
  module.attr("_jax_api_minor") = XLA_FFI_API_MINOR;
  module.def("_jax_handlers", [] {
    nb::dict handlers;
    add_jax_rows(handlers);
    add_jax_attention(handlers);
    add_jax_shards(handlers);
    handlers["whet_refuse"] = handler<refuse>();
    return handlers;
  });
}

}  // namespace whet_python
