#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>
#include <whet/error.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace whet::cli {
namespace {

constexpr int kDefaultWidth = 80;
constexpr std::size_t kShortestBar = 10;  // less shows nothing that the percentage doesn't
constexpr double kFrame = 0.1;            // seconds between bars
constexpr double kLine = 10;              // seconds between lines, if enough was done
constexpr double kSilence = 300;          // seconds between lines, whatever was done
constexpr std::string_view kEraseLine = "\r\x1b[K";

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool draws_bars(std::FILE* out) {
  const int descriptor = ::fileno(out);
  const char* kind = std::getenv("TERM");
  return descriptor >= 0 && ::isatty(descriptor) == 1 &&
         (kind == nullptr || std::string_view(kind) != "dumb");
}

int columns(std::FILE* out) {
  winsize size{};
  const bool known = ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kDefaultWidth;
}

void write(std::FILE* out, std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), out);
  std::fflush(out);
}

// What is done, of 100 or of the columns of a bar.
double share(const ProgressState& state, double whole) {
  if (state.total <= 0) return whole;
  return std::clamp(whole * static_cast<double>(state.done) / static_cast<double>(state.total), 0.0, whole);
}

// Rounded down: 100 means done.
std::string percent(const ProgressState& state) {
  return std::to_string(static_cast<int>(share(state, 100))) + "%";
}

std::string count(const ProgressState& state) {
  return std::to_string(state.done) + "/" + std::to_string(state.total);
}

// Steps per second of this run; 0 if it is too early to tell.
double rate(const ProgressState& state) {
  const std::int64_t steps = state.done - state.before;
  return steps > 0 && state.seconds > 0 ? static_cast<double>(steps) / state.seconds : 0;
}

std::string left(const ProgressState& state) {
  const std::int64_t steps = std::max<std::int64_t>(state.total - state.done, 0);
  return time_text(static_cast<double>(steps) / rate(state)) + " left";
}

// At most `size` bytes, without half a UTF-8 character at the end. (No character has more columns than
// bytes.)
std::string cut(const std::string& text, std::size_t size) {
  if (text.size() <= size) return text;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xc0) == 0x80) --size;
  return text.substr(0, size);
}

}  // namespace

std::string time_text(double seconds) {
  constexpr double kMost = 9999 * 3600.0 + 3599;
  const auto whole = static_cast<long>(seconds > 0 ? std::min(std::round(seconds), kMost) : 0);
  char text[24];
  if (whole >= 3600) {
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%ld:%02ld", whole / 60, whole % 60);
  }
  return text;
}

std::string rate_text(double per_second) {
  const char* unit = "/s";
  double value = per_second;
  if (value < 1) {
    value *= 60;
    unit = "/min";
  }
  if (value < 1) {
    value *= 60;
    unit = "/h";
  }
  char text[48];
  std::snprintf(text, sizeof text, value < 99.95 ? "%.1f%s" : "%.0f%s", std::min(value, 1e15), unit);
  return text;
}

std::string progress_bar(const ProgressState& state, int width) {
  // A character in the last column makes some terminals begin the next line.
  const auto columns = static_cast<std::size_t>(std::max(width - 1, 0));
  const std::string brief = percent(state) + " " + count(state);
  const std::string whole =
      rate(state) > 0 ? brief + " " + rate_text(rate(state)) + " " + left(state) : brief;
  const std::size_t taken = state.label.size() + whole.size() + 4;  // two spaces, two brackets
  if (taken + kShortestBar <= columns) {
    const std::size_t size = columns - taken;
    const auto full = static_cast<std::size_t>(share(state, static_cast<double>(size)));
    std::string bar = std::string(full, '=') + (full < size ? ">" : "");
    bar.resize(size, ' ');
    return state.label + " [" + bar + "] " + whole;
  }
  for (const std::string& numbers : {whole, brief}) {
    if (state.label.size() + 1 + numbers.size() <= columns) return state.label + " " + numbers;
  }
  if (brief.size() + 1 < columns) return cut(state.label, columns - brief.size() - 1) + " " + brief;
  return cut(percent(state), columns);
}

std::string progress_line(const ProgressState& state) {
  std::string line = state.label + ": " + count(state);
  if (state.done > 0) line += " (" + percent(state) + ")";
  if (rate(state) > 0) line += ", " + rate_text(rate(state)) + ", " + left(state);
  return line;
}

std::string finish_line(const ProgressState& state) {
  std::string line = state.label + ": " + count(state) + " in " + time_text(state.seconds);
  if (rate(state) > 0) line += " (" + rate_text(rate(state)) + ")";
  return line;
}

Progress::Progress(std::string label, std::int64_t total, std::int64_t before, std::FILE* out,
                   std::function<double()> clock)
    : total_(total),
      before_(before),
      out_(out),
      clock_(clock ? std::move(clock) : steady_seconds),
      terminal_(draws_bars(out)),
      begin_(clock_()),
      done_(before),
      label_(std::move(label)) {
  if (before < 0 || total < before) {
    throw Error("progress: before is " + std::to_string(before) + " and total " + std::to_string(total) +
                ", must be 0 <= before <= total");
  }
  draw(begin_);
}

Progress::~Progress() {
  if (terminal_ && !finished_) write(out_, kEraseLine);
}

void Progress::advance(std::int64_t steps) {
  done_.fetch_add(steps, std::memory_order_relaxed);
  // Whoever finds another thread at it goes back to work: that one shows these steps, or the next drawing.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || finished_) return;
  const double now = clock_();
  if (due(now)) draw(now);
}

void Progress::finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  const std::string line = finish_line(state(clock_())) + "\n";
  write(out_, terminal_ ? std::string(kEraseLine) + line : line);
}

bool Progress::due(double now) const {
  const double waited = now - drawn_;
  if (terminal_) return waited >= kFrame;
  const double done = static_cast<double>(done_.load(std::memory_order_relaxed) - drawn_done_);
  return waited >= kSilence || (waited >= kLine && done >= 0.1 * static_cast<double>(total_));
}

ProgressState Progress::state(double now) const {
  return {label_, done_.load(std::memory_order_relaxed), total_, before_, now - begin_};
}

void Progress::draw(double now) {
  const ProgressState shown = state(now);
  drawn_ = now;
  drawn_done_ = shown.done;
  write(out_, terminal_ ? std::string(kEraseLine) + progress_bar(shown, columns(out_))
                        : progress_line(shown) + "\n");
}

}  // namespace whet::cli
