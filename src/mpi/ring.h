// Arrays that go round the ranks, each from one to the next, while those that are there are worked on.
#ifndef WHET_MPI_RING_H_
#define WHET_MPI_RING_H_

#include <mpi.h>
#include <whet/runtime.h>
#include <whet/view.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "mpi/agreement.h"
#include "mpi/elements.h"
#include "mpi/group.h"

namespace whet::mpi {

// Messages under way to the next rank and from the one before.
class Messages {
 public:
  explicit Messages(const Group& group) : group_(group) {}
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // The array must stay until wait(). Messages of one tag arrive in the order they were sent.
  void send(Array& array, int tag);
  void receive(Array& array, int tag);
  void wait();
  // Lets MPI move what is under way.
  void poke();

 private:
  MPI_Request& add();

  const Group& group_;
  std::vector<MPI_Request> requests_;
};

// What goes round on a lap.
struct Cargo {
  bool keys = true;
  bool values = true;
};

class Ring {
 public:
  // `keys` and `values` of this rank, contiguous; those of the others differ along axis 2.
  Ring(const Group& group, const Cut& cut, Array keys, Array values, const Execution& execution);

  // Calls body(source, keys, values, execution) for the shard of every rank, this one's first, then that of
  // the rank before, and so on. What isn't in the cargo is a view of the right sizes that repeats a zero.
  // With one thread, `execution` lets messages move between tasks; MPI moves them by itself or between calls
  // otherwise. Collective.
  using Body = std::function<void(int source, const ConstView& keys, const ConstView& values,
                                  const Execution& execution)>;
  void lap(const Cargo& cargo, const Body& body);

  // A view of the sizes of a source's keys that repeats a zero.
  ConstView no_keys(int source) const;

 private:
  struct Load {
    Array keys, values;
  };
  Load room_for(int source, const Cargo& cargo) const;

  const Group& group_;
  const Cut& cut_;
  Load own_;
  Execution execution_;
};

// Sums that go round with the keys they belong to: every rank adds its part, and the last one sends them
// home.
class Travellers {
 public:
  explicit Travellers(const Group& group) : group_(group), in_(group), out_(group) {}

  // In the order of a lap: before a part is computed, and when it is there. Sums have the types and sizes of
  // the keys and values.
  void expect(int source, const ConstView& keys_like, const ConstView& values_like);
  void add(int source, Array keys, Array values);
  // Those of this rank, when all have added theirs.
  std::array<Array, 2> home(const ConstView& keys_like, const ConstView& values_like);

 private:
  const Group& group_;
  Messages in_, out_;
  Array in_keys_, in_values_, out_keys_, out_values_;
};

}  // namespace whet::mpi

#endif  // WHET_MPI_RING_H_
