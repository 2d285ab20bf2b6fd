// What both schemes, keys in place and keys round the ring, do with rows between their exchanges.
#ifndef WHET_MPI_ROWS_H_
#define WHET_MPI_ROWS_H_

#include <whet/mpi.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "mpi/agreement.h"
#include "mpi/elements.h"
#include "mpi/group.h"

namespace whet::mpi {

inline constexpr std::int64_t kFewRows = 16;  // with the same keys, which attention reads where they lie

// The problem as this rank has it.
struct Problem {
  ConstView q, k, v;
  AttentionOptions options;
  Execution execution;  // without workspace

  std::int64_t heads() const { return q.sizes[1]; }
  std::int64_t queries() const { return q.sizes[2]; }
  std::int64_t rows() const { return q.sizes[0] * q.sizes[1] * q.sizes[2]; }
  std::int64_t value_size() const { return v.sizes[3]; }
  DType arithmetic() const { return mpi::arithmetic(q.dtype); }
  Dims out_sizes() const { return {q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]}; }
  bool is_hard() const { return options.normalizer.name() == "hard"; }

  // The rule of a row; of none with hard, whose weights no beta changes.
  const Rule& rule(std::int64_t row) const;
  bool has_threshold() const { return needs_threshold(options.normalizer); }
  bool is_one_pass() const;   // betas are known before any state (none and fixed), and nothing else is needed
  bool searches() const;      // a beta
  bool keeps_logits() const;  // from one pass to the next, if there is room

  // Queries [first, first + count) of it.
  Problem of_queries(std::int64_t first, std::int64_t count) const;
};

// What check_shard() says of this rank's arguments, before it is known what other ranks have; "" if nothing.
std::string problem_of(const std::function<void(const Shard& shard)>& check, const ConstView& k,
                       const AttentionOptions& options);

// Rows for all rows of the problem.
Rows empty_rows(const Problem& problem);

// The beta of every row, where is_one_pass(); whatever the row holds, it is that rule's.
std::vector<double> known_betas(const Problem& problem);

// Puts the sums of all keys at each row's maximum and beta into `sums`.
using SumsAt = std::function<void(std::span<const RowScale> at, std::span<RowSums> sums)>;
// Whether any rank has something left to search.
using AnyLeft = std::function<bool(bool here)>;

// Fills rows.weighed from rows.states: in as many steps as the slowest search takes.
void choose_betas(const Problem& problem, Rows& rows, const SumsAt& sums_at, const AnyLeft& any_left);

// Puts the sums of all keys at each row's maximum, beta and threshold into `sums`.
using ThresholdSumsAt = std::function<void(std::span<const RowScale> at, std::span<ThresholdSums> sums)>;

// Fills in the thresholds of rows.weighed, where the problem has them.
void choose_thresholds(const Problem& problem, Rows& rows, const ThresholdSumsAt& sums_at,
                       const AnyLeft& any_left);

std::vector<RowScale> scales_of(const Rows& rows);

// ---- Partial outputs: records of a header and E numbers, in one piece of memory ----

// One of shard_partial_attention, measured from this shard's own maximum.
struct PartialHeader {
  RowState state;
  double mass;
};
// One of shard_attention, measured from the maximum of all.
struct WeighedHeader {
  double mass;
};

// Records of all rows, as an output of shard_attention sees them.
template <typename Header>
class Records {
 public:
  explicit Records(const Problem& problem);

  View outs();  // (B, H, N, E), with the strides of the records
  Header& header(std::int64_t row) { return *reinterpret_cast<Header*>(bytes_.data() + at(row)); }
  const std::byte* out(std::int64_t row) const { return bytes_.data() + at(row) + sizeof(Header); }
  std::span<std::byte> bytes() { return bytes_; }
  std::size_t pitch() const { return pitch_; }

 private:
  std::size_t at(std::int64_t row) const { return static_cast<std::size_t>(row) * pitch_; }

  Dims sizes_;
  DType dtype_;
  std::size_t pitch_;
  std::vector<std::byte> bytes_;
};

// c_s of shard.h: what a partial output measured from the maximum of `part` counts in the row of `merged`.
double share_of(const RowState& part, const RowState& merged, double beta, bool hard);

// sums += c out, and out = sums / mass (0 where there is no mass), where `out` has elements of that type.
void add_outs(DType dtype, const std::byte* out, double c, std::span<double> sums);
void normalise(DType dtype, std::span<const double> sums, double mass, std::byte* out);

// Calls shard_partial_attention() and fills the records.
void compute_partial(const Problem& problem, const Shard& shard, std::span<const double> betas,
                     Records<PartialHeader>& records);
void compute_weighed(const Problem& problem, const Shard& shard, std::span<const RowScale> scales,
                     Records<WeighedHeader>& records);

// ---- The gradient ----

// Whether some row needs the sums of all keys: its beta follows the logits, or it has a threshold.
bool needs_sums(const Problem& problem, const Rows& rows, BetaGradient beta_gradient);

// For other rows: the mass times <dout, out>.
std::vector<GradientSums> output_products(const Problem& problem, const Rows& rows, const ConstView& dout);

std::vector<RowSlope> slopes_of(const Problem& problem, const Rows& rows, std::span<const GradientSums> sums,
                                BetaGradient beta_gradient);

// Error unless `rows` is what forward leaves for this problem.
void check_rows(const Problem& problem, const Rows& rows);

}  // namespace whet::mpi

#endif  // WHET_MPI_ROWS_H_
