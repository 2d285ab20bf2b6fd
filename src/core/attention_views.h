// What each view of an attention call has to be, and the Grid made of one that is.
#ifndef WHET_CORE_ATTENTION_VIEWS_H_
#define WHET_CORE_ATTENTION_VIEWS_H_

#include <whet/view.h>

#include <array>
#include <cstddef>

#include "core/attention_job.h"

namespace whet::core {

enum class Data { read, not_read };  // workspace queries look at no pointer

struct ViewSpec {
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

ViewSpec like_q(const AttentionShape& s, const char* name);
ViewSpec like_k(const AttentionShape& s, const char* name);
ViewSpec like_v(const AttentionShape& s, const char* name);
ViewSpec like_out(const AttentionShape& s, const char* name, DType dtype);
ViewSpec like_query_scale(const AttentionShape& s);
ViewSpec like_bias(const AttentionShape& s);
ViewSpec like_mask(const AttentionShape& s);
ViewSpec like_logits(const AttentionShape& s);  // of a shard, in the type of the arithmetic
ViewSpec like_sinks(const AttentionShape& s);
ViewSpec like_weights(const AttentionShape& s, std::int64_t rows);
// Those of the gradients, once the bias and the types of the others are known.
ViewSpec like_dbias(const AttentionShape& s, const Grid& bias);
ViewSpec like_dsinks(const AttentionShape& s, DType dtype);
ViewSpec like_dquery_scale(const AttentionShape& s, DType dtype);
ViewSpec written(ViewSpec spec);

// Error, naming the argument, if the view does not fit its spec.
Grid grid(const ConstView& view, const ViewSpec& spec, Data data);
Grid grid_if_given(const ConstView& view, const ViewSpec& spec, Data data);

}  // namespace whet::core

#endif  // WHET_CORE_ATTENTION_VIEWS_H_
