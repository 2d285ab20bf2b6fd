// Operands and results that rows and attention have in common: the alpha of entmax, statistics.
#ifndef WHET_PYTHON_JAX_RESULTS_H_
#define WHET_PYTHON_JAX_RESULTS_H_

#include <whet/error.h>
#include <whet/normalizer.h>
#include <whet/row.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "jax_call.h"

namespace whet_python {

// ---- The alpha of entmax, where it is an operand

// The normalizer of a call of whet, the element `offset` of alpha being its parameter.
inline whet::Normalizer normalizer_of(const Call& call, int64_t offset) {
  const Array* alpha = call.find("alpha");
  if (!alpha) return whet::Normalizer::parse(call.attribute<std::string_view>("normalizer"));
  const std::byte* at = alpha->at(offset);
  const bool wide = dtype_of(*alpha) == whet::DType::f64;
  const double value = wide ? *reinterpret_cast<const double*>(at) : *reinterpret_cast<const float*>(at);
  char text[32];
  const std::string number(text, std::to_chars(text, std::end(text), value).ptr);
  if (!(value > 1 && value <= 4)) {
    throw whet::Error("alpha: is " + number + ", must be above 1 and at most 4");
  }
  return whet::Normalizer::parse("entmax:" + number);
}

// The gradient to alpha: sums of as many rows each. Without the result "dalpha" no rows are wanted.
class AlphaResult {
 public:
  explicit AlphaResult(const Call& call) : dalpha_(call.find("dalpha")) {}

  // Where the gradient of each of so many rows belongs.
  std::span<double> rows(int64_t count) {
    if (dalpha_) rows_.assign(std::size_t(count), 0);
    return rows_;
  }

  // Writes so many sums, from the element `offset` on.
  void write(int64_t offset, int64_t sums) const {
    if (!dalpha_ || sums == 0) return;
    const std::size_t each = rows_.size() / std::size_t(sums);
    for (std::size_t i = 0; i < std::size_t(sums); ++i) {
      const auto own = std::span(rows_).subspan(i * each, each);
      const double sum = std::accumulate(own.begin(), own.end(), 0.0);
      std::byte* at = dalpha_->at(offset + int64_t(i));
      if (dtype_of(*dalpha_) == whet::DType::f64) {
        *reinterpret_cast<double*>(at) = sum;
      } else {
        *reinterpret_cast<float*>(at) = float(sum);
      }
    }
  }

 private:
  const Array* dalpha_;
  std::vector<double> rows_;
};

// ---- Statistics

// The result "stats": float64, a type that JAX has only with jax_enable_x64, or rounded to float32.
class StatsResult {
 public:
  StatsResult(const Call& call, std::size_t rows) : stats_(call.find("stats")) {
    if (stats_ && stats_->type == ffi::DataType::F64) {
      buffer_ = {reinterpret_cast<whet::RowStats*>(stats_->data), rows};
    } else if (stats_) {
      own_.resize(rows);
      buffer_ = own_;
    }
  }

  // The buffer for the next so many rows; empty if the call doesn't have the result.
  std::span<whet::RowStats> next(std::size_t rows) {
    const auto part = buffer_.empty() ? buffer_ : buffer_.subspan(used_, rows);
    used_ += rows;
    return part;
  }

  void finish() const {
    if (own_.empty()) return;
    const double* from = &own_[0].count;
    std::transform(from, from + own_.size() * kFields, reinterpret_cast<float*>(stats_->data),
                   [](double value) { return float(value); });
  }

 private:
  static constexpr std::size_t kFields = sizeof(whet::RowStats) / sizeof(double);

  const Array* stats_;
  std::vector<whet::RowStats> own_;
  std::span<whet::RowStats> buffer_;
  std::size_t used_ = 0;
};

}  // namespace whet_python

#endif  // WHET_PYTHON_JAX_RESULTS_H_
