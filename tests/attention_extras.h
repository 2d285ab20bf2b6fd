// A call of attention that asks for all optional outputs, and what the weights among them must be.
#ifndef WHET_TESTS_ATTENTION_EXTRAS_H_
#define WHET_TESTS_ATTENTION_EXTRAS_H_

#include <gtest/gtest.h>
#include <whet/whet.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "attention_runs.h"

namespace whet {

inline std::vector<RowIndex> every_row(const oracle::Attention& p) {
  std::vector<RowIndex> rows;
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) { rows.push_back({b, h, i}); });
  return rows;
}

// A call that asks for everything, with the weights of every row. Filled with what must not stay.
struct Asking : AttentionCall {
  Asking(const oracle::Attention& p, DType type, std::int64_t top)
      : Asking(p, type, top, arithmetic_type(type), {}) {}
  Asking(const oracle::Attention& p, DType type, std::int64_t top, DType side, const Layouts& layouts)
      : AttentionCall(p, type, side, layouts),
        rows(every_row(p)),
        weights(type, {p.rows(), p.M}),
        top_keys(index_of(p.rows() * top), -7),
        top_weights(top_keys.size(), -7),
        column_sums(index_of(p.B * p.H * p.M), -7) {
    outputs.weight_rows = rows;
    outputs.weights = weights.view();
    outputs.top_k = top;
    outputs.top_keys = top_keys;
    outputs.top_weights = top_weights;
    outputs.column_sums = column_sums;
    outputs.tile_counts = &counts;
  }

  std::vector<RowIndex> rows;
  Placed weights;
  std::vector<std::int64_t> top_keys;
  std::vector<float> top_weights;
  std::vector<double> column_sums;
  TileCounts counts{-7, -7};
};

// As for the largest weight in attention_contract.h: what contract.h allows when logits are given, and what
// the rounding of the logits moves a weight by. A weight in a tile that was skipped is 0.
template <typename Arithmetic, typename Real>
void expect_weights_of_rows(const oracle::Attention& p, const oracle::Forward<Real>& exact, DType type,
                            const Asking& call) {
  const std::vector<double> got = call.weights.values();
  for (std::size_t r = 0; r < exact.rows.size(); ++r) {
    const oracle::AttentionRow<Real>& row = exact.rows[r];
    const std::vector<Real> w = oracle::weights(row.logits, exact.betas[r]);
    const Real max = oracle::state<Real>(row.logits).max;
    if (row.count() > 0 && oracle::is_broken(oracle::state<Real>(row.logits))) continue;
    const Real moved = 4 * exact.betas[r] * logit_error<Arithmetic>(row, p.D);
    if (moved > 0.1) continue;  // beyond first order
    std::vector<bool> visible(index_of(p.M), false);
    for (std::size_t n = 0; n < row.count(); ++n) {
      const std::size_t at = r * index_of(p.M) + index_of(row.keys[n]);
      visible[index_of(row.keys[n])] = true;
      const Real y = exact.betas[r] * (max - row.logits.x[n]);
      Real bound = w[n] * (Contract<Arithmetic>::weight * (1 + y) + moved) + Contract<Arithmetic>::tiny;
      bound += call.options.skip_epsilon + storage_error(type, w[n] + bound);
      const std::string what = "row " + std::to_string(r) + ", weight of key " + std::to_string(row.keys[n]);
      if (!expect_within<Real>(got[at], w[n], bound, what)) return;
    }
    for (std::size_t j = 0; j < index_of(p.M); ++j) {
      if (visible[j]) continue;
      ASSERT_EQ(got[r * index_of(p.M) + j], 0) << "row " << r << ", hidden key " << j;
    }
  }
}

}  // namespace whet

#endif  // WHET_TESTS_ATTENTION_EXTRAS_H_
