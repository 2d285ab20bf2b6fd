// Every function on the executors of a host.

#include <gtest/gtest.h>
#include <whet/whet.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "executors.h"
#include "targets.h"

namespace whet {
namespace {

constexpr std::int64_t kHeads = 4, kKeys = 300, kSize = 8;

struct Array {
  Dims sizes;
  std::vector<float> values;

  explicit Array(Dims sizes_, unsigned seed = 0) : sizes(sizes_) {
    std::size_t count = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i) count *= static_cast<std::size_t>(sizes[i]);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count; ++i) values.push_back(normal(random));
  }

  operator ConstView() const { return {values.data(), sizes}; }
  operator View() { return {values.data(), sizes}; }
};

// The outputs of all calls, one after the other.
struct Outputs {
  std::vector<float> values;

  void add(const Array& array) { values.insert(values.end(), array.values.begin(), array.values.end()); }

  friend bool operator==(const Outputs& a, const Outputs& b) {
    return a.values.size() == b.values.size() &&
           std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
  }
};

void add_rows(const Execution& execution, Outputs& outputs) {
  const Array in({400, kKeys}, 1), dout({400, kKeys}, 2);
  Array out({400, kKeys}), din({400, kKeys});
  const SoftmaxOptions options{.rule = Rule::target_entropy(0.5)};
  softmax(in, out, options, {}, execution);
  softmax_backward(in, dout, din, options, {}, execution);
  outputs.add(out);
  outputs.add(din);
  sharpen(out, din, options, {}, execution);
  outputs.add(din);
  std::vector<RowState> of_rows(400);
  states(in, of_rows, {}, execution);
  for (const RowState& state : of_rows) outputs.values.push_back(static_cast<float>(row_entropy(state)));
}

// Few queries, which share out their keys, and many, which share out themselves.
void add_attention(std::int64_t queries, const Execution& execution, Outputs& outputs) {
  const Array q({1, kHeads, queries, kSize}, 3), dout({1, kHeads, queries, kSize}, 4);
  const Array k({1, kHeads, kKeys, kSize}, 5), v({1, kHeads, kKeys, kSize}, 6);
  Array out(q.sizes), dq(q.sizes), dk(k.sizes), dv(v.sizes);
  const AttentionOptions options{.rule = Rule::paper()};
  attention(q, k, v, out, options, {}, execution);
  attention_backward(q, k, v, dout, {.dq = dq, .dk = dk, .dv = dv}, options, {}, execution);
  for (const Array* array : {&out, &dq, &dk, &dv}) outputs.add(*array);
  std::vector<RowState> of_rows(static_cast<std::size_t>(kHeads * queries));
  shard_states(q, k, {.first_key = 0, .all_keys = kKeys}, of_rows, options, execution);
  for (const RowState& state : of_rows) outputs.values.push_back(static_cast<float>(row_entropy(state)));
}

Outputs outputs_of(const Execution& execution) {
  Outputs outputs;
  add_rows(execution, outputs);
  add_attention(3, execution, outputs);
  add_attention(100, execution, outputs);
  return outputs;
}

TEST(ExecutorBits, AreThoseOfThePool) {
  for_each_target([] {
    const Outputs expected = outputs_of({.threads = 1});
    for (const Executor::Run run : {run_backwards, run_on_new_threads}) {
      for (const int threads : {2, 3, 7}) {
        EXPECT_TRUE(outputs_of({.threads = threads, .executor = {.run = run}}) == expected) << threads;
        EXPECT_TRUE(outputs_of({.executor = {.run = run, .threads = threads}}) == expected) << threads;
      }
    }
  });
}

// The threads that the executor was given in a call, most first.
int threads_of_a_call(const Execution& wanted) {
  int most = 0;
  const auto run = [](void* context, std::int64_t tasks, int threads, Executor::Task task, void* data) {
    int& given = *static_cast<int*>(context);
    given = std::max(given, threads);
    run_backwards(nullptr, tasks, threads, task, data);
  };
  Execution execution = wanted;
  execution.executor = {.run = run, .context = &most, .threads = wanted.executor.threads};
  Outputs outputs;
  add_attention(100, execution, outputs);
  return most;
}

TEST(Executor, SaysHowManyThreadsACallUsesUnlessTheCallDoes) {
  EXPECT_EQ(threads_of_a_call({.executor = {.threads = 3}}), 3);
  EXPECT_EQ(threads_of_a_call({.threads = 2, .executor = {.threads = 3}}), 2);
  EXPECT_EQ(threads_of_a_call({.threads = 1, .executor = {.threads = 3}}), 0);  // the caller's alone
  set_threads(2);
  EXPECT_EQ(threads_of_a_call({}), 2);
  set_threads(0);
  EXPECT_THROW(threads_of_a_call({.executor = {.threads = -1}}), Error);
}

TEST(Executor, ThatFailsFailsTheCall) {
  const auto nothing = [](void*, std::int64_t, int, Executor::Task, void*) {};
  const auto closed = [](void*, std::int64_t, int, Executor::Task, void*) { throw std::runtime_error(""); };
  Outputs outputs;
  EXPECT_THROW(add_rows({.threads = 2, .executor = {.run = nothing}}, outputs), Error);
  EXPECT_THROW(add_attention(100, {.threads = 2, .executor = {.run = nothing}}, outputs), Error);
  EXPECT_THROW(add_rows({.threads = 2, .executor = {.run = closed}}, outputs), std::runtime_error);
  EXPECT_THROW(add_attention(3, {.threads = 2, .executor = {.run = closed}}, outputs), std::runtime_error);
}

}  // namespace
}  // namespace whet
