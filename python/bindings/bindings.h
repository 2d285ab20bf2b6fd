// What each file of this folder adds to whet._core.
#ifndef WHET_PYTHON_BINDINGS_H_
#define WHET_PYTHON_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace whet_python {

void add_attention(nanobind::module_& module);
void add_jax(nanobind::module_& module);  // if built where jaxlib is
void add_linear_attention(nanobind::module_& module);
void add_openmp(nanobind::module_& module);
void add_rows(nanobind::module_& module);
void add_rules(nanobind::module_& module);
void add_runtime(nanobind::module_& module);
void add_shards(nanobind::module_& module);

}  // namespace whet_python

#endif  // WHET_PYTHON_BINDINGS_H_
