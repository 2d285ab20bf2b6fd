// Keys in place: every rank works on all queries with its own keys; rows are merged between ranks.
//
//     rules none and fixed    one pass, one exchange of (state, mass, partial output)
//     others                  states; exchange; beta (searches: an exchange per step); weights; exchange
//     rows with a threshold   the same for all rules, and an exchange per step of its search before weights
//
// The second pass computes q k again: to write and read logits takes no less time, and memory. Where there is
// a search they are kept, if they fit into Ranks::keep_logits, else those of a block of queries at a time:
// every block packs the keys again, but each step of the search would cost all products. Few rows keep them
// too, since products would read all keys again.
#include <whet/error.h>
#include <whet/mpi.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "mpi/agreement.h"
#include "mpi/elements.h"
#include "mpi/group.h"
#include "mpi/rows.h"

namespace whet::mpi {
namespace {

// A call, once all ranks agree on it.
struct Call {
  const Group& group;
  Problem problem;
  Shard shard;
  std::int64_t most_keys;  // of one rank
  std::size_t keep_logits;
};

Fields fields_of(const char* function, const Problem& p, const ConstView& out, const char* out_name) {
  Fields fields;
  fields.add("call", std::string(function));
  fields.add("q", p.q);
  fields.add("k", p.k, 2);
  fields.add("v", p.v, 2);
  fields.add(out_name, out);
  fields.add("query_scale", p.options.query_scale);
  fields.add(p.options);
  return fields;
}

Problem problem_with(const ConstView& q, const ConstView& k, const ConstView& v,
                     const AttentionOptions& options, const Execution& execution) {
  return {q, k, v, options, {.threads = execution.threads, .executor = execution.executor}};
}

using Check = std::function<void(const Shard& shard)>;

Call agreed(const Group& group, const Problem& problem, const Fields& fields, const Check& check,
            std::size_t keep_logits) {
  const std::string wrong = problem_of(check, problem.k, problem.options);
  const Cuts cuts = agree(group, fields, wrong, wrong.empty() ? problem.k.sizes[2] : 0, 0);
  const Shard shard{.first_key = cuts.keys.first(group.rank()), .all_keys = cuts.keys.all()};
  check(shard);  // lengths: wrong on all ranks
  return {group, problem, shard, cuts.keys.largest(), keep_logits};
}

// ---- Forward ----

void merge_partial(const Call& call, Records<PartialHeader>& records, Rows& rows) {
  const DType dtype = call.problem.arithmetic();
  const bool hard = call.problem.is_hard();
  std::vector<double> sums(static_cast<std::size_t>(call.problem.value_size()));
  const auto merge_row = [&](std::int64_t row, const Parts& parts, std::byte* result) {
    RowState merged;
    for (int r = 0; r < parts.ranks; ++r) merged = merge(merged, parts.of<PartialHeader>(r)->state);
    const double beta = call.problem.rule(row).beta(merged);
    double mass = std::isnan(beta) && merged.count > 0 ? beta : 0;
    std::ranges::fill(sums, mass);
    for (int r = 0; r < parts.ranks && merged.count > 0 && mass == mass; ++r) {
      const auto* header = parts.of<PartialHeader>(r);
      const double c = share_of(header->state, merged, beta, hard);
      if (c == 0 && header->mass == 0) continue;  // no key here
      mass += c * header->mass;
      add_outs(dtype, reinterpret_cast<const std::byte*>(header + 1), c, sums);
    }
    auto* to = reinterpret_cast<PartialHeader*>(result);
    *to = {merged, mass};
    normalise(dtype, sums, mass, reinterpret_cast<std::byte*>(to + 1));
  };
  std::vector<std::byte> results(records.bytes().size());
  call.group.merge_rows(records.bytes(), results, call.problem.rows(), merge_row);
  const std::size_t out_bytes = sums.size() * bytes_of(dtype);
  for (std::size_t i = 0; i < rows.states.size(); ++i) {
    const std::byte* record = results.data() + i * records.pitch();
    const auto* header = reinterpret_cast<const PartialHeader*>(record);
    const double mean = header->state.t / header->state.z;
    rows.states[i] = header->state;
    rows.masses[i] = header->mass;
    rows.weighed[i] = {header->state.max, call.problem.rule(static_cast<std::int64_t>(i)).beta(header->state),
                       std::isnan(mean) ? 0 : mean};
    if (out_bytes > 0)
      std::memcpy(rows.out.data() + i * out_bytes, record + sizeof(PartialHeader), out_bytes);
  }
}

Rows forward_in_one_pass(const Call& call) {
  Rows rows = empty_rows(call.problem);
  Records<PartialHeader> records(call.problem);
  compute_partial(call.problem, call.shard, known_betas(call.problem), records);
  merge_partial(call, records, rows);
  return rows;
}

void merge_states(const Call& call, std::vector<RowState>& states) {
  const std::vector<RowState> own = states;
  call.group.merge_rows(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(states)),
                        static_cast<std::int64_t>(own.size()),
                        [](std::int64_t, const Parts& parts, std::byte* result) {
                          RowState merged;
                          for (int r = 0; r < parts.ranks; ++r)
                            merged = merge(merged, *parts.of<RowState>(r));
                          *reinterpret_cast<RowState*>(result) = merged;
                        });
}

// What GradientSums hold without a threshold.
struct SoftmaxSums {
  double wg, wdg, wd, wdd, ties;
};
SoftmaxSums add(const SoftmaxSums& a, const SoftmaxSums& b) {
  return {a.wg + b.wg, a.wdg + b.wdg, a.wd + b.wd, a.wdd + b.wdd, a.ties + b.ties};
}

// Sums of any kind of every rank.
template <typename Sums>
void add_sums(const Group& group, std::span<Sums> sums) {
  group.merge_rows(std::as_bytes(sums), std::as_writable_bytes(sums), static_cast<std::int64_t>(sums.size()),
                   [](std::int64_t, const Parts& parts, std::byte* result) {
                     Sums added{};
                     for (int r = 0; r < parts.ranks; ++r) added = add(added, *parts.of<Sums>(r));
                     *reinterpret_cast<Sums*>(result) = added;
                   });
}

void merge_weighed(const Call& call, Records<WeighedHeader>& records, Rows& rows) {
  const DType dtype = call.problem.arithmetic();
  std::vector<double> sums(static_cast<std::size_t>(call.problem.value_size()));
  const auto merge_row = [&](std::int64_t, const Parts& parts, std::byte* result) {
    double mass = 0;
    std::ranges::fill(sums, 0.0);
    for (int r = 0; r < parts.ranks; ++r) {
      const auto* header = parts.of<WeighedHeader>(r);
      mass += header->mass;
      add_outs(dtype, reinterpret_cast<const std::byte*>(header + 1), 1, sums);
    }
    auto* to = reinterpret_cast<WeighedHeader*>(result);
    *to = {mass};
    normalise(dtype, sums, mass, reinterpret_cast<std::byte*>(to + 1));
  };
  std::vector<std::byte> results(records.bytes().size());
  call.group.merge_rows(records.bytes(), results, call.problem.rows(), merge_row);
  const std::size_t out_bytes = sums.size() * bytes_of(dtype);
  for (std::size_t i = 0; i < rows.masses.size(); ++i) {
    const std::byte* record = results.data() + i * records.pitch();
    rows.masses[i] = reinterpret_cast<const WeighedHeader*>(record)->mass;
    if (out_bytes > 0)
      std::memcpy(rows.out.data() + i * out_bytes, record + sizeof(WeighedHeader), out_bytes);
  }
}

// All queries of call.problem at once; with `keeps` their logits stay.
Rows forward_in_passes(const Call& call, bool keeps) {
  const Problem& p = call.problem;
  Rows rows = empty_rows(p);
  Shard shard = call.shard;
  Array logits;
  if (keeps) {
    logits = Array(p.arithmetic(), {p.q.sizes[0], p.heads(), p.queries(), p.k.sizes[2]});
    shard.logits = logits.view();
  }
  shard_states(p.q, p.k, shard, rows.states, p.options, p.execution);
  merge_states(call, rows.states);
  const auto sums_at = [&](std::span<const RowScale> at, std::span<RowSums> sums) {
    shard_sums(p.q, p.k, shard, at, sums, p.options, p.execution);
    add_sums(call.group, sums);
  };
  const auto threshold_sums_at = [&](std::span<const RowScale> at, std::span<ThresholdSums> sums) {
    shard_threshold_sums(p.q, p.k, shard, at, sums, p.options, p.execution);
    add_sums(call.group, sums);
  };
  const auto any_left = [](bool here) { return here; };  // every rank has the same rows
  choose_betas(p, rows, sums_at, any_left);
  choose_thresholds(p, rows, threshold_sums_at, any_left);
  Records<WeighedHeader> records(p);
  compute_weighed(p, shard, scales_of(rows), records);
  merge_weighed(call, records, rows);
  return rows;
}

// Puts the rows of queries [first, ...) of `part` where they belong among those of all.
void place(const Rows& part, const Problem& problem, std::int64_t first, std::int64_t count, Rows& rows) {
  const auto out_bytes = static_cast<std::size_t>(problem.value_size()) * bytes_of(problem.arithmetic());
  const auto n = static_cast<std::size_t>(count);
  for (std::int64_t head = 0; head < problem.q.sizes[0] * problem.heads(); ++head) {
    const auto from = static_cast<std::ptrdiff_t>(head * count);
    const std::ptrdiff_t to = head * problem.queries() + first;
    std::copy_n(part.states.begin() + from, n, rows.states.begin() + to);
    std::copy_n(part.weighed.begin() + from, n, rows.weighed.begin() + to);
    std::copy_n(part.masses.begin() + from, n, rows.masses.begin() + to);
    const auto bytes = static_cast<std::ptrdiff_t>(out_bytes);
    std::copy_n(part.out.begin() + from * bytes, n * out_bytes, rows.out.begin() + to * bytes);
  }
}

// In how many blocks of queries the logits of each fit, on the rank that has most keys; 0: in none. A block
// of few queries would take the path of decoding, whose products round otherwise than those of a backward of
// all, which compares them with the maximum; so there are none.
std::int64_t blocks_that_fit(const Call& call) {
  const Problem& p = call.problem;
  const auto one =
      static_cast<std::size_t>(p.q.sizes[0] * p.heads() * call.most_keys) * bytes_of(p.arithmetic());
  const std::int64_t fit = one == 0 ? p.queries()
                                    : static_cast<std::int64_t>(std::min(
                                          call.keep_logits / one, static_cast<std::size_t>(p.queries())));
  if (fit == p.queries()) return 1;
  if (fit == 0) return 0;
  const std::int64_t blocks = (p.queries() + fit - 1) / fit, least = p.queries() / blocks;
  return least * (p.heads() / p.k.sizes[1]) > kFewRows ? blocks : 0;
}

Rows forward_in_blocks(const Call& call, std::int64_t blocks) {
  Rows rows = empty_rows(call.problem);
  Call part = call;
  part.shard.all_queries = call.problem.queries();
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t first = call.problem.queries() * block / blocks;
    const std::int64_t count = call.problem.queries() * (block + 1) / blocks - first;
    part.problem = call.problem.of_queries(first, count);
    part.shard.first_query = first;
    place(forward_in_passes(part, true), call.problem, first, count, rows);
  }
  return rows;
}

Rows forward(const Call& call) {
  const Problem& p = call.problem;
  if (p.is_one_pass()) return forward_in_one_pass(call);
  const std::int64_t blocks = p.keeps_logits() ? blocks_that_fit(call) : 0;
  const bool per_row = p.options.lengths.size() > static_cast<std::size_t>(p.q.sizes[0]);
  if (blocks == 1) return forward_in_passes(call, true);
  if (blocks == 0 || per_row) return forward_in_passes(call, false);
  return forward_in_blocks(call, blocks);
}

// ---- Backward ----

// dq of all ranks, from each one's part, which is in the type of the arithmetic.
void add_parts(const Group& group, Array& parts) {
  const ConstView view = parts.view();
  if (count_of(view.sizes) == 0) return;
  const auto size = static_cast<std::size_t>(view.sizes[view.sizes.size() - 1]);
  std::vector<double> sums(size);
  group.merge_rows(parts.bytes(), parts.bytes(), count_of(view.sizes) / static_cast<std::int64_t>(size),
                   [&](std::int64_t, const Parts& all, std::byte* result) {
                     std::ranges::fill(sums, 0.0);
                     for (int r = 0; r < all.ranks; ++r) add_outs(view.dtype, all.of<std::byte>(r), 1, sums);
                     normalise(view.dtype, sums, 1, result);
                   });
}

std::vector<GradientSums> gradient_sums(const Call& call, const ConstView& dout, const Rows& rows,
                                        BetaGradient beta_gradient) {
  const Problem& p = call.problem;
  if (!needs_sums(p, rows, beta_gradient)) return output_products(p, rows, dout);
  std::vector<GradientSums> sums(rows.states.size());
  shard_gradient_sums(p.q, p.k, p.v, dout, call.shard, rows.weighed, sums, p.options, p.execution);
  if (p.has_threshold()) {
    add_sums(call.group, std::span(sums));
    return sums;
  }
  std::vector<SoftmaxSums> few;
  few.reserve(sums.size());
  for (const GradientSums& s : sums) few.push_back({s.wg, s.wdg, s.wd, s.wdd, s.ties});
  add_sums(call.group, std::span(few));
  for (std::size_t i = 0; i < few.size(); ++i) {
    sums[i] = {few[i].wg, few[i].wdg, few[i].wd, few[i].wdd, few[i].ties};
  }
  return sums;
}

// A part of the gradient where it is wanted, added up over the ranks and rounded at the end.
class WholeGradient {
 public:
  WholeGradient(const View& wanted, DType arithmetic) : wanted_(wanted) {
    if (is_given(wanted)) part_ = Array(arithmetic, wanted.sizes);
  }
  View part() { return is_given(wanted_) ? part_.view() : View{}; }
  void finish(const Group& group) {
    if (!is_given(wanted_)) return;
    add_parts(group, part_);
    store(part_.view(), wanted_);
  }

 private:
  View wanted_;
  Array part_;
};

void backward(const Call& call, const ConstView& dout, const AttentionGradients& gradients,
              BetaGradient beta_gradient, const Rows& rows) {
  const Problem& p = call.problem;
  const std::vector<RowSlope> slopes =
      slopes_of(p, rows, gradient_sums(call, dout, rows, beta_gradient), beta_gradient);
  WholeGradient dq(gradients.dq, p.arithmetic()), dsinks(gradients.dsinks, p.arithmetic()),
      dquery_scale(gradients.dquery_scale, p.arithmetic());
  AttentionGradients parts = gradients;
  parts.dq = dq.part();
  parts.dsinks = dsinks.part();
  parts.dquery_scale = dquery_scale.part();
  shard_backward(p.q, p.k, p.v, dout, call.shard, slopes, parts, p.options, p.execution);
  for (WholeGradient* whole : {&dq, &dsinks, &dquery_scale}) whole->finish(call.group);
}

}  // namespace

void attention(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options,
               const Ranks& ranks, Rows* rows, const Execution& execution) {
  const Group group(ranks.comm);
  const Problem problem = problem_with(q, k, v, options, execution);
  Fields fields = fields_of("attention", problem, out, "out");
  fields.add("keep_logits", std::to_string(ranks.keep_logits));
  const Check check = [&](const Shard& shard) { check_shard(q, k, v, out, shard, options); };
  const Call call = agreed(group, problem, fields, check, ranks.keep_logits);
  Rows found = forward(call);
  store({found.out.data(), problem.arithmetic(), problem.out_sizes()}, out);
  if (rows != nullptr) *rows = std::move(found);
}

void attention_backward(ConstView q, ConstView k, ConstView v, ConstView dout,
                        const AttentionGradients& gradients, const AttentionOptions& options,
                        BetaGradient beta_gradient, const Ranks& ranks, const Rows* rows,
                        const Execution& execution) {
  const Group group(ranks.comm);
  const Problem problem = problem_with(q, k, v, options, execution);
  Fields fields = fields_of("attention_backward", problem, dout, "dout");
  fields.add("keep_logits", std::to_string(ranks.keep_logits));
  fields.add("dq", gradients.dq);
  fields.add("dsinks", gradients.dsinks);
  fields.add("dquery_scale", gradients.dquery_scale);
  fields.add("beta_gradient", std::string(beta_gradient == BetaGradient::held ? "held" : "through_rule"));
  fields.add("rows", rows != nullptr);
  const Check check = [&](const Shard& shard) {
    check_shard_backward(q, k, v, dout, shard, gradients, options);
    if (rows != nullptr) check_rows(problem, *rows);
  };
  const Call call = agreed(group, problem, fields, check, ranks.keep_logits);
  backward(call, dout, gradients, beta_gradient, rows != nullptr ? *rows : forward(call));
}

}  // namespace whet::mpi
