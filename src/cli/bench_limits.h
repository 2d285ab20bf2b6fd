// What the machine can do at most, to hold a kernel's speed against.
#ifndef WHET_CLI_BENCH_LIMITS_H_
#define WHET_CLI_BENCH_LIMITS_H_

#include <cstddef>
#include <span>

namespace whet::cli {

// Runs fused multiply-adds of floats that wait for nothing but each other, on every thread, for a few
// milliseconds. Returns how many operations that were, an addition and a multiplication each counted,
// or 0 where this machine or this compiler can't fuse them in vectors.
double run_multiply_adds(int threads);

// Reads both arrays, parted among the threads, as often as makes the start of threads light. Returns the
// number of bytes.
double read_memory(std::span<const std::byte> a, std::span<const std::byte> b, int threads);

}  // namespace whet::cli

#endif  // WHET_CLI_BENCH_LIMITS_H_
