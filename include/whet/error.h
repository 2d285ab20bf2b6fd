// The one exception whet throws for a wrong argument.
#ifndef WHET_ERROR_H_
#define WHET_ERROR_H_

#include <whet/export.h>

#include <stdexcept>

namespace whet {

// what() names the argument, says what was given and what is allowed. Thrown before anything is
// written, but for an Executor that doesn't run its tasks. (Running out of memory throws std::bad_alloc
// instead.)
class WHET_API Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace whet

#endif  // WHET_ERROR_H_
