#include "core/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/arguments.h"

namespace whet::core {

namespace {

struct Job {
  const std::int64_t tasks;
  const Executor::Task task;
  void* const data;
  int open_places;             // workers that may still join
  int joined = 0;              // workers that did
  std::atomic<int> active{0};  // of those, still at work
  std::atomic<std::int64_t> next{0};
  std::condition_variable idle{};

  void work(int worker) {
    for (std::int64_t i = next++; i < tasks; i = next++) task(data, i, worker);
  }
};

// Looks for a while whether `done` comes true: far shorter than a system call and a wake-up would take, and
// short enough for a busy neighbour not to notice.
template <typename Condition>
void look_for(const Condition& done) {
  constexpr int kLooks = 500;
  for (int i = 0; i < kLooks && !done(); ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

class Pool {
 public:
  void run(Job& job) {
    const int wanted = job.open_places;
    {
      const std::lock_guard lock(mutex_);
      start_workers(wanted);
      jobs_.push_back(&job);
      ++posted_;
    }
    for (int i = 0; i < wanted; ++i) wake_.notify_one();
    job.work(0);
    look_for([&] { return job.active == 0; });
    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);
    job.idle.wait(lock, [&] { return job.active == 0; });
  }

 private:
  // Workers take no signals: those belong to the program's own threads. Fewer workers than wished for
  // is no error: the caller does the work.
  void start_workers(int wanted) {
    if (workers_ >= wanted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; workers_ < wanted; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {  // no thread to be had, or no memory for one
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      const int worker = ++job.joined;
      if (--job.open_places == 0) jobs_.erase(jobs_.begin());
      ++job.active;
      lock.unlock();
      job.work(worker);
      lock.lock();
      // The caller may destroy the job once it sees 0, which it can't before the lock is free.
      if (--job.active == 0) job.idle.notify_one();
      // The next job of a call that has several follows soon.
      const std::int64_t seen = posted_;
      lock.unlock();
      look_for([&] { return posted_ != seen; });
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job*> jobs_;  // those with open places, oldest first
  std::atomic<std::int64_t> posted_{0};
  int workers_ = 0;
};

// Never deleted: workers may wait in it until the process ends. After fork the child forgets it,
// since its threads and the state of its mutex belong to the parent.
std::atomic<Pool*> current_pool{nullptr};

[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr, std::memory_order_relaxed); });

Pool& pool() {
  Pool* existing = current_pool.load();
  if (existing == nullptr) {
    Pool* fresh = new Pool;
    if (current_pool.compare_exchange_strong(existing, fresh)) return *fresh;
    delete fresh;
  }
  return *existing;
}

// The tasks of a call as an executor of the host gets them: it may be wrong, and no number that it gives may
// reach memory of another.
struct HostedTasks {
  const std::int64_t tasks;
  const int threads;
  const Executor::Task task;
  void* const data;
  std::atomic<std::int64_t> ran{0};

  static void run(void* self, std::int64_t i, int worker) {
    auto& hosted = *static_cast<HostedTasks*>(self);
    if (i < 0 || i >= hosted.tasks || worker < 0 || worker >= hosted.threads) return;
    hosted.task(hosted.data, i, worker);
    ++hosted.ran;
  }
};

void run_hosted(const Executor& executor, HostedTasks& hosted) {
  executor.run(executor.context, hosted.tasks, hosted.threads, HostedTasks::run, &hosted);
  if (hosted.ran == hosted.tasks) return;
  fail("executor", "ran " + std::to_string(hosted.ran) + " tasks, must run each of " +
                       std::to_string(hosted.tasks) + " once, on workers 0 to " +
                       std::to_string(hosted.threads - 1));
}

}  // namespace

void run_tasks(const Executor& executor, std::int64_t tasks, int threads, Executor::Task task, void* data) {
  const auto workers = static_cast<int>(std::min<std::int64_t>(threads, tasks));
  if (workers > 1 && executor.run != nullptr) {
    HostedTasks hosted{.tasks = tasks, .threads = workers, .task = task, .data = data};
    return run_hosted(executor, hosted);
  }
  Job job{.tasks = tasks, .task = task, .data = data, .open_places = std::max(workers - 1, 0)};
  if (workers > 1) {
    pool().run(job);
  } else {
    job.work(0);
  }
}

}  // namespace whet::core
