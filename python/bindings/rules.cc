#include "rules.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <whet/row.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "views.h"

namespace whet_python {

namespace {

// All a Python class of a rule is made from: kind, canonical name, parameters in order.
nb::tuple rule_parts(nb::handle name) {
  using whet::Rule;
  const Rule rule = rule_of(name, "rule");
  nb::list values;
  switch (rule.kind()) {
    case Rule::Kind::none:
    case Rule::Kind::paper:
      break;
    case Rule::Kind::polynomial:
      values.append(
          nb::tuple(nb::cast(std::vector<double>(rule.coefficients().begin(), rule.coefficients().end()))));
      values.append(rule.gate());
      values.append(rule.hold());
      break;
    case Rule::Kind::log_length:
    case Rule::Kind::llama4:
      values.append(rule.parameter());
      values.append(rule.factor());
      break;
    case Rule::Kind::log_power:
      values.append(rule.parameter());
      values.append(rule.factor());
      values.append(rule.exponent());
      break;
    case Rule::Kind::fixed:
    case Rule::Kind::ssmax:
    case Rule::Kind::target_entropy:
    case Rule::Kind::target_peak:
      values.append(rule.parameter());
  }
  const std::string text = rule.name();
  return nb::make_tuple(text.substr(0, text.find(':')), text, nb::tuple(values));
}

// beta of each state, for a rule that needs no more of a row than that.
void betas(nb::handle states, nb::handle out, nb::handle rule) {
  const whet::Rule chosen = rule_of(rule, "rule");
  const auto from = span_of<const whet::RowState, std::int64_t>(states, "states");
  const auto to = span_of<double>(out, "out");
  if (to.size() != from.size()) {
    wrong_value("out", "has " + std::to_string(to.size()) + " elements, must have one per state, " +
                           std::to_string(from.size()));
  }
  const nb::gil_scoped_release released;
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = chosen.beta(from[i]);
}

}  // namespace

whet::Rule rule_of(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  const std::string_view text = text_of(object, name);
  const auto file = whet::Rule::file_of(text);
  return file ? whet::Rule::load(*file) : whet::Rule::parse(text);
}

whet::Normalizer normalizer_of(nb::handle object, const char* name) {
  return whet::Normalizer::parse(text_of(object, name));
}

void add_rules(nb::module_& module) {
  module.def(
      "normalizer_name", [](nb::handle name) { return normalizer_of(name, "normalizer").name(); },
      nb::arg("name").none());
  module.def("rule_parts", &rule_parts, nb::arg("name").none());
  module.def("betas", &betas, nb::arg("states").none(), nb::arg("out").none(), nb::arg("rule").none());
}

}  // namespace whet_python
