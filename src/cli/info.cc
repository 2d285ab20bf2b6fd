// whet info: what this build is and what it found on this machine.
#include <unistd.h>
#include <whet/runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"

namespace whet::cli {
namespace {

struct Cache {
  const char* name;
  long bytes;  // 0: the system doesn't say
};

std::array<Cache, 3> caches() {
  return {{{"L1d", std::max(0L, ::sysconf(_SC_LEVEL1_DCACHE_SIZE))},
           {"L2", std::max(0L, ::sysconf(_SC_LEVEL2_CACHE_SIZE))},
           {"L3", std::max(0L, ::sysconf(_SC_LEVEL3_CACHE_SIZE))}}};
}

std::string compiler() {
#if defined(__clang__)
  const char* name = "clang";
  const std::array numbers{__clang_major__, __clang_minor__, __clang_patchlevel__};
#else
  const char* name = "gcc";
  const std::array numbers{__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__};
#endif
  return std::string(name) + " " + std::to_string(numbers[0]) + "." + std::to_string(numbers[1]) + "." +
         std::to_string(numbers[2]);
}

std::string size_text(long bytes) {
  constexpr long kKiB = 1024, kMiB = 1024 * kKiB;
  if (bytes == 0) return "unknown";
  return bytes % kMiB == 0 ? std::to_string(bytes / kMiB) + " MiB" : std::to_string(bytes / kKiB) + " KiB";
}

// The version of MPI that whet::mpi was built with; null where it wasn't built.
const char* mpi_version() {
#ifdef WHET_MPI_VERSION
  return WHET_MPI_VERSION;
#else
  return nullptr;
#endif
}

std::string json_text() {
  nlohmann::ordered_json json;
  json["version"] = version();
  json["targets"] = targets();
  json["target"] = target();
  json["threads"] = threads();
  for (const Cache& cache : caches()) {
    auto& bytes = json["cache_bytes"][cache.name];
    if (cache.bytes > 0) bytes = cache.bytes;  // else null
  }
  json["compiler"] = compiler();
  auto& mpi = json["mpi"];
  if (mpi_version() != nullptr) mpi = mpi_version();  // else null
  return json.dump(2) + "\n";
}

std::string plain_text() {
  std::string names;
  for (const std::string& name : targets()) names += (names.empty() ? "" : " ") + name;
  std::string sizes;
  for (const Cache& cache : caches()) {
    sizes += (sizes.empty() ? "" : ", ") + std::string(cache.name) + " " + size_text(cache.bytes);
  }
  return "version   " + version() + "\ntargets   " + names + "\ntarget    " + target() + "\nthreads   " +
         std::to_string(threads()) + "\ncaches    " + sizes + "\ncompiler  " + compiler() + "\nmpi       " +
         (mpi_version() == nullptr ? "not built" : mpi_version()) + "\n";
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, SIMD targets, threads and caches of this machine");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, for programs");
  command->footer(
      "'targets' are the SIMD targets of this build that this machine runs, best first; 'target' is the\n"
      "one in use. WHET_TARGET and WHET_THREADS in the environment change the choice. 'mpi' is the standard\n"
      "that whet::mpi, a library of its own, was built for; ranks of 'whet reproduce' need none.\n"
      "\n"
      "Example:\n"
      "  WHET_TARGET=SSE4 whet info --json\n");
  // All of it or, when something in the environment is wrong, nothing.
  command->callback([json] { std::cout << (*json ? json_text() : plain_text()); });
}

}  // namespace whet::cli
