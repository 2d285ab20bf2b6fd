/* whet for C, and for every language that can call C.
 *
 * Functions return a whet_status; whet_last_error() is the text of this thread's last failure. The
 * meaning of every argument, the accuracy and the edge cases are those of the C++ headers. */
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
  WHET_INVALID_ARGUMENT = 1, /* nothing was written */
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

/* A rule by value: fill it with whet_rule_parse. All zero is the rule none. */
typedef struct whet_rule {
  int32_t kind;
  int32_t terms;
  double values[12];
} whet_rule;

typedef struct whet_row_state {
  int64_t count;
  double min, max, z, t, u;
} whet_row_state;

/* Number of doubles a row in `stats`: count, max, log_sum_exp, entropy, varentropy, spread, peak,
 * beta, sharp_entropy, sharp_peak. */
#define WHET_STATS_FIELDS 10

/* Start from WHET_OPTIONS_DEFAULT and set what you need; NULL pointers mean "not given". */
typedef struct whet_options {
  size_t struct_size; /* sizeof(whet_options), so that later versions may add fields */
  whet_rule rule;     /* all zero: none */
  int32_t axis;       /* negative counts from the end */
  int32_t threads;    /* 0: whet_threads() */
  int32_t hold_beta;  /* whet_softmax_backward: 1 = beta counts as a constant */
  int32_t reserved;   /* 0 */
  const whet_view* mask;
  const int64_t* lengths; /* one a row */
  double* stats;          /* rows x WHET_STATS_FIELDS: written by softmax and sharpen, read by backward */
} whet_options;

#define WHET_OPTIONS_DEFAULT \
  { sizeof(whet_options), {0, 0, {0}}, -1, 0, 0, 0, NULL, NULL, NULL }

WHET_API const char* whet_version(void);
WHET_API const char* whet_last_error(void);

/* Rules by name, as on the command line: "paper", "target-entropy:0.2", ... */
WHET_API whet_status whet_rule_parse(const char* name, whet_rule* rule);

/* options may be NULL: the defaults. */
WHET_API whet_status whet_softmax(const whet_view* in, const whet_view* out, const whet_options* options);
WHET_API whet_status whet_sharpen(const whet_view* in, const whet_view* out, const whet_options* options);
WHET_API whet_status whet_softmax_backward(const whet_view* in, const whet_view* dout, const whet_view* din,
                                           const whet_options* options);
/* One state a row; `rule` and `stats` are not used. */
WHET_API whet_status whet_states(const whet_view* in, whet_row_state* out, const whet_options* options);
/* Neither may be NULL. */
WHET_API whet_row_state whet_merge(const whet_row_state* a, const whet_row_state* b);

/* Attention: fields, shapes and meaning as in <whet/attention.h>. Start from
 * WHET_ATTENTION_OPTIONS_DEFAULT; NULL pointers mean "not given". */
typedef struct whet_attention_options {
  size_t struct_size; /* sizeof(whet_attention_options) */
  whet_rule rule;
  const whet_rule* head_rules; /* H of them */
  double scale;                /* 0: 1 / sqrt(D) */
  double softcap;              /* 0: none */
  double skip_epsilon;         /* 0: never skip */
  const whet_view* query_scale;
  const whet_view* bias;
  const whet_view* mask;
  const whet_view* sinks;
  int32_t causal;
  int32_t align_end; /* 0: Align::start, 1: Align::end */
  int64_t window_left;
  int64_t window_right;
  const int64_t* lengths; /* lengths_count = B or B * H * N of them */
  size_t lengths_count;
  const int64_t* query_starts; /* starts_count of them each */
  const int64_t* key_starts;
  size_t starts_count;
  double* stats;              /* rows x WHET_STATS_FIELDS: written, read by whet_attention_backward */
  const int64_t* weight_rows; /* weight_rows_count triples: batch, head, query */
  size_t weight_rows_count;
  const whet_view* weights;
  int64_t top_k;
  int64_t* top_keys;    /* rows x top_k */
  float* top_weights;   /* rows x top_k */
  double* column_sums;  /* B x H x M */
  int64_t* tile_counts; /* two: tiles, skipped */
  void* workspace;
  size_t workspace_bytes;
  int32_t threads;
  int32_t hold_beta; /* whet_attention_backward: 1 = beta counts as a constant */
} whet_attention_options;

#define WHET_ATTENTION_OPTIONS_DEFAULT                                                                      \
  {                                                                                                         \
    sizeof(whet_attention_options), {0, 0, {0}}, NULL, 0, 0, 0x1p-24, NULL, NULL, NULL, NULL, 0, 0, -1, -1, \
        NULL, 0, NULL, NULL, 0, NULL, NULL, 0, NULL, 0, NULL, NULL, NULL, NULL, NULL, 0, 0, 0               \
  }

WHET_API whet_status whet_attention(const whet_view* q, const whet_view* k, const whet_view* v,
                                    const whet_view* out, const whet_attention_options* options);
WHET_API whet_status whet_attention_workspace(const whet_view* q, const whet_view* k, const whet_view* v,
                                              const whet_attention_options* options, size_t* bytes);

/* Gradients that are wanted; NULL: not. */
typedef struct whet_attention_gradients {
  const whet_view* dq;
  const whet_view* dk;
  const whet_view* dv;
  const whet_view* dbias;
  const whet_view* dsinks;
} whet_attention_gradients;

WHET_API whet_status whet_attention_backward(const whet_view* q, const whet_view* k, const whet_view* v,
                                             const whet_view* dout, const whet_attention_gradients* gradients,
                                             const whet_attention_options* options);
WHET_API whet_status whet_attention_backward_workspace(const whet_view* q, const whet_view* k,
                                                       const whet_view* v,
                                                       const whet_attention_gradients* gradients,
                                                       const whet_attention_options* options, size_t* bytes);

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
