// results.json, version 1: the one definition that writers, readers, tables, comparisons and the page share
// (docs/results.md).
//
// A number that isn't finite is null in JSON and NaN here. What a head doesn't have (an optional) isn't
// there; a null is read as that, too.
#ifndef WHET_RESULTS_RESULTS_H_
#define WHET_RESULTS_RESULTS_H_

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace whet::results {

inline constexpr int kVersion = 1;

// A JSON object whose names are data: rules, facts. In the order of the file.
template <typename T>
class ByName {
 public:
  using Entry = std::pair<std::string, T>;

  // Replaces what has this name.
  void set(const std::string& name, T value) {
    const auto found = std::ranges::find(entries_, name, &Entry::first);
    if (found == entries_.end()) {
      entries_.emplace_back(name, std::move(value));
    } else {
      found->second = std::move(value);
    }
  }
  // null if there is none of this name.
  const T* find(std::string_view name) const {
    const auto found = std::ranges::find(entries_, name, &Entry::first);
    return found == entries_.end() ? nullptr : &found->second;
  }
  bool empty() const { return entries_.empty(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

struct Provenance {
  std::string command{};
  std::string whet{};     // version
  std::string machine{};  // processor
  std::string target{};   // SIMD
  std::int64_t threads = 0;
};

// The paired t-test of a difference over heads, with its 95 % interval low to high.
struct Difference {
  double difference = 0;
  double low = 0;
  double high = 0;
  double p = 0;
};

// ---- kind "reproduction"

struct EvaluationOptions {
  std::uint64_t sets_seed = 0;
  std::int64_t sets = 0;  // 0: the default of each size
  std::string precision{};
};

// A line of Table 1 of the paper, in percent.
struct PaperLine {
  std::int64_t items = 0;
  double softmax = 0;
  double paper = 0;
  double p = 0;  // NaN: not given
};

// One rule at one size, over all heads.
struct RuleSummary {
  double accuracy = 0;
  double deviation = 0;
  Difference against_softmax{};
  Difference against_ceiling{};
};

struct SizeSummary {
  std::int64_t items = 0;
  std::int64_t sets = 0;
  ByName<RuleSummary> rules{};
};

// One rule at one size, of one head: means over sets.
struct RuleOutcome {
  double accuracy = 0;
  double beta = 0;
  double sharpened = 0;  // share of rows with beta > 1
  double entropy = 0;    // at that beta
  double peak = 0;
};

struct Size {
  std::int64_t items = 0;
  std::int64_t sets = 0;
  std::int64_t redrawn = 0;
  double entropy = 0;  // at beta = 1
  double spread = 0;
  double largest_spread = 0;
  double largest_weight = 0;
  double weight_bound = 0;
  double paper_bound = 0;
  std::optional<double> ranked{};  // share of sets whose largest logit is of the right class
  double predicted = 0;
  ByName<RuleOutcome> rules{};
};

struct Diagnosis {
  double slope = 0;
  std::vector<double> offsets{};
  double deviation = 0;
  double resolution = 0;
};

struct Fit {
  std::vector<double> coefficients{};
  double lowest_entropy = 0;
  double highest_entropy = 0;
  double rms_residual = 0;
  double r_squared = 0;
  std::int64_t points = 0;
  std::string rule{};
};

// A head whose keys were edited after training.
struct CalibratedHead {
  std::string edit{};
  std::int64_t directions = 0;
  Diagnosis diagnosis{};
  std::vector<Size> sizes{};
};

template <typename T>
struct ByMethod {  // of calibration
  T classes;
  T pairs;
};

struct Model {
  std::uint64_t seed = 0;
  nlohmann::ordered_json recipe{};  // as lab::to_json(Recipe) has it
  std::int64_t step = 0;
  ByName<std::string> rules{};
  Diagnosis diagnosis{};
  double spread_allowed = 0;
  std::optional<Fit> fit{};
  std::vector<Size> sizes{};
  std::vector<std::tuple<std::int64_t, double, double>> metrics{};  // step, loss, accuracy
  std::optional<std::string> edit{};
  std::optional<std::string> did_not_learn{};  // why the head is taken not to have learned its task
  std::optional<ByMethod<CalibratedHead>> calibrated{};
};

struct HeatMapFrame {
  std::int64_t items = 0;
  ByName<std::vector<std::vector<double>>> rules{};  // sets x columns
};

struct HeatMap {
  std::uint64_t seed = 0;
  std::int64_t sets = 0;
  std::int64_t columns = 0;
  std::vector<HeatMapFrame> frames{};
};

using FitScatter = std::vector<std::tuple<double, double>>;  // entropy, best beta

struct Reproduction {
  static constexpr const char* kKind = "reproduction";
  Provenance provenance{};
  EvaluationOptions options{};
  std::vector<PaperLine> paper{};
  std::vector<SizeSummary> summary{};  // at least one
  std::vector<Model> models{};         // at least one
  FitScatter fit_scatter{};            // this and the next of the first head
  HeatMap heat_map{};
  std::optional<ByMethod<std::vector<SizeSummary>>> calibrated_summary{};
};

// ---- kind "benchmark": written by bench.command

struct Bar {
  std::string text{};  // what the ratio is of
  double value = 0;
  double limit = 0;
  bool at_most = false;  // else at least
};

struct BenchmarkSection {
  std::string title{};
  std::string note{};
  std::vector<std::string> headers{};
  std::vector<std::vector<std::string>> rows{};
  std::vector<Bar> bars{};
};

struct Benchmark {
  static constexpr const char* kKind = "benchmark";
  Provenance provenance{};
  ByName<std::string> facts{};  // of the machine
  std::vector<BenchmarkSection> sections{};
};

// ---- kind "probe": the heads of a language model as inputs grow

struct ProbedModel {
  std::string name{};
  std::string architecture{};
  std::int64_t layers = 0;
  std::int64_t heads = 0;  // of a layer
  std::int64_t key_heads = 0;
  std::int64_t parameters = 0;
  std::optional<std::int64_t> context{};  // tokens it was trained for, if it says
};

struct ProbePrompts {
  std::string kind{};  // max, needle or text
  std::string example{};
  std::int64_t per_length = 0;
  std::uint64_t seed = 0;
  std::optional<std::string> rows{};  // queries that were measured: last (if not there) or all
};

// From which value on a head belongs to a class.
struct ClassThresholds {
  double sink = 0;        // weight on the first key
  double uniform = 0;     // entropy / ln n
  double dispersing = 0;  // slope of the entropy
};

using HeadGrid = std::vector<std::vector<double>>;  // layers x heads

struct HeadStatistic {
  HeadGrid mean{};   // over prompts
  HeadGrid error{};  // standard error of that mean
};

// Of the model as it is, at beta = 1; beta and the sharp ones are what the rule would make of the same rows.
struct HeadStatistics {
  HeadStatistic entropy{};
  HeadStatistic relative_entropy{};  // entropy / ln n
  HeadStatistic peak{};
  HeadStatistic first{};  // weight on the first key
  HeadStatistic spread{};
  HeadStatistic beta{};
  HeadStatistic sharp_entropy{};
  HeadStatistic sharp_peak{};
};

struct ProbedLength {
  double tokens = 0;  // mean over prompts
  std::int64_t prompts = 0;
  HeadStatistics statistics{};
};

inline constexpr std::string_view kHeadClasses[] = {"dispersing", "sink", "uniform", "sharp"};

struct ProbedHead {
  std::int64_t layer = 0;
  std::int64_t head = 0;
  std::string head_class{};  // "class" in JSON; one of kHeadClasses
  double slope = 0;          // of the entropy against ln tokens, with its 95 % interval low to high
  double low = 0;
  double high = 0;
  double horizon = 0;  // tokens up to which its spread lets one key have the weight horizon_weight
};

// The model under one choice of rules; intervals are at 95 %.
struct ProbedSetting {
  std::string name{};
  double perplexity = 0;
  double perplexity_low = 0;
  double perplexity_high = 0;
  double difference = 0;  // of the mean log-loss per token from that of "none", in nats
  double low = 0;
  double high = 0;
  std::optional<double> needle{};  // share of needles found
  std::optional<double> needle_low{};
  std::optional<double> needle_high{};
  std::int64_t tokens = 0;  // of text
};

struct Probe {
  static constexpr const char* kKind = "probe";
  Provenance provenance{};
  ProbedModel model{};
  ProbePrompts prompts{};
  std::string rule{};
  double horizon_weight = 0;
  ClassThresholds thresholds{};
  std::vector<ProbedLength> lengths{};  // at least one, ascending
  std::vector<ProbedHead> heads{};      // each head of each layer once
  std::optional<std::vector<ProbedSetting>> settings{};
  std::optional<std::string> verdict{};
};

// ---- kind "clrs": written by whet.clrs, decoders on CLRS-Text at sizes they never saw

struct ClrsRun {
  std::string name{};     // of its folder
  std::string variant{};  // what it was trained with
  std::uint64_t seed = 0;
  std::int64_t step = 0;  // done
  std::int64_t parameters = 0;
  nlohmann::ordered_json recipe{};
  std::vector<std::tuple<std::int64_t, double, double>> metrics{};  // step, loss, accuracy of tokens
};

struct ClrsShares {
  double exact = 0;   // of problems
  double tokens = 0;  // of their answers' tokens
};

// A share with its 95 % interval.
struct ShareEstimate {
  double mean = 0;
  double low = 0;
  double high = 0;
};

struct ClrsDifferences {
  Difference exact{};
  Difference tokens{};
};

// Runs that differ in their seed, under one setting.
struct ClrsVariant {
  std::string variant{};
  std::string setting{};  // kAsTrained, or what took its place at test
  std::int64_t runs = 0;
  ShareEstimate exact{};
  ShareEstimate tokens{};
  double forced = 0;                                   // share of tokens that are right after the right ones
  std::vector<double> errors{};                        // share of wrong tokens by place in the answer
  std::optional<std::vector<double>> entropy{};        // of each layer, at beta = 1
  std::optional<std::vector<double>> sharp_entropy{};  // with rule or normalizer
  std::optional<ClrsDifferences> against_softmax{};    // not of softmax as trained
};

inline constexpr std::string_view kAsTrained = "as trained";

struct ClrsSize {
  std::int64_t size = 0;
  std::int64_t problems = 0;
  ClrsShares chance{};  // the answer of another problem
  ClrsShares copy{};    // the question's first list
  std::vector<ClrsVariant> variants{};
};

struct ClrsTask {
  std::string algorithm{};
  bool hints = false;
  std::vector<std::int64_t> trained_sizes{};
  std::vector<ClrsSize> sizes{};  // ascending
};

// Longer lists are refused: no page could show them.
inline constexpr std::size_t kMostClrsRuns = 10'000, kMostClrsTasks = 100, kMostClrsSizes = 10'000,
                             kMostClrsVariants = 1'000, kMostClrsPlaces = 64, kMostClrsLayers = 1'000,
                             kMostClrsMetrics = 1'000'000;
inline constexpr std::int64_t kLargestClrsSize = 1'000'000'000;

struct Clrs {
  static constexpr const char* kKind = "clrs";
  Provenance provenance{};
  std::vector<ClrsRun> runs{};    // at least one
  std::vector<ClrsTask> tasks{};  // at least one, each of another algorithm
};

// ---- what stands in a file

using Results = std::variant<Reproduction, Benchmark, Probe, Clrs>;

std::string kind_of(const Results& results);

nlohmann::ordered_json to_json(const Results& results);

// Error, one line that begins with the field's path ("models[0].sizes[2].items") if it is about one, if this
// isn't from whet, is of another version or kind, or lacks a field. Fields that this version doesn't know are
// ignored.
Results results_from_json(const nlohmann::ordered_json& json);

// ---- what is kept of one head in its run (evaluation.json)

struct HeadResults {
  Model model{};
  std::optional<FitScatter> fit_scatter{};  // this and the next of the first head
  std::optional<HeatMap> heat_map{};
};

nlohmann::ordered_json to_json(const HeadResults& head);
HeadResults head_from_json(const nlohmann::ordered_json& json);  // Error as above

// ---- several reproductions side by side (`whet report --format json`)

struct SizeComparison {
  std::int64_t items = 0;
  ByName<Difference> rules{};
};

struct Comparison {
  std::int64_t run = 0;      // index of the run
  std::int64_t against = 0;  // and of the one it is compared with
  std::int64_t seeds = 0;    // that both have
  std::vector<SizeComparison> sizes{};
};

nlohmann::ordered_json to_json(const std::vector<Comparison>& comparisons);

}  // namespace whet::results

#endif  // WHET_RESULTS_RESULTS_H_
