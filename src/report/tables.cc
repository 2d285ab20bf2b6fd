#include "report/tables.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

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
  return std::isnan(number(share)) ? "-" : format("%.1f", 100 * number(share));
}

std::string p_value(const Json& p) { return std::isnan(number(p)) ? "-" : format("%.1g", number(p)); }

std::string with_deviation(const Json& rule) {
  const double deviation = number(rule["deviation"]);
  return percent(rule["accuracy"]) + (std::isnan(deviation) ? "" : format(" ±%.1f", 100 * deviation));
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
    std::vector<std::string> row{size["items"].dump()};
    for (const std::string& name : names) row.push_back(with_deviation(size["rules"].at(name)));
    table.add(row);
  }
  return table.text();
}

// Table 1 of the paper beside ours.
std::string paper_table(const Json& results) {
  const Json& paper = results["paper"];
  Table table({"items", "softmax", "paper's", "adaptive", "paper's", "p", "paper's"});
  for (const Json& size : results["summary"]) {
    for (std::size_t i = 0; i < paper["items"].size(); ++i) {
      if (paper["items"][i] != size["items"] || !size["rules"].contains("paper")) continue;
      const Json& adaptive = size["rules"]["paper"];
      const Json unverified = paper.value("unverified", Json::array());
      const bool read = std::find(unverified.begin(), unverified.end(), size["items"]) == unverified.end();
      table.add({size["items"].dump() + (read ? "" : "*"), with_deviation(size["rules"]["softmax"]),
                 format("%.1f", number(paper["softmax"][i])), with_deviation(adaptive),
                 format("%.1f", number(paper["paper"][i])), p_value(adaptive["against_softmax"]["p"]),
                 p_value(paper["p"][i])});
    }
  }
  return table.text();
}

std::string interval(const Json& difference) {
  if (std::isnan(number(difference["low"]))) return format("%.2f", 100 * number(difference["difference"]));
  return format("%.2f [%.2f, %.2f]", 100 * number(difference["difference"]), 100 * number(difference["low"]),
                100 * number(difference["high"]));
}

double mean_over_models(const Json& models, std::size_t size, const char* field) {
  double sum = 0;
  for (const Json& model : models) sum += number(model["sizes"][size][field]);
  return sum / static_cast<double>(models.size());
}

// Where accuracy goes, in points.
std::string loss_table(const Json& results) {
  Table table({"items", "lost to misranking", "offsets predict", "dispersion: softmax", "paper",
               "target_entropy - ceiling"});
  for (std::size_t i = 0; i < results["summary"].size(); ++i) {
    const Json& rules = results["summary"][i]["rules"];
    const double ceiling = number(rules["hard"]["accuracy"]);
    const auto dispersion = [&](const char* rule) {
      return rules.contains(rule) ? format("%.1f", 100 * (ceiling - number(rules[rule]["accuracy"]))) : "-";
    };
    table.add(
        {results["summary"][i]["items"].dump(), format("%.1f", 100 * (1 - ceiling)),
         format("%.1f", 100 * (1 - mean_over_models(results["models"], i, "predicted"))),
         dispersion("softmax"), dispersion("paper"),
         rules.contains("target_entropy") ? interval(rules["target_entropy"]["against_ceiling"]) : "-"});
  }
  return table.text();
}

double mean_of_rule(const Json& models, std::size_t size, const std::string& rule, const char* field) {
  double sum = 0;
  for (const Json& model : models) sum += number(model["sizes"][size]["rules"][rule][field]);
  return sum / static_cast<double>(models.size());
}

std::string entropy_table(const Json& results) {
  const Json& models = results["models"];
  std::vector<std::string> head{"items", "H before"}, names;
  for (const std::string& name : rule_names(results["summary"])) {
    if (name == "softmax" || name == "hard") continue;
    names.push_back(name);
    head.push_back(name + ": H, β, β>1");
  }
  Table table(head);
  for (std::size_t i = 0; i < results["summary"].size(); ++i) {
    std::vector<std::string> row{results["summary"][i]["items"].dump(),
                                 format("%.3f", mean_over_models(models, i, "entropy"))};
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
    const Json& diagnosis = model["diagnosis"];
    const Json& fit = model["fit"];
    const std::string target = model["rules"].value("target_entropy", "-");
    table.add({model["seed"].dump(), model["step"].dump(), format("%.1f", number(diagnosis["slope"])),
               format("%.4f", number(diagnosis["deviation"])),
               format("%.0f", number(diagnosis["resolution"])),
               target == "-" ? target : format("%.4f", std::stod(target.substr(target.find(':') + 1))),
               fit.is_null() ? "-" : fit["points"].dump(),
               fit.is_null() ? "-" : format("%.2f", number(fit["r_squared"]))});
  }
  return table.text();
}

}  // namespace

std::string markdown_tables(const Json& results) {
  std::string text = "## Accuracy, % of sets (mean ± standard deviation over " +
                     std::to_string(results["models"].size()) + " head" +
                     (results["models"].size() == 1 ? "" : "s") + "; hard is the ceiling)\n\n" +
                     accuracy_table(results["summary"]);
  text += "\n## The paper's Table 1 beside this run (*: the paper's numbers recalled, not read)\n\n" +
          paper_table(results);
  text += "\n## Where the rest goes, in points of accuracy\n\n" + loss_table(results);
  text += "\n## Entropy in nats, inverse temperature, share of rows sharpened\n\n" + entropy_table(results);
  if (results.contains("calibrated_summary")) {
    text += "\n## Keys calibrated, told the classes\n\n" +
            accuracy_table(results["calibrated_summary"]["classes"]);
    text += "\n## Keys calibrated from pairs, not told the classes\n\n" +
            accuracy_table(results["calibrated_summary"]["pairs"]);
  }
  text += "\n## Heads\n\n" + model_table(results["models"]);
  return text;
}

std::string csv_table(const Json& results) {
  std::string text = "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak\n";
  for (const Json& model : results["models"]) {
    for (const Json& size : model["sizes"]) {
      for (const auto& [name, rule] : size["rules"].items()) {
        // A rule's own name may hold commas.
        text += model["seed"].dump() + "," + size["items"].dump() + "," + size["sets"].dump() + ",\"" + name +
                "\"";
        for (const char* field : {"accuracy", "beta", "sharpened", "entropy", "peak"})
          text += "," + rule[field].dump();
        text += "\n";
      }
    }
  }
  return text;
}

}  // namespace whet::report
