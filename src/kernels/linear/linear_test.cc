// linear_attention and its gradient against the quadratic formula in wider arithmetic, on every target;
// finite differences; and what must hold bit for bit.
#include <gtest/gtest.h>
#include <whet/error.h>
#include <whet/linear_attention.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "executors.h"
#include "targets.h"

namespace whet {
namespace {

// ---- Oracle: all a_ij, by plain loops ----

struct Problem {
  Shape s;
  bool causal = false;
  std::vector<std::int64_t> lengths;  // empty: all M
  std::vector<double> q, k, v, dout;

  std::int64_t visible(std::int64_t b, std::int64_t query) const {
    const std::int64_t keys = lengths.empty() ? s.M : lengths[static_cast<std::size_t>(b)];
    return causal ? std::min(keys, query + 1) : keys;
  }
};

template <typename Real>
struct Results {
  std::vector<Real> out, dq, dk, dv;
  // The sums of the gradients with every term as its absolute value: they cancel, to 0 where one key has all
  // of the weight, and round as terms of that size do.
  std::vector<Real> dq_size, dk_size, dv_size;
};

template <typename Real>
Real feature(double x) {
  return x > 0 ? static_cast<Real>(x) + 1 : std::exp(static_cast<Real>(x));
}

template <typename Real>
Real slope(double x) {
  return x > 0 ? Real{1} : std::exp(static_cast<Real>(x));
}

// phi and its derivative, of every element of an array.
template <typename Real>
struct Features {
  explicit Features(const std::vector<double>& x) {
    for (const double value : x) {
      phi.push_back(feature<Real>(value));
      dphi.push_back(slope<Real>(value));
    }
  }
  std::vector<Real> phi, dphi;
};

std::size_t index(std::int64_t a, std::int64_t size, std::int64_t b) {
  return static_cast<std::size_t>(a * size + b);
}

// Query `row` = (b, h, i) and the keys of the head from `keys` = (b, h / G, 0) on.
template <typename Real>
void add_row(const Problem& p, const Features<Real>& q, const Features<Real>& k, std::int64_t row,
             std::int64_t keys, std::int64_t visible, Results<Real>& r) {
  const Shape& s = p.s;
  std::vector<Real> a(static_cast<std::size_t>(visible));
  Real sum = 0, delta = 0, delta_size = 0;
  for (std::int64_t j = 0; j < visible; ++j) {
    Real& product = a[static_cast<std::size_t>(j)];
    for (std::int64_t d = 0; d < s.D; ++d) {
      product += q.phi[index(row, s.D, d)] * k.phi[index(keys + j, s.D, d)];
    }
    sum += product;
  }
  if (sum == 0) return;
  for (std::int64_t e = 0; e < s.E; ++e) {
    Real& out = r.out[index(row, s.E, e)];
    for (std::int64_t j = 0; j < visible; ++j) {
      out += a[static_cast<std::size_t>(j)] * static_cast<Real>(p.v[index(keys + j, s.E, e)]);
    }
    out /= sum;
    delta += out * static_cast<Real>(p.dout[index(row, s.E, e)]);
    delta_size += std::abs(out * static_cast<Real>(p.dout[index(row, s.E, e)]));
  }
  for (std::int64_t j = 0; j < visible; ++j) {
    Real da = 0, size = delta_size;
    for (std::int64_t e = 0; e < s.E; ++e) {
      const Real dout = static_cast<Real>(p.dout[index(row, s.E, e)]);
      da += dout * static_cast<Real>(p.v[index(keys + j, s.E, e)]);
      size += std::abs(dout * static_cast<Real>(p.v[index(keys + j, s.E, e)]));
      r.dv[index(keys + j, s.E, e)] += a[static_cast<std::size_t>(j)] / sum * dout;
      r.dv_size[index(keys + j, s.E, e)] += a[static_cast<std::size_t>(j)] / sum * std::abs(dout);
    }
    da = (da - delta) / sum;
    size /= sum;
    for (std::int64_t d = 0; d < s.D; ++d) {
      const std::size_t of_q = index(row, s.D, d), of_k = index(keys + j, s.D, d);
      r.dq[of_q] += da * k.phi[of_k] * q.dphi[of_q];
      r.dk[of_k] += da * q.phi[of_q] * k.dphi[of_k];
      r.dq_size[of_q] += size * k.phi[of_k] * q.dphi[of_q];
      r.dk_size[of_k] += size * q.phi[of_q] * k.dphi[of_k];
    }
  }
}

template <typename Real>
Results<Real> evaluate(const Problem& p) {
  const Shape& s = p.s;
  const std::vector<Real> of_q(p.q.size()), of_k(p.k.size()), of_v(p.v.size());
  Results<Real> r{.out = std::vector<Real>(p.dout.size()),
                  .dq = of_q,
                  .dk = of_k,
                  .dv = of_v,
                  .dq_size = of_q,
                  .dk_size = of_k,
                  .dv_size = of_v};
  const Features<Real> q(p.q), k(p.k);
  for (std::int64_t b = 0; b < s.B; ++b) {
    for (std::int64_t h = 0; h < s.H; ++h) {
      for (std::int64_t i = 0; i < s.N; ++i) {
        const std::int64_t keys = (b * s.K + h / (s.H / s.K)) * s.M;
        add_row(p, q, k, (b * s.H + h) * s.N + i, keys, p.visible(b, i), r);
      }
    }
  }
  return r;
}

// ---- The library ----

Problem draw(const Shape& s, bool causal, DType type = DType::f32, unsigned seed = 1) {
  Random random(seed);
  Problem p{.s = s, .causal = causal, .lengths = {}, .q = {}, .k = {}, .v = {}, .dout = {}};
  p.q = draw_array(random, {s.B, s.H, s.N, s.D}, type).values;
  p.k = draw_array(random, {s.B, s.K, s.M, s.D}, type).values;
  p.v = draw_array(random, {s.B, s.K, s.M, s.E}, type).values;
  p.dout = draw_array(random, {s.B, s.H, s.N, s.E}, type).values;
  return p;
}

struct Tensors {
  Tensors(const Problem& p, DType type, const Layout& layout = {})
      : q(type, {p.s.B, p.s.H, p.s.N, p.s.D}, layout),
        k(type, {p.s.B, p.s.K, p.s.M, p.s.D}, layout),
        v(type, {p.s.B, p.s.K, p.s.M, p.s.E}, layout),
        out(type, {p.s.B, p.s.H, p.s.N, p.s.E}, layout),
        dout(out.type(), out.sizes(), layout),
        dq(type, q.sizes(), layout),
        dk(type, k.sizes(), layout),
        dv(type, v.sizes(), layout) {
    q.set(p.q);
    k.set(p.k);
    v.set(p.v);
    dout.set(p.dout);
  }

  void run(const Problem& p, const Execution& execution = {}) {
    const LinearAttentionOptions options{.causal = p.causal, .lengths = p.lengths};
    linear_attention(q.view(), k.view(), v.view(), out.view(), options, execution);
    linear_attention_backward(q.view(), k.view(), v.view(), dout.view(),
                              {.dq = dq.view(), .dk = dk.view(), .dv = dv.view()}, options, execution);
  }

  Results<double> results() const {
    return {.out = out.values(),
            .dq = dq.values(),
            .dk = dk.values(),
            .dv = dv.values(),
            .dq_size = {},
            .dk_size = {},
            .dv_size = {}};
  }
  std::vector<std::vector<std::byte>> bits() const { return {out.bits(), dq.bits(), dk.bits(), dv.bits()}; }
  bool gaps_are_intact() const {
    return out.gaps_are_intact() && dq.gaps_are_intact() && dk.gaps_are_intact() && dv.gaps_are_intact();
  }

  Placed q, k, v, out, dout, dq, dk, dv;
};

// The contract of linear_attention.h.
template <typename Arithmetic>
void expect_contract(const Problem& p, const Results<double>& got, DType type) {
  using Wide = std::conditional_t<std::is_same_v<Arithmetic, float>, double, long double>;
  const Results<Wide> exact = evaluate<Wide>(p);
  const Results<Arithmetic> plain = evaluate<Arithmetic>(p);
  const double inputs = std::max(largest(p.q), largest(p.k));
  const double units = (4 + std::sqrt(static_cast<double>(p.s.D)) + inputs) * unit<Arithmetic>();
  const auto expect = [&](const std::vector<double>& values, const std::vector<Arithmetic>& of_plain,
                          const std::vector<Wide>& of_exact, double size, const char* what) {
    const double error = largest_error(of_plain, of_exact);
    ASSERT_LE(error, kPlainUnits * unit<Arithmetic>() * size) << what << " of the plain evaluation";
    expect_all_within(values, of_exact, 2 * error + units * size, type, what);
  };
  expect(got.out, plain.out, exact.out, largest(p.v), "out");
  expect(got.dq, plain.dq, exact.dq, largest(exact.dq_size), "dq");
  expect(got.dk, plain.dk, exact.dk, largest(exact.dk_size), "dk");
  expect(got.dv, plain.dv, exact.dv, largest(exact.dv_size), "dv");
}

void expect_contract(const Problem& p, DType type, const Layout& layout = {}) {
  SCOPED_TRACE(testing::Message() << "N " << p.s.N << " M " << p.s.M << " D " << p.s.D << " E " << p.s.E
                                  << " H " << p.s.H << " K " << p.s.K << (p.causal ? " causal" : ""));
  Tensors t(p, type, layout);
  t.run(p);
  EXPECT_TRUE(t.gaps_are_intact());
  type == DType::f64 ? expect_contract<double>(p, t.results(), type)
                     : expect_contract<float>(p, t.results(), type);
}

constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

// ---- Accuracy ----

// Around a strip, a chunk and several of them.
TEST(LinearAttention, HoldsAroundStripsAndChunks) {
  for_each_target([] {
    for (const std::int64_t n : {1, 2, 5, 6, 7, 12, 13, 63, 64, 65, 127, 128, 129, 200}) {
      for (const bool causal : {false, true}) {
        expect_contract(draw({.N = n, .M = n, .D = 8, .E = 8}, causal), DType::f32);
      }
    }
  });
}

TEST(LinearAttention, HoldsAroundVectorsAndPanels) {
  for_each_target([] {
    for (const std::int64_t size : {1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65}) {
      for (const bool causal : {false, true}) {
        expect_contract(draw({.N = 70, .M = 70, .D = size, .E = 5}, causal), DType::f32);
        expect_contract(draw({.N = 70, .M = 70, .D = 5, .E = size}, causal), DType::f32);
      }
    }
  });
}

TEST(LinearAttention, HoldsForTheLargestHeads) {
  for_each_target([] {
    for (const bool causal : {false, true}) {
      expect_contract(draw({.N = 7, .M = 9, .D = kMaxHeadSize, .E = 3}, causal), DType::f32);
      expect_contract(draw({.N = 7, .M = 9, .D = 3, .E = kMaxHeadSize}, causal), DType::f32);
    }
  });
}

TEST(LinearAttention, HoldsForOtherNumbersOfQueriesThanKeys) {
  for_each_target([] {
    for (const auto& [n, m] :
         {std::pair{1, 130}, {130, 1}, {70, 64}, {64, 70}, {3, 200}, {200, 65}, {65, 200}}) {
      for (const bool causal : {false, true}) {
        expect_contract(draw({.N = n, .M = m, .D = 12, .E = 20}, causal), DType::f32);
      }
    }
  });
}

TEST(LinearAttention, HoldsForEveryElementTypeAndGroupedHeads) {
  for_each_target([] {
    for (const DType type : kTypes) {
      for (const bool causal : {false, true}) {
        expect_contract(draw({.B = 2, .H = 6, .K = 2, .N = 75, .M = 80, .D = 17, .E = 10}, causal, type),
                        type);
        expect_contract(draw({.B = 1, .H = 3, .K = 1, .N = 130, .M = 67, .D = 10, .E = 17}, causal, type),
                        type);
      }
    }
  });
}

TEST(LinearAttention, HoldsForEveryLayout) {
  const Layout layouts[] = {{.order = {0, 2, 1, 3}, .padding = 3, .offset = 1},
                            {.order = {3, 2, 1, 0}},
                            {.spacing = 2, .backwards = {2, 3}},
                            {.order = {1, 0, 2, 3}, .padding = 1, .backwards = {0, 1}}};
  for_each_target([&] {
    for (const Layout& layout : layouts) {
      for (const DType type : kTypes) {
        expect_contract(draw({.B = 2, .H = 4, .K = 2, .N = 67, .M = 67, .D = 9, .E = 16}, true, type), type,
                        layout);
        expect_contract(draw({.B = 2, .H = 4, .K = 2, .N = 67, .M = 67, .D = 9, .E = 16}, false, type), type,
                        layout);
      }
    }
  });
}

TEST(LinearAttention, HoldsForLengths) {
  for_each_target([] {
    for (const bool causal : {false, true}) {
      Problem p = draw({.B = 5, .H = 2, .K = 1, .N = 140, .M = 140, .D = 7, .E = 6}, causal);
      p.lengths = {0, 1, 64, 65, 140};
      expect_contract(p, DType::f32);
    }
  });
}

// Long sums: those of a chunk by themselves, so that the error doesn't grow as that of a plain sum does.
TEST(LinearAttention, HoldsForLongSequences) {
  for_each_target([] {
    for (const bool causal : {false, true}) {
      Problem p = draw({.N = 1500, .M = 1500, .D = 4, .E = 4}, causal);
      for (double& value : p.v) value = std::abs(value);
      expect_contract(p, DType::f32);
    }
  });
}

// elu(x) + 1 in f32 is 0 below -17: phi is not.
TEST(LinearAttention, KeepsThePrecisionOfSmallFeatures) {
  for_each_target([] {
    for (const bool causal : {false, true}) {
      Problem p = draw({.N = 70, .M = 70, .D = 8, .E = 4}, causal);
      for (double& value : p.q) value = static_cast<float>(value - 25);
      for (double& value : p.k) value = static_cast<float>(value - 25);
      expect_contract(p, DType::f32);
    }
  });
}

// In f64: a step of 1e-6 leaves an error of about 1e-9.
TEST(LinearAttention, GradientsAreThoseOfFiniteDifferences) {
  for (const bool causal : {false, true}) {
    Problem p = draw({.B = 1, .H = 2, .K = 1, .N = 67, .M = 66, .D = 3, .E = 2}, causal, DType::f64);
    p.lengths = {65};
    Tensors t(p, DType::f64);
    t.run(p);
    const Results<double> got = t.results();
    const auto loss = [&] {
      Tensors moved(p, DType::f64);
      moved.run(p);
      double sum = 0;
      const std::vector<double> out = moved.out.values();
      for (std::size_t n = 0; n < out.size(); ++n) sum += out[n] * p.dout[n];
      return sum;
    };
    const auto check = [&](std::vector<double>& values, const std::vector<double>& gradient,
                           const char* what) {
      constexpr double kStep = 1e-6;
      for (std::size_t n = 0; n < values.size(); n += 7) {
        const double value = values[n];
        values[n] = value + kStep;
        const double above = loss();
        values[n] = value - kStep;
        const double below = loss();
        values[n] = value;
        ASSERT_NEAR(gradient[n], (above - below) / (2 * kStep), 1e-7) << what << n;
      }
    };
    check(p.q, got.dq, "dq");
    check(p.k, got.dk, "dk");
    check(p.v, got.dv, "dv");
  }
}

// ---- Edges ----

TEST(LinearAttention, IsZeroWithoutKeys) {
  for (const bool causal : {false, true}) {
    const Problem p = draw({.B = 2, .H = 2, .K = 1, .N = 70, .M = 0, .D = 5, .E = 3}, causal);
    Tensors t(p, DType::f32);
    t.run(p);
    EXPECT_EQ(largest(t.out.values()), 0);
    EXPECT_EQ(largest(t.dq.values()), 0);
    for (const double value : t.out.values()) EXPECT_EQ(value, 0);
    for (const double value : t.dq.values()) EXPECT_EQ(value, 0);
  }
}

TEST(LinearAttention, GivesKeysThatNobodySeesNoGradient) {
  for (const std::int64_t n : {0, 3}) {
    const Problem p = draw({.B = 1, .H = 1, .K = 1, .N = n, .M = 70, .D = 5, .E = 3}, true);
    Tensors t(p, DType::f32);
    t.run(p);
    const std::vector<double> dk = t.dk.values(), dv = t.dv.values();
    for (std::size_t i = static_cast<std::size_t>(n * 5); i < dk.size(); ++i) ASSERT_EQ(dk[i], 0);
    for (std::size_t i = static_cast<std::size_t>(n * 3); i < dv.size(); ++i) ASSERT_EQ(dv[i], 0);
  }
}

TEST(LinearAttention, IsZeroWhereEveryFeatureUnderflows) {
  Problem p = draw({.N = 3, .M = 4, .D = 5, .E = 3}, false);
  std::fill_n(p.q.begin(), 5, -1000.0);
  Tensors t(p, DType::f32);
  t.run(p);
  for (std::size_t e = 0; e < 3; ++e) EXPECT_EQ(t.out.values()[e], 0);
  for (const double value : t.dk.values()) EXPECT_TRUE(std::isfinite(value));
}

TEST(LinearAttention, TakesEmptyBatches) {
  for (const Shape& s : {Shape{.B = 0, .N = 3, .M = 3}, Shape{.H = 0, .K = 0, .N = 3, .M = 3}}) {
    const Problem p = draw(s, true);
    Tensors t(p, DType::f32);
    t.run(p);
    EXPECT_TRUE(t.gaps_are_intact());
  }
}

// One key that is seen alone has all of the weight, without rounding.
TEST(LinearAttention, FirstCausalRowIsItsValue) {
  for_each_target([] {
    const Problem p = draw({.N = 1, .M = 5, .D = 64, .E = 16}, true);
    Tensors t(p, DType::f32);
    t.run(p);
    for (std::size_t e = 0; e < 16; ++e) {
      EXPECT_NEAR(t.out.values()[e], p.v[e], 4 * 0x1p-24 * std::abs(p.v[e]));
    }
  });
}

TEST(LinearAttention, WritesOnlyWhatIsGiven) {
  const Problem p = draw({.N = 70, .M = 70, .D = 5, .E = 3}, true);
  Tensors all(p, DType::f32);
  all.run(p);
  Tensors t(p, DType::f32);
  const LinearAttentionOptions options{.causal = true};
  linear_attention_backward(t.q.view(), t.k.view(), t.v.view(), t.dout.view(), {.dq = t.dq.view()}, options);
  EXPECT_EQ(t.dq.bits(), all.dq.bits());
  linear_attention_backward(t.q.view(), t.k.view(), t.v.view(), t.dout.view(), {.dv = t.dv.view()}, options);
  EXPECT_EQ(t.dv.bits(), all.dv.bits());
  EXPECT_NE(t.dk.bits(), all.dk.bits());
}

// ---- NaN and infinities ----

// Positions of a chunk and of the next, and what may change when vector `at` of an input isn't finite.
TEST(LinearAttention, WhatIsNotFiniteReachesNoEarlierQuery) {
  for_each_target([] {
    constexpr std::int64_t kSize = 9;
    const Problem p = draw({.N = 150, .M = 150, .D = kSize, .E = kSize}, true);
    Tensors clean(p, DType::f32);
    clean.run(p);
    const Results<double> expected = clean.results();
    for (const double bad : {kNaN, kInfinity, -kInfinity}) {
      for (const std::int64_t at : {0, 4, 5, 63, 64, 100, 149}) {
        for (int which = 0; which < 3; ++which) {
          Problem broken = p;
          std::vector<double>& values = which == 0 ? broken.k : which == 1 ? broken.v : broken.q;
          values[index(at, kSize, 2)] = bad;
          Tensors t(broken, DType::f32);
          t.run(broken);
          const Results<double> got = t.results();
          const auto before = static_cast<std::ptrdiff_t>(at * kSize);
          EXPECT_TRUE(std::equal(got.out.begin(), got.out.begin() + before, expected.out.begin()));
          EXPECT_TRUE(std::equal(got.dq.begin(), got.dq.begin() + before, expected.dq.begin()));
          if (which == 2) {  // nor any other query, nor keys that it doesn't see
            const std::ptrdiff_t after = before + kSize;
            EXPECT_TRUE(std::equal(got.out.begin() + after, got.out.end(), expected.out.begin() + after));
            EXPECT_TRUE(std::equal(got.dq.begin() + after, got.dq.end(), expected.dq.begin() + after));
            EXPECT_TRUE(std::equal(got.dk.begin() + after, got.dk.end(), expected.dk.begin() + after));
            EXPECT_TRUE(std::equal(got.dv.begin() + after, got.dv.end(), expected.dv.begin() + after));
          }
          EXPECT_TRUE(!std::isnan(bad) || std::isnan(got.out[static_cast<std::size_t>(before) + 2]));
        }
      }
    }
  });
}

TEST(LinearAttention, ReadsNothingBeyondALength) {
  for (const bool causal : {false, true}) {
    Problem p = draw({.B = 1, .H = 1, .K = 1, .N = 90, .M = 90, .D = 5, .E = 3}, causal);
    p.lengths = {67};
    Tensors clean(p, DType::f32);
    clean.run(p);
    std::fill(p.k.begin() + 67 * 5, p.k.end(), kNaN);
    std::fill(p.v.begin() + 67 * 3, p.v.end(), kNaN);
    Tensors t(p, DType::f32);
    t.run(p);
    EXPECT_EQ(t.bits(), clean.bits());
  }
}

// ---- Bits ----

TEST(LinearAttention, HasTheSameBitsForEveryNumberOfThreads) {
  for_each_target([] {
    for (const bool causal : {false, true}) {
      const Problem p = draw({.B = 3, .H = 4, .K = 2, .N = 130, .M = 120, .D = 20, .E = 12}, causal);
      Tensors one(p, DType::f32);
      one.run(p, {.threads = 1});
      for (const int threads : {2, 3, 8}) {
        Tensors t(p, DType::f32);
        t.run(p, {.threads = threads});
        EXPECT_EQ(t.bits(), one.bits()) << threads << " threads";
      }
      for (const Executor::Run run : {run_backwards, run_on_new_threads}) {
        Tensors t(p, DType::f32);
        t.run(p, {.threads = 3, .executor = {.run = run}});
        EXPECT_EQ(t.bits(), one.bits());
      }
    }
  });
}

// A batch entry and head alone has the bits it has among others.
TEST(LinearAttention, HeadsDoNotDependOnEachOther) {
  const Shape s{.B = 2, .H = 4, .K = 4, .N = 70, .M = 70, .D = 6, .E = 6};
  const Problem p = draw(s, true);
  Tensors all(p, DType::f32);
  all.run(p);
  const std::size_t size = 70 * 6;
  for (std::size_t head = 0; head < 8; ++head) {
    const auto part = [&](const std::vector<double>& of) {
      const auto begin = of.begin() + static_cast<std::ptrdiff_t>(head * size);
      return std::vector(begin, begin + static_cast<std::ptrdiff_t>(size));
    };
    Problem alone = draw({.N = 70, .M = 70, .D = 6, .E = 6}, true);
    alone.q = part(p.q), alone.k = part(p.k), alone.v = part(p.v), alone.dout = part(p.dout);
    Tensors t(alone, DType::f32);
    t.run(alone);
    EXPECT_EQ(t.out.values(), part(all.out.values()));
    EXPECT_EQ(t.dk.values(), part(all.dk.values()));
  }
}

// ---- Errors ----

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(LinearAttention, ErrorsNameTheArgument) {
  const Problem p = draw({.B = 2, .H = 2, .K = 1, .N = 3, .M = 4, .D = 5, .E = 6}, false);
  Tensors t(p, DType::f32);
  const auto forward = [&](ConstView q, ConstView k, ConstView v, View out,
                           const LinearAttentionOptions& options = {}, const Execution& execution = {}) {
    return error_of([&] { linear_attention(q, k, v, out, options, execution); });
  };
  const View q = t.q.view(), k = t.k.view(), v = t.v.view(), out = t.out.view();
  EXPECT_EQ(forward(q, k, v, out), "none");
  const auto of = [](const View& view, Dims sizes) { return View(view.data, view.dtype, sizes); };
  EXPECT_EQ(forward(of(q, {2, 2, 15}), k, v, out).substr(0, 3), "q: ");
  EXPECT_EQ(forward(q, of(k, {2, 1, 5, 4}), v, out).substr(0, 3), "k: ");
  EXPECT_EQ(forward(q, k, of(v, {2, 1, 3, 8}), out).substr(0, 3), "v: ");
  EXPECT_EQ(forward(q, k, v, of(out, {2, 2, 6, 3})).substr(0, 5), "out: ");
  EXPECT_EQ(forward(q, k, v, View(t.q.view().data, DType::f32, {2, 2, 3, 6})), "out: overlaps q");
  EXPECT_EQ(forward(q, k, v, View(out.data, DType::f16, out.sizes)).substr(0, 5), "out: ");
  const std::vector<std::int64_t> per_row(12, 1), too_long = {5, 0}, negative = {-1, 0};
  EXPECT_EQ(forward(q, k, v, out, {.lengths = per_row}), "lengths: 12 given, must be one per batch entry, 2");
  EXPECT_EQ(forward(q, k, v, out, {.lengths = too_long}), "lengths: number 0 is 5, must be 0 to 4");
  EXPECT_EQ(forward(q, k, v, out, {.lengths = negative}), "lengths: number 0 is -1, must be 0 to 4");
  EXPECT_EQ(forward(q, k, v, out, {}, {.threads = -1}).substr(0, 7), "threads");
  const auto backward = [&](ConstView dout, const LinearAttentionGradients& gradients) {
    return error_of([&] { linear_attention_backward(q, k, v, dout, gradients); });
  };
  const View dout = t.dout.view();
  EXPECT_EQ(backward(dout, {}), "none");
  EXPECT_EQ(backward(of(dout, {2, 2, 6, 3}), {}).substr(0, 6), "dout: ");
  EXPECT_EQ(backward(dout, {.dq = k}).substr(0, 4), "dq: ");
  EXPECT_EQ(backward(dout, {.dk = t.dk.view(), .dv = View(t.dk.view().data, DType::f32, v.sizes)}),
            "dv: overlaps dk");
}

}  // namespace
}  // namespace whet
