// Linear attention and its gradient. Outputs are allocated by the caller; the work runs without the GIL.

#include <whet/linear_attention.h>

#include <cstdint>

#include "bindings.h"
#include "openmp.h"
#include "options.h"
#include "views.h"

namespace whet_python {

namespace {

struct Arguments {
  whet::LinearAttentionOptions options{};
  whet::LinearAttentionGradients gradients{};
  whet::Execution execution{};
};

using A = Arguments;
using H = nb::handle;
using N = const char*;

constexpr Option<A> kOptions[] = {
    {"causal", [](A& a, H v, N n) { a.options.causal = flag_of(v, n); }},
    {"lengths", [](A& a, H v, N n) { a.options.lengths = span_of<const std::int64_t>(v, n); }},
    {"threads", [](A& a, H v, N n) { a.execution.threads = small_integer_of(v, n); }},
    {"openmp_threads",
     [](A& a, H v, N n) { a.execution.executor = openmp_executor(small_integer_of(v, n)); }},
};

constexpr Option<A> kBackward[] = {
    {"dq", [](A& a, H v, N n) { a.gradients.dq = written_view_of(v, n); }},
    {"dk", [](A& a, H v, N n) { a.gradients.dk = written_view_of(v, n); }},
    {"dv", [](A& a, H v, N n) { a.gradients.dv = written_view_of(v, n); }},
};

void linear_attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const whet::View to = written_view_of(out, "out");
  Arguments a;
  set_options(a, given, {kOptions});
  const nb::gil_scoped_release released;
  whet::linear_attention(queries, keys, values, to, a.options, a.execution);
}

void linear_attention_backward(nb::handle q, nb::handle k, nb::handle v, nb::handle dout,
                               const nb::kwargs& given) {
  const whet::ConstView queries = view_of(q, "q"), keys = view_of(k, "k"), values = view_of(v, "v");
  const whet::ConstView from = view_of(dout, "dout");
  Arguments a;
  set_options(a, given, {kOptions, kBackward});
  const nb::gil_scoped_release released;
  whet::linear_attention_backward(queries, keys, values, from, a.gradients, a.options, a.execution);
}

}  // namespace

void add_linear_attention(nb::module_& module) {
  // None comes in, so that it is refused by name.
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  module.def("linear_attention", &linear_attention, arg("q"), arg("k"), arg("v"), arg("out"),
             nb::arg("options"));
  module.def("linear_attention_backward", &linear_attention_backward, arg("q"), arg("k"), arg("v"),
             arg("dout"), nb::arg("options"));
}

}  // namespace whet_python
