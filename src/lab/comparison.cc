#include "lab/comparison.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "lab/significance.h"

namespace whet::lab {
namespace {

using Json = nlohmann::ordered_json;

// Accuracies by seed, size, rule.
using Key = std::pair<double, std::string>;
using Accuracies = std::map<std::string, std::map<Key, double>>;

Accuracies accuracies_of(const Json& results) {
  Accuracies accuracies;
  for (const Json& model : results.at("models")) {
    auto& head = accuracies[model.at("seed").dump()];
    for (const Json& size : model.at("sizes")) {
      for (const auto& [name, rule] : size.at("rules").items()) {
        if (rule.at("accuracy").is_number())
          head[{size.at("items").get<double>(), name}] = rule.at("accuracy").get<double>();
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

Json untested(const Json& ours, const Json& theirs) {
  if (!ours.is_number() || !theirs.is_number()) return nullptr;
  return {{"difference", ours.get<double>() - theirs.get<double>()},
          {"low", nullptr},
          {"high", nullptr},
          {"p", nullptr}};
}

Json compare_sizes(const Json& ours, const Json& theirs, const std::map<Key, Pairs>& pairs) {
  Json sizes = Json::array();
  for (const Json& size : ours.at("summary")) {
    for (const Json& other : theirs.at("summary")) {
      if (other.at("items") != size.at("items")) continue;
      Json rules = Json::object();
      for (const auto& [name, rule] : size.at("rules").items()) {
        if (!other.at("rules").contains(name)) continue;
        const auto both = pairs.find({size.at("items").get<double>(), name});
        rules[name] = both != pairs.end()
                          ? difference_json(both->second.ours, both->second.theirs)
                          : untested(rule.at("accuracy"), other.at("rules").at(name).at("accuracy"));
      }
      sizes.push_back({{"items", size.at("items")}, {"rules", rules}});
      break;
    }
  }
  return sizes;
}

}  // namespace

Json difference_json(std::span<const double> a, std::span<const double> b) {
  const PairedTest test = paired_test(a, b);
  return {{"difference", test.mean}, {"low", test.low}, {"high", test.high}, {"p", test.p}};
}

Json compare(const std::vector<const Json*>& results) {
  Json comparison = Json::array();
  const Accuracies first = accuracies_of(*results.front());
  for (std::size_t i = 1; i < results.size(); ++i) {
    const Accuracies ours = accuracies_of(*results[i]);
    const auto common =
        std::count_if(ours.begin(), ours.end(), [&](const auto& head) { return first.contains(head.first); });
    comparison.push_back({{"run", i},
                          {"against", 0},
                          {"seeds", common},
                          {"sizes", compare_sizes(*results[i], *results.front(), pairs_of(ours, first))}});
  }
  return comparison;
}

}  // namespace whet::lab
