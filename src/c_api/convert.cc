#include "c_api/convert.h"

namespace whet::c_api {

namespace {

// No struct comes near it; a struct_size beyond is one that nobody set.
constexpr std::size_t kMaxStructSize = 4096;

thread_local std::string last_error;

static_assert(sizeof(RowStats) == sizeof(whet_row_stats) &&
              offsetof(RowStats, threshold) == offsetof(whet_row_stats, threshold));

void check_stats_size(std::size_t given) {
  if (given > sizeof(RowStats)) {
    throw Error("stats: stats_size is " + std::to_string(given) + ", a row of whet " WHET_VERSION " has " +
                std::to_string(sizeof(RowStats)) + " bytes");
  }
  if (given == 0 || given % sizeof(double) != 0) {
    throw Error("stats: stats_size is " + std::to_string(given) + ", must be sizeof(whet_row_stats)");
  }
}

}  // namespace

whet_status failed(whet_status status, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.assign("out of memory");  // fits the string's own buffer: can't fail
  }
  return status;
}

void check_struct_size(std::size_t given, std::size_t known, const char* name) {
  // All fields are 8 bytes or pairs of 4, so no version's struct ends elsewhere.
  if (given >= sizeof(std::size_t) && given <= kMaxStructSize && given % 8 == 0) return;
  throw Error(std::string(name) + ": struct_size is " + std::to_string(given) +
              ", must be the size of the struct, here " + std::to_string(known));
}

void refuse_unknown_field(const char* name) {
  throw Error(std::string(name) + ": sets a field that whet " WHET_VERSION
                                  " doesn't know; leave it 0 or use a later version");
}

View view_of(const whet_view* v, const char* name) {
  required(v, name);
  if (v->dims < 1 || v->dims > static_cast<std::int32_t>(kMaxDims)) {
    throw Error(std::string(name) + ": dims is " + std::to_string(v->dims) + ", must be 1 to 8");
  }
  if (v->dtype < WHET_F32 || v->dtype > WHET_BOOLEAN) {
    throw Error(std::string(name) + ": dtype is " + std::to_string(v->dtype) + ", must be a whet_dtype");
  }
  if (v->sizes == nullptr) throw Error(std::string(name) + ": sizes is null");
  const auto dims = static_cast<std::size_t>(v->dims);
  const auto list = [&](const std::int64_t* p) { return p == nullptr ? Dims() : Dims(std::span(p, dims)); };
  return {v->data, static_cast<DType>(v->dtype), list(v->sizes), list(v->strides)};
}

View view_if_given(const whet_view* v, const char* name) { return v == nullptr ? View() : view_of(v, name); }

Rule rule_of(const char* name) { return name == nullptr ? Rule() : Rule::parse(name); }

Normalizer normalizer_of(const char* name) {
  return name == nullptr ? Normalizer() : Normalizer::parse(name);
}

BetaGradient beta_gradient(int32_t hold_beta) {
  return hold_beta != 0 ? BetaGradient::held : BetaGradient::through_rule;
}

Execution execution_of(const whet_execution* given) {
  const whet_execution e = known_part(given, "execution");
  return {.threads = e.threads,
          .executor = {.run = e.executor_run, .context = e.executor_context, .threads = e.executor_threads},
          .workspace = span_if_given(static_cast<std::byte*>(e.workspace), e.workspace_bytes)};
}

WrittenStats::WrittenStats(whet_row_stats* data, std::size_t element_size, std::size_t rows)
    : element_size_(element_size) {
  if (data == nullptr) return;
  check_stats_size(element_size);
  if (element_size == sizeof(RowStats)) {
    span_ = elements<RowStats>(data, rows, "stats");
    return;
  }
  short_elements_ = reinterpret_cast<std::byte*>(data);
  copy_.resize(rows);
  span_ = copy_;
}

void WrittenStats::finish() const {
  for (std::size_t i = 0; i < copy_.size(); ++i) {
    std::memcpy(short_elements_ + i * element_size_, &copy_[i], element_size_);
  }
}

}  // namespace whet::c_api

extern "C" const char* whet_last_error(void) { return whet::c_api::last_error.c_str(); }
