// The workers of the OpenMP runtime that another library of this process runs on.
#ifndef WHET_PYTHON_OPENMP_H_
#define WHET_PYTHON_OPENMP_H_

#include <whet/runtime.h>

namespace whet_python {

// OpenMP's workers if find_openmp() found them, else whet's own pool; `threads` for calls that don't set
// their own number.
whet::Executor openmp_executor(int threads);

}  // namespace whet_python

#endif  // WHET_PYTHON_OPENMP_H_
