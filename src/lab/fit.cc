#include "lab/fit.h"

#include <whet/error.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

#include "files/file.h"

namespace whet::lab {
namespace {

constexpr std::size_t kMaxRuleFile = 65536;  // Rule::load refuses more

// Newton's method takes about ten sweeps. Should it creep, bisection takes over; it needs at most 60 from any
// bracket of doubles.
constexpr int kNewtonSweeps = 40;
constexpr int kSweeps = kNewtonSweeps + 60;
constexpr double kStep = 1e-13;

// Logits less their maximum, divided by their spread: in [-1, 0], so that no square or sum overflows.
struct ScaledRow {
  std::vector<double> z;
  double spread = 0;
};

template <typename T>
ScaledRow scaled(std::span<const T> logits) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double x = static_cast<double>(logits[i]);
    if (!std::isfinite(x)) {
      throw Error("logits: item " + std::to_string(i) + " is " + std::to_string(x) + ", must be finite");
    }
    low = std::min(low, x);
    high = std::max(high, x);
  }
  ScaledRow row{{}, high - low};
  if (!std::isfinite(row.spread)) throw Error("logits: their spread overflows, must be finite");
  row.z.reserve(logits.size());
  for (const T x : logits) {
    row.z.push_back(row.spread > 0 ? (static_cast<double>(x) - high) / row.spread : 0);
  }
  return row;
}

struct Moments {
  double mean;
  double variance;
};

// Under the weights softmax(beta z).
Moments moments(std::span<const double> z, double beta) {
  double s0 = 0, s1 = 0, s2 = 0;
  for (const double v : z) {
    const double e = std::exp(beta * v);
    s0 += e;
    s1 += e * v;
    s2 += e * v * v;
  }
  const double mean = s1 / s0;
  return {mean, s2 / s0 - mean * mean};
}

// The beta of E_beta[z] = target, for E_0[z] = mean < target < E_limit[z].
//
// Newton on ln(-E): -E falls like 1 / beta while many items share the weight and exponentially once few do,
// so its logarithm is nearly straight where E itself is flat. z spans 1, so its variance is at most 1/4 and
// the solution at least 4 (target - mean): a bracket away from 0, which can be bisected in the logarithm.
double solve(std::span<const double> z, double target, double mean, double limit) {
  double low = std::min(4 * (target - mean), limit), high = limit, beta = low;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    const Moments m = moments(z, beta);
    (m.mean < target ? low : high) = beta;
    double next = beta - std::log(m.mean / target) * m.mean / m.variance;
    if (std::abs(next - beta) <= kStep * beta) return beta;
    if (sweep >= kNewtonSweeps || !(low < next && next < high)) next = std::sqrt(low) * std::sqrt(high);
    if (high - low <= kStep * low) return next;
    beta = next;
  }
  return beta;
}

template <typename T>
double best_beta_of(std::span<const T> logits, std::size_t item, double beta_max) {
  if (item >= logits.size()) {
    throw Error("item: is " + std::to_string(item) + ", must be less than the row's length, " +
                std::to_string(logits.size()));
  }
  if (!(beta_max > 0 && std::isfinite(beta_max))) {
    throw Error("beta_max: is " + std::to_string(beta_max) + ", must be finite and above 0");
  }
  const ScaledRow row = scaled(logits);
  const double target = row.z[item];
  const double mean = moments(row.z, 0).mean;
  if (row.spread == 0 || target <= mean) return 0;
  const double limit = std::min(beta_max * row.spread, std::numeric_limits<double>::max());
  if (target == 0 || moments(row.z, limit).mean <= target) return beta_max;
  return std::min(beta_max, solve(row.z, target, mean, limit) / row.spread);
}

void check(std::span<const FitPoint> points, int degree) {
  constexpr int kMaxDegree = static_cast<int>(Rule::kMaxCoefficients) - 1;
  if (degree < 1 || degree > kMaxDegree) {
    throw Error("degree: is " + std::to_string(degree) + ", must be 1 to " + std::to_string(kMaxDegree));
  }
  if (points.size() <= static_cast<std::size_t>(degree)) {
    throw Error("points: there are " + std::to_string(points.size()) + ", a polynomial of degree " +
                std::to_string(degree) + " needs at least " + std::to_string(degree + 1));
  }
  const auto require = [](double value, std::size_t point, const char* what) {
    if (value >= 0 && std::isfinite(value)) return;
    throw Error("points: " + std::string(what) + " of point " + std::to_string(point) + " is " +
                std::to_string(value) + ", must be finite and 0 or more");
  };
  for (std::size_t i = 0; i < points.size(); ++i) {
    require(points[i].entropy, i, "entropy");
    require(points[i].best_beta, i, "best_beta");
  }
}

// Coefficients of powers of (entropy - centre) / half, lowest first. That variable spans [-1, 1], where the
// columns of powers are of like size and far from dependent; powers of the entropy itself are neither.
// Nothing if too few entropies differ.
std::optional<Eigen::VectorXd> solve_centred(std::span<const FitPoint> points, int degree, double centre,
                                             double half) {
  Eigen::MatrixXd powers(std::ssize(points), degree + 1);
  Eigen::VectorXd betas(std::ssize(points));
  for (Eigen::Index i = 0; i < powers.rows(); ++i) {
    const FitPoint& point = points[static_cast<std::size_t>(i)];
    powers(i, 0) = 1;
    for (int k = 1; k <= degree; ++k) powers(i, k) = powers(i, k - 1) * ((point.entropy - centre) / half);
    betas(i) = point.best_beta;
  }
  const Eigen::ColPivHouseholderQR<Eigen::MatrixXd> qr(powers);
  if (qr.rank() <= degree) return std::nullopt;
  return qr.solve(betas);
}

// The same polynomial in powers of the entropy, highest first: Horner's scheme with polynomials for numbers.
std::vector<double> plain_powers(const Eigen::VectorXd& centred, double centre, double half) {
  std::vector<double> result;
  for (Eigen::Index k = centred.size(); k-- > 0;) {
    result.push_back(0);
    for (std::size_t i = result.size(); i-- > 0;) {
      result[i] = (result[i] - (i > 0 ? centre * result[i - 1] : 0)) / half;
    }
    result.back() += centred(k);
  }
  return result;
}

void measure(PolynomialFit& fit, std::span<const FitPoint> points) {
  double mean = 0;
  for (const FitPoint& point : points) mean += point.best_beta / static_cast<double>(points.size());
  double residual = 0, total = 0;
  for (const FitPoint& point : points) {
    double value = 0;
    for (const double c : fit.coefficients) value = value * point.entropy + c;
    residual += (point.best_beta - value) * (point.best_beta - value);
    total += (point.best_beta - mean) * (point.best_beta - mean);
  }
  const bool constant =
      std::ranges::all_of(points, [&](const FitPoint& p) { return p.best_beta == points[0].best_beta; });
  fit.points = points.size();
  fit.rms_residual = std::sqrt(residual / static_cast<double>(points.size()));
  fit.r_squared = constant ? std::numeric_limits<double>::quiet_NaN() : 1 - residual / total;
}

}  // namespace

double best_beta(std::span<const float> logits, std::size_t item, double beta_max) {
  return best_beta_of(logits, item, beta_max);
}

double best_beta(std::span<const double> logits, std::size_t item, double beta_max) {
  return best_beta_of(logits, item, beta_max);
}

Rule PolynomialFit::rule() const { return Rule::polynomial(coefficients, lowest_entropy, highest_entropy); }

std::optional<PolynomialFit> fit_if_determined(std::span<const FitPoint> points, int degree) {
  check(points, degree);
  PolynomialFit fit;
  const auto [lowest, highest] = std::ranges::minmax_element(points, {}, &FitPoint::entropy);
  fit.lowest_entropy = lowest->entropy;
  fit.highest_entropy = highest->entropy;
  const double half = (fit.highest_entropy - fit.lowest_entropy) / 2;
  if (!(half > 0)) return std::nullopt;
  const double centre = fit.lowest_entropy + half;
  const auto centred = solve_centred(points, degree, centre, half);
  if (!centred) return std::nullopt;
  fit.coefficients = plain_powers(*centred, centre, half);
  // Powers of a tiny range overflow.
  if (!std::ranges::all_of(fit.coefficients, [](double c) { return std::isfinite(c); })) return std::nullopt;
  measure(fit, points);
  return fit;
}

PolynomialFit fit_polynomial(std::span<const FitPoint> points, int degree) {
  if (auto fit = fit_if_determined(points, degree)) return *std::move(fit);
  const auto [lowest, highest] = std::ranges::minmax_element(points, {}, &FitPoint::entropy);
  throw Error("points: have entropies from " + std::to_string(lowest->entropy) + " to " +
              std::to_string(highest->entropy) + ", a polynomial of degree " + std::to_string(degree) +
              " needs at least " + std::to_string(degree + 1) + " different ones");
}

void write_rule_file(const std::string& path, const PolynomialFit& fit, std::string_view comment) {
  std::string content;
  while (!comment.empty()) {
    const std::size_t end = std::min(comment.find('\n'), comment.size());
    content.append("# ").append(comment.substr(0, end)).append("\n");
    comment.remove_prefix(std::min(end + 1, comment.size()));
  }
  content += fit.rule().name() + "\n";
  if (content.size() > kMaxRuleFile) {
    throw Error("comment: makes a rule file of " + std::to_string(content.size()) +
                " bytes, must leave it at most " + std::to_string(kMaxRuleFile));
  }
  files::OutputFile file(path);
  file.write(std::as_bytes(std::span(content)));
  file.finish();
  file.commit();
}

}  // namespace whet::lab
