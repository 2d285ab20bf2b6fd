#include "core/attention_views.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/arguments.h"

namespace whet::core {

namespace {

ViewSpec exactly(const char* name, const char* letters, const Dims& sizes, DType dtype) {
  return {.name = name, .letters = letters, .sizes = sizes, .dtype = dtype, .other_dtype = dtype};
}

ViewSpec per_logit(const AttentionShape& s, const char* name, DType dtype) {
  ViewSpec spec = exactly(name, "(B, H, N, M)", {s.batch, s.heads, s.queries, s.keys}, dtype);
  spec.repeats = true;
  return spec;
}

ViewSpec per_query(const AttentionShape& s, const char* name, DType dtype) {
  ViewSpec spec = exactly(name, "(B, H, N)", {s.batch, s.heads, s.queries}, dtype);
  spec.repeats = true;
  return spec;
}

ViewSpec per_head(const AttentionShape& s, const char* name, DType dtype) {
  ViewSpec spec = exactly(name, "(H)", {s.heads}, dtype);
  spec.axes = {1};
  return spec;
}

// In the element type of the call, or in that of the arithmetic.
ViewSpec either_type(ViewSpec spec, const AttentionShape& s) {
  spec.other_dtype = arithmetic(s);
  return spec;
}

void check_fits(const ConstView& view, const ViewSpec& spec) {
  check_sizes(view.sizes, spec.name);
  bool fits = view.sizes.size() == spec.sizes.size();
  for (std::size_t i = 0; fits && i < spec.sizes.size(); ++i) {
    fits = view.sizes[i] == spec.sizes[i] || (spec.repeats && view.sizes[i] == 1);
  }
  if (!fits) {
    fail(spec.name, "its sizes are " + text(view.sizes) + ", must be " + spec.letters + " = " +
                        text(spec.sizes) + (spec.repeats ? ", each or 1" : ""));
  }
  if (view.dtype == spec.dtype || view.dtype == spec.other_dtype) return;
  std::string allowed = text(spec.dtype);
  if (spec.other_dtype != spec.dtype) allowed += std::string(" or ") + text(spec.other_dtype);
  fail(spec.name, std::string("its element type is ") + text(view.dtype) + ", must be " + allowed);
}

}  // namespace

ViewSpec like_q(const AttentionShape& s, const char* name) {
  return exactly(name, "(B, H, N, D)", {s.batch, s.heads, s.queries, s.key_size}, s.dtype);
}

ViewSpec like_k(const AttentionShape& s, const char* name) {
  return exactly(name, "(B, K, M, D)", {s.batch, s.key_heads, s.keys, s.key_size}, s.dtype);
}

ViewSpec like_v(const AttentionShape& s, const char* name) {
  return exactly(name, "(B, K, M, E)", {s.batch, s.key_heads, s.keys, s.value_size}, s.dtype);
}

ViewSpec like_out(const AttentionShape& s, const char* name, DType dtype) {
  return exactly(name, "(B, H, N, E)", {s.batch, s.heads, s.queries, s.value_size}, dtype);
}

ViewSpec like_query_scale(const AttentionShape& s) {
  return either_type(per_query(s, "query_scale", s.dtype), s);
}

ViewSpec like_bias(const AttentionShape& s) { return either_type(per_logit(s, "bias", s.dtype), s); }

ViewSpec like_mask(const AttentionShape& s) { return per_logit(s, "mask", DType::boolean); }

ViewSpec like_logits(const AttentionShape& s) {
  ViewSpec spec = per_logit(s, "logits", arithmetic(s));
  spec.repeats = false;
  return written(spec);
}

ViewSpec like_sinks(const AttentionShape& s) { return either_type(per_head(s, "sinks", s.dtype), s); }

ViewSpec like_weights(const AttentionShape& s, std::int64_t rows) {
  ViewSpec spec = exactly("weights", "(weight_rows, M)", {rows, s.keys}, s.dtype);
  spec.axes = {0, 3};
  return spec;
}

ViewSpec like_dbias(const AttentionShape& s, const Grid& bias) { return per_logit(s, "dbias", bias.dtype); }

ViewSpec like_dsinks(const AttentionShape& s, DType dtype) { return per_head(s, "dsinks", dtype); }

ViewSpec like_dquery_scale(const AttentionShape& s, DType dtype) {
  return per_query(s, "dquery_scale", dtype);
}

ViewSpec written(ViewSpec spec) {
  spec.written = true;
  return spec;
}

Grid grid(const ConstView& view, const ViewSpec& spec, Data data) {
  check_fits(view, spec);
  const Dims strides = strides_of(view, spec.name);
  const std::int64_t bytes = element_bytes(view.dtype);
  Grid g{.data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data)),
         .dtype = view.dtype,
         .given = true};

  std::int64_t low = 0, high = 0;  // offsets of the first and the last byte
  bool empty = false;
  for (std::size_t i = 0; i < spec.sizes.size(); ++i) {
    // Nothing is read along an axis of which the call has nothing, but what is written must be filled.
    empty |= view.sizes[i] == 0 || (spec.sizes[i] == 0 && !spec.written);
    const bool repeats = spec.repeats && view.sizes[i] == 1;
    const std::int64_t stride = repeats ? 0 : strides[i];
    const std::int64_t last =
        times(times(stride, bytes, spec.name), std::max<std::int64_t>(view.sizes[i] - 1, 0), spec.name);
    (last < 0 ? low : high) = plus(last < 0 ? low : high, last, spec.name);
    g.strides[spec.axes[i]] = stride;
  }
  std::int64_t reach = 0;
  if (__builtin_sub_overflow(high, low, &reach)) fail(spec.name, "its extent doesn't fit 64 bits");
  if (spec.written && !holds_each_once(view.sizes, strides, spec.name)) {
    fail(spec.name, "its strides " + text(strides) + " may hold an element twice");
  }
  if (empty) return {.dtype = view.dtype, .given = true};
  if (data == Data::not_read) return g;
  if (view.data == nullptr) fail(spec.name, "its data is null");
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(bytes) != 0) {
    fail(spec.name, "its data isn't aligned to its element type");
  }
  g.begin = g.data + low;
  g.end = g.data + high + bytes;
  return g;
}

Grid grid_if_given(const ConstView& view, const ViewSpec& spec, Data data) {
  return is_given(view) ? grid(view, spec, data) : Grid{};
}

}  // namespace whet::core
