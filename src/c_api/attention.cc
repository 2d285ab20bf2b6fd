#include "c_api/attention.h"

#include "c_api/convert.h"
#include "core/attention_job.h"

namespace whet::c_api {

namespace {

static_assert(sizeof(RowIndex) == sizeof(whet_row_index) && sizeof(TileCounts) == sizeof(whet_tile_counts));

// The views every attention function begins with, and its options.
struct Call {
  ConstView q, k, v;
  core::AttentionShape shape;
  std::vector<Rule> head_rules;  // what options.head_rules points to
  AttentionOptions options;
  Execution execution;

  Call(const whet_view* q_, const whet_view* k_, const whet_view* v_, const whet_attention_options* given,
       const whet_execution* how)
      : q(view_of(q_, "q")),
        k(view_of(k_, "k")),
        v(view_of(v_, "v")),
        shape(core::attention_shape_job(q, k, v, {}).shape),
        execution(execution_of(how)) {
    const whet_attention_options o = known_part(given, "options");
    options = options_of(o);
    for (std::int64_t i = 0; o.head_rules != nullptr && i < shape.heads; ++i) {
      head_rules.push_back(rule_of(o.head_rules[i]));
    }
    options.head_rules = head_rules;
  }
  Call(const Call&) = delete;

  std::size_t rows() const { return static_cast<std::size_t>(shape.rows()); }
};

// Arrays in C have no sizes of their own: those that follow from the shapes.
AttentionOutputs outputs_of(const whet_attention_outputs& o, const WrittenStats& stats, const Call& call) {
  std::size_t top = 0;
  if (o.top_k < 0 || __builtin_mul_overflow(call.rows(), static_cast<std::size_t>(o.top_k), &top)) {
    top = 0;  // attention says what is wrong with top_k
  }
  const core::AttentionShape& s = call.shape;
  return {.stats = stats.span(),
          .saved = view_if_given(o.saved, "saved"),
          .weight_rows = o.weight_rows == nullptr
                             ? std::span<const RowIndex>()
                             : elements<const RowIndex>(o.weight_rows, o.weight_rows_count, "weight_rows"),
          .weights = view_if_given(o.weights, "weights"),
          .top_k = o.top_k,
          .top_keys = span_if_given(o.top_keys, top),
          .top_weights = span_if_given(o.top_weights, top),
          .column_sums = span_if_given(o.column_sums, static_cast<std::size_t>(s.batch * s.heads * s.keys)),
          .tile_counts = reinterpret_cast<TileCounts*>(o.tile_counts)};
}

AttentionBackwardOptions backward_of(const whet_attention_backward_options* given) {
  const whet_attention_backward_options b = known_part(given, "backward");
  return {.beta_gradient = beta_gradient(b.hold_beta), .saved = view_if_given(b.saved, "saved")};
}

}  // namespace

AttentionGradients gradients_of(const whet_attention_gradients* given, std::size_t rows) {
  required(given, "gradients");
  const whet_attention_gradients g = known_part(given, "gradients");
  return {.dq = view_if_given(g.dq, "dq"),
          .dk = view_if_given(g.dk, "dk"),
          .dv = view_if_given(g.dv, "dv"),
          .dbias = view_if_given(g.dbias, "dbias"),
          .dsinks = view_if_given(g.dsinks, "dsinks"),
          .dquery_scale = view_if_given(g.dquery_scale, "dquery_scale"),
          .dparameter = span_if_given(g.dparameter, rows)};
}

AttentionOptions options_of(const whet_attention_options& o) {
  AttentionOptions options{.rule = rule_of(o.rule),
                           .normalizer = normalizer_of(o.normalizer),
                           .query_scale = view_if_given(o.query_scale, "query_scale"),
                           .softcap = o.softcap,
                           .bias = view_if_given(o.bias, "bias"),
                           .mask = view_if_given(o.mask, "mask"),
                           .sinks = view_if_given(o.sinks, "sinks"),
                           .causal = o.causal != 0,
                           .align = o.align_end != 0 ? Align::end : Align::start,
                           .lengths = span_if_given(o.lengths, o.lengths_count),
                           .query_starts = span_if_given(o.query_starts, o.starts_count),
                           .key_starts = span_if_given(o.key_starts, o.starts_count),
                           .dropout = o.dropout,
                           .dropout_seed = o.dropout_seed};
  if (is_set(o.has_scale, o.scale, "scale")) options.scale = o.scale;
  if (is_set(o.has_skip_epsilon, o.skip_epsilon, "skip_epsilon")) options.skip_epsilon = o.skip_epsilon;
  if (is_set(o.has_window_left, o.window_left, "window_left")) options.window_left = o.window_left;
  if (is_set(o.has_window_right, o.window_right, "window_right")) options.window_right = o.window_right;
  return options;
}

}  // namespace whet::c_api

using namespace whet::c_api;  // NOLINT(google-build-using-namespace): this file is its C functions

whet_status whet_attention(const whet_view* q, const whet_view* k, const whet_view* v, const whet_view* out,
                           const whet_attention_options* options, const whet_attention_outputs* outputs,
                           const whet_execution* execution) {
  return guarded([&] {
    const Call call(q, k, v, options, execution);
    const whet_attention_outputs o = known_part(outputs, "outputs");
    const WrittenStats stats(o.stats, o.stats_size, call.rows());
    const whet::View to = view_of(out, "out");
    const whet::AttentionOutputs written = outputs_of(o, stats, call);
    if (!stats.unseen().empty()) {
      whet::core::check_apart(
          whet::core::attention_job(call.q, call.k, call.v, to, call.options, written, call.execution),
          {stats.unseen(), "stats"});
    }
    whet::attention(call.q, call.k, call.v, to, call.options, written, call.execution);
    stats.finish();
  });
}

whet_status whet_attention_workspace(const whet_view* q, const whet_view* k, const whet_view* v,
                                     const whet_attention_options* options,
                                     const whet_attention_outputs* outputs, const whet_execution* execution,
                                     size_t* bytes) {
  return guarded([&] {
    const Call call(q, k, v, options, execution);
    const whet_attention_outputs o = known_part(outputs, "outputs");
    const WrittenStats stats(o.stats, o.stats_size, call.rows());
    required(bytes, "bytes") = whet::attention_workspace(call.q, call.k, call.v, call.options,
                                                         outputs_of(o, stats, call), call.execution);
  });
}

whet_status whet_attention_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                    const whet_view* dout, const whet_attention_gradients* gradients,
                                    const whet_attention_options* options,
                                    const whet_attention_backward_options* backward,
                                    const whet_execution* execution) {
  return guarded([&] {
    const Call call(q, k, v, options, execution);
    whet::attention_backward(call.q, call.k, call.v, view_of(dout, "dout"),
                             gradients_of(gradients, call.rows()), call.options, backward_of(backward),
                             call.execution);
  });
}

whet_status whet_attention_backward_workspace(const whet_view* q, const whet_view* k, const whet_view* v,
                                              const whet_attention_gradients* gradients,
                                              const whet_attention_options* options,
                                              const whet_attention_backward_options* backward,
                                              const whet_execution* execution, size_t* bytes) {
  return guarded([&] {
    const Call call(q, k, v, options, execution);
    required(bytes, "bytes") =
        whet::attention_backward_workspace(call.q, call.k, call.v, gradients_of(gradients, call.rows()),
                                           call.options, backward_of(backward), call.execution);
  });
}
