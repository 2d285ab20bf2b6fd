// A normalizer turns a row of logits into weights. It is chosen beside the rule, which chooses the inverse
// temperature of the row.
#ifndef WHET_NORMALIZER_H_
#define WHET_NORMALIZER_H_

#include <whet/export.h>

#include <string>
#include <string_view>

namespace whet {

//   softmax    e^(beta x_i) / sum_j e^(beta x_j)
//   hard       1 / (number of keys at the maximum) for those keys, 0 for others; gradient 0, and no rule is
//   asked
class WHET_API Normalizer {
 public:
  Normalizer() = default;  // softmax

  // By its one-line name, the same in every interface: NAME, or NAME:PARAMETER for those that have one.
  // Error for anything else; its text lists the names.
  static Normalizer parse(std::string_view name);

  // The name again; parse(name()) is the same normalizer, bit for bit.
  std::string name() const;

  // What kernels read: the position in the library's table of normalizers, and the number after the colon, 0
  // where there is none.
  int index() const { return index_; }
  double parameter() const { return parameter_; }

  friend bool operator==(const Normalizer&, const Normalizer&) = default;

 private:
  int index_ = 0;
  double parameter_ = 0;
};

}  // namespace whet

#endif  // WHET_NORMALIZER_H_
