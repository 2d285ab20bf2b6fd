// Arrays of attention as JAX has them, for whet: leading axes are its batch, or are walked through.
#ifndef WHET_PYTHON_JAX_BATCH_H_
#define WHET_PYTHON_JAX_BATCH_H_

#include <whet/attention.h>
#include <whet/rule.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "jax_call.h"
#include "jax_results.h"

namespace whet_python {

// How many axes a batch entry of an array has.
inline std::size_t own_axes(const Array& array) {
  constexpr std::pair<std::string_view, std::size_t> kNot3[] = {
      {"query_lengths", 0}, {"key_lengths", 0}, {"sinks", 1},       {"dsinks", 1},
      {"query_starts", 1},  {"key_starts", 1},  {"column_sums", 2}, {"query_scale", 2},
      {"dquery_scale", 2},  {"alpha", 1},       {"dalpha", 1},      {"shard", 0},
      {"searching", 0},     {"mass", 2},        {"factor", 2},      {"gathered", 4}};
  for (const auto& [name, axes] : kNot3) {
    if (array.name == name) return axes;
  }
  return 3;
}

// Whether an array has one record per row, which entries of a batch can't share.
inline bool holds_rows(const Array& array) {
  constexpr std::string_view kNames[] = {"saved",    "logits", "states", "rows",
                                         "searches", "mass",   "factor", "gathered"};
  return std::ranges::find(kNames, array.name) != std::end(kNames);
}

// The leading axes of an attention call. whet takes one, the batch; others that can't be merged with it are
// walked through, one call of whet each.
class Batch {
 public:
  explicit Batch(const Call& call)
      : call_(call), entries_{1, std::vector<int64_t>(call.arrays().size())}, walk_({}, 0) {
    std::vector<std::size_t> own;
    for (const Array& array : call.arrays()) own.push_back(own_axes(array));
    std::vector<Axis> axes = merged(shared_axes(call.arrays(), own));
    if (!axes.empty() && whet_takes(axes.back())) {
      entries_ = axes.back();
      axes.pop_back();
    }
    walk_ = Walk(std::move(axes), call.arrays().size());
  }

  int64_t entries() const { return entries_.size; }
  int64_t all_entries() const { return entries_.size * walk_.positions(); }

  template <typename Function>
  void for_each(const Function& function) {
    walk_.for_each(function);
  }

  // (B, N, H, D) as whet wants it, (B, H, N, D); without data if the call doesn't have it.
  whet::View heads_last(std::string_view name) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t n = array.size_from_end(3), h = array.size_from_end(2), d = array.size_from_end(1);
    return {here(a), dtype_of(array), {entries_.size, h, n, d}, {step(a), d, h * d, 1}};
  }

  // (B, H, N, M), of which any may be 1. A gradient that all entries share has one entry, and so must have
  // what it is the gradient of.
  whet::View heads_first(std::string_view name, std::string_view gradient = "") const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t h = array.size_from_end(3), n = array.size_from_end(2), m = array.size_from_end(1);
    return {here(a), dtype_of(array), {entries_with(gradient), h, n, m}, {step(a), n * m, m, 1}};
  }

  // (B, N, H) as whet wants it, (B, H, N), of which any may be 1; a gradient as in heads_first.
  whet::View rows_of_heads(std::string_view name, std::string_view gradient = "") const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t n = array.size_from_end(2), h = array.size_from_end(1);
    return {here(a), dtype_of(array), {entries_with(gradient), h, n}, {step(a), 1, h}};
  }

  whet::View heads(std::string_view name) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    return {here(a), dtype_of(array), {array.size_from_end(1)}};
  }

  // One integer per entry, kept within [0, most]; `most` if the call doesn't have them.
  int64_t length(std::string_view name, int64_t entry, int64_t most) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return most;
    const int64_t value = *reinterpret_cast<const std::int32_t*>(
        call_.arrays()[std::size_t(a)].at(offset(a) + entry * step(a)));
    return std::clamp<int64_t>(value, 0, most);
  }

  // Integers that all entries share; none if the call doesn't have them.
  std::vector<int64_t> integers(std::string_view name) const {
    const std::ptrdiff_t a = call_.index(name);
    if (a < 0) return {};
    const auto* first = reinterpret_cast<const std::int32_t*>(here(a));
    return {first, first + call_.arrays()[std::size_t(a)].size_from_end(1)};
  }

  whet::Normalizer normalizer() const {
    const std::ptrdiff_t alpha = call_.index("alpha");
    return normalizer_of(call_, alpha < 0 ? 0 : offset(alpha));
  }

  // The gradient to alpha of the current entries: one number each, or one for all.
  void write(const AlphaResult& dalpha) const {
    const std::ptrdiff_t a = call_.index("dalpha");
    if (a >= 0) dalpha.write(offset(a), step(a) == 0 ? 1 : entries_.size);
  }

  // The elements of a result that belong to the current entries; it must be there.
  template <typename T>
  T* result(std::string_view name) const {
    return reinterpret_cast<T*>(here(call_.index(name)));
  }

  // So many records of the current entries, of an operand or a result that must be there.
  template <typename T>
  std::span<T> records(std::string_view name, std::size_t count) const {
    return {result<T>(name), count};
  }

  // What one of several devices gathered of an entry's rows.
  template <typename T>
  const T* gathered(int64_t entry, int64_t device) const {
    const std::ptrdiff_t a = call_.index("gathered");
    const Array& array = call_.arrays()[std::size_t(a)];
    const int64_t size = array.size_from_end(3) * array.size_from_end(2) * array.size_from_end(1);
    return reinterpret_cast<const T*>(array.at(offset(a) + entry * step(a) + device * size));
  }

  // What is saved of the rows of the current entries; without data if the call doesn't have it.
  whet::View saved(std::size_t rows) const {
    const std::ptrdiff_t a = call_.index("saved");
    if (a < 0) return {};
    const Array& array = call_.arrays()[std::size_t(a)];
    return {here(a), dtype_of(array), {int64_t(rows), array.size_from_end(1)}};
  }

 private:
  int64_t entries_with(std::string_view gradient) const {
    const std::ptrdiff_t g = call_.index(gradient);
    return g >= 0 && step(g) == 0 ? 1 : entries_.size;
  }
  int64_t step(std::ptrdiff_t a) const { return entries_.steps[std::size_t(a)]; }
  int64_t offset(std::ptrdiff_t a) const { return walk_.at(std::size_t(a)); }
  std::byte* here(std::ptrdiff_t a) const { return call_.arrays()[std::size_t(a)].at(offset(a)); }

  // All entries of whet's batch share what has one axis (sinks, alpha; not dalpha, which is summed here) and
  // which shard they are, no two share what is kept of a row, and packed sequences are a batch of one.
  bool whet_takes(const Axis& axis) const {
    for (std::size_t a = 0; a < axis.steps.size(); ++a) {
      const Array& array = call_.arrays()[a];
      const bool shared = (own_axes(array) == 1 && array.name != "dalpha") || array.name == "shard";
      if (shared && axis.steps[a] != 0) return false;
      if (holds_rows(array) && axis.steps[a] == 0) return false;
      if (array.name == "query_starts") return false;
    }
    return true;
  }

  const Call& call_;
  Axis entries_;
  Walk walk_;
};

// What a call of attention says for all its entries.
struct AttentionSettings {
  explicit AttentionSettings(const Call& call) {
    for (const auto name : split(call.attribute<std::string_view>("rules"), ';')) {
      rules.push_back(whet::Rule::parse(name));
    }
    options.scale = call.attribute<double>("scale");
    options.softcap = call.attribute<double>("softcap");
    options.causal = call.attribute<bool>("causal");
    options.window_left = call.attribute<int64_t>("window_left");
    options.window_right = call.attribute<int64_t>("window_right");
    if (rules.size() == 1) {
      options.rule = rules[0];
    } else {
      options.head_rules = rules;
    }
  }

  std::vector<whet::Rule> rules;
  whet::AttentionOptions options{};
};

// A query at or after its sequence's end sees nothing, so lengths of queries make lengths of rows.
inline std::vector<int64_t> lengths_of(const Call& call, const Batch& batch, int64_t heads, int64_t queries,
                                       int64_t keys) {
  std::vector<int64_t> lengths;
  const bool by_row = call.find("query_lengths");
  if (!by_row && !call.find("key_lengths")) return lengths;
  for (int64_t b = 0; b < batch.entries(); ++b) {
    const int64_t length = batch.length("key_lengths", b, keys);
    if (!by_row) {
      lengths.push_back(length);
      continue;
    }
    const int64_t visible = batch.length("query_lengths", b, queries);
    for (int64_t row = 0; row < heads * queries; ++row)
      lengths.push_back(row % queries < visible ? length : 0);
  }
  return lengths;
}

// Calls function(views of q, k, v, their options, number of rows) for each part of the batch. `all_keys`: how
// many lengths may count; without, those of the call.
template <typename Function>
void for_each_part(const Call& call, Batch& batch, const Function& function,
                   std::optional<int64_t> all_keys = {}) {
  const AttentionSettings settings(call);
  batch.for_each([&] {
    const whet::View q = batch.heads_last("query"), k = batch.heads_last("key"),
                     v = batch.heads_last("value");
    const int64_t heads = q.sizes[1], queries = q.sizes[2], keys = all_keys.value_or(k.sizes[2]);
    const std::vector<int64_t> lengths = lengths_of(call, batch, heads, queries, keys);
    const std::vector<int64_t> query_starts = batch.integers("query_starts");
    const std::vector<int64_t> key_starts = batch.integers("key_starts");
    whet::AttentionOptions options = settings.options;
    options.normalizer = batch.normalizer();
    options.bias = batch.heads_first("bias", "dbias");
    options.mask = batch.heads_first("mask");
    options.query_scale = batch.rows_of_heads("query_scale", "dquery_scale");
    options.sinks = batch.heads("sinks");
    options.lengths = lengths;
    options.query_starts = query_starts;
    options.key_starts = key_starts;
    function(q, k, v, options, std::size_t(batch.entries() * heads * queries));
  });
}

}  // namespace whet_python

#endif  // WHET_PYTHON_JAX_BATCH_H_
