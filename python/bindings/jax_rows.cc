// Rows for JAX.

#include <whet/softmax.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "jax_call.h"
#include "jax_results.h"

namespace whet_python {

namespace {

// The arrays of a call that have the shape of x, with their axes merged around that of the rows. alpha has
// those axes only that vmap put in front of x, which are walked through if it varies.
class Rows {
 public:
  explicit Rows(const Call& call) : Rows(call, arrays_of(call)) {}

  int axis() const { return int(axis_); }

  // Of the current position; all positions have as many.
  int64_t rows() const {
    int64_t rows = 1;
    for (std::size_t i = 0; i < axes_.size(); ++i) rows *= i == axis_ ? 1 : axes_[i].size;
    return rows;
  }

  int64_t positions() const { return walk_.positions(); }
  int64_t all_rows() const { return positions() * rows(); }

  // Calls function(number of the position) for each.
  template <typename Function>
  void for_each(const Function& function) {
    int64_t position = 0;
    walk_.for_each([&] { function(position++); });
  }

  whet::View view(std::string_view name) const {
    const std::ptrdiff_t a = index(name);
    if (a < 0) return {};
    std::vector<int64_t> sizes, steps;
    for (const Axis& axis : axes_) {
      sizes.push_back(axis.size);
      steps.push_back(axis.steps[std::size_t(a)]);
    }
    const Array& array = arrays_[std::size_t(a)];
    return {array.at(offset(a)), dtype_of(array), whet::Dims(std::span<const int64_t>(sizes)),
            whet::Dims(std::span<const int64_t>(steps))};
  }

  whet::SoftmaxOptions options(const Call& call) const {
    const std::ptrdiff_t alpha = index("alpha");
    return {.rule = whet::Rule::parse(call.attribute<std::string_view>("rule")),
            .normalizer = normalizer_of(call, alpha < 0 ? 0 : offset(alpha)),
            .axis = axis(),
            .mask = view("where")};
  }

 private:
  static std::vector<Array> arrays_of(const Call& call) {
    std::vector<Array> arrays;
    for (const Array& array : call.arrays()) {
      if (array.name != "stats" && array.name != "saved" && array.name != "dalpha") arrays.push_back(array);
    }
    return arrays;
  }

  static std::size_t walked_axes(const Call& call) {
    const Array* alpha = call.find("alpha");
    return alpha && alpha->elements() != 1 ? alpha->sizes.size() : 0;
  }

  Rows(const Call& call, std::vector<Array> arrays)
      : Rows(call, arrays, shared_axes(arrays, std::vector<std::size_t>(arrays.size(), 0))) {}

  Rows(const Call& call, std::vector<Array> arrays, const std::vector<Axis>& all)
      : arrays_(std::move(arrays)),
        walk_({all.begin(), all.begin() + std::ptrdiff_t(walked_axes(call))}, arrays_.size()) {
    const std::size_t walked = walked_axes(call);
    const auto axis = std::size_t(int64_t(all.size()) + call.attribute<int64_t>("axis"));
    axes_ = merged(std::span(all).subspan(walked, axis - walked));
    axis_ = axes_.size();
    axes_.push_back(all[axis]);
    for (const Axis& after : merged(std::span(all).subspan(axis + 1))) axes_.push_back(after);
  }

  std::ptrdiff_t index(std::string_view name) const {
    const auto found = std::ranges::find(arrays_, name, &Array::name);
    return found == arrays_.end() ? -1 : found - arrays_.begin();
  }
  int64_t offset(std::ptrdiff_t a) const { return walk_.at(std::size_t(a)); }

  std::vector<Array> arrays_;
  Walk walk_;
  std::vector<Axis> axes_;
  std::size_t axis_ = 0;
};

// What is saved of the rows of a position. Without data if the call doesn't have it, or has it of fewer rows:
// under vmap there may be many gradients of one softmax, for which it is found again.
whet::View saved_view(const Call& call, const Rows& rows, int64_t position) {
  const Array* saved = call.find("saved");
  if (!saved) return {};
  const int64_t size = saved->size_from_end(1);
  if (saved->elements() != rows.all_rows() * size) return {};
  return {saved->at(position * rows.rows() * size), dtype_of(*saved), {rows.rows(), size}};
}

void softmax(const Call& call) {
  Rows rows(call);
  StatsResult stats(call, std::size_t(rows.all_rows()));
  rows.for_each([&](int64_t position) {
    whet::softmax(rows.view("x"), rows.view("out"), rows.options(call),
                  {.stats = stats.next(std::size_t(rows.rows())), .saved = saved_view(call, rows, position)});
  });
  stats.finish();
}

void softmax_backward(const Call& call) {
  Rows rows(call);
  AlphaResult dalpha(call);
  const Array* result = call.find("dalpha");
  const int64_t sums = result ? result->elements() / std::max<int64_t>(rows.positions(), 1) : 0;
  rows.for_each([&](int64_t position) {
    whet::softmax_backward(rows.view("x"), rows.view("dout"), rows.view("dx"), rows.options(call),
                           {.beta_gradient = call.beta_gradient(),
                            .saved = saved_view(call, rows, position),
                            .dparameter = dalpha.rows(rows.rows())});
    dalpha.write(position * sums, sums);
  });
}

}  // namespace

void add_jax_rows(nb::dict& handlers) {
  handlers["whet_softmax"] = handler<softmax>();
  handlers["whet_softmax_backward"] = handler<softmax_backward>();
}

}  // namespace whet_python
