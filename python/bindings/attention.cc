// Attention and its gradient. Outputs are allocated by the caller; the work runs without the GIL.

#include <whet/attention.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention_arguments.h"
#include "bindings.h"
#include "openmp.h"
#include "options.h"
#include "rules.h"
#include "views.h"

namespace whet_python {

namespace {

using Arguments = AttentionArguments;

// One name, or a list or tuple of one per query head.
void set_rule(Arguments& a, nb::handle value, const char* name) {
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) {
    a.options.rule = rule_of(value, name);
    return;
  }
  for (const nb::handle rule : nb::borrow<nb::sequence>(value)) a.head_rules.push_back(rule_of(rule, name));
  // No heads and no rules is right; one rule too few or many is for attention to refuse.
  a.options.head_rules = a.head_rules;
}

void set_align(Arguments& a, nb::handle value, const char* name) {
  const std::string_view text = text_of(value, name);
  if (text != "start" && text != "end") {
    wrong_value(name, "is '" + std::string(text) + "', must be 'start' or 'end'");
  }
  a.options.align = text == "end" ? whet::Align::end : whet::Align::start;
}

void set_tile_counts(Arguments& a, nb::handle value, const char* name) {
  const auto counts = span_of<whet::TileCounts, std::int64_t>(value, name);
  if (counts.size() != 1) wrong_value(name, "must have 2 elements");
  a.outputs.tile_counts = counts.data();
}

void set_hold_beta(Arguments& a, nb::handle value, const char* name) {
  a.backward.beta_gradient =
      flag_of(value, name) ? whet::BetaGradient::held : whet::BetaGradient::through_rule;
}

using A = Arguments;
using H = nb::handle;
using N = const char*;

constexpr Option<A> kRule[] = {{"rule", set_rule}};

constexpr Option<A> kOptions[] = {
    {"normalizer", [](A& a, H v, N n) { a.options.normalizer = normalizer_of(v, n); }},
    {"scale", [](A& a, H v, N n) { a.options.scale = number_of(v, n); }},
    {"query_scale", [](A& a, H v, N n) { a.options.query_scale = view_of(v, n); }},
    {"softcap", [](A& a, H v, N n) { a.options.softcap = number_of(v, n); }},
    {"bias", [](A& a, H v, N n) { a.options.bias = view_of(v, n); }},
    {"mask", [](A& a, H v, N n) { a.options.mask = view_of(v, n); }},
    {"sinks", [](A& a, H v, N n) { a.options.sinks = view_of(v, n); }},
    {"causal", [](A& a, H v, N n) { a.options.causal = flag_of(v, n); }},
    {"align", set_align},
    {"window_left", [](A& a, H v, N n) { a.options.window_left = integer_of(v, n); }},
    {"window_right", [](A& a, H v, N n) { a.options.window_right = integer_of(v, n); }},
    {"lengths", [](A& a, H v, N n) { a.options.lengths = span_of<const std::int64_t>(v, n); }},
    {"query_starts", [](A& a, H v, N n) { a.options.query_starts = span_of<const std::int64_t>(v, n); }},
    {"key_starts", [](A& a, H v, N n) { a.options.key_starts = span_of<const std::int64_t>(v, n); }},
    {"dropout", [](A& a, H v, N n) { a.options.dropout = number_of(v, n); }},
    {"dropout_seed",
     [](A& a, H v, N n) { a.options.dropout_seed = static_cast<std::uint64_t>(integer_of(v, n)); }},
    {"skip_epsilon", [](A& a, H v, N n) { a.options.skip_epsilon = number_of(v, n); }},
    {"threads", [](A& a, H v, N n) { a.execution.threads = small_integer_of(v, n); }},
    {"openmp_threads",
     [](A& a, H v, N n) { a.execution.executor = openmp_executor(small_integer_of(v, n)); }},
};

constexpr Option<A> kOutputs[] = {
    {"stats", [](A& a, H v, N n) { a.outputs.stats = span_of<whet::RowStats, double>(v, n); }},
    {"saved", [](A& a, H v, N n) { a.outputs.saved = written_view_of(v, n); }},
    {"weight_rows",
     [](A& a, H v, N n) { a.outputs.weight_rows = span_of<const whet::RowIndex, std::int64_t>(v, n); }},
    {"weights", [](A& a, H v, N n) { a.outputs.weights = written_view_of(v, n); }},
    {"top_k", [](A& a, H v, N n) { a.outputs.top_k = integer_of(v, n); }},
    {"top_keys", [](A& a, H v, N n) { a.outputs.top_keys = span_of<std::int64_t>(v, n); }},
    {"top_weights", [](A& a, H v, N n) { a.outputs.top_weights = span_of<float>(v, n); }},
    {"column_sums", [](A& a, H v, N n) { a.outputs.column_sums = span_of<double>(v, n); }},
    {"tile_counts", set_tile_counts},
};

constexpr Option<A> kGradients[] = {
    {"dq", [](A& a, H v, N n) { a.gradients.dq = written_view_of(v, n); }},
    {"dk", [](A& a, H v, N n) { a.gradients.dk = written_view_of(v, n); }},
    {"dv", [](A& a, H v, N n) { a.gradients.dv = written_view_of(v, n); }},
    {"dbias", [](A& a, H v, N n) { a.gradients.dbias = written_view_of(v, n); }},
    {"dsinks", [](A& a, H v, N n) { a.gradients.dsinks = written_view_of(v, n); }},
    {"dquery_scale", [](A& a, H v, N n) { a.gradients.dquery_scale = written_view_of(v, n); }},
    {"dparameter", [](A& a, H v, N n) { a.gradients.dparameter = span_of<double>(v, n); }},
};

constexpr Option<A> kBackward[] = {
    {"hold_beta", set_hold_beta},
    {"saved", [](A& a, H v, N n) { a.backward.saved = view_of(v, n); }},
};

void attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const whet::View to = written_view_of(out, "out");
  Arguments a;
  set_options(a, given, {kRule, kOptions, kOutputs});
  const nb::gil_scoped_release released;
  whet::attention(queries, keys, values, to, a.options, a.outputs, a.execution);
}

void attention_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle dout, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const whet::ConstView from = view_of(dout, "dout");
  Arguments a;
  set_options(a, given, {kRule, kOptions, kGradients, kBackward});
  const nb::gil_scoped_release released;
  whet::attention_backward(queries, keys, values, from, a.gradients, a.options, a.backward, a.execution);
}

// Numbers per row of `saved`, for rows and attention alike.
std::int64_t saved_size(nb::handle rule, nb::handle normalizer) {
  Arguments a;
  set_rule(a, rule, "rule");
  if (!normalizer.is_none()) a.options.normalizer = normalizer_of(normalizer, "normalizer");
  return whet::saved_size(a.options);
}

}  // namespace

AttentionTable attention_options() { return kOptions; }

AttentionTable attention_gradients() { return kGradients; }

void add_attention(nb::module_& module) {
  // None comes in, so that it is refused by name.
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  module.def("attention", &attention, arg("q"), arg("k"), arg("v"), arg("out"), nb::arg("options"));
  module.def("attention_backward", &attention_backward, arg("q"), arg("k"), arg("v"), arg("dout"),
             nb::arg("options"));
  module.def("saved_size", &saved_size, arg("rule"), arg("normalizer"));
  module.attr("MAX_HEAD_SIZE") = whet::kMaxHeadSize;
}

}  // namespace whet_python
