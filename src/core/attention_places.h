// What each view of an attention call has to be, and the Grid made of one that is.
#ifndef WHET_CORE_ATTENTION_PLACES_H_
#define WHET_CORE_ATTENTION_PLACES_H_

#include <whet/view.h>

#include <array>
#include <cstddef>

#include "core/attention_job.h"

namespace whet::core {

enum class Data { read, not_read };  // workspace queries look at no pointer

struct Place {
  const char* name;
  const char* letters;  // its shape, as in the public header
  Dims sizes;
  DType dtype;
  DType other_dtype;                            // allowed too
  std::array<std::size_t, 4> axes{0, 1, 2, 3};  // which of Grid::strides each axis is
  bool repeats = false;                         // sizes may be 1 instead
  bool written = false;                         // holds each element once
};

inline bool is_given(const ConstView& view) { return view.data != nullptr || !view.sizes.empty(); }

// The type sums run in.
inline DType arithmetic(const AttentionShape& s) { return s.wide() ? DType::f64 : DType::f32; }

Place like_q(const AttentionShape& s, const char* name);
Place like_k(const AttentionShape& s, const char* name);
Place like_v(const AttentionShape& s, const char* name);
Place like_out(const AttentionShape& s, const char* name, DType dtype);
Place like_query_scale(const AttentionShape& s);
Place like_bias(const AttentionShape& s);
Place like_mask(const AttentionShape& s);
Place like_sinks(const AttentionShape& s);
Place like_weights(const AttentionShape& s, std::int64_t rows);
// Those of the gradients, once the bias and the sinks are known.
Place like_dbias(const AttentionShape& s, const Grid& bias);
Place like_dsinks(const AttentionShape& s, const Grid& sinks);
Place written(Place place);

// Error, naming the argument, if the view isn't what its place asks for.
Grid grid(const ConstView& view, const Place& place, Data data);
Grid grid_if_given(const ConstView& view, const Place& place, Data data);

}  // namespace whet::core

#endif  // WHET_CORE_ATTENTION_PLACES_H_
