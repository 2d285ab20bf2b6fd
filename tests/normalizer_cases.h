// Attention with normalizers other than softmax: what the oracle says of output and gradients, and how close
// a call must come.
#ifndef WHET_TESTS_NORMALIZER_CASES_H_
#define WHET_TESTS_NORMALIZER_CASES_H_

#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_oracle.h"
#include "normalizer_oracle.h"

namespace whet {

struct Expected {
  std::vector<double> out;
  oracle::Gradients<double> gradients;
};

// The sink counts as a key, but with sigmoid and relu, whose weights it doesn't change.
inline oracle::Logits logits_for(const std::string& name, const oracle::AttentionRow<double>& row,
                                 double beta) {
  oracle::Logits s(row.logits.x.begin(), row.logits.x.end());
  for (oracle::Long& v : s) v *= static_cast<oracle::Long>(beta);
  if ((name == "sigmoid" || name == "relu") && row.logits.sink_last) {
    s.back() = -std::numeric_limits<oracle::Long>::infinity();
  }
  return s;
}

// dL/dx of a row from dL/ds, s = beta x: beta times it, and what goes through the rule.
inline std::vector<double> through_beta(const oracle::AttentionRow<double>& row, const oracle::Rule& rule,
                                        double beta, const oracle::Logits& ds, bool through_rule) {
  std::vector<double> dx;
  for (const oracle::Long v : ds) dx.push_back(beta * static_cast<double>(v));
  if (!through_rule) return dx;
  const oracle::Long max = oracle::state<double>(row.logits).max;
  oracle::Long slope = 0;
  for (std::size_t n = 0; n < dx.size(); ++n) {
    if (ds[n] != 0) slope += ds[n] * (static_cast<oracle::Long>(row.logits.x[n]) - max);
  }
  const std::vector<double> dbeta = oracle::beta_gradient(row.logits, rule, beta);
  for (std::size_t n = 0; n < dx.size(); ++n) dx[n] += static_cast<double>(slope) * dbeta[n];
  return dx;
}

// At these betas, one per row; empty: at what the rules choose.
inline Expected expect(const std::string& name, const oracle::Attention& p,
                       std::span<const double> betas = {}, bool through_rule = false) {
  Expected e{.out = std::vector<double>(p.dout.values.size()), .gradients = oracle::Gradients<double>(p)};
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const oracle::AttentionRow<double> row = oracle::row_of<double>(p, b, h, i);
    if (row.count() == 0) return;
    const double chosen = betas.empty() ? oracle::beta<double>(row.logits, p.rule(h)) : betas[p.row(b, h, i)];
    const double beta = name == "hard" ? 1 : chosen;
    const oracle::Logits s = logits_for(name, row, beta), w = oracle::weights_of(name, s);
    const std::vector<double> g = oracle::weight_gradients(p, b, h, i, row);
    const oracle::Logits ds = oracle::gradient_of(name, s, w, oracle::Logits(g.begin(), g.end()));
    const std::vector<double> weights(w.begin(), w.end());
    oracle::add_row(p, b, h, i, row, weights, through_beta(row, p.rule(h), beta, ds, through_rule),
                    e.gradients);
    const std::size_t at = p.dout.position({b, h, i, 0});
    for (std::size_t n = 0; n < row.count(); ++n) {
      const std::size_t value = p.v.position({b, p.key_head(h), row.keys[n], 0});
      for (std::size_t d = 0; d < index_of(p.E); ++d) e.out[at + d] += weights[n] * p.v.values[value + d];
    }
  });
  return e;
}

// Relative to the largest element.
inline double tolerance(DType type) { return type == DType::f64 ? 1e-11 : type == DType::f32 ? 3e-5 : 8e-3; }

inline void expect_near(const std::vector<double>& got, const std::vector<double>& expected, DType type,
                        const char* what, double times = 1) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double largest = 1;
  for (const double v : expected) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], times * tolerance(type) * largest) << what << " " << i;
  }
}

}  // namespace whet

#endif  // WHET_TESTS_NORMALIZER_CASES_H_
