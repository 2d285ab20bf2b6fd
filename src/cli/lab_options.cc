#include "cli/lab_options.h"

#include <whet/error.h>
#include <whet/runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "cli/ranks.h"
#include "cli/rules.h"
#include "files/file.h"
#include "files/text.h"
#include "lab/run.h"

namespace whet::cli {
namespace {

std::string& command_line() {
  static std::string line;
  return line;
}

// As a shell needs it, so that the line can be run again.
std::string quoted(const std::string& argument) {
  const bool plain = !argument.empty() && std::all_of(argument.begin(), argument.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("-_./,:=+@%", c) != nullptr;
  });
  if (plain) return argument;
  // What can't be shown as it is takes the shell's $'...', in which \xNN is a byte.
  const bool shown = files::escaped(argument) == argument;
  std::string text = shown ? "'" : "$'";
  for (const char c : argument) {
    if (c == '\'') {
      text += shown ? "'\\''" : "\\'";
    } else {
      text += c == '\\' && !shown ? "\\\\" : std::string(1, c);
    }
  }
  return files::escaped(text + "'");
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int number(std::string_view text, const std::string& all) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error("--items: is '" + all + "', must be a size or a range like 5..16");
  }
  return value;
}

void set_items(const std::string& text, lab::TrainingSets& sets) {
  const std::size_t dots = text.find("..");
  sets.smallest = number(std::string_view(text).substr(0, dots), text);
  sets.largest = dots == text.npos ? sets.smallest : number(std::string_view(text).substr(dots + 2), text);
}

}  // namespace

std::string not_negative(const std::string& number) {
  return number.starts_with('-') ? "is " + number + ", must be 0 or more" : "";
}

void RecipeOptions::add_to(CLI::App& command) {
  const auto group = "Recipe (what isn't given is as --recipe has it)";
  command.add_option("--recipe", name, "paper: as published; sharp: keeps its order in large sets")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(group);
  command.add_option("--seed", seed, "Of weights and training sets (default 0)")
      ->type_name("N")
      ->check(not_negative)
      ->group(group);
  command.add_option("--steps", steps, "Steps of Adam (default 100000; sharp 200000)")
      ->type_name("N")
      ->group(group);
  command.add_option("--batch", batch, "Sets per step (default 128)")->type_name("N")->group(group);
  command.add_option("--items", items, "Items of a training set (default 5..16)")
      ->type_name("A..B")
      ->group(group);
  command.add_option("--rate", rate, "Learning rate, the highest (default 0.001)")
      ->type_name("X")
      ->group(group);
  command.add_option("--warmup", warmup, "Share of the steps in which the rate grows from 0 (default 0)")
      ->type_name("X")
      ->group(group);
  command.add_option("--schedule", schedule, "constant, or down to 0: linear, cosine, quartic")
      ->type_name("NAME")
      ->group(group);
  command.add_option("--l2", l2, "Strength of the L2 term (default 0.001)")->type_name("X")->group(group);
  command
      .add_option("--l2-form", l2_form,
                  "none; sum: l2 sum w^2; half: l2/2 sum w^2; decoupled: w -= rate l2 w (AdamW)")
      ->type_name("FORM")
      ->group(group);
  command.add_option("--l2-biases", l2_biases, "Whether the L2 term takes biases too")
      ->type_name("BOOL")
      ->group(group);
  command
      .add_option("--zoom", zoom, "Squeeze each training set into [1-s, 1], log10 s ~ U(-ZOOM, 0); 0 = off")
      ->type_name("ZOOM")
      ->group(group);
  command
      .add_option("--zoom-warmup", zoom_warmup, "Share of the steps in which ZOOM grows from 0 (default 0)")
      ->type_name("X")
      ->group(group);
  command.add_option("--rule", rule, "Rule in the head while training (default none)")
      ->type_name("RULE")
      ->group(group);
  command
      .add_option("--normalizer", normalizer,
                  "Of the head while training: softmax (default), sparsemax, entmax15, entmax:A, top-k:K,\n"
                  "straight-through, sigmoid, relu or softpick")
      ->type_name("NAME")
      ->group(group);
  command
      .add_option("--activation", activation,
                  "Of the item layers: gelu (default), or step: gelu(x) + [x > 0], straight-through gradient")
      ->type_name("NAME")
      ->group(group);
  command
      .add_option("--heads", heads,
                  "1 (default), or 2 of half the size, the second of them with straight-through attention")
      ->type_name("N")
      ->group(group);
}

lab::Recipe RecipeOptions::recipe() const {
  lab::Recipe recipe = lab::named_recipe(name);
  if (seed) recipe.seed = *seed;
  if (steps) recipe.steps = *steps;
  if (batch) recipe.batch = *batch;
  if (!items.empty()) set_items(items, recipe.sets);
  if (rate) recipe.rate = *rate;
  if (warmup) recipe.warmup = *warmup;
  if (!schedule.empty()) recipe.schedule = lab::parse_schedule(schedule);
  if (!l2_form.empty()) recipe.l2_form = lab::parse_l2(l2_form);
  // Where only one of the two is given, the other follows as far as there is no choice.
  const bool none = recipe.l2_form == lab::L2::none;
  recipe.l2 = l2 ? *l2 : none ? 0 : recipe.l2 > 0 ? recipe.l2 : lab::Recipe{}.l2;
  if (l2_biases) recipe.l2_biases = *l2_biases;
  if (zoom) recipe.sets.zoom = *zoom;
  if (zoom_warmup) recipe.zoom_warmup = *zoom_warmup;
  if (!rule.empty()) recipe.weighting.rule = rule_named(rule);
  if (!normalizer.empty()) recipe.weighting.normalizer = Normalizer::parse(normalizer);
  if (!activation.empty()) recipe.architecture.activation = lab::parse_activation(activation);
  if (heads) recipe.architecture.heads = *heads;
  check(recipe);
  return recipe;
}

void EvaluationFlags::add_to(CLI::App& command) {
  const auto group = "Evaluation";
  command.add_option("--sizes", sizes, "Items of an evaluation set (default 16,32,...,16384)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("N,N,..")
      ->group(group);
  command.add_option("--sets", sets, "Sets of each size (default 4096 up to 4,096 items, 1024 above)")
      ->type_name("N")
      ->group(group);
  command.add_option("--sets-seed", seed, "Of the evaluation sets")
      ->type_name("N")
      ->check(not_negative)
      ->capture_default_str()
      ->group(group);
  command.add_option("--precision", precision, "Of the arithmetic that evaluates: f32 or f64")
      ->type_name("TYPE")
      ->capture_default_str()
      ->group(group);
  command.add_option("--with", rules, "One more rule to evaluate; may be given again")
      ->allow_extra_args(false)
      ->type_name("RULE")
      ->group(group);
  command.add_option("--threads", threads, "0 = the default; every number gives the same results")
      ->type_name("N")
      ->capture_default_str();
}

lab::StudyOptions EvaluationFlags::options() const {
  lab::StudyOptions options{.sets = sets, .seed = seed, .threads = threads};
  if (!sizes.empty()) options.sizes = sizes;
  lab::check_sizes(options.sizes);
  if (sets < 0 || sets > 1 << 20) {
    throw Error("--sets: is " + std::to_string(sets) + ", must be 1 to 1048576, or 0 for the default");
  }
  if (precision != "f32" && precision != "f64") {
    throw Error("--precision: is '" + precision + "', must be f32 or f64");
  }
  options.precision = precision == "f64" ? lab::Precision::f64 : lab::Precision::f32;
  for (const std::string& rule : rules) {
    options.extra.push_back({files::escaped(rule), {.rule = rule_named(rule)}});
  }
  return options;
}

std::vector<lab::Run> load_runs(const std::vector<std::string>& folders) {
  std::vector<lab::Run> runs;
  for (const std::string& folder : folders) {
    lab::Run run = lab::load_run(folder);
    for (const lab::Run& other : runs) {
      if (run.parameters != other.parameters) continue;
      throw Error("RUN: has the same head twice, as " + other.folder + " and as " + folder +
                  "; name each once");
    }
    runs.push_back(std::move(run));
  }
  return runs;
}

lab::ProgressListener progress_bars(const lab::Rank& rank) {
  if (rank.rank != 0) {
    return {.begin = [](const std::string&, std::int64_t, std::int64_t) {},
            .advance = [](std::int64_t) {},
            .end = [] {}};
  }
  auto bar = std::make_shared<std::unique_ptr<Progress>>();
  return {.begin = [bar](const std::string& label, std::int64_t total,
                         std::int64_t before) { *bar = std::make_unique<Progress>(label, total, before); },
          .advance = [bar](std::int64_t steps) { (*bar)->advance(steps); },
          .end =
              [bar] {
                (*bar)->finish();
                bar->reset();
              }};
}

void refuse_to_overwrite(const std::vector<lab::Run>& runs, const std::string& option,
                         const std::string& path) {
  for (const lab::Run& run : runs) {
    for (const std::string& file : lab::files_of(run)) {
      if (!files::same_file(path, file)) continue;
      throw Error(std::string(option).append(": ").append(path).append(
          " is a file of the run itself; name another file"));
    }
  }
}

void remember_command(int argc, char** argv) {
  command_line() = "whet";
  for (int i = 1; i < argc; ++i) command_line() += " " + quoted(argv[i]);
}

namespace {

// Several ranks together work on as many as one process would.
int threads_of_machine() {
  const bool shares = lab::rank_of_environment().size > 1 && std::getenv("WHET_THREADS") == nullptr;
  return shares ? processors() : threads();
}

}  // namespace

results::Provenance provenance(int threads_given) {
  return {.command = command_line(),
          .whet = version(),
          .machine = processor(),
          .target = target(),
          .threads = threads_given > 0 ? threads_given : threads_of_machine()};
}

}  // namespace whet::cli
