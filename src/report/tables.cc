#include "report/tables.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "files/text.h"
#include "report/table.h"

namespace whet::report {
namespace {

using results::Model;
using results::Reproduction;
using results::Size;
using results::SizeSummary;

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

std::string percent(double share) { return std::isnan(share) ? "-" : fixed(100 * share, 1); }

std::string p_value(double p) { return std::isnan(p) ? "-" : format("%.1g", p); }

std::string with_deviation(const results::RuleSummary* rule) {
  if (rule == nullptr) return "-";
  return percent(rule->accuracy) +
         (std::isnan(rule->deviation) ? "" : " ±" + fixed(100 * rule->deviation, 1));
}

std::string interval(const results::Difference& d) {
  if (std::isnan(d.difference)) return "-";
  const auto points = [](double share) { return fixed(100 * share, 2); };
  return points(d.difference) + (std::isnan(d.low) ? "" : " [" + points(d.low) + ", " + points(d.high) + "]");
}

std::vector<std::string> rule_names(const std::vector<SizeSummary>& summary) {
  std::vector<std::string> names;
  for (const auto& [name, ignored] : summary.front().rules) names.push_back(name);
  return names;
}

std::string accuracy_table(const std::vector<SizeSummary>& summary) {
  const std::vector<std::string> names = rule_names(summary);
  std::vector<std::string> head{"items"};
  head.insert(head.end(), names.begin(), names.end());
  Table table(head);
  for (const SizeSummary& size : summary) {
    std::vector<std::string> row{std::to_string(size.items)};
    for (const std::string& name : names) row.push_back(with_deviation(size.rules.find(name)));
    table.add(row);
  }
  return table.text();
}

// Table 1 of the paper beside ours, at the sizes that both have.
std::string paper_table(const Reproduction& results) {
  Table table({"items", "softmax", "paper's", "adaptive", "paper's", "p", "paper's"});
  for (const SizeSummary& size : results.summary) {
    const auto line = std::ranges::find(results.paper, size.items, &results::PaperLine::items);
    const results::RuleSummary* adaptive = size.rules.find("paper");
    if (line == results.paper.end() || adaptive == nullptr) continue;
    table.add({std::to_string(size.items), with_deviation(size.rules.find("softmax")),
               fixed(line->softmax, 1), with_deviation(adaptive), fixed(line->paper, 1),
               p_value(adaptive->against_softmax.p), p_value(line->p)});
  }
  return table.text();
}

// Over the heads that have this size, of what `value` picks from it; NaN if none has.
template <typename Value>
double mean_over_heads(const std::vector<Model>& models, std::int64_t items, Value value) {
  double sum = 0, count = 0;
  for (const Model& model : models) {
    const auto size = std::ranges::find(model.sizes, items, &Size::items);
    if (size == model.sizes.end()) continue;
    sum += value(*size);
    ++count;
  }
  return sum / count;
}

// Where accuracy goes, in points.
std::string loss_table(const Reproduction& results) {
  const std::vector<std::string> rules = rule_names(results.summary);
  const bool trained = std::ranges::find(rules, "trained") != rules.end();
  std::vector<std::string> head{"items", "lost to misranking", "offsets predict", "dispersion: softmax"};
  if (trained) head.push_back("trained");
  head.insert(head.end(), {"paper", "target_entropy - ceiling"});
  Table table(head);
  for (const SizeSummary& size : results.summary) {
    const results::RuleSummary* hard = size.rules.find("hard");
    const double ceiling = hard == nullptr ? NAN : hard->accuracy;
    const auto dispersion = [&](const char* name) {
      const results::RuleSummary* rule = size.rules.find(name);
      return percent(rule == nullptr ? NAN : ceiling - rule->accuracy);
    };
    const results::RuleSummary* held = size.rules.find("target_entropy");
    const double predicted =
        mean_over_heads(results.models, size.items, [](const Size& s) { return s.predicted; });
    std::vector<std::string> row{std::to_string(size.items), percent(1 - ceiling), percent(1 - predicted),
                                 dispersion("softmax")};
    if (trained) row.push_back(dispersion("trained"));
    row.insert(row.end(), {dispersion("paper"), held == nullptr ? "-" : interval(held->against_ceiling)});
    table.add(row);
  }
  return table.text();
}

std::string entropy_table(const Reproduction& results) {
  std::vector<std::string> head{"items", "H before"}, names;
  for (const std::string& name : rule_names(results.summary)) {
    if (name == "softmax" || name == "hard") continue;
    names.push_back(name);
    head.push_back(name + ": H, β, β>1");
  }
  Table table(head);
  for (const SizeSummary& size : results.summary) {
    const auto mean = [&](auto value) { return mean_over_heads(results.models, size.items, value); };
    std::vector<std::string> row{std::to_string(size.items),
                                 fixed(mean([](const Size& s) { return s.entropy; }), 3)};
    for (const std::string& name : names) {
      const auto of_rule = [&](double results::RuleOutcome::*field) {
        return mean([&](const Size& s) {
          const results::RuleOutcome* outcome = s.rules.find(name);
          return outcome == nullptr ? NAN : outcome->*field;
        });
      };
      row.push_back(format("%.3f %.2f %.0f%%", of_rule(&results::RuleOutcome::entropy),
                           of_rule(&results::RuleOutcome::beta),
                           100 * of_rule(&results::RuleOutcome::sharpened)));
    }
    table.add(row);
  }
  return table.text();
}

// The number in a rule's name, "target-entropy:0.0625"; "-" if there is none.
std::string target_of(const std::string* rule) {
  const std::size_t colon = rule == nullptr ? std::string::npos : rule->find(':');
  double target = 0;
  if (colon == std::string::npos ||
      std::from_chars(rule->data() + colon + 1, rule->data() + rule->size(), target).ec != std::errc()) {
    return "-";
  }
  return fixed(target, 4);
}

std::string model_table(const std::vector<Model>& models) {
  Table table({"seed", "steps", "slope", "offsets' deviation", "resolution n*", "target entropy",
               "refit: points", "R²"});
  for (const Model& model : models) {
    const results::Diagnosis& d = model.diagnosis;
    table.add({std::to_string(model.seed), std::to_string(model.step), fixed(d.slope, 1),
               fixed(d.deviation, 4), fixed(d.resolution, 0), target_of(model.rules.find("target_entropy")),
               model.fit ? std::to_string(model.fit->points) : "-",
               model.fit ? fixed(model.fit->r_squared, 2) : "-"});
  }
  return table.text();
}

// A line for every head that did not learn.
std::string not_learned(const std::vector<Model>& models) {
  std::string text;
  for (const Model& model : models) {
    if (!model.did_not_learn) continue;
    text += (text.empty() ? "\n" : "") + std::string("- Seed ") + std::to_string(model.seed) +
            " did not learn: " + files::escaped(*model.did_not_learn) + ".\n";
  }
  return text;
}

// As RFC 4180 has it: a rule's name may hold commas, and that of a file anything.
std::string csv_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

// The shortest text that reads back as this number; NaN is null.
std::string csv_number(double value) { return nlohmann::json(value).dump(); }

}  // namespace

std::string markdown_tables(const Reproduction& results) {
  std::string text = "## Accuracy, % of sets (mean ± standard deviation over " +
                     std::to_string(results.models.size()) + " head" +
                     (results.models.size() == 1 ? "" : "s") + "; hard is the ceiling)\n\n" +
                     accuracy_table(results.summary) + not_learned(results.models);
  text += "\n## The paper's Table 1 beside this run\n\n" + paper_table(results);
  text += "\n## Where the rest goes, in points of accuracy\n\n" + loss_table(results);
  text += "\n## Entropy in nats, inverse temperature, share of rows sharpened\n\n" + entropy_table(results);
  if (results.calibrated_summary) {
    text +=
        "\n## Keys calibrated with class labels\n\n" + accuracy_table(results.calibrated_summary->classes);
    text += "\n## Keys calibrated from pairs, without class labels\n\n" +
            accuracy_table(results.calibrated_summary->pairs);
  }
  text += "\n## Heads\n\n" + model_table(results.models);
  return text;
}

std::string csv_table(const Reproduction& results) {
  std::string text = "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n";
  for (const Model& model : results.models) {
    for (const Size& size : model.sizes) {
      for (const auto& [name, rule] : size.rules) {
        text += std::to_string(model.seed) + "," + std::to_string(size.items) + "," +
                std::to_string(size.sets) + "," + csv_text(name);
        for (const double value : {rule.accuracy, rule.beta, rule.sharpened, rule.entropy, rule.peak})
          text += "," + csv_number(value);
        text += "\n";
      }
    }
  }
  return text;
}

// ---- several runs

namespace {

std::string accuracy_at(const results::NamedResults& run, std::int64_t items, const std::string& rule) {
  const auto& summary = std::get<Reproduction>(run.results).summary;
  const auto size = std::ranges::find(summary, items, &SizeSummary::items);
  return size == summary.end() ? "-" : with_deviation(size->rules.find(rule));
}

// Rules that every size of the comparison has.
std::vector<std::string> common_rules(const std::vector<results::SizeComparison>& sizes) {
  std::vector<std::string> names;
  for (const auto& entry : sizes.front().rules) {
    const std::string& name = entry.first;
    if (std::ranges::all_of(sizes, [&](const auto& size) { return size.rules.find(name) != nullptr; }))
      names.push_back(name);
  }
  return names;
}

// ---- runs ranked as they were trained

// How the heads of a run were trained to weigh: their own rule and normalizer, else plain softmax.
const char* trained_rule(const Reproduction& results) {
  return results.summary.front().rules.find("trained") == nullptr ? "softmax" : "trained";
}

std::vector<std::int64_t> common_sizes(const std::vector<results::NamedResults>& runs) {
  std::vector<std::int64_t> common;
  for (const SizeSummary& size : std::get<Reproduction>(runs.front().results).summary) {
    const bool everywhere = std::ranges::all_of(runs, [&](const results::NamedResults& run) {
      const auto& summary = std::get<Reproduction>(run.results).summary;
      return std::ranges::find(summary, size.items, &SizeSummary::items) != summary.end();
    });
    if (everywhere) common.push_back(size.items);
  }
  return common;
}

double accuracy_of(const Reproduction& results, std::int64_t items, const char* rule) {
  const auto size = std::ranges::find(results.summary, items, &SizeSummary::items);
  const results::RuleSummary* summary = size == results.summary.end() ? nullptr : size->rules.find(rule);
  return summary == nullptr ? NAN : summary->accuracy;
}

// The share of sets whose largest logit is of the right class: accuracy without dispersion, whatever the
// read-out makes of weights that were never 1 in training. Results of older versions have accuracy under hard
// instead.
double ceiling_of(const Reproduction& results, std::int64_t items) {
  const double ranked =
      mean_over_heads(results.models, items, [](const Size& size) { return size.ranked.value_or(NAN); });
  return std::isnan(ranked) ? accuracy_of(results, items, "hard") : ranked;
}

std::string heads_text(const Reproduction& results) {
  const auto failed = std::ranges::count_if(
      results.models, [](const Model& model) { return model.did_not_learn.has_value(); });
  const std::string heads = std::to_string(results.models.size());
  return failed == 0 ? heads
                     : std::to_string(std::ssize(results.models) - failed) + " of " + heads + " learned";
}

// The median over heads.
std::string resolution_text(const Reproduction& results) {
  std::vector<double> all;
  for (const Model& model : results.models) {
    if (std::isfinite(model.diagnosis.resolution)) all.push_back(model.diagnosis.resolution);
  }
  if (all.empty()) return "-";
  std::ranges::sort(all);
  return fixed((all[(all.size() - 1) / 2] + all[all.size() / 2]) / 2, 0);
}

// The best at the largest size first.
std::string ranking_table(const std::vector<results::NamedResults>& runs,
                          const std::vector<std::int64_t>& sizes) {
  const std::int64_t last = sizes.back();
  std::vector<const results::NamedResults*> ranked;
  ranked.reserve(runs.size());
  for (const results::NamedResults& run : runs) ranked.push_back(&run);
  const auto score = [&](const results::NamedResults* run) {
    const auto& results = std::get<Reproduction>(run->results);
    const double accuracy = accuracy_of(results, last, trained_rule(results));
    return std::isnan(accuracy) ? -1 : accuracy;
  };
  std::ranges::stable_sort(ranked, std::greater(), score);
  std::vector<std::string> head{"run", "heads"};
  for (const std::int64_t items : sizes) head.push_back(std::to_string(items));
  for (const char* name : {"ceiling", "lost to dispersion", "lost to misranking", "median n*"}) {
    head.emplace_back(name);
  }
  Table table(head);
  for (const results::NamedResults* run : ranked) {
    const auto& results = std::get<Reproduction>(run->results);
    const double ceiling = ceiling_of(results, last);
    std::vector<std::string> row{run->name, heads_text(results)};
    for (const std::int64_t items : sizes) row.push_back(accuracy_at(*run, items, trained_rule(results)));
    row.insert(row.end(),
               {percent(ceiling), percent(ceiling - accuracy_of(results, last, trained_rule(results))),
                percent(1 - ceiling), resolution_text(results)});
    table.add(row);
  }
  return table.text();
}

std::string difference_table(const results::NamedResults& base, const results::NamedResults& other,
                             const std::vector<results::SizeComparison>& sizes, const std::string& rule) {
  Table table({"items", base.name, other.name, "difference [95 % interval]", "p"});
  for (const results::SizeComparison& size : sizes) {
    const results::Difference& test = *size.rules.find(rule);
    table.add({std::to_string(size.items), accuracy_at(base, size.items, rule),
               accuracy_at(other, size.items, rule), interval(test), p_value(test.p)});
  }
  return table.text();
}

}  // namespace

std::string markdown_comparison(const std::vector<results::NamedResults>& runs,
                                const std::vector<results::Comparison>& comparisons) {
  std::string text;
  const std::vector<std::int64_t> sizes_of_all = common_sizes(runs);
  if (!sizes_of_all.empty()) {
    text += "## Runs ranked as they were trained, % of sets; the last columns at " +
            std::to_string(sizes_of_all.back()) + " items\n\n" + ranking_table(runs, sizes_of_all);
  }
  for (const results::Comparison& comparison : comparisons) {
    const results::NamedResults& base = runs[static_cast<std::size_t>(comparison.against)];
    const results::NamedResults& other = runs[static_cast<std::size_t>(comparison.run)];
    const auto& sizes = comparison.sizes;
    text += (text.empty() ? "" : "\n") + std::string("## ") + files::escaped(other.name) + " against " +
            files::escaped(base.name) + ", % of sets; difference in points, " +
            (comparison.seeds == 0 ? "no seed in common, so no test"
                                   : "paired over " + std::to_string(comparison.seeds) + " seeds") +
            "\n";
    if (sizes.empty()) text += "\nNo size in common.\n";
    for (const std::string& rule : sizes.empty() ? std::vector<std::string>() : common_rules(sizes)) {
      text += "\n### " + files::escaped(rule) + "\n\n" + difference_table(base, other, sizes, rule);
    }
  }
  return text;
}

}  // namespace whet::report
