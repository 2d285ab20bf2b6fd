// whet horizon: how many keys a head can stay sharp for, from its spread; and the theorem behind it, head by
// head.
#include <whet/error.h>
#include <whet/horizon.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/lab_options.h"
#include "files/text.h"
#include "lab/diagnosis.h"
#include "lab/evaluation.h"
#include "lab/run.h"
#include "lab/theorem.h"
#include "report/table.h"

namespace whet::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Arguments {
  std::string run;
  std::int64_t sets = 64;
  double spread = 0;
  double weight = 0.5;
  double beta = 1;
  bool theorem = false;
  lab::TheoremConfig model;
  std::vector<std::int64_t> sizes;
  bool json = false;
};

constexpr std::int64_t kMostKeys = std::int64_t{1} << 53;  // beyond, not every number of keys is a double

std::vector<std::int64_t> sizes_of(const Arguments& arguments, const std::vector<std::int64_t>& otherwise) {
  for (const std::int64_t n : arguments.sizes) {
    if (n < 1 || n > kMostKeys) {
      throw Error("--sizes: " + std::to_string(n) + " keys, must be 1 to 2^53");
    }
  }
  return arguments.sizes.empty() ? otherwise : arguments.sizes;
}

// ---- text

std::string number(double value, int digits = 4) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
  return buffer;
}

// Of the horizon, also where that is no double any more.
double log10_horizon(double spread, double weight) {
  const double keys = horizon(spread, weight);
  if (std::isfinite(keys)) return std::log10(keys);
  return (spread + std::log1p(-weight) - std::log(weight)) / std::numbers::ln10;
}

std::string horizon_text(double spread, double weight) {
  const double log10 = log10_horizon(spread, weight);
  if (log10 < 6) return number(horizon(spread, weight), 6);
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "10^%.*f", log10 < 1000 ? 1 : 0, log10);
  return buffer;
}

using report::Table;

// ---- one head, by its spread

std::string spread_json(const Arguments& arguments, const std::vector<std::int64_t>& sizes) {
  const double spread = arguments.spread * arguments.beta;
  Json json;
  json["spread"] = arguments.spread;
  json["beta"] = arguments.beta;
  json["weight"] = arguments.weight;
  json["horizon"] = horizon(spread, arguments.weight);
  json["log10_horizon"] = log10_horizon(spread, arguments.weight);
  for (const std::int64_t n : sizes) {
    const double keys = static_cast<double>(n);
    const WeightBounds paper = paper_bounds(keys, spread);
    json["sizes"].push_back({{"keys", n},
                             {"largest_weight", largest_weight(keys, spread)},
                             {"paper_upper", paper.upper},
                             {"paper_lower", paper.lower}});
  }
  return json.dump(2) + "\n";
}

std::string spread_text(const Arguments& arguments, const std::vector<std::int64_t>& sizes) {
  const double spread = arguments.spread * arguments.beta;
  Table table({"keys", "largest weight", "paper's upper", "paper's lower"});
  for (const std::int64_t n : sizes) {
    const double keys = static_cast<double>(n);
    const WeightBounds paper = paper_bounds(keys, spread);
    table.add(
        {std::to_string(n), number(largest_weight(keys, spread)), number(paper.upper), number(paper.lower)});
  }
  return "spread   " + number(arguments.spread, 6) +
         (arguments.beta == 1 ? "" : " at beta " + number(arguments.beta, 6)) + "\nhorizon  " +
         horizon_text(spread, arguments.weight) + " keys: beyond, no key can have a weight above " +
         number(arguments.weight, 6) + "\n\n" + table.text();
}

void run_spread(const Arguments& arguments) {
  // The spread is checked as given, and may not overflow with beta.
  horizon(arguments.spread, arguments.weight, arguments.beta);
  if (!std::isfinite(arguments.spread * arguments.beta)) throw Error("spread: times beta, must be finite");
  const std::vector<std::int64_t> sizes =
      sizes_of(arguments, {16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384});
  std::cout << (arguments.json ? spread_json(arguments, sizes) : spread_text(arguments, sizes));
}

// ---- the head of a run

std::string run_json(const Arguments& arguments, const std::vector<lab::SizeOutcome>& outcomes,
                     double allowed) {
  Json json;
  json["run"] = files::escaped(arguments.run);
  json["beta"] = arguments.beta;
  json["weight"] = arguments.weight;
  json["spread_allowed"] = allowed;
  json["log10_horizon_allowed"] = log10_horizon(allowed * arguments.beta, arguments.weight);
  for (const lab::SizeOutcome& size : outcomes) {
    const double keys = static_cast<double>(size.items), spread = size.largest_spread * arguments.beta;
    json["sizes"].push_back({{"keys", size.items},
                             {"mean_weight", size.outcomes[0].peak},
                             {"highest_weight", size.outcomes[0].largest_peak},
                             {"largest_spread", size.largest_spread},
                             {"largest_weight", largest_weight(keys, spread)},
                             {"paper_upper", paper_bounds(keys, spread).upper},
                             {"paper_lower", paper_bounds(keys, spread).lower},
                             {"horizon", horizon(spread, arguments.weight)}});
  }
  return json.dump(2) + "\n";
}

std::string run_text(const Arguments& arguments, const std::vector<lab::SizeOutcome>& outcomes,
                     double allowed) {
  Table table({"keys", "largest weight: mean", "highest", "bound of the spread", "paper's upper",
               "paper's lower", "largest spread", "horizon"});
  for (const lab::SizeOutcome& size : outcomes) {
    const double keys = static_cast<double>(size.items), spread = size.largest_spread * arguments.beta;
    const WeightBounds paper = paper_bounds(keys, spread);
    table.add({std::to_string(size.items), number(size.outcomes[0].peak),
               number(size.outcomes[0].largest_peak), number(largest_weight(keys, spread)),
               number(paper.upper), number(paper.lower), number(spread),
               horizon_text(spread, arguments.weight)});
  }
  return files::escaped(arguments.run) + ", " + std::to_string(arguments.sets) + " sets of each size" +
         (arguments.beta == 1 ? "" : ", at beta " + number(arguments.beta, 6)) +
         ". Its weights allow a spread of about " + number(allowed * arguments.beta) + ", a horizon of " +
         horizon_text(allowed * arguments.beta, arguments.weight) + " keys for a weight of " +
         number(arguments.weight, 6) +
         ".\nA bound holds for the one row that uses its whole spread: one item at the top, all others at "
         "the bottom. Real\n"
         "rows have many items near the top, and fall long before it.\n\n" +
         table.text();
}

void run_run(const Arguments& arguments) {
  horizon(0, arguments.weight, arguments.beta);  // refuses wrong numbers before the work
  const lab::Run run = lab::load_run(arguments.run);
  const std::vector<lab::NamedWeighting> rule{{"beta", {.rule = Rule::fixed(arguments.beta)}}};
  const auto outcomes = lab::evaluate(run.parameters, rule,
                                      {.sizes = sizes_of(arguments, {16, 64, 256, 1024, 4096, 16384}),
                                       .sets = arguments.sets,
                                       .architecture = run.recipe.architecture});
  const double allowed = lab::spread_allowed(run.parameters, run.recipe.architecture);
  std::cout << (arguments.json ? run_json(arguments, outcomes, allowed)
                               : run_text(arguments, outcomes, allowed));
}

// ---- the theorem: every head of a model

struct Measured {
  std::vector<std::int64_t> sizes;
  std::vector<std::vector<lab::HeadSharpness>> at;  // a size, then a head
  std::vector<double> implied;                      // spread, a head
};

Measured measure(const Arguments& arguments) {
  const lab::TheoremModel model = lab::draw_theorem_model(arguments.model);
  Measured measured{sizes_of(arguments, {16, 64, 256, 1024, 4096, 16384, 1 << 20, 1 << 30}),
                    {},
                    lab::implied_spreads(model)};
  for (const std::int64_t n : measured.sizes) {
    measured.at.push_back(lab::measure_heads(model, lab::needle_sequence(arguments.model.vocabulary, n)));
  }
  return measured;
}

std::string theorem_json(const Arguments& arguments, const Measured& measured) {
  const lab::TheoremConfig& model = arguments.model;
  Json json;
  json["model"] = {{"vocabulary", model.vocabulary}, {"width", lab::kTheoremWidth}, {"layers", model.layers},
                   {"heads", model.heads},           {"seed", model.seed},          {"beta", model.beta}};
  json["weight"] = arguments.weight;
  for (std::size_t i = 0; i < measured.implied.size(); ++i) {
    Json head;
    head["layer"] = static_cast<std::int64_t>(i) / model.heads;
    head["head"] = static_cast<std::int64_t>(i) % model.heads;
    head["implied_spread"] = measured.implied[i];
    head["log10_implied_horizon"] = log10_horizon(measured.implied[i], arguments.weight);
    for (std::size_t s = 0; s < measured.sizes.size(); ++s) {
      const auto& [weight, spread] = measured.at[s][i];
      const double keys = static_cast<double>(measured.sizes[s]);
      head["sizes"].push_back({{"keys", measured.sizes[s]},
                               {"largest_weight", weight},
                               {"spread", spread},
                               {"bound", largest_weight(keys, spread)},
                               {"implied_bound", largest_weight(keys, measured.implied[i])}});
    }
    json["heads"].push_back(head);
  }
  return json.dump(2) + "\n";
}

// A row of the table: a label, then a cell for each head of the layer.
template <typename Cell>
Table::Cells row_of_heads(std::string label, std::size_t first, std::size_t heads, Cell cell) {
  Table::Cells cells = {std::move(label)};
  for (std::size_t i = first; i < first + heads; ++i) cells.push_back(cell(i));
  return cells;
}

std::string layer_text(const Arguments& arguments, const Measured& measured, std::size_t layer) {
  const std::size_t heads = static_cast<std::size_t>(arguments.model.heads), first = layer * heads;
  const auto row = [&](std::string label, auto cell) {
    return row_of_heads(std::move(label), first, heads, cell);
  };
  const auto largest_spread = [&](std::size_t head) {
    double spread = 0;
    for (const auto& heads_at : measured.at) spread = std::max(spread, heads_at[head].spread);
    return spread;
  };
  Table table(row("layer " + std::to_string(layer) + ", keys",
                  [&](std::size_t i) { return "head " + std::to_string(i - first); }));
  for (std::size_t s = 0; s < measured.sizes.size(); ++s) {
    table.add(row(std::to_string(measured.sizes[s]), [&](std::size_t i) {
      const auto& [weight, spread] = measured.at[s][i];
      return number(weight, 3) +
             " <= " + number(largest_weight(static_cast<double>(measured.sizes[s]), spread), 3);
    }));
  }
  table.add(row("largest spread", [&](std::size_t i) { return number(largest_spread(i)); }));
  table.add(row("spread its weights allow", [&](std::size_t i) { return number(measured.implied[i]); }));
  table.add(row("horizon its weights imply",
                [&](std::size_t i) { return horizon_text(measured.implied[i], arguments.weight); }));
  return table.text();
}

std::string theorem_text(const Arguments& arguments, const Measured& measured) {
  std::string text =
      "The largest weight that any token gets, and the bound from the spread measured at that size.\n"
      "The last lines hold for every input: what the weights alone allow, and the keys beyond which\n"
      "they leave no weight above " +
      number(arguments.weight, 6) + ". Valid, and far from what happens.\n";
  for (std::int64_t layer = 0; layer < arguments.model.layers; ++layer) {
    text += "\n" + layer_text(arguments, measured, static_cast<std::size_t>(layer));
  }
  return text;
}

void run_theorem(const Arguments& arguments) {
  horizon(0, arguments.weight);  // refuses a wrong weight before the work
  const Measured measured = measure(arguments);
  std::cout << (arguments.json ? theorem_json(arguments, measured) : theorem_text(arguments, measured));
}

constexpr const char* kHelp =
    "The spread d of a head is its largest minus its smallest logit. Among n keys it can give none more\n"
    "than 1 / (1 + (n - 1) e^-d). Its horizon is the n where that falls below --weight: 1 + e^d (1/W - 1).\n"
    "'whet softmax --stats' and stats of attention give the spread of real rows. An inverse temperature\n"
    "--beta makes the spread beta times as large; spreads that are printed as measured include it.\n"
    "\n"
    "RUN measures the head of a run: its largest weight against the number of items, and what its spread "
    "and\n"
    "its weights (largest singular values of Q and K) allow.\n"
    "\n"
    "--theorem shows that it happens to every head: a transformer over a finite vocabulary (random weights,\n"
    "width 64, no positions, no normalization layers) reads one token of the first symbol among n - 1 of\n"
    "the others. Each cell is the largest weight that any token gets and the bound of its measured spread;\n"
    "the last lines are the spread that the weights allow for any input at all and the horizon it implies.\n"
    "\n"
    "Examples:\n"
    "  whet horizon --spread 6 --weight 0.5\n"
    "  whet horizon --spread 6 --beta 2.4 --sizes 1000,100000 --json\n"
    "  whet horizon run\n"
    "  whet horizon --theorem --layers 2 --heads 4 --sizes 16,1024,1073741824\n";

void add_theorem_options(CLI::App& command, CLI::Option* theorem, lab::TheoremConfig& model) {
  const auto add = [&](const char* name, auto& value, const char* description) {
    return command.add_option(name, value, description)
        ->type_name("N")
        ->capture_default_str()
        ->needs(theorem);
  };
  add("--layers", model.layers, "Layers of the model, 1 to 8");
  add("--heads", model.heads, "Heads a layer, a divisor of 64");
  add("--vocabulary", model.vocabulary, "Symbols, 2 to 1024");
  add("--seed", model.seed, "Decides the weights")->check(not_negative);
}

}  // namespace

void add_horizon(CLI::App& app) {
  CLI::App* command = app.add_subcommand("horizon", "How many keys a head can stay sharp for");
  const auto arguments = std::make_shared<Arguments>();
  CLI::Option* run =
      command->add_option("RUN", arguments->run, "Folder made by 'whet train': measure its head");
  CLI::Option* spread = command->add_option("--spread", arguments->spread, "Spread of the head's logits")
                            ->type_name("D")
                            ->excludes(run);
  CLI::Option* theorem =
      command->add_flag("--theorem", arguments->theorem, "Every head of a random model instead")
          ->excludes(spread)
          ->excludes(run);
  command->add_option("--weight", arguments->weight, "Sharp means a weight of W, above 0 and at most 1")
      ->type_name("W")
      ->capture_default_str();
  command->add_option("--beta", arguments->beta, "Inverse temperature, above 0")
      ->type_name("B")
      ->capture_default_str();
  command->add_option("--sizes", arguments->sizes, "Numbers of keys to show, separated by commas")
      ->type_name("N,...")
      ->delimiter(',')
      ->allow_extra_args(false);
  add_theorem_options(*command, theorem, arguments->model);
  command->add_flag("--json", arguments->json, "Print JSON, for programs; null where a horizon is no double");
  command->footer(kHelp);
  command->add_option("--sets", arguments->sets, "Sets of each size that a run is measured on")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(run)
      ->capture_default_str();
  command->callback([arguments, spread] {
    arguments->model.beta = arguments->beta;
    if (arguments->theorem) {
      run_theorem(*arguments);
    } else if (!arguments->run.empty()) {
      run_run(*arguments);
    } else if (spread->count() > 0) {
      run_spread(*arguments);
    } else {
      throw Error("give RUN, --spread D or --theorem. See 'whet horizon --help'.");
    }
  });
}

}  // namespace whet::cli
