// whet reproduce: the paper in one command. whet eval: the same measurements of runs that are there.
#include <whet/error.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/lab_options.h"
#include "cli/ranks.h"
#include "files/file.h"
#include "files/safetensors.h"
#include "files/text.h"
#include "lab/reproduction.h"
#include "report/page.h"
#include "report/tables.h"
#include "results/load.h"

namespace whet::cli {
namespace {

struct Arguments {
  std::string folder;
  std::vector<std::string> runs;
  RecipeOptions recipe;
  EvaluationFlags evaluation;
  int seeds = 10;
  std::string sets_file;
  bool no_calibration = false;
  bool json = false;
};

std::string in(const std::string& folder, const char* name) {
  return (std::filesystem::path(folder) / name).string();
}

// Results, tables and page into the folder (unless there is none), all or nothing, then to the terminal.
void show(const results::Reproduction& results, const std::string& folder, bool json) {
  const std::string text = results::to_json(results).dump() + "\n";
  const std::string tables = report::markdown_tables(results);
  if (!folder.empty()) {
    files::OutputFile json_file(in(folder, "results.json")), tables_file(in(folder, "tables.md")),
        csv_file(in(folder, "tables.csv")), page_file(in(folder, "report.html"));
    const auto write = [](files::OutputFile& file, const std::string& content) {
      file.write(std::as_bytes(std::span(content)));
      file.finish();
    };
    write(json_file, text);
    write(tables_file, tables);
    write(csv_file, report::csv_table(results));
    write(page_file, report::html_page(report::page_data({{results::name_of_results(folder), results}}, {})));
    for (files::OutputFile* file : {&json_file, &tables_file, &csv_file, &page_file}) file->commit();
  }
  std::fputs(json ? text.c_str() : tables.c_str(), stdout);
  if (!folder.empty()) {
    std::fprintf(stderr, "Written to %s: results.json, tables.md, tables.csv\n",
                 files::escaped(folder).c_str());
    std::fprintf(stderr, "Open %s in a browser.\n", files::escaped(in(folder, "report.html")).c_str());
  }
}

void reproduce(const Arguments& arguments) {
  const lab::Recipe recipe = arguments.recipe.recipe();
  lab::StudyOptions options = arguments.evaluation.options();
  options.calibrate = !arguments.no_calibration;
  options.cache = true;
  const lab::Rank rank = join_ranks();
  const lab::ProgressListener bars = progress_bars(rank);
  const auto own = share_of(lab::seed_trainings(arguments.folder, recipe, arguments.seeds), rank);
  if (rank.size > 1) {
    const auto work = [&] {
      if (own.empty()) return;
      lab::evaluate_heads(lab::train_runs(own, options.threads, bars), options, rank.rank == 0, bars);
    };
    if (!share_work(rank, in(arguments.folder, "ranks"), work)) return;
  }
  const auto runs = lab::train_seeds(arguments.folder, recipe, arguments.seeds, options.threads, bars);
  show(lab::study(runs, options, provenance(options.threads), bars), arguments.folder, arguments.json);
  end_ranks(rank, in(arguments.folder, "ranks"));
}

void save_sets(const std::string& path, const lab::StudyOptions& options) {
  files::OutputFile file(path);
  files::write_safetensors(
      file, lab::evaluation_sets({.sizes = options.sizes, .sets = options.sets, .seed = options.seed}));
  file.commit();
}

void evaluate(const Arguments& arguments) {
  lab::StudyOptions options = arguments.evaluation.options();
  options.calibrate = !arguments.no_calibration;
  if (!arguments.folder.empty()) files::make_folder(arguments.folder);
  const std::vector<lab::Run> runs = load_runs(arguments.runs);
  if (!arguments.sets_file.empty()) refuse_to_overwrite(runs, "--save-sets", arguments.sets_file);
  const lab::Rank rank = join_ranks();
  const lab::ProgressListener bars = progress_bars(rank);
  const std::string shared = in(arguments.folder, "ranks");
  if (rank.size > 1) {
    if (arguments.folder.empty()) throw Error("--out: missing, must be given where several ranks evaluate");
    options.cache = true;
    options.cache_folder = shared;
    const auto work = [&] {
      const auto own = share_of(runs, rank);
      if (!own.empty()) lab::evaluate_heads(own, options, rank.rank == 0, bars);
    };
    if (!share_work(rank, shared, work)) return;
  }
  if (!arguments.sets_file.empty()) save_sets(arguments.sets_file, options);
  show(lab::study(runs, options, provenance(options.threads), bars), arguments.folder, arguments.json);
  end_ranks(rank, shared);
}

void add_output_options(CLI::App& command, Arguments& arguments) {
  command.add_flag("--no-calibration", arguments.no_calibration,
                   "Leave out the calibrated versions of the heads");
  command.add_flag("--json", arguments.json, "Print results.json instead of tables");
}

}  // namespace

void add_reproduce(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  arguments->folder = "reproduction";
  CLI::App* command =
      app.add_subcommand("reproduce", "The paper's experiment: train, evaluate, fit, compare");
  command->add_option("DIR", arguments->folder, "Folder of the experiment; a stopped one is resumed")
      ->capture_default_str();
  command->add_option("--seeds", arguments->seeds, "Heads to train: seeds SEED, SEED + 1, ...")
      ->type_name("N")
      ->capture_default_str();
  add_output_options(*command, *arguments);
  arguments->recipe.add_to(*command);
  arguments->evaluation.add_to(*command);
  command->footer(
      "Trains heads on sets of 5..16 items, one per core, and evaluates them on sets up to 16,384 under "
      "every "
      "rule.\n"
      "Ctrl-C at any time: the same command resumes. DIR gets seed-N/ for every head, "
      "results.json,\n"
      "tables.md, tables.csv and report.html.\n"
      "Under mpirun or srun the heads are shared out among the ranks; the files are the same.\n\n"
      "Examples:\n"
      "  whet reproduce paper --seeds 10\n"
      "  whet reproduce small --seeds 2 --steps 12000 --sets 512\n"
      "  whet reproduce sharp --recipe sharp --sizes 16,1024,16384,131072\n"
      "  mpirun -n 4 whet reproduce paper --seeds 10\n");
  command->callback([arguments] { reproduce(*arguments); });
}

void add_eval(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("eval", "Evaluate trained heads under every rule, at any size");
  command->add_option("RUN", arguments->runs, "Folders made by 'whet train' or 'whet calibrate'")->required();
  command->add_option("--out", arguments->folder, "Folder for results.json, tables and report.html")
      ->type_name("DIR");
  command
      ->add_option("--save-sets", arguments->sets_file,
                   "Also write the sets, as safetensors: for each size N, N.priorities, N.classes, N.queries "
                   "and N.targets")
      ->type_name("FILE");
  add_output_options(*command, *arguments);
  arguments->evaluation.add_to(*command);
  command->footer(
      "Every head and every rule sees the same sets.\n\n"
      "Examples:\n"
      "  whet eval run\n"
      "  whet eval run --sizes 16,1048576 --sets 64 --with fixed:50\n"
      "  whet eval run --sizes 16,1024 --save-sets sets.safetensors\n");
  command->callback([arguments] { evaluate(*arguments); });
}

}  // namespace whet::cli
