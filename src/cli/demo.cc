// whet demo: the project in two minutes. A head of the paper's recipe and one of the sharp recipe, trained
// side by side and compared.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
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
#include "results/results.h"

namespace whet::cli {
namespace {

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
std::string accuracy(const results::Reproduction& results, std::int64_t items, const std::string& rule) {
  for (const results::SizeSummary& size : results.summary) {
    const results::RuleSummary* found = size.items == items ? size.rules.find(rule) : nullptr;
    if (found != nullptr) return report::fixed(100 * found->accuracy, 1);
  }
  return "-";
}

std::string accuracy_table(const std::vector<results::Reproduction>& heads) {
  constexpr std::pair<const char*, const char*> kRules[] = {
      {"softmax", "softmax"}, {"paper", "the paper's rule"}, {"target_entropy", "target entropy"}};
  report::Table table({"correct answers, %", "16 items", "256", "4096", "16384"});
  for (std::size_t i = 0; i < heads.size(); ++i) {
    for (const auto& [rule, text] : kRules) {
      std::vector<std::string> row{std::string(kHeads[i].first) + " head, " + text};
      for (const std::int64_t items : {16, 256, 4096, 16384}) row.push_back(accuracy(heads[i], items, rule));
      table.add(row);
    }
  }
  return table.text();
}

// Of each head, as `whet reproduce` leaves them: DIR/paper and DIR/sharp are experiments of one seed.
std::vector<results::Reproduction> results_of(const Arguments& arguments) {
  const lab::ProgressListener bars = progress_bars();
  const std::vector<lab::Run> runs = lab::train_runs(trainings(arguments), arguments.threads, bars);
  const lab::StudyOptions options{.sizes = {16, 64, 256, 1024, 4096, 16384},
                                  .sets = arguments.sets,
                                  .calibrate = false,
                                  .threads = arguments.threads,
                                  .cache = true};
  std::vector<results::Reproduction> heads;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    heads.push_back(lab::study({runs[i]}, options, provenance(arguments.threads), bars));
    files::write_text(in(in(arguments.folder, kHeads[i].first), "results.json"),
                      results::to_json(heads.back()).dump() + "\n");
  }
  return heads;
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
  const std::vector<results::Reproduction> heads = results_of(arguments);
  files::write_text(
      page, report::html_page(report::page_data({{kHeads[0].first, heads[0]}, {kHeads[1].first, heads[1]}},
                                                lab::compare({&heads[0], &heads[1]}))));
  std::printf(
      "\n%s\n"
      "Trained on 5 to 16 items and asked about 16384, the paper head answers %s %% of the sets correctly "
      "with\n"
      "plain softmax, the sharp head %s %% with the entropy of its weights held where it was in training.\n"
      "\nOpen %s in a browser.\n",
      accuracy_table(heads).c_str(), accuracy(heads[0], 16384, "softmax").c_str(),
      accuracy(heads[1], 16384, "target_entropy").c_str(), files::escaped(page).c_str());
}

}  // namespace

void add_demo(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("demo", "Train and compare two heads: a minute or two on two cores");
  command->add_option("DIR", arguments->folder, "Folder of the demo; a stopped one is resumed")
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
