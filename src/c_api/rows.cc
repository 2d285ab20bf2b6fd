#include "core/rows.h"
#include "core/saved_rows.h"

#include "c_api/convert.h"

namespace whet::c_api {
namespace {

static_assert(offsetof(RowState, u) == offsetof(whet_row_state, u));

int axis_of(const ConstView& in, int32_t axis_from_last) {
  const auto dims = static_cast<int32_t>(in.sizes.size());
  if (axis_from_last < 0 || axis_from_last >= dims) {
    throw Error("axis_from_last is " + std::to_string(axis_from_last) + ", must be 0 to " +
                std::to_string(dims - 1) + " for " + std::to_string(dims) + " axes");
  }
  return -1 - axis_from_last;
}

// lengths, stats and states have no size of their own in C: one per row.
std::size_t rows_of(const ConstView& in, int axis) {
  return static_cast<std::size_t>(core::Rows(in, axis).count());
}

SoftmaxOptions options_of(const ConstView& in, const whet_softmax_options* given) {
  const whet_softmax_options o = known_part(given, "options");
  const int axis = axis_of(in, o.axis_from_last);
  return {.rule = rule_of(o.rule),
          .normalizer = normalizer_of(o.normalizer),
          .axis = axis,
          .mask = view_if_given(o.mask, "mask"),
          .lengths = span_if_given(o.lengths, rows_of(in, axis))};
}

// Error if statistics that the call doesn't see overlap its arrays.
void check_unseen(const WrittenStats& stats, const ConstView& in, const View& out, const View& saved,
                  const SoftmaxOptions& problem) {
  if (stats.unseen().empty()) return;
  const core::Rows rows(in, problem.axis);
  const core::Extent written{stats.unseen(), "stats"};
  core::check_apart(written, {rows.array(in, "in"), "in"});
  core::check_apart(written, {rows.output(out, "out"), "out"});
  core::check_apart(written, {rows.mask(problem.mask), "mask"});
  core::check_apart(written, {problem.lengths, "lengths"});
  const DType arithmetic = in.dtype == DType::f64 ? DType::f64 : DType::f32;
  core::check_apart(written,
                    {core::saved_rows(saved, arithmetic, rows.count(), saved_size(problem)), "saved"});
}

using Forward = void(ConstView, View, const SoftmaxOptions&, const SoftmaxOutputs&, const Execution&);

whet_status forward(Forward function, const whet_view* in, const whet_view* out,
                    const whet_softmax_options* options, const whet_softmax_outputs* outputs,
                    const whet_execution* execution) {
  return guarded([&] {
    const ConstView from = view_of(in, "in");
    const SoftmaxOptions problem = options_of(from, options);
    const whet_softmax_outputs o = known_part(outputs, "outputs");
    const WrittenStats stats(o.stats, o.stats_size, rows_of(from, problem.axis));
    const View to = view_of(out, "out"), saved = view_if_given(o.saved, "saved");
    check_unseen(stats, from, to, saved, problem);
    function(from, to, problem, {.stats = stats.span(), .saved = saved}, execution_of(execution));
    stats.finish();
  });
}

}  // namespace
}  // namespace whet::c_api

using namespace whet::c_api;  // NOLINT(google-build-using-namespace): this file is its C functions

whet_status whet_softmax(const whet_view* in, const whet_view* out, const whet_softmax_options* options,
                         const whet_softmax_outputs* outputs, const whet_execution* execution) {
  return forward(whet::softmax, in, out, options, outputs, execution);
}

whet_status whet_sharpen(const whet_view* in, const whet_view* out, const whet_softmax_options* options,
                         const whet_softmax_outputs* outputs, const whet_execution* execution) {
  return forward(whet::sharpen, in, out, options, outputs, execution);
}

whet_status whet_saved_size(const char* rule, const char* normalizer, int64_t* size) {
  return guarded([&] {
    required(size, "size") = whet::saved_size(
        whet::SoftmaxOptions{.rule = rule_of(rule), .normalizer = normalizer_of(normalizer)});
  });
}

whet_status whet_softmax_backward(const whet_view* in, const whet_view* dout, const whet_view* din,
                                  const whet_softmax_options* options,
                                  const whet_softmax_backward_options* backward,
                                  const whet_execution* execution) {
  return guarded([&] {
    const whet::ConstView from = view_of(in, "in");
    const whet::SoftmaxOptions problem = options_of(from, options);
    const whet_softmax_backward_options b = known_part(backward, "backward");
    whet::softmax_backward(from, view_of(dout, "dout"), view_of(din, "din"), problem,
                           {.beta_gradient = beta_gradient(b.hold_beta),
                            .saved = view_if_given(b.saved, "saved"),
                            .dparameter = span_if_given(b.dparameter, rows_of(from, problem.axis))},
                           execution_of(execution));
  });
}

whet_status whet_states(const whet_view* in, whet_row_state* out, const whet_states_options* options,
                        const whet_execution* execution) {
  return guarded([&] {
    const whet_states_options o = known_part(options, "options");
    const whet::ConstView from = view_of(in, "in");
    const int axis = axis_of(from, o.axis_from_last);
    const std::size_t rows = rows_of(from, axis);
    whet::states(
        from, elements<whet::RowState>(out, rows, "out"),
        {.axis = axis, .mask = view_if_given(o.mask, "mask"), .lengths = span_if_given(o.lengths, rows)},
        execution_of(execution));
  });
}

whet_status whet_merge(const whet_row_state* a, const whet_row_state* b, whet_row_state* out) {
  return guarded([&] {
    elements<whet::RowState>(out, 1, "out")[0] = whet::merge(elements<const whet::RowState>(a, 1, "a")[0],
                                                             elements<const whet::RowState>(b, 1, "b")[0]);
  });
}
