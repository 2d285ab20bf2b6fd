// A rule chooses the inverse temperature beta of a row.
#ifndef WHET_RULE_H_
#define WHET_RULE_H_

#include <whet/export.h>
#include <whet/row.h>

#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace whet {

// With n the visible keys of the row and H its entropy at beta = 1 (nats):
//
//   none               1
//   fixed(b)           b
//   paper              max(1, P(H)) if H > 0.5 else 1, P the published polynomial of degree 4
//   polynomial(...)    the same with other coefficients, gate, and a last H beyond which P is held
//   log_length(n0, s)  max(1, s ln n / ln n0)
//   ssmax(s)           s ln n
//   log_power(d, b, g) d + b (ln n)^g, the scale of ASEntmax
//   llama4(n0, s)      1 + s ln(floor(n / n0) + 1), the scale of Llama 4
//   target_entropy(h)  the beta >= 1 at which the entropy is h; 1 if H <= h already
//   target_peak(w)     the beta >= 1 at which the largest weight is w; 1 if it is that large already
//
// A row of one key always has beta = 1. beta is kept within [2^-60, 2^60]. When no beta reaches the
// target (several keys tie for the maximum), the two target rules take one so large that only those
// ties keep weight in f32.
class WHET_API Rule {
 public:
  enum class Kind {
    none,
    fixed,
    paper,
    polynomial,
    log_length,
    ssmax,
    log_power,
    llama4,
    target_entropy,
    target_peak
  };
  static constexpr std::size_t kMaxCoefficients = 8;

  Rule() = default;  // none
  static Rule none() { return {}; }
  static Rule fixed(double beta);  // 2^-60 <= beta <= 2^60
  static Rule paper();
  // Coefficients highest power first, 1..8 of them. Above `hold` the polynomial keeps its value
  // there: give the largest H it was fitted on.
  static Rule polynomial(std::span<const double> coefficients, double gate = 0.5,
                         double hold = std::numeric_limits<double>::infinity());
  static Rule log_length(double n0, double s = 1);      // n0 > 1, s > 0
  static Rule ssmax(double s);                          // s > 0
  static Rule log_power(double d, double b, double g);  // d, b, g >= 0, d and b not both 0
  static Rule llama4(double n0, double s = 0.1);        // n0 a whole number from 1 to 2^53, s > 0
  static Rule target_entropy(double h);                 // h > 0
  static Rule target_peak(double w);                    // 0 < w < 1

  // By its one-line name, the same in every interface: none, paper, fixed:1.5, log-length:16[,S],
  // ssmax:0.4, log-power:1,0.5,2, llama4:8192[,S], target-entropy:0.2, target-peak:0.9,
  // polynomial:C4,C3,..,C0[:gate=G][:hold=H]. Error for anything else. Opens no file.
  static Rule parse(std::string_view name);

  // The polynomial of a file: its first line that isn't empty and doesn't start with # must be
  // polynomial:C4,C3,..,C0[:gate=G][:hold=H]. Error where it isn't, and where `path` isn't a regular file of
  // at most 65536 bytes.
  static Rule load(const std::string& path);

  // The FILE of the name polynomial:FILE; nullopt for any other name. For interfaces where people may name a
  // file: they give it to load(), and every other name to parse().
  static std::optional<std::string> file_of(std::string_view name);

  // The name again; parse(name()) is the same rule, bit for bit.
  std::string name() const;

  Kind kind() const { return kind_; }

  // True for target_entropy and target_peak: their beta isn't a function of the row's state, but found by a
  // search that reads the row again for each beta it tries.
  bool needs_search() const { return kind_ == Kind::target_entropy || kind_ == Kind::target_peak; }

  // The argument of fixed, ssmax, target_entropy, target_peak; n0 of log_length and llama4; d of log_power.
  double parameter() const { return parameter_; }
  double factor() const { return factor_; }      // s of log_length and llama4, b of log_power
  double exponent() const { return exponent_; }  // g of log_power
  double gate() const { return gate_; }          // gate, hold and coefficients: paper and polynomial
  double hold() const { return hold_; }
  std::span<const double> coefficients() const { return {coefficients_.data(), terms_}; }

  // beta for a row of this state; NaN if its keys hold NaN. Error if the rule needs_search().
  double beta(const RowState& state) const;

  // d beta / dH at this state; 0 for rules that don't depend on H and on the constant side of a kink.
  double slope(const RowState& state) const;

  friend bool operator==(const Rule&, const Rule&) = default;

 private:
  double polynomial_at(double entropy) const;

  Kind kind_ = Kind::none;
  double parameter_ = 1;
  double factor_ = 1;
  double exponent_ = 1;
  double gate_ = 0.5;
  double hold_ = std::numeric_limits<double>::infinity();
  std::array<double, kMaxCoefficients> coefficients_{};
  std::size_t terms_ = 0;
};

}  // namespace whet

#endif  // WHET_RULE_H_
