// Attention over the keys of several ranks is attention over all keys: run by mpirun with any number of
// ranks, all of which run the same tests on the same random problems, and hold their part of each.
#include <gtest/gtest.h>
#include <mpi.h>
#include <whet/mpi.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "attention_runs.h"
#include "cases.h"
#include "normalizer_cases.h"
#include "shard_cases.h"

namespace whet {
namespace {

int rank() {
  int r = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  return r;
}

int ranks() {
  int n = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  return n;
}

// ---- Cuts ----

// Shares of the ranks, cut differently by `turn`: even, none for the first, all for the last, uneven.
Cuts cuts_of(std::int64_t size, int turn) {
  Cuts cuts = {0};
  for (int r = 1; r < ranks(); ++r) {
    const std::int64_t even = size * r / ranks();
    switch (turn % 4) {
      case 0:
        cuts.push_back(even);
        break;
      case 1:
        cuts.push_back(r == 1 ? 0 : even);
        break;
      case 2:
        cuts.push_back(0);
        break;
      default:
        cuts.push_back(std::max(cuts.back(), std::min(size, even + 3 * (r % 2) - 1)));
    }
  }
  cuts.push_back(size);
  return cuts;
}

std::int64_t first_of(const Cuts& cuts) { return cuts[static_cast<std::size_t>(rank())]; }
std::int64_t end_of(const Cuts& cuts) { return cuts[static_cast<std::size_t>(rank()) + 1]; }

// ---- Gathering ----

std::vector<std::vector<double>> gathered(const std::vector<double>& own) {
  const int count = static_cast<int>(own.size());
  std::vector<int> counts(static_cast<std::size_t>(ranks())), begins(counts.size());
  MPI_Allgather(&count, 1, MPI_INT, counts.data(), 1, MPI_INT, MPI_COMM_WORLD);
  int end = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) begins[r] = std::exchange(end, end + counts[r]);
  std::vector<double> all(static_cast<std::size_t>(end));
  MPI_Allgatherv(own.data(), count, MPI_DOUBLE, all.data(), counts.data(), begins.data(), MPI_DOUBLE,
                 MPI_COMM_WORLD);
  std::vector<std::vector<double>> parts;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    parts.emplace_back(all.begin() + begins[r], all.begin() + begins[r] + counts[r]);
  }
  return parts;
}

// The parts of all ranks side by side along an axis.
std::vector<double> joined(const std::vector<double>& own, const std::vector<std::int64_t>& sizes,
                           std::size_t axis, const Cuts& cuts) {
  std::int64_t inner = 1, outer = 1;
  for (std::size_t a = 0; a < sizes.size(); ++a) {
    if (a < axis) outer *= sizes[a];
    if (a > axis) inner *= sizes[a];
  }
  const std::vector<std::vector<double>> parts = gathered(own);
  std::vector<double> whole;
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const std::int64_t run = (cuts[r + 1] - cuts[r]) * inner;
      whole.insert(whole.end(), parts[r].begin() + o * run, parts[r].begin() + (o + 1) * run);
    }
  }
  return whole;
}

bool same_everywhere(const std::vector<double>& values) {
  const std::vector<std::vector<double>> all = gathered(values);
  return std::ranges::all_of(all, [&](const auto& other) { return same_bits(other, all.front()); });
}

// Failures of one rank are those of all, so that none waits for a rank that has given up.
bool any_failed() {
  const int own = testing::Test::HasFailure() ? 1 : 0;
  int any = 0;
  MPI_Allreduce(&own, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return any != 0;
}

// ---- The two schemes ----

struct Found {
  std::vector<double> out, betas;
  std::unique_ptr<AttentionCall> gradients;  // in the arrays of a call over everything
};

struct Way {
  std::size_t keep_logits = std::size_t{1} << 28;
  bool with_rows = true;
  BetaGradient mode = BetaGradient::through_rule;
  std::string normalizer = "softmax";
};

std::vector<double> betas_of(const mpi::Rows& rows) {
  std::vector<double> betas;
  for (const WeighedRow& row : rows.weighed) betas.push_back(row.beta);
  return betas;
}

// Keys in place.
Found over_keys(const oracle::Attention& p, DType type, const Cuts& keys, const Way& way = {}) {
  AttentionCall own(with_keys(p, first_of(keys), end_of(keys)), type, arithmetic_type(type));
  own.options.normalizer = Normalizer::parse(way.normalizer);
  const mpi::Ranks where{.keep_logits = way.keep_logits};
  mpi::Rows rows;
  mpi::attention(own.q.view(), own.k.view(), own.v.view(), own.out.view(), own.options, where, &rows,
                 own.execution);
  EXPECT_TRUE(own.out.gaps_are_intact());
  mpi::attention_backward(own.q.view(), own.k.view(), own.v.view(), own.dout.view(), own.gradients(),
                          own.options, way.mode, where, way.with_rows ? &rows : nullptr, own.execution);
  Found found{own.out.values(), betas_of(rows),
              std::make_unique<AttentionCall>(p, type, arithmetic_type(type))};
  AttentionCall& all = *found.gradients;
  EXPECT_TRUE(same_everywhere(found.out));
  EXPECT_TRUE(same_everywhere(found.betas));
  EXPECT_TRUE(same_everywhere(own.dq.values()));
  all.dq.set(own.dq.values());
  if (p.sinks.given()) all.dsinks.set(own.dsinks.values());
  if (p.query_scale.given()) all.dquery_scale.set(own.dquery_scale.values());
  all.dk.set(joined(own.dk.values(), p.k.sizes, 2, keys));
  all.dv.set(joined(own.dv.values(), p.v.sizes, 2, keys));
  if (!p.bias.given()) return found;
  if (p.bias.sizes[3] != 1) {
    all.dbias.set(joined(own.dbias.values(), p.bias.sizes, 3, keys));
  } else {  // each rank has that of its own keys
    std::vector<double> sum(own.dbias.values().size());
    for (const std::vector<double>& part : gathered(own.dbias.values())) {
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    all.dbias.set(sum);
  }
  return found;
}

// Queries cut as well. Bias and mask of these queries and all keys.
Found round_the_ring(const oracle::Attention& p, DType type, const Cuts& keys, const Cuts& queries,
                     const Way& way = {}) {
  const oracle::Attention mine = with_queries(p, first_of(queries), end_of(queries));
  AttentionCall own(mine, type, arithmetic_type(type));
  own.options.normalizer = Normalizer::parse(way.normalizer);
  const std::vector<double> k = with_keys(p, first_of(keys), end_of(keys)).k.values,
                            v = with_keys(p, first_of(keys), end_of(keys)).v.values;
  const std::int64_t M = end_of(keys) - first_of(keys);
  Placed own_k(type, {p.B, p.K, M, p.D}), own_v(type, {p.B, p.K, M, p.E});
  Placed own_dk(type, {p.B, p.K, M, p.D}), own_dv(type, {p.B, p.K, M, p.E});
  own_k.set(k);
  own_v.set(v);
  const mpi::Ranks where{.keep_logits = way.keep_logits};
  mpi::Rows rows;
  mpi::ring_attention(own.q.view(), own_k.view(), own_v.view(), own.out.view(), own.options, where, &rows,
                      own.execution);
  AttentionGradients gradients = own.gradients();
  gradients.dk = own_dk.view();
  gradients.dv = own_dv.view();
  mpi::ring_attention_backward(own.q.view(), own_k.view(), own_v.view(), own.dout.view(), gradients,
                               own.options, way.mode, where, way.with_rows ? &rows : nullptr, own.execution);
  for (const Placed* written : {&own.out, &own.dq}) EXPECT_TRUE(written->gaps_are_intact());
  Found found{joined(own.out.values(), p.dout.sizes, 2, queries),
              joined(betas_of(rows), {p.B, p.H, p.N}, 2, queries),
              std::make_unique<AttentionCall>(p, type, arithmetic_type(type))};
  AttentionCall& all = *found.gradients;
  all.dq.set(joined(own.dq.values(), p.q.sizes, 2, queries));
  all.dk.set(joined(own_dk.values(), p.k.sizes, 2, keys));
  all.dv.set(joined(own_dv.values(), p.v.sizes, 2, keys));
  if (p.sinks.given()) all.dsinks.set(own.dsinks.values());
  const auto is_cut = [](const oracle::Array& array) { return array.sizes[2] != 1; };
  if (p.query_scale.given()) {
    all.dquery_scale.set(is_cut(p.query_scale)
                             ? joined(own.dquery_scale.values(), p.query_scale.sizes, 2, queries)
                             : own.dquery_scale.values());
  }
  if (!p.bias.given()) return found;
  if (is_cut(p.bias)) {
    all.dbias.set(joined(own.dbias.values(), p.bias.sizes, 2, queries));
  } else {  // each rank has that of its own queries
    std::vector<double> sum(own.dbias.values().size());
    for (const std::vector<double>& part : gathered(own.dbias.values())) {
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    all.dbias.set(sum);
  }
  return found;
}

template <typename Arithmetic>
void expect_in(const oracle::Attention& p, DType type, const Found& found, BetaGradient mode) {
  using Real = typename Contract<Arithmetic>::Real;
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, found.betas);
  expect_output<Arithmetic>(p, exact, found.out, type);
  const bool through_rule = mode == BetaGradient::through_rule;
  ExpectedGradients<Arithmetic>(p, exact, through_rule, {.times = 4, .units = 16}).expect(*found.gradients);
}

// Of one rank only, since all have the same: the oracle takes longer than everything else.
void expect(const oracle::Attention& p, DType type, const Found& found, BetaGradient mode, int turn) {
  if (turn % ranks() == rank()) {
    type == DType::f64 ? expect_in<double>(p, type, found, mode) : expect_in<float>(p, type, found, mode);
  }
}

void check(const oracle::Attention& p, DType type, int turn, const Way& way = {}) {
  const Cuts keys = cuts_of(p.M, turn), queries = cuts_of(p.N, turn / 2 + 1);
  SCOPED_TRACE("keys " + testing::PrintToString(keys) + ", queries " + testing::PrintToString(queries) +
               ", " + name_of(type) + ", rule " + library_rule(p.rules[0]).name());
  {
    SCOPED_TRACE("keys in place");
    expect(p, type, over_keys(p, type, keys, way), way.mode, turn);
  }
  if (p.lengths.size() == static_cast<std::size_t>(p.rows()) && p.rows() != p.B) return;  // of rows: refused
  SCOPED_TRACE("ring");
  expect(p, type, round_the_ring(p, type, keys, queries, way), way.mode, turn + 1);
}

// ---- Tests ----

TEST(Mpi, GivesAttentionForEveryRule) {
  const std::vector<RuleCase> rules = rule_cases();
  for (std::size_t n = 0; n < rules.size() && !any_failed(); ++n) {
    Random random(1);
    const DType type = kTypes[n % 4];
    oracle::Attention p = draw_problem(random, {1, 4, 2, n % 3 == 0 ? 1 : 9, 61, 5, 3}, type);
    p.rules = {rules[n].plain};
    check(p, type, static_cast<int>(n),
          {.mode = n % 5 == 0 ? BetaGradient::held : BetaGradient::through_rule});
  }
}

TEST(Mpi, GivesAttentionForEveryOption) {
  const std::vector<RuleCase> rules = rule_cases();
  int turn = 0;
  for (const OptionCase& option : option_cases()) {
    if (option.name.starts_with("packed")) continue;  // can't be cut
    if (any_failed()) return;
    Random random(2);
    turn += 7;
    const DType type = kTypes[turn % 4];
    oracle::Attention p = draw_with(option, random, {2, 4, 2, 9, 41, 5, 3}, type, arithmetic_type(type));
    if (p.rules.size() == 1) p.rules = {rules[static_cast<std::size_t>(turn) % rules.size()].plain};
    SCOPED_TRACE(option.name);
    check(p, type, turn);
  }
}

// Whatever room logits have: none, that of a few queries, all. And with nothing left of forward.
TEST(Mpi, GivesTheSameWithoutLogitsKept) {
  for (const RuleCase& rule : {paper_case(), rule_cases()[11]}) {
    Random random(3);
    oracle::Attention p = draw_problem(random, {1, 4, 2, 40, 61, 5, 3}, DType::f32);
    p.rules = {rule.plain};
    p.causal = true;
    p.align = Align::end;
    p.bias = draw_array(random, {1, 1, 40, 61}, DType::f32);
    for (const std::size_t bytes : {0, 4 * 61 * 4 * 14}) {
      if (any_failed()) return;
      check(p, DType::f32, 3, {.keep_logits = bytes, .with_rows = false});
    }
    const Cuts keys = cuts_of(61, 0), queries = cuts_of(40, 0);
    EXPECT_TRUE(same_bits(over_keys(p, DType::f32, keys, {.keep_logits = 0}).out,
                          over_keys(p, DType::f32, keys).out));
    EXPECT_TRUE(same_bits(round_the_ring(p, DType::f32, keys, queries, {.keep_logits = 0}).out,
                          round_the_ring(p, DType::f32, keys, queries).out));
  }
}

// More than every rank takes whole: each merges its share of the rows.
TEST(Mpi, GivesAttentionOfManyRows) {
  for (const RuleCase& rule : {rule_cases()[0], paper_case(), rule_cases()[12]}) {
    SCOPED_TRACE("rule " + rule.rule.name());
    Random random(4);
    oracle::Attention p = draw_problem(random, {1, 4, 2, 150, 300, 64, 64}, DType::f32);
    p.q = draw_array(random, p.q.sizes, DType::f32, 0.5);
    p.rules = {rule.plain};
    AttentionCall whole(p, DType::f32, DType::f32);
    whole.forward();
    whole.backward();
    const Cuts keys = cuts_of(p.M, 3), queries = cuts_of(p.N, 3);
    Found in_place = over_keys(p, DType::f32, keys), ring = round_the_ring(p, DType::f32, keys, queries);
    for (const Found* found : {&in_place, &ring}) {
      SCOPED_TRACE(found == &ring ? "ring" : "keys in place");
      AttentionCall& gradients = *found->gradients;
      const auto expect_near = [](const std::vector<double>& got, const std::vector<double>& wanted,
                                  const char* name) {
        ASSERT_EQ(got.size(), wanted.size());
        double difference = 0;
        for (std::size_t i = 0; i < got.size(); ++i)
          difference = std::max(difference, std::abs(got[i] - wanted[i]));
        EXPECT_LE(difference, 2e-5 * largest(wanted)) << name;
      };
      expect_near(found->out, whole.out.values(), "out");
      expect_near(gradients.dq.values(), whole.dq.values(), "dq");
      expect_near(gradients.dk.values(), whole.dk.values(), "dk");
      expect_near(gradients.dv.values(), whole.dv.values(), "dv");
    }
  }
}

TEST(Mpi, RepeatsItsBits) {
  Random random(5);
  oracle::Attention p = draw_problem(random, {1, 2, 1, 20, 90, 5, 3}, DType::f32);
  p.rules = {rule_cases()[11].plain};
  const Cuts keys = cuts_of(p.M, 3), queries = cuts_of(p.N, 0);
  const Found first = over_keys(p, DType::f32, keys), again = over_keys(p, DType::f32, keys);
  EXPECT_TRUE(same_bits(first.out, again.out));
  EXPECT_TRUE(same_bits(first.gradients->dq.values(), again.gradients->dq.values()));
  const Found round = round_the_ring(p, DType::f32, keys, queries),
              round_again = round_the_ring(p, DType::f32, keys, queries);
  EXPECT_TRUE(same_bits(round.out, round_again.out));
  EXPECT_TRUE(same_bits(round.gradients->dk.values(), round_again.gradients->dk.values()));
}

TEST(Mpi, TakesHardMaximum) {
  for (const std::int64_t N : {1, 9}) {
    Random random(6);
    oracle::Attention p = draw_problem(random, {1, 2, 1, N, 40, 5, 3}, DType::f32);
    for (std::size_t d = 0; d < 5; ++d) p.k.values[5 * 39 + d] = p.k.values[5 * 3 + d];  // a tie, far apart
    AttentionCall whole(p, DType::f32, DType::f32);
    whole.options.normalizer = Normalizer::parse("hard");
    whole.forward();
    for (int turn = 0; turn < 4; ++turn) {
      const Cuts keys = cuts_of(p.M, turn), queries = cuts_of(N, turn);
      AttentionCall own(with_keys(p, first_of(keys), end_of(keys)), DType::f32, DType::f32);
      own.options.normalizer = Normalizer::parse("hard");
      mpi::attention(own.q.view(), own.k.view(), own.v.view(), own.out.view(), own.options);
      AttentionCall part(with_queries(p, first_of(queries), end_of(queries)), DType::f32, DType::f32);
      part.options.normalizer = Normalizer::parse("hard");
      mpi::ring_attention(part.q.view(), own.k.view(), own.v.view(), part.out.view(), part.options);
      const std::vector<double> wanted = whole.out.values(), got = own.out.values(),
                                round = joined(part.out.values(), p.dout.sizes, 2, queries);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_NEAR(got[i], wanted[i], 1e-6) << i;
        EXPECT_NEAR(round[i], wanted[i], 1e-6) << i;
      }
    }
  }
}

// Rows with a threshold, beside the oracle at the betas found; times the largest of them, since the rounding
// of a logit moves a weight as much.
void expect_with_threshold(const oracle::Attention& p, DType type, Found found, const Way& way) {
  double largest_beta = 1;
  for (const double beta : found.betas) largest_beta = std::max(largest_beta, beta);
  const Expected expected =
      whet::expect(way.normalizer, p, found.betas, way.mode == BetaGradient::through_rule);
  const oracle::Gradients<double>& g = expected.gradients;
  AttentionCall& got = *found.gradients;
  expect_near(found.out, expected.out, type, "out", largest_beta);
  expect_near(got.dq.values(), g.dq, type, "dq", largest_beta);
  expect_near(got.dk.values(), g.dk, type, "dk", largest_beta);
  expect_near(got.dv.values(), g.dv, type, "dv", largest_beta);
  if (p.sinks.given()) expect_near(got.dsinks.values(), g.dsinks, type, "dsinks", largest_beta);
}

TEST(Mpi, GivesAttentionOfRowsWithAThreshold) {
  const std::string names[] = {"sparsemax", "entmax15", "entmax:1.3"};
  const std::vector<RuleCase> rules = rule_cases();
  for (std::size_t n = 0; n < rules.size() && !any_failed(); ++n) {
    Random random(10);
    const DType type = kTypes[n % 4];
    const bool many = n % 3 == 0;
    oracle::Attention p = draw_problem(random, {1, 4, 2, many ? 40 : n % 3 == 1 ? 9 : 1, 61, 5, 3}, type);
    p.rules = {rules[n].plain};
    p.causal = n % 2 == 0;
    p.align = Align::end;
    if (n % 4 < 2) p.sinks = draw_array(random, {4}, arithmetic_type(type), 2);
    const Way way{.keep_logits = many         ? std::size_t{0}
                                 : n % 3 == 1 ? 4 * 61 * 4 * 14
                                              : std::size_t{1} << 28,
                  .with_rows = n % 2 == 0,
                  .mode = n % 5 == 0 ? BetaGradient::held : BetaGradient::through_rule,
                  .normalizer = names[n / 2 % 3]};
    const int turn = static_cast<int>(n);
    const Cuts keys = cuts_of(p.M, turn), queries = cuts_of(p.N, turn / 2 + 1);
    SCOPED_TRACE(way.normalizer + ", keys " + testing::PrintToString(keys) + ", " + name_of(type) +
                 ", rule " + rules[n].rule.name());
    {
      SCOPED_TRACE("keys in place");
      expect_with_threshold(p, type, over_keys(p, type, keys, way), way);
    }
    SCOPED_TRACE("ring");
    expect_with_threshold(p, type, round_the_ring(p, type, keys, queries, way), way);
  }
}

// A sink of NaN or +inf breaks rows with a visible key, wherever that is, and doesn't exist for others. So
// does a broken key.
TEST(Mpi, BreaksTheRowsThatAttentionBreaks) {
  int turn = 0;
  for (const RuleCase& rule : {rule_cases()[0], rule_cases()[1], paper_case(), rule_cases()[11]}) {
    for (const double sink : {kNaN, kInfinity, 1.0}) {
      Random random(7);
      oracle::Attention p = draw_problem(random, {1, 1, 1, 4, 20, 5, 3}, DType::f32);
      p.rules = {rule.plain};
      p.sinks = {{1}, {sink}};
      p.mask = {{1, 1, 4, 20}, std::vector<double>(80, 0)};
      p.mask.values[p.mask.position({0, 0, 0, 19})] = 1;
      for (std::int64_t j = 8; j < 12; ++j) p.mask.values[p.mask.position({0, 0, 1, j})] = 1;
      for (std::int64_t j = 0; j < 3; ++j) p.mask.values[p.mask.position({0, 0, 2, j})] = 1;
      p.k.values[0] = kNaN;
      const std::vector<double> whole = run(p, DType::f32).out;
      const Cuts keys = cuts_of(20, turn), queries = cuts_of(4, turn + 1);
      ++turn;
      SCOPED_TRACE("sink " + std::to_string(sink) + ", rule " + rule.rule.name() + ", keys " +
                   testing::PrintToString(keys));
      const std::vector<double> out = over_keys(p, DType::f32, keys).out,
                                ring = round_the_ring(p, DType::f32, keys, queries).out;
      for (std::size_t i = 0; i < 12; ++i) {
        EXPECT_EQ(std::isnan(out[i]), std::isnan(whole[i])) << "element " << i;
        EXPECT_EQ(std::isnan(ring[i]), std::isnan(whole[i])) << "element " << i;
        EXPECT_TRUE(i < 9 || (out[i] == 0 && ring[i] == 0)) << "element " << i;
      }
    }
  }
}

// ---- Errors ----

// A call of which some ranks change something.
struct Errors : testing::Test {
  Errors()
      : p([] {
          Random random(8);
          return draw_problem(random, {1, 2, 1, 4, 5, 3, 2}, DType::f32);
        }()),
        call(p, DType::f32, DType::f32) {
    q = call.q.view(), k = call.k.view(), v = call.v.view(), out = call.out.view();
    options = call.options;
  }

  // The same on all ranks, and nothing written.
  void expect(const std::string& text) {
    for (const bool ring : {false, true}) {
      std::string message = "no error";
      try {
        (ring ? mpi::ring_attention : mpi::attention)(q, k, v, out, options, {}, nullptr, {});
      } catch (const Error& e) {
        message = e.what();
      }
      EXPECT_EQ(message, text) << (ring ? "ring" : "keys in place");
    }
    EXPECT_TRUE(call.out.gaps_are_intact());
    for (const double value : call.out.values()) EXPECT_TRUE(std::isnan(value));  // as it was
  }

  oracle::Attention p;
  AttentionCall call;
  ConstView q, k, v;
  View out;
  AttentionOptions options;
};

TEST_F(Errors, NameTheArgumentAndTheRank) {
  if (ranks() == 1) GTEST_SKIP() << "needs ranks that differ";
  const bool last = rank() == ranks() - 1;
  const std::string number = std::to_string(ranks() - 1);
  if (last) options.rule = Rule::paper();
  expect("rule: is paper on rank " + number + " and none on rank 0, must fit");
  options.rule = Rule();
  if (last) options.causal = true;
  expect("causal: is true on rank " + number + " and false on rank 0, must fit");
  options.causal = false;
  if (last) options.scale = 0.1;
  expect("scale: is 0.1 on rank " + number + " and 1 / sqrt(D) on rank 0, must fit");
  options.scale = {};
  const std::vector<std::int64_t> lengths = {last ? 4 : 3};
  options.lengths = lengths;
  expect("lengths: is 4 on rank " + number + " and 3 on rank 0, must fit");
}

TEST_F(Errors, OfTypesAndSizes) {
  if (ranks() == 1) GTEST_SKIP() << "needs ranks that differ";
  const std::string number = std::to_string(ranks() - 1);
  const bool last = rank() == ranks() - 1;
  const AttentionCall wide(p, DType::f64, DType::f64);
  AttentionCall other(p, DType::f64, DType::f64);
  if (last) q = other.q.view(), k = other.k.view(), v = other.v.view();
  if (last) {
    out = other.out.view();
  }
  std::string message = "no error";
  try {
    mpi::attention(q, k, v, out, options);
  } catch (const Error& e) {
    message = e.what();
  }
  EXPECT_EQ(message,
            "q: is f64 (1, 2, 4, 3) on rank " + number + " and f32 (1, 2, 4, 3) on rank 0, must fit");
}

// What is wrong on one rank alone is told on all.
TEST_F(Errors, OfOneRankReachAll) {
  const std::string number = std::to_string(ranks() - 1);
  if (rank() == ranks() - 1) options.softcap = -1;
  expect("softcap: is -1, must be 0 (none) or finite and at least 1.1754943508222875e-38 (rank " + number +
         ")");
  options.softcap = 0;
  options.normalizer = Normalizer::parse("top-k:3");
  expect("normalizer: is top-k:3, which can't be merged from shards of keys (rank 0)");
}

TEST_F(Errors, OfLengthsBeyondAllKeys) {
  const std::vector<std::int64_t> lengths = {5 * ranks() + 1};
  options.lengths = lengths;
  std::string message = "no error";
  try {
    mpi::attention(q, k, v, out, options);
  } catch (const Error& e) {
    message = e.what();
  }
  EXPECT_EQ(message, "lengths: number 0 is " + std::to_string(lengths[0]) + ", must be 0 to " +
                         std::to_string(5 * ranks()));
}

TEST_F(Errors, OfTheCommunicator) {
  std::string message = "no error";
  try {
    mpi::attention(q, k, v, out, options, {.comm = MPI_COMM_NULL});
  } catch (const Error& e) {
    message = e.what();
  }
  EXPECT_EQ(message, "comm: is MPI_COMM_NULL, must be a communicator");
}

// A communicator of some ranks: the others take no part, and messages of the caller stay apart.
TEST(Mpi, RunsOnAnyCommunicator) {
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank() % 2, -rank(), &half);
  int size = 0, own = 0;
  MPI_Comm_size(half, &size);
  MPI_Comm_rank(half, &own);
  Random random(9);
  const oracle::Attention p = draw_problem(random, {1, 2, 1, 9, 10 * size, 5, 3}, DType::f32);
  AttentionCall whole(p, DType::f32, DType::f32),
      part(with_keys(p, 10 * own, 10 * own + 10), DType::f32, DType::f32);
  whole.options.rule = part.options.rule = Rule::paper();
  whole.outputs.saved = {};
  whole.forward();
  for (int turn = 0; turn < 2; ++turn) {
    mpi::attention(part.q.view(), part.k.view(), part.v.view(), part.out.view(), part.options,
                   {.comm = half});
    const std::vector<double> got = part.out.values(), wanted = whole.out.values();
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-6);
  }
  MPI_Comm_free(&half);
}

// Only the first rank tells what passes; failures are told by those that have them.
class QuietPrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank(),
                 result.file_name() == nullptr ? "" : result.file_name(), result.line_number(),
                 result.message());
  }
};

}  // namespace
}  // namespace whet

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  if (whet::rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new whet::QuietPrinter);
  }
  int failed = RUN_ALL_TESTS(), any = 0;
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
