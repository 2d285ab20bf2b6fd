/* The C ABI from C: every function, and numerics.md's edge cases at this level. */
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
  double stats[kRows][WHET_STATS_FIELDS];
  whet_options options = WHET_OPTIONS_DEFAULT;
  const whet_view in = view(x[0]), out = view(w[0]);
  options.stats = stats[0];
  CHECK(whet_rule_parse("target-entropy:0.2", &options.rule) == WHET_OK);
  CHECK(whet_softmax(&in, &out, &options) == WHET_OK);
  CHECK(fabs(stats[0][8] - 0.2) < 2e-6); /* sharp_entropy */
  CHECK(stats[0][7] > 1);                /* beta */
  CHECK(w[1][0] == 0.2f && w[1][4] == 0.2f);
  CHECK(stats[1][0] == 5 && stats[1][7] == 1);
}

static void test_edge_cases(void) {
  float x[kRows][kKeys] = {{1, NAN, 3, 4, 5}, {-INFINITY, -INFINITY, 7, -INFINITY, -INFINITY}},
        w[kRows][kKeys];
  const whet_view in = view(x[0]), out = view(w[0]);
  int64_t lengths[kRows] = {0, 5};
  whet_options options = WHET_OPTIONS_DEFAULT;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_OK);
  CHECK(isnan(w[0][0]) && isnan(w[0][4]));
  CHECK(w[1][0] == 0 && w[1][2] == 1);
  options.lengths = lengths;
  CHECK(whet_softmax(&in, &out, &options) == WHET_OK);
  CHECK(w[0][0] == 0 && w[0][1] == 0);
  x[0][0] = INFINITY;
  options.lengths = NULL;
  CHECK(whet_softmax(&in, &out, &options) == WHET_OK);
  CHECK(isnan(w[0][0]) && isnan(w[0][4]) && w[1][2] == 1);
  x[0][0] = 3e38f, x[0][1] = -3e38f, x[0][2] = 3e38f, x[0][3] = -3e38f, x[0][4] = 0;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_OK);
  CHECK(w[0][0] == 0.5f && w[0][1] == 0 && w[0][4] == 0);
}

static void test_sizes_and_strides(void) {
  float x[kKeys] = {1, 2, 3, 4, 5}, w[kKeys], reversed[kKeys];
  const int64_t five[1] = {kKeys}, none[2] = {3, 0}, backwards[1] = {-1};
  const whet_view in = {x, WHET_F32, 1, five, NULL}, out = {w, WHET_F32, 1, five, NULL};
  const whet_view from_the_end = {x + 4, WHET_F32, 1, five, backwards};
  const whet_view out_reversed = {reversed, WHET_F32, 1, five, NULL}, empty = {NULL, WHET_F32, 2, none, NULL};
  double stats[3][WHET_STATS_FIELDS];
  whet_options options = WHET_OPTIONS_DEFAULT;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_OK);
  CHECK(whet_softmax(&from_the_end, &out_reversed, NULL) == WHET_OK);
  for (int i = 0; i < kKeys; ++i) CHECK(fabs(w[i] - reversed[kKeys - 1 - i]) < 1e-7);
  options.stats = stats[0];
  CHECK(whet_softmax(&empty, &empty, &options) == WHET_OK);
  CHECK(stats[2][0] == 0 && stats[2][7] == 1);
}

static void test_mask(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}}, w[kRows][kKeys];
  unsigned char mask[kKeys] = {1, 0, 0, 1, 0};
  const int64_t mask_sizes[2] = {1, kKeys};
  const whet_view in = view(x[0]), out = view(w[0]), keep = {mask, WHET_BOOLEAN, 2, mask_sizes, NULL};
  whet_options options = WHET_OPTIONS_DEFAULT;
  options.mask = &keep;
  CHECK(whet_softmax(&in, &out, &options) == WHET_OK);
  CHECK(w[1][1] == 0 && w[1][4] == 0);
  CHECK(fabs(w[1][3] - 1 / (1 + exp(-3.0))) < 1e-6);
}

static void test_backward_and_sharpen(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {5, 4, 3, 2, 1}}, w[kRows][kKeys], g[kRows][kKeys] = {{1}, {1}};
  float dx[kRows][kKeys];
  double sum = 0;
  const whet_view in = view(x[0]), out = view(w[0]), dout = view(g[0]), din = view(dx[0]);
  whet_options options = WHET_OPTIONS_DEFAULT;
  CHECK(whet_rule_parse("paper", &options.rule) == WHET_OK);
  CHECK(whet_softmax_backward(&in, &dout, &din, &options) == WHET_OK);
  for (int i = 0; i < kKeys; ++i) sum += dx[0][i];
  CHECK(fabs(sum) < 1e-6); /* softmax doesn't see a shift */
  options.hold_beta = 1;
  CHECK(whet_softmax_backward(&in, &dout, &din, &options) == WHET_OK);
  CHECK(whet_softmax(&in, &out, NULL) == WHET_OK);
  CHECK(whet_rule_parse("fixed:2", &options.rule) == WHET_OK);
  CHECK(whet_sharpen(&out, &out, &options) == WHET_OK);
  CHECK(fabs(w[0][4] / w[0][3] - exp(2.0)) < 1e-4);
}

static void test_states(void) {
  float x[kRows][kKeys] = {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}};
  whet_row_state states[kRows], merged;
  const whet_view in = view(x[0]);
  CHECK(whet_states(&in, states, NULL) == WHET_OK);
  merged = whet_merge(&states[0], &states[1]);
  CHECK(merged.count == 10 && merged.min == 1 && merged.max == 10);
  CHECK(fabs(merged.z - (1 - exp(-10.0)) / (1 - exp(-1.0))) < 1e-6);
}

static void test_errors(void) {
  float x[kRows][kKeys] = {{0}}, canary[kRows][kKeys];
  const int64_t overflowing[3] = {INT64_MAX, 2, 2}, negative[2] = {-1, 5};
  whet_view in = view(x[0]), out = view(canary[0]);
  whet_rule rule;
  whet_options options = WHET_OPTIONS_DEFAULT;
  memset(canary, 0x5a, sizeof canary);
  CHECK(whet_rule_parse("papper", &rule) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "papper") != NULL);
  CHECK(whet_rule_parse(NULL, &rule) == WHET_INVALID_ARGUMENT);
  CHECK(whet_softmax(NULL, &out, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "in is null") != NULL);
  in.dtype = 17;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_INVALID_ARGUMENT);
  in.dtype = WHET_F64;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "out: its element type") != NULL);
  in = view(x[0]);
  in.dims = 3, in.sizes = overflowing;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_INVALID_ARGUMENT);
  in.dims = 2, in.sizes = negative;
  CHECK(whet_softmax(&in, &out, NULL) == WHET_INVALID_ARGUMENT);
  in = view(x[0]);
  out = view(x[0] + 1);
  CHECK(whet_softmax(&in, &out, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "overlaps") != NULL);
  out = view(canary[0]);
  {
    int64_t shared[kRows * WHET_STATS_FIELDS] = {0};
    options.lengths = shared, options.stats = (double*)shared;
    CHECK(whet_softmax(&in, &out, &options) == WHET_INVALID_ARGUMENT);
    CHECK(strstr(whet_last_error(), "stats: overlaps lengths") != NULL);
    options.lengths = NULL, options.stats = NULL;
  }
  options.rule.kind = 99;
  CHECK(whet_softmax(&in, &out, &options) == WHET_INVALID_ARGUMENT);
  options.struct_size = 3;
  CHECK(whet_softmax(&in, &out, &options) == WHET_INVALID_ARGUMENT);
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
  double stats[kHeads * kQueries][WHET_STATS_FIELDS], column_sums[kHeads][kKeys];
  int64_t lengths[1] = {4}, top_keys[4], tile_counts[2] = {0, 0};
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), out = view4(o[0][0], kOutSizes);
  whet_rule rules[kHeads];
  whet_attention_options options = WHET_ATTENTION_OPTIONS_DEFAULT;
  CHECK(whet_attention(&queries, &keys, &values, &out, NULL) == WHET_OK);
  CHECK(fabs(o[0][0][0] - 3) < 1e-6 && o[1][1][3] == 0); /* q = 0: the mean */
  CHECK(whet_rule_parse("none", &rules[0]) == WHET_OK && whet_rule_parse("fixed:2", &rules[1]) == WHET_OK);
  q[0][1][0] = q[1][1][0] = 1;
  options.head_rules = rules, options.scale = 0.5;
  options.lengths = lengths, options.lengths_count = 1;
  options.stats = stats[0], options.column_sums = column_sums[0], options.tile_counts = tile_counts;
  options.top_k = 1, options.top_keys = top_keys, options.top_weights = top_weights;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options) == WHET_OK);
  CHECK(stats[0][0] == 4 && stats[1][7] == 1 && stats[3][7] == 2);
  CHECK(top_keys[0] == 0 && top_keys[3] == 3 && fabs(top_weights[3] - stats[3][9]) < 1e-6);
  CHECK(fabs(column_sums[1][0] + column_sums[1][1] + column_sums[1][2] + column_sums[1][3] - 2) < 1e-6);
  CHECK(column_sums[0][4] == 0 && tile_counts[0] > 0);
}

static void test_attention_weights(void) {
  float q[kHeads][kQueries][kSize] = {{{0}}}, k[kKeys][kSize] = {{0}}, v[kKeys][kValueSize] = {{0}};
  float o[kHeads][kQueries][kValueSize], w[2][kKeys];
  const int64_t rows[2][3] = {{0, 0, 0}, {0, 1, 1}}, weight_sizes[2] = {2, kKeys};
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), out = view4(o[0][0], kOutSizes);
  const whet_view weights = {w[0], WHET_F32, 2, weight_sizes, NULL};
  whet_attention_options options = WHET_ATTENTION_OPTIONS_DEFAULT;
  options.causal = 1;
  options.weight_rows = rows[0], options.weight_rows_count = 2, options.weights = &weights;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options) == WHET_OK);
  CHECK(w[0][0] == 1 && w[0][1] == 0 && w[1][0] == 0.5f && w[1][1] == 0.5f && w[1][2] == 0);
  options.align_end = 1; /* the last query stands at the last key */
  CHECK(whet_attention(&queries, &keys, &values, &out, &options) == WHET_OK);
  CHECK(w[0][3] == 0.25f && w[0][4] == 0 && w[1][4] == 0.2f);
}

static void test_attention_backward(void) {
  float q[kHeads][kQueries][kSize] = {{{0}}}, k[kKeys][kSize] = {{1}, {2}, {3}, {4}, {5}};
  float v[kKeys][kValueSize] = {{1}, {2}, {3}, {4}, {5}}, g[kHeads * kQueries * kValueSize];
  float dq_data[kHeads][kQueries][kSize], dv_data[kKeys * kValueSize];
  const whet_view queries = view4(q[0][0], kQuerySizes), keys = view4(k[0], kKeySizes);
  const whet_view values = view4(v[0], kValueSizes), dout = view4(g, kOutSizes);
  const whet_view dq = view4(dq_data[0][0], kQuerySizes), dv = view4(dv_data, kValueSizes);
  const whet_attention_gradients gradients = {&dq, NULL, &dv, NULL, NULL};
  size_t bytes = 0;
  whet_attention_options options = WHET_ATTENTION_OPTIONS_DEFAULT;
  for (int i = 0; i < kHeads * kQueries * kValueSize; ++i) g[i] = 1;
  options.scale = 0.5, options.hold_beta = 1;
  CHECK(whet_attention_backward_workspace(&queries, &keys, &values, &gradients, &options, &bytes) == WHET_OK);
  options.workspace_bytes = bytes, options.workspace = malloc(bytes);
  CHECK(bytes > 0 && options.workspace != NULL);
  CHECK(whet_attention_backward(&queries, &keys, &values, &dout, &gradients, &options) == WHET_OK);
  free(options.workspace);
  for (int i = 0; i < kKeys * kValueSize; ++i) CHECK(fabs(dv_data[i] - 0.8) < 1e-6); /* 4 rows of 1/5 */
  CHECK(fabs(dq_data[0][0][0] - 0.5 * 2) < 1e-5 && dq_data[1][1][1] == 0); /* scale times a variance of 2 */
}

static void test_attention_errors(void) {
  float q[kHeads * kQueries * kSize] = {0}, k[kKeys * kSize] = {0}, v[kKeys * kValueSize] = {0};
  float canary[kHeads * kQueries * kValueSize];
  whet_view queries = view4(q, kQuerySizes), keys = view4(k, kKeySizes), values = view4(v, kValueSizes);
  whet_view out = view4(canary, kOutSizes);
  whet_attention_options options = WHET_ATTENTION_OPTIONS_DEFAULT;
  size_t bytes = 0;
  memset(canary, 0x5a, sizeof canary);
  CHECK(whet_attention(NULL, &keys, &values, &out, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "q is null") == 0);
  CHECK(whet_attention(&queries, &values, &values, &out, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "k: its sizes are (1, 1, 5, 4)") != NULL);
  CHECK(whet_attention_workspace(&queries, &keys, &values, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(whet_attention_backward(&queries, &keys, &values, &out, NULL, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "gradients is null") == 0);
  options.top_k = INT64_MAX;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "top_k: is 9223372036854775807") != NULL);
  options.top_k = 0;
  CHECK(whet_attention_workspace(&queries, &keys, &values, &options, &bytes) == WHET_OK);
  out = view4(k, kOutSizes);
  CHECK(whet_attention(&queries, &keys, &values, &out, NULL) == WHET_INVALID_ARGUMENT);
  CHECK(strcmp(whet_last_error(), "out: overlaps k") == 0);
  out = view4(canary, kOutSizes);
  options.struct_size = 3;
  CHECK(whet_attention(&queries, &keys, &values, &out, &options) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_last_error(), "WHET_ATTENTION_OPTIONS_DEFAULT") != NULL);
  for (size_t i = 0; i < sizeof canary; ++i) CHECK(((const unsigned char*)canary)[i] == 0x5a);
}

static void test_out_of_memory(void) {
  /* A row of 2^50 keys that all are the same four bytes; with a mask it needs a buffer. */
  static const int64_t sizes[2] = {1, INT64_C(1) << 50}, strides[2] = {0, 0};
  static unsigned char one = 1;
  float x = 0;
  whet_view in = {&x, WHET_F32, 2, sizes, strides}, mask = {&one, WHET_BOOLEAN, 2, sizes, strides};
  whet_row_state state = {42, 0, 0, 0, 0, 0};
  whet_options options = WHET_OPTIONS_DEFAULT;
  options.mask = &mask;
  CHECK(whet_states(&in, &state, &options) == WHET_OUT_OF_MEMORY);
  CHECK(state.count == 42);
}

static void test_runtime(void) {
  CHECK(whet_set_threads(2) == WHET_OK && whet_threads() == 2);
  CHECK(whet_set_threads(-1) == WHET_INVALID_ARGUMENT);
  CHECK(strstr(whet_targets(), whet_target()) != NULL);
  CHECK(whet_force_target("nothing") == WHET_INVALID_ARGUMENT);
  CHECK(whet_force_target("") == WHET_OK);
}

int main(void) {
  test_softmax_and_stats();
  test_edge_cases();
  test_sizes_and_strides();
  test_mask();
  test_backward_and_sharpen();
  test_states();
  test_errors();
  test_attention();
  test_attention_weights();
  test_attention_backward();
  test_attention_errors();
  test_out_of_memory();
  test_runtime();
  printf("%d checks passed, whet %s\n", checks, whet_version());
  return 0;
}
