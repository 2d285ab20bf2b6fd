// whet._core: the public headers for Python. Thin on purpose: shapes, defaults and allocation are Python's
// part.

#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_core, module) {
  whet_python::add_attention(module);
#ifdef WHET_HAS_JAX
  whet_python::add_jax(module);
#endif
  whet_python::add_linear_attention(module);
  whet_python::add_openmp(module);
  whet_python::add_rows(module);
  whet_python::add_rules(module);
  whet_python::add_runtime(module);
  whet_python::add_shards(module);
}
