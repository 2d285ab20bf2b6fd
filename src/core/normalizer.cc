#include "core/normalizer.h"

#include <cmath>

#include "core/arguments.h"

namespace whet::core {

namespace {

std::string known_names(std::span<const NormalizerEntry> table) {
  std::string names;
  for (const NormalizerEntry& entry : table) {
    names += (names.empty() ? "" : ", ") + std::string(entry.name) + (entry.parameter ? ":P" : "");
  }
  return names;
}

double checked_parameter(std::string_view given, std::string_view name, const ParameterRange& range) {
  const auto value = number(given);
  if (value && *value > range.above && *value <= range.most &&
      !(range.whole && std::trunc(*value) != *value)) {
    return *value;
  }
  std::string allowed =
      std::string("a ") + (range.whole ? "whole " : "") + "number above " + text(range.above);
  if (range.most < std::numeric_limits<double>::max()) allowed += " and at most " + text(range.most);
  fail("normalizer",
       "the parameter of " + std::string(name) + " is '" + std::string(given) + "', must be " + allowed);
}

}  // namespace

NormalizerName parse_normalizer(std::string_view name, std::span<const NormalizerEntry> table) {
  const std::size_t colon = name.find(':');
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (name.substr(0, colon) != table[i].name || (colon != name.npos) != table[i].parameter.has_value())
      continue;
    const int index = static_cast<int>(i);
    const std::optional<ParameterRange> range = table[i].parameter;
    if (!range.has_value()) return {.index = index};
    return {.index = index,
            .parameter = checked_parameter(name.substr(colon + 1), table[i].name, range.value())};
  }
  fail("normalizer",
       "'" + std::string(name) + "' is not a normalizer; normalizers are " + known_names(table));
}

std::string normalizer_name(const NormalizerName& parts, std::span<const NormalizerEntry> table) {
  const NormalizerEntry& entry = table[static_cast<std::size_t>(parts.index)];
  return std::string(entry.name) + (entry.parameter ? ":" + text(parts.parameter) : "");
}

}  // namespace whet::core
