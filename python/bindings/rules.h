// Rules from Python: by name at this door, "paper" or "target-entropy:0.2".
#ifndef WHET_PYTHON_RULES_H_
#define WHET_PYTHON_RULES_H_

#include <nanobind/nanobind.h>
#include <whet/rule.h>

#include "values.h"

namespace whet_python {

whet::Rule rule_of(nb::handle object, const char* name);

}  // namespace whet_python

#endif  // WHET_PYTHON_RULES_H_
