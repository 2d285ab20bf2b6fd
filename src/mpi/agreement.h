// Before anything else is exchanged: do the arguments of all ranks fit together?
#ifndef WHET_MPI_AGREEMENT_H_
#define WHET_MPI_AGREEMENT_H_

#include <whet/attention.h>
#include <whet/view.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "mpi/group.h"

namespace whet::mpi {

// What must be the same on all ranks: arguments by name, and what they are as text.
class Fields {
 public:
  void add(const std::string& name, const std::string& value) { all_.emplace_back(name, value); }
  void add(const std::string& name, bool given) { add(name, std::string(given ? "given" : "not given")); }
  // Type and sizes, but for one axis whose size is each rank's own (-1: none).
  void add(const std::string& name, const ConstView& view, int own_axis = -1);
  // All but bias, mask and head-by-head data.
  void add(const AttentionOptions& options);

  const std::vector<std::pair<std::string, std::string>>& all() const { return all_; }

 private:
  std::vector<std::pair<std::string, std::string>> all_;
};

// The sizes of all ranks: what each of them has of the axes that are cut.
struct Cut {
  std::vector<std::int64_t> sizes;
  std::int64_t first(int rank) const;
  std::int64_t all() const { return first(static_cast<int>(sizes.size())); }
  std::int64_t largest() const;
};
struct Cuts {
  Cut keys;
  Cut queries;
};

// Collective. `problem` is what is wrong with this rank's own arguments; empty: nothing. Throws the same
// Error on all ranks if there is a problem on one, or the fields of two differ.
Cuts agree(const Group& group, const Fields& fields, const std::string& problem, std::int64_t keys,
           std::int64_t queries);

}  // namespace whet::mpi

#endif  // WHET_MPI_AGREEMENT_H_
