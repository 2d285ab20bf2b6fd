// Rules by themselves, threads and targets.

#include <whet/runtime.h>

#include "c_api/convert.h"

using namespace whet::c_api;  // NOLINT(google-build-using-namespace): this file is its C functions

const char* whet_version(void) { return WHET_VERSION; }

whet_status whet_rule_load(const char* path, char* name, size_t size) {
  return guarded([&] {
    const std::string text = whet::Rule::load(&required(path, "path")).name();
    required(name, "name");
    if (text.size() >= size) {
      throw whet::Error("size is " + std::to_string(size) + ", this name needs " +
                        std::to_string(text.size() + 1));
    }
    std::memcpy(name, text.c_str(), text.size() + 1);
  });
}

whet_status whet_rule_needs_search(const char* rule, int32_t* needs_search) {
  return guarded([&] { required(needs_search, "needs_search") = rule_of(rule).needs_search() ? 1 : 0; });
}

whet_status whet_rule_betas(const char* rule, const whet_row_state* states, size_t count, double* betas) {
  return guarded([&] {
    const whet::Rule chosen = rule_of(rule);
    const auto from = elements<const whet::RowState>(states, count, "states");
    const auto to = elements<double>(betas, count, "betas");
    for (std::size_t i = 0; i < count; ++i) to[i] = chosen.beta(from[i]);
  });
}

int whet_threads(void) {
  int count = 0;
  guarded([&] { count = whet::threads(); });
  return count;
}

whet_status whet_set_threads(int count) {
  return guarded([&] { whet::set_threads(count); });
}

const char* whet_target(void) {
  thread_local std::string text;
  return guarded([&] { text = whet::target(); }) == WHET_OK ? text.c_str() : nullptr;
}

const char* whet_targets(void) {
  thread_local std::string text;
  const whet_status status = guarded([&] {
    std::string list;
    for (const std::string& name : whet::targets()) list += (list.empty() ? "" : " ") + name;
    text = list;
  });
  return status == WHET_OK ? text.c_str() : nullptr;
}

whet_status whet_force_target(const char* name) {
  return guarded([&] { whet::force_target(&required(name, "name")); });
}
