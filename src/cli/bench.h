// What the benchmarks of `whet bench` share. Each is a file of its own, bench_*.cc: it verifies, then times
// its contenders in turns, and shows what limits them in the same run.
#ifndef WHET_CLI_BENCH_H_
#define WHET_CLI_BENCH_H_

#include <whet/row.h>

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

namespace whet::cli {

struct BenchOptions {
  bool json = false;
  bool quick = false;  // the first shape only
  int threads = 1;
  std::string run;   // train: the weights to start from; empty: initial ones
  std::string keep;  // train: a file for the first steps; empty: none
};

void bench_rows(const BenchOptions& options);
void bench_attention(const BenchOptions& options);
void bench_train(const BenchOptions& options);

// One thing to time. `what` is unique within a shape.
struct Contender {
  std::string what;
  std::function<void()> run;
  std::vector<double> ns{};  // of one run, one per round

  double quantile(double q) const;
  double median() const { return quantile(0.5); }
  double half_spread() const { return (quantile(0.75) - quantile(0.25)) / 2; }
};

inline constexpr int kBenchRounds = 9;

// Every contender once per round, so that a slow moment of the machine hits all of them alike.
void time_all(std::vector<Contender>& contenders);

double mean_beta(std::span<const RowStats> stats);

// What every report begins with.
nlohmann::ordered_json bench_report(const char* benchmark, const BenchOptions& options);
void print_bench_title(const BenchOptions& options);  // "whet 0.1.0, AVX2, 1 thread, float32. "

// Median and quartiles of the times, each divided by `elements`.
nlohmann::ordered_json quartiles(const Contender& contender, double elements = 1);

}  // namespace whet::cli

#endif  // WHET_CLI_BENCH_H_
