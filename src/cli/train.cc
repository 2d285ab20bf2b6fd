// whet train: one head, in a folder of its own.
#include <whet/error.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/lab_options.h"
#include "files/text.h"
#include "lab/diagnosis.h"
#include "lab/run.h"
#include "report/table.h"

namespace whet::cli {
namespace {

struct Arguments {
  std::string folder;
  RecipeOptions recipe;
};

void run(const Arguments& arguments) {
  const lab::Recipe recipe = arguments.recipe.recipe();
  if (const lab::Rank rank = lab::rank_of_environment(); rank.size > 1) {
    throw Error("ranks: are " + std::to_string(rank.size) +
                ", but this trains one head; share out several with 'whet reproduce --seeds'");
  }
  {
    Progress progress("training", recipe.steps, lab::prepare_run(arguments.folder, recipe));
    lab::train_run(arguments.folder, recipe, [&](std::int64_t steps) { progress.advance(steps); });
    progress.finish();
  }
  const lab::Run trained = lab::load_run(arguments.folder);
  const lab::Metrics last = trained.metrics.empty() ? lab::Metrics{} : trained.metrics.back();
  std::printf(
      "%s: %lld steps, loss %.4f, accuracy %.2f %% on the last training sets, resolution %s items\n",
      files::escaped(arguments.folder).c_str(), static_cast<long long>(trained.step), last.loss,
      100 * last.accuracy,
      report::fixed(lab::diagnose(trained.parameters, trained.recipe.architecture).resolution, 0).c_str());
}

}  // namespace

void add_train(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("train", "Train one head on max retrieval, in a folder");
  command->add_option("DIR", arguments->folder, "Folder of the run; a stopped one is resumed")->required();
  arguments->recipe.add_to(*command);
  command->footer(
      "The folder gets config.json, checkpoint.safetensors and metrics.jsonl. A run that was stopped, killed "
      "or cut off\n"
      "by a full disk is resumed by the same command and ends in the same bits.\n\n"
      "Examples:\n"
      "  whet train run --steps 5000\n"
      "  whet train sharp --recipe sharp --seed 3\n");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace whet::cli
