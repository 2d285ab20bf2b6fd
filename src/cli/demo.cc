// whet demo: the project in two minutes. A head of the paper's recipe and one of the sharp recipe, trained
// side by side and compared.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/lab_options.h"
#include "files/file.h"
#include "files/text.h"
#include "lab/comparison.h"
#include "lab/reproduction.h"
#include "report/page.h"
#include "report/table.h"

namespace whet::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Arguments {
  std::string folder = "demo";
  std::optional<std::int64_t> steps;  // as kHeads
  std::int64_t sets = 512;
  int threads = 0;
};

// Steps that take about as long as each other: those of the sharp recipe have a quarter of the sets.
constexpr std::pair<const char*, std::int64_t> kHeads[] = {{"paper", 12000}, {"sharp", 40000}};

std::string in(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / name).string();
}

std::vector<lab::Training> trainings(const Arguments& arguments) {
  std::vector<lab::Training> trainings;
  for (const auto& [name, steps] : kHeads) {
    lab::Recipe recipe = lab::named_recipe(name);
    recipe.steps = arguments.steps.value_or(steps);
    trainings.push_back({in(in(arguments.folder, name), "seed-" + std::to_string(recipe.seed)), recipe});
  }
  return trainings;
}

// In percent of the sets, or "-" where the head has no such rule.
std::string accuracy(const Json& results, std::int64_t items, const std::string& rule) {
  for (const Json& size : results.at("summary")) {
    if (size.at("items") != items || !size.at("rules").contains(rule)) continue;
    return report::fixed(100 * size.at("rules").at(rule).at("accuracy").get<double>(), 1);
  }
  return "-";
}

std::string accuracy_table(const std::vector<report::Results>& runs) {
  constexpr std::pair<const char*, const char*> kRules[] = {
      {"softmax", "softmax"}, {"paper", "the paper's rule"}, {"target_entropy", "target entropy"}};
  report::Table table({"correct answers, %", "16 items", "256", "4096", "16384"});
  for (const report::Results& run : runs) {
    for (const auto& [rule, text] : kRules) {
      std::vector<std::string> row{run.name + " head, " + text};
      for (const std::int64_t items : {16, 256, 4096, 16384}) row.push_back(accuracy(run.json, items, rule));
      table.add(row);
    }
  }
  return table.text();
}

// Of each head, as `whet reproduce` leaves them: DIR/paper and DIR/sharp are experiments of one seed.
std::vector<report::Results> results_of(const Arguments& arguments) {
  const lab::Watcher bars = watcher();
  const std::vector<lab::Run> runs = lab::train_runs(trainings(arguments), arguments.threads, bars);
  const lab::StudyOptions options{.sizes = {16, 64, 256, 1024, 4096, 16384},
                                  .sets = arguments.sets,
                                  .calibrate = false,
                                  .threads = arguments.threads,
                                  .keep = true};
  std::vector<report::Results> results;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::string name = kHeads[i].first;
    results.push_back({name, lab::study({runs[i]}, options, made_by(arguments.threads), bars)});
    files::write_text(in(in(arguments.folder, name), "results.json"), results.back().json.dump() + "\n");
  }
  return results;
}

void demo(const Arguments& arguments) {
  std::fputs(
      "Two heads learn to find the item of highest priority among 5 to 16 and to name its class:\n"
      "one by the paper's recipe, one by the sharp recipe. Then both are asked about up to 16384 items.\n",
      stderr);
  const std::string page = in(arguments.folder, "report.html");
  if (std::filesystem::exists(page)) {
    std::fprintf(stderr, "%s was finished before and is shown again; remove it to train again.\n",
                 files::escaped(arguments.folder).c_str());
  }
  const std::vector<report::Results> runs = results_of(arguments);
  files::write_text(page,
                    report::html_page(report::page_data(runs, lab::compare({&runs[0].json, &runs[1].json}))));
  std::printf(
      "\n%s\n"
      "Trained on 5 to 16 items and asked about 16384, the paper head answers %s %% of the sets correctly "
      "with\n"
      "plain softmax, the sharp head %s %% with the entropy of its weights held where it was in training.\n"
      "\nOpen %s in a browser.\n",
      accuracy_table(runs).c_str(), accuracy(runs[0].json, 16384, "softmax").c_str(),
      accuracy(runs[1].json, 16384, "target_entropy").c_str(), files::escaped(page).c_str());
}

}  // namespace

void add_demo(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("demo", "Train and compare two heads: a minute or two on two cores");
  command->add_option("DIR", arguments->folder, "Folder of the demo; one that was stopped goes on")
      ->capture_default_str();
  command
      ->add_option("--steps", arguments->steps,
                   "Steps of each head (default 12000 by the paper's recipe, 40000 by the sharp one)")
      ->type_name("N");
  command->add_option("--sets", arguments->sets, "Sets of each size that the heads are asked about")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--threads", arguments->threads, "0 = the default; every number gives the same results")
      ->type_name("N")
      ->capture_default_str();
  command->footer(
      "Trains a head by the paper's recipe, which has 100000 steps in full, and one by the sharp recipe\n"
      "(200000), on sets of 5..16 items, and evaluates both on sets of up to 16384. DIR gets paper/ and "
      "sharp/,\n"
      "as 'whet reproduce' leaves them, and report.html, which compares them. A finished demo is shown "
      "again;\n"
      "remove DIR to train again.\n\n"
      "Examples:\n"
      "  whet demo\n"
      "  whet report demo/sharp\n");
  command->callback([arguments] { demo(*arguments); });
}

}  // namespace whet::cli
