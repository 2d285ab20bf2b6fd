#include "lab/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include "lab/significance.h"

namespace whet::lab {
namespace {

using results::Difference;
using results::Reproduction;

// Accuracies by seed, then by size and rule.
using Key = std::pair<std::int64_t, std::string>;
using Accuracies = std::map<std::uint64_t, std::map<Key, double>>;

Accuracies accuracies_of(const Reproduction& run) {
  Accuracies accuracies;
  for (const results::Model& model : run.models) {
    auto& head = accuracies[model.seed];
    for (const results::Size& size : model.sizes) {
      for (const auto& [name, rule] : size.rules) {
        if (std::isfinite(rule.accuracy)) head[{size.items, name}] = rule.accuracy;
      }
    }
  }
  return accuracies;
}

struct Pairs {
  std::vector<double> ours, theirs;
};

// Both experiments' values of every size and rule, over the seeds that have it in both.
std::map<Key, Pairs> pairs_of(const Accuracies& ours, const Accuracies& theirs) {
  std::map<Key, Pairs> pairs;
  for (const auto& [seed, head] : ours) {
    const auto other = theirs.find(seed);
    if (other == theirs.end()) continue;
    for (const auto& [key, accuracy] : head) {
      const auto value = other->second.find(key);
      if (value == other->second.end()) continue;
      pairs[key].ours.push_back(accuracy);
      pairs[key].theirs.push_back(value->second);
    }
  }
  return pairs;
}

std::vector<results::SizeComparison> compare_sizes(const Reproduction& ours, const Reproduction& theirs,
                                                   const std::map<Key, Pairs>& pairs) {
  std::vector<results::SizeComparison> sizes;
  for (const results::SizeSummary& size : ours.summary) {
    const auto other = std::ranges::find(theirs.summary, size.items, &results::SizeSummary::items);
    if (other == theirs.summary.end()) continue;
    results::SizeComparison comparison{.items = size.items};
    for (const auto& [name, rule] : size.rules) {
      const results::RuleSummary* their_rule = other->rules.find(name);
      if (their_rule == nullptr) continue;
      const auto both = pairs.find({size.items, name});
      comparison.rules.set(name, both != pairs.end()
                                     ? difference_of(both->second.ours, both->second.theirs)
                                     : Difference{rule.accuracy - their_rule->accuracy, NAN, NAN, NAN});
    }
    sizes.push_back(std::move(comparison));
  }
  return sizes;
}

}  // namespace

Difference difference_of(std::span<const double> a, std::span<const double> b) {
  const PairedTest test = paired_test(a, b);
  return {.difference = test.mean, .low = test.low, .high = test.high, .p = test.p};
}

std::vector<results::Comparison> compare(const std::vector<const Reproduction*>& runs) {
  std::vector<results::Comparison> comparisons;
  const Accuracies first = accuracies_of(*runs.front());
  for (std::size_t i = 1; i < runs.size(); ++i) {
    const Accuracies ours = accuracies_of(*runs[i]);
    const auto common =
        std::ranges::count_if(ours, [&](const auto& head) { return first.contains(head.first); });
    comparisons.push_back({.run = static_cast<std::int64_t>(i),
                           .against = 0,
                           .seeds = common,
                           .sizes = compare_sizes(*runs[i], *runs.front(), pairs_of(ours, first))});
  }
  return comparisons;
}

}  // namespace whet::lab
