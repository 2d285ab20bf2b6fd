// Any text as a rule: refused with whet::Error, or a rule whose name reads back as the same rule and
// which gives every row a beta within its bounds.
#include <whet/error.h>
#include <whet/rule.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

void check_beta(const whet::Rule& rule) {
  if (rule.needs_search()) return;
  // 1000 equal keys, then two keys of which one has nearly all the weight.
  for (const whet::RowState& state :
       {whet::RowState{1000, 2, 2, 1000, 0, 0}, whet::RowState{2, 0, 20, 1, -4e-8, 8e-7}}) {
    const double beta = rule.beta(state);
    check(beta >= std::ldexp(1.0, -60) && beta <= std::ldexp(1.0, 60));
    check(!std::isnan(rule.slope(state)));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view name(reinterpret_cast<const char*>(data), size);
  try {
    const whet::Rule rule = whet::Rule::parse(name);
    check(whet::Rule::parse(rule.name()) == rule);
    check_beta(rule);
  } catch (const whet::Error&) {
  }
  return 0;
}
