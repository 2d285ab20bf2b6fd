#include "mpi/group.h"

#include <whet/error.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace whet::mpi {
namespace {

constexpr std::size_t kFewBytes = 64 << 10;     // of all ranks, that every rank takes whole
constexpr std::size_t kBlockBytes = 256 << 20;  // of one exchange; more go in several

// A type of MPI of so many bytes, so that counts of records stay within int.
class RecordType {
 public:
  explicit RecordType(std::size_t bytes) {
    check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type_), "MPI_Type_contiguous");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~RecordType() { MPI_Type_free(&type_); }
  RecordType(const RecordType&) = delete;
  RecordType& operator=(const RecordType&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

int free_copy(MPI_Comm, int, void* copy, void*) {
  auto* comm = static_cast<MPI_Comm*>(copy);
  const int code = MPI_Comm_free(comm);
  delete comm;
  return code;
}

// The key under which a communicator keeps its copy.
int copy_key() {
  static const int key = [] {
    int made = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, free_copy, &made, nullptr), "MPI_Comm_create_keyval");
    return made;
  }();
  return key;
}

MPI_Comm copy_of(MPI_Comm comm) {
  void* found = nullptr;
  int known = 0;
  check(MPI_Comm_get_attr(comm, copy_key(), &found, &known), "MPI_Comm_get_attr");
  if (known != 0) return *static_cast<MPI_Comm*>(found);
  auto* copy = new MPI_Comm(MPI_COMM_NULL);
  check(MPI_Comm_dup(comm, copy), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_set_attr(comm, copy_key(), copy), "MPI_Comm_set_attr");
  return *copy;
}

bool is_running() {
  int begun = 0, ended = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  return begun != 0 && ended == 0;
}

// Of `rows` rows, those that rank r merges begin here.
std::int64_t share_begin(std::int64_t rows, int rank, int ranks) {
  return rows / ranks * rank + std::min<std::int64_t>(rank, rows % ranks);
}

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(std::string(call) + ": " + std::string(text, static_cast<std::size_t>(length)));
}

Group::Group(MPI_Comm comm) {
  if (!is_running()) throw Error("comm: MPI isn't running, call MPI_Init first");
  if (comm == MPI_COMM_NULL) throw Error("comm: is MPI_COMM_NULL, must be a communicator");
  int between = 0;
  check(MPI_Comm_test_inter(comm, &between), "MPI_Comm_test_inter");
  if (between != 0) throw Error("comm: is an intercommunicator, must be an intracommunicator");
  comm_ = copy_of(comm);
  check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

void Group::gather_bytes(std::span<const std::byte> own, std::span<std::byte> all) const {
  if (own.empty()) return;
  if (own.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    throw std::length_error("an exchange of more than 2 GiB from a rank");
  }
  const auto bytes = static_cast<int>(own.size());
  check(MPI_Allgather(own.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_), "MPI_Allgather");
}

std::vector<std::string> Group::gather_texts(const std::string& own) const {
  const int length = static_cast<int>(own.size());
  const std::vector<int> lengths = gather<int>(std::span(&length, 1));
  std::vector<int> begins;
  int end = 0;
  for (const int n : lengths) {
    begins.push_back(end);
    end += n;
  }
  std::string all(static_cast<std::size_t>(end), '\0');
  check(MPI_Allgatherv(own.data(), length, MPI_CHAR, all.data(), lengths.data(), begins.data(), MPI_CHAR,
                       comm_),
        "MPI_Allgatherv");
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    texts.push_back(all.substr(static_cast<std::size_t>(begins[r]), static_cast<std::size_t>(lengths[r])));
  }
  return texts;
}

void Group::merge_rows(std::span<const std::byte> records, std::span<std::byte> results, std::int64_t rows,
                       const Merge& merge) const {
  if (rows == 0) return;
  const std::size_t from = records.size() / static_cast<std::size_t>(rows);
  const std::size_t to = results.size() / static_cast<std::size_t>(rows);
  const bool few = records.size() * static_cast<std::size_t>(size_) <= kFewBytes;
  const auto block = static_cast<std::int64_t>(std::max<std::size_t>(kBlockBytes / std::max(from, to), 1));
  for (std::int64_t first = 0; first < rows; first += block) {
    const std::int64_t n = std::min(block, rows - first);
    const auto at = static_cast<std::size_t>(first), count = static_cast<std::size_t>(n);
    const auto own = records.subspan(at * from, count * from);
    const auto found = results.subspan(at * to, count * to);
    few || size_ == 1 ? merge_here(own, found, first, n, merge)
                      : merge_shared_out(own, found, first, n, merge);
  }
}

void Group::merge_here(std::span<const std::byte> records, std::span<std::byte> results, std::int64_t first,
                       std::int64_t rows, const Merge& merge) const {
  std::vector<std::byte> gathered(size_ == 1 ? 0 : records.size() * static_cast<std::size_t>(size_));
  if (size_ > 1) gather_bytes(records, gathered);
  const std::byte* all = size_ == 1 ? records.data() : gathered.data();
  const auto count = static_cast<std::size_t>(rows);
  const std::size_t from = records.size() / count, to = results.size() / count;
  for (std::size_t i = 0; i < count; ++i) {
    merge(first + static_cast<std::int64_t>(i), {all + i * from, records.size(), size_},
          results.data() + i * to);
  }
}

void Group::merge_shared_out(std::span<const std::byte> records, std::span<std::byte> results,
                             std::int64_t first, std::int64_t rows, const Merge& merge) const {
  const auto count = static_cast<std::size_t>(rows), ranks = static_cast<std::size_t>(size_);
  const std::size_t from = records.size() / count, to = results.size() / count;
  std::vector<int> counts(ranks), begins(ranks);
  for (int r = 0; r < size_; ++r) {
    const auto i = static_cast<std::size_t>(r);
    begins[i] = static_cast<int>(share_begin(rows, r, size_));
    counts[i] = static_cast<int>(share_begin(rows, r + 1, size_)) - begins[i];
  }
  const auto own = static_cast<std::size_t>(rank_);
  const auto mine = static_cast<std::size_t>(counts[own]), begin = static_cast<std::size_t>(begins[own]);
  std::vector<int> same(ranks, counts[own]), places(ranks);
  for (std::size_t r = 0; r < ranks; ++r) places[r] = static_cast<int>(r) * counts[own];
  std::vector<std::byte> parts(mine * ranks * from);
  const RecordType record(from), result(to);
  check(MPI_Alltoallv(records.data(), counts.data(), begins.data(), record.get(), parts.data(), same.data(),
                      places.data(), record.get(), comm_),
        "MPI_Alltoallv");
  for (std::size_t i = 0; i < mine; ++i) {
    merge(first + static_cast<std::int64_t>(begin + i), {parts.data() + i * from, mine * from, size_},
          results.data() + (begin + i) * to);
  }
  check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, results.data(), counts.data(), begins.data(),
                       result.get(), comm_),
        "MPI_Allgatherv");
}

void Group::add(std::span<double> sums) const {
  merge_rows(std::as_bytes(sums), std::as_writable_bytes(sums), static_cast<std::int64_t>(sums.size()),
             [](std::int64_t, const Parts& parts, std::byte* result) {
               double sum = 0;
               for (int r = 0; r < parts.ranks; ++r) sum += *parts.of<double>(r);
               *reinterpret_cast<double*>(result) = sum;
             });
}

}  // namespace whet::mpi
