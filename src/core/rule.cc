#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <whet/error.h>
#include <whet/rule.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <vector>

#include "core/arguments.h"
#include "core/beta.h"

namespace whet {

namespace {

constexpr std::array<double, 5> kPaper = {-0.037, 0.481, -2.3, 4.917, -1.791};
constexpr std::size_t kMaxRuleFile = 65536;
constexpr std::string_view kPolynomial = "polynomial:";

constexpr std::string_view kNames =
    "none, paper, fixed:B, log-length:N0[,S], ssmax:S, log-power:D,B,G, llama4:N0[,S], target-entropy:H, "
    "target-peak:W, polynomial:C4,C3,C2,C1,C0[:gate=G][:hold=H] and, where files may be named, "
    "polynomial:FILE";

using core::number;
using core::text;

std::optional<std::vector<double>> numbers(std::string_view list) {
  std::vector<double> values;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const auto value = number(list.substr(begin, end - begin));
    if (!value) return std::nullopt;
    values.push_back(*value);
    begin = end + 1;
  }
  return values;
}

std::string quoted(std::string_view s) { return "'" + std::string(s) + "'"; }

// `subject`: the quoted name of the rule, or what it was read from.
[[noreturn]] void fail(const std::string& subject, const std::string& what) {
  throw Error("rule: " + subject + " " + what);
}

void require(bool ok, const char* argument, double given, const char* allowed) {
  if (!ok) throw Error(std::string(argument) + " is " + text(given) + ", must be " + allowed);
}

// The rule of "polynomial:" + body; nullopt if body doesn't begin with coefficients.
std::optional<Rule> polynomial_of(std::string_view body, const std::string& subject) {
  std::optional<double> gate, hold;
  const auto coefficients = numbers(body.substr(0, body.find(':')));
  if (!coefficients) return std::nullopt;
  for (std::size_t at = body.find(':'); at != body.npos; at = body.find(':', at + 1)) {
    const std::string_view field = body.substr(at + 1, body.find(':', at + 1) - at - 1);
    const auto value = number(field.substr(std::min(field.size(), field.find('=') + 1)));
    auto& option = field.starts_with("gate=") ? gate : hold;
    if (!value || option || !(field.starts_with("gate=") || field.starts_with("hold="))) {
      fail(subject, "has " + quoted(field) + " where gate=G or hold=H is allowed, once each");
    }
    option = value;
  }
  return Rule::polynomial(*coefficients, gate.value_or(0.5),
                          hold.value_or(std::numeric_limits<double>::infinity()));
}

class Descriptor {
 public:
  // O_NONBLOCK: a FIFO without a writer would hold up open().
  explicit Descriptor(const std::string& path)
      : number_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return number_; }

 private:
  int number_;
};

std::string read_file(const std::string& path, const std::string& subject) {
  const Descriptor descriptor(path);
  struct stat status {};
  if (descriptor.get() < 0 || ::fstat(descriptor.get(), &status) != 0) fail(subject, "can't be read");
  if (!S_ISREG(status.st_mode)) fail(subject, "isn't a regular file");
  std::string content(kMaxRuleFile + 1, '\0');
  std::size_t size = 0;
  while (size < content.size()) {
    const ssize_t count = ::read(descriptor.get(), content.data() + size, content.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(subject, "can't be read");
    if (count == 0) break;
    size += static_cast<std::size_t>(count);
  }
  if (size > kMaxRuleFile) fail(subject, "has more than 65536 bytes");
  content.resize(size);
  return content;
}

}  // namespace

Rule Rule::fixed(double beta) {
  require(beta >= core::kMinBeta && beta <= core::kMaxBeta, "fixed: beta", beta, "between 2^-60 and 2^60");
  Rule r;
  r.kind_ = Kind::fixed;
  r.parameter_ = beta;
  return r;
}

Rule Rule::paper() {
  Rule r = polynomial(kPaper);
  r.kind_ = Kind::paper;
  return r;
}

Rule Rule::polynomial(std::span<const double> coefficients, double gate, double hold) {
  require(!coefficients.empty() && coefficients.size() <= kMaxCoefficients,
          "polynomial: number of coefficients", static_cast<double>(coefficients.size()), "1 to 8");
  for (const double c : coefficients) require(std::isfinite(c), "polynomial: coefficient", c, "finite");
  require(gate >= 0, "polynomial: gate", gate, "0 or more");
  require(hold > 0, "polynomial: hold", hold, "above 0");
  Rule r;
  r.kind_ = Kind::polynomial;
  r.gate_ = gate;
  r.hold_ = hold;
  r.terms_ = coefficients.size();
  std::ranges::copy(coefficients, r.coefficients_.begin());
  return r;
}

Rule Rule::log_length(double n0, double s) {
  require(n0 > 1 && std::isfinite(n0), "log-length: n0", n0, "finite and above 1");
  require(s > 0 && std::isfinite(s), "log-length: s", s, "finite and above 0");
  Rule r;
  r.kind_ = Kind::log_length;
  r.parameter_ = n0;
  r.factor_ = s;
  return r;
}

Rule Rule::ssmax(double s) {
  require(s > 0 && std::isfinite(s), "ssmax: s", s, "finite and above 0");
  Rule r;
  r.kind_ = Kind::ssmax;
  r.parameter_ = s;
  return r;
}

Rule Rule::log_power(double d, double b, double g) {
  require(d >= 0 && std::isfinite(d), "log-power: d", d, "finite and 0 or more");
  require(b >= 0 && std::isfinite(b), "log-power: b", b, "finite and 0 or more");
  require(g >= 0 && std::isfinite(g), "log-power: g", g, "finite and 0 or more");
  if (d == 0 && b == 0) throw Error("log-power: d and b are both 0, one must be above 0");
  Rule r;
  r.kind_ = Kind::log_power;
  r.parameter_ = d;
  r.factor_ = b;
  r.exponent_ = g;
  return r;
}

Rule Rule::llama4(double n0, double s) {
  // Of whole numbers up to here n / n0 never rounds up to the next whole number, so that its floor is exact.
  require(n0 >= 1 && n0 <= 0x1p53 && std::floor(n0) == n0, "llama4: n0", n0, "a whole number from 1 to 2^53");
  require(s > 0 && std::isfinite(s), "llama4: s", s, "finite and above 0");
  Rule r;
  r.kind_ = Kind::llama4;
  r.parameter_ = n0;
  r.factor_ = s;
  return r;
}

Rule Rule::target_entropy(double h) {
  require(h > 0 && std::isfinite(h), "target-entropy: h", h, "finite and above 0 (nats)");
  Rule r;
  r.kind_ = Kind::target_entropy;
  r.parameter_ = h;
  return r;
}

Rule Rule::target_peak(double w) {
  require(w > 0 && w < 1, "target-peak: w", w, "between 0 and 1, both excluded");
  Rule r;
  r.kind_ = Kind::target_peak;
  r.parameter_ = w;
  return r;
}

std::optional<std::string> Rule::file_of(std::string_view name) {
  if (!name.starts_with(kPolynomial)) return std::nullopt;
  const std::string_view body = name.substr(kPolynomial.size());
  if (body.empty() || numbers(body.substr(0, body.find(':')))) return std::nullopt;
  return std::string(body);
}

Rule Rule::load(const std::string& path) {
  const std::string subject = "the file " + quoted(path);
  const std::string content = read_file(path, subject);
  std::string_view rest = content;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.remove_suffix(1);
    if (line.empty() || line.front() == '#') continue;
    if (!line.starts_with(kPolynomial)) break;
    if (auto rule = polynomial_of(line.substr(kPolynomial.size()), subject)) return *rule;
    break;
  }
  fail(subject, "has no line polynomial:C4,C3,C2,C1,C0[:gate=G][:hold=H]");
}

Rule Rule::parse(std::string_view name) {
  if (file_of(name)) {
    fail(quoted(name), "names a file, where only polynomial:C4,C3,C2,C1,C0[:gate=G][:hold=H] is allowed");
  }
  if (name == "none") return Rule::none();
  if (name == "paper") return Rule::paper();
  const std::size_t colon = name.find(':');
  const std::string_view head = name.substr(0, colon);
  const std::string_view body = colon == name.npos ? "" : name.substr(colon + 1);

  if (head == "polynomial" && !body.empty()) {
    if (auto rule = polynomial_of(body, quoted(name))) return *rule;
  }
  const auto values = numbers(body);
  if (values && values->size() == 1) {
    const double value = values->front();
    if (head == "fixed") return Rule::fixed(value);
    if (head == "ssmax") return Rule::ssmax(value);
    if (head == "target-entropy") return Rule::target_entropy(value);
    if (head == "target-peak") return Rule::target_peak(value);
    if (head == "log-length") return Rule::log_length(value);
    if (head == "llama4") return Rule::llama4(value);
  }
  if (values && values->size() == 2) {
    if (head == "log-length") return Rule::log_length(values->front(), values->back());
    if (head == "llama4") return Rule::llama4(values->front(), values->back());
  }
  if (values && values->size() == 3 && head == "log-power") {
    return Rule::log_power((*values)[0], (*values)[1], (*values)[2]);
  }
  fail(quoted(name), "is not a rule; rules are " + std::string(kNames));
}

std::string Rule::name() const {
  switch (kind_) {
    case Kind::none:
      return "none";
    case Kind::paper:
      return "paper";
    case Kind::fixed:
      return "fixed:" + text(parameter_);
    case Kind::ssmax:
      return "ssmax:" + text(parameter_);
    case Kind::target_entropy:
      return "target-entropy:" + text(parameter_);
    case Kind::target_peak:
      return "target-peak:" + text(parameter_);
    case Kind::log_length:
      return "log-length:" + text(parameter_) + (factor_ == 1 ? "" : "," + text(factor_));
    case Kind::log_power:
      return "log-power:" + text(parameter_) + "," + text(factor_) + "," + text(exponent_);
    case Kind::llama4:
      return "llama4:" + text(parameter_) + (factor_ == 0.1 ? "" : "," + text(factor_));
    case Kind::polynomial:
      break;
  }
  std::string result = "polynomial:";
  for (std::size_t i = 0; i < terms_; ++i) result += (i == 0 ? "" : ",") + text(coefficients_[i]);
  if (gate_ != 0.5) result += ":gate=" + text(gate_);
  if (std::isfinite(hold_)) result += ":hold=" + text(hold_);
  return result;
}

double Rule::polynomial_at(double entropy) const {
  double value = 0;
  for (std::size_t i = 0; i < terms_; ++i) value = value * std::min(entropy, hold_) + coefficients_[i];
  return value;
}

double Rule::beta(const RowState& state) const {
  if (needs_search()) throw Error("rule: " + name() + " needs the row, not only its state");
  if (state.count == 0) return 1;
  if (std::isnan(state.z)) return state.z;
  if (state.count == 1) return 1;
  double value = 1;
  switch (kind_) {
    case Kind::fixed:
      value = parameter_;
      break;
    case Kind::ssmax:
      value = parameter_ * std::log(static_cast<double>(state.count));
      break;
    case Kind::log_length:
      value = std::max(1.0, factor_ * std::log(static_cast<double>(state.count)) / std::log(parameter_));
      break;
    case Kind::log_power:
      // Without the second part where it is 0: the power may be infinite.
      value = parameter_;
      if (factor_ > 0) value += factor_ * std::pow(std::log(static_cast<double>(state.count)), exponent_);
      break;
    case Kind::llama4:
      value = 1 + factor_ * std::log1p(std::floor(static_cast<double>(state.count) / parameter_));
      break;
    case Kind::paper:
    case Kind::polynomial: {
      const double h = row_entropy(state);
      value = h > gate_ ? std::max(1.0, polynomial_at(h)) : 1;
      break;
    }
    case Kind::none:
    case Kind::target_entropy:
    case Kind::target_peak:
      break;
  }
  return std::clamp(value, core::kMinBeta, core::kMaxBeta);
}

double Rule::slope(const RowState& state) const {
  if (kind_ != Kind::paper && kind_ != Kind::polynomial) return 0;
  if (state.count <= 1) return 0;
  const double h = row_entropy(state);
  const double value = polynomial_at(h);
  if (h <= gate_ || h >= hold_ || value <= 1 || value >= core::kMaxBeta) return 0;
  double slope = 0;
  for (std::size_t i = 0; i + 1 < terms_; ++i) {
    slope = slope * h + coefficients_[i] * static_cast<double>(terms_ - 1 - i);
  }
  return slope;
}

}  // namespace whet
