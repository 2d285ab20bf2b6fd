// Keys round the ring: every rank has its own queries, and the keys of all ranks come by, in the order of
// this rank, the one before it, and so on. Outputs add up in that order, in float64; the only exchange
// between rows is that of a search, whether any rank still needs a lap.
//
//     rules none and fixed    one lap of keys and values, partial outputs measured from their own maximum
//     others                  a lap of keys: states; searches: a lap of keys per step; a lap of both: weights
//                             With logits kept the steps need no lap, and the last one carries values alone.
//     rows with a threshold   the same for all rules; its search has steps, too
//     backward                where beta follows the logits, or there is a threshold, a lap: sums. Then one
//                             on which dk and dv go along.
#include <whet/error.h>
#include <whet/mpi.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "mpi/agreement.h"
#include "mpi/elements.h"
#include "mpi/group.h"
#include "mpi/ring.h"
#include "mpi/rows.h"

namespace whet::mpi {
namespace {

constexpr std::size_t kQueryAxis = 2, kKeyAxis = 3;  // of bias and mask

// A call, once all ranks agree on it. problem.k and problem.v are those of this rank.
struct Call {
  const Group& group;
  Problem problem;
  Cuts cuts;
  bool keeps_logits;

  Shard shard(int source) const {
    return {.first_key = cuts.keys.first(source),
            .all_keys = cuts.keys.all(),
            .first_query = cuts.queries.first(group.rank()),
            .all_queries = cuts.queries.all()};
  }
  // The problem with the keys of another rank.
  Problem with(int source, const ConstView& k, const ConstView& v, const Execution& execution) const {
    Problem p = problem;
    const std::int64_t first = cuts.keys.first(source), count = k.sizes[2];
    p.k = k;
    p.v = v;
    p.execution = execution;
    p.options.bias = cut_if_long(problem.options.bias, kKeyAxis, first, count);
    p.options.mask = cut_if_long(problem.options.mask, kKeyAxis, first, count);
    return p;
  }
};

// ---- Arguments ----

Fields fields_of(const char* function, const Problem& p, const ConstView& out, const char* out_name) {
  Fields fields;
  fields.add("call", std::string(function));
  fields.add("q", p.q, 2);
  fields.add("k", p.k, 2);
  fields.add("v", p.v, 2);
  fields.add(out_name, out, 2);
  fields.add("query_scale", is_given(p.options.query_scale));
  fields.add("bias", is_given(p.options.bias));
  fields.add("mask", is_given(p.options.mask));
  fields.add(p.options);
  return fields;
}

void check_lengths(const Problem& p) {
  const std::size_t given = p.options.lengths.size();
  if (given == 0 || p.q.sizes.size() != 4 || given == static_cast<std::size_t>(p.q.sizes[0])) return;
  throw Error("lengths: " + std::to_string(given) + " given, must be one per batch entry, " +
              std::to_string(p.q.sizes[0]));
}

// As check_shard(), of this rank's queries and some keys.
using Check = std::function<void(const ConstView& k, const ConstView& v, const Shard& shard,
                                 const AttentionOptions& options)>;

// Twice, since only the first time says how many keys bias and mask must have.
Cuts agreed_cuts(const Group& group, const Problem& p, const Fields& fields, const Check& check_call) {
  AttentionOptions without = p.options;
  without.bias = {};
  without.mask = {};
  const auto first = [&](const Shard& shard) {
    check_lengths(p);
    check_call(p.k, p.v, shard, without);
  };
  const std::string wrong = problem_of(first, p.k, p.options);
  const Cuts cuts =
      agree(group, fields, wrong, wrong.empty() ? p.k.sizes[2] : 0, wrong.empty() ? p.q.sizes[2] : 0);
  const std::int64_t keys = cuts.keys.all();
  static constexpr double kZero = 0;
  const auto all = [&](const ConstView& like) {
    return ConstView(&kZero, like.dtype, Dims{like.sizes[0], like.sizes[1], keys, like.sizes[3]},
                     Dims{0, 0, 0, 0});
  };
  const auto second = [&](const Shard&) {
    check_call(all(p.k), all(p.v),
               {.first_key = 0,
                .all_keys = keys,
                .first_query = cuts.queries.first(group.rank()),
                .all_queries = cuts.queries.all()},
               p.options);
  };
  if (!is_given(p.options.bias) && !is_given(p.options.mask) && p.options.lengths.empty()) return cuts;
  agree(group, {}, problem_of(second, p.k, {}), 0, 0);
  return cuts;
}

bool keeps_logits(const Problem& p, const Cuts& cuts, std::size_t budget) {
  if (!p.searches() && !p.has_threshold()) return false;
  const auto all = static_cast<double>(p.q.sizes[0] * p.heads()) *
                   static_cast<double>(cuts.queries.largest()) * static_cast<double>(cuts.keys.all()) *
                   static_cast<double>(bytes_of(p.arithmetic()));
  return all <= static_cast<double>(budget);
}

// ---- Forward ----

// Outputs of this rank's rows as shards add to them.
class Accumulator {
 public:
  explicit Accumulator(const Problem& p)
      : size_(static_cast<std::size_t>(p.value_size())),
        dtype_(p.arithmetic()),
        sums_(static_cast<std::size_t>(p.rows()) * size_) {}

  std::span<double> row(std::size_t i) { return std::span(sums_).subspan(i * size_, size_); }

  void add(Records<WeighedHeader>& records, Rows& rows) {
    for (std::size_t i = 0; i < rows.masses.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      rows.masses[i] += records.header(index).mass;
      add_outs(dtype_, records.out(index), 1, row(i));
    }
  }

  // Measured anew from the larger maximum.
  void add(const Problem& p, Records<PartialHeader>& records, std::span<const double> betas, Rows& rows) {
    for (std::size_t i = 0; i < rows.masses.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      const PartialHeader& part = records.header(index);
      const RowState merged = merge(rows.states[i], part.state);
      const double earlier = share_of(rows.states[i], merged, betas[i], p.is_hard());
      const double share = share_of(part.state, merged, betas[i], p.is_hard());
      if (rows.masses[i] != 0) {
        rows.masses[i] *= earlier;
        for (double& sum : row(i)) sum *= earlier;
      }
      if (part.mass != 0) {
        rows.masses[i] += share * part.mass;
        add_outs(dtype_, records.out(index), share, row(i));
      }
      rows.states[i] = merged;
    }
  }

  void finish(Rows& rows) {
    const std::size_t bytes = size_ * bytes_of(dtype_);
    for (std::size_t i = 0; i < rows.masses.size() && bytes > 0; ++i) {
      normalise(dtype_, row(i), rows.masses[i], rows.out.data() + i * bytes);
    }
  }

 private:
  std::size_t size_;
  DType dtype_;
  std::vector<double> sums_;
};

// Rows without keys are 0 whatever their sink, and broken ones NaN.
void settle(const Problem& p, Accumulator& sums, Rows& rows) {
  for (std::size_t i = 0; i < rows.states.size(); ++i) {
    const RowState& state = rows.states[i];
    const double beta = p.rule(static_cast<std::int64_t>(i)).beta(state), mean = state.t / state.z;
    rows.weighed[i] = {state.max, beta, std::isnan(mean) ? 0 : mean};
    if (state.count > 0 && !std::isnan(beta)) continue;
    rows.masses[i] = state.count > 0 ? beta : 0;
    std::ranges::fill(sums.row(i), rows.masses[i]);
  }
}

Rows forward_in_one_lap(const Call& call, Ring& ring) {
  Rows rows = empty_rows(call.problem);
  Accumulator sums(call.problem);
  const std::vector<double> betas = known_betas(call.problem);
  Records<PartialHeader> records(call.problem);
  ring.lap({}, [&](int source, const ConstView& k, const ConstView& v, const Execution& execution) {
    compute_partial(call.with(source, k, v, execution), call.shard(source), betas, records);
    sums.add(call.problem, records, betas, rows);
  });
  settle(call.problem, sums, rows);
  sums.finish(rows);
  return rows;
}

// The logits of this rank's queries and the keys of each, if they are kept.
std::vector<Array> room_for_logits(const Call& call) {
  std::vector<Array> logits;
  const Problem& p = call.problem;
  for (const std::int64_t keys : call.cuts.keys.sizes) {
    logits.push_back(call.keeps_logits ? Array(p.arithmetic(), {p.q.sizes[0], p.heads(), p.queries(), keys})
                                       : Array());
  }
  return logits;
}

Shard shard_with(const Call& call, int source, std::vector<Array>& logits) {
  Shard shard = call.shard(source);
  if (call.keeps_logits) shard.logits = logits[static_cast<std::size_t>(source)].view();
  return shard;
}

Rows forward_in_laps(const Call& call, Ring& ring) {
  Rows rows = empty_rows(call.problem);
  std::vector<Array> logits = room_for_logits(call);
  std::vector<RowState> states(rows.states.size());
  ring.lap({.values = false},
           [&](int source, const ConstView& k, const ConstView& v, const Execution& execution) {
             const Problem p = call.with(source, k, v, execution);
             shard_states(p.q, p.k, shard_with(call, source, logits), states, p.options, p.execution);
             for (std::size_t i = 0; i < states.size(); ++i)
               rows.states[i] = merge(rows.states[i], states[i]);
           });
  // `of`: shard_sums or shard_threshold_sums.
  const auto add_up = [&](auto of, std::span<const RowScale> at, auto sums) {
    std::vector<typename decltype(sums)::value_type> part(sums.size());
    const auto add_sums = [&](int source, const ConstView& k, const ConstView& v,
                              const Execution& execution) {
      const Problem p = call.with(source, k, v, execution);
      of(p.q, p.k, shard_with(call, source, logits), at, part, p.options, p.execution);
      for (std::size_t i = 0; i < part.size(); ++i) sums[i] = whet::add(sums[i], part[i]);
    };
    if (!call.keeps_logits) return ring.lap({.values = false}, add_sums);
    for (int source = 0; source < call.group.size(); ++source) {
      add_sums(source, ring.no_keys(source), {}, call.problem.execution);
    }
  };
  const auto sums_at = [&](std::span<const RowScale> at, std::span<RowSums> sums) {
    add_up(shard_sums, at, sums);
  };
  const auto threshold_sums_at = [&](std::span<const RowScale> at, std::span<ThresholdSums> sums) {
    add_up(shard_threshold_sums, at, sums);
  };
  const auto any_left = [&](bool here) {
    if (call.keeps_logits) return here;
    const int left = here ? 1 : 0;
    return std::ranges::any_of(call.group.gather<int>(std::span(&left, 1)),
                               [](int other) { return other != 0; });
  };
  choose_betas(call.problem, rows, sums_at, any_left);
  choose_thresholds(call.problem, rows, threshold_sums_at, any_left);
  Accumulator sums(call.problem);
  Records<WeighedHeader> records(call.problem);
  const std::vector<RowScale> scales = scales_of(rows);
  ring.lap({.keys = !call.keeps_logits}, [&](int source, const ConstView& k, const ConstView& v,
                                             const Execution& execution) {
    compute_weighed(call.with(source, k, v, execution), shard_with(call, source, logits), scales, records);
    sums.add(records, rows);
  });
  sums.finish(rows);
  return rows;
}

Rows forward(const Call& call, Ring& ring) {
  return call.problem.is_one_pass() ? forward_in_one_lap(call, ring) : forward_in_laps(call, ring);
}

// ---- Backward ----

// 16-bit arrays as f32, so that parts of a sum aren't rounded on their way.
struct Widened {
  explicit Widened(const Problem& p)
      : q(Array::copy(p.q, true)),
        k(Array::copy(p.k, true)),
        v(Array::copy(p.v, true)),
        query_scale(side(p.options.query_scale)),
        bias(side(p.options.bias)),
        sinks(side(p.options.sinks)) {}
  static Array side(const ConstView& view) { return is_given(view) ? Array::copy(view, true) : Array(); }

  Array q, k, v, query_scale, bias, sinks;
};

Problem widened(const Problem& problem, const Widened& wide) {
  Problem p = problem;
  p.q = wide.q.view();
  p.k = wide.k.view();
  p.v = wide.v.view();
  if (is_given(problem.options.query_scale)) p.options.query_scale = wide.query_scale.view();
  if (is_given(problem.options.bias)) p.options.bias = wide.bias.view();
  if (is_given(problem.options.sinks)) p.options.sinks = wide.sinks.view();
  return p;
}

// A gradient that every shard adds to, in float64.
class Sum {
 public:
  Sum(const View& wanted, DType part_type) : wanted_(wanted) {
    if (!is_given(wanted)) return;
    part_ = Array(part_type, wanted.sizes);
    sum_ = Array(DType::f64, wanted.sizes);
  }
  View part() { return is_given(wanted_) ? part_.view() : View{}; }
  void add() {
    const Array& part = part_;
    if (is_given(wanted_)) add_to(part.view(), sum_.view());
  }
  void finish() {
    const Array& sum = sum_;
    if (is_given(wanted_)) store(sum.view(), wanted_);
  }
  void finish_over(const Group& group) {
    if (is_given(wanted_)) group.add(sum_.elements<double>());
    finish();
  }

 private:
  View wanted_;
  Array part_, sum_;
};

// dbias: summed over shards where the bias is the same for all keys, else each shard's in its place.
class BiasGradient {
 public:
  BiasGradient(const View& wanted, const ConstView& bias)
      : wanted_(wanted),
        shared_(is_given(wanted) && wanted.sizes[kKeyAxis] == 1 ? wanted : View{}, bias.dtype) {
    if (is_given(wanted) && wanted.sizes[kKeyAxis] != 1) type_ = bias.dtype;
  }
  View part(std::int64_t first, std::int64_t keys) {
    if (!is_given(wanted_)) return {};
    if (wanted_.sizes[kKeyAxis] == 1) return shared_.part();
    place_ = cut(wanted_, kKeyAxis, first, keys);
    own_ = Array(type_, place_.sizes);
    return own_.view();
  }
  void add() {
    const Array& own = own_;
    if (!is_given(wanted_)) return;
    wanted_.sizes[kKeyAxis] == 1 ? shared_.add() : store(own.view(), place_);
  }
  void finish() { shared_.finish(); }

 private:
  View wanted_;
  Sum shared_;
  DType type_ = DType::f32;
  View place_;
  Array own_;
};

std::vector<GradientSums> gradient_sums(const Call& call, Ring& ring, const ConstView& dout, const Rows& rows,
                                        BetaGradient beta_gradient) {
  const int moves = needs_sums(call.problem, rows, beta_gradient) ? 1 : 0;
  const auto all = call.group.gather<int>(std::span(&moves, 1));
  if (std::ranges::none_of(all, [](int m) { return m != 0; }))
    return output_products(call.problem, rows, dout);
  std::vector<GradientSums> sums(rows.states.size()), part(rows.states.size());
  ring.lap({}, [&](int source, const ConstView& k, const ConstView& v, const Execution& execution) {
    const Problem p = call.with(source, k, v, execution);
    shard_gradient_sums(p.q, p.k, p.v, dout, call.shard(source), rows.weighed, part, p.options, p.execution);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = whet::add(sums[i], part[i]);
  });
  return sums;
}

void backward(const Call& call, Ring& ring, const ConstView& dout, const AttentionGradients& gradients,
              BetaGradient beta_gradient, const Rows& rows) {
  const Problem& own = call.problem;
  const std::vector<RowSlope> slopes =
      slopes_of(own, rows, gradient_sums(call, ring, dout, rows, beta_gradient), beta_gradient);
  Sum dq(gradients.dq, own.arithmetic()), dsinks(gradients.dsinks, own.arithmetic()),
      dquery_scale(gradients.dquery_scale, own.arithmetic());
  BiasGradient dbias(gradients.dbias, own.options.bias);
  Travellers travellers(call.group);
  ring.lap({}, [&](int source, const ConstView& k, const ConstView& v, const Execution& execution) {
    const Problem p = call.with(source, k, v, execution);
    travellers.expect(source, k, v);
    Array dk(k.dtype, k.sizes), dv(v.dtype, v.sizes);
    const AttentionGradients parts{.dq = dq.part(),
                                   .dk = dk.view(),
                                   .dv = dv.view(),
                                   .dbias = dbias.part(call.cuts.keys.first(source), k.sizes[2]),
                                   .dsinks = dsinks.part(),
                                   .dquery_scale = dquery_scale.part()};
    shard_backward(p.q, p.k, p.v, dout, call.shard(source), slopes, parts, p.options, p.execution);
    for (Sum* sum : {&dq, &dsinks, &dquery_scale}) sum->add();
    dbias.add();
    travellers.add(source, std::move(dk), std::move(dv));
  });
  const std::array<Array, 2> home = travellers.home(own.k, own.v);
  if (is_given(gradients.dk)) store(home[0].view(), gradients.dk);
  if (is_given(gradients.dv)) store(home[1].view(), gradients.dv);
  dq.finish();
  dbias.finish();
  dsinks.finish_over(call.group);
  const ConstView& query_scale = own.options.query_scale;
  const bool shared = is_given(query_scale) && query_scale.sizes[kQueryAxis] == 1;
  shared ? dquery_scale.finish_over(call.group) : dquery_scale.finish();
}

Problem problem_with(const ConstView& q, const ConstView& k, const ConstView& v,
                     const AttentionOptions& options, const Execution& execution) {
  return {q, k, v, options, {.threads = execution.threads, .executor = execution.executor}};
}

}  // namespace

void ring_attention(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options,
                    const Ranks& ranks, Rows* rows, const Execution& execution) {
  const Group group(ranks.comm);
  const Problem problem = problem_with(q, k, v, options, execution);
  Fields fields = fields_of("ring_attention", problem, out, "out");
  fields.add("keep_logits", std::to_string(ranks.keep_logits));
  const Check check = [&](const ConstView& keys, const ConstView& values, const Shard& shard,
                          const AttentionOptions& used) { check_shard(q, keys, values, out, shard, used); };
  const Cuts cuts = agreed_cuts(group, problem, fields, check);
  const Call call{group, problem, cuts, keeps_logits(problem, cuts, ranks.keep_logits)};
  Ring ring(group, call.cuts.keys, Array::copy(k), Array::copy(v), problem.execution);
  Rows found = forward(call, ring);
  store({found.out.data(), problem.arithmetic(), problem.out_sizes()}, out);
  if (rows != nullptr) *rows = std::move(found);
}

void ring_attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                             const AttentionGradients& gradients, const AttentionOptions& options,
                             BetaGradient beta_gradient, const Ranks& ranks, const Rows* rows,
                             const Execution& execution) {
  const Group group(ranks.comm);
  const Problem problem = problem_with(q, k, v, options, execution);
  Fields fields = fields_of("ring_attention_backward", problem, dout, "dout");
  fields.add("keep_logits", std::to_string(ranks.keep_logits));
  fields.add("dsinks", gradients.dsinks);
  fields.add("dquery_scale", is_given(gradients.dquery_scale));
  fields.add("beta_gradient", std::string(beta_gradient == BetaGradient::held ? "held" : "through_rule"));
  fields.add("rows", rows != nullptr);
  const Check check = [&](const ConstView& keys, const ConstView& values, const Shard& shard,
                          const AttentionOptions& used) {
    AttentionGradients queries =
        gradients;  // dbias comes with the bias, dk and dv with the keys of this rank
    if (!is_given(used.bias)) queries.dbias = is_given(options.bias) ? View{} : gradients.dbias;
    if (keys.data != k.data) queries.dk = queries.dv = {};
    check_shard_backward(q, keys, values, dout, shard, queries, used);
    if (rows != nullptr) check_rows(problem, *rows);
  };
  const Cuts cuts = agreed_cuts(group, problem, fields, check);
  const Widened wide(problem);
  const Call call{group, widened(problem, wide), cuts, keeps_logits(problem, cuts, ranks.keep_logits)};
  Ring ring(group, call.cuts.keys, Array::copy(call.problem.k), Array::copy(call.problem.v),
            problem.execution);
  const Array wide_dout = Array::copy(dout, true);
  if (rows != nullptr) return backward(call, ring, wide_dout.view(), gradients, beta_gradient, *rows);
  const Rows found = forward(call, ring);
  backward(call, ring, wide_dout.view(), gradients, beta_gradient, found);
}

}  // namespace whet::mpi
