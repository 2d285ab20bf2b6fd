#include "core/attention_plan.h"

#include <unistd.h>

#include <algorithm>

namespace whet::core {

namespace {

constexpr std::int64_t kWaveBytes = std::int64_t{32} << 20;   // packed keys and values, or logits of few rows
constexpr std::int64_t kBlockBytes = std::int64_t{24} << 20;  // logits of a block, all threads together
constexpr std::int64_t kPartBytes = std::int64_t{16} << 20;   // dk and dv of a part
constexpr std::int64_t kPartsWanted = 8;

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Sizes may be fictitious (stride 0): products are made in double and only compared.
double product(std::int64_t a, std::int64_t b, std::int64_t c) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

// Rows whose logits fit `bytes`: whole strips, at least one, at most kMaxBlockRows.
std::int64_t rows_that_fit(std::int64_t bytes, const PlanInput& in) {
  const double row = product(std::max<std::int64_t>(in.keys, 1), in.element_bytes, 1);
  const double fitting = static_cast<double>(bytes) / row;
  if (fitting >= static_cast<double>(kMaxBlockRows)) return kMaxBlockRows;
  const auto strips = static_cast<std::int64_t>(fitting) / kBlockStep;
  return std::max(kBlockStep, strips * kBlockStep);
}

std::int64_t units_that_fit(double unit_bytes, const PlanInput& in) {
  const double fitting = static_cast<double>(kWaveBytes) / std::max(unit_bytes, 1.0);
  if (fitting >= static_cast<double>(in.units)) return in.units;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(fitting));
}

std::int64_t limited_to_rows(std::int64_t block_rows, std::int64_t rows) {
  return std::min(block_rows, std::max<std::int64_t>(1, ceil_divide(rows, kBlockStep)) * kBlockStep);
}

}  // namespace

AttentionPlan forward_plan(const PlanInput& in) {
  AttentionPlan plan;
  plan.few = in.rows <= kFewRows;
  if (plan.few) {
    plan.block_rows = in.rows;
    plan.blocks = ceil_divide(in.keys, kChunkKeys);
    plan.wave = units_that_fit(product(in.rows, in.keys, in.element_bytes), in);
    return plan;
  }
  // Half the cache for the logits, or, where that leaves too few rows to pay for reading K and V
  // again, as many as memory allows.
  constexpr std::int64_t kEnoughRows = 42;
  const std::int64_t in_cache = rows_that_fit(in.cache_bytes, in);
  const std::int64_t allowed = rows_that_fit(kBlockBytes / in.threads, in);
  plan.block_rows = limited_to_rows(std::min(std::max(in_cache, kEnoughRows), allowed), in.rows);
  plan.blocks = ceil_divide(in.rows, plan.block_rows);
  const double packed = product(in.keys, in.key_size + in.value_size, in.element_bytes);
  plan.packs_values = packed <= static_cast<double>(kWaveBytes);
  plan.wave =
      units_that_fit(plan.packs_values ? packed : product(in.keys, in.key_size, in.element_bytes), in);
  return plan;
}

BackwardPlan backward_plan(const PlanInput& in) {
  BackwardPlan plan;
  // As many rows as memory allows, in cache or not: dk and dv are read and written once a block.
  plan.block_rows = limited_to_rows(rows_that_fit(kBlockBytes / 4, in), in.rows);
  const std::int64_t blocks = ceil_divide(in.rows, plan.block_rows);
  const double part_bytes = 2 * product(in.keys, std::max(in.key_size, in.value_size), in.element_bytes);
  const std::int64_t wanted = in.units == 0 ? 1 : ceil_divide(kPartsWanted, in.units);
  const auto affordable = static_cast<std::int64_t>(
      std::min(static_cast<double>(wanted), 2 * static_cast<double>(kPartBytes) / std::max(part_bytes, 1.0)));
  plan.parts = std::clamp<std::int64_t>(std::min(wanted, affordable), 1, std::max<std::int64_t>(blocks, 1));
  return plan;
}

int useful_threads(const PlanInput& in) {
  constexpr double kWorthWaking = 0x1p19;
  const double work = product(in.units, in.rows, in.keys) * static_cast<double>(in.key_size + in.value_size);
  return static_cast<int>(std::clamp(work / kWorthWaking, 1.0, 1024.0));
}

std::int64_t cache_bytes() {
  static const std::int64_t bytes = [] {
    const long reported = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return reported > 0 ? static_cast<std::int64_t>(reported) : std::int64_t{512} << 10;
  }();
  return bytes;
}

}  // namespace whet::core
