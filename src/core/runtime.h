// Which SIMD target kernels run on. Highway's own choice is one variable for every library in the
// process that uses it; whet keeps its own, so that forcing a target here disturbs nobody.
#ifndef WHET_CORE_RUNTIME_H_
#define WHET_CORE_RUNTIME_H_

#include <hwy/targets.h>
#include <whet/runtime.h>

namespace whet::core {

// The current choice; throws Error if WHET_TARGET names an unknown target.
const hwy::ChosenTarget& chosen_target();

// `requested` threads, or the default if it is 0. Error if out of range.
int resolve_threads(int requested);

// The threads of a call, at most. Error if out of range.
int resolve_threads(const Execution& execution);

}  // namespace whet::core

#endif  // WHET_CORE_RUNTIME_H_
