// One forward call of a problem of attention and what it gave; whether two calls gave the same bits; parts
// of a problem.
#ifndef WHET_TESTS_ATTENTION_RUNS_H_
#define WHET_TESTS_ATTENTION_RUNS_H_

#include <gtest/gtest.h>
#include <whet/whet.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "cases.h"
#include "core/attention_plan.h"
#include "targets.h"

namespace whet {

inline std::size_t index_of(std::int64_t value) { return static_cast<std::size_t>(value); }

// ---- Calls ----

struct Result {
  std::vector<double> out;  // in row-major order
  std::vector<RowStats> stats;

  std::size_t rows() const { return stats.size(); }
  std::span<const double> row(std::size_t r) const {
    const std::size_t size = out.size() / rows();
    return std::span(out).subspan(r * size, size);
  }
};

// Skips nothing by default: which tiles can be skipped depends on the rows that share them, so calls that
// share them differently have the same bits only without.
inline Result run(const oracle::Attention& p, DType type = DType::f32, double skip_epsilon = 0,
                  const Layouts& layouts = {}) {
  AttentionCall call(p, type, arithmetic_type(type), layouts);
  call.options.skip_epsilon = skip_epsilon;
  call.forward();
  EXPECT_TRUE(call.out.gaps_are_intact());
  return {call.out.values(), call.stats};
}

template <typename Arithmetic>
void expect_contract_in(const oracle::Attention& p, const Result& got, DType type) {
  using Real = typename Contract<Arithmetic>::Real;
  std::vector<double> betas;
  for (const RowStats& row : got.stats) betas.push_back(row.beta);
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, betas);
  expect_output<Arithmetic>(p, exact, got.out, type);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    SCOPED_TRACE("row " + std::to_string(r));
    expect_attention_stats<Arithmetic>(exact.rows[r], p.D, p.rule(h), got.stats[r]);
  });
}

// Output and statistics, as documented.
inline void expect_contract(const oracle::Attention& p, const Result& got, DType type = DType::f32) {
  type == DType::f64 ? expect_contract_in<double>(p, got, type) : expect_contract_in<float>(p, got, type);
}

// ---- Bits ----

inline bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

inline bool same_bits(std::span<const double> a, std::span<const double> b) {
  bool same = a.size() == b.size();
  for (std::size_t n = 0; same && n < a.size(); ++n) same = same_bits(a[n], b[n]);
  return same;
}

inline bool same_bits(const RowStats& a, const RowStats& b) {
  using Fields = std::array<double, sizeof(RowStats) / sizeof(double)>;
  return same_bits(std::bit_cast<Fields>(a), std::bit_cast<Fields>(b));
}

inline std::string list(std::span<const double> values) {
  std::string text;
  for (double value : values) text += testing::PrintToString(value) + " ";
  return text;
}

// Row r of one call and row s of another.
inline testing::AssertionResult same_row(const Result& got, std::size_t r, const Result& expected,
                                         std::size_t s) {
  if (same_bits(got.row(r), expected.row(s)) && same_bits(got.stats[r], expected.stats[s])) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "row " << r << ", count " << got.stats[r].count << " and "
                                     << expected.stats[s].count << ", beta "
                                     << testing::PrintToString(got.stats[r].beta) << " and "
                                     << testing::PrintToString(expected.stats[s].beta) << "\n  got      "
                                     << list(got.row(r)) << "\n  expected " << list(expected.row(s));
}

// Names the first row that differs.
inline testing::AssertionResult same(const Result& got, const Result& expected) {
  if (got.rows() != expected.rows()) {
    return testing::AssertionFailure() << got.rows() << " rows and " << expected.rows();
  }
  for (std::size_t r = 0; r < got.rows(); ++r) {
    if (const testing::AssertionResult row = same_row(got, r, expected, r); !row) return row;
  }
  return testing::AssertionSuccess();
}

// ---- Cases ----

inline constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

inline std::string name_of(DType type) { return "element type " + std::to_string(static_cast<int>(type)); }

// Up to kFewRows rows per key head take one path through the kernels, more another: each case takes both.
inline constexpr std::int64_t kQueries[] = {core::kFewRows / 2 - 1, core::kFewRows + 3};

// Every rule with few queries and with many in f32, and with either in another type; type and path of the
// latter move on with the target.
template <typename Body>
void for_each_case(const Body& body) {
  std::size_t first = 0;
  for_each_target([&] {
    std::size_t turn = first++;
    for (const RuleCase& rule : rule_cases()) {
      const DType other = kTypes[1 + turn % 3];
      const std::int64_t other_queries = kQueries[turn / 3 % 2];
      for (const auto& [type, N] :
           {std::pair{DType::f32, kQueries[0]}, {DType::f32, kQueries[1]}, {other, other_queries}}) {
        SCOPED_TRACE("rule " + rule.rule.name() + ", " + name_of(type) + ", N " + std::to_string(N));
        body(rule.plain, type, N);
      }
      ++turn;
    }
  });
}

inline void expect_all(std::span<const double> values, double expected, const std::string& what) {
  for (double value : values) {
    const bool same = value == expected || (std::isnan(value) && std::isnan(expected));
    EXPECT_TRUE(same) << what << ": " << value << " instead of " << expected;
    if (!same) return;
  }
}

// ---- Parts of problems ----

// The same logit for every key of a row, far from each other where `logits` says so: q = 1, k = logit.
inline oracle::Attention with_logits(Random& random, std::int64_t N, const std::vector<double>& logits,
                                     DType type) {
  const auto M = static_cast<std::int64_t>(logits.size());
  oracle::Attention p = draw_problem(random, {1, 1, 1, N, M, 1, 5}, type);
  p.q.values.assign(p.q.values.size(), 1);
  for (std::size_t j = 0; j < logits.size(); ++j) p.k.values[j] = rounded(type, logits[j]);
  return p;
}

// Lengths of all kinds, none among them.
inline std::vector<std::int64_t> row_lengths(const oracle::Attention& p) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t r = 0; r < p.rows(); ++r) lengths.push_back(r * 101 % (p.M + 1));
  return lengths;
}

// Indices [from, to) along an axis.
inline oracle::Array slice(const oracle::Array& array, std::size_t axis, std::int64_t from, std::int64_t to) {
  oracle::Array part{array.sizes, {}};
  part.sizes[axis] = to - from;
  std::int64_t run_length = 1;
  for (std::size_t a = axis + 1; a < array.sizes.size(); ++a) run_length *= array.sizes[a];
  for (std::size_t n = 0; n < array.values.size(); ++n) {
    const std::int64_t index = static_cast<std::int64_t>(n) / run_length % array.sizes[axis];
    if (index >= from && index < to) part.values.push_back(array.values[n]);
  }
  return part;
}

// The same of a side array: not given stays so, and an axis of size 1 goes for every index.
inline oracle::Array side_slice(const oracle::Array& array, std::size_t axis, std::int64_t from,
                                std::int64_t to) {
  return array.given() && array.sizes[axis] != 1 ? slice(array, axis, from, to) : array;
}

inline oracle::Attention with_batches(oracle::Attention p, std::int64_t from, std::int64_t to) {
  p.B = to - from;
  for (oracle::Array* array : {&p.q, &p.k, &p.v, &p.dout}) *array = slice(*array, 0, from, to);
  for (oracle::Array* array : {&p.query_scale, &p.bias, &p.mask}) *array = side_slice(*array, 0, from, to);
  return p;
}

inline oracle::Attention with_queries(oracle::Attention p, std::int64_t from, std::int64_t to) {
  p.N = to - from;
  for (oracle::Array* array : {&p.q, &p.dout}) *array = slice(*array, 2, from, to);
  for (oracle::Array* array : {&p.query_scale, &p.bias, &p.mask}) *array = side_slice(*array, 2, from, to);
  return p;
}

inline oracle::Attention with_keys(oracle::Attention p, std::int64_t from, std::int64_t to) {
  p.M = to - from;
  for (oracle::Array* array : {&p.k, &p.v}) *array = slice(*array, 2, from, to);
  for (oracle::Array* array : {&p.bias, &p.mask}) *array = side_slice(*array, 3, from, to);
  return p;
}

}  // namespace whet

#endif  // WHET_TESTS_ATTENTION_RUNS_H_
