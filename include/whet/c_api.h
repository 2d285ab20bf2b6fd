/* whet for C, and for every language that can call C.
 *
 * The functions are those of the C++ headers (<whet/softmax.h>, <whet/attention.h>,
 * <whet/linear_attention.h>, <whet/shard.h>, <whet/horizon.h>), under the same names: shapes, meaning,
 * accuracy and edge cases are documented there.
 * Most return a whet_status; whet_last_error() is the text of this thread's last failure.
 *
 * Structs that begin with struct_size can grow. Set struct_size to the size of the struct, and what you need;
 * 0 and NULL are the default of every other field:
 *
 *     whet_attention_options options = {.struct_size = sizeof options, .rule = "paper", .causal = 1};
 *     whet_status status = whet_attention(&q, &k, &v, &out, &options, NULL, NULL);
 *
 * A program compiled against an older header, whose structs are smaller, gets the default of the fields they
 * lack. One compiled against a newer header is refused only if it sets a field that this version doesn't
 * know. Pointers to such structs may be NULL: all defaults. The other structs never change.
 *
 * Rules and normalizers are given by name, as on the command line: "paper", "target-entropy:0.2", ...
 * (Rule::parse, Normalizer::parse); no file is opened, see whet_rule_load. */
#ifndef WHET_C_API_H_
#define WHET_C_API_H_

#include <stddef.h>
#include <stdint.h>
#include <whet/export.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum whet_status {
  WHET_OK = 0,
  WHET_INVALID_ARGUMENT = 1, /* nothing was written, unless an executor failed */
  WHET_OUT_OF_MEMORY = 2,    /* nothing was written */
  WHET_INTERNAL_ERROR = 3    /* a defect in whet: please report it */
} whet_status;

typedef enum whet_dtype {
  WHET_F32 = 0,
  WHET_F64 = 1,
  WHET_BF16 = 2,
  WHET_F16 = 3,
  WHET_BOOLEAN = 4 /* one byte, 0 or 1 */
} whet_dtype;

/* strides count elements; NULL = contiguous, last axis fastest. */
typedef struct whet_view {
  void* data;
  int32_t dtype; /* whet_dtype */
  int32_t dims;  /* 1..8 */
  const int64_t* sizes;
  const int64_t* strides;
} whet_view;

typedef struct whet_row_state {
  int64_t count;
  double min, max, z, t, u;
} whet_row_state;

typedef struct whet_row_sums {
  double z, t, u, v, w;
} whet_row_sums;

typedef struct whet_row_scale {
  double max, beta;
} whet_row_scale;

typedef struct whet_weighed_row {
  double max, beta, mean;
} whet_weighed_row;

typedef struct whet_gradient_sums {
  double wg, wdg, wd, wdd, ties;
} whet_gradient_sums;

typedef struct whet_row_slope {
  double max, beta, scale, mean, constant, g_factor, y_factor, p_factor, plain_mean, peak_share;
} whet_row_slope;

typedef struct whet_row_index {
  int64_t batch, head, query;
} whet_row_index;

typedef struct whet_tile_counts {
  int64_t tiles, skipped;
} whet_tile_counts;

/* Statistics of a row. Later versions may add fields at the end, so wherever an array of them is given, so is
 * the size of its elements, stats_size = sizeof(whet_row_stats). */
typedef struct whet_row_stats {
  double count, max, log_sum_exp, entropy, varentropy, spread, peak; /* at beta = 1 */
  double beta, sharp_entropy, sharp_peak;                            /* chosen by the rule; at that beta */
  double support,
      threshold; /* of the weights at that beta: how many keys have one, and from which logit on */
} whet_row_stats;

/* Executor: calls task(data, i, worker) once for every i in [0, tasks) on at most `threads` threads, and
 * returns when all have returned. `worker` is 0..threads-1, and no two tasks that run at the same time have
 * the same. An executor that doesn't: WHET_INVALID_ARGUMENT, with unspecified outputs. */
typedef void (*whet_task)(void* data, int64_t i, int worker);
typedef void (*whet_run_tasks)(void* context, int64_t tasks, int threads, whet_task task, void* data);

/* How a call runs; the same for all functions. */
typedef struct whet_execution {
  size_t struct_size;
  int32_t threads; /* at most this many; 0: executor_threads, fewer where the work is too little for them */
  int32_t executor_threads; /* 0: whet_threads() */
  void* workspace;          /* scratch memory for attention and its gradient; NULL: the call allocates */
  size_t workspace_bytes;
  whet_run_tasks executor_run; /* NULL: whet's own threads */
  void* executor_context;
} whet_execution;

WHET_API const char* whet_version(void);
WHET_API const char* whet_last_error(void);

/* ---- Rules ---- */

/* The name of the polynomial in a file (Rule::load), for use as a rule: written to `name` with its final 0 if
 * it fits `size` bytes, else WHET_INVALID_ARGUMENT. 512 bytes always suffice. */
WHET_API whet_status whet_rule_load(const char* path, char* name, size_t size);

/* 1 if the beta of this rule is found by a search over the row (target-entropy, target-peak), else 0. */
WHET_API whet_status whet_rule_needs_search(const char* rule, int32_t* needs_search);

/* beta of each of `count` rows from its state; WHET_INVALID_ARGUMENT for a rule that needs a search. */
WHET_API whet_status whet_rule_betas(const char* rule, const whet_row_state* states, size_t count,
                                     double* betas);

/* Numbers per row that forward saves for backward under this rule and normalizer (NULL: the defaults), in the
 * type of the arithmetic: WHET_F64 for inputs of that type, else WHET_F32. */
WHET_API whet_status whet_saved_size(const char* rule, const char* normalizer, int64_t* size);

/* ---- Rows ---- */

/* The problem: the same for whet_softmax, whet_sharpen and whet_softmax_backward. */
typedef struct whet_softmax_options {
  size_t struct_size;
  const char* rule;       /* NULL: "none" */
  const char* normalizer; /* NULL: "softmax" */
  const whet_view* mask;
  const int64_t* lengths; /* one per row */
  int32_t axis_from_last; /* rows run along the last axis (0), the one before it (1), ... */
  int32_t reserved;
} whet_softmax_options;

/* Optional outputs. */
typedef struct whet_softmax_outputs {
  size_t struct_size;
  whet_row_stats* stats;  /* one per row */
  size_t stats_size;      /* sizeof(whet_row_stats) */
  const whet_view* saved; /* for whet_softmax_backward: whet_saved_size() numbers per row, contiguous */
} whet_softmax_outputs;

typedef struct whet_softmax_backward_options {
  size_t struct_size;
  int32_t hold_beta; /* 1: beta counts as a constant; 0: the gradient goes through the rule */
  int32_t reserved;
  const whet_view* saved; /* what whet_softmax wrote; NULL: found again */
  double* dparameter;     /* one per row, written: the gradient to A of entmax:A; NULL: not computed */
} whet_softmax_backward_options;

typedef struct whet_states_options {
  size_t struct_size;
  const whet_view* mask;
  const int64_t* lengths; /* one per row */
  int32_t axis_from_last;
  int32_t reserved;
} whet_states_options;

WHET_API whet_status whet_softmax(const whet_view* in, const whet_view* out,
                                  const whet_softmax_options* options, const whet_softmax_outputs* outputs,
                                  const whet_execution* execution);
WHET_API whet_status whet_sharpen(const whet_view* in, const whet_view* out,
                                  const whet_softmax_options* options, const whet_softmax_outputs* outputs,
                                  const whet_execution* execution);
WHET_API whet_status whet_softmax_backward(const whet_view* in, const whet_view* dout, const whet_view* din,
                                           const whet_softmax_options* options,
                                           const whet_softmax_backward_options* backward,
                                           const whet_execution* execution);
/* `out`: one state per row. */
WHET_API whet_status whet_states(const whet_view* in, whet_row_state* out, const whet_states_options* options,
                                 const whet_execution* execution);
/* The state of the keys of both; `out` may be `a` or `b`. */
WHET_API whet_status whet_merge(const whet_row_state* a, const whet_row_state* b, whet_row_state* out);

/* ---- Attention ---- */

/* The problem: the same for attention, its gradient and shards. A number whose default isn't 0 counts only
 * if its has_ field is 1; without that it must be 0. */
typedef struct whet_attention_options {
  size_t struct_size;
  const char* rule;              /* NULL: "none" */
  const char* const* head_rules; /* NULL, or the names of one rule per query head, instead of `rule` */
  const char* normalizer;        /* NULL: "softmax" */
  int32_t has_scale;             /* 0: 1 / sqrt(D) */
  int32_t has_skip_epsilon;      /* 0: 2^-24 */
  int32_t has_window_left;       /* 0: none */
  int32_t has_window_right;      /* 0: none */
  double scale;
  double skip_epsilon;
  int64_t window_left;
  int64_t window_right;
  double softcap; /* 0: none */
  const whet_view* query_scale;
  const whet_view* bias;
  const whet_view* mask;
  const whet_view* sinks;
  int32_t causal;
  int32_t align_end;      /* 0: Align::start, 1: Align::end */
  const int64_t* lengths; /* lengths_count = B or B * H * N of them */
  size_t lengths_count;
  const int64_t* query_starts; /* starts_count of them each */
  const int64_t* key_starts;
  size_t starts_count;
  double dropout; /* 0: none */
  uint64_t dropout_seed;
} whet_attention_options;

/* Optional outputs. */
typedef struct whet_attention_outputs {
  size_t struct_size;
  whet_row_stats* stats;  /* one per row */
  size_t stats_size;      /* sizeof(whet_row_stats) */
  const whet_view* saved; /* for whet_attention_backward: the largest whet_saved_size() of a head, per row */
  const whet_row_index* weight_rows; /* weight_rows_count of them */
  size_t weight_rows_count;
  const whet_view* weights; /* (weight_rows_count, M) */
  int64_t top_k;
  int64_t* top_keys;   /* rows * top_k */
  float* top_weights;  /* rows * top_k */
  double* column_sums; /* B * H * M */
  whet_tile_counts* tile_counts;
} whet_attention_outputs;

typedef struct whet_attention_backward_options {
  size_t struct_size;
  int32_t hold_beta; /* 1: beta counts as a constant; 0: the gradient goes through the rule */
  int32_t reserved;
  const whet_view* saved; /* what whet_attention wrote; NULL: found again */
} whet_attention_backward_options;

/* Outputs of whet_attention_backward; NULL: not computed. */
typedef struct whet_attention_gradients {
  size_t struct_size;
  const whet_view* dq;
  const whet_view* dk;
  const whet_view* dv;
  const whet_view* dbias;
  const whet_view* dsinks;
  const whet_view* dquery_scale;
  double* dparameter; /* one per row */
} whet_attention_gradients;

WHET_API whet_status whet_attention(const whet_view* q, const whet_view* k, const whet_view* v,
                                    const whet_view* out, const whet_attention_options* options,
                                    const whet_attention_outputs* outputs, const whet_execution* execution);
/* Bytes of workspace for this call; no data is read, and views of data NULL do. */
WHET_API whet_status whet_attention_workspace(const whet_view* q, const whet_view* k, const whet_view* v,
                                              const whet_attention_options* options,
                                              const whet_attention_outputs* outputs,
                                              const whet_execution* execution, size_t* bytes);
WHET_API whet_status whet_attention_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                             const whet_view* dout, const whet_attention_gradients* gradients,
                                             const whet_attention_options* options,
                                             const whet_attention_backward_options* backward,
                                             const whet_execution* execution);
WHET_API whet_status whet_attention_backward_workspace(const whet_view* q, const whet_view* k,
                                                       const whet_view* v,
                                                       const whet_attention_gradients* gradients,
                                                       const whet_attention_options* options,
                                                       const whet_attention_backward_options* backward,
                                                       const whet_execution* execution, size_t* bytes);

/* ---- Linear attention ---- */

typedef struct whet_linear_attention_options {
  size_t struct_size;
  int32_t causal;
  int32_t reserved;
  const int64_t* lengths; /* lengths_count = B of them */
  size_t lengths_count;
} whet_linear_attention_options;

/* Outputs of whet_linear_attention_backward; NULL: not computed. */
typedef struct whet_linear_attention_gradients {
  size_t struct_size;
  const whet_view* dq;
  const whet_view* dk;
  const whet_view* dv;
} whet_linear_attention_gradients;

WHET_API whet_status whet_linear_attention(const whet_view* q, const whet_view* k, const whet_view* v,
                                           const whet_view* out, const whet_linear_attention_options* options,
                                           const whet_execution* execution);
WHET_API whet_status whet_linear_attention_backward(const whet_view* q, const whet_view* k,
                                                    const whet_view* v, const whet_view* dout,
                                                    const whet_linear_attention_gradients* gradients,
                                                    const whet_linear_attention_options* options,
                                                    const whet_execution* execution);

/* ---- Attention over keys in shards (<whet/shard.h> says in which order to call what) ----
 * Normalizers are softmax and hard: rows of this interface have no threshold. */

typedef struct whet_shard {
  size_t struct_size;
  int64_t first_key;
  int64_t all_keys;
  int64_t first_query;
  int64_t all_queries;     /* 0: those of q */
  const whet_view* logits; /* NULL: they are computed in every call */
} whet_shard;

/* `out`: one state per row. */
WHET_API whet_status whet_shard_states(const whet_view* q, const whet_view* k, const whet_shard* shard,
                                       whet_row_state* out, const whet_attention_options* options,
                                       const whet_execution* execution);
/* `rows` and `out`: one per row. */
WHET_API whet_status whet_shard_sums(const whet_view* q, const whet_view* k, const whet_shard* shard,
                                     const whet_row_scale* rows, whet_row_sums* out,
                                     const whet_attention_options* options, const whet_execution* execution);
/* `rows` and `mass`: one per row. */
WHET_API whet_status whet_shard_attention(const whet_view* q, const whet_view* k, const whet_view* v,
                                          const whet_shard* shard, const whet_row_scale* rows,
                                          const whet_view* out, double* mass,
                                          const whet_attention_options* options,
                                          const whet_execution* execution);
/* outs[s] and masses[s] are those of shard s of `shards`. */
WHET_API whet_status whet_merge_outputs(const whet_view* const* outs, const double* const* masses,
                                        size_t shards, const whet_view* out);
/* `rows` and `out`: one per row. */
WHET_API whet_status whet_shard_gradient_sums(const whet_view* q, const whet_view* k, const whet_view* v,
                                              const whet_view* dout, const whet_shard* shard,
                                              const whet_weighed_row* rows, whet_gradient_sums* out,
                                              const whet_attention_options* options,
                                              const whet_execution* execution);
/* `rows`: one per row. */
WHET_API whet_status whet_shard_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                         const whet_view* dout, const whet_shard* shard,
                                         const whet_row_slope* rows,
                                         const whet_attention_gradients* gradients,
                                         const whet_attention_options* options,
                                         const whet_execution* execution);
/* `moves`: 1 if the gradient of a row with this beta needs all of its gradient sums. */
WHET_API whet_status whet_beta_moves(const char* rule, double beta, int32_t hold_beta, int32_t* moves);
WHET_API whet_status whet_row_slope_of(const char* rule, const whet_row_state* merged,
                                       const whet_weighed_row* row, double mass,
                                       const whet_gradient_sums* sums, int32_t hold_beta,
                                       whet_row_slope* out);
/* The sums of two shards, at the same max and beta; `out` may be `a` or `b`. */
WHET_API whet_status whet_add(const whet_row_sums* a, const whet_row_sums* b, whet_row_sums* out);

/* BetaSearch: the search for the beta of one row by a rule that needs one. */
typedef struct whet_beta_search whet_beta_search;
WHET_API whet_status whet_beta_search_create(const char* rule, const whet_row_state* merged,
                                             whet_beta_search** search);
WHET_API void whet_beta_search_destroy(whet_beta_search* search); /* NULL: nothing */
/* `beta`: at which the next sums are needed, or the result if `done` is 1. */
WHET_API whet_status whet_beta_search_next(const whet_beta_search* search, double* beta, int32_t* done);
WHET_API whet_status whet_beta_search_absorb(whet_beta_search* search, const whet_row_sums* sums);

/* ---- How far a head can stay sharp; beta = 1 unless the head has another ---- */

WHET_API whet_status whet_horizon(double spread, double weight, double beta, double* keys);
WHET_API whet_status whet_largest_weight(double keys, double spread, double beta, double* weight);
WHET_API whet_status whet_paper_bounds(double keys, double spread, double beta, double* lower, double* upper);
WHET_API whet_status whet_largest_singular_value(const whet_view* matrix, double* value);

typedef struct whet_head_norms {
  size_t struct_size;
  double query_gain;
  double query_bias;
  double query_input;
  double key_gain;
  double key_input;
  int32_t has_scale; /* 0: 1 */
  int32_t reserved;
  double scale;
} whet_head_norms;

WHET_API whet_status whet_spread_bound(const whet_head_norms* norms, double* spread);

/* ---- Threads and SIMD targets ---- */

WHET_API int whet_threads(void); /* 0 after an error (a bad WHET_THREADS) */
WHET_API whet_status whet_set_threads(int count);
/* The target that calls run on now; valid until this thread asks again; NULL after an error (an
 * unknown WHET_TARGET). */
WHET_API const char* whet_target(void);
/* Targets of this machine, separated by spaces, best first; valid until this thread asks again. */
WHET_API const char* whet_targets(void);
WHET_API whet_status whet_force_target(const char* name);

#ifdef __cplusplus
}
#endif

#endif /* WHET_C_API_H_ */
