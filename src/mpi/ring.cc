#include "mpi/ring.h"

#include <utility>

namespace whet::mpi {
namespace {

constexpr int kKeysTag = 1, kValuesTag = 2, kKeySumsTag = 3, kValueSumsTag = 4;

// Elements of a message as MPI counts them: whole rows, so that the count fits an int.
struct MessageSize {
  int count;
  int bytes;  // of one
};

MessageSize size_of(const ConstView& view) {
  const std::int64_t size = view.sizes[view.sizes.size() - 1];
  return {static_cast<int>(size == 0 ? 0 : count_of(view.sizes) / size),
          static_cast<int>(size * static_cast<std::int64_t>(bytes_of(view.dtype)))};
}

template <typename Send>
void with_row_type(const ConstView& view, const Send& send) {
  const MessageSize size = size_of(view);
  MPI_Datatype type = MPI_DATATYPE_NULL;
  check(MPI_Type_contiguous(size.bytes, MPI_BYTE, &type), "MPI_Type_contiguous");
  check(MPI_Type_commit(&type), "MPI_Type_commit");
  send(size.count, type);
  MPI_Type_free(&type);  // once no message uses it any more
}

// Runs tasks on the caller's thread and lets messages move after each.
void run_and_poke(void* context, std::int64_t tasks, int, Executor::Task task, void* data) {
  for (std::int64_t i = 0; i < tasks; ++i) {
    task(data, i, 0);
    static_cast<Messages*>(context)->poke();
  }
}

bool is_one_thread(const Execution& execution) {
  if (execution.executor.run != nullptr) return false;
  return (execution.threads == 0 ? threads() : execution.threads) == 1;
}

// An executor is asked only where two threads are allowed; this one takes one of them.
Execution poking(const Execution& execution, Messages& messages) {
  if (!is_one_thread(execution)) return execution;
  return {.threads = 2, .executor = {.run = run_and_poke, .context = &messages}};
}

ConstView zeros(const ConstView& like, std::int64_t size) {
  static constexpr double kZero = 0;
  return {&kZero, like.dtype, Dims{like.sizes[0], like.sizes[1], size, like.sizes[3]}, Dims{0, 0, 0, 0}};
}

}  // namespace

Messages::~Messages() {
  // Only where an exception passes through: what it leaves under way can't be used, so it may as well leak.
  for (MPI_Request& request : requests_) {
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
  }
}

MPI_Request& Messages::add() { return requests_.emplace_back(MPI_REQUEST_NULL); }

void Messages::send(Array& array, int tag) {
  with_row_type(array.view(), [&](int count, MPI_Datatype type) {
    check(MPI_Isend(array.bytes().data(), count, type, (group_.rank() + 1) % group_.size(), tag,
                    group_.comm(), &add()),
          "MPI_Isend");
  });
}

void Messages::receive(Array& array, int tag) {
  with_row_type(array.view(), [&](int count, MPI_Datatype type) {
    check(MPI_Irecv(array.bytes().data(), count, type, (group_.rank() + group_.size() - 1) % group_.size(),
                    tag, group_.comm(), &add()),
          "MPI_Irecv");
  });
}

void Messages::wait() {
  check(MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE),
        "MPI_Waitall");
  requests_.clear();
}

void Messages::poke() {
  int done = 0;
  check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
}

Ring::Ring(const Group& group, const Cut& cut, Array keys, Array values, const Execution& execution)
    : group_(group), cut_(cut), own_{std::move(keys), std::move(values)}, execution_(execution) {}

ConstView Ring::no_keys(int source) const {
  return zeros(own_.keys.view(), cut_.sizes[static_cast<std::size_t>(source)]);
}

Ring::Load Ring::room_for(int source, const Cargo& cargo) const {
  const auto room = [&](const Array& like) {
    const ConstView view = like.view();
    return Array(view.dtype, Dims{view.sizes[0], view.sizes[1], cut_.sizes[static_cast<std::size_t>(source)],
                                  view.sizes[3]});
  };
  return {cargo.keys ? room(own_.keys) : Array(), cargo.values ? room(own_.values) : Array()};
}

void Ring::lap(const Cargo& cargo, const Body& body) {
  Messages messages(group_);
  const Execution execution = poking(execution_, messages);
  Load here, next;
  for (int step = 0; step < group_.size(); ++step) {
    const int source = (group_.rank() + group_.size() - step) % group_.size();
    Load& load = step == 0 ? own_ : here;
    if (step + 1 < group_.size()) {
      next = room_for((source + group_.size() - 1) % group_.size(), cargo);
      if (cargo.keys) messages.receive(next.keys, kKeysTag);
      if (cargo.values) messages.receive(next.values, kValuesTag);
      if (cargo.keys) messages.send(load.keys, kKeysTag);
      if (cargo.values) messages.send(load.values, kValuesTag);
    }
    const std::int64_t keys = cut_.sizes[static_cast<std::size_t>(source)];
    const Array &k = load.keys, &v = load.values;
    body(source, cargo.keys ? k.view() : zeros(own_.keys.view(), keys),
         cargo.values ? v.view() : zeros(own_.values.view(), keys), execution);
    messages.wait();
    here = std::move(next);
  }
}

void Travellers::expect(int source, const ConstView& keys_like, const ConstView& values_like) {
  if (source == group_.rank()) return;  // nobody has added to them
  in_keys_ = Array(keys_like.dtype, keys_like.sizes);
  in_values_ = Array(values_like.dtype, values_like.sizes);
  in_.receive(in_keys_, kKeySumsTag);
  in_.receive(in_values_, kValueSumsTag);
}

void Travellers::add(int source, Array keys, Array values) {
  if (source != group_.rank()) {
    in_.wait();
    const Array &earlier_keys = in_keys_, &earlier_values = in_values_;
    add_to(earlier_keys.view(), keys.view());
    add_to(earlier_values.view(), values.view());
  }
  out_.wait();
  out_keys_ = std::move(keys);
  out_values_ = std::move(values);
  if (group_.size() == 1) return;
  out_.send(out_keys_, kKeySumsTag);
  out_.send(out_values_, kValueSumsTag);
}

std::array<Array, 2> Travellers::home(const ConstView& keys_like, const ConstView& values_like) {
  if (group_.size() == 1) return {std::move(out_keys_), std::move(out_values_)};
  in_keys_ = Array(keys_like.dtype, keys_like.sizes);
  in_values_ = Array(values_like.dtype, values_like.sizes);
  in_.receive(in_keys_, kKeySumsTag);
  in_.receive(in_values_, kValueSumsTag);
  in_.wait();
  out_.wait();
  return {std::move(in_keys_), std::move(in_values_)};
}

}  // namespace whet::mpi
