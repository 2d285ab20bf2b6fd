// No allocation a row, and never more than one row of scratch a thread; for attention one allocation, or the
// caller's workspace.
#include <gtest/gtest.h>
#include <whet/attention.h>
#include <whet/c_api.h>
#include <whet/linear_attention.h>
#include <whet/softmax.h>

#include <array>
#include <atomic>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

std::atomic<std::size_t> allocations{0};
std::atomic<std::size_t> bytes{0};
std::atomic<int> grants{-1};  // allocations still granted; -1: all

void* counted(std::size_t size, std::size_t alignment) {
  if (grants == 0) throw std::bad_alloc();
  if (grants > 0) --grants;
  ++allocations;
  bytes += size;
  void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Where gcc inlines only one of the pair, it takes malloc and free for a mismatch.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {  // std::stable_sort's
  try {
    return counted(size, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace whet {
namespace {

struct Cost {
  std::size_t allocations, bytes;
};

template <typename F>
Cost cost_of(F&& call) {
  call();  // threads and other first-time costs
  allocations = bytes = 0;
  call();
  return {allocations, bytes};
}

constexpr std::int64_t kKeys = 4096;
constexpr std::size_t kRowAndLines = kKeys * sizeof(float) + 128;

class Memory : public testing::TestWithParam<std::string> {};

TEST_P(Memory, ContiguousRowsNeedNoneOutOfPlace) {
  const Rule rule = Rule::parse(GetParam());
  std::vector<float> x(300 * kKeys), w(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 2654435761U % 1000) / 100;
  const Dims sizes = {300, kKeys};
  const Cost cost = cost_of([&] {
    softmax({x.data(), sizes}, {w.data(), sizes}, {.rule = rule}, {}, {.threads = 2});
  });
  EXPECT_EQ(cost.allocations, 0U);
}

TEST_P(Memory, OneRowAThreadInTheWorstCase) {
  const Rule rule = Rule::parse(GetParam());
  for (const std::int64_t rows : {20, 300}) {
    std::vector<bf16> x(static_cast<std::size_t>(rows * kKeys), bf16{0x3F80});
    std::vector<float> y(x.size(), 1.0F);
    const Dims sizes = {rows, kKeys};
    for (const int threads : {1, 2}) {
      const auto limit = static_cast<std::size_t>(threads) * kRowAndLines;
      const Cost half = cost_of([&] {
        softmax({x.data(), sizes}, {x.data(), sizes}, {.rule = rule}, {}, {.threads = threads});
      });
      const Cost in_place = cost_of([&] {
        softmax({y.data(), sizes}, {y.data(), sizes}, {.rule = rule}, {}, {.threads = threads});
      });
      const Cost backward = cost_of([&] {
        softmax_backward({x.data(), sizes}, {x.data(), sizes}, {x.data(), sizes}, {.rule = rule}, {},
                         {.threads = threads});
      });
      for (const Cost& cost : {half, in_place, backward}) {
        EXPECT_LE(cost.allocations, 1U) << rows << " rows";
        EXPECT_LE(cost.bytes, limit) << rows << " rows";
      }
    }
  }
}

// Attention of 4 heads over 2 key heads, with all optional outputs, on memory allocated before.
template <typename T>
class AttentionMemory {
 public:
  AttentionMemory(std::int64_t queries, std::int64_t keys, const Rule& rule, int threads)
      : rows_{4 * queries},
        q_(static_cast<std::size_t>(rows_ * 8)),
        k_(static_cast<std::size_t>(2 * keys * 8)),
        out_(q_.size()),
        weights_(static_cast<std::size_t>(keys)),
        stats_(static_cast<std::size_t>(rows_)),
        top_keys_(static_cast<std::size_t>(3 * rows_)),
        top_weights_(top_keys_.size()),
        column_sums_(static_cast<std::size_t>(4 * keys)),
        q(q_.data(), {1, 4, queries, 8}),
        k(k_.data(), {1, 2, keys, 8}),
        out(out_.data(), {1, 4, queries, 8}) {
    options.rule = rule;
    options.causal = true;
    options.align = Align::end;
    outputs.stats = stats_;
    outputs.weight_rows = wanted_;
    outputs.weights = View(weights_.data(), {1, keys});
    outputs.top_k = 3;
    outputs.top_keys = top_keys_;
    outputs.top_weights = top_weights_;
    outputs.column_sums = column_sums_;
    outputs.tile_counts = &counts_;
    execution.threads = threads;
  }
  AttentionMemory(const AttentionMemory&) = delete;

 private:
  std::int64_t rows_;
  std::vector<T> q_, k_, out_, weights_;
  std::vector<RowStats> stats_;
  std::array<RowIndex, 1> wanted_ = {RowIndex{0, 3, 0}};
  std::vector<std::int64_t> top_keys_;
  std::vector<float> top_weights_;
  std::vector<double> column_sums_;
  TileCounts counts_;

 public:
  ConstView q, k;
  View out;
  AttentionOptions options;
  AttentionOutputs outputs;
  Execution execution;
};

template <typename T>
void check_attention_memory(const Rule& rule) {
  // Many queries, and one over many keys.
  for (const auto& [queries, keys] : {std::pair<std::int64_t, std::int64_t>{100, 300}, {1, kKeys}}) {
    for (const int threads : {1, 2}) {
      AttentionMemory<T> given(queries, keys, rule, threads);
      const auto call = [&] {
        attention(given.q, given.k, given.k, given.out, given.options, given.outputs, given.execution);
      };
      const std::size_t size =
          attention_workspace(given.q, given.k, given.k, given.options, given.outputs, given.execution);
      const Cost own = cost_of(call);
      EXPECT_EQ(own.allocations, 1U) << queries << " queries, " << threads << " threads";
      EXPECT_LE(own.bytes, size) << queries << " queries";
      std::vector<std::byte> workspace(size);
      given.execution.workspace = workspace;
      EXPECT_EQ(cost_of(call).allocations, 0U) << queries << " queries, " << threads << " threads";
    }
  }
}

TEST_P(Memory, AttentionAllocatesOnceAndNotAtAllInAWorkspace) {
  const Rule rule = Rule::parse(GetParam());
  check_attention_memory<float>(rule);
  check_attention_memory<double>(rule);
  check_attention_memory<bf16>(rule);
}

// About D E + 64 (3 D + 2 E + 64) numbers per thread, rows padded to 64 and 16 more: nothing that grows with
// the keys, and backward two numbers per query.
TEST(LinearAttentionMemory, IsOneAllocationOfAStateAndAChunk) {
  constexpr std::int64_t kLong = 2000;
  const Dims sizes = {1, 2, kLong, 8};
  const std::vector<float> x(2 * kLong * 8);
  std::vector<float> y(x.size()), dk(x.size()), dv(x.size());
  const ConstView in(x.data(), sizes);
  for (const bool causal : {false, true}) {
    for (const std::size_t threads : {1U, 2U}) {
      const Execution execution{.threads = static_cast<int>(threads)};
      const Cost forward = cost_of([&] {
        linear_attention(in, in, in, {y.data(), sizes}, {.causal = causal}, execution);
      });
      EXPECT_EQ(forward.allocations, 1U);
      EXPECT_LE(forward.bytes, threads * sizeof(float) * (8 * 80 + 64 * 5 * 80 + 8 * 80 + 200));
      const Cost backward = cost_of([&] {
        linear_attention_backward(
            in, in, in, in, {.dq = {y.data(), sizes}, .dk = {dk.data(), sizes}, .dv = {dv.data(), sizes}},
            {.causal = causal}, execution);
      });
      EXPECT_EQ(backward.allocations, 1U);
      EXPECT_LE(backward.bytes, 3 * forward.bytes + threads * 2 * kLong * sizeof(float));
    }
  }
}

TEST(OutOfMemory, LeavesTheOutputsOfLinearAttentionAlone) {
  const float q[6] = {};
  float out[6] = {7, 7, 7, 7, 7, 7};
  const Dims sizes = {1, 1, 3, 2};
  const ConstView view(q, sizes);
  grants = 0;
  EXPECT_THROW(linear_attention(view, view, view, {out, sizes}, {}, {.threads = 1}), std::bad_alloc);
  EXPECT_THROW(linear_attention_backward(view, view, view, view, {.dq = {out, sizes}}, {}, {.threads = 1}),
               std::bad_alloc);
  grants = -1;
  for (float value : out) EXPECT_EQ(value, 7);
}

TEST(OutOfMemory, LeavesTheOutputsOfAttentionAlone) {
  const float q[6] = {};
  float out[6] = {7, 7, 7, 7, 7, 7};
  RowStats stats[3] = {};
  const ConstView view(q, {1, 1, 3, 2});
  grants = 0;
  EXPECT_THROW(attention(view, view, view, {out, {1, 1, 3, 2}}, {}, {.stats = stats}, {.threads = 1}),
               std::bad_alloc);
  grants = -1;
  for (float value : out) EXPECT_EQ(value, 7);
  for (const RowStats& row : stats) EXPECT_EQ(row.count, 0);
}

TEST(OutOfMemory, ThrowsBadAllocAndWritesNothing) {
  const bf16 x[4] = {};
  bf16 w[4] = {{7}, {7}, {7}, {7}};
  grants = 0;
  EXPECT_THROW(softmax({x, {4}}, {w, {4}}), std::bad_alloc);
  grants = -1;
  for (const bf16& value : w) EXPECT_EQ(value.bits, 7);
}

// Whichever allocation fails: a status, never an exception through the C ABI.
TEST(OutOfMemory, StaysInsideTheCInterface) {
  bf16 x[4] = {};
  const std::int64_t sizes[1] = {4}, wrong[1] = {-4};
  const whet_view good = {x, WHET_BF16, 1, sizes, nullptr}, bad = {x, WHET_BF16, 1, wrong, nullptr};
  whet_softmax_options misspelt{};
  misspelt.struct_size = sizeof misspelt;
  misspelt.rule = "a name that is not a rule";
  for (int k = 0; k < 12; ++k) {
    const auto with_grants = [k](auto&& call) {
      grants = k;
      call();
      grants = -1;
    };
    with_grants([&] {
      const whet_status status = whet_softmax(&good, &good, nullptr, nullptr, nullptr);
      EXPECT_TRUE(status == WHET_OK || status == WHET_OUT_OF_MEMORY);
    });
    with_grants([&] { EXPECT_NE(whet_softmax(&bad, &bad, nullptr, nullptr, nullptr), WHET_OK); });
    with_grants([&] { EXPECT_NE(whet_softmax(&good, &good, &misspelt, nullptr, nullptr), WHET_OK); });
    with_grants([&] { whet_targets(); });
  }
  EXPECT_NE(whet_targets(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Rules, Memory,
                         testing::Values("none", "paper", "log-length:16", "target-entropy:0.2"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::erase_if(name,
                                         [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

}  // namespace
}  // namespace whet
