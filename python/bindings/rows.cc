// Functions over rows. Outputs are allocated by the caller; the work runs without the GIL.

#include <whet/row.h>
#include <whet/softmax.h>

#include <cstdint>
#include <span>
#include <string>

#include "bindings.h"
#include "openmp.h"
#include "options.h"
#include "rules.h"
#include "views.h"

namespace whet_python {

namespace {

// The union of what softmax, sharpen, softmax_backward and states may be given.
struct RowOptions {
  whet::Rule rule{};
  whet::Normalizer normalizer{};
  int axis = -1;
  whet::ConstView mask{};
  std::span<const std::int64_t> lengths{};
  whet::SoftmaxOutputs outputs{};
  whet::SoftmaxBackwardOptions backward{};
  whet::Execution execution{};

  whet::SoftmaxOptions softmax() const {
    return {.rule = rule, .normalizer = normalizer, .axis = axis, .mask = mask, .lengths = lengths};
  }
};

using O = RowOptions;
constexpr Option<O> kRule = {"rule", [](O& o, nb::handle v, const char* n) { o.rule = rule_of(v, n); }};
constexpr Option<O> kNormalizer = {
    "normalizer", [](O& o, nb::handle v, const char* n) { o.normalizer = normalizer_of(v, n); }};
constexpr Option<O> kAxis = {"axis",
                             [](O& o, nb::handle v, const char* n) { o.axis = small_integer_of(v, n); }};
constexpr Option<O> kMask = {"mask", [](O& o, nb::handle v, const char* n) { o.mask = view_of(v, n); }};
constexpr Option<O> kLengths = {
    "lengths", [](O& o, nb::handle v, const char* n) { o.lengths = span_of<const std::int64_t>(v, n); }};
constexpr Option<O> kStats = {"stats", [](O& o, nb::handle v, const char* n) {
                                o.outputs.stats = span_of<whet::RowStats, double>(v, n);
                              }};
constexpr Option<O> kSaved = {
    "saved", [](O& o, nb::handle v, const char* n) { o.outputs.saved = written_view_of(v, n); }};
constexpr Option<O> kReadSaved = {
    "saved", [](O& o, nb::handle v, const char* n) { o.backward.saved = view_of(v, n); }};
constexpr Option<O> kDParameter = {
    "dparameter", [](O& o, nb::handle v, const char* n) { o.backward.dparameter = span_of<double>(v, n); }};
constexpr Option<O> kHoldBeta = {
    "hold_beta", [](O& o, nb::handle v, const char* n) {
      o.backward.beta_gradient = flag_of(v, n) ? whet::BetaGradient::held : whet::BetaGradient::through_rule;
    }};
constexpr Option<O> kThreads = {
    "threads", [](O& o, nb::handle v, const char* n) { o.execution.threads = small_integer_of(v, n); }};
constexpr Option<O> kOpenMpThreads = {"openmp_threads", [](O& o, nb::handle v, const char* n) {
                                        o.execution.executor = openmp_executor(small_integer_of(v, n));
                                      }};

constexpr Option<O> kForward[] = {kRule,  kNormalizer, kAxis,    kMask,         kLengths,
                                  kStats, kSaved,      kThreads, kOpenMpThreads};
constexpr Option<O> kBackward[] = {kRule,      kNormalizer, kAxis,          kMask,     kLengths,
                                   kReadSaved, kThreads,    kOpenMpThreads, kHoldBeta, kDParameter};
constexpr Option<O> kStates[] = {kAxis, kMask, kLengths, kThreads};

RowOptions options_of(const nb::kwargs& given, std::span<const Option<O>> known) {
  RowOptions options;
  set_options(options, given, {known});
  return options;
}

using Forward = void(whet::ConstView, whet::View, const whet::SoftmaxOptions&, const whet::SoftmaxOutputs&,
                     const whet::Execution&);

template <Forward function>
void forward(nb::handle in, nb::handle out, const nb::kwargs& given) {
  const whet::ConstView from = view_of(in, "in");
  const whet::View to = written_view_of(out, "out");
  const RowOptions o = options_of(given, kForward);
  const nb::gil_scoped_release released;
  function(from, to, o.softmax(), o.outputs, o.execution);
}

void softmax_backward(nb::handle in, nb::handle dout, nb::handle din, const nb::kwargs& given) {
  const whet::ConstView from = view_of(in, "in");
  const whet::ConstView dfrom = view_of(dout, "dout");
  const whet::View to = written_view_of(din, "din");
  const RowOptions o = options_of(given, kBackward);
  const nb::gil_scoped_release released;
  whet::softmax_backward(from, dfrom, to, o.softmax(), o.backward, o.execution);
}

void states(nb::handle in, nb::handle out, const nb::kwargs& given) {
  const whet::ConstView from = view_of(in, "in");
  const auto to = span_of<whet::RowState, std::int64_t>(out, "out");
  const RowOptions o = options_of(given, kStates);
  const whet::StatesOptions options{.axis = o.axis, .mask = o.mask, .lengths = o.lengths};
  const nb::gil_scoped_release released;
  whet::states(from, to, options, o.execution);
}

// Element by element; `out` may be `a` or `b`.
void merge(nb::handle a, nb::handle b, nb::handle out) {
  const auto first = span_of<const whet::RowState, std::int64_t>(a, "a");
  const auto second = span_of<const whet::RowState, std::int64_t>(b, "b");
  const auto to = span_of<whet::RowState, std::int64_t>(out, "out");
  if (second.size() != first.size() || to.size() != first.size()) {
    wrong_value("b", "a, b and out have " + std::to_string(first.size()) + ", " +
                         std::to_string(second.size()) + " and " + std::to_string(to.size()) +
                         " states, must have as many");
  }
  const nb::gil_scoped_release released;
  for (std::size_t i = 0; i < first.size(); ++i) to[i] = whet::merge(first[i], second[i]);
}

}  // namespace

void add_rows(nb::module_& module) {
  // None comes in, so that it is refused by name.
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  module.def("softmax", &forward<whet::softmax>, arg("in"), arg("out"), nb::arg("options"));
  module.def("sharpen", &forward<whet::sharpen>, arg("in"), arg("out"), nb::arg("options"));
  module.def("softmax_backward", &softmax_backward, arg("in"), arg("dout"), arg("din"), nb::arg("options"));
  module.def("states", &states, arg("in"), arg("out"), nb::arg("options"));
  module.def("merge", &merge, arg("a"), arg("b"), arg("out"));
}

}  // namespace whet_python
