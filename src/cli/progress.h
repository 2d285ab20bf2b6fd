// Progress of long work: a bar on a terminal, a few plain lines elsewhere.
#ifndef WHET_CLI_PROGRESS_H_
#define WHET_CLI_PROGRESS_H_

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>

namespace whet::cli {

// What is to be shown. All but `label` are numbers of one moment.
struct ProgressState {
  std::string label;      // "training seed 3"
  std::int64_t done = 0;  // of total, including `before`
  std::int64_t total = 0;
  std::int64_t before = 0;  // done by an earlier run that this one resumes: not part of its rate
  double seconds = 0;       // since this run began
};

// "0:07", "4:05", "1:02:03": rounded to seconds; at most 9999:59:59.
std::string time_text(double seconds);

// Three digits or so of a number of steps per second, "1250/s", or, for slow work, a minute or an hour.
std::string rate_text(double per_second);

// One line of less than `width` columns, with as much as fits of
// "training seed 3 [=====>     ] 45% 450/1000 12.5/s 0:44 left".
std::string progress_bar(const ProgressState& state, int width);

// "training seed 3: 450/1000 (45%), 12.5/s, 0:44 left"
std::string progress_line(const ProgressState& state);

// "training seed 3: 1000/1000 in 1:20 (12.5/s)"
std::string finish_line(const ProgressState& state);

// Shows work while it runs. Any number of threads may share one.
//
// On a terminal the bar is redrawn at most ten times a second. Elsewhere, so that a log stays short, a line
// comes at the beginning, when both ten seconds and ten percent have passed since the last one, after five
// minutes without a line (some services end jobs that are silent for ten), and at the end.
//
// Everything happens inside the calls; there is no thread that draws. What can't be written is lost: work
// doesn't fail for its progress.
class Progress {
 public:
  // `clock` gives seconds from any origin; empty: the steady clock. Error if not 0 <= before <= total.
  Progress(std::string label, std::int64_t total, std::int64_t before = 0, std::FILE* out = stderr,
           std::function<double()> clock = {});
  // Takes an unfinished bar off the screen, so that what follows (an error) begins on a clean line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(std::int64_t steps = 1);
  // Replaces the bar by the line that says what was done and how long it took. Once; later calls of any
  // member do nothing.
  void finish();

 private:
  bool due(double now) const;
  ProgressState state(double now) const;
  void draw(double now);

  const std::int64_t total_;
  const std::int64_t before_;
  std::FILE* const out_;
  const std::function<double()> clock_;
  const bool terminal_;
  const double begin_;
  std::atomic<std::int64_t> done_;

  std::mutex mutex_;  // of all below, and of writing to out_
  std::string label_;
  double drawn_ = 0;  // when, and at which done_, the last bar or line was written
  std::int64_t drawn_done_ = 0;
  bool finished_ = false;
};

}  // namespace whet::cli

#endif  // WHET_CLI_PROGRESS_H_
