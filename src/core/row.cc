#include <whet/row.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace whet {

namespace {

struct Moments {
  double z, t, u;
};

// z, t, u of `s` with its logits measured from `max` instead of from its own.
Moments measured_from(const RowState& s, double max) {
  // Empty, or so far below that nothing of it is left: also keeps -inf - (-inf) and 0 * inf out.
  const double d = s.max - max;
  if (s.z == 0 || d < -800.0) return {0, 0, 0};
  if (d == 0) return {s.z, s.t, s.u};
  const double c = std::exp(d);
  return {c * s.z, c * (s.t + d * s.z), c * (s.u + 2 * d * s.t + d * d * s.z)};
}

bool is_nan(const RowState& s) { return std::isnan(s.z); }

}  // namespace

RowState merge(const RowState& a, const RowState& b) {
  RowState r;
  r.count = a.count + b.count;
  if (is_nan(a) || is_nan(b)) {
    r.min = r.max = r.z = r.t = r.u = std::numeric_limits<double>::quiet_NaN();
    return r;
  }
  r.min = std::min(a.min, b.min);
  r.max = std::max(a.max, b.max);
  const Moments sa = measured_from(a, r.max), sb = measured_from(b, r.max);
  r.z = sa.z + sb.z;
  r.t = sa.t + sb.t;
  r.u = sa.u + sb.u;
  return r;
}

double row_log_sum_exp(const RowState& s) { return s.max + std::log(s.z); }

double row_entropy(const RowState& s) {
  if (s.count == 0) return 0;
  const double h = std::log(s.z) - s.t / s.z;
  return h < 0 ? 0 : h;  // keeps NaN
}

double row_varentropy(const RowState& s) {
  if (s.count == 0) return 0;
  const double mean = s.t / s.z;
  const double v = s.u / s.z - mean * mean;
  return v < 0 ? 0 : v;
}

double row_peak(const RowState& s) { return s.count == 0 ? 0 : 1 / s.z; }

double row_spread(const RowState& s) { return s.count == 0 ? 0 : s.max - s.min; }

}  // namespace whet
