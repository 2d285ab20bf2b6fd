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

namespace whet {

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

// Skips nothing unless told: which tiles can be skipped depends on the rows that share them, so calls that
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
inline bool expect_same_row(const Result& got, std::size_t r, const Result& expected, std::size_t s) {
  const bool same = same_bits(got.row(r), expected.row(s)) && same_bits(got.stats[r], expected.stats[s]);
  EXPECT_TRUE(same) << "row " << r << ", count " << got.stats[r].count << " and " << expected.stats[s].count
                    << ", beta " << testing::PrintToString(got.stats[r].beta) << " and "
                    << testing::PrintToString(expected.stats[s].beta) << "\n  got      " << list(got.row(r))
                    << "\n  expected " << list(expected.row(s));
  return same;
}

// Up to the first row that differs.
inline void expect_same(const Result& got, const Result& expected) {
  ASSERT_EQ(got.rows(), expected.rows());
  for (std::size_t r = 0; r < got.rows(); ++r) {
    if (!expect_same_row(got, r, expected, r)) return;
  }
}

// ---- Parts of problems ----

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
