/* The C ABI from C: every function of the first header (v1/whet/c_api.h), and the edge cases of rows at this
 * level. Compiled against that header and against the installed one, which alone has what came later. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <whet/c_api.h>

static int checks = 0;

#define CHECK(condition)                                                              \
  do {                                                                                \
    ++checks;                                                                         \
    if (!(condition)) {                                                               \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, whet_last_error()); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

enum { kKeys = 5, kRows = 2 };
static const int64_t kSizes[2] = {kRows, kKeys};

static whet_view view(float* data) {
  whet_view v = {data, WHET_F32, 2, kSizes, NULL};
  return v;
}

static void test_softmax_and_stats(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {0, 0, 0, 0, 0}}, w[kRows][kKeys];
  whet_row_stats stats[kRows];
  const whet_softmax_options options = {.struct_size = sizeof options, .rule = "target-entropy:0.2"};
  const whet_softmax_outputs outputs = {sizeof outputs, stats, sizeof stats[0]};
  const whet_execution two = {.struct_size = sizeof two, .threads = 2};
  const whet_view in = view(x[0]), out = view(w[0]);
  CHECK(whet_softmax(&in, &out, &options, &outputs, &two) == WHET_OK);
  CHECK(fabs(stats[0].sharp_entropy - 0.2) < 2e-6 && stats[0].beta > 1);
  CHECK(w[1][0] == 0.2f && w[1][4] == 0.2f);
  CHECK(stats[1].count == 5 && stats[1].beta == 1);
}

static void test_axis(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}}, w[kRows][kKeys];
  const whet_view in = view(x[0]), out = view(w[0]);
  whet_softmax_options options = {
      .struct_size = sizeof options, .normalizer = "softmax", .axis_from_last = 1};
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(w[0][0] == 0.5f && w[1][4] == 0.5f);
  options.axis_from_last = 2;
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "axis_from_last is 2, must be 0 to 1 for 2 axes") == 0);
}

static void test_edge_cases(void) {
  float x[kRows][kKeys] = {{1, NAN, 3, 4, 5}, {-INFINITY, -INFINITY, 7, -INFINITY, -INFINITY}},
        w[kRows][kKeys];
  const whet_view in = view(x[0]), out = view(w[0]);
  int64_t lengths[kRows] = {0, 5};
  whet_softmax_options options = {.struct_size = sizeof options};
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_OK);
  CHECK(isnan(w[0][0]) && isnan(w[0][4]));
  CHECK(w[1][0] == 0 && w[1][2] == 1);
  options.lengths = lengths;
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(w[0][0] == 0 && w[0][1] == 0);
  x[0][0] = INFINITY;
  options.lengths = NULL;
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(isnan(w[0][0]) && isnan(w[0][4]) && w[1][2] == 1);
  x[0][0] = 3e38f, x[0][1] = -3e38f, x[0][2] = 3e38f, x[0][3] = -3e38f, x[0][4] = 0;
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_OK);
  CHECK(w[0][0] == 0.5f && w[0][1] == 0 && w[0][4] == 0);
}

static void test_sizes_and_strides(void) {
  float x[kKeys] = {1, 2, 3, 4, 5}, w[kKeys], reversed[kKeys];
  const int64_t five[1] = {kKeys}, none[2] = {3, 0}, backwards[1] = {-1};
  const whet_view in = {x, WHET_F32, 1, five, NULL}, out = {w, WHET_F32, 1, five, NULL};
  const whet_view from_the_end = {x + 4, WHET_F32, 1, five, backwards};
  const whet_view out_reversed = {reversed, WHET_F32, 1, five, NULL}, empty = {NULL, WHET_F32, 2, none, NULL};
  whet_row_stats stats[3];
  const whet_softmax_outputs outputs = {sizeof outputs, stats, sizeof stats[0]};
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_OK);
  CHECK(whet_softmax(&from_the_end, &out_reversed, NULL, NULL, NULL) == WHET_OK);
  for (int i = 0; i < kKeys; ++i) CHECK(fabs(w[i] - reversed[kKeys - 1 - i]) < 1e-7);
  CHECK(whet_softmax(&empty, &empty, NULL, &outputs, NULL) == WHET_OK);
  CHECK(stats[2].count == 0 && stats[2].beta == 1);
}

static void test_mask(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}}, w[kRows][kKeys];
  unsigned char mask[kKeys] = {1, 0, 0, 1, 0};
  const int64_t mask_sizes[2] = {1, kKeys};
  const whet_view in = view(x[0]), out = view(w[0]), keep = {mask, WHET_BOOLEAN, 2, mask_sizes, NULL};
  whet_softmax_options options = {.struct_size = sizeof options};
  options.mask = &keep;
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(w[1][1] == 0 && w[1][4] == 0);
  CHECK(fabs(w[1][3] - 1 / (1 + exp(-3.0))) < 1e-6);
}

static void test_backward_and_sharpen(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {5, 4, 3, 2, 1}}, w[kRows][kKeys], g[kRows][kKeys] = {{1}, {1}};
  float dx[kRows][kKeys];
  double sum = 0;
  const whet_view in = view(x[0]), out = view(w[0]), dout = view(g[0]), din = view(dx[0]);
  whet_softmax_options options = {.struct_size = sizeof options};
  whet_softmax_backward_options backward = {.struct_size = sizeof backward};
  options.rule = "paper";
  CHECK(whet_softmax_backward(&in, &dout, &din, &options, NULL, NULL) == WHET_OK);
  for (int i = 0; i < kKeys; ++i) sum += dx[0][i];
  CHECK(fabs(sum) < 1e-6); /* softmax doesn't see a shift */
  backward.hold_beta = 1;
  CHECK(whet_softmax_backward(&in, &dout, &din, &options, &backward, NULL) == WHET_OK);
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_OK);
  options.rule = "fixed:2";
  CHECK(whet_sharpen(&out, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(fabs(w[0][4] / w[0][3] - exp(2.0)) < 1e-4);
}

static void test_states(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}};
  whet_row_state states[kRows], merged;
  const whet_view in = view(x[0]);
  double betas[kRows];
  int32_t searches = -1;
  CHECK(whet_states(&in, states, NULL, NULL) == WHET_OK);
  CHECK(whet_merge(&states[0], &states[1], &merged) == WHET_OK);
  CHECK(merged.count == 10 && merged.min == 1 && merged.max == 10);
  CHECK(fabs(merged.z - (1 - exp(-10.0)) / (1 - exp(-1.0))) < 1e-6);
  CHECK(whet_merge(NULL, &states[1], &merged) == WHET_INVALID_ARGUMENT);
  CHECK(whet_rule_betas("ssmax:2", states, kRows, betas) == WHET_OK);
  CHECK(fabs(betas[1] - 2 * log(5.0)) < 1e-15);
  CHECK(whet_rule_betas("target-peak:0.5", states, kRows, betas) == WHET_INVALID_ARGUMENT);
  CHECK(whet_rule_needs_search("target-peak:0.5", &searches) == WHET_OK && searches == 1);
  CHECK(whet_rule_needs_search(NULL, &searches) == WHET_OK && searches == 0);
}

static void test_rule_file(const char* path) {
  char name[512];
  FILE* file = fopen(path, "w");
  CHECK(file != NULL && fputs("# fitted\npolynomial:0.5,1.25:hold=3\n", file) >= 0 && fclose(file) == 0);
  CHECK(whet_rule_load(path, name, sizeof name) == WHET_OK);
  CHECK(strcmp(name, "polynomial:0.5,1.25:hold=3") == 0);
  CHECK(whet_rule_load(path, name, strlen(name)) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "size is 26, this name needs 27") == 0);
  remove(path);
  CHECK(whet_rule_load(path, name, sizeof name) == WHET_INVALID_ARGUMENT);
}

static void test_errors(void) {
  float x[kRows][kKeys] = {{0}}, canary[kRows][kKeys];
  const int64_t overflowing[3] = {INT64_MAX, 2, 2}, negative[2] = {-1, 5};
  whet_view in = view(x[0]), out = view(canary[0]);
  whet_softmax_outputs outputs = {.struct_size = sizeof outputs};
  whet_softmax_options options = {.struct_size = sizeof options};
  memset(canary, 0x5a, sizeof canary);
  options.rule = "papper";
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "papper") != NULL);
  options.rule = NULL, options.normalizer = "softmin";
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "normalizer: 'softmin' is not a normalizer") != NULL);
  options.normalizer = NULL;
  CHECK(whet_softmax(NULL, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "in is null") != NULL);
  in.dtype = 17;
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  in.dtype = WHET_F64;
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "out: its element type") != NULL);
  in = view(x[0]);
  in.dims = 3, in.sizes = overflowing;
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  in.dims = 2, in.sizes = negative;
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  in = view(x[0]);
  out = view(x[0] + 1);
  CHECK(whet_softmax(&in, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "overlaps") != NULL);
  out = view(canary[0]);
  {
    whet_row_stats shared[kRows] = {{0}};
    options.lengths = (int64_t*)shared, outputs.stats = shared, outputs.stats_size = sizeof shared[0];
    CHECK(whet_softmax(&in, &out, &options, &outputs, NULL) == WHET_INVALID_ARGUMENT);
    CHECK(strstr(whet_last_error(), "stats: overlaps lengths") != NULL);
    outputs.stats_size = 0;
    CHECK(whet_softmax(&in, &out, NULL, &outputs, NULL) == WHET_INVALID_ARGUMENT);
    CHECK(strcmp(whet_last_error(), "stats: stats_size is 0, must be sizeof(whet_row_stats)") == 0);
    options.lengths = NULL;
  }
  options.struct_size = 0;
  CHECK(whet_softmax(&in, &out, &options, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "options: struct_size is 0") != NULL);
  for (size_t i = 0; i < sizeof canary; ++i) CHECK(((const unsigned char*)canary)[i] == 0x5a);
}

/* Two heads and two queries over five keys that both heads share. */
enum { kHeads = 2, kQueries = 2, kSize = 3, kValueSize = 4 };
static const int64_t kQuerySizes[4] = {1, kHeads, kQueries, kSize}, kKeySizes[4] = {1, 1, kKeys, kSize},
                     kValueSizes[4] = {1, 1, kKeys, kValueSize},
                     kOutSizes[4] = {1, kHeads, kQueries, kValueSize};

static whet_view view4(float* data, const int64_t* sizes) {
  whet_view v = {data, WHET_F32, 4, sizes, NULL};
  return v;
}

static void test_attention(void) {
  float q[kHeads][kQueries][kSize] = {{{0}}}, k[kKeys][kSize] = {{1}, {2}, {3}, {4}, {5}};
  float v[kKeys][kValueSize] = {{1}, {2}, {3}, {4}, {5}}, o[kHeads][kQueries][kValueSize], top_weights[4];
  double column_sums[kHeads][kKeys];
  whet_row_stats stats[kHeads * kQueries];
  whet_tile_counts tile_counts = {0, 0};
  int64_t lengths[1] = {4}, top_keys[4];
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), out = view4(o[0][0], kOutSizes);
  const char* const rules[kHeads] = {"none", "fixed:2"};
  const whet_attention_options options = {.struct_size = sizeof options,
                                          .head_rules = rules,
                                          .has_scale = 1,
                                          .scale = 0.5,
                                          .lengths = lengths,
                                          .lengths_count = 1};
  const whet_attention_outputs outputs = {.struct_size = sizeof outputs,
                                          .stats = stats,
                                          .stats_size = sizeof stats[0],
                                          .top_k = 1,
                                          .top_keys = top_keys,
                                          .top_weights = top_weights,
                                          .column_sums = column_sums[0],
                                          .tile_counts = &tile_counts};
  CHECK(whet_attention(&queries, &keys, &values, &out, NULL, NULL, NULL) == WHET_OK);
  CHECK(fabs(o[0][0][0] - 3) < 1e-6 && o[1][1][3] == 0); /* q = 0: the mean */
  q[0][1][0] = q[1][1][0] = 1;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, &outputs, NULL) == WHET_OK);
  CHECK(stats[0].count == 4 && stats[1].beta == 1 && stats[3].beta == 2);
  CHECK(fabs(stats[1].spread - 1.5) < 1e-6);
  CHECK(top_keys[0] == 0 && top_keys[3] == 3 && fabs(top_weights[3] - stats[3].sharp_peak) < 1e-6);
  CHECK(fabs(column_sums[1][0] + column_sums[1][1] + column_sums[1][2] + column_sums[1][3] - 2) < 1e-6);
  CHECK(column_sums[0][4] == 0 && tile_counts.tiles > 0);
}

static void test_attention_weights(void) {
  float q[kHeads][kQueries][kSize] = {{{0}}}, k[kKeys][kSize] = {{0}}, v[kKeys][kValueSize] = {{0}};
  float o[kHeads][kQueries][kValueSize], w[2][kKeys];
  const whet_row_index rows[2] = {{0, 0, 0}, {0, 1, 1}};
  const int64_t weight_sizes[2] = {2, kKeys};
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), out = view4(o[0][0], kOutSizes);
  const whet_view weights = {w[0], WHET_F32, 2, weight_sizes, NULL};
  whet_attention_options options = {.struct_size = sizeof options, .causal = 1};
  const whet_attention_outputs outputs = {
      .struct_size = sizeof outputs, .weight_rows = rows, .weight_rows_count = 2, .weights = &weights};
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, &outputs, NULL) == WHET_OK);
  CHECK(w[0][0] == 1 && w[0][1] == 0 && w[1][0] == 0.5f && w[1][1] == 0.5f && w[1][2] == 0);
  options.align_end = 1; /* the last query is at the last key */
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, &outputs, NULL) == WHET_OK);
  CHECK(w[0][3] == 0.25f && w[0][4] == 0 && w[1][4] == 0.2f);
  options.has_window_left = 1; /* of 0 keys: each query sees its own position only */
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, &outputs, NULL) == WHET_OK);
  CHECK(w[0][3] == 1 && w[1][3] == 0 && w[1][4] == 1);
}

static void test_normalizer_and_dropout(void) {
  float q[kHeads][kQueries][kSize] = {{{1}, {1}}, {{1}, {1}}}, k[kKeys][kSize] = {{1}, {3}, {3}, {0}, {2}};
  float v[kKeys][kValueSize] = {{0}, {2}, {4}, {0}, {0}};
  float o[kHeads][kQueries][kValueSize], again[kHeads][kQueries][kValueSize];
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), out = view4(o[0][0], kOutSizes);
  const whet_view out_again = view4(again[0][0], kOutSizes);
  whet_attention_options options = {.struct_size = sizeof options, .normalizer = "hard"};
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(o[0][0][0] == 3 && o[1][1][0] == 3); /* ties share */
  options.dropout = 0.5, options.dropout_seed = 1;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(whet_attention(&queries, &keys, &values, &out_again, &options, NULL, NULL) == WHET_OK);
  CHECK(memcmp(o, again, sizeof o) == 0);
  options.dropout = 1;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, NULL, NULL) == WHET_OK);
  CHECK(o[0][0][0] == 0 && o[1][1][0] == 0);
}

static void test_attention_backward(void) {
  float q[kHeads][kQueries][kSize] = {{{0}}}, k[kKeys][kSize] = {{1}, {2}, {3}, {4}, {5}};
  float v[kKeys][kValueSize] = {{1}, {2}, {3}, {4}, {5}}, g[kHeads * kQueries * kValueSize];
  float dq_data[kHeads][kQueries][kSize], dv_data[kKeys * kValueSize];
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), dout = view4(g, kOutSizes);
  const whet_view dq = view4(dq_data[0][0], kQuerySizes), dv = view4(dv_data, kValueSizes);
  const whet_attention_gradients gradients = {.struct_size = sizeof gradients, .dq = &dq, .dv = &dv};
  const whet_attention_options options = {.struct_size = sizeof options, .has_scale = 1, .scale = 0.5};
  const whet_attention_backward_options backward = {.struct_size = sizeof backward, .hold_beta = 1};
  whet_execution execution = {.struct_size = sizeof execution};
  int64_t saved_size = 0;
  CHECK(whet_saved_size(NULL, NULL, &saved_size) == WHET_OK && saved_size == 3);
  for (int i = 0; i < kHeads * kQueries * kValueSize; ++i) g[i] = 1;
  CHECK(whet_attention_backward_workspace(&queries, &keys, &values, &gradients, &options, &backward, NULL,
                                          &execution.workspace_bytes) == WHET_OK);
  execution.workspace = malloc(execution.workspace_bytes);
  CHECK(execution.workspace_bytes > 0 && execution.workspace != NULL);
  CHECK(whet_attention_backward(&queries, &keys, &values, &dout, &gradients, &options, &backward,
                                &execution) == WHET_OK);
  free(execution.workspace);
  for (int i = 0; i < kKeys * kValueSize; ++i) CHECK(fabs(dv_data[i] - 0.8) < 1e-6); /* 4 rows of 1/5 */
  CHECK(fabs(dq_data[0][0][0] - 0.5 * 2) < 1e-5 && dq_data[1][1][1] == 0); /* scale times a variance of 2 */
}

#ifndef WHET_C_API_V1_H_ /* what came after the first header */
/* With queries and keys of 0 every feature is 1: the output is the mean of the values seen. */
static void test_linear_attention(void) {
  float q[kHeads * kQueries * kSize] = {0}, k[kKeys * kSize] = {0}, g[kHeads * kQueries * kValueSize];
  float v[kKeys][kValueSize] = {{1}, {2}, {3}, {4}, {5}}, o[kHeads][kQueries][kValueSize];
  float dv_data[kKeys][kValueSize];
  const whet_view queries = view4(q, kQuerySizes), keys = view4(k, kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), out = view4(o[0][0], kOutSizes);
  const whet_view dout = view4(g, kOutSizes), dv = view4(dv_data[0], kValueSizes);
  const whet_linear_attention_gradients gradients = {.struct_size = sizeof gradients, .dv = &dv};
  const int64_t lengths[1] = {4};
  whet_linear_attention_options options = {.struct_size = sizeof options, .causal = 1};
  for (int i = 0; i < kHeads * kQueries * kValueSize; ++i) g[i] = 1;
  CHECK(whet_linear_attention(&queries, &keys, &values, &out, NULL, NULL) == WHET_OK);
  CHECK(fabs(o[1][1][0] - 3) < 1e-5 && o[0][0][1] == 0);
  CHECK(whet_linear_attention(&queries, &keys, &values, &out, &options, NULL) == WHET_OK);
  CHECK(fabs(o[1][0][0] - 1) < 1e-5 && fabs(o[1][1][0] - 1.5) < 1e-5);
  CHECK(whet_linear_attention_backward(&queries, &keys, &values, &dout, &gradients, &options, NULL) ==
        WHET_OK);
  CHECK(fabs(dv_data[0][0] - 3) < 1e-5 && fabs(dv_data[1][2] - 1) < 1e-5 && dv_data[2][0] == 0);
  options =
      (whet_linear_attention_options){.struct_size = sizeof options, .lengths = lengths, .lengths_count = 1};
  CHECK(whet_linear_attention(&queries, &keys, &values, &out, &options, NULL) == WHET_OK);
  CHECK(fabs(o[0][1][0] - 2.5) < 1e-5);
  options.lengths_count = 0; /* none */
  CHECK(whet_linear_attention(NULL, &keys, &values, &out, &options, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "q is null") == 0);
  CHECK(whet_linear_attention_backward(&queries, &keys, &values, &dout, NULL, NULL, NULL) ==
        WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "gradients is null") == 0);
}
#endif

static void test_attention_errors(void) {
  float q[kHeads * kQueries * kSize] = {0}, k[kKeys * kSize] = {0}, v[kKeys * kValueSize] = {0};
  float canary[kHeads * kQueries * kValueSize];
  whet_view queries = view4(q, kQuerySizes), keys = view4(k, kKeySizes), values = view4(v, kValueSizes);
  whet_view out = view4(canary, kOutSizes);
  whet_attention_options options = {.struct_size = sizeof options, .scale = 0.5};
  whet_attention_outputs outputs = {.struct_size = sizeof outputs, .top_k = INT64_MAX};
  size_t bytes = 0;
  memset(canary, 0x5a, sizeof canary);
  CHECK(whet_attention(NULL, &keys, &values, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "q is null") == 0);
  CHECK(whet_attention(&queries, &values, &values, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "k: its sizes are (1, 1, 5, 4)") != NULL);
  CHECK(whet_attention_workspace(&queries, &keys, &values, NULL, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(whet_attention_backward(&queries, &keys, &values, &out, NULL, NULL, NULL, NULL) ==
        WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "gradients is null") == 0);
  CHECK(whet_attention(&queries, &keys, &values, &out, NULL, &outputs, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "top_k: is 9223372036854775807") != NULL);
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "scale: is given, but has_scale is 0, must be 1") == 0);
  CHECK(whet_attention_workspace(&queries, &keys, &values, NULL, NULL, NULL, &bytes) == WHET_OK);
  CHECK(bytes > 0);
  out = view4(k, kOutSizes);
  CHECK(whet_attention(&queries, &keys, &values, &out, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "out: overlaps k") == 0);
  out = view4(canary, kOutSizes);
  options.struct_size = 3;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "options: struct_size is 3") != NULL);
  for (size_t i = 0; i < sizeof canary; ++i) CHECK(((const unsigned char*)canary)[i] == 0x5a);
}

/* The keys cut in two, with a rule that needs a search, against attention over all of them. */
enum { kParts = 2, kAttentionRows = kHeads * kQueries };
static float shard_q[kHeads][kQueries][kSize] = {{{1, 0, 1}, {0, 1}}, {{2}, {0, 0, 1}}};
static float shard_k[kKeys][kSize] = {{1, 0, 1}, {0, 2}, {3}, {0, 0, 4}, {1, 1, 1}};
static float shard_v[kKeys][kValueSize] = {{1}, {0, 2}, {0, 0, 3}, {4}, {0, 0, 0, 5}};
static const int64_t kFirst[kParts + 1] = {0, 2, kKeys};
static const char kTarget[] = "target-entropy:0.4";

typedef struct part {
  whet_view k, v, out;
  int64_t k_sizes[4], v_sizes[4];
  whet_shard shard;
  float out_data[kHeads][kQueries][kValueSize];
  double mass[kAttentionRows];
#ifndef V1
  whet_gradient_sums sums[kAttentionRows];
  float dq_data[kHeads][kQueries][kSize];
#endif
} part;

static void cut(part* p, int i) {
  const int64_t keys = kFirst[i + 1] - kFirst[i];
  const int64_t k_sizes[4] = {1, 1, keys, kSize}, v_sizes[4] = {1, 1, keys, kValueSize};
  memset(p, 0, sizeof *p);
  memcpy(p->k_sizes, k_sizes, sizeof k_sizes), memcpy(p->v_sizes, v_sizes, sizeof v_sizes);
  p->k = view4(shard_k[kFirst[i]], p->k_sizes), p->v = view4(shard_v[kFirst[i]], p->v_sizes);
  p->out = view4(p->out_data[0][0], kOutSizes);
  p->shard.struct_size = sizeof p->shard, p->shard.first_key = kFirst[i], p->shard.all_keys = kKeys;
}

/* One step of the searches of all rows; 1 if all are done. */
static int step(const whet_view* q, part* parts, whet_beta_search** searches, whet_row_scale* scales) {
  whet_row_sums sums[kParts][kAttentionRows], sum;
  int all_done = 1;
  for (int row = 0; row < kAttentionRows; ++row) {
    int32_t done = 0;
    CHECK(whet_beta_search_next(searches[row], &scales[row].beta, &done) == WHET_OK);
    all_done = all_done && done;
  }
  if (all_done) return 1;
  for (int i = 0; i < kParts; ++i) {
    CHECK(whet_shard_sums(q, &parts[i].k, &parts[i].shard, scales, sums[i], NULL, NULL) == WHET_OK);
  }
  for (int row = 0; row < kAttentionRows; ++row) {
    CHECK(whet_add(&sums[0][row], &sums[1][row], &sum) == WHET_OK);
    CHECK(whet_beta_search_absorb(searches[row], &sum) == WHET_OK);
  }
  return 0;
}

#ifndef V1 /* whose header has no gradients of shards */
/* The slope of each row, from its sums over both parts. */
static void find_slopes(const whet_row_state* merged, const whet_row_scale* scales, const part* parts,
                        whet_row_slope* slopes) {
  for (int row = 0; row < kAttentionRows; ++row) {
    const whet_gradient_sums *a = &parts[0].sums[row], *b = &parts[1].sums[row];
    const whet_gradient_sums sums = {a->wg + b->wg, a->wdg + b->wdg, a->wd + b->wd, a->wdd + b->wdd,
                                     a->ties + b->ties};
    const whet_weighed_row weighed = {scales[row].max, scales[row].beta, -1};
    const double mass = parts[0].mass[row] + parts[1].mass[row];
    CHECK(whet_row_slope_of(kTarget, &merged[row], &weighed, mass, &sums, 0, &slopes[row]) == WHET_OK);
  }
}

/* The gradient to the queries, the sum of two parts, against that of attention. */
static void check_shard_gradients(const whet_view* q, part* parts, const whet_row_state* merged,
                                  const whet_row_scale* scales) {
  static float dout_data[kHeads][kQueries][kValueSize] = {{{1, -1}, {0, 2}}, {{0, 0, 3}, {1, 1, 1}}};
  static float dq_data[kHeads][kQueries][kSize];
  const whet_view k = view4(shard_k[0], kKeySizes), v = view4(shard_v[0], kValueSizes);
  const whet_view dout = view4(dout_data[0][0], kOutSizes), dq = view4(dq_data[0][0], kQuerySizes);
  const whet_attention_options options = {.struct_size = sizeof options, .rule = kTarget};
  const whet_attention_gradients gradients = {.struct_size = sizeof gradients, .dq = &dq};
  whet_weighed_row rows[kAttentionRows];
  whet_row_slope slopes[kAttentionRows];
  int32_t moves = 0;
  CHECK(whet_beta_moves(kTarget, 1.5, 0, &moves) == WHET_OK && moves == 1);
  CHECK(whet_beta_moves(kTarget, 1.5, 1, &moves) == WHET_OK && moves == 0);
  for (int row = 0; row < kAttentionRows; ++row) {
    rows[row].max = scales[row].max, rows[row].beta = scales[row].beta, rows[row].mean = -1;
  }
  for (int i = 0; i < kParts; ++i) {
    CHECK(whet_shard_gradient_sums(q, &parts[i].k, &parts[i].v, &dout, &parts[i].shard, rows, parts[i].sums,
                                   NULL, NULL) == WHET_OK);
  }
  find_slopes(merged, scales, parts, slopes);
  for (int i = 0; i < kParts; ++i) {
    const whet_view part_dq = view4(parts[i].dq_data[0][0], kQuerySizes);
    const whet_attention_gradients wanted = {.struct_size = sizeof wanted, .dq = &part_dq};
    CHECK(whet_shard_backward(q, &parts[i].k, &parts[i].v, &dout, &parts[i].shard, slopes, &wanted, NULL,
                              NULL) == WHET_OK);
  }
  CHECK(whet_attention_backward(q, &k, &v, &dout, &gradients, &options, NULL, NULL) == WHET_OK);
  for (int i = 0; i < kAttentionRows * kSize; ++i) {
    const float sum = (&parts[0].dq_data[0][0][0])[i] + (&parts[1].dq_data[0][0][0])[i];
    CHECK(fabs(sum - (&dq_data[0][0][0])[i]) < 1e-5);
  }
}
#endif

static void test_shards(void) {
  float whole[kHeads][kQueries][kValueSize], merged[kHeads][kQueries][kValueSize];
  const whet_view q = view4(shard_q[0][0], kQuerySizes), k = view4(shard_k[0], kKeySizes);
  const whet_view v = view4(shard_v[0], kValueSizes), out = view4(whole[0][0], kOutSizes);
  const whet_view merged_out = view4(merged[0][0], kOutSizes);
  const whet_attention_options options = {.struct_size = sizeof options, .rule = kTarget};
  part parts[kParts];
  whet_row_state states[kParts][kAttentionRows];
  whet_row_scale scales[kAttentionRows];
  whet_beta_search* searches[kAttentionRows];
  const whet_view* outs[kParts] = {&parts[0].out, &parts[1].out};
  const double* masses[kParts] = {parts[0].mass, parts[1].mass};
  CHECK(whet_attention(&q, &k, &v, &out, &options, NULL, NULL) == WHET_OK);
  for (int i = 0; i < kParts; ++i) {
    cut(&parts[i], i);
    CHECK(whet_shard_states(&q, &parts[i].k, &parts[i].shard, states[i], NULL, NULL) == WHET_OK);
  }
  for (int row = 0; row < kAttentionRows; ++row) {
    CHECK(whet_merge(&states[0][row], &states[1][row], &states[0][row]) == WHET_OK);
    CHECK(whet_beta_search_create(kTarget, &states[0][row], &searches[row]) == WHET_OK);
    scales[row].max = states[0][row].max;
  }
  while (!step(&q, parts, searches, scales)) {
  }
  for (int row = 0; row < kAttentionRows; ++row) whet_beta_search_destroy(searches[row]);
  for (int i = 0; i < kParts; ++i) {
    CHECK(whet_shard_attention(&q, &parts[i].k, &parts[i].v, &parts[i].shard, scales, &parts[i].out,
                               parts[i].mass, NULL, NULL) == WHET_OK);
  }
  CHECK(whet_merge_outputs(outs, masses, kParts, &merged_out) == WHET_OK);
  for (int i = 0; i < kAttentionRows * kValueSize; ++i) {
    CHECK(fabs((&merged[0][0][0])[i] - (&whole[0][0][0])[i]) < 1e-5);
  }
#ifndef V1
  check_shard_gradients(&q, parts, states[0], scales);
#endif
}

static void test_shard_errors(void) {
  const whet_view q = view4(shard_q[0][0], kQuerySizes), k = view4(shard_k[0], kKeySizes);
  const whet_shard wrong = {.struct_size = sizeof wrong, .first_key = 1, .all_keys = kKeys};
  const whet_row_state state = {2, 0, 1, 1, 0, 0};
  whet_row_state states[kAttentionRows];
  whet_beta_search* search = NULL;
  CHECK(whet_shard_states(&q, &k, NULL, states, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "shard is null") == 0);
  CHECK(whet_shard_states(&q, &k, &wrong, states, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "shard: its first_key is 1") != NULL);
  CHECK(whet_shard_states(&q, &k, &wrong, NULL, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "out is null") == 0);
  CHECK(whet_beta_search_create("paper", &state, &search) == WHET_INVALID_ARGUMENT && search == NULL);
  CHECK(strstr(whet_last_error(), "rule: is paper") != NULL);
  CHECK(whet_merge_outputs(NULL, NULL, 1, &q) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "outs is null") == 0);
  whet_beta_search_destroy(NULL);
#ifndef V1
  const whet_shard first = {.struct_size = sizeof first, .all_keys = kKeys};
  const whet_attention_options sparse = {.struct_size = sizeof sparse, .normalizer = "sparsemax"};
  CHECK(whet_shard_states(&q, &k, &first, states, &sparse, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "normalizer: is sparsemax, must be softmax or hard") != NULL);
#endif
}

static void test_horizon(void) {
  float matrix[2][2] = {{3, 0}, {0, -4}};
  const int64_t sizes[2] = {2, 2};
  const whet_view view_of_matrix = {matrix[0], WHET_F32, 2, sizes, NULL};
  whet_head_norms norms = {
      .struct_size = sizeof norms, .query_gain = 2, .query_input = 3, .key_gain = 5, .key_input = 7};
  double x = 0, y = 0;
  CHECK(whet_horizon(log(10.0), 0.5, 1, &x) == WHET_OK && fabs(x - 11) < 1e-12);
  CHECK(whet_largest_weight(11, log(10.0), 1, &x) == WHET_OK && fabs(x - 0.5) < 1e-14);
  CHECK(whet_paper_bounds(100, log(10.0), 1, &x, &y) == WHET_OK);
  CHECK(fabs(x - 0.001) < 1e-15 && fabs(y - 0.1) < 1e-14);
  CHECK(whet_largest_singular_value(&view_of_matrix, &x) == WHET_OK && x >= 4 && x < 4 + 1e-8);
  CHECK(whet_spread_bound(&norms, &x) == WHET_OK && x == 420);
  norms.has_scale = 1, norms.scale = 0.5;
  CHECK(whet_spread_bound(&norms, &x) == WHET_OK && x == 210);
  CHECK(whet_horizon(-1, 0.5, 1, &x) == WHET_INVALID_ARGUMENT && x == 210);
}

static void test_out_of_memory(void) {
  /* A row of 2^50 keys that all are the same four bytes; with a mask it needs a buffer. */
  static const int64_t sizes[2] = {1, INT64_C(1) << 50}, strides[2] = {0, 0};
  static unsigned char one = 1;
  float x = 0;
  whet_view in = {&x, WHET_F32, 2, sizes, strides}, mask = {&one, WHET_BOOLEAN, 2, sizes, strides};
  whet_row_state state = {42, 0, 0, 0, 0, 0};
  const whet_states_options options = {.struct_size = sizeof options, .mask = &mask};
  CHECK(whet_states(&in, &state, &options, NULL) == WHET_OUT_OF_MEMORY);
  CHECK(state.count == 42);
}

static void test_runtime(void) {
  CHECK(whet_set_threads(2) == WHET_OK && whet_threads() == 2);
  CHECK(whet_set_threads(-1) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_targets(), whet_target()) != NULL);
  CHECK(whet_force_target("nothing") == WHET_INVALID_ARGUMENT);
  CHECK(whet_force_target("") == WHET_OK);
}

/* Argument: the name of a file that may be written. */
int main(int count, char** arguments) {
  test_softmax_and_stats();
  test_axis();
  test_edge_cases();
  test_sizes_and_strides();
  test_mask();
  test_backward_and_sharpen();
  test_states();
  if (count == 2) test_rule_file(arguments[1]);
  test_errors();
  test_attention();
  test_attention_weights();
  test_normalizer_and_dropout();
  test_attention_backward();
#ifndef WHET_C_API_V1_H_
  test_linear_attention();
#endif
  test_attention_errors();
  test_shards();
  test_shard_errors();
  test_horizon();
  test_out_of_memory();
  test_runtime();
  printf("%d checks passed, whet %s\n", checks, whet_version());
  return 0;
}
