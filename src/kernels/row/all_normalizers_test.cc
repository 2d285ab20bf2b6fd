// Every normalizer of the table against its definition: rows and attention, forward and backward, under every
// kind of rule, on every SIMD target.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/row/normalizers.h"
#include "normalizer_oracle.h"
#include "targets.h"

namespace whet {
namespace {

using oracle::Logits;
using oracle::Long;
constexpr double kInf = std::numeric_limits<double>::infinity();

const char* const kNames[] = {"softmax",    "sparsemax",  "entmax15",     "entmax:1.5", "entmax:2",
                              "entmax:1.3", "entmax:1.7", "entmax:1.001", "entmax:2.5", "entmax:4",
                              "top-k:1",    "top-k:5",    "top-k:500",    "hard",       "straight-through",
                              "sigmoid",    "relu",       "softpick"};

TEST(AllNormalizers, AreTestedHere) {
  for (const core::NormalizerEntry& entry : kernels::normalizers()) {
    const bool tested = std::any_of(std::begin(kNames), std::end(kNames), [&](const char* name) {
      return Normalizer::parse(name).name().starts_with(entry.name);
    });
    EXPECT_TRUE(tested) << entry.name;
  }
}

// Logits of a normal distribution, some of them hidden or tied.
template <typename T>
std::vector<T> draw(std::size_t n, double sd, unsigned seed) {
  std::vector<T> x(n);
  std::uint64_t state = seed * 2654435761u + 1;
  const auto uniform = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<double>(state >> 11) + 0.5) * 0x1p-53;
  };
  for (T& v : x) {
    v = static_cast<T>(sd * std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()));
  }
  if (n > 8) x[n / 3] = x[n / 2];
  return x;
}

// Above alpha = 2 a weight rises with infinite slope at the threshold: a logit that is off by e may move it
// by e^(1 / (alpha - 1)).
bool is_steep(const std::string& name) { return name == "entmax:2.5" || name == "entmax:4"; }

template <typename T>
Logits scaled(const std::vector<T>& x, Long beta) {
  Logits s(x.begin(), x.end());
  for (Long& v : s) v *= beta;
  return s;
}

// How far a weight may be off: in units of the largest, and relative to itself.
template <typename T>
double allowed(const std::string& name, double w, double largest, double depth) {
  const double unit = sizeof(T) == sizeof(float) ? 1e-6 : 2e-13;
  const double steep = name.starts_with("entmax:1.001") ? 20 : 3;
  return unit * (steep * largest + (w > 0 ? 2 * (1 + depth) * w : 0));
}

// How many logits of `s` lie so close to the threshold that rounding decides whether they have weight; those
// of top-k and hard are compared without.
Long undecided(const std::string& name, const Logits& s, Long threshold, double rounding) {
  if (name.starts_with("top-k") || name == "hard" || name == "straight-through") return 0;
  return static_cast<Long>(std::count_if(s.begin(), s.end(), [&](Long v) {
    return oracle::is_visible(v) && std::abs(v - threshold) <= static_cast<Long>(rounding);
  }));
}

// `s` = beta x, without the sink; `support` may have seen one.
template <typename T>
void expect_support(const std::string& name, const Logits& s, const oracle::Support& support,
                    const RowStats& stats, double more_rounding = 0) {
  const double beta = name == "hard" ? 1 : stats.beta;
  const double threshold = static_cast<double>(support.threshold);
  if (threshold == -kInf) {
    EXPECT_EQ(stats.threshold, -kInf) << name;
    EXPECT_EQ(stats.support, static_cast<double>(support.size)) << name;
    return;
  }
  // tau is known to a few ulps of 1, which 1 / (alpha - 1) multiplies.
  const oracle::Kind kind(name);
  const double scale = kind.kind == "entmax" ? 1 / static_cast<double>(kind.parameter - 1) : 0;
  const double top = std::abs(static_cast<double>(oracle::largest(s)));
  const double unit = sizeof(T) == sizeof(float) ? 1e-6 : 1e-13;
  const double rounding = unit * (scale + top + std::abs(threshold)) + more_rounding;
  EXPECT_NEAR(beta * stats.threshold, threshold, rounding) << name << ", " << s.size() << " keys";
  EXPECT_NEAR(stats.support, static_cast<double>(support.size),
              static_cast<double>(undecided(name, s, support.threshold, rounding)))
      << name << ", " << s.size() << " keys, beta " << beta;
}

template <typename T>
void check_row(const std::string& name, std::vector<T> x, const Rule& rule, bool in_place) {
  const auto n = static_cast<std::int64_t>(x.size());
  std::vector<T> out = in_place ? x : std::vector<T>(x.size(), T(7));
  std::vector<RowStats> stats(1);
  const Normalizer normalizer = Normalizer::parse(name);
  softmax({in_place ? out.data() : x.data(), {n}}, {out.data(), {n}},
          {.rule = rule, .normalizer = normalizer}, {.stats = stats});
  const Long beta = normalizer.name() == "hard" ? 1 : static_cast<Long>(stats[0].beta);
  const Logits s = scaled(x, beta), exact = oracle::weights_of(name, s);
  const double top = static_cast<double>(oracle::largest(s)),
               largest = static_cast<double>(oracle::largest(exact));
  double entropy = 0, sum = 0;
  for (const Long w : exact) sum += static_cast<double>(w);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto w = static_cast<double>(exact[i]);
    ASSERT_NEAR(static_cast<double>(out[i]), w,
                allowed<T>(name, w, largest, std::abs(top) + std::abs(static_cast<double>(s[i]) - top)))
        << name << ", " << rule.name() << ", " << n << " keys, key " << i << ", beta " << stats[0].beta;
    if (w > 0) entropy -= w / sum * std::log(w / sum);
  }
  EXPECT_NEAR(stats[0].sharp_entropy, entropy, 2e-5 * std::max(1.0, std::log(static_cast<double>(n))))
      << name;
  EXPECT_NEAR(stats[0].sharp_peak, largest, 1e-5 * largest) << name << ", " << n;
  expect_support<T>(name, s, oracle::support_of(name, s), stats[0]);
}

template <typename T>
void check_rows() {
  for (const char* name : kNames) {
    for (const std::size_t n : {1u, 2u, 3u, 7u, 16u, 33u, 300u}) {
      for (const double sd : {0.01, 1.0, 8.0}) {
        check_row<T>(name, draw<T>(n, sd, static_cast<unsigned>(n)), Rule::none(), n % 2 == 0);
      }
      check_row<T>(name, draw<T>(n, 2, 3), Rule::paper(), false);
      check_row<T>(name, draw<T>(n, 2, 4), Rule::log_length(4), true);
      check_row<T>(name, draw<T>(n, 2, 5), Rule::fixed(0.25), false);
      check_row<T>(name, draw<T>(n, 2, 6), Rule::target_entropy(0.7), true);
    }
  }
}

TEST(AllNormalizers, RowsOfFloat) { for_each_target(check_rows<float>); }
TEST(AllNormalizers, RowsOfDouble) { for_each_target(check_rows<double>); }

TEST(AllNormalizers, LongRows) {
  for_each_target([] {
    const std::vector<float> drawn = draw<float>(131072, 1, 1), equal(131072, 0.5f);
    for (const char* name : {"sparsemax", "entmax15", "top-k:500", "sigmoid", "relu", "softpick"}) {
      check_row<float>(name, drawn, Rule::none(), false);
      check_row<float>(name, equal, Rule::none(), false);
    }
  });
}

TEST(AllNormalizers, HiddenKeysTiesAndHugeLogits) {
  for_each_target([] {
    for (const char* name : kNames) {
      const std::string kind = name;
      const bool huge = kind != "relu" && kind != "sigmoid" && kind != "softpick";
      std::vector<float> x = draw<float>(40, 1, 9);
      for (const std::size_t i : {0u, 5u, 39u}) x[i] = -std::numeric_limits<float>::infinity();
      check_row<float>(name, x, Rule::none(), false);
      check_row<float>(name, x, Rule::paper(), false);
      check_row<float>(name, std::vector<float>(17, 3.0f), Rule::none(), false);
      check_row<float>(name, {5, 5, 1, 5, -2}, Rule::none(), false);
      if (huge) check_row<float>(name, {3e38f, -3e38f, 3e38f, 0}, Rule::none(), false);
    }
  });
}

TEST(AllNormalizers, NothingVisibleAndNotANumber) {
  for_each_target([] {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (const char* name : kNames) {
      for (const Rule& rule : {Rule::none(), Rule::paper(), Rule::target_entropy(0.5)}) {
        const SoftmaxOptions options{.rule = rule, .normalizer = Normalizer::parse(name)};
        std::vector<RowStats> stats(1);
        std::vector<float> hidden(9, -inf), out(9, 7.0f), dout(9, 1.0f), din(9, 7.0f);
        softmax({hidden.data(), {9}}, {out.data(), {9}}, options, {.stats = stats});
        softmax_backward({hidden.data(), {9}}, {dout.data(), {9}}, {din.data(), {9}}, options);
        EXPECT_EQ(out, std::vector<float>(9, 0.0f)) << name;
        EXPECT_EQ(din, std::vector<float>(9, 0.0f)) << name;
        EXPECT_EQ(stats[0].sharp_entropy, 0) << name;
        EXPECT_EQ(stats[0].support, 0) << name;
        EXPECT_EQ(stats[0].threshold, -kInf) << name;
        for (const float bad : {nan, inf}) {
          std::vector<float> x = draw<float>(9, 1, 2);
          x[4] = bad;
          softmax({x.data(), {9}}, {out.data(), {9}}, options, {.stats = stats});
          for (const float w : out) EXPECT_TRUE(std::isnan(w)) << name << " " << rule.name() << " " << bad;
          EXPECT_TRUE(std::isnan(stats[0].sharp_entropy));
          EXPECT_TRUE(std::isnan(stats[0].support)) << name;
          EXPECT_TRUE(std::isnan(stats[0].threshold)) << name;
          softmax({x.data(), {9}}, {out.data(), {9}}, options);
          for (const float w : out) EXPECT_TRUE(std::isnan(w)) << name << " " << rule.name() << " " << bad;
        }
      }
    }
  });
}

// ---- Gradients ----

Long entropy_at(const Logits& x, Long beta) {
  const Logits w = oracle::weights_of("softmax", [&] {
    Logits s = x;
    for (Long& v : s) v *= beta;
    return s;
  }());
  Long h = 0;
  for (const Long v : w) h -= v > 0 ? v * std::log(v) : 0;
  return h;
}

Long beta_of(const Rule& rule, const Logits& x) {
  if (!rule.needs_search()) {
    RowState state;
    state.count = static_cast<std::int64_t>(oracle::visible_count(x));
    state.max = static_cast<double>(oracle::largest(x));
    if (rule.kind() != Rule::Kind::paper) return static_cast<Long>(rule.beta(state));
    const Long h = entropy_at(x, 1);
    Long p = 0;
    for (const double c : rule.coefficients()) p = p * h + static_cast<Long>(c);
    return h > 0.5L ? std::max<Long>(1, p) : 1;
  }
  Long low = 1, high = 1e4L;
  if (entropy_at(x, low) <= static_cast<Long>(rule.parameter())) return 1;
  for (int step = 0; step < 120; ++step) {
    const Long mid = (low + high) / 2;
    (entropy_at(x, mid) > static_cast<Long>(rule.parameter()) ? low : high) = mid;
  }
  return low;
}

Long loss(const std::string& name, const Rule& rule, const Logits& x, const Logits& g, Long held) {
  Logits s = x;
  const Long beta = held > 0 ? held : beta_of(rule, x);
  for (Long& v : s) v *= beta;
  const Logits w = oracle::weights_of(name, s);
  Long sum = 0;
  for (std::size_t i = 0; i < w.size(); ++i) sum += w[i] * g[i];
  return sum;
}

template <typename T>
void check_gradient(const std::string& name, const Rule& rule, bool through_rule, bool saves, std::size_t n,
                    double sd, unsigned seed) {
  std::vector<T> x = draw<T>(n, sd, seed), g = draw<T>(n, 1, seed + 1), w(n), din(n, T(7));
  if (n > 8) x[n / 3] += T(0.25);  // no ties: the threshold of top-k has a gradient beside them only
  if (n > 20) x[3] = -std::numeric_limits<T>::infinity();
  const SoftmaxOptions options{.rule = rule, .normalizer = Normalizer::parse(name)};
  const auto size = static_cast<std::int64_t>(n);
  std::vector<T> saved(static_cast<std::size_t>(saved_size(options)));
  const View kept = saves ? View(saved.data(), {saved_size(options)}) : View();
  softmax({x.data(), {size}}, {w.data(), {size}}, options, {.saved = kept});
  softmax_backward(
      {x.data(), {size}}, {g.data(), {size}}, {din.data(), {size}}, options,
      {.beta_gradient = through_rule ? BetaGradient::through_rule : BetaGradient::held, .saved = kept});
  const Logits exact_x(x.begin(), x.end()), exact_g(g.begin(), g.end());
  const Long held = through_rule ? 0 : beta_of(rule, exact_x);
  const std::string forward = name == "straight-through" ? "softmax" : name;
  const Long h = 1e-6L;
  std::vector<double> expected(n);
  double size_of_gradient = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (!oracle::is_visible(exact_x[i]) || name == "hard") continue;
    Logits up = exact_x, down = exact_x;
    up[i] += h;
    down[i] -= h;
    expected[i] = static_cast<double>(
        (loss(forward, rule, up, exact_g, held) - loss(forward, rule, down, exact_g, held)) / (2 * h));
    size_of_gradient = std::max(size_of_gradient, std::abs(expected[i]));
  }
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_NEAR(static_cast<double>(din[i]), expected[i],
                (sizeof(T) == 4 ? 2e-5 : 1e-7) * (is_steep(name) ? 100 : 1) * (size_of_gradient + 1e-2))
        << name << ", " << rule.name() << (through_rule ? ", through the rule" : "") << ", " << n
        << " keys, key " << i;
  }
}

template <typename T>
void check_gradients() {
  for (const char* name : kNames) {
    for (const std::size_t n : {1u, 5u, 21u}) {
      for (const bool saves : {false, true}) {
        check_gradient<T>(name, Rule::none(), false, saves, n, 1, 11);
        check_gradient<T>(name, Rule::fixed(0.5), true, saves, n, 1, 12);
        check_gradient<T>(name, Rule::paper(), true, saves, n, 1, 13);
        check_gradient<T>(name, Rule::paper(), false, saves, n, 1, 13);
        check_gradient<T>(name, Rule::target_entropy(0.9), true, saves, n, 1, 17);
      }
    }
  }
}

TEST(AllNormalizers, GradientsOfFloat) { for_each_target(check_gradients<float>); }
TEST(AllNormalizers, GradientsOfDouble) { for_each_target(check_gradients<double>); }

// ---- Attention ----

struct Problem {
  std::int64_t H = 2, N, M, D = 8, E = 5;
  bool causal;
  double sink;
  std::vector<double> q, k, v, dout;

  Problem(std::int64_t queries, std::int64_t keys, bool causal_, double sink_)
      : N(queries), M(keys), causal(causal_), sink(sink_) {
    const auto size = [&](std::int64_t n, std::int64_t d) { return static_cast<std::size_t>(H * n * d); };
    q = draw<double>(size(N, D), 1, 1);
    k = draw<double>(size(M, D), 1, 2);
    v = draw<double>(size(M, E), 1, 3);
    dout = draw<double>(size(N, E), 1, 4);
  }

  static double at(const std::vector<double>& a, std::int64_t i) { return a[static_cast<std::size_t>(i)]; }

  // Logits of a query, the sink last.
  Logits logits(std::int64_t h, std::int64_t i) const {
    Logits x(static_cast<std::size_t>(M) + 1, -std::numeric_limits<Long>::infinity());
    for (std::int64_t j = 0; j < (causal ? std::min(i + 1, M) : M); ++j) {
      Long sum = 0;
      for (std::int64_t e = 0; e < D; ++e) {
        sum += static_cast<Long>(at(q, (h * N + i) * D + e)) * static_cast<Long>(at(k, (h * M + j) * D + e));
      }
      x[static_cast<std::size_t>(j)] = sum;
    }
    if (sink > -kInf) x.back() = static_cast<Long>(sink);
    return x;
  }
};

// The count of visible keys that sigmoid and relu divide by doesn't include the sink.
Logits attention_weights(const std::string& name, const Problem& p, Logits x) {
  if (name == "sigmoid" || name == "relu") {
    if (p.sink > -kInf) x.back() = -std::numeric_limits<Long>::infinity();
  }
  return oracle::weights_of(name, x);
}

// The sink is last among x. It moves the threshold, and isn't counted.
template <typename T>
void expect_attention_support(const std::string& name, const Logits& x, const RowStats& stats) {
  oracle::Support support = oracle::support_of(name, x);
  const Logits sink{x.back()}, keys(x.begin(), x.end() - 1);
  const Long threshold = support.threshold;
  const bool at_it = name.starts_with("top-k") || name == "hard" || name == "straight-through";
  if (oracle::is_visible(sink[0]) && (sink[0] > threshold || (at_it && sink[0] == threshold))) --support.size;
  expect_support<T>(name, keys, support, stats, sizeof(T) == 4 ? 2e-5 : 1e-12);
}

template <typename T>
void check_attention(const std::string& name, std::int64_t queries, std::int64_t keys, bool causal,
                     double sink) {
  Problem p(queries, keys, causal, sink);
  const auto as = [](const std::vector<double>& a) { return std::vector<T>(a.begin(), a.end()); };
  std::vector<T> q = as(p.q), k = as(p.k), v = as(p.v), dout = as(p.dout), out(dout.size(), T(7));
  std::vector<T> dq(q.size(), T(7)), dk(k.size(), T(7)), dv(v.size(), T(7)), sinks(2, static_cast<T>(sink));
  // What the kernel reads is what the oracle reads.
  p.q.assign(q.begin(), q.end());
  p.k.assign(k.begin(), k.end());
  p.v.assign(v.begin(), v.end());
  p.dout.assign(dout.begin(), dout.end());
  const auto view = [&](std::vector<T>& a, std::int64_t n, std::int64_t d) {
    return View(a.data(), {1, p.H, n, d});
  };
  AttentionOptions options{.normalizer = Normalizer::parse(name), .scale = 1, .causal = causal};
  if (sink > -kInf) options.sinks = View(sinks.data(), {2});
  const std::int64_t size = saved_size(options);
  std::vector<T> saved(static_cast<std::size_t>(p.H * p.N * size));
  const View kept(saved.data(), {1, p.H, p.N, size});
  std::vector<RowStats> stats(static_cast<std::size_t>(p.H * p.N));
  attention(view(q, p.N, p.D), view(k, p.M, p.D), view(v, p.M, p.E), view(out, p.N, p.E), options,
            {.stats = stats, .saved = kept});
  attention_backward(view(q, p.N, p.D), view(k, p.M, p.D), view(v, p.M, p.E), view(dout, p.N, p.E),
                     {.dq = view(dq, p.N, p.D), .dk = view(dk, p.M, p.D), .dv = view(dv, p.M, p.E)}, options,
                     {.saved = kept});
  if (is_steep(name) && sizeof(T) == 4) return;  // products are rounded, and weights with them
  const double unit = sizeof(T) == 4 ? 4e-5 : is_steep(name) ? 1e-4 : 1e-10;
  std::vector<double> expected_dv(v.size(), 0), expected_dq(q.size(), 0), expected_dk(k.size(), 0);
  const auto n_keys = static_cast<std::size_t>(p.M);
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t i = 0; i < p.N; ++i) {
      const Logits x = p.logits(h, i), w = attention_weights(name, p, x);
      expect_attention_support<T>(name, x, stats[static_cast<std::size_t>(h * p.N + i)]);
      Logits g(n_keys + 1, 0);
      for (std::int64_t j = 0; j < p.M; ++j) {
        for (std::int64_t e = 0; e < p.E; ++e) {
          const double gradient = Problem::at(p.dout, (h * p.N + i) * p.E + e);
          g[static_cast<std::size_t>(j)] +=
              static_cast<Long>(gradient * Problem::at(p.v, (h * p.M + j) * p.E + e));
          expected_dv[static_cast<std::size_t>((h * p.M + j) * p.E + e)] +=
              static_cast<double>(w[static_cast<std::size_t>(j)]) * gradient;
        }
      }
      for (std::int64_t e = 0; e < p.E; ++e) {
        Long sum = 0;
        for (std::int64_t j = 0; j < p.M; ++j) {
          sum +=
              w[static_cast<std::size_t>(j)] * static_cast<Long>(Problem::at(p.v, (h * p.M + j) * p.E + e));
        }
        ASSERT_NEAR(static_cast<double>(out[static_cast<std::size_t>((h * p.N + i) * p.E + e)]),
                    static_cast<double>(sum), unit)
            << name << ", query " << i << ", causal " << causal << ", sink " << sink;
      }
      if (p.M > 60 || !oracle::has_gradient(name)) continue;
      for (std::size_t j = 0; j < n_keys; ++j) {
        if (!oracle::is_visible(x[j])) continue;
        const Long step = 1e-6L;
        Logits up = x, down = x;
        up[j] += step;
        down[j] -= step;
        Long slope = 0;
        const Logits above = attention_weights(name, p, up), below = attention_weights(name, p, down);
        for (std::size_t l = 0; l < n_keys; ++l) slope += g[l] * (above[l] - below[l]) / (2 * step);
        for (std::int64_t e = 0; e < p.D; ++e) {
          const auto a = static_cast<std::size_t>((h * p.N + i) * p.D + e),
                     b = static_cast<std::size_t>((h * p.M) * p.D + e) + j * static_cast<std::size_t>(p.D);
          expected_dq[a] += static_cast<double>(slope) * p.k[b];
          expected_dk[b] += static_cast<double>(slope) * p.q[a];
        }
      }
    }
  }
  const auto expect = [&](const std::vector<T>& given, const std::vector<double>& expected,
                          const char* what) {
    double largest = 1;
    for (const double e : expected) largest = std::max(largest, std::abs(e));
    for (std::size_t i = 0; i < given.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(given[i]), expected[i], std::max(unit, 1e-8) * largest)
          << what << " of " << name << ", " << i << ", causal " << causal << ", sink " << sink;
    }
  };
  expect(dv, expected_dv, "dv");
  if (p.M <= 60 && oracle::has_gradient(name)) {
    expect(dq, expected_dq, "dq");
    expect(dk, expected_dk, "dk");
  }
}

TEST(AllNormalizers, AttentionWithFewAndManyQueries) {
  for_each_target([] {
    for (const char* name : kNames) {
      check_attention<float>(name, 2, 600, false, -kInf);
      check_attention<float>(name, 18, 300, true, -kInf);
      check_attention<double>(name, 18, 70, false, -kInf);
    }
  });
}

TEST(AllNormalizers, GradientsOfAttention) {
  for_each_target([] {
    for (const char* name : kNames) {
      check_attention<double>(name, 3, 13, false, -kInf);
      check_attention<float>(name, 17, 19, true, -kInf);
      check_attention<double>(name, 17, 19, true, 0.5);
      check_attention<float>(name, 2, 19, false, 2.5);
    }
  });
}

TEST(AllNormalizers, TilesWithoutSupportAreSkipped) {
  for (const char* name : {"sparsemax", "entmax15", "hard"}) {
    const std::int64_t n = 48, m = 4096, d = 8;
    std::vector<float> q = draw<float>(static_cast<std::size_t>(n * d), 4, 1),
                       k = draw<float>(static_cast<std::size_t>(m * d), 4, 2),
                       out(static_cast<std::size_t>(n * d)), every(out.size());
    TileCounts counts;
    const auto view = [&](std::vector<float>& a, std::int64_t rows) {
      return View(a.data(), {1, 1, rows, d});
    };
    AttentionOptions options{.normalizer = Normalizer::parse(name), .scale = 1};
    attention(view(q, n), view(k, m), view(k, m), view(out, n), options, {.tile_counts = &counts});
    EXPECT_GT(counts.skipped, counts.tiles / 4) << name;
    options.skip_epsilon = 0;
    attention(view(q, n), view(k, m), view(k, m), view(every, n), options);
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], every[i], 1e-5f);
  }
}

// The 500th key lies in a tile that is dropped: few keys are close to the maximum.
TEST(AllNormalizers, SupportOfTopKCountsDroppedTiles) {
  for (const std::int64_t n : {2, 40}) {
    const std::int64_t m = 4096;
    std::vector<float> q(static_cast<std::size_t>(n), 1), k = draw<float>(static_cast<std::size_t>(m), 1, 2),
                                                          out(q.size());
    for (std::size_t i = 8; i < k.size(); ++i) k[i] -= 100;
    TileCounts counts;
    std::vector<RowStats> stats(q.size());
    const auto view = [](std::vector<float>& a) {
      return View(a.data(), {1, 1, static_cast<std::int64_t>(a.size()), 1});
    };
    attention(view(q), view(k), view(k), view(out), {.normalizer = Normalizer::parse("top-k:500")},
              {.stats = stats, .tile_counts = &counts});
    EXPECT_EQ(counts.skipped > 0, n == 40);  // few queries skip nothing
    std::vector<float> sorted = k;
    std::sort(sorted.rbegin(), sorted.rend());
    for (const RowStats& s : stats) {
      EXPECT_EQ(s.support, 500);
      EXPECT_EQ(s.threshold, static_cast<double>(sorted[499]));
    }
  }
}

TEST(AllNormalizers, ThresholdOfProbabilitiesIsALogarithm) {
  std::vector<float> p = {0.5f, 0.3f, 0.15f, 0.05f}, out(4);
  std::vector<RowStats> stats(1);
  sharpen({p.data(), {4}}, {out.data(), {4}}, {.normalizer = Normalizer::parse("top-k:2")}, {.stats = stats});
  EXPECT_EQ(stats[0].support, 2);
  EXPECT_NEAR(stats[0].threshold, std::log(0.3), 1e-6);
}

TEST(AllNormalizers, ShardsAreRefusedByName) {
  std::vector<float> q(8), k(8);
  std::vector<RowState> states(1);
  for (const char* name : {"top-k:3", "sigmoid", "relu", "softpick", "straight-through"}) {
    try {
      shard_states({q.data(), {1, 1, 1, 8}}, {k.data(), {1, 1, 1, 8}}, {0, 1}, states,
                   {.normalizer = Normalizer::parse(name)});
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                "normalizer: is " + std::string(name) + ", which can't be merged from shards of keys");
    }
  }
}

}  // namespace
}  // namespace whet
