#include "lab/diagnosis.h"

#include <whet/horizon.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "lab/model.h"

namespace whet::lab {
namespace {

double norm(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

}  // namespace

Diagnosis diagnose(const std::vector<float>& parameters, const Architecture& architecture) {
  constexpr std::int64_t kQueries = 64;
  constexpr float kStep =
      0x1p-13F;  // exact in float, and small beside what any set of thousands of items spans
  Batch batch{.sets = kQueries, .items = std::int64_t{2} * kClasses};
  for (std::int64_t set = 0; set < kQueries; ++set) {
    for (int i = 0; i < 2 * kClasses; ++i) {
      batch.priorities.push_back(i < kClasses ? 1.0F : 1.0F - kStep);
      batch.classes.push_back(static_cast<std::uint8_t>(i % kClasses));
    }
    batch.queries.push_back((static_cast<float>(set) + 0.5F) / kQueries);
    batch.targets.push_back(0);
  }
  Head<double> head(architecture);
  const std::vector<double> exact(parameters.begin(), parameters.end());
  const Weighting weighting{};
  head.forward(exact.data(), batch, std::span(&weighting, 1));

  Diagnosis diagnosis;
  double mean = 0;
  for (std::size_t set = 0; set < kQueries; ++set) {
    const auto logits = head.logits().subspan(set * 2 * kClasses, std::size_t{2} * kClasses);
    for (std::size_t c = 0; c < kClasses; ++c) {
      diagnosis.slope += (logits[c] - logits[kClasses + c]) / (double{kStep} * kClasses * kQueries);
      diagnosis.offsets[c] += logits[c] / kQueries;
      mean += logits[c] / (kClasses * kQueries);
    }
  }
  double variance = 0;
  for (double& offset : diagnosis.offsets) {
    offset -= mean;
    variance += offset * offset / kClasses;
  }
  diagnosis.deviation = std::sqrt(variance);
  diagnosis.resolution = diagnosis.slope / diagnosis.deviation;
  return diagnosis;
}

double spread_allowed(const std::vector<float>& parameters, const Architecture& architecture) {
  constexpr std::int64_t kGrid = 257;
  Batch batch{.sets = kGrid, .items = kClasses};
  for (std::int64_t set = 0; set < kGrid; ++set) {
    const float position = static_cast<float>(set) / (kGrid - 1);
    for (int c = 0; c < kClasses; ++c) {
      batch.priorities.push_back(position);
      batch.classes.push_back(static_cast<std::uint8_t>(c));
    }
    batch.queries.push_back(position);
    batch.targets.push_back(0);
  }
  Head<double> head(architecture);
  const std::vector<double> exact(parameters.begin(), parameters.end());
  const Weighting weighting{};
  head.forward(exact.data(), batch, std::span(&weighting, 1), Keep::encoded);
  const auto largest_norm = [](std::span<const double> rows) {
    double largest = 0;
    for (std::size_t row = 0; row < rows.size(); row += kStride)
      largest = std::max(largest, norm(rows.subspan(row, kWidth)));
    return largest;
  };
  const std::int64_t width = kWidth / architecture.heads;  // of the first head: its columns come first
  const auto kernel = [&](LayerId id) {
    return ConstView(exact.data() + kModel[id].kernel, {kModel[id].in, width}, {kModel[id].out, 1});
  };
  return spread_bound({.query_gain = largest_singular_value(kernel(kQ)),
                       .query_bias = norm(std::span(exact).subspan(static_cast<std::size_t>(kModel[kQ].bias),
                                                                   static_cast<std::size_t>(width))),
                       .query_input = largest_norm(head.encoded_queries()),
                       .key_gain = largest_singular_value(kernel(kK)),
                       .key_input = largest_norm(head.encoded_items()),
                       .scale = 1 / std::sqrt(static_cast<double>(width))});
}

}  // namespace whet::lab
