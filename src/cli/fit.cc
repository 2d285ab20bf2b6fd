// whet fit: the paper's polynomial again, on a head of one's own. whet calibrate: keys blind to the class.
#include <whet/error.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/lab_options.h"
#include "files/file.h"
#include "files/text.h"
#include "lab/calibration.h"
#include "lab/diagnosis.h"
#include "lab/fit_points.h"
#include "lab/run.h"
#include "report/table.h"

namespace whet::cli {
namespace {

struct FitArguments {
  std::vector<std::string> runs;
  std::string out;
  std::vector<std::int64_t> sizes;
  std::int64_t sets = 1024;
  int degree = 4;
  int threads = 0;
  bool json = false;
};

void print_comparison(const lab::PolynomialFit& fit, const Rule& ours) {
  std::printf("%zu misranked sets, entropy %.3f to %.3f nats; rms residual of beta %.3f, R^2 %.3f\n",
              fit.points, fit.lowest_entropy, fit.highest_entropy, fit.rms_residual, fit.r_squared);
  std::printf("| entropy | beta, this fit | beta, the paper |\n|---|---|---|\n");
  for (int i = 0; i <= 8; ++i) {
    const double h = fit.lowest_entropy + (fit.highest_entropy - fit.lowest_entropy) * i / 8;
    RowState row;  // any row of this entropy: n equal keys
    row.count = 2;
    row.min = row.max = 0;
    row.z = std::exp(h);
    std::printf("| %.3f | %.3f | %.3f |\n", h, ours.beta(row), Rule::paper().beta(row));
  }
}

void fit(const FitArguments& arguments) {
  if (arguments.degree < 1 || arguments.degree > 7) {
    throw Error("--degree: is " + std::to_string(arguments.degree) + ", must be 1 to 7");
  }
  lab::FitPointsOptions options{.sets = arguments.sets, .threads = arguments.threads};
  if (!arguments.sizes.empty()) options.sizes = arguments.sizes;
  const std::vector<lab::Run> runs = load_runs(arguments.runs);
  if (!arguments.out.empty()) refuse_to_overwrite(runs, "--out", arguments.out);
  std::vector<lab::FitPoint> points;
  std::string names;
  for (const lab::Run& run : runs) {
    options.architecture = run.recipe.architecture;
    const auto part = lab::fit_points(run.parameters, options);
    points.insert(points.end(), part.begin(), part.end());
    names += " " + files::escaped(run.folder);
  }
  if (points.size() < lab::kFewestPoints) {
    throw Error("RUN: misranks only " + std::to_string(points.size()) + " of these sets, a fit needs " +
                std::to_string(lab::kFewestPoints) + "; raise --sets or --sizes");
  }
  const lab::PolynomialFit result = lab::fit_polynomial(points, arguments.degree);
  if (!arguments.out.empty()) {
    lab::write_rule_file(arguments.out, result,
                         "inverse temperature against entropy, fitted by 'whet fit' on" + names);
  }
  if (arguments.json) {
    std::printf("%s\n", nlohmann::ordered_json{{"rule", result.rule().name()},
                                               {"coefficients", result.coefficients},
                                               {"lowest_entropy", result.lowest_entropy},
                                               {"highest_entropy", result.highest_entropy},
                                               {"rms_residual", result.rms_residual},
                                               {"r_squared", result.r_squared},
                                               {"points", result.points}}
                            .dump(2)
                            .c_str());
    return;
  }
  print_comparison(result, result.rule());
  std::printf("%s\n", result.rule().name().c_str());
  const std::string out = files::escaped(arguments.out);
  if (!out.empty()) std::printf("Written to %s; use it as polynomial:%s\n", out.c_str(), out.c_str());
}

struct CalibrateArguments {
  std::string run, out, method = "classes";
  std::uint64_t seed = 1;
};

void calibrate(const CalibrateArguments& arguments) {
  if (arguments.method != "classes" && arguments.method != "pairs") {
    throw Error("--method: is '" + arguments.method + "', must be classes or pairs");
  }
  lab::Run run = lab::load_run(arguments.run);
  const double before = lab::diagnose(run.parameters, run.recipe.architecture).resolution;
  const lab::Calibration result = lab::calibrate(
      run.parameters,
      arguments.method == "pairs" ? lab::CalibrationMethod::pairs : lab::CalibrationMethod::classes,
      arguments.seed, run.recipe.architecture);
  run.parameters = result.parameters;
  run.edit = (run.edit.empty() ? "" : run.edit + "; ") + result.text;
  lab::save_edited_run(arguments.out, run);
  std::printf("%s: %s; resolution %s items, was %s\n", files::escaped(arguments.out).c_str(),
              result.text.c_str(),
              report::fixed(lab::diagnose(run.parameters, run.recipe.architecture).resolution, 0).c_str(),
              report::fixed(before, 0).c_str());
}

}  // namespace

void add_fit(CLI::App& app) {
  auto arguments = std::make_shared<FitArguments>();
  CLI::App* command = app.add_subcommand("fit", "Fit beta against entropy on what trained heads get wrong");
  command->add_option("RUN", arguments->runs, "Folders made by 'whet train'")->required();
  command
      ->add_option("--out", arguments->out,
                   "Rule file to write; every command and the Python package load it")
      ->type_name("FILE");
  command->add_option("--sizes", arguments->sizes, "Items of a set (default 16,32,...,4096)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("N,N,..");
  command->add_option("--sets", arguments->sets, "Sets drawn of each size")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--degree", arguments->degree, "Of the polynomial, 1 to 7")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--threads", arguments->threads, "0 = the default")
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print the fit for programs");
  command->footer(
      "For every set whose item of largest priority hasn't the largest logit: its entropy, and the beta at "
      "which that\n"
      "item gets most weight. Least squares through these. The rule holds its last value beyond the largest "
      "entropy\n"
      "it was fitted on, and is 1 below the smallest: a polynomial says nothing outside its points.\n\n"
      "Examples:\n"
      "  whet fit run --out my.rule\n"
      "  whet eval run --with polynomial:my.rule\n");
  command->callback([arguments] { fit(*arguments); });
}

void add_calibrate(CLI::App& app) {
  auto arguments = std::make_shared<CalibrateArguments>();
  CLI::App* command =
      app.add_subcommand("calibrate", "Edit a head's keys so that classes don't change the order");
  command->add_option("RUN", arguments->run, "Folder made by 'whet train'")->required();
  command->add_option("OUT", arguments->out, "New folder for the edited head")->required();
  command
      ->add_option("--method", arguments->method,
                   "classes: with class labels, the ten classes at priority 1 get the same logit; pairs: "
                   "without class labels, "
                   "by the directions in which items close in priority differ most")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--sets-seed", arguments->seed, "Of the items that pairs are taken from")
      ->check(not_negative)
      ->type_name("N")
      ->capture_default_str();
  command->footer(
      "The logit of an item is (K^T q) . h, h the encoded item. K becomes (I - P) K, P the projection onto "
      "the\n"
      "directions of h in which the classes differ. No targets, no training.\n\n"
      "Example:\n"
      "  whet calibrate run calibrated && whet eval calibrated\n");
  command->callback([arguments] { calibrate(*arguments); });
}

}  // namespace whet::cli
