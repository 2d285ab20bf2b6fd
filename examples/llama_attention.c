/* Measures the attention of a language model in llama.cpp, or sharpens it in place: on the CPU, per layer and
 * head.
 *
 * llama.cpp can show every tensor of its graph to a callback, after it was computed and before anything reads
 * it. With flash attention off, the probabilities of a layer are one of them, kq_soft_max-<layer>. What is
 * written there is what the layer goes on with. `on_tensor` is that callback and `open_context` sets it. */
#include <errno.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <whet/c_api.h>

static const char kHelp[] =
    "Measures the attention of a language model in llama.cpp, or sharpens it in place.\n"
    "\n"
    "usage: example_llama_attention MODEL.gguf (--prompt TEXT | --file FILE) [options]\n"
    "\n"
    "  --prompt TEXT   what the model reads; at least two tokens, at most as many as it was trained for\n"
    "  --file FILE     the same from a file\n"
    "  --rule RULE     sharpen by this rule: paper, fixed:1.5, log-length:64, ssmax:0.4, "
    "target-entropy:0.2,\n"
    "                  target-peak:0.9, ...; default none: measure only\n"
    "  --layers 3,7    sharpen in these layers only, counted from 0\n"
    "  --heads 0,2     sharpen these heads of a layer only, counted from 0\n"
    "  --all           a line for each head instead of the mean of each layer\n"
    "  --threads N     default 0: all processors\n"
    "\n"
    "The table is of the last token, which sees all others: entropy of its attention in nats, as a part of "
    "ln n\n"
    "(1 would be attention to all n keys alike), its largest weight and the weight on the first key. With a "
    "rule,\n"
    "the model runs twice, unchanged and sharpened. The table is then of the sharpened run: the same before "
    "a\n"
    "layer is sharpened, the inverse temperature beta that the rule chose, and entropy and largest weight at "
    "it.\n"
    "The loss is the mean of -ln p over the tokens to be predicted: the lower, the better.\n"
    "\n"
    "examples:\n"
    "  example_llama_attention smollm2.gguf --prompt 'The capital of France is Paris.'\n"
    "  example_llama_attention smollm2.gguf --file book.txt --rule paper\n"
    "  example_llama_attention smollm2.gguf --file book.txt --rule fixed:1.2 --layers 0,21 --all\n";

enum { kBatch = 512, kMaxText = 1 << 24 };

/* Prints one line and ends the program: 2 for wrong use, 1 for what went wrong otherwise. */
static void fail(int code, const char* format, ...) {
  va_list values;
  va_start(values, format);
  fputs("example_llama_attention: ", stderr);
  vfprintf(stderr, format, values);
  fputs(code == 2 ? "; see --help\n" : "\n", stderr);
  va_end(values);
  exit(code);
}

static void* allocate(size_t count, size_t size) {
  void* memory = calloc(count, size);
  if (memory == NULL) fail(1, "out of memory");
  return memory;
}

/* ---- In the callback ---- */

/* Of the last token. */
typedef struct head_stats {
  whet_row_stats row;
  float first; /* the weight on the first key */
} head_stats;

typedef struct attention {
  const char* rule; /* "none": measure only */
  int layers, heads;
  int64_t keys;                     /* at most */
  bool *layer_chosen, *head_chosen; /* where the rule applies */
  head_stats* stats;                /* layers * heads of them; count 0 in layers without such attention */
  float* scratch;                   /* a row of `keys` */
  bool seen;                        /* any such attention */
  char error[256];                  /* why the callback gave up, or empty */
} attention;

static bool refuse(attention* a, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(a->error, sizeof a->error, format, values);
  va_end(values);
  return false;
}

/* Whether `p` is what the rest takes it for: f32, contiguous, ne = {keys, queries, heads, 1}, on the CPU. */
static bool is_usable(attention* a, const struct ggml_tensor* p, int layer) {
  if (p->type != GGML_TYPE_F32) {
    return refuse(a, "%s is of type %s, must be f32", p->name, ggml_type_name(p->type));
  }
  if (!ggml_is_contiguous(p)) return refuse(a, "%s isn't contiguous", p->name);
  if (layer < 0 || layer >= a->layers || p->ne[0] > a->keys || p->ne[2] != a->heads || p->ne[3] != 1) {
    return refuse(a, "%s has %d keys, %d heads, %d streams; must have at most %d, %d, 1, in layers below %d",
                  p->name, (int)p->ne[0], (int)p->ne[2], (int)p->ne[3], (int)a->keys, a->heads, a->layers);
  }
  if (p->buffer == NULL || !ggml_backend_buffer_is_host(p->buffer)) {
    return refuse(a, "%s lies in %s, out of the CPU's reach: use llama.cpp's CPU backend", p->name,
                  p->buffer == NULL ? "no buffer" : ggml_backend_buffer_name(p->buffer));
  }
  if (p->op != GGML_OP_SOFT_MAX || p->src[2] != NULL) {
    return refuse(a, "%s isn't a plain softmax: it has attention sinks, whose weight it leaves out", p->name);
  }
  return true;
}

/* The probabilities of one head, `queries` rows of `keys`. Keys that a query doesn't see, and those that pad
 * the row, have probability 0: hidden keys for whet_sharpen. */
static bool visit_head(attention* a, float* rows, int64_t queries, int64_t keys, bool chosen,
                       head_stats* stats) {
  float* const last = rows + (queries - 1) * keys;
  const int64_t sizes[2] = {queries, keys};
  const whet_view all = {rows, WHET_F32, 2, sizes, NULL};
  const whet_view in = {last, WHET_F32, 1, sizes + 1, NULL}, out = {a->scratch, WHET_F32, 1, sizes + 1, NULL};
  const whet_softmax_options options = {.struct_size = sizeof options, .rule = chosen ? a->rule : "none"};
  const whet_softmax_outputs outputs = {
      .struct_size = sizeof outputs, .stats = &stats->row, .stats_size = sizeof stats->row};
  stats->first = last[0];
  if (whet_sharpen(&in, &out, &options, &outputs, NULL) != WHET_OK) return false;
  return !chosen || whet_sharpen(&all, &all, &options, NULL, NULL) == WHET_OK;
}

/* llama.cpp asks of each tensor whether it is wanted, and calls again with its data if so; false stops it. */
static bool on_tensor(struct ggml_tensor* p, bool ask, void* data) {
  attention* const a = data;
  int layer;
  char rest;
  if (sscanf(p->name, "kq_soft_max-%d%c", &layer, &rest) != 1) return !ask; /* another tensor */
  if (ask) return a->error[0] == 0;
  if (!is_usable(a, p, layer)) return false;
  a->seen = true;
  const bool sharpens = strcmp(a->rule, "none") != 0 && a->layer_chosen[layer];
  for (int head = 0; head < a->heads; ++head) {
    float* const rows = (float*)p->data + head * p->ne[1] * p->ne[0];
    head_stats* const stats = &a->stats[layer * a->heads + head];
    if (!visit_head(a, rows, p->ne[1], p->ne[0], sharpens && a->head_chosen[head], stats)) {
      return refuse(a, "%s: %s", p->name, whet_last_error());
    }
  }
  return true;
}

/* ---- llama.cpp ---- */

/* Keeps the first error that llama.cpp logs, and nothing else. */
static char log_error[256];
static void on_log(enum ggml_log_level level, const char* text, void* unused) {
  (void)unused;
  if (level != GGML_LOG_LEVEL_ERROR || log_error[0] != 0) return;
  snprintf(log_error, sizeof log_error, "%.*s", (int)strcspn(text, "\n"), text);
}

static struct llama_model* load_model(const char* path) {
  ggml_backend_dev_t cpu_only[1] = {NULL};
  struct llama_model_params params = llama_model_default_params();
  params.devices = cpu_only;
  params.n_gpu_layers = 0;
  struct llama_model* model = llama_model_load_from_file(path, params);
  if (model == NULL) fail(1, "%s: llama.cpp can't load it (%s)", path, log_error);
  if (llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
    fail(1, "%s: must be a decoder without an encoder, which predicts the next token", path);
  }
  return model;
}

static struct llama_context* open_context(struct llama_model* model, int tokens, attention* a) {
  struct llama_context_params params = llama_context_default_params();
  params.n_ctx = (uint32_t)tokens;
  params.n_batch = params.n_ubatch = kBatch;
  params.n_threads = params.n_threads_batch = whet_threads();
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED; /* it never writes probabilities down */
  params.offload_kqv = params.op_offload = false;
  params.cb_eval = on_tensor;
  params.cb_eval_user_data = a;
  struct llama_context* context = llama_init_from_model(model, params);
  if (context == NULL) fail(1, "llama.cpp can't make a context of %d tokens (%s)", tokens, log_error);
  return context;
}

static llama_token* tokenize(struct llama_model* model, const char* text, int length, int* count) {
  const struct llama_vocab* vocab = llama_model_get_vocab(model);
  const int most = llama_model_n_ctx_train(model);
  *count = -llama_tokenize(vocab, text, length, NULL, 0, true, false);
  if (*count < 2) fail(1, "the prompt is too short, %d token, must be at least 2", *count);
  if (*count > most) {
    fail(1, "the prompt has %d tokens, the model was trained for %d: shorten it", *count, most);
  }
  llama_token* tokens = allocate((size_t)*count, sizeof *tokens);
  llama_tokenize(vocab, text, length, tokens, *count, true, false);
  return tokens;
}

/* The mean of -ln p over tokens[1, count), each given those before it. */
static double loss_of(struct llama_context* context, llama_token* tokens, int count, attention* a) {
  const int64_t vocabulary[1] = {llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)))};
  int8_t wanted[kBatch];
  double sum = 0;
  memset(wanted, 1, sizeof wanted);
  llama_memory_clear(llama_get_memory(context), true);
  for (int start = 0; start < count; start += kBatch) {
    struct llama_batch batch =
        llama_batch_get_one(tokens + start, count - start < kBatch ? count - start : kBatch);
    batch.logits = wanted;
    const int status = llama_decode(context, batch);
    if (a->error[0] != 0) fail(1, "%s", a->error);
    if (status != 0) fail(1, "llama_decode can't evaluate the prompt: %d (%s)", status, log_error);
    for (int i = 0; i < batch.n_tokens && start + i + 1 < count; ++i) {
      float* const logits = llama_get_logits_ith(context, i);
      const whet_view row = {logits, WHET_F32, 1, vocabulary, NULL};
      whet_row_state state;
      if (whet_states(&row, &state, NULL, NULL) != WHET_OK) fail(1, "%s", whet_last_error());
      sum += state.max + log(state.z) - (double)logits[tokens[start + i + 1]];
    }
  }
  if (!a->seen) fail(1, "llama.cpp computed no kq_soft_max: the model has no attention of this kind");
  return sum / (count - 1);
}

/* ---- The program ---- */

typedef struct options {
  const char *model, *prompt, *file, *rule, *layers, *heads, *threads;
  bool all;
} options;

static options parse(int count, char** arguments) {
  options o = {.rule = "none"};
  const struct {
    const char* name;
    const char** value;
  } known[] = {{"--prompt", &o.prompt}, {"--file", &o.file},   {"--rule", &o.rule},
               {"--layers", &o.layers}, {"--heads", &o.heads}, {"--threads", &o.threads}};
  for (int i = 1; i < count; ++i) {
    const char* const argument = arguments[i];
    const char** value = argument[0] != '-' && o.model == NULL ? &o.model : NULL;
    if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) exit(fputs(kHelp, stdout) < 0);
    if (strcmp(argument, "--all") == 0) {
      o.all = true;
      continue;
    }
    for (size_t k = 0; k < sizeof known / sizeof known[0]; ++k) {
      if (strcmp(argument, known[k].name) == 0) value = known[k].value;
    }
    if (value == NULL) fail(2, "'%s' is neither an option nor the only model", argument);
    if (value != &o.model && ++i == count) fail(2, "%s needs a value", argument);
    *value = arguments[i];
  }
  return o;
}

/* What can be known to be wrong before a model is loaded. */
static void check(const options* o) {
  int32_t needs_search;
  if (o->model == NULL) fail(2, "give a model, a .gguf file");
  if ((o->prompt == NULL) == (o->file == NULL)) fail(2, "give either --prompt or --file");
  if (whet_rule_needs_search(o->rule, &needs_search) != WHET_OK) fail(2, "--%s", whet_last_error());
  if (strcmp(o->rule, "none") == 0 && (o->layers != NULL || o->heads != NULL)) {
    fail(2, "--layers and --heads say where a --rule applies: give one");
  }
}

/* The whole number, at most `most`, that a text begins with; `*end` is what follows it. */
static int number(const char* option, const char* text, int most, char** end) {
  const long value = strtol(text, end, 10);
  if (*end == text || value < 0 || value > most) {
    fail(2, "%s: '%s' isn't a number from 0 to %d", option, text, most);
  }
  return (int)value;
}

/* Which of `count` a list such as 3,7 names; all without a list. */
static bool* choose(const char* option, const char* list, int count) {
  bool* chosen = allocate((size_t)count, sizeof *chosen);
  for (int i = 0; i < count; ++i) chosen[i] = list == NULL;
  for (char* end; list != NULL; list = *end == ',' ? end + 1 : NULL) {
    chosen[number(option, list, count - 1, &end)] = true;
    if (*end != ',' && *end != 0) fail(2, "%s: '%s' isn't a list of numbers such as 3,7", option, list);
  }
  return chosen;
}

static void set_threads(const char* text) {
  char* end = "";
  if (text != NULL) whet_set_threads(number("--threads", text, 512, &end));
  if (*end != 0) fail(2, "--threads: '%s' isn't a number", text);
  if (whet_threads() == 0) fail(2, "%s", whet_last_error());
}

static char* read_file(const char* path, int* length) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) fail(1, "%s: can't be read: %s", path, strerror(errno));
  char* text = allocate(kMaxText, 1);
  *length = (int)fread(text, 1, kMaxText, file);
  if (ferror(file)) fail(1, "%s: can't be read: %s", path, strerror(errno));
  if (*length == kMaxText) fail(1, "%s: is too long, must be below %d bytes", path, kMaxText);
  fclose(file);
  return text;
}

/* The mean over `count` heads. */
static void print_heads(const head_stats* heads, int count, bool sharpened) {
  double entropy = 0, relative = 0, peak = 0, first = 0, beta = 0, sharp_entropy = 0, sharp_peak = 0;
  for (const head_stats* h = heads; h < heads + count; ++h) {
    entropy += h->row.entropy / count;
    relative += h->row.count > 1 ? h->row.entropy / log(h->row.count) / count : 0;
    peak += h->row.peak / count;
    first += (double)h->first / count;
    beta += h->row.beta / count;
    sharp_entropy += h->row.sharp_entropy / count;
    sharp_peak += h->row.sharp_peak / count;
  }
  printf("%9.4f%8.4f%8.4f%11.4f", entropy, relative, peak, first);
  if (sharpened) printf("%#10.4g%9.4f%8.4f", beta, sharp_entropy, sharp_peak);
  printf("\n");
}

static void print_table(const attention* a, bool all, bool sharpened) {
  printf("\nlayer%s  entropy  / ln n    peak  first key%s\n", all ? "  head" : "",
         sharpened ? "      beta  entropy    peak" : "");
  for (int layer = 0; layer < a->layers; ++layer) {
    const head_stats* heads = &a->stats[layer * a->heads];
    if (heads->row.count == 0) continue;
    for (int h = 0; h < a->heads; h += all ? 1 : a->heads) {
      printf("%5d", layer);
      if (all) printf("%6d", h);
      print_heads(heads + h, all ? 1 : a->heads, sharpened);
    }
  }
}

int main(int argument_count, char** arguments) {
  const options o = parse(argument_count, arguments);
  const bool sharpens = strcmp(o.rule, "none") != 0;
  check(&o);
  set_threads(o.threads);
  int length = o.prompt == NULL ? 0 : (int)strlen(o.prompt), count;
  char* text = o.file == NULL ? NULL : read_file(o.file, &length);

  llama_log_set(on_log, NULL);
  ggml_backend_load_all(); /* where the CPU's code is a plugin */
  llama_backend_init();
  struct llama_model* model = load_model(o.model);
  llama_token* tokens = tokenize(model, text == NULL ? o.prompt : text, length, &count);
  attention a = {.rule = "none", .layers = llama_model_n_layer(model), .heads = llama_model_n_head(model)};
  a.layer_chosen = choose("--layers", o.layers, a.layers);
  a.head_chosen = choose("--heads", o.heads, a.heads);
  a.stats = allocate((size_t)(a.layers * a.heads), sizeof *a.stats);
  struct llama_context* context = open_context(model, count, &a);
  a.keys = llama_n_ctx(context);
  a.scratch = allocate((size_t)a.keys, sizeof *a.scratch);

  const double loss = loss_of(context, tokens, count, &a);
  a.rule = o.rule;
  const double sharpened_loss = sharpens ? loss_of(context, tokens, count, &a) : loss;
  char name[128];
  llama_model_desc(model, name, sizeof name);
  printf("%s: %d layers of %d heads, %d tokens\n", name, a.layers, a.heads, count);
  print_table(&a, o.all, sharpens);
  printf("\nloss: %.6f nats per token\n", loss);
  if (sharpens) printf("loss with %s: %.6f (%+.6f)\n", o.rule, sharpened_loss, sharpened_loss - loss);

  llama_free(context);
  llama_model_free(model);
  llama_backend_free();
  free(text);
  free(tokens);
  free(a.layer_chosen);
  free(a.head_chosen);
  free(a.stats);
  free(a.scratch);
  return 0;
}
