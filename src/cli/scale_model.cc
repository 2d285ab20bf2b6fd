#include "cli/scale_model.h"

#include <algorithm>
#include <cmath>

namespace whet::cli {
namespace {

constexpr double kFewBytes = 64 << 10;  // of all ranks: what src/mpi/group.cc sends to all at once
constexpr double kAgreement = 24;       // bytes in which ranks agree on a call

double queries_of(const ScaleProblem& p) { return p.queries > 0 ? p.queries : p.tokens; }
double rows_of(const ScaleProblem& p) { return queries_of(p) * p.heads; }
double logits_of(const ScaleProblem& p) { return rows_of(p) * p.tokens / p.ranks; }  // of a rank

// q k or weights times values: 2 flops for each of head_size.
double product(const ScaleProblem& p) { return 2 * p.head_size * logits_of(p) / p.flops; }

void add_messages(Cost& cost, const ScaleProblem& p, double bytes, double messages) {
  cost.bytes += bytes;
  cost.messages += messages;
  cost.communication += bytes / p.bandwidth + messages * p.latency;
}

// Everything of everyone, in log2(ranks) steps.
void gather(Cost& cost, const ScaleProblem& p, double bytes) {
  if (p.ranks > 1) add_messages(cost, p, bytes * (p.ranks - 1), std::ceil(std::log2(p.ranks)));
}

// Group::merge_rows(): few bytes to all; else each rank merges a share of the rows and sends the results.
void merge_rows(Cost& cost, const ScaleProblem& p, double rows, double bytes) {
  if (p.ranks <= 1) return;
  if (rows * bytes * p.ranks <= kFewBytes) return gather(cost, p, rows * bytes);
  const double share = rows * bytes * (p.ranks - 1) / p.ranks;
  add_messages(cost, p, 2 * share, 2 * (p.ranks - 1));
}

// Ranks pass arrays of so many bytes each, of all keys together, `laps` times, while they compute.
void lap(Cost& cost, const ScaleProblem& p, double bytes, double compute) {
  const double steps = p.ranks - 1, arrays = 2;
  const double step = bytes / p.ranks / p.bandwidth + arrays * p.latency;
  cost.bytes += bytes / p.ranks * steps;
  cost.messages += arrays * steps;
  cost.communication += step * steps;
  cost.compute += compute;
  cost.time += steps * std::max(step, compute / p.ranks) + compute / p.ranks;
}

double keys_bytes(const ScaleProblem& p) { return p.tokens * p.key_heads * p.head_size * p.element_bytes; }

Cost in_place_forward(const ScaleProblem& p, RuleKind rule) {
  const RowBytes row;
  Cost cost;
  gather(cost, p, kAgreement);
  cost.compute = 2 * product(p);
  if (rule != RuleKind::known) {
    merge_rows(cost, p, rows_of(p), row.state);
    cost.compute += product(p);
  }
  for (int step = 0; rule == RuleKind::search && step < p.steps; ++step) {
    merge_rows(cost, p, rows_of(p), row.sums);
    cost.compute += product(p);
  }
  merge_rows(cost, p, rows_of(p), row.output(p.head_size, rule));
  cost.time = cost.compute + cost.communication;
  return cost;
}

Cost ring_forward(const ScaleProblem& p, RuleKind rule) {
  Cost cost;
  gather(cost, p, kAgreement);
  cost.time = cost.communication;
  const int laps_of_keys = rule == RuleKind::known ? 0 : rule == RuleKind::state ? 1 : 1 + p.steps;
  for (int i = 0; i < laps_of_keys; ++i) lap(cost, p, keys_bytes(p), product(p));
  for (int i = 0; rule == RuleKind::search && i <= p.steps; ++i) {
    Cost asked;
    gather(asked, p, 4);  // does any rank search on?
    add_messages(cost, p, asked.bytes, asked.messages);
    cost.time += asked.communication;
  }
  lap(cost, p, 2 * keys_bytes(p), 2 * product(p));
  return cost;
}

}  // namespace

Cost forward_cost(const ScaleProblem& p, Scheme scheme, RuleKind rule) {
  return scheme == Scheme::in_place ? in_place_forward(p, rule) : ring_forward(p, rule);
}

// Products: q k, dout v, and those that give dv, dk and dq; sums of a rule take the first two once more.
Cost backward_cost(const ScaleProblem& p, Scheme scheme, RuleKind rule) {
  const bool moves = rule != RuleKind::known;
  Cost cost;
  gather(cost, p, kAgreement);
  if (scheme == Scheme::in_place) {
    if (moves) merge_rows(cost, p, rows_of(p), RowBytes().sums);
    merge_rows(cost, p, rows_of(p), 4 * p.head_size);
    cost.compute = (moves ? 7 : 5) * product(p);
    cost.time = cost.compute + cost.communication;
    return cost;
  }
  cost.time = cost.communication;
  const double wide = 2 * keys_bytes(p) / p.element_bytes * std::max(p.element_bytes, 4.0);  // as f32
  if (moves) lap(cost, p, wide, 2 * product(p));
  lap(cost, p, 2 * wide, 5 * product(p));  // dk and dv go along
  return cost;
}

Cost decode_cost(const ScaleProblem& given, RuleKind rule) {
  ScaleProblem p = given;
  p.queries = 1;
  Cost cost = in_place_forward(p, rule);
  const double read = 2 * keys_bytes(p) / p.ranks / p.memory;  // logits are kept: keys are read once
  cost.compute = std::max(read, 2 * product(p));
  cost.time = cost.compute + cost.communication;
  return cost;
}

double merge_error_bound(double shards) { return 4 * shards * std::ldexp(1.0, -53); }

}  // namespace whet::cli
