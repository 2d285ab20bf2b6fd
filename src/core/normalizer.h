// Names of normalizers: NAME, or NAME:PARAMETER.
#ifndef WHET_CORE_NORMALIZER_H_
#define WHET_CORE_NORMALIZER_H_

#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace whet::core {

// Values that the parameter of a normalizer may have: finite, above `above`, at most `most`.
struct ParameterRange {
  double above = 0;
  double most = std::numeric_limits<double>::max();
  bool whole = false;  // whole numbers only
};

struct NormalizerEntry {
  std::string_view name;
  std::optional<ParameterRange> parameter{};  // nullopt: has none
  bool uses_beta = true;
  bool needs_scratch = false;       // is faster with a row of scratch
  bool saves_threshold = false;     // one more number of each row for backward
  bool merges_shards = true;        // keys may lie in shards
  bool parameter_gradient = false;  // the parameter has a gradient

  // The power of a weight, given the parameter, if rows have a threshold that all keys decide; null: others.
  double (*threshold_power)(double parameter) = nullptr;
};

// A name taken apart: an entry of a table and its parameter, 0 if it has none.
struct NormalizerName {
  int index = 0;
  double parameter = 0;
};
NormalizerName parse_normalizer(std::string_view name, std::span<const NormalizerEntry> table);
std::string normalizer_name(const NormalizerName& parts, std::span<const NormalizerEntry> table);

}  // namespace whet::core

#endif  // WHET_CORE_NORMALIZER_H_
