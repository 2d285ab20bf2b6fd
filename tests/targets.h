// Runs a test body on every SIMD target of this machine.
#ifndef WHET_TESTS_TARGETS_H_
#define WHET_TESTS_TARGETS_H_

#include <gtest/gtest.h>
#include <whet/runtime.h>

#include <string>

namespace whet {

template <typename Body>
void for_each_target(const Body& body) {
  // A body that throws must not leave its target forced for the tests after it.
  struct Restore {
    ~Restore() { force_target(""); }
  } restore;
  for (const std::string& name : targets()) {
    SCOPED_TRACE("target " + name);
    force_target(name);
    ASSERT_EQ(target(), name);
    body();
  }
}

}  // namespace whet

#endif  // WHET_TESTS_TARGETS_H_
