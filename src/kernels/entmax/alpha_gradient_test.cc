// The gradient to A of entmax:A against the published formula in long double and against finite differences.
#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "normalizer_oracle.h"
#include "targets.h"

namespace whet {
namespace {

using oracle::Logits;
using oracle::Long;
constexpr double kInf = std::numeric_limits<double>::infinity();

const char* const kNames[] = {"entmax:1.001", "entmax:1.05", "entmax:1.3", "entmax:1.5",
                              "entmax:1.9",   "entmax:2",    "entmax:3",   "entmax:4"};

double alpha_of(const std::string& name) { return std::stod(name.substr(name.find(':') + 1)); }

template <typename T>
std::vector<T> draw(std::size_t n, double sd, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, sd);
  std::vector<T> x(n);
  for (T& v : x) v = static_cast<T>(normal(random));
  return x;
}

// Correia, Niculae, Martins (2019), equation 10, on the support.
Long published(const Logits& s, const Logits& g, Long alpha) {
  const Logits p = oracle::entmax(s, alpha);
  Long total = 0, entropy = 0, gradient = 0;
  for (const Long w : p) {
    if (w > 0) total += std::pow(w, 2 - alpha);
    if (w > 0) entropy -= w * std::log(w);
  }
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (!(p[i] > 0)) continue;
    const Long share = std::pow(p[i], 2 - alpha) / total, h = -p[i] * std::log(p[i]);
    gradient += g[i] * ((p[i] - share) / ((alpha - 1) * (alpha - 1)) + (h - share * entropy) / (alpha - 1));
  }
  return gradient;
}

Long difference(const Logits& s, const Logits& g, Long alpha) {
  const Long step = std::min<Long>(1e-7L, (alpha - 1) / 100);
  const Logits up = oracle::entmax(s, alpha + step), down = oracle::entmax(s, alpha - step);
  Long sum = 0;
  for (std::size_t i = 0; i < s.size(); ++i) sum += g[i] * (up[i] - down[i]) / (2 * step);
  return sum;
}

// The bound of softmax.h. Above A = 2 a key at tau may have any slope.
template <typename T>
double allowed(double alpha, std::size_t n, double largest) {
  const double log = std::log(static_cast<double>(n));
  return (sizeof(T) == 4 ? 2e-6 : 1e-12) * (1 + log * log) * largest * (alpha > 2 ? 1000 : 1);
}

template <typename T>
double largest_of(const std::vector<T>& g) {
  double largest = 0;
  for (const T v : g) largest = std::max(largest, std::abs(static_cast<double>(v)));
  return largest;
}

template <typename T>
void check_row(const std::string& name, const std::vector<T>& x, std::vector<T> g, const Rule& rule,
               bool saves) {
  const auto n = static_cast<std::int64_t>(x.size());
  const SoftmaxOptions options{.rule = rule, .normalizer = Normalizer::parse(name)};
  std::vector<T> w(x.size()), saved(static_cast<std::size_t>(saved_size(options)));
  std::vector<RowStats> stats(1);
  const View kept = saves ? View(saved.data(), {saved_size(options)}) : View();
  softmax({x.data(), {n}}, {w.data(), {n}}, options, {.stats = stats, .saved = kept});
  Logits s(x.begin(), x.end());
  const Logits exact_g(g.begin(), g.end());
  for (Long& v : s) v *= static_cast<Long>(stats[0].beta);
  const double alpha = alpha_of(name), bound = allowed<T>(alpha, x.size(), largest_of(g));
  std::vector<double> dparameter(1, 7);
  // In place: dL/dw is read before it is overwritten.
  softmax_backward({x.data(), {n}}, {g.data(), {n}}, {g.data(), {n}}, options,
                   {.saved = kept, .dparameter = dparameter});
  const auto exact = static_cast<Long>(alpha);
  EXPECT_NEAR(dparameter[0], static_cast<double>(published(s, exact_g, exact)), bound)
      << name << ", " << rule.name() << ", " << n << " keys";
  EXPECT_NEAR(dparameter[0], static_cast<double>(difference(s, exact_g, exact)), bound + 1e-7)
      << name << ", " << rule.name() << ", " << n << " keys";
}

template <typename T>
void check_rows() {
  for (const char* name : kNames) {
    for (const std::size_t n : {2u, 3u, 7u, 16u, 33u, 300u}) {
      for (const double sd : {0.1, 1.0, 4.0}) {
        const auto seed = static_cast<unsigned>(n);
        std::vector<T> x = draw<T>(n, sd, seed), g = draw<T>(n, 1, seed + 1);
        check_row<T>(name, x, g, Rule::none(), false);
        check_row<T>(name, x, g, Rule::fixed(0.5), true);
        check_row<T>(name, x, g, Rule::paper(), n % 2 == 0);
        if (n < 7) continue;
        x[1] = x[4];  // ties and hidden keys
        x[0] = x[5] = -std::numeric_limits<T>::infinity();
        check_row<T>(name, x, g, Rule::none(), true);
      }
    }
  }
}

TEST(AlphaGradient, OfRowsOfFloat) { for_each_target(check_rows<float>); }
TEST(AlphaGradient, OfRowsOfDouble) { for_each_target(check_rows<double>); }

TEST(AlphaGradient, OfLongRows) {
  for_each_target([] {
    const std::vector<float> x = draw<float>(20000, 1, 1), g = draw<float>(20000, 1, 2);
    for (const char* name : {"entmax:1.001", "entmax:1.5"}) check_row<float>(name, x, g, Rule::none(), false);
  });
}

// Towards A = 1 the published formula divides differences by (A - 1)^2; the limit is
// sum w (g - sum w g) (-ln^2 w) / 2 of softmax.
TEST(AlphaGradient, TendsToTheLimitAtSoftmax) {
  for_each_target([] {
    const std::vector<double> x = draw<double>(50, 2, 3), g = draw<double>(50, 1, 4);
    const Logits w = oracle::weights_of("softmax", Logits(x.begin(), x.end()));
    Long mean = 0, limit = 0;
    for (std::size_t i = 0; i < x.size(); ++i) mean += w[i] * static_cast<Long>(g[i]);
    for (std::size_t i = 0; i < x.size(); ++i) {
      limit -= w[i] * (static_cast<Long>(g[i]) - mean) * std::log(w[i]) * std::log(w[i]) / 2;
    }
    struct Near {
      const char* name;
      double distance;
    };
    for (const Near& near :
         {Near{"entmax:1.00001", 1e-5}, {"entmax:1.0000001", 1e-7}, {"entmax:1.000000001", 1e-9}}) {
      std::vector<double> din(50), dparameter(1);
      softmax_backward({x.data(), {50}}, {g.data(), {50}}, {din.data(), {50}},
                       {.normalizer = Normalizer::parse(near.name)}, {.dparameter = dparameter});
      EXPECT_NEAR(dparameter[0], static_cast<double>(limit), 100 * near.distance + 1e-6) << near.name;
    }
  });
}

TEST(AlphaGradient, IsZeroWhereWeightsDontDependOnIt) {
  for_each_target([] {
    for (const char* name : kNames) {
      const SoftmaxOptions options{.normalizer = Normalizer::parse(name)};
      const float inf = std::numeric_limits<float>::infinity();
      for (const std::vector<float>& x :
           {std::vector<float>{3}, {-inf, 2, -inf}, {1, 1, 1, 1, 1}, {-inf, -inf}, {}}) {
        const auto n = static_cast<std::int64_t>(x.size());
        std::vector<float> g = draw<float>(x.size(), 1, 5), din(x.size());
        std::vector<double> dparameter(1, 7);
        softmax_backward({x.data(), {1, n}}, {g.data(), {1, n}}, {din.data(), {1, n}}, options,
                         {.dparameter = dparameter});
        EXPECT_NEAR(dparameter[0], 0, n < 5 ? 1e-12 : 1e-6) << name << ", " << n << " keys";
      }
    }
  });
}

TEST(AlphaGradient, OfARowWithNaNIsNaN) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = draw<float>(18, 1, 1), g = draw<float>(18, 1, 2), din(18);
    x[4] = bad;
    std::vector<double> dparameter(2, 7);
    softmax_backward({x.data(), {2, 9}}, {g.data(), {2, 9}}, {din.data(), {2, 9}},
                     {.normalizer = Normalizer::parse("entmax:1.3")}, {.dparameter = dparameter});
    EXPECT_TRUE(std::isnan(dparameter[0]));
    EXPECT_TRUE(std::isfinite(dparameter[1]));
  }
}

// Rows in row-major order whatever the axis, with a mask and lengths; NaN in the gradient of hidden keys.
TEST(AlphaGradient, OfRowsAlongAnotherAxis) {
  const Normalizer normalizer = Normalizer::parse("entmax:1.4");
  const std::int64_t n = 12, rows = 5;
  std::vector<double> x = draw<double>(60, 1, 1), g = draw<double>(60, 1, 2), din(60), dparameter(5), one(1);
  std::vector<std::uint8_t> mask(60, 1);
  const std::vector<std::int64_t> lengths = {12, 7, 0, 3, 12};
  for (std::size_t i = 0; i < 60; i += 7) mask[i] = 0, g[i] = std::nan("");
  softmax_backward({x.data(), {n, rows}}, {g.data(), {n, rows}}, {din.data(), {n, rows}},
                   {.normalizer = normalizer,
                    .axis = 0,
                    .mask = {mask.data(), DType::boolean, {n, rows}},
                    .lengths = lengths},
                   {.dparameter = dparameter});
  for (std::size_t row = 0; row < 5; ++row) {
    std::vector<double> keys, gradients;
    for (std::int64_t i = 0; i < lengths[row]; ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * 5 + row;
      if (mask[at] == 0) continue;
      keys.push_back(x[at]);
      gradients.push_back(g[at]);
    }
    if (keys.empty()) {
      EXPECT_EQ(dparameter[row], 0);
      continue;
    }
    const Logits s(keys.begin(), keys.end()), exact(gradients.begin(), gradients.end());
    EXPECT_NEAR(dparameter[row], static_cast<double>(published(s, exact, static_cast<Long>(1.4))), 1e-11);
  }
}

// ---- Attention ----

struct Heads {
  std::int64_t batch = 2, heads = 4, key_heads = 2, queries, keys, d = 6, e = 5;
  bool causal = false;
  double sink = -kInf;

  std::size_t q(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, std::int64_t size) const {
    return static_cast<std::size_t>(((b * heads + h) * queries + i) * size + j);
  }
  std::size_t k(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, std::int64_t size) const {
    return static_cast<std::size_t>(((b * key_heads + h / (heads / key_heads)) * keys + i) * size + j);
  }
  std::size_t rows() const { return static_cast<std::size_t>(batch * heads * queries); }
};

template <typename T>
void check_attention(const std::string& name, const Heads& p) {
  const auto size = [](auto... n) { return static_cast<std::size_t>((n * ...)); };
  std::vector<T> q = draw<T>(size(p.batch, p.heads, p.queries, p.d), 1, 1),
                 k = draw<T>(size(p.batch, p.key_heads, p.keys, p.d), 1, 2),
                 v = draw<T>(size(p.batch, p.key_heads, p.keys, p.e), 1, 3),
                 dout = draw<T>(size(p.batch, p.heads, p.queries, p.e), 1, 4), dq(q.size()),
                 sinks(static_cast<std::size_t>(p.heads), static_cast<T>(p.sink));
  AttentionOptions options{.normalizer = Normalizer::parse(name), .scale = 1, .causal = p.causal};
  if (p.sink > -kInf) options.sinks = View(sinks.data(), {p.heads});
  const auto run = [&](View gradient, int threads) {
    std::vector<double> dparameter(p.rows(), 7);
    attention_backward(
        {q.data(), {p.batch, p.heads, p.queries, p.d}}, {k.data(), {p.batch, p.key_heads, p.keys, p.d}},
        {v.data(), {p.batch, p.key_heads, p.keys, p.e}}, {dout.data(), {p.batch, p.heads, p.queries, p.e}},
        {.dq = gradient, .dparameter = dparameter}, options, {}, {.threads = threads});
    return dparameter;
  };
  const std::vector<double> got = run({}, 1);
  EXPECT_EQ(got, run({dq.data(), {p.batch, p.heads, p.queries, p.d}}, 3));  // whatever else is computed
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads; ++h) {
      for (std::int64_t i = 0; i < p.queries; ++i) {
        Logits s, g;
        for (std::int64_t j = 0; j < (p.causal ? std::min(i + 1, p.keys) : p.keys); ++j) {
          Long logit = 0, gradient = 0;
          for (std::int64_t e = 0; e < p.d; ++e) {
            logit += static_cast<Long>(q[p.q(b, h, i, e, p.d)]) * static_cast<Long>(k[p.k(b, h, j, e, p.d)]);
          }
          for (std::int64_t e = 0; e < p.e; ++e) {
            gradient +=
                static_cast<Long>(dout[p.q(b, h, i, e, p.e)]) * static_cast<Long>(v[p.k(b, h, j, e, p.e)]);
          }
          s.push_back(logit);
          g.push_back(gradient);
        }
        if (p.sink > -kInf) {
          s.push_back(static_cast<Long>(p.sink));
          g.push_back(0);
        }
        const auto row = static_cast<std::size_t>((b * p.heads + h) * p.queries + i);
        const double exact = static_cast<double>(published(s, g, static_cast<Long>(alpha_of(name))));
        ASSERT_NEAR(got[row], exact, (sizeof(T) == 4 ? 3e-4 : 1e-10) * (alpha_of(name) > 2 ? 100 : 1))
            << name << ", row " << row;
      }
    }
  }
}

TEST(AlphaGradient, OfAttention) {
  for_each_target([] {
    for (const char* name : {"entmax:1.001", "entmax:1.3", "entmax:1.5", "entmax:2", "entmax:3"}) {
      check_attention<double>(name, {.queries = 3, .keys = 17});
      check_attention<double>(name, {.queries = 20, .keys = 20, .causal = true});
      check_attention<double>(name, {.queries = 20, .keys = 9, .causal = true, .sink = 0.5});
      if (alpha_of(name) <= 2) check_attention<float>(name, {.queries = 20, .keys = 300});
    }
  });
}

TEST(AlphaGradient, OfRowsOfAttentionThatSeeNothingIsZero) {
  std::vector<float> q = draw<float>(80, 1, 1), k = draw<float>(40, 1, 2);
  const std::vector<std::int64_t> lengths = {0};
  std::vector<double> dparameter(20, 7);
  attention_backward({q.data(), {1, 1, 20, 4}}, {k.data(), {1, 1, 10, 4}}, {k.data(), {1, 1, 10, 4}},
                     {q.data(), {1, 1, 20, 4}}, {.dparameter = dparameter},
                     {.normalizer = Normalizer::parse("entmax:1.3"), .lengths = lengths});
  EXPECT_EQ(dparameter, std::vector<double>(20, 0));
}

// ---- Errors ----

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(AlphaGradient, IsRefusedByName) {
  std::vector<float> x(8), din(8);
  std::vector<double> dparameter(1), two(2);
  for (const char* name : {"softmax", "sparsemax", "entmax15", "top-k:3", "sigmoid"}) {
    const Normalizer normalizer = Normalizer::parse(name);
    const std::string text = "dparameter: given, but the normalizer is " + std::string(name) +
                             ", must be entmax:P, whose parameter has a gradient";
    EXPECT_EQ(error_of([&] {
                softmax_backward({x.data(), {8}}, {x.data(), {8}}, {din.data(), {8}},
                                 {.normalizer = normalizer}, {.dparameter = dparameter});
              }),
              text);
    EXPECT_EQ(error_of([&] {
                const View view(x.data(), {1, 1, 1, 8});
                attention_backward(view, view, view, view, {.dparameter = dparameter},
                                   {.normalizer = normalizer});
              }),
              text);
  }
  const SoftmaxOptions options{.normalizer = Normalizer::parse("entmax:1.3")};
  EXPECT_TRUE(
      error_of([&] {
        softmax_backward({x.data(), {8}}, {x.data(), {8}}, {din.data(), {8}}, options, {.dparameter = two});
      }).starts_with("dparameter: "));
  EXPECT_EQ(error_of([&] {
              const View view(x.data(), {1, 1, 1, 8});
              attention_backward(view, view, view, view, {.dparameter = two},
                                 {.normalizer = options.normalizer});
            }),
            "dparameter: 2 given, must be one per row, 1");
  std::vector<double> shared(8);
  EXPECT_EQ(error_of([&] {
              softmax_backward({shared.data(), {1, 8}}, {two.data(), {1, 8}, {0, 0}}, {shared.data(), {1, 8}},
                               options, {.dparameter = std::span(shared).first(1)});
            }),
            "dparameter: overlaps in");
}

}  // namespace
}  // namespace whet
