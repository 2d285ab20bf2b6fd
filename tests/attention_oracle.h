// The oracle of attention: forward, statistics and gradients of whet/attention.h in plain scalar code on
// top of the row functions of oracle.h, and the plain f32 evaluation that kernels are measured against.
//
// Shares nothing with the kernels. Whether a key is visible is asked for every pair of a query and a key
// from the definitions; a row is the vector of its visible logits; the whole (B, H, N, M) is spelled out.
// Rows are evaluated at a beta that is given, normally the one the kernel reported: accuracy is promised
// there, and beta itself is checked on its own.
//
// Random problems and calls of the library: attention_cases.h. What may differ: attention_contract.h.
#ifndef WHET_TESTS_ATTENTION_ORACLE_H_
#define WHET_TESTS_ATTENTION_ORACLE_H_

#include <whet/attention.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "oracle.h"

namespace whet::oracle {

// A tensor in row-major order. As a side array it is repeated along axes of size 1, and without sizes it
// isn't given.
struct Array {
  std::vector<std::int64_t> sizes = {};
  std::vector<double> values = {};

  bool given() const { return !sizes.empty(); }
  std::size_t position(std::initializer_list<std::int64_t> index) const {
    std::int64_t at = 0;
    std::size_t axis = 0;
    for (std::int64_t i : index) {
      at = at * sizes[axis] + (sizes[axis] == 1 ? 0 : i);
      ++axis;
    }
    return static_cast<std::size_t>(at);
  }
  double at(std::initializer_list<std::int64_t> index) const { return values[position(index)]; }
};

// What whet::attention is given. Values are what the storage type holds.
struct Attention {
  std::int64_t B = 1, H = 1, K = 1, N = 1, M = 1, D = 1, E = 1;
  Array q;     // (B, H, N, D)
  Array k;     // (B, K, M, D)
  Array v;     // (B, K, M, E)
  Array dout;  // (B, H, N, E), for gradients

  std::vector<Rule> rules = {Rule{}};  // one, or one per head
  std::optional<double> scale = {};    // default 1 / sqrt(D)
  Array query_scale;                   // (B, H, N)
  double softcap = 0;
  Array bias;   // (B, H, N, M)
  Array mask;   // the same, 0 = hidden
  Array sinks;  // (H)
  bool causal = false;
  Align align = Align::start;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::vector<std::int64_t> lengths = {};       // B of them, or one per row
  std::vector<std::int64_t> query_starts = {};  // packed sequences
  std::vector<std::int64_t> key_starts = {};

  std::int64_t rows() const { return B * H * N; }
  std::size_t row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return static_cast<std::size_t>((b * H + h) * N + i);
  }
  std::int64_t key_head(std::int64_t h) const { return h / (H / K); }
  const Rule& rule(std::int64_t h) const {
    return rules[rules.size() == 1 ? 0 : static_cast<std::size_t>(h)];
  }
};

template <typename Body>
void for_each_row(const Attention& p, const Body& body) {
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t h = 0; h < p.H; ++h) {
      for (std::int64_t i = 0; i < p.N; ++i) body(b, h, i);
    }
  }
}

// ---- Visibility ----

// The queries and keys that query i of batch entry b shares a sequence with.
struct Sequence {
  std::int64_t first_query, queries, first_key, keys;
};

inline Sequence sequence_of(const Attention& p, std::int64_t b, std::int64_t i) {
  for (std::size_t s = 0; s + 1 < p.query_starts.size(); ++s) {
    if (i < p.query_starts[s] || i >= p.query_starts[s + 1]) continue;
    return {p.query_starts[s], p.query_starts[s + 1] - p.query_starts[s], p.key_starts[s],
            p.key_starts[s + 1] - p.key_starts[s]};
  }
  const bool length_of_batch = static_cast<std::int64_t>(p.lengths.size()) == p.B;
  return {0, p.N, 0, length_of_batch ? p.lengths[static_cast<std::size_t>(b)] : p.M};
}

inline std::int64_t length_of(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  if (p.lengths.empty()) return p.M;
  const bool of_batch = static_cast<std::int64_t>(p.lengths.size()) == p.B;
  return p.lengths[of_batch ? static_cast<std::size_t>(b) : p.row(b, h, i)];
}

// Hidden whatever its logit. A bias of -inf hides even where q or k hold NaN.
inline bool hidden(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  if (p.mask.given() && p.mask.at({b, h, i, j}) == 0) return true;
  if (p.bias.given() && p.bias.at({b, h, i, j}) == -std::numeric_limits<double>::infinity()) return true;
  if (j >= length_of(p, b, h, i)) return true;
  const Sequence own = sequence_of(p, b, i);
  if (j < own.first_key || j >= own.first_key + own.keys) return true;
  const std::int64_t from_start = own.first_key + i - own.first_query;
  const std::int64_t position = p.align == Align::start ? from_start : from_start + own.keys - own.queries;
  if (p.causal && j > position) return true;
  if (p.window_left >= 0 && position - j > p.window_left) return true;
  if (p.window_right >= 0 && j - position > p.window_right) return true;
  return false;
}

// ---- Rows ----

// One row. `logits` are those of `keys`, and last that of the sink if there is one.
template <typename Real>
struct AttentionRow {
  std::vector<std::int64_t> keys = {};
  BasicRow<Real> logits = {};
  std::vector<Real> cap_slopes = {};  // d logit / d (scale <q, k>)
  std::vector<Real> magnitudes = {};  // scale sum |q_d k_d|: what the rounding of a logit grows with

  std::size_t count() const { return keys.size(); }
};

// What every row is scaled with, before its query_scale.
template <typename Real>
Real plain_scale(const Attention& p) {
  return p.scale ? static_cast<Real>(*p.scale) : 1 / std::sqrt(static_cast<Real>(p.D));
}

template <typename Real>
Real scale_of(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Real scale = plain_scale<Real>(p);
  return p.query_scale.given() ? scale * static_cast<Real>(p.query_scale.at({b, h, i})) : scale;
}

template <typename Real>
AttentionRow<Real> row_of(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  AttentionRow<Real> row;
  std::vector<Real> x;
  const Real scale = scale_of<Real>(p, b, h, i);
  const std::size_t query = p.q.position({b, h, i, 0});
  const std::size_t size = static_cast<std::size_t>(p.D);
  for (std::int64_t j = 0; j < p.M; ++j) {
    if (hidden(p, b, h, i, j)) continue;
    const std::size_t key = p.k.position({b, p.key_head(h), j, 0});
    Sum<Real> dot;
    Real magnitude = 0;
    for (std::size_t d = 0; d < size; ++d) {
      const Real product = Real{p.q.values[query + d]} * Real{p.k.values[key + d]};
      dot.add(product);
      magnitude += std::abs(scale * product);
    }
    Real s = scale * dot.value();
    Real cap_slope = 1;
    if (p.softcap > 0) {
      const Real ratio = std::tanh(s / Real{p.softcap});
      s = Real{p.softcap} * ratio;
      cap_slope = 1 - ratio * ratio;
    }
    if (p.bias.given()) s += Real{p.bias.at({b, h, i, j})};
    if (s == -std::numeric_limits<Real>::infinity()) continue;
    row.keys.push_back(j);
    x.push_back(s);
    row.cap_slopes.push_back(cap_slope);
    row.magnitudes.push_back(magnitude);
  }
  const bool sink =
      p.sinks.given() && !x.empty() && p.sinks.at({h}) != -std::numeric_limits<double>::infinity();
  if (sink) x.push_back(Real{p.sinks.at({h})});
  row.logits = BasicRow<Real>(std::move(x));
  row.logits.sink_last = sink;
  return row;
}

// The largest weight among the keys; `s` is the state at beta.
template <typename Real>
Real key_peak(const AttentionRow<Real>& row, const State<Real>& s, Real beta) {
  Real key_max = row.logits.x[0];
  for (std::size_t n = 0; n < row.count(); ++n) key_max = std::max(key_max, row.logits.x[n]);
  return std::exp(beta * (key_max - s.max)) / s.z;
}

// whet::RowStats in Real.
template <typename Real>
struct Stats {
  Real count = 0;
  Real max = -std::numeric_limits<Real>::infinity();
  Real log_sum_exp = -std::numeric_limits<Real>::infinity();
  Real entropy = 0;
  Real varentropy = 0;
  Real spread = 0;
  Real peak = 0;
  Real beta = 1;
  Real sharp_entropy = 0;
  Real sharp_peak = 0;
};

template <typename Real>
Stats<Real> stats_of(const AttentionRow<Real>& row, Real beta) {
  if (row.count() == 0) return {};
  const State<Real> s = state<Real>(row.logits);
  const State<Real> sharp = state<Real>(row.logits, beta);
  return {static_cast<Real>(s.count),
          s.max,
          s.max + std::log(s.z),
          std::log(s.z) - s.t / s.z,
          moments<Real>(row.logits).variance,
          s.max - s.min,
          key_peak(row, s, Real{1}),
          beta,
          std::log(sharp.z) - beta * sharp.t / sharp.z,
          key_peak(row, sharp, beta)};
}

// ---- Forward ----

template <typename Real>
struct Forward {
  std::vector<AttentionRow<Real>> rows = {};  // (B, H, N)
  std::vector<Real> betas = {};               // those given, or what the rules choose
  std::vector<Real> out = {};                 // (B, H, N, E)

  // (M) weights of row r, 0 for hidden keys.
  std::vector<Real> weights(std::size_t r, std::int64_t keys) const {
    std::vector<Real> all(static_cast<std::size_t>(keys), Real{0});
    const std::vector<Real> w = oracle::weights(rows[r].logits, betas[r]);
    for (std::size_t n = 0; n < rows[r].count(); ++n) all[static_cast<std::size_t>(rows[r].keys[n])] = w[n];
    return all;
  }
  Stats<Real> stats(std::size_t r) const { return stats_of(rows[r], betas[r]); }
};

// At these betas, one per row; empty: at what the rules choose.
template <typename Real>
Forward<Real> forward(const Attention& p, std::span<const double> betas = {}) {
  Forward<Real> f;
  for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    f.rows.push_back(row_of<Real>(p, b, h, i));
    const AttentionRow<Real>& row = f.rows.back();
    const Real beta = betas.empty() ? oracle::beta<Real>(row.logits, p.rule(h)) : betas[p.row(b, h, i)];
    f.betas.push_back(beta);
    const std::vector<Real> w = oracle::weights(row.logits, beta);
    std::vector<Sum<Real>> out(static_cast<std::size_t>(p.E));
    for (std::size_t n = 0; n < row.count(); ++n) {
      const std::size_t value = p.v.position({b, p.key_head(h), row.keys[n], 0});
      for (std::size_t e = 0; e < out.size(); ++e) out[e].add(w[n] * Real{p.v.values[value + e]});
    }
    for (const Sum<Real>& sum : out) f.out.push_back(sum.value());
  });
  return f;
}

// ---- Backward ----

template <typename Real>
struct Gradients {
  std::vector<Real> dq, dk, dv;
  std::vector<Real> dbias;         // (B, H, N, M), not summed over anything
  std::vector<Real> dsinks;        // (H)
  std::vector<Real> dquery_scale;  // (B, H, N), not summed over anything

  explicit Gradients(const Attention& p)
      : dq(p.q.values.size()),
        dk(p.k.values.size()),
        dv(p.v.values.size()),
        dbias(static_cast<std::size_t>(p.rows() * p.M)),
        dsinks(static_cast<std::size_t>(p.H)),
        dquery_scale(static_cast<std::size_t>(p.rows())) {}
};

// From the gradient dx of a row's logits and its weights w to those of everything the row was made of.
template <typename Real>
void add_row(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i,
             const AttentionRow<Real>& row, const std::vector<Real>& w, const std::vector<Real>& dx,
             Gradients<Real>& g) {
  const std::int64_t kh = p.key_head(h);
  const Real scale = scale_of<Real>(p, b, h, i);
  const std::size_t at_q = p.q.position({b, h, i, 0});
  const std::size_t at_out = p.dout.position({b, h, i, 0});
  for (std::size_t n = 0; n < row.count(); ++n) {
    const std::int64_t j = row.keys[n];
    g.dbias[p.row(b, h, i) * static_cast<std::size_t>(p.M) + static_cast<std::size_t>(j)] = dx[n];
    const Real ds = dx[n] * row.cap_slopes[n] * scale;
    const std::size_t at_k = p.k.position({b, kh, j, 0});
    Real dot = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(p.D); ++d) {
      dot += static_cast<Real>(p.q.values[at_q + d]) * static_cast<Real>(p.k.values[at_k + d]);
      g.dq[at_q + d] += ds * static_cast<Real>(p.k.values[at_k + d]);
      g.dk[at_k + d] += ds * static_cast<Real>(p.q.values[at_q + d]);
    }
    g.dquery_scale[p.row(b, h, i)] += dx[n] * row.cap_slopes[n] * plain_scale<Real>(p) * dot;
    const std::size_t at_v = p.v.position({b, kh, j, 0});
    for (std::size_t e = 0; e < static_cast<std::size_t>(p.E); ++e) {
      g.dv[at_v + e] += w[n] * static_cast<Real>(p.dout.values[at_out + e]);
    }
  }
  if (row.logits.sink_last) g.dsinks[static_cast<std::size_t>(h)] += dx.back();
}

// dL/dw of every entry of the row: <dout, v_j>, and 0 for the sink.
template <typename Real>
std::vector<Real> weight_gradients(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i,
                                   const AttentionRow<Real>& row) {
  std::vector<Real> g(row.logits.size(), Real{0});
  const std::size_t at_out = p.dout.position({b, h, i, 0});
  for (std::size_t n = 0; n < row.count(); ++n) {
    const std::size_t at_v = p.v.position({b, p.key_head(h), row.keys[n], 0});
    for (std::size_t e = 0; e < static_cast<std::size_t>(p.E); ++e) {
      g[n] += static_cast<Real>(p.dout.values[at_out + e]) * static_cast<Real>(p.v.values[at_v + e]);
    }
  }
  return g;
}

template <typename Real>
Gradients<Real> backward(const Attention& p, const Forward<Real>& f, bool through_rule) {
  Gradients<Real> g(p);
  for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const AttentionRow<Real>& row = f.rows[p.row(b, h, i)];
    const Real beta = f.betas[p.row(b, h, i)];
    const std::vector<Real> dx =
        gradient(row.logits, weight_gradients(p, b, h, i, row), p.rule(h), through_rule, beta);
    add_row(p, b, h, i, row, weights(row.logits, beta), dx, g);
  });
  return g;
}

// (B, H, N) summed over the axes where `sizes` is 1.
template <typename Real>
std::vector<Real> reduced_rows(const Attention& p, const std::vector<Real>& full,
                               const std::vector<std::int64_t>& sizes) {
  const Array shape{sizes, {}};
  std::int64_t count = 1;
  for (std::int64_t size : sizes) count *= size;
  std::vector<Real> sums(static_cast<std::size_t>(count), Real{0});
  for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    sums[shape.position({b, h, i})] += full[p.row(b, h, i)];
  });
  return sums;
}

// (B, H, N, M) summed over the axes where `sizes` is 1.
template <typename Real>
std::vector<Real> reduced(const Attention& p, const std::vector<Real>& full,
                          const std::vector<std::int64_t>& sizes) {
  Array shape{sizes, {}};
  std::int64_t count = 1;
  for (std::int64_t size : sizes) count *= size;
  std::vector<Real> sums(static_cast<std::size_t>(count), Real{0});
  for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    for (std::int64_t j = 0; j < p.M; ++j) {
      sums[shape.position({b, h, i, j})] +=
          full[p.row(b, h, i) * static_cast<std::size_t>(p.M) + static_cast<std::size_t>(j)];
    }
  });
  return sums;
}

// ---- The plain evaluation ----
// Unblocked loops, every number and every sum in Float, each formula as it is written. Only which keys are
// visible, which beta the row has and whether that beta moves are given.

template <typename Float, typename Real>
AttentionRow<Float> plain_row(const Attention& p, std::int64_t b, std::int64_t h, std::int64_t i,
                              const AttentionRow<Real>& exact) {
  const auto of = [](auto value) { return static_cast<Float>(value); };
  AttentionRow<Float> row;
  row.keys = exact.keys;
  std::vector<Float> x;
  const Float scale = scale_of<Float>(p, b, h, i);
  const Float cap = of(p.softcap);
  const std::size_t query = p.q.position({b, h, i, 0});
  for (std::int64_t j : row.keys) {
    const std::size_t key = p.k.position({b, p.key_head(h), j, 0});
    Float s = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(p.D); ++d) {
      s += of(p.q.values[query + d]) * of(p.k.values[key + d]);
    }
    s *= scale;
    if (cap > 0) s = cap * std::tanh(s / cap);
    row.cap_slopes.push_back(cap > 0 ? 1 - (s / cap) * (s / cap) : Float{1});
    x.push_back(p.bias.given() ? s + of(p.bias.at({b, h, i, j})) : s);
  }
  if (exact.logits.sink_last) x.push_back(of(exact.logits.x.back()));
  row.logits = BasicRow<Float>(std::move(x));
  row.logits.sink_last = exact.logits.sink_last;
  return row;
}

// e = exp(beta (x - max)) of every entry and their sum.
template <typename Float>
struct PlainExps {
  std::vector<Float> y = {};
  std::vector<Float> e = {};
  Float z = 0;
  Float t = 0;  // sum e y
};

template <typename Float>
PlainExps<Float> plain_exps(const BasicRow<Float>& row, Float beta) {
  PlainExps<Float> exps;
  Float max = -std::numeric_limits<Float>::infinity();
  for (Float x : row.x) max = std::max(max, x);
  for (Float x : row.x) {
    exps.y.push_back(x - max);
    exps.e.push_back(std::exp(beta * (x - max)));
    exps.z += exps.e.back();
    exps.t += exps.e.back() * exps.y.back();
  }
  return exps;
}

// Rows and betas are those of `exact`.
template <typename Float, typename Real>
Forward<Float> plain_forward(const Attention& p, const Forward<Real>& exact) {
  Forward<Float> f;
  for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    AttentionRow<Float> row = plain_row<Float>(p, b, h, i, exact.rows[p.row(b, h, i)]);
    f.betas.push_back(static_cast<Float>(exact.betas[p.row(b, h, i)]));
    const PlainExps<Float> exps = plain_exps(row.logits, f.betas.back());
    std::vector<Float> out(static_cast<std::size_t>(p.E), Float{0});
    for (std::size_t n = 0; n < row.count(); ++n) {
      const std::size_t value = p.v.position({b, p.key_head(h), row.keys[n], 0});
      for (std::size_t e = 0; e < out.size(); ++e) {
        out[e] += exps.e[n] * static_cast<Float>(p.v.values[value + e]);
      }
    }
    for (Float sum : out) f.out.push_back(row.count() == 0 ? Float{0} : sum / exps.z);
    f.rows.push_back(std::move(row));
  });
  return f;
}

// d beta / dx of every entry, for a beta that moves.
template <typename Float>
std::vector<Float> plain_beta_gradient(const BasicRow<Float>& row, const Rule& rule, Float beta) {
  std::vector<Float> d;
  if (of_entropy(rule)) {
    const PlainExps<Float> at_1 = plain_exps(row, Float{1});
    const Float mean = at_1.t / at_1.z;
    const Float slope = polynomial_slope(rule.coefficients, std::log(at_1.z) - mean);
    for (std::size_t n = 0; n < row.size(); ++n)
      d.push_back(-slope * at_1.e[n] / at_1.z * (at_1.y[n] - mean));
    return d;
  }
  const PlainExps<Float> exps = plain_exps(row, beta);
  const Float mean = exps.t / exps.z;
  Float variance = 0;
  Float ties = 0;
  for (std::size_t n = 0; n < row.size(); ++n) {
    variance += exps.e[n] / exps.z * (exps.y[n] - mean) * (exps.y[n] - mean);
    ties += exps.y[n] == 0 ? Float{1} : Float{0};
  }
  for (std::size_t n = 0; n < row.size(); ++n) {
    const Float w = exps.e[n] / exps.z;
    d.push_back(rule.kind == whet::Rule::Kind::target_entropy
                    ? -beta * w * (exps.y[n] - mean) / variance
                    : beta * (w - (exps.y[n] == 0 ? 1 / ties : Float{0})) / std::abs(mean));
  }
  return d;
}

// `f` is what plain_forward gave.
template <typename Float, typename Real>
Gradients<Float> plain_backward(const Attention& p, const Forward<Float>& f, const Forward<Real>& exact,
                                bool through_rule) {
  Gradients<Float> g(p);
  for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    const AttentionRow<Float>& row = f.rows[r];
    const Float beta = f.betas[r];
    const PlainExps<Float> exps = plain_exps(row.logits, beta);
    const std::vector<Float> dw = weight_gradients(p, b, h, i, row);
    Float mean_dw = 0;  // = <dout, out>
    for (std::int64_t e = 0; e < p.E; ++e) {
      mean_dw += static_cast<Float>(p.dout.at({b, h, i, e})) *
                 f.out[r * static_cast<std::size_t>(p.E) + static_cast<std::size_t>(e)];
    }
    std::vector<Float> w, dx;
    Float sum_b = 0;
    for (std::size_t n = 0; n < row.logits.size(); ++n) {
      w.push_back(exps.e[n] / exps.z);
      const Float s = w[n] * (dw[n] - mean_dw);
      dx.push_back(beta * s);
      sum_b += exps.y[n] * s;
    }
    // Without a dout there is nothing to carry, even where keys that nearly tie are equal in Float.
    if (through_rule && sum_b != 0 && moves<Real>(exact.rows[r].logits, p.rule(h))) {
      const std::vector<Float> dbeta = plain_beta_gradient(row.logits, p.rule(h), beta);
      for (std::size_t n = 0; n < dx.size(); ++n) dx[n] += sum_b * dbeta[n];
    }
    add_row(p, b, h, i, row, w, dx, g);
  });
  return g;
}

}  // namespace whet::oracle

#endif  // WHET_TESTS_ATTENTION_ORACLE_H_
