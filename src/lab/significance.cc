#include "lab/significance.h"

#include <whet/error.h>

#include <algorithm>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace whet::lab {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kOutside = 0.05;  // of a 95 % interval

void check(std::span<const double> values, const char* argument) {
  if (values.empty()) throw Error(std::string(argument) + ": is empty, must hold at least one value");
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      throw Error(std::string(argument) + ": value " + std::to_string(i) + " is " +
                  std::to_string(values[i]) + ", must be finite");
    }
  }
}

Summary summary_of(std::span<const double> values) {
  const std::size_t count = values.size();
  if (count == 1) return {count, values.front(), kNaN};
  // Equal values have this mean and deviation exactly; the rounding of a sum would give them a tiny
  // deviation.
  if (std::ranges::count(values, values.front()) == std::ssize(values)) return {count, values.front(), 0};
  double sum = 0;
  for (const double v : values) sum += v;
  const double mean = sum / static_cast<double>(count);
  double squares = 0;
  for (const double v : values) squares += (v - mean) * (v - mean);
  return {count, mean, std::sqrt(squares / static_cast<double>(count - 1))};
}

}  // namespace

Summary summarize(std::span<const double> values) {
  check(values, "values");
  return summary_of(values);
}

PairedTest paired_test(std::span<const double> a, std::span<const double> b) {
  if (a.size() != b.size()) {
    throw Error("b: has " + std::to_string(b.size()) + " values, must have as many as a, " +
                std::to_string(a.size()));
  }
  check(a, "a");
  check(b, "b");
  std::vector<double> differences(a.size());
  std::ranges::transform(a, b, differences.begin(), std::minus<>());
  const Summary s = summary_of(differences);
  PairedTest result{s.count, s.mean, s.deviation, kNaN, kNaN, kNaN, kNaN};
  if (s.count == 1) return result;

  const boost::math::students_t student(static_cast<double>(s.count - 1));
  const double error = s.deviation / std::sqrt(static_cast<double>(s.count));
  const double reach = error * boost::math::quantile(boost::math::complement(student, kOutside / 2));
  result.t = s.mean / error;
  result.low = s.mean - reach;
  result.high = s.mean + reach;
  // Boost refuses NaN and, in some versions, infinity.
  if (std::isinf(result.t)) result.p = 0;
  if (std::isfinite(result.t)) {
    result.p = 2 * boost::math::cdf(boost::math::complement(student, std::abs(result.t)));
  }
  return result;
}

}  // namespace whet::lab
