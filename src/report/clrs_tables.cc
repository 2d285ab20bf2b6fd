// The tables of results on CLRS-Text: of each algorithm, exact matches at a glance, then everything by size.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "files/text.h"
#include "report/table.h"
#include "report/tables.h"

namespace whet::report {
namespace {

using results::Clrs;
using results::ClrsSize;
using results::ClrsTask;
using results::ClrsVariant;
using results::Difference;
using results::ShareEstimate;

std::string percent(double share) { return std::isnan(share) ? "-" : fixed(100 * share, 1); }

std::string with_interval(double value, double low, double high) {
  return percent(value) +
         (std::isnan(low) || std::isnan(high) ? "" : " [" + percent(low) + ", " + percent(high) + "]");
}

std::string estimate(const ShareEstimate& share) { return with_interval(share.mean, share.low, share.high); }

std::string p_value(double p) {
  if (std::isnan(p)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.1g", p);
  return text;
}

std::string title(const std::pair<std::string, std::string>& name) {
  return name.second == results::kAsTrained ? name.first : name.first + ", " + name.second + " at test";
}

std::string counted(std::size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

bool trained(const ClrsTask& task, std::int64_t size) {
  return std::ranges::find(task.trained_sizes, size) != task.trained_sizes.end();
}

std::string size_name(const ClrsTask& task, std::int64_t size) {
  return std::to_string(size) + (trained(task, size) ? "*" : "");
}

// ---- at a glance

// At most twelve, the first and the last among them.
std::vector<const ClrsSize*> spread(const std::vector<ClrsSize>& sizes) {
  constexpr std::size_t kMost = 12;
  const std::size_t shown = std::min(kMost, sizes.size());
  std::vector<const ClrsSize*> some;
  some.reserve(shown);
  for (std::size_t i = 0; i < shown; ++i)
    some.push_back(&sizes[shown == 1 ? 0 : i * (sizes.size() - 1) / (shown - 1)]);
  return some;
}

// Every variant and setting that some size has, in the order of the file.
std::vector<std::pair<std::string, std::string>> names_of(const ClrsTask& task) {
  std::vector<std::pair<std::string, std::string>> names;
  for (const ClrsSize& size : task.sizes) {
    for (const ClrsVariant& one : size.variants) {
      const auto name = std::pair(one.variant, one.setting);
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

std::string glance(const ClrsTask& task) {
  const std::vector<const ClrsSize*> sizes = spread(task.sizes);
  Table::Cells head = {"size"};
  for (const ClrsSize* size : sizes) head.push_back(size_name(task, size->size));
  Table table(head);
  const auto add = [&](const std::string& name, const auto& value) {
    Table::Cells row = {name};
    for (const ClrsSize* size : sizes) row.push_back(value(*size));
    table.add(row);
  };
  for (const auto& name : names_of(task)) {
    add(title(name), [&](const ClrsSize& size) {
      const auto found = std::ranges::find_if(size.variants, [&](const ClrsVariant& one) {
        return one.variant == name.first && one.setting == name.second;
      });
      return found == size.variants.end() ? std::string("-") : percent(found->exact.mean);
    });
  }
  add("another's answer", [](const ClrsSize& size) { return percent(size.chance.exact); });
  add("copy the input", [](const ClrsSize& size) { return percent(size.copy.exact); });
  return table.text();
}

// ---- everything

std::string whole(const ClrsTask& task) {
  Table table({"size", "problems", "variant", "runs", "exact", "tokens", "forced", "exact against softmax",
               "p", "tokens against softmax", "p"});
  for (const ClrsSize& size : task.sizes) {
    for (const ClrsVariant& one : size.variants) {
      const auto difference = [&](const Difference& of) {
        return one.against_softmax ? with_interval(of.difference, of.low, of.high) : "-";
      };
      const results::ClrsDifferences against = one.against_softmax.value_or(results::ClrsDifferences{});
      const auto p = [&](const Difference& of) { return one.against_softmax ? p_value(of.p) : "-"; };
      table.add({size_name(task, size.size), std::to_string(size.problems), title({one.variant, one.setting}),
                 std::to_string(one.runs), estimate(one.exact), estimate(one.tokens), percent(one.forced),
                 difference(against.exact), p(against.exact), difference(against.tokens), p(against.tokens)});
    }
  }
  return table.text();
}

}  // namespace

std::string markdown_tables(const Clrs& clrs) {
  std::string text =
      "## CLRS-Text: " + counted(clrs.runs.size(), "run") + " on " + counted(clrs.tasks.size(), "algorithm") +
      "\n\nShares in percent. Trained sizes have a star; intervals are at 95 %, over runs, or over "
      "problems if there is one run; p of the paired test.\n";
  for (const ClrsTask& task : clrs.tasks) {
    std::string name = files::escaped(task.algorithm);
    if (task.hints) name += " with hints";
    text += "\n## " + name + ": exact matches by size\n\n" + glance(task);
    text += "\n## " + name + ": every size and variant\n\n" + whole(task);
  }
  return text;
}

}  // namespace whet::report
