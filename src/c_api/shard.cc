#include <whet/error.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "c_api/attention.h"
#include "c_api/convert.h"

struct whet_beta_search {
  whet::BetaSearch search;
};

namespace whet::c_api {
namespace {

static_assert(offsetof(RowSums, w) == offsetof(whet_row_sums, w));

// Records of this interface, which have no threshold, and those of C++, of which they are the beginning.
template <typename From, typename To>
constexpr bool begins = std::is_trivially_copyable_v<From>&& std::is_trivially_copyable_v<To> &&
                        sizeof(From) <= sizeof(To);
static_assert(begins<whet_row_scale, RowScale> &&
              offsetof(RowScale, beta) == offsetof(whet_row_scale, beta) &&
              begins<whet_weighed_row, WeighedRow> &&
              offsetof(WeighedRow, mean) == offsetof(whet_weighed_row, mean) &&
              begins<whet_gradient_sums, GradientSums> &&
              offsetof(GradientSums, ties) == offsetof(whet_gradient_sums, ties) &&
              begins<whet_row_slope, RowSlope> &&
              offsetof(RowSlope, peak_share) == offsetof(whet_row_slope, peak_share));

template <typename Shorter>
void copy_bytes(const void* from, void* to) {
  std::memcpy(to, from, sizeof(Shorter));
}

template <typename To, typename From>
std::vector<To> widened(const From* rows, std::size_t count, const char* name) {
  std::vector<To> wide(count);
  const std::span<const From> from = elements<const From>(rows, count, name);
  for (std::size_t i = 0; i < from.size(); ++i) copy_bytes<From>(&from[i], &wide[i]);
  return wide;
}

template <typename To, typename From>
void store_beginnings(const std::vector<From>& wide, std::span<To> rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) copy_bytes<To>(&wide[i], &rows[i]);
}

Shard shard_of(const whet_shard* given) {
  required(given, "shard");
  const whet_shard s = known_part(given, "shard");
  return {.first_key = s.first_key,
          .all_keys = s.all_keys,
          .first_query = s.first_query,
          .all_queries = s.all_queries,
          .logits = view_if_given(s.logits, "logits")};
}

AttentionOptions shard_options(const whet_attention_options* given) {
  const AttentionOptions options = options_of(known_part(given, "options"));
  if (needs_threshold(options.normalizer)) {
    throw Error("normalizer: is " + options.normalizer.name() +
                ", must be softmax or hard: rows of this interface have no threshold");
  }
  return options;
}

// Rows of q or out, (B, H, N, size). 0 where sizes are wrong: the shard functions say what is.
std::size_t rows_of(const ConstView& view) {
  std::int64_t rows = 1;
  for (std::size_t i = 0; i < 3; ++i) {
    if (view.sizes.size() != 4 || view.sizes[i] < 0 || __builtin_mul_overflow(rows, view.sizes[i], &rows)) {
      return 0;
    }
  }
  return static_cast<std::size_t>(rows);
}

}  // namespace
}  // namespace whet::c_api

using namespace whet::c_api;  // NOLINT(google-build-using-namespace): this file is its C functions

whet_status whet_shard_states(const whet_view* q, const whet_view* k, const whet_shard* shard,
                              whet_row_state* out, const whet_attention_options* options,
                              const whet_execution* execution) {
  return guarded([&] {
    const whet::ConstView queries = view_of(q, "q");
    whet::shard_states(queries, view_of(k, "k"), shard_of(shard),
                       elements<whet::RowState>(out, rows_of(queries), "out"), shard_options(options),
                       execution_of(execution));
  });
}

whet_status whet_shard_sums(const whet_view* q, const whet_view* k, const whet_shard* shard,
                            const whet_row_scale* rows, whet_row_sums* out,
                            const whet_attention_options* options, const whet_execution* execution) {
  return guarded([&] {
    const whet::ConstView queries = view_of(q, "q");
    const std::size_t count = rows_of(queries);
    whet::shard_sums(queries, view_of(k, "k"), shard_of(shard), widened<whet::RowScale>(rows, count, "rows"),
                     elements<whet::RowSums>(out, count, "out"), shard_options(options),
                     execution_of(execution));
  });
}

whet_status whet_shard_attention(const whet_view* q, const whet_view* k, const whet_view* v,
                                 const whet_shard* shard, const whet_row_scale* rows, const whet_view* out,
                                 double* mass, const whet_attention_options* options,
                                 const whet_execution* execution) {
  return guarded([&] {
    const whet::ConstView queries = view_of(q, "q");
    const std::size_t count = rows_of(queries);
    whet::shard_attention(queries, view_of(k, "k"), view_of(v, "v"), shard_of(shard),
                          widened<whet::RowScale>(rows, count, "rows"), view_of(out, "out"),
                          elements<double>(mass, count, "mass"), shard_options(options),
                          execution_of(execution));
  });
}

whet_status whet_merge_outputs(const whet_view* const* outs, const double* const* masses, size_t shards,
                               const whet_view* out) {
  return guarded([&] {
    const whet::View to = view_of(out, "out");
    std::vector<whet::ConstView> views;
    std::vector<std::span<const double>> sums;
    for (std::size_t s = 0; s < shards; ++s) {
      views.push_back(view_of(elements<const whet_view* const>(outs, shards, "outs")[s], "outs"));
      sums.push_back(elements<const double>(elements<const double* const>(masses, shards, "masses")[s],
                                            rows_of(to), "masses"));
    }
    whet::merge_outputs(views, sums, to);
  });
}

whet_status whet_shard_gradient_sums(const whet_view* q, const whet_view* k, const whet_view* v,
                                     const whet_view* dout, const whet_shard* shard,
                                     const whet_weighed_row* rows, whet_gradient_sums* out,
                                     const whet_attention_options* options, const whet_execution* execution) {
  return guarded([&] {
    const whet::ConstView queries = view_of(q, "q");
    const std::size_t count = rows_of(queries);
    const std::span<whet_gradient_sums> to = elements<whet_gradient_sums>(out, count, "out");
    std::vector<whet::GradientSums> sums(to.size());
    whet::shard_gradient_sums(queries, view_of(k, "k"), view_of(v, "v"), view_of(dout, "dout"),
                              shard_of(shard), widened<whet::WeighedRow>(rows, count, "rows"), sums,
                              shard_options(options), execution_of(execution));
    store_beginnings(sums, to);
  });
}

whet_status whet_shard_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                const whet_view* dout, const whet_shard* shard, const whet_row_slope* rows,
                                const whet_attention_gradients* gradients,
                                const whet_attention_options* options, const whet_execution* execution) {
  return guarded([&] {
    const whet::ConstView queries = view_of(q, "q");
    const std::size_t count = rows_of(queries);
    whet::shard_backward(queries, view_of(k, "k"), view_of(v, "v"), view_of(dout, "dout"), shard_of(shard),
                         widened<whet::RowSlope>(rows, count, "rows"), gradients_of(gradients, count),
                         shard_options(options), execution_of(execution));
  });
}

whet_status whet_beta_moves(const char* rule, double beta, int32_t hold_beta, int32_t* moves) {
  return guarded([&] {
    const bool result = whet::beta_moves(rule_of(rule), beta, beta_gradient(hold_beta));
    required(moves, "moves") = result ? 1 : 0;
  });
}

whet_status whet_row_slope_of(const char* rule, const whet_row_state* merged, const whet_weighed_row* row,
                              double mass, const whet_gradient_sums* sums, int32_t hold_beta,
                              whet_row_slope* out) {
  return guarded([&] {
    const std::span<whet_row_slope> to = elements<whet_row_slope>(out, 1, "out");
    const std::vector<whet::RowSlope> slope = {
        whet::row_slope(rule_of(rule), elements<const whet::RowState>(merged, 1, "merged")[0],
                        widened<whet::WeighedRow>(row, 1, "row")[0], mass,
                        widened<whet::GradientSums>(sums, 1, "sums")[0], beta_gradient(hold_beta))};
    store_beginnings(slope, to);
  });
}

whet_status whet_add(const whet_row_sums* a, const whet_row_sums* b, whet_row_sums* out) {
  return guarded([&] {
    elements<whet::RowSums>(out, 1, "out")[0] =
        whet::add(elements<const whet::RowSums>(a, 1, "a")[0], elements<const whet::RowSums>(b, 1, "b")[0]);
  });
}

whet_status whet_beta_search_create(const char* rule, const whet_row_state* merged,
                                    whet_beta_search** search) {
  return guarded([&] {
    whet::BetaSearch made(rule_of(rule), elements<const whet::RowState>(merged, 1, "merged")[0]);
    required(search, "search") = new whet_beta_search{std::move(made)};
  });
}

void whet_beta_search_destroy(whet_beta_search* search) { delete search; }

whet_status whet_beta_search_next(const whet_beta_search* search, double* beta, int32_t* done) {
  return guarded([&] {
    const whet::BetaSearch& s = required(search, "search").search;
    required(beta, "beta"), required(done, "done");
    *beta = s.beta();
    *done = s.done() ? 1 : 0;
  });
}

whet_status whet_beta_search_absorb(whet_beta_search* search, const whet_row_sums* sums) {
  return guarded(
      [&] { required(search, "search").search.absorb(elements<const whet::RowSums>(sums, 1, "sums")[0]); });
}
