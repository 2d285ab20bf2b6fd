// Attention and linear attention for JAX.

#include <whet/attention.h>
#include <whet/linear_attention.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "jax_batch.h"
#include "jax_call.h"
#include "jax_results.h"

namespace whet_python {

namespace {

// Optional outputs of attention beside stats, in types that JAX has without jax_enable_x64.
class OptionalResults {
 public:
  explicit OptionalResults(const Call& call)
      : top_(call.find("top_keys")),
        sums_(call.find("column_sums")),
        top_k_(top_ ? top_->size_from_end(1) : 0) {}

  void add_to(whet::AttentionOutputs& outputs, const Batch& batch, std::size_t rows, int64_t keys) {
    if (top_) {
      top_keys_.resize(rows * std::size_t(top_k_));
      outputs.top_k = top_k_;
      outputs.top_keys = top_keys_;
      outputs.top_weights = {batch.result<float>("top_weights"), top_keys_.size()};
    }
    if (sums_) {
      column_sums_.resize(std::size_t(batch.entries() * sums_->size_from_end(2) * keys));
      outputs.column_sums = column_sums_;
    }
  }

  void finish(const Batch& batch) const {
    if (top_) std::ranges::copy(top_keys_, batch.result<std::int32_t>("top_keys"));
    if (sums_ && sums_->type == ffi::DataType::F64) {
      std::ranges::copy(column_sums_, batch.result<double>("column_sums"));
    } else if (sums_) {
      std::ranges::transform(column_sums_, batch.result<float>("column_sums"),
                             [](double value) { return float(value); });
    }
  }

 private:
  const Array* top_;
  const Array* sums_;
  int64_t top_k_;
  std::vector<int64_t> top_keys_;
  std::vector<double> column_sums_;
};

void attention(const Call& call) {
  Batch batch(call);
  const Array& query = *call.find("query");
  const int64_t rows = batch.all_entries() * query.size_from_end(3) * query.size_from_end(2);
  StatsResult stats(call, std::size_t(rows));
  OptionalResults optional(call);
  for_each_part(call, batch, [&](auto q, auto k, auto v, auto& options, std::size_t part) {
    whet::AttentionOutputs outputs{.stats = stats.next(part), .saved = batch.saved(part)};
    optional.add_to(outputs, batch, part, k.sizes[2]);
    whet::attention(q, k, v, batch.heads_last("out"), options, outputs);
    optional.finish(batch);
  });
  stats.finish();
}

void attention_backward(const Call& call) {
  Batch batch(call);
  AlphaResult dalpha(call);
  for_each_part(call, batch, [&](auto q, auto k, auto v, auto& options, std::size_t part) {
    whet::attention_backward(q, k, v, batch.heads_last("dout"),
                             {.dq = batch.heads_last("dquery"),
                              .dk = batch.heads_last("dkey"),
                              .dv = batch.heads_last("dvalue"),
                              .dbias = batch.heads_first("dbias", "dbias"),
                              .dsinks = batch.heads("dsinks"),
                              .dquery_scale = batch.rows_of_heads("dquery_scale", "dquery_scale"),
                              .dparameter = dalpha.rows(int64_t(part))},
                             options, {.beta_gradient = call.beta_gradient(), .saved = batch.saved(part)});
    batch.write(dalpha);
  });
}

// ---- Linear attention

// Calls function(views of q, k, v, their options) for each part of the batch.
template <typename Function>
void for_each_linear_part(const Call& call, Batch& batch, const Function& function) {
  batch.for_each([&] {
    const whet::View q = batch.heads_last("query"), k = batch.heads_last("key"),
                     v = batch.heads_last("value");
    const std::vector<int64_t> lengths = lengths_of(call, batch, q.sizes[1], q.sizes[2], k.sizes[2]);
    function(q, k, v,
             whet::LinearAttentionOptions{.causal = call.attribute<bool>("causal"), .lengths = lengths});
  });
}

void linear_attention(const Call& call) {
  Batch batch(call);
  for_each_linear_part(call, batch, [&](auto q, auto k, auto v, const auto& options) {
    whet::linear_attention(q, k, v, batch.heads_last("out"), options);
  });
}

void linear_attention_backward(const Call& call) {
  Batch batch(call);
  for_each_linear_part(call, batch, [&](auto q, auto k, auto v, const auto& options) {
    whet::linear_attention_backward(
        q, k, v, batch.heads_last("dout"),
        {.dq = batch.heads_last("dquery"), .dk = batch.heads_last("dkey"), .dv = batch.heads_last("dvalue")},
        options);
  });
}

}  // namespace

void add_jax_attention(nb::dict& handlers) {
  handlers["whet_attention"] = handler<attention>();
  handlers["whet_attention_backward"] = handler<attention_backward>();
  handlers["whet_linear_attention"] = handler<linear_attention>();
  handlers["whet_linear_attention_backward"] = handler<linear_attention_backward>();
}

}  // namespace whet_python
