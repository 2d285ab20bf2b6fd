// The tables of a probe: its heads by class, and the model under each setting.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "files/text.h"
#include "report/table.h"
#include "report/tables.h"

namespace whet::report {
namespace {

using results::HeadStatistic;
using results::HeadStatistics;
using results::Probe;
using results::ProbedHead;
using results::ProbedLength;
using results::ProbedSetting;

std::string number(double value, int decimals) { return std::isnan(value) ? "-" : fixed(value, decimals); }

std::string with_interval(double value, double low, double high, int decimals) {
  return number(value, decimals) + (std::isnan(low) || std::isnan(high)
                                        ? ""
                                        : " [" + fixed(low, decimals) + ", " + fixed(high, decimals) + "]");
}

// Tokens: whole as far as that is short.
std::string tokens(double value) {
  if (std::isnan(value) || value < 1e7) return number(value, 0);
  char text[32];
  std::snprintf(text, sizeof text, "%.1e", value);
  return text;
}

std::string threshold(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::int64_t count_of(const Probe& probe, std::string_view head_class) {
  return std::ranges::count(probe.heads, head_class, &ProbedHead::head_class);
}

// ---- what was probed

std::string summary(const Probe& probe) {
  const results::ProbedModel& model = probe.model;
  std::string text = files::escaped(model.name) + " (" + files::escaped(model.architecture) +
                     "): " + std::to_string(model.layers) + " layers of " + std::to_string(model.heads) +
                     " heads, " + std::to_string(model.parameters) + " parameters";
  if (model.context) text += ", trained for " + std::to_string(*model.context) + " tokens";
  text += ". Prompts of kind " + probe.prompts.kind + ", " + std::to_string(probe.prompts.per_length) +
          " per length, of";
  for (std::size_t i = 0; i < probe.lengths.size(); ++i)
    text += (i == 0 ? " " : i + 1 < probe.lengths.size() ? ", " : " and ") + tokens(probe.lengths[i].tokens);
  return text + " tokens; " +
         (probe.prompts.rows == "all" ? "means over all query rows" : "of the last query row") +
         ". Rule: " + files::escaped(probe.rule) + ".\n";
}

std::string class_table(const Probe& probe) {
  const results::ClassThresholds& from = probe.thresholds;
  const std::string meanings[] = {"no sink, not uniform; slope of the entropy against ln n is " +
                                      threshold(from.dispersing) + " or more, its interval above 0",
                                  "weight on the first key is " + threshold(from.sink) + " or more",
                                  "no sink; entropy / ln n is " + threshold(from.uniform) + " or more",
                                  "the others: entropy that hardly grows"};
  Table table({"class", "heads", "that is"});
  for (std::size_t i = 0; i < std::size(results::kHeadClasses); ++i) {
    const std::string_view name = results::kHeadClasses[i];
    table.add({std::string(name), std::to_string(count_of(probe, name)), meanings[i]});
  }
  return table.text();
}

// ---- heads

// By class as kHeadClasses has them, in a class by slope, the steepest first.
std::vector<ProbedHead> ordered(std::vector<ProbedHead> heads) {
  const auto steepness = [](const ProbedHead& head) {
    return std::isnan(head.slope) ? INFINITY : -head.slope;
  };
  std::ranges::stable_sort(heads, {}, [&](const ProbedHead& head) {
    return std::pair(std::ranges::find(results::kHeadClasses, head.head_class), steepness(head));
  });
  return heads;
}

std::string head_table(const Probe& probe) {
  const ProbedLength &shortest = probe.lengths.front(), &longest = probe.lengths.back();
  Table table({"layer", "head", "class", "H at " + tokens(shortest.tokens), "H at " + tokens(longest.tokens),
               "H / ln n", "slope", "peak", "first", "spread", "horizon", "β"});
  for (const ProbedHead& head : ordered(probe.heads)) {
    const auto mean = [&](const ProbedLength& length, HeadStatistic HeadStatistics::*statistic) {
      return (length.statistics.*statistic)
          .mean[static_cast<std::size_t>(head.layer)][static_cast<std::size_t>(head.head)];
    };
    const auto last = [&](HeadStatistic HeadStatistics::*statistic, int decimals) {
      return number(mean(longest, statistic), decimals);
    };
    table.add({std::to_string(head.layer), std::to_string(head.head), head.head_class,
               number(mean(shortest, &HeadStatistics::entropy), 3), last(&HeadStatistics::entropy, 3),
               last(&HeadStatistics::relative_entropy, 2), with_interval(head.slope, head.low, head.high, 2),
               last(&HeadStatistics::peak, 3), last(&HeadStatistics::first, 3),
               last(&HeadStatistics::spread, 1), tokens(head.horizon), last(&HeadStatistics::beta, 2)});
  }
  return table.text();
}

// ---- settings

std::string setting_table(const std::vector<ProbedSetting>& settings) {
  Table table({"setting", "perplexity", "log-loss against none", "needles found, %", "tokens"});
  for (const ProbedSetting& setting : settings) {
    const auto percent = [](const std::optional<double>& share) { return 100 * share.value_or(NAN); };
    table.add(
        {setting.name, with_interval(setting.perplexity, setting.perplexity_low, setting.perplexity_high, 2),
         with_interval(setting.difference, setting.low, setting.high, 4),
         with_interval(percent(setting.needle), percent(setting.needle_low), percent(setting.needle_high), 1),
         std::to_string(setting.tokens)});
  }
  return table.text();
}

}  // namespace

std::string markdown_tables(const Probe& probe) {
  std::string text =
      "## What the heads of " + files::escaped(probe.model.name) + " do as inputs grow\n\n" + summary(probe);
  if (probe.verdict) text += "\n" + files::escaped(*probe.verdict) + "\n";
  text +=
      "\n## Heads by class, at " + tokens(probe.lengths.back().tokens) + " tokens\n\n" + class_table(probe);
  if (probe.settings) {
    text += "\n## The model under each setting (95 % intervals; log-loss in nats per token)\n\n" +
            setting_table(*probe.settings);
  }
  text +=
      "\n## Heads, those that disperse first\n\nEntropy H is in nats; its slope is that against ln n, with "
      "the "
      "95 % interval; what follows it is at " +
      tokens(probe.lengths.back().tokens) + " tokens. Horizon: tokens up to which one key can have weight " +
      threshold(probe.horizon_weight) + ".\n\n" + head_table(probe);
  return text;
}

}  // namespace whet::report
