// The ranks of a call and what they exchange. Sums are never left to MPI, which promises no order: bytes are
// moved, and every row is merged in the order of the ranks.
#ifndef WHET_MPI_GROUP_H_
#define WHET_MPI_GROUP_H_

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace whet::mpi {

// Throws std::runtime_error with MPI's own text unless `code` is MPI_SUCCESS.
void check(int code, const char* call);

// A record of every rank for one row: that of rank r lies at first + r * stride.
struct Parts {
  const std::byte* first;
  std::size_t stride;
  int ranks;

  template <typename T>
  const T* of(int rank) const {
    return reinterpret_cast<const T*>(first + static_cast<std::size_t>(rank) * stride);
  }
};

class Group {
 public:
  // Error, naming `comm`, unless MPI runs and it is an intracommunicator. Collective the first time: messages
  // go through a copy of the communicator, so that they never meet the caller's.
  explicit Group(MPI_Comm comm);

  int rank() const { return rank_; }
  int size() const { return size_; }
  MPI_Comm comm() const { return comm_; }

  // The values of all ranks, in order; as many of each.
  template <typename T>
  std::vector<T> gather(std::span<const T> own) const {
    std::vector<T> all(own.size() * static_cast<std::size_t>(size_));
    gather_bytes(std::as_bytes(own), std::as_writable_bytes(std::span(all)));
    return all;
  }
  // Texts of any length.
  std::vector<std::string> gather_texts(const std::string& own) const;

  // results[i] = merge(records i of all ranks, in order), the same on all ranks. `records` and `results` hold
  // `rows` each, of any sizes that are multiples of 8 bytes. Few bytes go to all ranks at once; else each
  // rank merges its share of the rows and sends the results round.
  using Merge = std::function<void(std::int64_t row, const Parts& parts, std::byte* result)>;
  void merge_rows(std::span<const std::byte> records, std::span<std::byte> results, std::int64_t rows,
                  const Merge& merge) const;

  // sums[i] = the sum of every rank's sums[i], in order and in float64.
  void add(std::span<double> sums) const;

 private:
  void gather_bytes(std::span<const std::byte> own, std::span<std::byte> all) const;
  void merge_here(std::span<const std::byte> records, std::span<std::byte> results, std::int64_t first,
                  std::int64_t rows, const Merge& merge) const;
  void merge_shared_out(std::span<const std::byte> records, std::span<std::byte> results, std::int64_t first,
                        std::int64_t rows, const Merge& merge) const;

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace whet::mpi

#endif  // WHET_MPI_GROUP_H_
