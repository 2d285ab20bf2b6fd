// Rules and normalizers from Python: by name, as "paper", "target-entropy:0.2" or "softmax".
#ifndef WHET_PYTHON_RULES_H_
#define WHET_PYTHON_RULES_H_

#include <nanobind/nanobind.h>
#include <whet/normalizer.h>
#include <whet/rule.h>

#include "values.h"

namespace whet_python {

// polynomial:FILE included; None is the rule none.
whet::Rule rule_of(nb::handle object, const char* name);

whet::Normalizer normalizer_of(nb::handle object, const char* name);

}  // namespace whet_python

#endif  // WHET_PYTHON_RULES_H_
