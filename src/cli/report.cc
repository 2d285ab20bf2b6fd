// whet report: results as a page, tables, data or figures; of one run, or of several side by side.
#include <whet/error.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <list>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/browser.h"
#include "cli/commands.h"
#include "files/file.h"
#include "files/json.h"
#include "files/text.h"
#include "lab/comparison.h"
#include "report/page.h"
#include "report/tables.h"
#include "results/load.h"

namespace whet::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Arguments {
  std::vector<std::string> runs;
  std::string out;
  std::string format = "html";
};

template <typename Kind>
bool is_of(const std::vector<results::NamedResults>& runs) {
  return std::holds_alternative<Kind>(runs.front().results);
}

std::vector<results::NamedResults> load(const std::vector<std::string>& paths) {
  std::vector<results::NamedResults> runs;
  for (const std::string& path : paths) {
    runs.push_back(results::load_results(path));
    for (std::size_t i = 0; i + 1 < runs.size(); ++i) {
      if (!files::same_file(runs[i].file, runs.back().file)) continue;
      throw Error("DIR: has the same results twice, as " + paths[i] + " and as " + path + "; name each once");
    }
    const std::string first = kind_of(runs.front().results), kind = kind_of(runs.back().results);
    if (kind != first) {
      throw Error(std::string("DIR: has results of kind ")
                      .append(first)
                      .append(" in ")
                      .append(paths.front())
                      .append(" and ")
                      .append(kind)
                      .append(" in ")
                      .append(path)
                      .append("; compare one kind"));
    }
  }
  if (runs.size() > 1 && is_of<results::Probe>(runs)) {
    throw Error("DIR: has " + std::to_string(runs.size()) + " probes; name one, since they are not compared");
  }
  if (runs.size() > 1 && is_of<results::Clrs>(runs)) {
    throw Error("DIR: has " + std::to_string(runs.size()) +
                " results on CLRS-Text; name one, or have 'whet clrs report' compare their runs");
  }
  // Folders of the same name are told apart by their paths.
  std::vector<std::string> names;
  names.reserve(runs.size());
  for (const results::NamedResults& run : runs) names.push_back(run.name);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (std::count(names.begin(), names.end(), names[i]) > 1) runs[i].name = paths[i];
  }
  return runs;
}

std::vector<results::Comparison> comparisons_of(const std::vector<results::NamedResults>& runs) {
  if (runs.size() == 1 || !is_of<results::Reproduction>(runs)) return {};
  std::vector<const results::Reproduction*> reproductions;
  reproductions.reserve(runs.size());
  for (const results::NamedResults& run : runs)
    reproductions.push_back(&std::get<results::Reproduction>(run.results));
  return lab::compare(reproductions);
}

Json data_of(const std::vector<results::NamedResults>& runs) {
  return report::page_data(runs, comparisons_of(runs));
}

// ---- the formats that are text

std::string markdown(const std::vector<results::NamedResults>& runs) {
  if (is_of<results::Probe>(runs)) {
    return report::markdown_tables(std::get<results::Probe>(runs.front().results));
  }
  if (is_of<results::Clrs>(runs)) {
    return report::markdown_tables(std::get<results::Clrs>(runs.front().results));
  }
  if (is_of<results::Benchmark>(runs)) {
    throw Error("--format: is 'md', which benchmarks write themselves (--markdown); html and json draw them");
  }
  return runs.size() == 1 ? report::markdown_tables(std::get<results::Reproduction>(runs.front().results))
                          : report::markdown_comparison(runs, comparisons_of(runs));
}

std::string json(const std::vector<results::NamedResults>& runs) { return data_of(runs).dump(1) + "\n"; }

// Beside the results of one run, else in the current folder.
std::string beside(const Arguments& arguments, const char* name) {
  if (arguments.runs.size() > 1) return name;
  const std::filesystem::path run = arguments.runs.front();
  return ((std::filesystem::is_directory(run) ? run : run.parent_path()) / name).string();
}

// An output that isn't one of the results it is made of.
class Output : public files::OutputFile {
 public:
  Output(const std::string& path, const std::vector<results::NamedResults>& runs)
      : OutputFile(checked(path, runs)) {}

  void write_all(const std::string& text) {
    write(std::as_bytes(std::span(text)));
    finish();
  }

 private:
  static const std::string& checked(const std::string& path, const std::vector<results::NamedResults>& runs) {
    for (const results::NamedResults& run : runs) {
      if (files::same_file(path, run.file)) {
        throw Error("--out: " + path + " holds the results themselves; name another file");
      }
    }
    return path;
  }
};

void write_page(const std::vector<results::NamedResults>& runs, const Arguments& arguments) {
  const std::string path = arguments.out.empty() ? beside(arguments, "report.html") : arguments.out;
  Output file(path, runs);
  file.write_all(report::html_page(data_of(runs)));
  file.commit();
  if (file.replaces()) std::printf("Open %s in a browser.\n", files::escaped(path).c_str());
}

void write_or_print(const std::string& text, const std::vector<results::NamedResults>& runs,
                    const std::string& path) {
  if (path.empty()) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  Output file(path, runs);
  file.write_all(text);
  file.commit();
}

// ---- figures

// The page leaves them in one element, as JSON without markup.
Json figures_of(const std::string& document) {
  constexpr std::string_view kBegin = "<pre id=\"svg\">";
  const std::size_t begin = document.find(kBegin);
  const std::size_t end = document.find("</pre>", begin);
  if (begin == document.npos || end == document.npos) {
    throw std::runtime_error("the browser did not draw the page; open it (--format html) to see why");
  }
  const std::string_view text = document;
  return files::parse_json(text.substr(begin + kBegin.size(), end - begin - kBegin.size()), "the page");
}

// All or nothing.
void write_figures(const std::vector<results::NamedResults>& runs, const Arguments& arguments) {
  const Json figures = figures_of(document_of(report::html_page(data_of(runs)), "svg"));
  const std::string folder = arguments.out.empty() ? beside(arguments, "figures") : arguments.out;
  files::make_folder(folder);
  std::list<Output> outputs;
  for (const Json& figure : figures) {
    const std::string name = figure.at("name");
    outputs.emplace_back((std::filesystem::path(folder) / name).string(), runs).write_all(figure.at("svg"));
  }
  for (Output& file : outputs) file.commit();
  std::printf("%zu figures are in %s.\n", outputs.size(), files::escaped(folder).c_str());
}

void report(const Arguments& arguments) {
  const std::vector<results::NamedResults> runs = load(arguments.runs);
  if (arguments.format == "html") {
    write_page(runs, arguments);
  } else if (arguments.format == "md") {
    write_or_print(markdown(runs), runs, arguments.out);
  } else if (arguments.format == "json") {
    write_or_print(json(runs), runs, arguments.out);
  } else {
    write_figures(runs, arguments);
  }
}

}  // namespace

void add_report(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("report", "Draw results: one run, or several compared");
  command->add_option("DIR", arguments->runs, "Folders that hold results.json, or such files")->required();
  command
      ->add_option("--out", arguments->out,
                   "Output (default: report.html or figures/ in DIR, or here if there are several; md and "
                   "json are printed)")
      ->type_name("PATH");
  command
      ->add_option("--format", arguments->format,
                   "html, md, json or svg (one file per figure; needs chromium)")
      ->check(CLI::IsMember({"html", "md", "json", "svg"}))
      ->type_name("FORMAT")
      ->capture_default_str();
  command->footer(
      "The page is one file that needs no network. Of several runs, every other one is compared with the "
      "first,\n"
      "paired by seed.\n\n"
      "Examples:\n"
      "  whet report reproduction\n"
      "  whet report paper sharp --out comparison.html\n"
      "  whet report paper sharp --format md\n"
      "  whet report reproduction --format svg --out figures\n");
  command->callback([arguments] { report(*arguments); });
}

}  // namespace whet::cli
