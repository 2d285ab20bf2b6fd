// Commands that several processes share, started together by mpirun or srun (lab/ranks.h).
#ifndef WHET_CLI_RANKS_H_
#define WHET_CLI_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lab/ranks.h"

namespace whet::cli {

// The rank of this process. Ranks of one machine share its processors: that many threads become the default
// of each, unless WHET_THREADS says otherwise.
lab::Rank join_ranks();

// Of this machine, whichever of them this process may run on.
int processors();

// Those of this rank.
template <typename T>
std::vector<T> share_of(const std::vector<T>& all, const lab::Rank& rank) {
  std::vector<T> own;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (rank.has(static_cast<std::int64_t>(i))) own.push_back(all[i]);
  }
  return own;
}

// Does this rank's share, with its sign of life in `folder`, and waits for the others. True on rank 0 alone,
// when all is done. If a rank is lost the process ends with a message.
bool share_work(const lab::Rank& rank, const std::string& folder, const std::function<void()>& work);

// Removes what ranks left in `folder`, once the results are written. Nothing if there was one.
void end_ranks(const lab::Rank& rank, const std::string& folder);

}  // namespace whet::cli

#endif  // WHET_CLI_RANKS_H_
