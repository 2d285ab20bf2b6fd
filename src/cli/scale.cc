// whet scale: what ranks and bandwidth would give, by a cost model.
#include <whet/error.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/scale_model.h"

namespace whet::cli {
namespace {

struct Arguments {
  ScaleProblem problem;
  bool json = false;
};

struct Line {
  const char* scheme;
  const char* rule;
  Cost cost;
};

constexpr std::array kRules{RuleKind::known, RuleKind::state, RuleKind::search};
const char* name_of(RuleKind rule) {
  return rule == RuleKind::known ? "none" : rule == RuleKind::state ? "state" : "search";
}

struct Section {
  const char* name;
  std::vector<Line> lines;
};

std::vector<Section> sections_of(const ScaleProblem& problem) {
  std::vector<Section> sections{{"forward", {}}, {"backward", {}}, {"decoding", {}}};
  for (const RuleKind rule : kRules) {
    for (const Scheme scheme : {Scheme::in_place, Scheme::ring}) {
      const char* name = scheme == Scheme::ring ? "ring" : "in place";
      sections[0].lines.push_back({name, name_of(rule), forward_cost(problem, scheme, rule)});
      sections[1].lines.push_back({name, name_of(rule), backward_cost(problem, scheme, rule)});
    }
    sections[2].lines.push_back({"in place", name_of(rule), decode_cost(problem, rule)});
  }
  return sections;
}

// "1.23 GB", three digits.
std::string scaled(double value, const std::array<const char*, 5>& units, double first) {
  std::size_t unit = 0;
  value /= first;
  while (value >= 999.5 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %s", value, units[unit]);
  return text;
}

std::string bytes_text(double bytes) { return scaled(bytes, {"B", "kB", "MB", "GB", "TB"}, 1); }

std::string time_text_of(double seconds) {
  if (seconds >= 0.9995) return scaled(seconds, {"s", "ks", "Ms", "Gs", "Ts"}, 1);
  return scaled(seconds, {"us", "ms", "s", "ks", "Ms"}, 1e-6);
}

// What one rank takes that has all keys. It keeps logits, so that rules cost next to nothing.
Cost alone(const ScaleProblem& problem, std::size_t section) {
  ScaleProblem one = problem;
  one.ranks = 1;
  if (section == 2) return decode_cost(one, RuleKind::known);
  return (section == 0 ? forward_cost : backward_cost)(one, Scheme::in_place, RuleKind::known);
}

void print_table(const ScaleProblem& p) {
  const std::vector<Section> sections = sections_of(p);
  std::printf("%g tokens, %g queries, %g ranks, %s/s, %s per message\n", p.tokens,
              p.queries > 0 ? p.queries : p.tokens, p.ranks, bytes_text(p.bandwidth).c_str(),
              time_text_of(p.latency).c_str());
  std::printf("a layer of %g heads of %g (%g of keys), %g bytes per element, %g flop/s per rank\n", p.heads,
              p.head_size, p.key_heads, p.element_bytes, p.flops);
  for (std::size_t s = 0; s < sections.size(); ++s) {
    std::printf("\n%-9s %-9s %-7s %10s %9s %10s %10s %10s %8s\n", sections[s].name, "scheme", "rule",
                "sent/rank", "messages", "exchange", "compute", "time", "speed-up");
    for (const Line& line : sections[s].lines) {
      std::printf("%-9s %-9s %-7s %10s %9.0f %10s %10s %10s %8.1f\n", "", line.scheme, line.rule,
                  bytes_text(line.cost.bytes).c_str(), line.cost.messages,
                  time_text_of(line.cost.communication).c_str(), time_text_of(line.cost.compute).c_str(),
                  time_text_of(line.cost.time).c_str(), alone(p, s).time / line.cost.time);
    }
  }
  std::printf("\nmerging %g states adds at most %.1e to a sum of weights, relative\n", p.ranks,
              merge_error_bound(p.ranks));
}

void print_json(const ScaleProblem& p) {
  nlohmann::ordered_json json;
  for (const Section& section : sections_of(p)) {
    for (const Line& line : section.lines) {
      json[section.name].push_back({{"scheme", line.scheme},
                                    {"rule", line.rule},
                                    {"bytes", line.cost.bytes},
                                    {"messages", line.cost.messages},
                                    {"communication_seconds", line.cost.communication},
                                    {"compute_seconds", line.cost.compute},
                                    {"seconds", line.cost.time}});
    }
  }
  json["merge_error_bound"] = merge_error_bound(p.ranks);
  std::printf("%s\n", json.dump(2).c_str());
}

// Error naming the option unless value is finite and at least `least`.
void check(const char* option, double value, double least) {
  if (std::isfinite(value) && value >= least) return;
  char text[96];
  std::snprintf(text, sizeof text, "%s: is %g, must be finite and at least %g", option, value, least);
  throw Error(text);
}

void run(const Arguments& arguments) {
  const ScaleProblem& p = arguments.problem;
  check("--tokens", p.tokens, 1);
  check("--queries", p.queries, 0);
  check("--ranks", p.ranks, 1);
  check("--bandwidth", p.bandwidth, 1);
  check("--latency", p.latency, 0);
  check("--heads", p.heads, 1);
  check("--key-heads", p.key_heads, 1);
  check("--head-size", p.head_size, 1);
  check("--element-bytes", p.element_bytes, 1);
  check("--flops", p.flops, 1);
  check("--memory", p.memory, 1);
  arguments.json ? print_json(p) : print_table(p);
}

}  // namespace

void add_scale(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("scale", "What ranks and bandwidth would give attention, by a cost model");
  ScaleProblem& p = arguments->problem;
  const auto number = [&](const char* name, double& value, const char* help) {
    command->add_option(name, value, help)->type_name("X")->capture_default_str();
  };
  number("--tokens", p.tokens, "Keys of all ranks");
  number("--queries", p.queries, "Queries; 0: as many as keys");
  number("--ranks", p.ranks, "Processes");
  number("--bandwidth", p.bandwidth, "Bytes per second that a rank sends");
  number("--latency", p.latency, "Seconds per message");
  number("--heads", p.heads, "Query heads");
  number("--key-heads", p.key_heads, "Key heads");
  number("--head-size", p.head_size, "Size of a key and of a value");
  number("--element-bytes", p.element_bytes, "Bytes of an element of q, k, v");
  number("--flops", p.flops, "Products of a rank, in flop/s");
  number("--memory", p.memory, "Bytes per second at which a rank reads its keys");
  command->add_option("--steps", p.steps, "Steps of a rule that searches")
      ->check(CLI::Range(0, 1000))
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON, for programs");
  command->footer(
      "Of one layer, for the schemes of whet::mpi: keys in place (every rank has all queries; rows are "
      "merged\n"
      "between ranks) and ring (queries cut too; keys go round while ranks compute). Rules: none (and "
      "fixed),\n"
      "those of a row's state, those that search. docs/scaling.md has the model.\n\n"
      "Examples:\n"
      "  whet scale --tokens 1e6 --ranks 64 --bandwidth 100e9 --latency 5e-6\n"
      "  whet scale --tokens 1e7 --ranks 1000 --flops 50e12\n");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace whet::cli
