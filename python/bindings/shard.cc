// Attention over keys kept apart (whet/shard.h). What is exchanged are arrays of numbers, one record per row.

#include <whet/shard.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention_arguments.h"
#include "bindings.h"
#include "rules.h"
#include "values.h"
#include "views.h"

namespace whet_python {

namespace {

using A = AttentionArguments;

constexpr Option<A> kShard[] = {
    {"first_key", [](A& a, nb::handle v, const char* n) { a.shard.first_key = integer_of(v, n); }},
    {"all_keys", [](A& a, nb::handle v, const char* n) { a.shard.all_keys = integer_of(v, n); }},
    {"first_query", [](A& a, nb::handle v, const char* n) { a.shard.first_query = integer_of(v, n); }},
    {"all_queries", [](A& a, nb::handle v, const char* n) { a.shard.all_queries = integer_of(v, n); }},
    {"logits", [](A& a, nb::handle v, const char* n) { a.shard.logits = written_view_of(v, n); }},
    {"packed", [](A& a, nb::handle v, const char*) { a.shard.packed = nb::cast<whet::PackedShard*>(v); }},
};

A arguments_of(const nb::kwargs& given, AttentionTable more = {}) {
  A a;
  set_options(a, given, {attention_options(), AttentionTable(kShard), more});
  return a;
}

void shard_states(nb::handle q, nb::handle k, nb::handle out, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k");
  const auto to = span_of<whet::RowState, std::int64_t>(out, "out");
  const A a = arguments_of(given);
  const nb::gil_scoped_release released;
  whet::shard_states(queries, keys, a.shard, to, a.options, a.execution);
}

void shard_sums(nb::handle q, nb::handle k, nb::handle rows, nb::handle out, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k");
  const auto scales = span_of<const whet::RowScale, double>(rows, "rows");
  const auto to = span_of<whet::RowSums, double>(out, "out");
  const A a = arguments_of(given);
  const nb::gil_scoped_release released;
  whet::shard_sums(queries, keys, a.shard, scales, to, a.options, a.execution);
}

void shard_threshold_sums(nb::handle q, nb::handle k, nb::handle rows, nb::handle out,
                          const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k");
  const auto scales = span_of<const whet::RowScale, double>(rows, "rows");
  const auto to = span_of<whet::ThresholdSums, double>(out, "out");
  const A a = arguments_of(given);
  const nb::gil_scoped_release released;
  whet::shard_threshold_sums(queries, keys, a.shard, scales, to, a.options, a.execution);
}

void shard_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle rows, nb::handle out,
                     nb::handle mass, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const auto scales = span_of<const whet::RowScale, double>(rows, "rows");
  const whet::View to = written_view_of(out, "out");
  const auto masses = span_of<double>(mass, "mass");
  const A a = arguments_of(given);
  const nb::gil_scoped_release released;
  whet::shard_attention(queries, keys, values, a.shard, scales, to, masses, a.options, a.execution);
}

void shard_partial_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle betas, nb::handle out,
                             nb::handle states, nb::handle mass, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const auto known = span_of<const double>(betas, "betas");
  const whet::View to = written_view_of(out, "out");
  const auto found = span_of<whet::RowState, std::int64_t>(states, "states");
  const auto masses = span_of<double>(mass, "mass");
  const A a = arguments_of(given);
  const nb::gil_scoped_release released;
  whet::shard_partial_attention(queries, keys, values, a.shard, known, to, found, masses, a.options,
                                a.execution);
}

void shard_gradient_sums(nb::handle q, nb::handle k, nb::handle v, nb::handle dout, nb::handle rows,
                         nb::handle out, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const whet::ConstView from = view_of(dout, "dout");
  const auto weighed = span_of<const whet::WeighedRow, double>(rows, "rows");
  const auto to = span_of<whet::GradientSums, double>(out, "out");
  const A a = arguments_of(given);
  const nb::gil_scoped_release released;
  whet::shard_gradient_sums(queries, keys, values, from, a.shard, weighed, to, a.options, a.execution);
}

void shard_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle dout, nb::handle rows,
                    const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const whet::ConstView from = view_of(dout, "dout");
  const auto slopes = span_of<const whet::RowSlope, double>(rows, "rows");
  const A a = arguments_of(given, attention_gradients());
  const nb::gil_scoped_release released;
  whet::shard_backward(queries, keys, values, from, a.shard, slopes, a.gradients, a.options, a.execution);
}

void check_rows(std::size_t given, std::size_t rows, const char* name) {
  if (given == rows) return;
  wrong_value(name, "has " + std::to_string(given) + " rows, must have " + std::to_string(rows));
}

whet::BetaGradient mode_of(bool hold_beta) {
  return hold_beta ? whet::BetaGradient::held : whet::BetaGradient::through_rule;
}

bool betas_move(nb::handle betas, nb::handle rule, bool hold_beta) {
  const whet::Rule chosen = rule_of(rule, "rule");
  for (const double beta : span_of<const double>(betas, "betas")) {
    if (whet::beta_moves(chosen, beta, mode_of(hold_beta))) return true;
  }
  return false;
}

void row_slopes(nb::handle states, nb::handle rows, nb::handle mass, nb::handle sums, nb::handle out,
                nb::handle rule, bool hold_beta) {
  const auto merged = span_of<const whet::RowState, std::int64_t>(states, "states");
  const auto weighed = span_of<const whet::WeighedRow, double>(rows, "rows");
  const auto masses = span_of<const double>(mass, "mass");
  const auto added = span_of<const whet::GradientSums, double>(sums, "sums");
  const auto to = span_of<whet::RowSlope, double>(out, "out");
  check_rows(weighed.size(), merged.size(), "rows");
  check_rows(masses.size(), merged.size(), "mass");
  check_rows(added.size(), merged.size(), "sums");
  check_rows(to.size(), merged.size(), "out");
  const whet::Rule chosen = rule_of(rule, "rule");
  const nb::gil_scoped_release released;
  for (std::size_t i = 0; i < merged.size(); ++i) {
    to[i] = whet::row_slope(chosen, merged[i], weighed[i], masses[i], added[i], mode_of(hold_beta));
  }
}

// The searches of many rows, in steps that they take together. Those that are done wait.
class BetaSearches {
 public:
  BetaSearches(nb::handle rule, nb::handle states) {
    const whet::Rule chosen = rule_of(rule, "rule");
    for (const whet::RowState& state : span_of<const whet::RowState, std::int64_t>(states, "states")) {
      searches_.emplace_back(chosen, state);
    }
  }

  BetaSearches(const BetaSearches&) = delete;

  // True once all are done; `out` gets the beta of every row.
  bool betas(nb::handle out) const {
    const auto to = span_of<double>(out, "out");
    check_rows(to.size(), searches_.size(), "out");
    bool done = true;
    for (std::size_t i = 0; i < searches_.size(); ++i) {
      to[i] = searches_[i].beta();
      done = done && searches_[i].done();
    }
    return done;
  }

  void absorb(nb::handle sums) {
    const auto added = span_of<const whet::RowSums, double>(sums, "sums");
    check_rows(added.size(), searches_.size(), "sums");
    for (std::size_t i = 0; i < searches_.size(); ++i) {
      if (!searches_[i].done()) searches_[i].absorb(added[i]);
    }
  }

 private:
  std::vector<whet::BetaSearch> searches_;
};

// The same for thresholds.
class ThresholdSearches {
 public:
  // `wide`: shards compute in f64.
  ThresholdSearches(nb::handle normalizer, nb::handle states, nb::handle betas, bool wide) {
    const whet::Normalizer chosen = normalizer_of(normalizer, "normalizer");
    const auto merged = span_of<const whet::RowState, std::int64_t>(states, "states");
    const auto known = span_of<const double>(betas, "betas");
    check_rows(known.size(), merged.size(), "betas");
    for (std::size_t i = 0; i < merged.size(); ++i) {
      searches_.emplace_back(chosen, merged[i], known[i], wide ? whet::DType::f64 : whet::DType::f32);
    }
  }

  ThresholdSearches(const ThresholdSearches&) = delete;

  // True once all are done; `out` gets the threshold of every row.
  bool taus(nb::handle out) const {
    const auto to = span_of<double>(out, "out");
    check_rows(to.size(), searches_.size(), "out");
    bool done = true;
    for (std::size_t i = 0; i < searches_.size(); ++i) {
      to[i] = searches_[i].tau();
      done = done && searches_[i].done();
    }
    return done;
  }

  void absorb(nb::handle sums) {
    const auto added = span_of<const whet::ThresholdSums, double>(sums, "sums");
    check_rows(added.size(), searches_.size(), "sums");
    for (std::size_t i = 0; i < searches_.size(); ++i) searches_[i].absorb(added[i]);
  }

 private:
  std::vector<whet::ThresholdSearch> searches_;
};

bool needs_threshold(nb::handle normalizer) {
  return whet::needs_threshold(normalizer_of(normalizer, "normalizer"));
}

}  // namespace

void add_shards(nb::module_& module) {
  // None comes in, so that it is refused by name.
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  const nb::arg options("options");
  module.def("shard_states", &shard_states, arg("q"), arg("k"), arg("out"), options);
  module.def("shard_sums", &shard_sums, arg("q"), arg("k"), arg("rows"), arg("out"), options);
  module.def("shard_threshold_sums", &shard_threshold_sums, arg("q"), arg("k"), arg("rows"), arg("out"),
             options);
  module.def("shard_attention", &shard_attention, arg("q"), arg("k"), arg("v"), arg("rows"), arg("out"),
             arg("mass"), options);
  module.def("shard_partial_attention", &shard_partial_attention, arg("q"), arg("k"), arg("v"), arg("betas"),
             arg("out"), arg("states"), arg("mass"), options);
  module.def("shard_gradient_sums", &shard_gradient_sums, arg("q"), arg("k"), arg("v"), arg("dout"),
             arg("rows"), arg("out"), options);
  module.def("shard_backward", &shard_backward, arg("q"), arg("k"), arg("v"), arg("dout"), arg("rows"),
             options);
  module.def("betas_move", &betas_move, arg("betas"), arg("rule"), nb::arg("hold_beta"));
  module.def("row_slopes", &row_slopes, arg("states"), arg("rows"), arg("mass"), arg("sums"), arg("out"),
             arg("rule"), nb::arg("hold_beta"));
  nb::class_<whet::PackedShard>(module, "PackedShard").def(nb::init<>());
  nb::class_<BetaSearches>(module, "BetaSearches")
      .def(nb::init<nb::handle, nb::handle>(), arg("rule"), arg("states"))
      .def("betas", &BetaSearches::betas, arg("out"))
      .def("absorb", &BetaSearches::absorb, arg("sums"));
  nb::class_<ThresholdSearches>(module, "ThresholdSearches")
      .def(nb::init<nb::handle, nb::handle, nb::handle, bool>(), arg("normalizer"), arg("states"),
           arg("betas"), nb::arg("wide"))
      .def("taus", &ThresholdSearches::taus, arg("out"))
      .def("absorb", &ThresholdSearches::absorb, arg("sums"));
  module.def("needs_threshold", &needs_threshold, arg("normalizer"));
}

}  // namespace whet_python
