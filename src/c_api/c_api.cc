// The C ABI: the C++ functions with exceptions turned into status codes.

#include <whet/c_api.h>
#include <whet/whet.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "core/attention_job.h"
#include "core/rows.h"

namespace {

thread_local std::string last_error;

static_assert(sizeof(whet::RowState) == sizeof(whet_row_state) &&
              offsetof(whet::RowState, u) == offsetof(whet_row_state, u));
static_assert(sizeof(whet::RowStats) == WHET_STATS_FIELDS * sizeof(double));
static_assert(sizeof(whet::RowIndex) == 3 * sizeof(int64_t));
static_assert(sizeof(whet::TileCounts) == 2 * sizeof(int64_t));
static_assert(std::size(whet_rule{}.values) == 4 + whet::Rule::kMaxCoefficients);

whet_status failed(whet_status status, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.assign("out of memory");  // fits the string's own buffer: can't fail
  }
  return status;
}

// Nothing thrown inside leaves a C function.
template <typename F>
whet_status guarded(F&& body) noexcept {
  try {
    body();
    return WHET_OK;
  } catch (const whet::Error& e) {
    return failed(WHET_INVALID_ARGUMENT, e.what());
  } catch (const std::bad_alloc&) {
    return failed(WHET_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return failed(WHET_INTERNAL_ERROR, e.what());
  } catch (...) {
    return failed(WHET_INTERNAL_ERROR, "unknown exception");
  }
}

whet::View view_of(const whet_view* v, const char* name) {
  if (v == nullptr) throw whet::Error(std::string(name) + " is null");
  if (v->dims < 1 || v->dims > static_cast<std::int32_t>(whet::kMaxDims)) {
    throw whet::Error(std::string(name) + ": dims is " + std::to_string(v->dims) + ", must be 1 to 8");
  }
  if (v->dtype < WHET_F32 || v->dtype > WHET_BOOLEAN) {
    throw whet::Error(std::string(name) + ": dtype is " + std::to_string(v->dtype) +
                      ", must be a whet_dtype");
  }
  if (v->sizes == nullptr) throw whet::Error(std::string(name) + ": sizes is null");
  const auto dims = static_cast<std::size_t>(v->dims);
  const auto list = [&](const std::int64_t* p) {
    return p == nullptr ? whet::Dims() : whet::Dims(std::span(p, dims));
  };
  return {v->data, static_cast<whet::DType>(v->dtype), list(v->sizes), list(v->strides)};
}

template <typename Options>
void check_struct_size(const Options& given, const char* defaults) {
  if (given.struct_size < sizeof(Options)) {
    throw whet::Error("options: struct_size is " + std::to_string(given.struct_size) + ", must be " +
                      std::to_string(sizeof(Options)) + " (start from " + defaults + ")");
  }
  if (given.struct_size > sizeof(Options)) {
    throw whet::Error("options: made for a later version of whet than " WHET_VERSION);
  }
}

whet_options options_of(const whet_options* given) {
  whet_options options = WHET_OPTIONS_DEFAULT;
  if (given == nullptr) return options;
  check_struct_size(*given, "WHET_OPTIONS_DEFAULT");
  if (given->reserved != 0) {
    throw whet::Error("options: made for a later version of whet than " WHET_VERSION);
  }
  return *given;
}

whet_attention_options options_of(const whet_attention_options* given) {
  whet_attention_options options = WHET_ATTENTION_OPTIONS_DEFAULT;
  if (given == nullptr) return options;
  check_struct_size(*given, "WHET_ATTENTION_OPTIONS_DEFAULT");
  return *given;
}

// A rule by value: kind, number of coefficients, then parameter, factor, gate, hold, coefficients.
whet_rule to_c(const whet::Rule& rule) {
  whet_rule r{
      static_cast<std::int32_t>(rule.kind()), static_cast<std::int32_t>(rule.coefficients().size()), {}};
  const double head[] = {rule.parameter(), rule.factor(), rule.gate(), rule.hold()};
  std::ranges::copy(rule.coefficients(), std::ranges::copy(head, r.values).out);
  return r;
}

// Through the same doors as everybody else, so that a damaged whet_rule is an error.
whet::Rule from_c(const whet_rule& r) {
  using whet::Rule;
  switch (static_cast<Rule::Kind>(r.kind)) {
    case Rule::Kind::none:
      return Rule::none();
    case Rule::Kind::fixed:
      return Rule::fixed(r.values[0]);
    case Rule::Kind::paper:
      return Rule::paper();
    case Rule::Kind::polynomial:
      if (r.terms < 1 || r.terms > static_cast<std::int32_t>(Rule::kMaxCoefficients)) break;
      return Rule::polynomial(std::span(r.values + 4, static_cast<std::size_t>(r.terms)), r.values[2],
                              r.values[3]);
    case Rule::Kind::log_length:
      return Rule::log_length(r.values[0], r.values[1]);
    case Rule::Kind::ssmax:
      return Rule::ssmax(r.values[0]);
    case Rule::Kind::target_entropy:
      return Rule::target_entropy(r.values[0]);
    case Rule::Kind::target_peak:
      return Rule::target_peak(r.values[0]);
  }
  throw whet::Error("options: rule is not one that whet_rule_parse made");
}

// lengths and stats have no size of their own in C: one a row of `in`.
std::size_t rows_of(const whet::ConstView& in, int axis) {
  return static_cast<std::size_t>(whet::core::Rows(in, axis).count());
}

whet::View view_if_given(const whet_view* v, const char* name) {
  return v == nullptr ? whet::View() : view_of(v, name);
}

template <typename T>
std::span<T> span_if_given(T* data, std::size_t size) {
  return data == nullptr ? std::span<T>() : std::span<T>(data, size);
}

whet::SoftmaxOptions softmax_options(const whet::ConstView& in, const whet_options& o) {
  const std::size_t rows = rows_of(in, o.axis);
  return {.rule = from_c(o.rule),
          .axis = o.axis,
          .mask = view_if_given(o.mask, "mask"),
          .lengths = span_if_given(o.lengths, rows)};
}

std::span<whet::RowStats> stats_of(const whet::ConstView& in, const whet_options& o) {
  return span_if_given(reinterpret_cast<whet::RowStats*>(o.stats), rows_of(in, o.axis));
}

// The three views every attention function begins with, and its options in C++.
struct AttentionCall {
  whet::ConstView q, k, v;
  std::vector<whet::Rule> head_rules;  // what options.head_rules points to
  whet::AttentionOptions options;
  whet::AttentionOutputs outputs;
  whet::Execution execution;
};

// Arrays in C have no sizes of their own: those that follow from the shapes.
void set_arrays(const whet_attention_options& o, const whet::core::AttentionShape& shape,
                AttentionCall& call) {
  const auto rows = static_cast<std::size_t>(shape.rows());
  std::size_t places = 0;
  if (o.top_k < 0 || __builtin_mul_overflow(rows, static_cast<std::size_t>(o.top_k), &places)) {
    places = 0;  // attention says what is wrong with top_k
  }
  call.options.lengths = span_if_given(o.lengths, o.lengths_count);
  call.options.query_starts = span_if_given(o.query_starts, o.starts_count);
  call.options.key_starts = span_if_given(o.key_starts, o.starts_count);
  call.outputs.stats = span_if_given(reinterpret_cast<whet::RowStats*>(o.stats), rows);
  call.outputs.weight_rows =
      span_if_given(reinterpret_cast<const whet::RowIndex*>(o.weight_rows), o.weight_rows_count);
  call.outputs.top_keys = span_if_given(o.top_keys, places);
  call.outputs.top_weights = span_if_given(o.top_weights, places);
  call.outputs.column_sums =
      span_if_given(o.column_sums, static_cast<std::size_t>(shape.batch * shape.heads * shape.keys));
  call.outputs.tile_counts = reinterpret_cast<whet::TileCounts*>(o.tile_counts);
  call.execution.workspace = span_if_given(static_cast<std::byte*>(o.workspace), o.workspace_bytes);
}

AttentionCall attention_call(const whet_view* q, const whet_view* k, const whet_view* v,
                             const whet_attention_options& o) {
  AttentionCall call{.q = view_of(q, "q"),
                     .k = view_of(k, "k"),
                     .v = view_of(v, "v"),
                     .head_rules = {},
                     .options = {},
                     .outputs = {},
                     .execution = {}};
  const whet::core::AttentionShape shape = whet::core::attention_shape_job(call.q, call.k, call.v, {}).shape;
  if (o.head_rules != nullptr) {
    for (std::int64_t i = 0; i < shape.heads; ++i) call.head_rules.push_back(from_c(o.head_rules[i]));
  }
  whet::AttentionOptions& options = call.options;
  options.rule = from_c(o.rule);
  options.head_rules = call.head_rules;
  if (o.scale != 0) options.scale = o.scale;
  options.query_scale = view_if_given(o.query_scale, "query_scale");
  options.softcap = o.softcap;
  options.bias = view_if_given(o.bias, "bias");
  options.mask = view_if_given(o.mask, "mask");
  options.sinks = view_if_given(o.sinks, "sinks");
  options.causal = o.causal != 0;
  options.align = o.align_end != 0 ? whet::Align::end : whet::Align::start;
  options.window_left = o.window_left;
  options.window_right = o.window_right;
  call.outputs.weights = view_if_given(o.weights, "weights");
  call.outputs.top_k = o.top_k;
  options.skip_epsilon = o.skip_epsilon;
  call.execution.threads = o.threads;
  set_arrays(o, shape, call);
  return call;
}

whet::AttentionGradients gradients_of(const whet_attention_gradients* g) {
  if (g == nullptr) throw whet::Error("gradients is null");
  return {.dq = view_if_given(g->dq, "dq"),
          .dk = view_if_given(g->dk, "dk"),
          .dv = view_if_given(g->dv, "dv"),
          .dbias = view_if_given(g->dbias, "dbias"),
          .dsinks = view_if_given(g->dsinks, "dsinks")};
}

whet::BetaGradient beta_gradient(std::int32_t hold_beta) {
  return hold_beta != 0 ? whet::BetaGradient::held : whet::BetaGradient::through_rule;
}

whet::RowState from_c(const whet_row_state* s) { return std::bit_cast<whet::RowState>(*s); }

}  // namespace

extern "C" {

const char* whet_version(void) { return WHET_VERSION; }

const char* whet_last_error(void) { return last_error.c_str(); }

whet_status whet_rule_parse(const char* name, whet_rule* rule) {
  return guarded([&] {
    if (name == nullptr) throw whet::Error("name is null");
    if (rule == nullptr) throw whet::Error("rule is null");
    *rule = to_c(whet::Rule::parse(name));
  });
}

whet_status whet_softmax(const whet_view* in, const whet_view* out, const whet_options* options) {
  return guarded([&] {
    const whet_options o = options_of(options);
    const whet::ConstView from = view_of(in, "in");
    whet::softmax(from, view_of(out, "out"), softmax_options(from, o), {.stats = stats_of(from, o)},
                  {.threads = o.threads});
  });
}

whet_status whet_sharpen(const whet_view* in, const whet_view* out, const whet_options* options) {
  return guarded([&] {
    const whet_options o = options_of(options);
    const whet::ConstView from = view_of(in, "in");
    whet::sharpen(from, view_of(out, "out"), softmax_options(from, o), {.stats = stats_of(from, o)},
                  {.threads = o.threads});
  });
}

whet_status whet_softmax_backward(const whet_view* in, const whet_view* dout, const whet_view* din,
                                  const whet_options* options) {
  return guarded([&] {
    const whet_options o = options_of(options);
    const whet::ConstView from = view_of(in, "in");
    whet::softmax_backward(from, view_of(dout, "dout"), view_of(din, "din"), softmax_options(from, o),
                           {.beta_gradient = beta_gradient(o.hold_beta), .stats = stats_of(from, o)},
                           {.threads = o.threads});
  });
}

whet_status whet_states(const whet_view* in, whet_row_state* out, const whet_options* options) {
  return guarded([&] {
    const whet_options o = options_of(options);
    const whet::ConstView from = view_of(in, "in");
    const std::size_t rows = rows_of(from, o.axis);
    if (out == nullptr && rows > 0) throw whet::Error("out is null");
    whet::states(
        from, std::span(reinterpret_cast<whet::RowState*>(out), rows),
        {.axis = o.axis, .mask = view_if_given(o.mask, "mask"), .lengths = span_if_given(o.lengths, rows)},
        {.threads = o.threads});
  });
}

whet_row_state whet_merge(const whet_row_state* a, const whet_row_state* b) {
  return std::bit_cast<whet_row_state>(whet::merge(from_c(a), from_c(b)));
}

whet_status whet_attention(const whet_view* q, const whet_view* k, const whet_view* v, const whet_view* out,
                           const whet_attention_options* options) {
  return guarded([&] {
    const AttentionCall call = attention_call(q, k, v, options_of(options));
    whet::attention(call.q, call.k, call.v, view_of(out, "out"), call.options, call.outputs, call.execution);
  });
}

whet_status whet_attention_workspace(const whet_view* q, const whet_view* k, const whet_view* v,
                                     const whet_attention_options* options, size_t* bytes) {
  return guarded([&] {
    if (bytes == nullptr) throw whet::Error("bytes is null");
    const AttentionCall call = attention_call(q, k, v, options_of(options));
    *bytes = whet::attention_workspace(call.q, call.k, call.v, call.options, call.outputs, call.execution);
  });
}

whet_status whet_attention_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                    const whet_view* dout, const whet_attention_gradients* gradients,
                                    const whet_attention_options* options) {
  return guarded([&] {
    const whet_attention_options o = options_of(options);
    const AttentionCall call = attention_call(q, k, v, o);
    whet::attention_backward(
        call.q, call.k, call.v, view_of(dout, "dout"), gradients_of(gradients), call.options,
        {.beta_gradient = beta_gradient(o.hold_beta), .stats = call.outputs.stats}, call.execution);
  });
}

whet_status whet_attention_backward_workspace(const whet_view* q, const whet_view* k, const whet_view* v,
                                              const whet_attention_gradients* gradients,
                                              const whet_attention_options* options, size_t* bytes) {
  return guarded([&] {
    if (bytes == nullptr) throw whet::Error("bytes is null");
    const AttentionCall call = attention_call(q, k, v, options_of(options));
    *bytes = whet::attention_backward_workspace(call.q, call.k, call.v, gradients_of(gradients), call.options,
                                                {}, call.execution);
  });
}

int whet_threads(void) {
  int count = 0;
  guarded([&] { count = whet::threads(); });
  return count;
}

whet_status whet_set_threads(int count) {
  return guarded([&] { whet::set_threads(count); });
}

const char* whet_target(void) {
  thread_local std::string text;
  return guarded([&] { text = whet::target(); }) == WHET_OK ? text.c_str() : nullptr;
}

const char* whet_targets(void) {
  thread_local std::string text;
  const whet_status status = guarded([&] {
    std::string list;
    for (const std::string& name : whet::targets()) list += (list.empty() ? "" : " ") + name;
    text = list;
  });
  return status == WHET_OK ? text.c_str() : nullptr;
}

whet_status whet_force_target(const char* name) {
  return guarded([&] {
    if (name == nullptr) throw whet::Error("name is null");
    whet::force_target(name);
  });
}

}  // extern "C"
