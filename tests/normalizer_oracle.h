// Weights of every normalizer in long double, as their definitions say and by no method of the library's:
// sorts and bisection. Gradients are finite differences of these.
#ifndef WHET_TESTS_NORMALIZER_ORACLE_H_
#define WHET_TESTS_NORMALIZER_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

namespace whet::oracle {

using Long = long double;
using Logits = std::vector<Long>;  // -inf: hidden

inline Long largest(const Logits& x) {
  Long max = -std::numeric_limits<Long>::infinity();
  for (const Long v : x) max = std::max(max, v);
  return max;
}

inline bool is_visible(Long x) { return x > -std::numeric_limits<Long>::infinity(); }

inline Long visible_count(const Logits& x) {
  return static_cast<Long>(std::count_if(x.begin(), x.end(), is_visible));
}

inline Logits divided(Logits w) {
  Long sum = 0;
  for (const Long v : w) sum += v;
  for (Long& v : w) v = sum == 0 ? 0 : v / sum;
  return w;
}

// Weights of entmax at a threshold, logits measured from the maximum.
inline Logits entmax_at(const Logits& s, Long alpha, Long tau) {
  const Long top = largest(s);
  Logits w(s.size(), 0);
  for (std::size_t i = 0; i < s.size(); ++i) {
    const Long v = is_visible(s[i]) ? (alpha - 1) * (s[i] - top) - tau : -1;
    if (v > 0) w[i] = alpha == 2 ? v : alpha == 1.5L ? v * v : std::pow(v, 1 / (alpha - 1));
  }
  return w;
}

inline Long entmax_tau(const Logits& s, Long alpha) {
  Long low = -1, high = 0;
  for (int step = 0; step < 80; ++step) {
    const Long tau = (low + high) / 2;
    Long sum = 0;
    for (const Long v : entmax_at(s, alpha, tau)) sum += v;
    (sum > 1 ? low : high) = tau;
  }
  return low;
}

inline Logits entmax(const Logits& s, Long alpha) {
  return divided(entmax_at(s, alpha, entmax_tau(s, alpha)));
}

// The K-th largest of the visible logits; -inf if there are no more than those.
inline Long kth_largest(Logits s, Long k) {
  std::sort(s.rbegin(), s.rend());
  return k > visible_count(s) ? -std::numeric_limits<Long>::infinity() : s[static_cast<std::size_t>(k) - 1];
}

inline Logits softmax_from(const Logits& s, Long least) {
  const Long top = largest(s);
  Logits w(s.size(), 0);
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (is_visible(s[i]) && s[i] >= least) w[i] = std::exp(s[i] - top);
  }
  return divided(w);
}

// A name taken apart; sparsemax and entmax15 are kinds of entmax.
struct Kind {
  std::string kind;
  Long parameter = 0;

  explicit Kind(const std::string& name) : kind(name.substr(0, name.find(':'))) {
    if (name.find(':') != name.npos) parameter = std::strtold(name.c_str() + name.find(':') + 1, nullptr);
    if (kind != "sparsemax" && kind != "entmax15") return;
    parameter = kind == "sparsemax" ? 2 : 1.5L;
    kind = "entmax";
  }
};

// Weights of the normalizer `name` at s = beta x.
inline Logits weights_of(const std::string& name, const Logits& s) {
  const auto [kind, parameter] = Kind(name);
  if (visible_count(s) == 0) return Logits(s.size(), 0);
  if (kind == "softmax") return softmax_from(s, -std::numeric_limits<Long>::infinity());
  if (kind == "entmax") return entmax(s, parameter);
  if (kind == "hard" || kind == "straight-through") return softmax_from(s, largest(s));
  if (kind == "top-k") return softmax_from(s, kth_largest(s, parameter));
  Logits w(s.size(), 0);
  const Long n = visible_count(s);
  Long z = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (!is_visible(s[i])) continue;
    if (kind == "sigmoid") w[i] = 1 / (1 + n * std::exp(-s[i]));
    if (kind == "relu") w[i] = std::max<Long>(0, s[i]) / n;
    if (kind == "softpick") w[i] = std::max<Long>(0, std::expm1(s[i]));
    z += std::abs(std::expm1(s[i]));
  }
  for (Long& v : w) v = kind != "softpick" ? v : z == 0 ? 0 : v / z;
  return w;
}

// The value of s below which keys have no weight, and how many have.
struct Support {
  Long threshold = -std::numeric_limits<Long>::infinity();
  Long size = 0;
};

inline Support support_of(const std::string& name, const Logits& s) {
  const auto [kind, parameter] = Kind(name);
  Support support;
  if (visible_count(s) == 0) return support;
  if (kind == "entmax") support.threshold = largest(s) + entmax_tau(s, parameter) / (parameter - 1);
  if (kind == "top-k") support.threshold = kth_largest(s, parameter);
  if (kind == "hard" || kind == "straight-through") support.threshold = largest(s);
  if (kind == "relu" || kind == "softpick") support.threshold = 0;
  const bool at_it = kind == "top-k" || kind == "hard" || kind == "straight-through";
  for (const Long v : s) {
    if (is_visible(v) && (v > support.threshold || (at_it && v == support.threshold))) ++support.size;
  }
  return support;
}

// Whether backward is the derivative of forward, and the largest slope of a weight may be any number.
inline bool has_gradient(const std::string& name) { return name != "hard" && name != "straight-through"; }

// dL/ds from dL/dw = g, as the formulas of docs/normalizers.md have it; w are the weights at s.
inline Logits gradient_of(const std::string& name, const Logits& s, const Logits& w, const Logits& g) {
  const std::size_t n = s.size(), colon = name.find(':');
  const std::string kind = name.substr(0, colon);
  const Long parameter = colon == name.npos ? 0 : std::strtold(name.c_str() + colon + 1, nullptr);
  Logits ds(n, 0);
  if (kind == "hard" || visible_count(s) == 0) return ds;
  if (kind == "straight-through") return gradient_of("softmax", s, weights_of("softmax", s), g);
  Logits share = w;  // softmax and top-k: ds = w (g - sum w g); entmax: with the shares of w^(2 - alpha)
  const bool divides = kind == "sparsemax" || kind.starts_with("entmax");
  if (divides) {
    const Long alpha = kind == "sparsemax" ? 2 : kind == "entmax15" ? 1.5L : parameter;
    for (Long& v : share) v = v > 0 ? std::pow(v, 2 - alpha) : 0;
  }
  Long mean = 0, z = 0;
  const Logits normal = divides ? divided(share) : share;
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_visible(s[i])) continue;
    mean += normal[i] * g[i];
    z += std::abs(std::expm1(s[i]));
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (!is_visible(s[i])) continue;
    if (kind == "sigmoid") {
      ds[i] = w[i] * (1 - w[i]) * g[i];
    } else if (kind == "relu") {
      ds[i] = s[i] > 0 ? g[i] / visible_count(s) : 0;
    } else if (kind == "softpick") {
      ds[i] = std::exp(s[i]) / z * (s[i] > 0 ? g[i] - mean : mean);
    } else {
      ds[i] = share[i] * (g[i] - mean);
    }
  }
  return ds;
}

}  // namespace whet::oracle

#endif  // WHET_TESTS_NORMALIZER_ORACLE_H_
