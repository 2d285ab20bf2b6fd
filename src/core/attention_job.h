// A call of attention: its arguments checked once, at the boundary, and turned into what kernels walk.
#ifndef WHET_CORE_ATTENTION_JOB_H_
#define WHET_CORE_ATTENTION_JOB_H_

#include <whet/attention.h>
#include <whet/shard.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/arguments.h"
#include "core/saved_rows.h"

namespace whet::core {

// One array addressed by up to four indices (batch, head, query or key, element); strides count
// elements and are 0 along axes it repeats over or doesn't have.
struct Grid {
  std::byte* data = nullptr;  // null: not given, or nothing to point to
  DType dtype = DType::f32;
  std::array<std::int64_t, 4> strides{};
  const std::byte* begin = nullptr;  // the bytes it may touch: [begin, end)
  const std::byte* end = nullptr;
  bool given = false;

  std::int64_t offset(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
  }
  // The address of an element; null stays null.
  std::byte* at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const;
};

// Queries and keys that belong together: a batch entry, or one packed sequence.
struct Sequence {
  std::int64_t batch;
  std::int64_t first_query, queries;
  std::int64_t first_key, keys;  // keys within `lengths` if those are given per batch entry
};

// Keys [begin, end) of k; empty if begin == end.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool empty() const { return begin >= end; }
  std::int64_t size() const { return std::max<std::int64_t>(end - begin, 0); }
};

struct AttentionShape {
  std::int64_t batch = 0;       // B
  std::int64_t heads = 0;       // H
  std::int64_t key_heads = 0;   // K
  std::int64_t group = 1;       // G = H / K
  std::int64_t queries = 0;     // N
  std::int64_t keys = 0;        // M
  std::int64_t key_size = 0;    // D
  std::int64_t value_size = 0;  // E; 0 where there is no v
  DType dtype = DType::f32;

  std::int64_t rows() const { return batch * heads * queries; }
  bool wide() const { return dtype == DType::f64; }  // arithmetic in double
};

// Everything a kernel reads. Spans and pointers are the caller's.
struct AttentionJob {
  AttentionShape shape;
  AttentionOptions options;  // as given; windows limited so that sums of positions don't overflow
  AttentionOutputs outputs;
  Execution execution;
  double scale = 1;
  Shard shard;  // all keys and queries unless a shard
  Grid q, k, v, out;
  Grid logits;                                         // of a shard
  Grid query_scale;                                    // strides (B, H, N, -)
  Grid bias, mask;                                     // strides (B, H, N, M)
  Grid sinks;                                          // strides (-, H, -, -)
  Grid weights;                                        // strides (number of the weight_row, -, -, M)
  Grid dout, dq, dk, dv, dbias, dsinks, dquery_scale;  // backward only
  std::span<double> dparameter{};                      // backward only
  bool through_rule = true;
  SavedRows saved;  // written by forward, read by backward

  const Rule& rule(std::int64_t head) const {
    return options.head_rules.empty() ? options.rule : options.head_rules[static_cast<std::size_t>(head)];
  }
  std::int64_t row(std::int64_t batch, std::int64_t head, std::int64_t query) const {
    return (batch * shape.heads + head) * shape.queries + query;
  }
  // The number that a row has in a call with all queries.
  std::int64_t whole_row(std::int64_t row) const {
    return row / shape.queries * shard.all_queries + shard.first_query + row % shape.queries;
  }
  std::int64_t sequences() const {
    return options.query_starts.empty() ? shape.batch
                                        : static_cast<std::int64_t>(options.query_starts.size()) - 1;
  }
  Sequence sequence(std::int64_t index) const;

  // Keys (as indices into k) that lengths, causal and window leave to query `query` (an index into q)
  // of `head` in `sequence`; mask and bias may hide more.
  KeyRange visible(const Sequence& sequence, std::int64_t head, std::int64_t query) const;
};

// The job of a forward call. Throws whet::Error naming the argument.
AttentionJob attention_job(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options,
                           const AttentionOutputs& outputs = {}, const Execution& execution = {});

// The same without `out`, and with data of no view looked at: for workspace queries.
AttentionJob attention_shape_job(ConstView q, ConstView k, ConstView v, const AttentionOptions& options,
                                 const AttentionOutputs& outputs = {}, const Execution& execution = {});

AttentionJob attention_backward_job(ConstView q, ConstView k, ConstView v, ConstView dout,
                                    const AttentionGradients& gradients, const AttentionOptions& options,
                                    const AttentionBackwardOptions& backward = {},
                                    const Execution& execution = {});
AttentionJob attention_backward_shape_job(ConstView q, ConstView k, ConstView v,
                                          const AttentionGradients& gradients,
                                          const AttentionOptions& options,
                                          const AttentionBackwardOptions& backward = {},
                                          const Execution& execution = {});

// The job of one shard; v and out empty for states and sums (value_size 0 then). `out`, if given, is in the
// type of the arithmetic. Rules and workspace are left out.
AttentionJob shard_job(ConstView q, ConstView k, ConstView v, View out, const Shard& shard,
                       const AttentionOptions& options, const Execution& execution = {});

// The same for the gradient of a shard, or for sums of it: then there are no gradients.
AttentionJob shard_backward_job(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                                const AttentionGradients& gradients, const AttentionOptions& options,
                                const Execution& execution = {});

// The checks of a call over shards as a caller sees it: out, dq, dsinks and dquery_scale in the types of
// attention, and rules too.
void check_shard_call(ConstView q, ConstView k, ConstView v, ConstView out, const Shard& shard,
                      const AttentionOptions& options);
void check_shard_backward_call(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                               const AttentionGradients& gradients, const AttentionOptions& options);

// Error unless a shard call is given one of these per row.
void check_one_a_row(std::size_t given, const AttentionJob& job, const char* name);

// Error if what a shard call writes beside `out` overlaps what the job reads or writes.
void check_apart(const AttentionJob& job, const Extent& written);

// Error if what a shard call reads beside the job's arrays overlaps what the job writes.
void check_written_apart(const AttentionJob& job, const Extent& read);

}  // namespace whet::core

#endif  // WHET_CORE_ATTENTION_JOB_H_
