// Several processes that share one experiment, started together by mpirun, mpiexec or srun. They exchange
// nothing but files: every rank trains and evaluates its share of the heads, which leaves runs and caches of
// results in their folders, and rank 0 then does what one process does, with all of that there.
#ifndef WHET_LAB_RANKS_H_
#define WHET_LAB_RANKS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace whet::lab {

struct Rank {
  int rank = 0;
  int size = 1;
  int local_size = 1;  // how many of them are on this machine, if the launcher says so; else 1

  // Heads are dealt out one by one.
  bool has(std::int64_t task) const { return task % size == rank; }
};

// From what the launcher sets: OMPI_COMM_WORLD_RANK and _SIZE (Open MPI), PMI_RANK and PMI_SIZE (MPICH, Intel
// MPI), SLURM_PROCID and SLURM_STEP_NUM_TASKS (srun). Error naming a variable that is no such number.
Rank rank_of_environment();

// How long a rank may give no sign of life: WHET_RANK_TIMEOUT in seconds, default 30. Error if it's no number
// above 0.
std::chrono::milliseconds rank_timeout();

// Keeps the ranks of one experiment together. Each has a file in `folder`, which it changes twice a second:
// rank 0 watches all others, they watch rank 0. When one fails, or gives no sign for rank_timeout(), rank 0
// tells the others, and every rank calls on_lost, within that time and a few seconds (twice that time if it
// is rank 0). Clocks are each rank's own: what is compared is whether a file changes.
class RankSession {
 public:
  // `on_lost` is called on a thread of its own, with a message, while the work goes on; it ends the process.
  RankSession(std::string folder, const Rank& rank, std::function<void(const std::string& message)> on_lost);
  // Without finish(): tells the others that this rank failed.
  ~RankSession();
  RankSession(const RankSession&) = delete;
  RankSession& operator=(const RankSession&) = delete;

  // This rank's share is done. Returns, on rank 0, when that of all is; on others when rank 0 can see it.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  // The file of a rank as last seen.
  struct Seen {
    std::string text;
    Clock::time_point changed;
    bool alive = false;  // has changed while this process looked
    bool done = false;
  };

  std::string path(int rank) const;
  void beat();
  void watch();          // until ended_
  void await_session();  // a few seconds, if it isn't known yet
  void look_at_all();    // rank 0
  void look_at_first();  // others
  bool look(int rank);   // whether its file has changed
  void lose(int rank, const std::string& why);

  const std::string folder_;
  const Rank rank_;
  const std::function<void(const std::string&)> on_lost_;
  const std::chrono::milliseconds timeout_;
  std::vector<Seen> seen_;
  std::string session_;    // of rank 0, which the others repeat: files of an earlier session don't count
  std::string said_done_;  // the session in which the file says that this rank is done
  std::uint64_t beats_ = 0;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::string state_ = "working";
  bool all_done_ = false;  // rank 0: all others; others: rank 0 can see that this one is
  bool ended_ = false;
  std::thread watcher_;
};

}  // namespace whet::lab

#endif  // WHET_LAB_RANKS_H_
