#include <whet/linear_attention.h>

#include "c_api/convert.h"

using namespace whet::c_api;  // NOLINT(google-build-using-namespace): this file is its C functions

namespace {

whet::LinearAttentionOptions linear_options_of(const whet_linear_attention_options* given) {
  const whet_linear_attention_options o = known_part(given, "options");
  return {.causal = o.causal != 0, .lengths = span_if_given(o.lengths, o.lengths_count)};
}

whet::LinearAttentionGradients linear_gradients_of(const whet_linear_attention_gradients* given) {
  required(given, "gradients");
  const whet_linear_attention_gradients g = known_part(given, "gradients");
  return {.dq = view_if_given(g.dq, "dq"), .dk = view_if_given(g.dk, "dk"), .dv = view_if_given(g.dv, "dv")};
}

}  // namespace

whet_status whet_linear_attention(const whet_view* q, const whet_view* k, const whet_view* v,
                                  const whet_view* out, const whet_linear_attention_options* options,
                                  const whet_execution* execution) {
  return guarded([&] {
    whet::linear_attention(view_of(q, "q"), view_of(k, "k"), view_of(v, "v"), view_of(out, "out"),
                           linear_options_of(options), execution_of(execution));
  });
}

whet_status whet_linear_attention_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                           const whet_view* dout,
                                           const whet_linear_attention_gradients* gradients,
                                           const whet_linear_attention_options* options,
                                           const whet_execution* execution) {
  return guarded([&] {
    whet::linear_attention_backward(view_of(q, "q"), view_of(k, "k"), view_of(v, "v"), view_of(dout, "dout"),
                                    linear_gradients_of(gradients), linear_options_of(options),
                                    execution_of(execution));
  });
}
