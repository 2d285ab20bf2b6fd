#include "report/tables.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "files/text.h"
#include "report/table.h"

namespace whet::report {
namespace {

using Json = nlohmann::ordered_json;

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

// JSON has no NaN: it is null there.
double number(const Json& json) { return json.is_number() ? json.get<double>() : NAN; }

std::string percent(const Json& share) {
  return std::isnan(number(share)) ? "-" : fixed(100 * number(share), 1);
}

std::string p_value(const Json& p) { return std::isnan(number(p)) ? "-" : format("%.1g", number(p)); }

std::string with_deviation(const Json& rule) {
  const double deviation = number(rule.at("deviation"));
  return percent(rule.at("accuracy")) + (std::isnan(deviation) ? "" : " ±" + fixed(100 * deviation, 1));
}

std::vector<std::string> rule_names(const Json& summary) {
  std::vector<std::string> names;
  for (const auto& [name, ignored] : summary.at(0).at("rules").items()) names.push_back(name);
  return names;
}

std::string accuracy_table(const Json& summary) {
  const std::vector<std::string> names = rule_names(summary);
  std::vector<std::string> head{"items"};
  head.insert(head.end(), names.begin(), names.end());
  Table table(head);
  for (const Json& size : summary) {
    std::vector<std::string> row{size.at("items").dump()};
    for (const std::string& name : names) row.push_back(with_deviation(size.at("rules").at(name)));
    table.add(row);
  }
  return table.text();
}

// Table 1 of the paper beside ours.
std::string paper_table(const Json& results) {
  const Json& paper = results.at("paper");
  Table table({"items", "softmax", "paper's", "adaptive", "paper's", "p", "paper's"});
  for (const Json& size : results.at("summary")) {
    for (std::size_t i = 0; i < paper.at("items").size(); ++i) {
      if (paper.at("items").at(i) != size.at("items") || !size.at("rules").contains("paper")) continue;
      const Json& adaptive = size.at("rules").at("paper");
      const Json unverified = paper.value("unverified", Json::array());
      const bool read = std::find(unverified.begin(), unverified.end(), size.at("items")) == unverified.end();
      table.add({size.at("items").dump() + (read ? "" : "*"), with_deviation(size.at("rules").at("softmax")),
                 fixed(number(paper.at("softmax").at(i)), 1), with_deviation(adaptive),
                 fixed(number(paper.at("paper").at(i)), 1), p_value(adaptive.at("against_softmax").at("p")),
                 p_value(paper.at("p").at(i))});
    }
  }
  return table.text();
}

std::string interval(const Json& difference) {
  if (std::isnan(number(difference.at("low")))) return fixed(100 * number(difference.at("difference")), 2);
  const auto points = [&](const char* field) { return fixed(100 * number(difference.at(field)), 2); };
  return points("difference") + " [" + points("low") + ", " + points("high") + "]";
}

double mean_over_models(const Json& models, std::size_t size, const char* field) {
  double sum = 0;
  for (const Json& model : models) sum += number(model.at("sizes").at(size).at(field));
  return sum / static_cast<double>(models.size());
}

// Where accuracy goes, in points.
std::string loss_table(const Json& results) {
  Table table({"items", "lost to misranking", "offsets predict", "dispersion: softmax", "paper",
               "target_entropy - ceiling"});
  for (std::size_t i = 0; i < results.at("summary").size(); ++i) {
    const Json& rules = results.at("summary").at(i).at("rules");
    const double ceiling = number(rules.at("hard").at("accuracy"));
    const auto dispersion = [&](const char* rule) {
      return rules.contains(rule) ? fixed(100 * (ceiling - number(rules.at(rule).at("accuracy"))), 1) : "-";
    };
    table.add({results.at("summary").at(i).at("items").dump(), fixed(100 * (1 - ceiling), 1),
               fixed(100 * (1 - mean_over_models(results.at("models"), i, "predicted")), 1),
               dispersion("softmax"), dispersion("paper"),
               rules.contains("target_entropy") ? interval(rules.at("target_entropy").at("against_ceiling"))
                                                : "-"});
  }
  return table.text();
}

double mean_of_rule(const Json& models, std::size_t size, const std::string& rule, const char* field) {
  double sum = 0;
  for (const Json& model : models) sum += number(model.at("sizes").at(size).at("rules").at(rule).at(field));
  return sum / static_cast<double>(models.size());
}

std::string entropy_table(const Json& results) {
  const Json& models = results.at("models");
  std::vector<std::string> head{"items", "H before"}, names;
  for (const std::string& name : rule_names(results.at("summary"))) {
    if (name == "softmax" || name == "hard") continue;
    names.push_back(name);
    head.push_back(name + ": H, β, β>1");
  }
  Table table(head);
  for (std::size_t i = 0; i < results.at("summary").size(); ++i) {
    std::vector<std::string> row{results.at("summary").at(i).at("items").dump(),
                                 fixed(mean_over_models(models, i, "entropy"), 3)};
    for (const std::string& name : names) {
      row.push_back(format("%.3f %.2f %.0f%%", mean_of_rule(models, i, name, "entropy"),
                           mean_of_rule(models, i, name, "beta"),
                           100 * mean_of_rule(models, i, name, "sharpened")));
    }
    table.add(row);
  }
  return table.text();
}

std::string model_table(const Json& models) {
  Table table({"seed", "steps", "slope", "offsets' deviation", "resolution n*", "target entropy",
               "refit: points", "R²"});
  for (const Json& model : models) {
    const Json& diagnosis = model.at("diagnosis");
    const Json& fit = model.at("fit");
    const std::string target = model.at("rules").value("target_entropy", "-");
    table.add({model.at("seed").dump(), model.at("step").dump(), fixed(number(diagnosis.at("slope")), 1),
               fixed(number(diagnosis.at("deviation")), 4), fixed(number(diagnosis.at("resolution")), 0),
               target == "-" ? target : fixed(std::stod(target.substr(target.find(':') + 1)), 4),
               fit.is_null() ? "-" : fit.at("points").dump(),
               fit.is_null() ? "-" : fixed(number(fit.at("r_squared")), 2)});
  }
  return table.text();
}

// As RFC 4180 has it: a rule's name may hold commas, and that of a file anything.
std::string csv_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

}  // namespace

std::string markdown_tables(const Json& results) {
  std::string text = "## Accuracy, % of sets (mean ± standard deviation over " +
                     std::to_string(results.at("models").size()) + " head" +
                     (results.at("models").size() == 1 ? "" : "s") + "; hard is the ceiling)\n\n" +
                     accuracy_table(results.at("summary"));
  text += "\n## The paper's Table 1 beside this run (*: the paper's numbers recalled, not read)\n\n" +
          paper_table(results);
  text += "\n## Where the rest goes, in points of accuracy\n\n" + loss_table(results);
  text += "\n## Entropy in nats, inverse temperature, share of rows sharpened\n\n" + entropy_table(results);
  if (results.contains("calibrated_summary")) {
    text += "\n## Keys calibrated, told the classes\n\n" +
            accuracy_table(results.at("calibrated_summary").at("classes"));
    text += "\n## Keys calibrated from pairs, not told the classes\n\n" +
            accuracy_table(results.at("calibrated_summary").at("pairs"));
  }
  text += "\n## Heads\n\n" + model_table(results.at("models"));
  return text;
}

std::string csv_table(const Json& results) {
  std::string text = "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n";
  for (const Json& model : results.at("models")) {
    for (const Json& size : model.at("sizes")) {
      for (const auto& [name, rule] : size.at("rules").items()) {
        text += model.at("seed").dump() + "," + size.at("items").dump() + "," + size.at("sets").dump() + "," +
                csv_text(name);
        for (const char* field : {"accuracy", "beta", "sharpened", "entropy", "peak"})
          text += "," + rule.at(field).dump();
        text += "\n";
      }
    }
  }
  return text;
}

// ---- several runs

namespace {

const Json* size_of(const Json& results, const Json& items) {
  for (const Json& size : results.at("summary")) {
    if (size.at("items") == items) return &size;
  }
  return nullptr;
}

std::string accuracy_at(const Json& results, const Json& items, const std::string& rule) {
  const Json* size = size_of(results, items);
  return size != nullptr && size->at("rules").contains(rule) ? with_deviation(size->at("rules").at(rule))
                                                             : "-";
}

// Rules that every size of the comparison has.
std::vector<std::string> common_rules(const Json& sizes) {
  std::vector<std::string> names;
  for (const auto& entry : sizes.at(0).at("rules").items()) {
    const std::string& name = entry.key();
    if (std::all_of(sizes.begin(), sizes.end(), [&](const Json& s) { return s.at("rules").contains(name); }))
      names.push_back(name);
  }
  return names;
}

std::string difference_table(const Json& base, const Json& other, const Json& sizes,
                             const std::string& rule) {
  const std::string first = base.at("name"), second = other.at("name");
  Table table({"items", first, second, "difference [95 % interval]", "p"});
  for (const Json& size : sizes) {
    const Json& test = size.at("rules").at(rule);
    table.add({size.at("items").dump(), accuracy_at(base.at("results"), size.at("items"), rule),
               accuracy_at(other.at("results"), size.at("items"), rule),
               test.is_null() ? "-" : interval(test), test.is_null() ? "-" : p_value(test.at("p"))});
  }
  return table.text();
}

}  // namespace

std::string markdown_comparison(const Json& data) {
  std::string text;
  for (const Json& comparison : data.at("comparison")) {
    const Json& base = data.at("runs").at(comparison.at("against").get<std::size_t>());
    const Json& other = data.at("runs").at(comparison.at("run").get<std::size_t>());
    const Json& sizes = comparison.at("sizes");
    text += (text.empty() ? "" : "\n") + std::string("## ") + other.at("name").get<std::string>() +
            " against " + base.at("name").get<std::string>() + ", % of sets; difference in points, " +
            (comparison.at("seeds") == 0 ? "no seed in common, so no test"
                                         : "paired over " + comparison.at("seeds").dump() + " seeds") +
            "\n";
    if (sizes.empty()) text += "\nNo size in common.\n";
    for (const std::string& rule : sizes.empty() ? std::vector<std::string>() : common_rules(sizes)) {
      text += "\n### " + files::escaped(rule) + "\n\n" + difference_table(base, other, sizes, rule);
    }
  }
  return text;
}

}  // namespace whet::report
