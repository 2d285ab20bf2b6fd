// whet bench attention: attention beside what its arithmetic, or for one query the memory, allows.
#include <whet/whet.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/bench_limits.h"

namespace whet::cli {
namespace {

struct Shape {
  std::int64_t heads, key_heads, queries, keys, size;
  bool causal;

  std::int64_t visible(std::int64_t query) const { return causal ? std::min(query + 1, keys) : keys; }
  // Pairs of a query and a key it sees, over all heads.
  double pairs() const {
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < queries; ++i) sum += visible(i);
    return static_cast<double>(heads * sum);
  }
  double operations() const { return 4 * pairs() * static_cast<double>(size); }
  std::string text() const;
};

constexpr Shape kShapes[] = {{8, 8, 512, 512, 64, false},    {8, 8, 2048, 2048, 64, false},
                             {8, 8, 1024, 1024, 128, false}, {8, 8, 2048, 2048, 64, true},
                             {8, 8, 4096, 4096, 64, true},   {9, 3, 2048, 2048, 64, true}};
constexpr Shape kDecodeShapes[] = {{9, 3, 1, 8192, 64, false}, {9, 3, 1, 131072, 64, false}};
constexpr double kTarget = 0.2;  // nats
constexpr const char* kLimit = "limit";

std::string Shape::text() const {
  const std::string groups = heads == key_heads ? "" : "/" + std::to_string(key_heads);
  const std::string query = queries == 1 ? "1 x " : "";
  return std::to_string(heads) + groups + " x " + query + std::to_string(keys) + ", d " +
         std::to_string(size) + (causal ? ", causal" : "");
}

struct Problem {
  explicit Problem(const Shape& given);
  AttentionOptions options(const Rule& rule) const { return {.rule = rule, .causal = shape.causal}; }
  Dims query_sizes() const { return {1, shape.heads, shape.queries, shape.size}; }
  Dims key_sizes() const { return {1, shape.key_heads, shape.keys, shape.size}; }
  void run(const Rule& rule, const AttentionOutputs& outputs, int threads) {
    attention({q.data(), query_sizes()}, {k.data(), key_sizes()}, {v.data(), key_sizes()},
              {out.data(), query_sizes()}, options(rule), outputs, {.threads = threads});
  }

  Shape shape;
  std::vector<float> q, k, v, out;
  std::vector<RowStats> stats;  // of the rule verified last
};

// Gaussian keys and values, and queries as long as puts the entropy of a row near 3 nats, where the paper's
// rule acts: over Gaussian keys, logits are Gaussian of the width |q| / sqrt(D).
Problem::Problem(const Shape& given) : shape(given) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& x, std::int64_t count) {
    x.resize(static_cast<std::size_t>(count));
    for (float& value : x) value = normal(generator);
  };
  fill(q, shape.heads * shape.queries * shape.size);
  fill(k, shape.key_heads * shape.keys * shape.size);
  fill(v, shape.key_heads * shape.keys * shape.size);
  out.resize(q.size());
  stats.resize(static_cast<std::size_t>(shape.heads * shape.queries));
  const auto size = static_cast<std::size_t>(shape.size);
  for (std::size_t row = 0; row < stats.size(); ++row) {
    const std::span<float> query = std::span(q).subspan(row * size, size);
    const auto seen = static_cast<double>(shape.visible(static_cast<std::int64_t>(row) % shape.queries));
    const double width = std::sqrt(2 * std::max(std::log(seen) - 2.5, 0.1));
    double square = 0;
    for (const float x : query) square += x * x;
    for (float& x : query) x *= static_cast<float>(width * std::sqrt(static_cast<double>(size) / square));
  }
}

// One row in float64, at a beta that is given.
struct PlainRow {
  std::vector<double> out;
  double largest_logit = 0;
  double largest_value = 0;
};

PlainRow plain_row(const Problem& problem, std::int64_t head, std::int64_t query, double beta) {
  const Shape& s = problem.shape;
  const std::int64_t keys = s.visible(query), key_head = head / (s.heads / s.key_heads);
  const float* q = problem.q.data() + (head * s.queries + query) * s.size;
  const float* k = problem.k.data() + key_head * s.keys * s.size;
  const float* v = problem.v.data() + key_head * s.keys * s.size;
  std::vector<double> x(static_cast<std::size_t>(keys));
  for (double& logit : x) {
    for (std::int64_t c = 0; c < s.size; ++c) logit += static_cast<double>(q[c]) * *k++;
    logit /= std::sqrt(static_cast<double>(s.size));
  }
  const double max = *std::ranges::max_element(x);
  PlainRow row{std::vector<double>(static_cast<std::size_t>(s.size))};
  double sum = 0;
  for (const double logit : x) {
    const double weight = std::exp(beta * (logit - max));
    sum += weight;
    row.largest_logit = std::max(row.largest_logit, std::abs(logit));
    for (double& o : row.out) {
      row.largest_value = std::max(row.largest_value, static_cast<double>(std::abs(*v)));
      o += weight * *v++;
    }
  }
  for (double& o : row.out) o /= sum;
  return row;
}

// The first, middle and last query of the first and the last head, at the beta the stats report. Rounding
// moves a logit x by a few 2^-24 |x|, and a weight by beta times that.
void verify(Problem& problem, const Rule& rule) {
  const Shape& s = problem.shape;
  problem.run(rule, {.stats = problem.stats}, 0);
  for (const std::int64_t head : {std::int64_t{0}, s.heads - 1}) {
    for (const std::int64_t query : {std::int64_t{0}, s.queries / 2, s.queries - 1}) {
      const std::int64_t row = head * s.queries + query;
      const double beta = problem.stats[static_cast<std::size_t>(row)].beta;
      const PlainRow plain = plain_row(problem, head, query, beta);
      const double allowed = 0x1p-24 * (8 + 16 * beta * plain.largest_logit) * plain.largest_value;
      for (std::int64_t c = 0; c < s.size; ++c) {
        const double got = problem.out[static_cast<std::size_t>(row * s.size + c)];
        if (!(std::abs(got - plain.out[static_cast<std::size_t>(c)]) <= allowed)) {
          throw std::runtime_error("wrong output under " + rule.name() + ", " + s.text() +
                                   ": nothing was timed. Please report this");
        }
      }
    }
  }
}

// Verifies none and a target as well; leaves the stats of the paper's rule.
void verify_all(Problem& problem) {
  for (const Rule& rule : {Rule::none(), Rule::target_entropy(kTarget), Rule::paper()}) {
    verify(problem, rule);
  }
}

// A contender and what it works on: how much that is in a run, in operations or bytes.
struct Worker {
  Contender contender;
  double work;

  double rate() const { return work / contender.median(); }  // 1e9 per second
};

std::vector<Worker> timed(std::vector<Worker> workers) {
  std::vector<Contender> contenders;
  contenders.reserve(workers.size());
  for (Worker& w : workers) contenders.push_back(std::move(w.contender));
  time_all(contenders);
  for (std::size_t i = 0; i < workers.size(); ++i) workers[i].contender = std::move(contenders[i]);
  return workers;
}

Worker rule_worker(Problem& problem, const Rule& rule, int threads, double work) {
  return {{rule.name(), [&problem, rule, threads] { problem.run(rule, {}, threads); }}, work};
}

std::vector<Worker> time_shape(Problem& problem, int threads) {
  std::vector<Worker> workers;
  // The first run, which isn't timed, says how much a run is.
  if (const double operations = run_multiply_adds(threads); operations > 0) {
    workers.push_back({{kLimit, [threads] { run_multiply_adds(threads); }}, operations});
  }
  for (const Rule& rule : {Rule::none(), Rule::paper(), Rule::target_entropy(kTarget)}) {
    workers.push_back(rule_worker(problem, rule, threads, problem.shape.operations()));
  }
  return timed(std::move(workers));
}

// Rounded to nearest, ties to even.
std::vector<bf16> to_bf16(const std::vector<float>& x) {
  std::vector<bf16> rounded;
  for (const float value : x) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    rounded.push_back({static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)});
  }
  return rounded;
}

std::vector<Worker> time_decode(Problem& problem, int threads) {
  const auto k_bytes = std::as_bytes(std::span(problem.k)), v_bytes = std::as_bytes(std::span(problem.v));
  const auto bytes = static_cast<double>(k_bytes.size() + v_bytes.size());
  std::vector<Worker> workers;
  const auto read = [=] { return read_memory(k_bytes, v_bytes, threads); };
  workers.push_back({{kLimit, [read] { read(); }}, read()});
  for (const Rule& rule : {Rule::none(), Rule::paper()}) {
    workers.push_back(rule_worker(problem, rule, threads, bytes));
  }
  const std::vector<bf16> q = to_bf16(problem.q), k = to_bf16(problem.k), v = to_bf16(problem.v);
  std::vector<bf16> out(q.size());
  const auto half = [&, options = problem.options(Rule::paper())] {
    attention({q.data(), problem.query_sizes()}, {k.data(), problem.key_sizes()},
              {v.data(), problem.key_sizes()}, {out.data(), problem.query_sizes()}, options, {},
              {.threads = threads});
  };
  workers.push_back({{"paper, bf16", half}, bytes / 2});
  return timed(std::move(workers));
}

const Worker* limit_of(const std::vector<Worker>& workers) {
  return workers.front().contender.what == kLimit ? &workers.front() : nullptr;
}

// Times are divided by `elements`.
void print_rows(const Problem& problem, const std::vector<Worker>& workers, double elements) {
  const Worker* limit = limit_of(workers);
  for (const Worker& w : workers) {
    const Contender& c = w.contender;
    std::printf("%-24s%9.2f  %-20s", problem.shape.text().c_str(), mean_beta(problem.stats), c.what.c_str());
    if (&w == limit) {
      std::printf("%20s", "");
    } else {
      std::printf("%12.3f ±%6.3f", c.median() / elements, c.half_spread() / elements);
    }
    std::printf("%10.1f", w.rate());
    if (limit != nullptr) std::printf("%8.0f %%", 100 * w.rate() / limit->rate());
    std::printf("\n");
  }
  std::fflush(stdout);
}

void print_header(const char* time, const char* rate) {
  std::printf("%-24s%9s  %-20s%20s%10s%10s\n", "heads x length", "mean beta", "rule", time, rate, "of limit");
}

nlohmann::ordered_json to_json(const Problem& problem, const std::vector<Worker>& workers,
                               const char* rate_name) {
  const Shape& s = problem.shape;
  nlohmann::ordered_json result = {{"heads", s.heads},
                                   {"key_heads", s.key_heads},
                                   {"queries", s.queries},
                                   {"keys", s.keys},
                                   {"size", s.size},
                                   {"causal", s.causal},
                                   {"mean_beta", mean_beta(problem.stats)}};
  const Worker* limit = limit_of(workers);
  for (const Worker& w : workers) {
    if (&w == limit) {
      result["limit"] = {{rate_name, w.rate()}};
    } else {
      result["ns"][w.contender.what] = quartiles(w.contender);
      result[rate_name][w.contender.what] = w.rate();
    }
  }
  return result;
}

std::span<const Shape> chosen(std::span<const Shape> shapes, const BenchOptions& options) {
  return options.quick ? shapes.first(1) : shapes;
}

}  // namespace

void bench_attention(const BenchOptions& options) {
  nlohmann::ordered_json report = bench_report("attention", options);
  if (!options.json) {
    print_bench_title(options);
    std::printf(
        "Median of %d interleaved rounds ± half the distance\n"
        "of the quartiles; a logit is a query and a key it sees. limit = fused multiply-adds alone.\n\n",
        kBenchRounds);
    print_header("ns/logit", "GFLOP/s");
  }
  for (const Shape& shape : chosen(kShapes, options)) {
    Problem problem(shape);
    verify_all(problem);
    const std::vector<Worker> workers = time_shape(problem, options.threads);
    if (options.json) {
      report["shapes"].push_back(to_json(problem, workers, "gflops"));
    } else {
      print_rows(problem, workers, shape.pairs());
    }
  }
  if (!options.json) {
    std::printf("\nOne query. limit = reading keys and values alone.\n\n");
    print_header("us", "GB/s");
  }
  for (const Shape& shape : chosen(kDecodeShapes, options)) {
    Problem problem(shape);
    verify_all(problem);
    const std::vector<Worker> workers = time_decode(problem, options.threads);
    if (options.json) {
      report["decode"].push_back(to_json(problem, workers, "gigabytes_per_second"));
    } else {
      print_rows(problem, workers, 1e3);
    }
  }
  if (options.json) std::cout << report.dump(2) << "\n";
}

}  // namespace whet::cli
