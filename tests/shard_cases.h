// Attention over keys cut into shards: the devices that hold them, the exchanges between them, and what the
// merged states, betas and masses must be.
#ifndef WHET_TESTS_SHARD_CASES_H_
#define WHET_TESTS_SHARD_CASES_H_

#include <gtest/gtest.h>
#include <whet/shard.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_contract.h"
#include "attention_oracle.h"
#include "attention_runs.h"

namespace whet {

using Cuts = std::vector<std::int64_t>;  // 0, ..., M: shard s holds keys [cuts[s], cuts[s + 1])

// One device: its keys, and the options of the whole problem with what goes by key cut to it.
struct Device {
  Device(const oracle::Attention& p, DType type, std::int64_t from, std::int64_t to)
      : call(with_keys(p, from, to), type, arithmetic_type(type)),
        shard{from, p.M},
        states(static_cast<std::size_t>(p.rows())),
        sums(states.size()),
        mass(states.size(), -7),
        out(arithmetic_type(type), p.dout.sizes),
        dq(arithmetic_type(type), p.q.sizes) {
    call.options.rule = {};
    call.options.head_rules = {};
    if (p.sinks.given()) dsinks = Placed(arithmetic_type(type), p.sinks.sizes);
    if (p.query_scale.given()) dquery_scale = Placed(arithmetic_type(type), p.query_scale.sizes);
  }

  // Has the logits kept between its passes.
  void keep_logits() {
    const std::vector<std::int64_t>& q = call.q.sizes();
    logits = Placed(arithmetic_type(call.q.type()), {q[0], q[1], q[2], call.k.sizes()[2]});
    shard.logits = logits.view();
  }

  AttentionCall call;
  Shard shard;
  Placed logits;
  std::vector<RowState> states;
  std::vector<RowSums> sums;
  std::vector<double> mass;
  Placed out;
  Placed dq, dsinks, dquery_scale;  // parts, in the type of the arithmetic
};

class Devices {
 public:
  Devices(const oracle::Attention& p, DType type, const Cuts& cuts, const Normalizer& normalizer = {})
      : p_(p), type_(type), normalizer_(normalizer) {
    for (std::size_t s = 0; s + 1 < cuts.size(); ++s) {
      all_.push_back(std::make_unique<Device>(p, type, cuts[s], cuts[s + 1]));
      all_.back()->call.options.normalizer = normalizer;
      order_.push_back(s);
    }
  }
  const Normalizer& normalizer() const { return normalizer_; }
  DType arithmetic() const { return arithmetic_type(type_); }
  void reverse() { std::ranges::reverse(order_); }
  void keep_logits() {
    for (const auto& device : all_) device->keep_logits();
  }
  Device& device(std::size_t s) { return *all_[s]; }
  std::size_t size() const { return all_.size(); }

  // Exchange 1.
  std::vector<RowState> merged_states() {
    std::vector<RowState> merged(static_cast<std::size_t>(p_.rows()));
    for (std::size_t s : order_) {
      Device& device = *all_[s];
      shard_states(device.call.q.view(), device.call.k.view(), device.shard, device.states,
                   device.call.options, device.call.execution);
      for (std::size_t r = 0; r < merged.size(); ++r) merged[r] = merge(merged[r], device.states[r]);
    }
    return merged;
  }

  std::vector<RowSums> added_sums(std::span<const RowScale> rows) {
    std::vector<RowSums> added(rows.size());
    for (std::size_t s : order_) {
      Device& device = *all_[s];
      shard_sums(device.call.q.view(), device.call.k.view(), device.shard, rows, device.sums,
                 device.call.options, device.call.execution);
      for (std::size_t r = 0; r < rows.size(); ++r) added[r] = add(added[r], device.sums[r]);
    }
    return added;
  }

  std::vector<ThresholdSums> added_threshold_sums(std::span<const RowScale> rows) {
    std::vector<ThresholdSums> added(rows.size()), part(rows.size());
    for (std::size_t s : order_) {
      Device& device = *all_[s];
      shard_threshold_sums(device.call.q.view(), device.call.k.view(), device.shard, rows, part,
                           device.call.options, device.call.execution);
      for (std::size_t r = 0; r < rows.size(); ++r) added[r] = add(added[r], part[r]);
    }
    return added;
  }

  // Exchange 2. `masses`: their sums over the shards.
  std::vector<double> merged_outputs(std::span<const RowScale> rows, std::vector<double>& masses) {
    masses.assign(rows.size(), 0);
    std::vector<ConstView> outs;
    std::vector<std::span<const double>> parts;
    for (std::size_t s : order_) {
      Device& device = *all_[s];
      shard_attention(device.call.q.view(), device.call.k.view(), device.call.v.view(), device.shard, rows,
                      device.out.view(), device.mass, device.call.options, device.call.execution);
      EXPECT_TRUE(device.out.gaps_are_intact());
      outs.push_back(device.out.view());
      parts.push_back(device.mass);
      for (std::size_t r = 0; r < rows.size(); ++r) masses[r] += device.mass[r];
    }
    Placed out(type_, p_.dout.sizes);
    merge_outputs(outs, parts, out.view());
    EXPECT_TRUE(out.gaps_are_intact());
    return out.values();
  }

  // Exchange 3.
  std::vector<GradientSums> added_gradient_sums(std::span<const WeighedRow> rows) {
    std::vector<GradientSums> added(rows.size()), part(rows.size());
    for (std::size_t s : order_) {
      AttentionCall& call = all_[s]->call;
      shard_gradient_sums(call.q.view(), call.k.view(), call.v.view(), call.dout.view(), all_[s]->shard, rows,
                          part, call.options, call.execution);
      for (std::size_t r = 0; r < rows.size(); ++r) added[r] = add(added[r], part[r]);
    }
    return added;
  }

  // Every device's dk, dv and dbias, and its parts of the others.
  void backward(std::span<const RowSlope> rows) {
    for (std::size_t s : order_) {
      Device& device = *all_[s];
      AttentionCall& call = device.call;
      AttentionGradients gradients = call.gradients();
      gradients.dq = device.dq.view();
      gradients.dsinks = device.dsinks.view();
      gradients.dquery_scale = device.dquery_scale.view();
      shard_backward(call.q.view(), call.k.view(), call.v.view(), call.dout.view(), device.shard, rows,
                     gradients, call.options, call.execution);
    }
  }

 private:
  const oracle::Attention& p_;
  DType type_;
  Normalizer normalizer_;
  std::vector<std::unique_ptr<Device>> all_;
  std::vector<std::size_t> order_;
};

// Finds the threshold of every row, in steps that all rows take together; returns how many those were.
inline int find_thresholds(Devices& devices, std::span<const RowState> merged, std::vector<RowScale>& rows) {
  std::vector<ThresholdSearch> searches;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    searches.emplace_back(devices.normalizer(), merged[r], rows[r].beta, devices.arithmetic());
  }
  const auto take = [&] {
    for (std::size_t r = 0; r < rows.size(); ++r) rows[r].tau = searches[r].tau();
    return std::ranges::any_of(searches, [](const ThresholdSearch& s) { return !s.done(); });
  };
  int steps = 0;
  for (; take(); ++steps) {
    if (steps == 100) {
      ADD_FAILURE() << "the search doesn't end";
      break;
    }
    const std::vector<ThresholdSums> sums = devices.added_threshold_sums(rows);
    for (std::size_t r = 0; r < rows.size(); ++r) searches[r].absorb(sums[r]);
  }
  return steps;
}

// beta of every row: of its rule, or of a search in steps that all rows take together; and its threshold, if
// it has one.
inline std::vector<RowScale> scales_of(const oracle::Attention& p, Devices& devices,
                                       std::span<const RowState> merged) {
  std::vector<RowScale> rows;
  std::vector<BetaSearch> searches;
  std::vector<std::size_t> row_of_search;
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    const Rule rule = library_rule(p.rule(h));
    rows.push_back({merged[r].max, 1});
    if (rule.needs_search()) {
      searches.emplace_back(rule, merged[r]);
      row_of_search.push_back(r);
    } else {
      rows[r].beta = rule.beta(merged[r]);
    }
  });
  const auto searching = [&] {
    return std::ranges::any_of(searches, [](const BetaSearch& s) { return !s.done(); });
  };
  for (int step = 0; searching(); ++step) {
    if (step == 200) {
      ADD_FAILURE() << "the search doesn't end";
      break;
    }
    for (std::size_t n = 0; n < searches.size(); ++n) rows[row_of_search[n]].beta = searches[n].beta();
    const std::vector<RowSums> sums = devices.added_sums(rows);
    for (std::size_t n = 0; n < searches.size(); ++n) {
      if (!searches[n].done()) searches[n].absorb(sums[row_of_search[n]]);
    }
  }
  for (std::size_t n = 0; n < searches.size(); ++n) rows[row_of_search[n]].beta = searches[n].beta();
  if (needs_threshold(devices.normalizer())) find_thresholds(devices, merged, rows);
  return rows;
}

// The gradient of all devices together, in the arrays of a call over all keys.
class GatheredGradients {
 public:
  GatheredGradients(const oracle::Attention& p, DType type, Devices& devices, BetaGradient mode)
      : call(p, type, arithmetic_type(type)), p_(p), devices_(devices) {
    const std::vector<RowState> merged = devices.merged_states();
    const std::vector<RowScale> scales = scales_of(p, devices, merged);
    for (const RowScale& row : scales) betas.push_back(row.beta);
    std::vector<double> masses;
    out = devices.merged_outputs(scales, masses);
    devices.backward(slopes(merged, scales, masses, mode));
    join();
  }

  AttentionCall call;
  std::vector<double> betas, out;

 private:
  std::vector<RowSlope> slopes(std::span<const RowState> merged, std::span<const RowScale> scales,
                               std::span<const double> masses, BetaGradient mode) {
    const std::vector<RowSums> sums = devices_.added_sums(scales);
    std::vector<WeighedRow> rows;
    oracle::for_each_row(p_, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
      const std::size_t r = p_.row(b, h, i);
      const bool searched = library_rule(p_.rule(h)).needs_search();
      const double mean = searched ? sums[r].t / sums[r].z : merged[r].t / merged[r].z;
      rows.push_back({scales[r].max, scales[r].beta, mean, scales[r].tau});
    });
    const std::vector<GradientSums> all = devices_.added_gradient_sums(rows);
    const std::vector<double> products = output_products();
    std::vector<RowSlope> found;
    oracle::for_each_row(p_, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
      const std::size_t r = p_.row(b, h, i);
      const Rule rule = library_rule(p_.rule(h));
      // A beta that stays needs no exchange, unless there is a threshold.
      const bool moves = needs_threshold(devices_.normalizer()) || beta_moves(rule, rows[r].beta, mode);
      const GradientSums only{.wg = products[r]};
      found.push_back(row_slope(rule, merged[r], rows[r], masses[r], moves ? all[r] : only, mode));
    });
    return found;
  }

  // The mass of each row times <dout, out>.
  std::vector<double> output_products() {
    std::vector<double> products(static_cast<std::size_t>(p_.rows()));
    for (std::size_t s = 0; s < devices_.size(); ++s) {
      const std::vector<double> part = devices_.device(s).out.values();
      for (std::size_t n = 0; n < part.size(); ++n) {
        products[n / static_cast<std::size_t>(p_.E)] += part[n] * p_.dout.values[n];
      }
    }
    return products;
  }

  void join() {
    put(call.dk, 2, [](Device& d) -> Placed& { return d.call.dk; });
    put(call.dv, 2, [](Device& d) -> Placed& { return d.call.dv; });
    put(call.dbias, 3, [](Device& d) -> Placed& { return d.call.dbias; });
    put(call.dq, -1, [](Device& d) -> Placed& { return d.dq; });
    put(call.dsinks, -1, [](Device& d) -> Placed& { return d.dsinks; });
    put(call.dquery_scale, -1, [](Device& d) -> Placed& { return d.dquery_scale; });
  }

  // The parts of all devices side by side along the axis of the keys; added up where there is none (-1), or
  // where it has size 1.
  template <typename Part>
  void put(Placed& to, int axis, const Part& part) {
    if (to.view().data == nullptr) return;
    const auto size_of = [&](std::size_t a) { return a < to.sizes().size() ? to.sizes()[a] : 1; };
    const std::int64_t size = axis < 0 ? 1 : size_of(static_cast<std::size_t>(axis));
    std::int64_t run = 1;
    for (std::size_t a = static_cast<std::size_t>(axis + 1); a < to.sizes().size(); ++a) run *= size_of(a);
    std::vector<double> whole(to.values().size());
    for (std::size_t s = 0; s < devices_.size(); ++s) {
      Device& device = devices_.device(s);
      const std::vector<double> values = part(device).values();
      EXPECT_TRUE(part(device).gaps_are_intact());
      const std::int64_t from = device.shard.first_key, end = from + device.call.k.sizes()[2];
      std::size_t next = 0;
      for (std::size_t n = 0; n < whole.size(); ++n) {
        const std::int64_t index = static_cast<std::int64_t>(n) / run % size;
        if (size == 1) {
          if (!values.empty()) whole[n] += values[next++];
        } else if (index >= from && index < end) {
          whole[n] = values[next++];
        }
      }
    }
    to.set(whole);
  }

  const oracle::Attention& p_;
  Devices& devices_;
};

// A merged state against the oracle's. Bounds as in attention_contract.h: the terms of z, t and u are known
// as contract.h says when logits are given, and a logit is known to within delta, which moves e^y by 2 delta
// and y by as much.
template <typename Arithmetic, typename Real>
void expect_merged_state(const oracle::AttentionRow<Real>& row, std::int64_t size, const RowState& got) {
  ASSERT_EQ(got.count, static_cast<std::int64_t>(row.count()));
  if (row.count() == 0) return;
  const oracle::State<Real> s = oracle::state<Real>(row.logits);
  if (oracle::is_broken(s)) {
    EXPECT_TRUE(std::isnan(got.z)) << got.z;
    return;
  }
  const Real delta = logit_error<Arithmetic>(row, size);
  if (!std::isfinite(delta)) return;  // products beyond the range of the type: nothing is known
  oracle::Row near(std::vector<double>(row.logits.x.begin(), row.logits.x.end()));
  near.sink_last = row.logits.sink_last;
  const SumBounds<Real> sums = sum_bounds<Arithmetic>(near);
  const Real rounding = (std::abs(s.max) + std::abs(s.min)) * std::numeric_limits<double>::epsilon();
  expect_within<Real>(got.max, s.max, delta + rounding, "max");
  expect_within<Real>(got.min, s.min, delta + rounding, "min");
  // d(e^y y^k) <= e^y (|y|^k + k |y|^(k-1)) 2 delta, to first order, and half as much again for the rest.
  const Real t = std::abs(s.t);
  expect_within<Real>(got.z, s.z, 2 * sums.z + 3 * delta * s.z + rounding, "z");
  expect_within<Real>(got.t, s.t, 2 * sums.t + 3 * delta * (t + s.z) + rounding, "t");
  expect_within<Real>(got.u, s.u, 2 * sums.u + 3 * delta * (s.u + 2 * t) + rounding, "u");
}

// A search over shards doesn't know the gap below the maximum: where a target can't be reached its beta is
// large enough, instead of just large enough.
template <typename Arithmetic, typename Real>
void expect_shard_beta(const oracle::AttentionRow<Real>& row, const oracle::Rule& rule, double beta,
                       const Perturbation<Real>& moved) {
  const bool unreachable = row.count() > 1 && oracle::solves(rule) &&
                           oracle::target_of<Real>(row.logits, rule) == oracle::Target::unreachable;
  if (!unreachable) return expect_attention_beta<Arithmetic>(row, rule, beta, moved);
  const oracle::Top<Real> top = oracle::top<Real>(row.logits);
  if (top.gap < 4 * moved.delta) return;
  EXPECT_GE(beta, oracle::hard_beta<Real>(row.logits) * (1 - 4 * moved.delta / top.gap) * (1 - 0x1p-20));
  EXPECT_LE(beta, 0x1p60);
}

// What devices together gave, beside the oracle at their betas.
template <typename Real>
struct Gathered {
  oracle::Forward<Real> exact;
  std::vector<double> out;
};

// States, betas and masses of every row, as documented. What may differ in the output is the caller's to say.
template <typename Arithmetic>
Gathered<typename Contract<Arithmetic>::Real> gather(const oracle::Attention& p, Devices& devices) {
  using Real = typename Contract<Arithmetic>::Real;
  const std::vector<RowState> merged = devices.merged_states();
  const std::vector<RowScale> rows = scales_of(p, devices, merged);
  std::vector<double> masses, betas;
  const std::vector<double> out = devices.merged_outputs(rows, masses);
  for (const RowScale& row : rows) betas.push_back(row.beta);
  const oracle::Forward<Real> exact = oracle::forward<Real>(p, betas);
  oracle::for_each_row(p, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t r = p.row(b, h, i);
    SCOPED_TRACE("row " + std::to_string(r));
    const oracle::AttentionRow<Real>& row = exact.rows[r];
    expect_merged_state<Arithmetic>(row, p.D, merged[r]);
    if (std::isnan(merged[r].z)) return;
    const Perturbation<Real> moved =
        row.count() == 0 ? Perturbation<Real>{} : perturbation_of<Arithmetic>(row, p.D, Real{betas[r]});
    expect_shard_beta<Arithmetic>(row, p.rule(h), betas[r], moved);
    if (row.count() == 0 || !moved.conditioned) return;
    // Every term of the mass is known as a weight is.
    const oracle::State<Real> at_beta = oracle::state<Real>(row.logits, Real{betas[r]});
    const Real terms = at_beta.z + betas[r] * std::abs(at_beta.t);
    expect_within<Real>(masses[r], at_beta.z,
                        Contract<Arithmetic>::weight * terms + 4 * betas[r] * moved.delta * at_beta.z,
                        "mass");
  });
  return {exact, out};
}

}  // namespace whet

#endif  // WHET_TESTS_SHARD_CASES_H_
