// Plain loops that compilers turn into vectors, once for each kind of vector worth having: the limits of
// the machine must not depend on what the rest of the program is compiled for.
#include "cli/bench_limits.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define WHET_BENCH_X86 1
#endif

namespace whet::cli {
namespace {

constexpr std::int64_t kSteps = 1 << 19;
constexpr int kChains = 12;  // vectors: they hide the latency of two units that take 4 or 5 cycles each
constexpr double kReadAtLeast = 64 << 20;  // bytes

// What a compiler can't know, and what it must produce: the loops in between stay.
volatile float float_source = 1;
thread_local volatile float float_sink;
thread_local volatile std::uint64_t word_sink;

void on_threads(int threads, const auto& work) {
  std::vector<std::jthread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&work, i] { work(i); });
  work(0);
}

template <int kLanes>
[[gnu::always_inline]] inline void multiply_adds() {
  float sum[kChains * kLanes];
  const float x = 0.999F, y = 0.001F;
  for (float& s : sum) s = float_source;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (float& s : sum) s = s * x + y;  // fused: see CMakeLists.txt
  }
  float total = 0;
  for (const float s : sum) total += s;
  float_sink = total;
}

[[gnu::always_inline]] inline void read_words(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at + sizeof(sum) <= bytes.size(); at += sizeof(sum)) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    sum += word;
  }
  word_sink = sum;
}

#ifdef WHET_BENCH_X86
[[gnu::target("avx512f,fma")]] void multiply_adds_avx512() { multiply_adds<16>(); }
[[gnu::target("avx2,fma")]] void multiply_adds_avx2() { multiply_adds<8>(); }
[[gnu::target("avx2")]] void read_avx2(std::span<const std::byte> bytes) { read_words(bytes); }
#endif
void read_plain(std::span<const std::byte> bytes) { read_words(bytes); }

}  // namespace

double run_multiply_adds(int threads) {
  void (*run)() = nullptr;
  int lanes = 0;
#ifdef WHET_BENCH_X86
  if (__builtin_cpu_supports("avx512f")) {
    run = multiply_adds_avx512;
    lanes = 16;
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    run = multiply_adds_avx2;
    lanes = 8;
  }
#endif
  if (run == nullptr) return 0;
  on_threads(threads, [run](int) { run(); });
  return 2.0 * kChains * lanes * static_cast<double>(kSteps) * threads;
}

double read_memory(std::span<const std::byte> a, std::span<const std::byte> b, int threads) {
  void (*read)(std::span<const std::byte>) = read_plain;
#ifdef WHET_BENCH_X86
  if (__builtin_cpu_supports("avx2")) read = read_avx2;
#endif
  const double once = static_cast<double>(a.size() + b.size());
  const int passes = std::max(1, static_cast<int>(kReadAtLeast / once));
  on_threads(threads, [&](int thread) {
    for (int pass = 0; pass < passes; ++pass) {
      for (const auto& bytes : {a, b}) {
        const std::size_t part = bytes.size() / static_cast<std::size_t>(threads);
        read(bytes.subspan(static_cast<std::size_t>(thread) * part, part));
      }
    }
  });
  return once * passes;
}

}  // namespace whet::cli
