#include "core/attention_job.h"

#include <cmath>
#include <limits>
#include <string>

#include "core/arguments.h"
#include "core/attention_views.h"

namespace whet::core {

namespace {

// Rows times keys. No call that large ends, and below it no sum of positions and windows overflows.
constexpr std::int64_t kMaxLogits = std::int64_t{1} << 60;

std::int64_t at_least_one(std::int64_t size) { return std::max<std::int64_t>(size, 1); }

void check_axes(const ConstView& view, const char* name, const char* letters) {
  check_sizes(view.sizes, name);
  if (view.sizes.size() == 4) return;
  fail(name, "has " + std::to_string(view.sizes.size()) + " axes, must have 4, " + letters);
}

void check_head_size(std::int64_t size, const char* name) {
  if (size >= 1 && size <= kMaxHeadSize) return;
  fail(name,
       "its last axis has size " + std::to_string(size) + ", must be 1 to " + std::to_string(kMaxHeadSize));
}

// Error unless every query head has a key head.
void check_heads(std::int64_t heads, std::int64_t key_heads) {
  const bool fits = key_heads == 0 ? heads == 0 : heads > 0 && heads % key_heads == 0;
  if (fits) return;
  fail("k", "has " + std::to_string(key_heads) + " heads, must divide those of q, " + std::to_string(heads));
}

AttentionShape shape_of(const ConstView& q, const ConstView& k) {
  check_axes(q, "q", "(B, H, N, D)");
  check_axes(k, "k", "(B, K, M, D)");
  if (element_bytes(q.dtype) < 2) {
    fail("q", std::string("its element type is ") + text(q.dtype) + ", must be f32, f64, bf16 or f16");
  }
  check_head_size(q.sizes[3], "q");
  check_heads(q.sizes[1], k.sizes[1]);
  return {.batch = q.sizes[0],
          .heads = q.sizes[1],
          .key_heads = k.sizes[1],
          .group = k.sizes[1] == 0 ? 1 : q.sizes[1] / k.sizes[1],
          .queries = q.sizes[2],
          .keys = k.sizes[2],
          .key_size = q.sizes[3],
          .dtype = q.dtype};
}

// Every size counts as at least 1: an empty batch doesn't make absurd sizes right.
void check_logits(const AttentionShape& s, std::int64_t all_keys, const char* name) {
  std::int64_t logits = at_least_one(all_keys);
  bool fits = logits <= kMaxLogits;
  for (const std::int64_t size : {s.batch, s.heads, s.queries}) {
    fits = fits && !__builtin_mul_overflow(logits, at_least_one(size), &logits) && logits <= kMaxLogits;
  }
  if (!fits) fail(name, std::to_string(all_keys) + " keys times all rows is more than 2^60");
}

void check_count(std::size_t given, std::int64_t allowed, const char* name, const char* of_what) {
  if (given == static_cast<std::size_t>(allowed)) return;
  fail(name, std::to_string(given) + " given, must be " + of_what + ", " + std::to_string(allowed));
}

// Below the smallest normal number 1 / softcap is no number any more.
void check_softcap(double softcap, bool wide) {
  const double least = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  if (softcap == 0 || (softcap >= least && std::isfinite(softcap))) return;
  fail("softcap", "is " + text(softcap) + ", must be 0 (none) or finite and at least " + text(least));
}

void check_numbers(const AttentionOptions& o) {
  if (o.scale && !std::isfinite(*o.scale)) {
    fail("scale", "is " + text(*o.scale) + ", must be finite");
  }
  if (!(o.dropout >= 0 && o.dropout <= 1)) {
    fail("dropout", "is " + text(o.dropout) + ", must be 0..1");
  }
  if (!(o.skip_epsilon >= 0 && o.skip_epsilon < 1)) {
    fail("skip_epsilon", "is " + text(o.skip_epsilon) + ", must be 0 or more and below 1");
  }
  if (o.window_left < -1) {
    fail("window_left", "is " + std::to_string(o.window_left) + ", must be -1 (none) or more");
  }
  if (o.window_right < -1) {
    fail("window_right", "is " + std::to_string(o.window_right) + ", must be -1 (none) or more");
  }
}

void check_lengths(const AttentionJob& job) {
  const std::span<const std::int64_t> lengths = job.options.lengths;
  if (lengths.empty()) return;
  if (!job.options.query_starts.empty()) fail("lengths", "given together with query_starts");
  const AttentionShape& s = job.shape;
  if (lengths.size() != static_cast<std::size_t>(s.batch) &&
      lengths.size() != static_cast<std::size_t>(s.rows())) {
    fail("lengths", std::to_string(lengths.size()) + " given, must be one per batch entry, " +
                        std::to_string(s.batch) + ", or one per row, " + std::to_string(s.rows()));
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] >= 0 && lengths[i] <= job.shard.all_keys) continue;
    fail("lengths", "number " + std::to_string(i) + " is " + std::to_string(lengths[i]) + ", must be 0 to " +
                        std::to_string(job.shard.all_keys));
  }
}

void check_starts(std::span<const std::int64_t> starts, std::int64_t last, const char* name) {
  if (starts.size() < 2) fail(name, std::to_string(starts.size()) + " given, must be 2 or more");
  if (starts.front() != 0) fail(name, "the first is " + std::to_string(starts.front()) + ", must be 0");
  for (std::size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] >= starts[i - 1]) continue;
    fail(name, "number " + std::to_string(i) + " is " + std::to_string(starts[i]) +
                   ", must be at least the one before it, " + std::to_string(starts[i - 1]));
  }
  if (starts.back() != last) {
    fail(name, "the last is " + std::to_string(starts.back()) + ", must be " + std::to_string(last));
  }
}

void check_packed(const AttentionJob& job) {
  const AttentionOptions& o = job.options;
  if (o.query_starts.empty() && o.key_starts.empty()) return;
  if (o.query_starts.empty()) fail("query_starts", "not given, must be where key_starts is");
  if (job.shape.batch != 1) {
    fail("query_starts", "given for a batch of " + std::to_string(job.shape.batch) + ", must be 1");
  }
  check_count(o.key_starts.size(), static_cast<std::int64_t>(o.query_starts.size()), "key_starts",
              "as many as query_starts");
  check_starts(o.query_starts, job.shape.queries, "query_starts");
  check_starts(o.key_starts, job.shape.keys, "key_starts");
}

// weight_rows must exist, and weights hold them.
void check_weights(AttentionJob& job, Data data) {
  const AttentionOutputs& o = job.outputs;
  const AttentionShape& s = job.shape;
  const auto count = static_cast<std::int64_t>(o.weight_rows.size());
  if (count > 0 && !is_given(o.weights)) {
    fail("weights", "not given, must hold " + std::to_string(count) + " weight_rows");
  }
  for (std::size_t i = 0; i < o.weight_rows.size(); ++i) {
    const RowIndex& r = o.weight_rows[i];
    const auto within = [](std::int64_t index, std::int64_t size) { return index >= 0 && index < size; };
    if (within(r.batch, s.batch) && within(r.head, s.heads) && within(r.query, s.queries)) continue;
    fail("weight_rows", "number " + std::to_string(i) + " is " + text({r.batch, r.head, r.query}) +
                            ", must be below (B, H, N) = " + text({s.batch, s.heads, s.queries}));
  }
  job.weights = grid_if_given(o.weights, written(like_weights(s, count)), data);
}

void check_top(const AttentionJob& job) {
  const AttentionOutputs& o = job.outputs;
  std::int64_t elements = 0;
  if (o.top_k < 0) fail("top_k", "is " + std::to_string(o.top_k) + ", must be 0 or more");
  if (__builtin_mul_overflow(at_least_one(job.shape.rows()), o.top_k, &elements)) {
    fail("top_k", "is " + std::to_string(o.top_k) + ", which times the rows doesn't fit 64 bits");
  }
  elements = job.shape.rows() * o.top_k;
  check_count(o.top_keys.size(), elements, "top_keys", "rows * top_k");
  check_count(o.top_weights.size(), elements, "top_weights", "rows * top_k");
}

void add_saved(AttentionJob& job, const ConstView& saved, Data data) {
  job.saved =
      saved_rows(saved, arithmetic(job.shape), job.shape.rows(), saved_size(job.options), data == Data::read);
}

void check_outputs(AttentionJob& job, Data data) {
  const AttentionShape& s = job.shape;
  if (!job.outputs.stats.empty()) check_count(job.outputs.stats.size(), s.rows(), "stats", "one per row");
  add_saved(job, job.outputs.saved, data);
  check_weights(job, data);
  check_top(job);
  if (!job.outputs.column_sums.empty()) {
    check_count(job.outputs.column_sums.size(), s.batch * s.heads * s.keys, "column_sums", "B * H * M");
  }
}

auto read_by(const AttentionJob& job) {
  const AttentionOptions& o = job.options;
  return std::to_array<Extent>({{job.q, "q"},
                                {job.k, "k"},
                                {job.v, "v"},
                                {job.dout, "dout"},
                                {job.query_scale, "query_scale"},
                                {job.bias, "bias"},
                                {job.mask, "mask"},
                                {job.sinks, "sinks"},
                                {job.dout.given ? job.saved : SavedRows{}, "saved"},
                                {o.head_rules, "head_rules"},
                                {o.lengths, "lengths"},
                                {o.query_starts, "query_starts"},
                                {o.key_starts, "key_starts"},
                                {job.outputs.weight_rows, "weight_rows"}});
}

auto written_by(const AttentionJob& job) {
  const AttentionOutputs& o = job.outputs;
  const std::span<TileCounts> counts(o.tile_counts, o.tile_counts == nullptr ? 0 : 1);
  return std::to_array<Extent>({{job.out, "out"},
                                {job.logits, "logits"},
                                {job.weights, "weights"},
                                {job.dq, "dq"},
                                {job.dk, "dk"},
                                {job.dv, "dv"},
                                {job.dbias, "dbias"},
                                {job.dsinks, "dsinks"},
                                {job.dquery_scale, "dquery_scale"},
                                {o.stats, "stats"},
                                {job.dparameter, "dparameter"},
                                {job.dout.given ? SavedRows{} : job.saved, "saved"},
                                {o.top_keys, "top_keys"},
                                {o.top_weights, "top_weights"},
                                {o.column_sums, "column_sums"},
                                {counts, "tile_counts"},
                                {job.execution.workspace, "workspace"}});
}

void check_all_apart(const AttentionJob& job) {
  const auto all_read = read_by(job);
  const auto all_written = written_by(job);
  for (std::size_t i = 0; i < all_written.size(); ++i) {
    for (const Extent& read : all_read) check_apart(all_written[i], read);
    for (std::size_t j = 0; j < i; ++j) check_apart(all_written[i], all_written[j]);
  }
}

// What forward, backward and shards have in common: all that is read but v and dout.
AttentionJob common_job(const ConstView& q, const ConstView& k, const Shard* shard,
                        const AttentionOptions& options, const Execution& execution, Data data) {
  AttentionJob job;
  job.shape = shape_of(q, k);
  job.options = options;
  job.execution = execution;
  const AttentionShape& s = job.shape;
  job.q = grid(q, like_q(s, "q"), data);
  job.k = grid(k, like_k(s, "k"), data);
  if (shard != nullptr) job.shard = *shard;
  if (shard == nullptr) job.shard.all_keys = s.keys;
  if (job.shard.all_queries == 0) job.shard.all_queries = s.queries;
  check_logits(s, job.shard.all_keys, shard == nullptr ? "k" : "shard");

  job.query_scale = grid_if_given(options.query_scale, like_query_scale(s), data);
  job.bias = grid_if_given(options.bias, like_bias(s), data);
  job.mask = grid_if_given(options.mask, like_mask(s), data);
  job.sinks = grid_if_given(options.sinks, like_sinks(s), data);

  check_numbers(options);
  check_softcap(options.softcap, s.wide());
  job.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(s.key_size)));
  if (!options.head_rules.empty()) {
    check_count(options.head_rules.size(), s.heads, "head_rules", "one per query head");
  }
  check_packed(job);
  check_lengths(job);
  const std::int64_t farthest = job.shard.all_queries + job.shard.all_keys;
  job.options.window_left = std::min(options.window_left, farthest);
  job.options.window_right = std::min(options.window_right, farthest);
  return job;
}

void add_values(AttentionJob& job, const ConstView& v, Data data) {
  check_axes(v, "v", "(B, K, M, E)");
  check_head_size(v.sizes[3], "v");
  job.shape.value_size = v.sizes[3];
  job.v = grid(v, like_v(job.shape, "v"), data);
}

AttentionJob forward_job(const ConstView& q, const ConstView& k, const ConstView& v,
                         const AttentionOptions& options, const AttentionOutputs& outputs,
                         const Execution& execution, Data data) {
  AttentionJob job = common_job(q, k, nullptr, options, execution, data);
  add_values(job, v, data);
  job.outputs = outputs;
  check_outputs(job, data);
  return job;
}

// A gradient that is summed where its array repeats has the sizes of that array, not those of the call.
void check_same_sizes(const ConstView& gradient, const ConstView& of, const char* name, const char* of_name) {
  if (std::ranges::equal(gradient.sizes, of.sizes)) return;
  fail(name,
       "its sizes are " + text(gradient.sizes) + ", must be those of " + of_name + ", " + text(of.sizes));
}

// `partial`: those that are sums over all keys are in the type of the arithmetic.
void add_gradients(AttentionJob& job, const AttentionGradients& gradients, bool partial, Data data) {
  const AttentionOptions& options = job.options;
  const AttentionShape& s = job.shape;
  ViewSpec like_dq = like_q(s, "dq");
  if (partial) like_dq.dtype = like_dq.other_dtype = arithmetic(s);
  const auto type_of = [&](const Grid& of) { return partial ? arithmetic(s) : of.dtype; };
  job.dq = grid_if_given(gradients.dq, written(like_dq), data);
  job.dk = grid_if_given(gradients.dk, written(like_k(s, "dk")), data);
  job.dv = grid_if_given(gradients.dv, written(like_v(s, "dv")), data);
  if (is_given(gradients.dbias)) {
    if (!job.bias.given) fail("dbias", "given without bias");
    check_same_sizes(gradients.dbias, options.bias, "dbias", "bias");
    job.dbias = grid(gradients.dbias, written(like_dbias(s, job.bias)), data);
  }
  if (is_given(gradients.dsinks)) {
    if (!job.sinks.given) fail("dsinks", "given without sinks");
    job.dsinks = grid(gradients.dsinks, written(like_dsinks(s, type_of(job.sinks))), data);
  }
  if (is_given(gradients.dquery_scale)) {
    if (!job.query_scale.given) fail("dquery_scale", "given without query_scale");
    check_same_sizes(gradients.dquery_scale, options.query_scale, "dquery_scale", "query_scale");
    job.dquery_scale =
        grid(gradients.dquery_scale, written(like_dquery_scale(s, type_of(job.query_scale))), data);
  }
}

AttentionJob backward_job(const ConstView& q, const ConstView& k, const ConstView& v,
                          const AttentionGradients& gradients, const AttentionOptions& options,
                          const AttentionBackwardOptions& backward, const Execution& execution, Data data) {
  AttentionJob job = common_job(q, k, nullptr, options, execution, data);
  add_values(job, v, data);
  job.through_rule = backward.beta_gradient == BetaGradient::through_rule;
  add_saved(job, backward.saved, data);
  job.outputs.tile_counts = backward.tile_counts;
  add_gradients(job, gradients, false, data);
  const AttentionShape& s = job.shape;
  job.dparameter = gradients.dparameter;
  if (!job.dparameter.empty()) check_count(job.dparameter.size(), s.rows(), "dparameter", "one per row");
  return job;
}

void check_shard(const Shard& shard, const ConstView& q, const ConstView& k,
                 const AttentionOptions& options) {
  check_axes(q, "q", "(B, H, N, D)");
  check_axes(k, "k", "(B, K, M, D)");
  const std::int64_t queries = shard.all_queries == 0 ? q.sizes[2] : shard.all_queries;
  if (shard.first_query < 0 || shard.first_query > queries || q.sizes[2] > queries - shard.first_query ||
      queries > kMaxLogits) {
    fail("shard", "its first_query is " + std::to_string(shard.first_query) + " and its all_queries " +
                      std::to_string(shard.all_queries) + ", must be a range that holds the " +
                      std::to_string(q.sizes[2]) + " queries of q");
  }
  if (shard.first_key < 0 || shard.first_key > shard.all_keys ||
      k.sizes[2] > shard.all_keys - shard.first_key) {
    fail("shard", "its first_key is " + std::to_string(shard.first_key) + " and its all_keys " +
                      std::to_string(shard.all_keys) + ", must be a range that holds the " +
                      std::to_string(k.sizes[2]) + " keys of k");
  }
  if (!options.query_starts.empty()) fail("query_starts", "given, packed sequences can't be cut into shards");
  if (!options.key_starts.empty()) fail("key_starts", "given, packed sequences can't be cut into shards");
}

// If lengths are given: true if they are those of batch entries, whose ends Align::end counts from.
bool lengths_of_entries(const AttentionJob& job) {
  return job.options.lengths.size() == static_cast<std::size_t>(job.shape.batch);
}

// Keys of all shards that `sequence` has.
std::int64_t all_keys_of(const AttentionJob& job, const Sequence& sequence) {
  if (!job.options.query_starts.empty()) return sequence.keys;
  if (job.options.lengths.empty() || !lengths_of_entries(job)) return job.shard.all_keys;
  return job.options.lengths[static_cast<std::size_t>(sequence.batch)];
}

}  // namespace

std::byte* Grid::at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
  return data == nullptr ? nullptr : data + offset(a, b, c, d) * element_bytes(dtype);
}

Sequence AttentionJob::sequence(std::int64_t index) const {
  if (options.query_starts.empty()) {
    Sequence s{.batch = index, .first_query = 0, .queries = shape.queries, .first_key = 0, .keys = 0};
    s.keys = std::clamp<std::int64_t>(all_keys_of(*this, s) - shard.first_key, 0, shape.keys);
    return s;
  }
  const auto i = static_cast<std::size_t>(index);
  const std::int64_t query = options.query_starts[i], key = options.key_starts[i];
  return {.batch = 0,
          .first_query = query,
          .queries = options.query_starts[i + 1] - query,
          .first_key = key,
          .keys = options.key_starts[i + 1] - key};
}

KeyRange AttentionJob::visible(const Sequence& sequence, std::int64_t head, std::int64_t query) const {
  // Positions among the keys of the whole sequence.
  const std::int64_t all = all_keys_of(*this, sequence);
  const std::int64_t queries = options.query_starts.empty() ? shard.all_queries : sequence.queries;
  const std::int64_t from_end = options.align == Align::end ? all - queries : 0;
  const std::int64_t position = query - sequence.first_query + shard.first_query + from_end;
  std::int64_t begin = 0, end = all;
  if (!options.lengths.empty() && !lengths_of_entries(*this)) {
    end = options.lengths[static_cast<std::size_t>(row(sequence.batch, head, query))];
  }
  if (options.causal) end = std::min(end, position + 1);
  if (options.window_right >= 0) end = std::min(end, position + options.window_right + 1);
  if (options.window_left >= 0) begin = std::max(begin, position - options.window_left);

  // The same in k.
  const std::int64_t shift = sequence.first_key - shard.first_key;
  const std::int64_t first = sequence.first_key, last = sequence.first_key + sequence.keys;
  begin = std::clamp(begin + shift, first, last);
  return {begin, std::clamp(end + shift, begin, last)};
}

AttentionJob attention_job(ConstView q, ConstView k, ConstView v, View out, const AttentionOptions& options,
                           const AttentionOutputs& outputs, const Execution& execution) {
  AttentionJob job = forward_job(q, k, v, options, outputs, execution, Data::read);
  job.out = grid(out, written(like_out(job.shape, "out", job.shape.dtype)), Data::read);
  check_all_apart(job);
  return job;
}

AttentionJob attention_shape_job(ConstView q, ConstView k, ConstView v, const AttentionOptions& options,
                                 const AttentionOutputs& outputs, const Execution& execution) {
  return forward_job(q, k, v, options, outputs, execution, Data::not_read);
}

AttentionJob attention_backward_job(ConstView q, ConstView k, ConstView v, ConstView dout,
                                    const AttentionGradients& gradients, const AttentionOptions& options,
                                    const AttentionBackwardOptions& backward, const Execution& execution) {
  AttentionJob job = backward_job(q, k, v, gradients, options, backward, execution, Data::read);
  job.dout = grid(dout, like_out(job.shape, "dout", job.shape.dtype), Data::read);
  check_all_apart(job);
  return job;
}

AttentionJob attention_backward_shape_job(ConstView q, ConstView k, ConstView v,
                                          const AttentionGradients& gradients,
                                          const AttentionOptions& options,
                                          const AttentionBackwardOptions& backward,
                                          const Execution& execution) {
  return backward_job(q, k, v, gradients, options, backward, execution, Data::not_read);
}

namespace {

AttentionJob common_shard_job(const ConstView& q, const ConstView& k, const Shard& shard,
                              const AttentionOptions& options, const Execution& execution) {
  check_shard(shard, q, k, options);
  AttentionOptions used = options;
  used.rule = {};
  used.head_rules = {};
  return common_job(q, k, &shard, used, {.threads = execution.threads, .executor = execution.executor},
                    Data::read);
}

}  // namespace

AttentionJob shard_job(ConstView q, ConstView k, ConstView v, View out, const Shard& shard,
                       const AttentionOptions& options, const Execution& execution) {
  AttentionJob job = common_shard_job(q, k, shard, options, execution);
  job.logits = grid_if_given(shard.logits, like_logits(job.shape), Data::read);
  if (is_given(v) || is_given(out)) {
    add_values(job, v, Data::read);
    job.out = grid(out, written(like_out(job.shape, "out", arithmetic(job.shape))), Data::read);
  }
  check_all_apart(job);
  return job;
}

AttentionJob shard_backward_job(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                                const AttentionGradients& gradients, const AttentionOptions& options,
                                const Execution& execution) {
  AttentionJob job = common_shard_job(q, k, shard, options, execution);
  add_values(job, v, Data::read);
  if (!gradients.dparameter.empty()) fail("dparameter", "given, shards of keys have none");
  add_gradients(job, gradients, true, Data::read);
  job.dout = grid(dout, like_out(job.shape, "dout", job.shape.dtype), Data::read);
  check_all_apart(job);
  return job;
}

void check_shard_call(ConstView q, ConstView k, ConstView v, ConstView out, const Shard& shard,
                      const AttentionOptions& options) {
  check_shard(shard, q, k, options);
  AttentionJob job = common_job(q, k, &shard, options, {}, Data::read);
  add_values(job, v, Data::read);
  job.out = grid(out, written(like_out(job.shape, "out", job.shape.dtype)), Data::read);
  check_all_apart(job);
}

void check_shard_backward_call(ConstView q, ConstView k, ConstView v, ConstView dout, const Shard& shard,
                               const AttentionGradients& gradients, const AttentionOptions& options) {
  check_shard(shard, q, k, options);
  AttentionJob job = common_job(q, k, &shard, options, {}, Data::read);
  add_values(job, v, Data::read);
  if (!gradients.dparameter.empty()) fail("dparameter", "given, shards of keys have none");
  add_gradients(job, gradients, false, Data::read);
  job.dout = grid(dout, like_out(job.shape, "dout", job.shape.dtype), Data::read);
  check_all_apart(job);
}

void check_one_a_row(std::size_t given, const AttentionJob& job, const char* name) {
  check_count(given, job.shape.rows(), name, "one per row");
}

void check_apart(const AttentionJob& job, const Extent& written) {
  for (const Extent& read : read_by(job)) check_apart(written, read);
  for (const Extent& other : written_by(job)) check_apart(written, other);
}

void check_written_apart(const AttentionJob& job, const Extent& read) {
  for (const Extent& written : written_by(job)) check_apart(written, read);
}

}  // namespace whet::core
