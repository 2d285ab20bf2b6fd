// `whet`: finds the command, runs it, and turns what it throws into one line and an exit code:
// 0, 2 for wrong use, 1 for failure. Commands it doesn't know are programs: `whet foo` runs `whet-foo`.
#include <unistd.h>
#include <whet/error.h>
#include <whet/runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/lab_options.h"
#include "files/file.h"
#include "files/text.h"

namespace whet::cli {
namespace {

constexpr int kFailure = 1;
constexpr int kWrongUse = 2;

void add_commands(CLI::App& app) {
  add_demo(app);
  add_reproduce(app);
  add_train(app);
  add_eval(app);
  add_fit(app);
  add_calibrate(app);
  add_report(app);
  add_horizon(app);
  add_softmax(app);
  add_info(app);
  add_scale(app);
  add_bench(app);
}

constexpr const char* kExamples =
    "Examples:\n"
    "  whet demo\n"
    "  whet reproduce paper --seeds 10\n"
    "  whet softmax logits.npy weights.npy --rule paper --stats stats.npy\n"
    "  whet softmax logits.npy weights.npy --rule target-entropy:0.2 --axis 1\n"
    "\n";

constexpr const char* kMoreHelp =
    "\n"
    "'whet COMMAND --help' explains a command. Any other 'whet foo' runs the program whet-foo.\n"
    "WHET_THREADS and WHET_TARGET in the environment set the threads and the SIMD target.\n";

// File names and headers may hold anything; an error stays one line and sends a terminal no commands.
int report(const std::string& where, const std::string& problem, int code) {
  const std::string line = files::escaped(where + ": " + problem) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  return code;
}

// "whet", or "whet bench rows" once the command is known.
std::string full_name(const CLI::App& app) {
  std::string name = "whet";
  for (auto parsed = app.get_subcommands(); !parsed.empty(); parsed = parsed.front()->get_subcommands()) {
    name += " " + parsed.front()->get_name();
  }
  return name;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

bool is_command(const CLI::App& app, const char* name) {
  const std::vector<std::string> names = command_names(app);
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Letters to insert, delete or replace to get from a to b.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> previous(b.size() + 1), current(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    current[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      current[j + 1] =
          std::min({previous[j + 1] + 1, current[j] + 1, previous[j] + (a[i] == b[j] ? 0U : 1U)});
    }
    previous.swap(current);
  }
  return previous[b.size()];
}

// Programs of the Python package, and the extra of it that brings what they need.
constexpr std::pair<std::string_view, std::string_view> kPythonPrograms[] = {
    {"clrs", "clrs"}, {"probe", "probe"}, {"tune", "probe"}};

int unknown_command(const CLI::App& app, const std::string& name) {
  for (const auto& [program, extra] : kPythonPrograms) {
    if (name == program) {
      std::string text = "whet " + name + " is part of the Python package: pip install 'whet[";
      text.append(extra).append("]', and have its whet-").append(name).append(" in PATH.");
      return report("whet", text, kFailure);
    }
  }
  std::string closest;
  std::size_t distance = 3;
  for (const std::string& command : command_names(app)) {
    const std::size_t d = edit_distance(name, command);
    // A word of which hardly anything is left after the edits isn't a misspelling.
    if (d < distance && 2 * d <= command.size()) {
      distance = d;
      closest = command;
    }
  }
  return report("whet",
                "'" + name + "' is not a whet command. See 'whet --help'." +
                    (closest.empty() ? "" : " Did you mean '" + closest + "'?"),
                kWrongUse);
}

// Becomes whet-NAME with the remaining arguments; returns only if that isn't possible.
int run_program(const CLI::App& app, char** arguments) {
  const std::string name = arguments[0];
  // With a slash execvp would not look in PATH but run any file that the name leads to.
  if (name.empty() || name.find('/') != name.npos) return unknown_command(app, name);
  std::string program = "whet-" + name;
  arguments[0] = program.data();
  ::execvp(program.c_str(), arguments);
  if (errno == ENOENT || errno == ENOTDIR) return unknown_command(app, name);
  return report("whet", "cannot run " + program + ": " + std::generic_category().message(errno), kFailure);
}

// Runs the command inside the parse: its callback is what throws.
int parse_and_run(CLI::App& app, int argc, char** argv) {
  bool asked = false;  // for help or the version
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) {
      return report(full_name(app), std::string(e.what()) + ". See '" + full_name(app) + " --help'.",
                    kWrongUse);
    }
    app.exit(e);
    asked = true;
  } catch (const Error& e) {
    return report(full_name(app), e.what(), kWrongUse);
  } catch (const std::bad_alloc&) {
    return report(full_name(app), "out of memory; nothing was written", kFailure);
  } catch (const std::exception& e) {
    return report(full_name(app), e.what(), kFailure);
  }
  if (!asked && app.get_subcommands().empty()) {
    return report("whet", "a command is missing. See 'whet --help'.", kWrongUse);
  }
  std::cout.flush();
  if (!std::cout || std::ferror(stdout) != 0)
    return report(full_name(app), "cannot write to standard output", kFailure);
  return 0;
}

int run(int argc, char** argv) {
  CLI::App app("whet keeps attention sharp as inputs grow: softmax with an adaptive temperature.", "whet");
  app.set_version_flag("--version", "whet " + version(), "Print the version");
  app.set_help_flag("-h,--help", "Print this help");
  app.footer(std::string(kExamples) + kRuleHelp + kMoreHelp);
  app.require_subcommand(0, 1);  // with 1 an unknown option would be reported as a missing command
  add_commands(app);
  if (argc > 1 && argv[1][0] != '-' && !is_command(app, argv[1])) return run_program(app, argv + 1);
  remember_command(argc, argv);
  // Whole lines, so that progress on standard error never falls inside one.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  files::clean_up_on_signals();
  return parse_and_run(app, argc, argv);
}

}  // namespace
}  // namespace whet::cli

int main(int argc, char** argv) {
  try {
    return whet::cli::run(argc, argv);
  } catch (const std::exception& e) {
    return whet::cli::report("whet", e.what(), whet::cli::kFailure);
  }
}
