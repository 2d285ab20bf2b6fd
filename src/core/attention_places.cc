#include "core/attention_places.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/arguments.h"

namespace whet::core {

namespace {

Place exactly(const char* name, const char* letters, const Dims& sizes, DType dtype) {
  return {.name = name, .letters = letters, .sizes = sizes, .dtype = dtype, .other_dtype = dtype};
}

Place like_logits(const AttentionShape& s, const char* name, DType dtype) {
  Place place = exactly(name, "(B, H, N, M)", {s.batch, s.heads, s.queries, s.keys}, dtype);
  place.repeats = true;
  return place;
}

Place one_a_head(const AttentionShape& s, const char* name, DType dtype) {
  Place place = exactly(name, "(H)", {s.heads}, dtype);
  place.axes = {1};
  return place;
}

// In the element type of the call, or in that of the arithmetic.
Place either_type(Place place, const AttentionShape& s) {
  place.other_dtype = arithmetic(s);
  return place;
}

void check_fits(const ConstView& view, const Place& place) {
  check_sizes(view.sizes, place.name);
  bool fits = view.sizes.size() == place.sizes.size();
  for (std::size_t i = 0; fits && i < place.sizes.size(); ++i) {
    fits = view.sizes[i] == place.sizes[i] || (place.repeats && view.sizes[i] == 1);
  }
  if (!fits) {
    fail(place.name, "its sizes are " + text(view.sizes) + ", must be " + place.letters + " = " +
                         text(place.sizes) + (place.repeats ? ", each or 1" : ""));
  }
  if (view.dtype == place.dtype || view.dtype == place.other_dtype) return;
  std::string allowed = text(place.dtype);
  if (place.other_dtype != place.dtype) allowed += std::string(" or ") + text(place.other_dtype);
  fail(place.name, std::string("its element type is ") + text(view.dtype) + ", must be " + allowed);
}

}  // namespace

Place like_q(const AttentionShape& s, const char* name) {
  return exactly(name, "(B, H, N, D)", {s.batch, s.heads, s.queries, s.key_size}, s.dtype);
}

Place like_k(const AttentionShape& s, const char* name) {
  return exactly(name, "(B, K, M, D)", {s.batch, s.key_heads, s.keys, s.key_size}, s.dtype);
}

Place like_v(const AttentionShape& s, const char* name) {
  return exactly(name, "(B, K, M, E)", {s.batch, s.key_heads, s.keys, s.value_size}, s.dtype);
}

Place like_out(const AttentionShape& s, const char* name, DType dtype) {
  return exactly(name, "(B, H, N, E)", {s.batch, s.heads, s.queries, s.value_size}, dtype);
}

Place like_query_scale(const AttentionShape& s) {
  Place place = exactly("query_scale", "(B, H, N)", {s.batch, s.heads, s.queries}, s.dtype);
  place.repeats = true;
  return either_type(place, s);
}

Place like_bias(const AttentionShape& s) { return either_type(like_logits(s, "bias", s.dtype), s); }

Place like_mask(const AttentionShape& s) { return like_logits(s, "mask", DType::boolean); }

Place like_sinks(const AttentionShape& s) { return either_type(one_a_head(s, "sinks", s.dtype), s); }

Place like_weights(const AttentionShape& s, std::int64_t rows) {
  Place place = exactly("weights", "(weight_rows, M)", {rows, s.keys}, s.dtype);
  place.axes = {0, 3};
  return place;
}

Place like_dbias(const AttentionShape& s, const Grid& bias) { return like_logits(s, "dbias", bias.dtype); }

Place like_dsinks(const AttentionShape& s, const Grid& sinks) { return one_a_head(s, "dsinks", sinks.dtype); }

Place written(Place place) {
  place.written = true;
  return place;
}

Grid grid(const ConstView& view, const Place& place, Data data) {
  check_fits(view, place);
  const Dims strides = strides_of(view, place.name);
  const std::int64_t bytes = element_bytes(view.dtype);
  Grid g{.data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data)),
         .dtype = view.dtype,
         .given = true};

  std::int64_t low = 0, high = 0;  // offsets of the first and the last byte
  bool empty = false;
  for (std::size_t i = 0; i < place.sizes.size(); ++i) {
    // Nothing is read along an axis of which the call has nothing, but what is written must be filled.
    empty |= view.sizes[i] == 0 || (place.sizes[i] == 0 && !place.written);
    const bool repeats = place.repeats && view.sizes[i] == 1;
    const std::int64_t stride = repeats ? 0 : strides[i];
    const std::int64_t last =
        times(times(stride, bytes, place.name), std::max<std::int64_t>(view.sizes[i] - 1, 0), place.name);
    (last < 0 ? low : high) = plus(last < 0 ? low : high, last, place.name);
    g.strides[place.axes[i]] = stride;
  }
  std::int64_t reach = 0;
  if (__builtin_sub_overflow(high, low, &reach)) fail(place.name, "its extent doesn't fit 64 bits");
  if (place.written && !holds_each_once(view.sizes, strides, place.name)) {
    fail(place.name, "its strides " + text(strides) + " may hold an element twice");
  }
  if (empty) return {.dtype = view.dtype, .given = true};
  if (data == Data::not_read) return g;
  if (view.data == nullptr) fail(place.name, "its data is null");
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(bytes) != 0) {
    fail(place.name, "its data isn't aligned to its element type");
  }
  g.begin = g.data + low;
  g.end = g.data + high + bytes;
  return g;
}

Grid grid_if_given(const ConstView& view, const Place& place, Data data) {
  return is_given(view) ? grid(view, place, data) : Grid{};
}

}  // namespace whet::core
