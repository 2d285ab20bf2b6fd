// Structs of other versions, which no program compiled against this header makes. tests/package/main.c calls
// every function from C.

#include <gtest/gtest.h>
#include <whet/c_api.h>
#include <whet/softmax.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kRowSizes[] = {2, 3};
constexpr std::int64_t kSizes[] = {1, 1, 2, 3};  // of q, k, v and what is written alike

// Arguments that fit, and what they are called with.
struct Data {
  std::array<float, 6> x{1, 2, 3, 1, 1, 1}, y{}, z{1, 0, 0, 0, 1, 0};
  whet_view in{x.data(), WHET_F32, 2, kRowSizes, nullptr}, out{y.data(), WHET_F32, 2, kRowSizes, nullptr},
      dout{z.data(), WHET_F32, 2, kRowSizes, nullptr};
  whet_view q{x.data(), WHET_F32, 4, kSizes, nullptr}, o{y.data(), WHET_F32, 4, kSizes, nullptr};
  std::array<whet_row_state, 2> states{};
};

template <typename Struct>
using Function = std::function<whet_status(Data& data, const Struct* given)>;

// A struct in the memory of one of another version: of `size` bytes, all `filling` but struct_size.
template <typename Struct>
class Other {
 public:
  Other(std::size_t size, int filling) : memory_((std::max(size, sizeof(Struct)) + 7) / 8) {
    std::memset(memory_.data(), filling, memory_.size() * 8);
    set_size(size);
  }
  void set_size(std::size_t size) { std::memcpy(memory_.data(), &size, sizeof size); }
  unsigned char* bytes() { return reinterpret_cast<unsigned char*>(memory_.data()); }
  const Struct* get() const { return reinterpret_cast<const Struct*>(memory_.data()); }

 private:
  std::vector<std::uint64_t> memory_;
};

// `defaults`: what the function returns for a struct of which nothing is set.
template <typename Struct>
void expect_growth(const char* name, const Function<Struct>& function, whet_status defaults = WHET_OK) {
  SCOPED_TRACE(name);
  Data data;
  const auto refused = [&](const Other<Struct>& other, const std::string& text) {
    EXPECT_EQ(function(data, other.get()), WHET_INVALID_ARGUMENT);
    EXPECT_NE(std::string(whet_last_error()).find(name + (": " + text)), std::string::npos)
        << whet_last_error();
  };
  Other<Struct> shortest(sizeof(Struct), 0xFF);  // what lies beyond its size isn't looked at
  shortest.set_size(sizeof(std::size_t));
  EXPECT_EQ(function(data, shortest.get()), defaults) << whet_last_error();

  Other<Struct> longer(sizeof(Struct) + 64, 0);
  EXPECT_EQ(function(data, longer.get()), defaults) << whet_last_error();
  for (std::size_t i = sizeof(Struct); i < sizeof(Struct) + 64; ++i) {
    longer.bytes()[i] = 1;
    refused(longer, "sets a field that whet ");
    longer.bytes()[i] = 0;
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{4}, sizeof(Struct) - 1, std::size_t{4104},
                                 std::numeric_limits<std::size_t>::max()}) {
    Other<Struct> wrong(sizeof(Struct), 0);
    wrong.set_size(size);
    refused(wrong, "struct_size is " + std::to_string(size));
  }
  if constexpr (requires(Struct s) { s.reserved; }) {
    Other<Struct> reserved(sizeof(Struct), 0);
    reserved.bytes()[offsetof(Struct, reserved)] = 1;
    refused(reserved, "sets a field that whet ");
  }
}

TEST(CApiStructs, GrowForRows) {
  expect_growth<whet_softmax_options>("options", [](Data& d, const auto* given) {
    return whet_softmax(&d.in, &d.out, given, nullptr, nullptr);
  });
  expect_growth<whet_softmax_outputs>("outputs", [](Data& d, const auto* given) {
    return whet_sharpen(&d.in, &d.out, nullptr, given, nullptr);
  });
  expect_growth<whet_softmax_backward_options>("backward", [](Data& d, const auto* given) {
    return whet_softmax_backward(&d.in, &d.dout, &d.out, nullptr, given, nullptr);
  });
  expect_growth<whet_states_options>("options", [](Data& d, const auto* given) {
    return whet_states(&d.in, d.states.data(), given, nullptr);
  });
  expect_growth<whet_execution>("execution", [](Data& d, const auto* given) {
    return whet_softmax(&d.in, &d.out, nullptr, nullptr, given);
  });
}

TEST(CApiStructs, GrowForAttention) {
  expect_growth<whet_attention_options>("options", [](Data& d, const auto* given) {
    return whet_attention(&d.q, &d.q, &d.q, &d.o, given, nullptr, nullptr);
  });
  expect_growth<whet_attention_outputs>("outputs", [](Data& d, const auto* given) {
    return whet_attention(&d.q, &d.q, &d.q, &d.o, nullptr, given, nullptr);
  });
  whet_attention_gradients none{};
  none.struct_size = sizeof none;
  expect_growth<whet_attention_backward_options>("backward", [&](Data& d, const auto* given) {
    return whet_attention_backward(&d.q, &d.q, &d.q, &d.q, &none, nullptr, given, nullptr);
  });
  expect_growth<whet_attention_gradients>("gradients", [](Data& d, const auto* given) {
    return whet_attention_backward(&d.q, &d.q, &d.q, &d.q, given, nullptr, nullptr, nullptr);
  });
}

// dquery_scale came after the first version of its struct: it is written if the struct has it, and a struct
// that ends before it is still right.
TEST(CApiStructs, HoldTheGradientOfQueryScale) {
  std::array<double, 6> x{1, 2, 3, 1, -1, 0.5}, y{}, dout{1, 0, 2, 0, 1, 0};
  std::array<double, 2> scale{0.75, 0}, gradient{7, 7};
  constexpr std::int64_t kScaleSizes[] = {1, 1, 2};
  const auto four = [](auto& of) { return whet_view{of.data(), WHET_F64, 4, kSizes, nullptr}; };
  const auto three = [&](auto& of) { return whet_view{of.data(), WHET_F64, 3, kScaleSizes, nullptr}; };
  const whet_view q = four(x), out = four(y), from = four(dout), query_scale = three(scale),
                  dquery_scale = three(gradient);
  whet_attention_options options{};
  options.struct_size = sizeof options;
  options.query_scale = &query_scale;
  whet_attention_gradients gradients{};
  gradients.dquery_scale = &dquery_scale;
  gradients.struct_size = offsetof(whet_attention_gradients, dquery_scale);
  ASSERT_EQ(whet_attention_backward(&q, &q, &q, &from, &gradients, &options, nullptr, nullptr), WHET_OK);
  EXPECT_EQ(gradient, (std::array<double, 2>{7, 7}));
  gradients.struct_size = sizeof gradients;
  ASSERT_EQ(whet_attention_backward(&q, &q, &q, &from, &gradients, &options, nullptr, nullptr), WHET_OK);

  const auto loss = [&] {
    EXPECT_EQ(whet_attention(&q, &q, &q, &out, &options, nullptr, nullptr), WHET_OK);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dout[i];
    return sum;
  };
  for (std::size_t i = 0; i < scale.size(); ++i) {
    const double at = scale[i], step = 1e-5;
    scale[i] = at + step;
    const double above = loss();
    scale[i] = at - step;
    EXPECT_NEAR(gradient[i], (above - loss()) / (2 * step), 1e-8) << "query " << i;
    scale[i] = at;
  }

  gradients.dquery_scale = &q;
  EXPECT_EQ(whet_attention_backward(&q, &q, &q, &from, &gradients, &options, nullptr, nullptr),
            WHET_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(whet_last_error()).rfind("dquery_scale: ", 0), 0u) << whet_last_error();
}

TEST(CApiStructs, GrowForLinearAttention) {
  expect_growth<whet_linear_attention_options>("options", [](Data& d, const auto* given) {
    return whet_linear_attention(&d.q, &d.q, &d.q, &d.o, given, nullptr);
  });
  expect_growth<whet_linear_attention_gradients>("gradients", [](Data& d, const auto* given) {
    return whet_linear_attention_backward(&d.q, &d.q, &d.q, &d.q, given, nullptr, nullptr);
  });
}

TEST(CApiStructs, GrowForShardsAndNorms) {
  const auto states = [](Data& d, const whet_shard* given) {
    return whet_shard_states(&d.q, &d.q, given, d.states.data(), nullptr, nullptr);
  };
  expect_growth<whet_shard>("shard", states, WHET_INVALID_ARGUMENT);  // no shard of 0 keys holds those of k
  expect_growth<whet_head_norms>("norms", [](Data&, const auto* given) {
    double spread = 0;
    return whet_spread_bound(given, &spread);
  });
}

// A field that a shorter struct has counts, and the next one doesn't.
TEST(CApiStructs, ShorterOnesKeepTheFieldsTheyHave) {
  Data data;
  whet_attention_options options{};
  std::memset(static_cast<void*>(&options), 0xFF, sizeof options);
  options.struct_size = offsetof(whet_attention_options, head_rules);
  options.rule = "fixed:2";
  std::array<whet_row_stats, 2> stats{};
  whet_attention_outputs outputs{};
  outputs.struct_size = offsetof(whet_attention_outputs, weight_rows);
  outputs.stats = stats.data();
  outputs.stats_size = sizeof stats[0];
  outputs.top_k = 7;  // beyond the struct
  ASSERT_EQ(whet_attention(&data.q, &data.q, &data.q, &data.o, &options, &outputs, nullptr), WHET_OK)
      << whet_last_error();
  EXPECT_EQ(stats[1].beta, 2);
  EXPECT_EQ(stats[1].count, 2);
  EXPECT_EQ(stats[1].support, 2);
  EXPECT_EQ(stats[1].threshold, -std::numeric_limits<double>::infinity());
}

TEST(CApiStats, ElementsOfAnOlderHeaderGetTheFieldsTheyHave) {
  Data data;
  struct Older {
    double count, max;
  };
  std::array<Older, 3> older{{{7, 7}, {7, 7}, {7, 7}}};
  whet_softmax_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.stats = reinterpret_cast<whet_row_stats*>(older.data());
  outputs.stats_size = sizeof(Older);
  ASSERT_EQ(whet_softmax(&data.in, &data.out, nullptr, &outputs, nullptr), WHET_OK) << whet_last_error();
  EXPECT_EQ(older[0].count, 3);
  EXPECT_EQ(older[0].max, 3);
  EXPECT_EQ(older[1].max, 1);
  EXPECT_EQ(older[2].count, 7);
}

// As for elements of this version.
TEST(CApiStats, ElementsOfAnOlderHeaderMayNotOverlap) {
  Data data;
  std::array<double, 40> memory{};  // two rows of ten
  const auto stats = reinterpret_cast<whet_row_stats*>(memory.data());
  whet_softmax_options options{};
  options.struct_size = sizeof options;
  options.lengths = reinterpret_cast<std::int64_t*>(memory.data() + 19);
  whet_softmax_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.stats = stats;
  outputs.stats_size = 10 * sizeof(double);
  EXPECT_EQ(whet_softmax(&data.in, &data.out, &options, &outputs, nullptr), WHET_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(whet_last_error()), "stats: overlaps lengths");
  options.lengths = reinterpret_cast<std::int64_t*>(memory.data() + 20);
  EXPECT_EQ(whet_softmax(&data.in, &data.out, &options, &outputs, nullptr), WHET_OK) << whet_last_error();

  whet_attention_options heads{};
  heads.struct_size = sizeof heads;
  heads.lengths = reinterpret_cast<std::int64_t*>(memory.data() + 19);
  heads.lengths_count = 1;
  whet_attention_outputs of_heads{};
  of_heads.struct_size = sizeof of_heads;
  of_heads.stats = stats;
  of_heads.stats_size = 10 * sizeof(double);
  EXPECT_EQ(whet_attention(&data.q, &data.q, &data.q, &data.o, &heads, &of_heads, nullptr),
            WHET_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(whet_last_error()), "stats: overlaps lengths");
  heads.lengths = reinterpret_cast<std::int64_t*>(memory.data() + 20);
  EXPECT_EQ(whet_attention(&data.q, &data.q, &data.q, &data.o, &heads, &of_heads, nullptr), WHET_OK)
      << whet_last_error();
}

TEST(CApiSaved, GradientsAreThoseOfFindingThemAgain) {
  Data data;
  whet_softmax_options options{};
  options.struct_size = sizeof options;
  options.rule = "paper";
  std::int64_t size = 0;
  ASSERT_EQ(whet_saved_size("none", nullptr, &size), WHET_OK);
  EXPECT_EQ(size, 3);
  ASSERT_EQ(whet_saved_size("target-entropy:1", nullptr, &size), WHET_OK);
  EXPECT_EQ(size, 4);
  ASSERT_EQ(whet_saved_size("paper", "hard", &size), WHET_OK);
  EXPECT_EQ(size, 3);
  ASSERT_EQ(whet_saved_size("paper", nullptr, &size), WHET_OK);
  EXPECT_EQ(size, 6);
  EXPECT_EQ(whet_saved_size("paper", nullptr, nullptr), WHET_INVALID_ARGUMENT);
  EXPECT_EQ(whet_saved_size("papper", nullptr, &size), WHET_INVALID_ARGUMENT);

  whet_softmax_backward_options backward{};
  backward.struct_size = sizeof backward;
  ASSERT_EQ(whet_softmax_backward(&data.in, &data.dout, &data.out, &options, &backward, nullptr), WHET_OK);
  const auto expected = data.y;
  std::array<float, 12> memory{};
  constexpr std::int64_t kSavedSizes[] = {2, 6};
  const whet_view saved{memory.data(), WHET_F32, 2, kSavedSizes, nullptr};
  whet_softmax_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.saved = backward.saved = &saved;
  ASSERT_EQ(whet_softmax(&data.in, &data.out, &options, &outputs, nullptr), WHET_OK) << whet_last_error();
  EXPECT_EQ(memory[0], 3);
  ASSERT_EQ(whet_softmax_backward(&data.in, &data.dout, &data.out, &options, &backward, nullptr), WHET_OK);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(data.y[i], expected[i], 1e-6);
}

TEST(CApiBackward, TheGradientToAParameterIsThatOfCpp) {
  Data data;
  whet_softmax_options options{};
  options.struct_size = sizeof options;
  options.normalizer = "entmax:1.3";
  whet_softmax_backward_options backward{};
  backward.struct_size = sizeof backward;
  std::array<double, 3> found{7, 7, 7}, expected{};
  backward.dparameter = found.data();
  ASSERT_EQ(whet_softmax_backward(&data.in, &data.dout, &data.out, &options, &backward, nullptr), WHET_OK)
      << whet_last_error();
  whet::softmax_backward({data.x.data(), {2, 3}}, {data.z.data(), {2, 3}}, {data.y.data(), {2, 3}},
                         {.normalizer = whet::Normalizer::parse("entmax:1.3")},
                         {.dparameter = std::span(expected).first(2)});
  EXPECT_NE(found[0], 0);
  EXPECT_EQ(found[0], expected[0]);
  EXPECT_EQ(found[1], expected[1]);
  EXPECT_EQ(found[2], 7);
  options.normalizer = nullptr;
  EXPECT_EQ(whet_softmax_backward(&data.in, &data.dout, &data.out, &options, &backward, nullptr),
            WHET_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(whet_last_error()).starts_with("dparameter: given, but the normalizer is softmax"));

  whet_attention_options heads{};
  heads.struct_size = sizeof heads;
  heads.normalizer = "entmax:1.3";
  whet_attention_gradients gradients{};
  gradients.struct_size = sizeof gradients;
  gradients.dparameter = found.data();
  found = {7, 7, 7};
  const whet_view dout{data.z.data(), WHET_F32, 4, kSizes, nullptr};
  ASSERT_EQ(whet_attention_backward(&data.q, &data.q, &data.q, &dout, &gradients, &heads, nullptr, nullptr),
            WHET_OK)
      << whet_last_error();
  EXPECT_NE(found[0], 7);
  EXPECT_NE(found[1], 7);
  EXPECT_EQ(found[2], 7);
}

TEST(CApiStats, ElementsThatAreNoneAreRefused) {
  Data data;
  std::array<whet_row_stats, 4> stats{};
  whet_softmax_outputs outputs{};
  outputs.struct_size = sizeof outputs;
  outputs.stats = stats.data();
  for (const std::size_t size : {std::size_t{0}, std::size_t{12}, sizeof(whet_row_stats) + 8}) {
    outputs.stats_size = size;
    EXPECT_EQ(whet_softmax(&data.in, &data.out, nullptr, &outputs, nullptr), WHET_INVALID_ARGUMENT);
    EXPECT_TRUE(std::string(whet_last_error()).starts_with("stats: stats_size is " + std::to_string(size)))
        << whet_last_error();
  }
}

// A number that was set without its flag would be ignored otherwise.
TEST(CApiNumbers, CountWithTheirFlagOnly) {
  const auto refused = [](const char* name, const std::function<void(whet_attention_options&)>& set) {
    Data data;
    whet_attention_options options{};
    options.struct_size = sizeof options;
    set(options);
    EXPECT_EQ(whet_attention(&data.q, &data.q, &data.q, &data.o, &options, nullptr, nullptr),
              WHET_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(whet_last_error()),
              std::string(name) + ": is given, but has_" + name + " is 0, must be 1");
  };
  refused("scale", [](auto& o) { o.scale = 0.5; });
  refused("skip_epsilon", [](auto& o) { o.skip_epsilon = 0.5; });
  refused("window_left", [](auto& o) { o.window_left = -1; });
  refused("window_right", [](auto& o) { o.window_right = 3; });
}

TEST(CApiNumbers, AScaleOfZeroIsZero) {
  Data data;
  whet_attention_options options{};
  options.struct_size = sizeof options;
  options.has_scale = 1;
  ASSERT_EQ(whet_attention(&data.q, &data.q, &data.q, &data.o, &options, nullptr, nullptr), WHET_OK);
  const std::array<float, 6> mean{1, 1.5F, 2, 1, 1.5F, 2};
  EXPECT_EQ(data.y, mean);
}

// ---- Executors ----

// Counts its calls in the context and leaves out `left_out` of the tasks.
template <int left_out>
void run_counted(void* context, int64_t tasks, int threads, whet_task task, void* data) {
  ++*static_cast<int*>(context);
  for (int64_t i = left_out; i < tasks; ++i) task(data, i, threads - 1);
}

TEST(CApiExecutor, RunsTheTasks) {
  constexpr std::int64_t kManyRows[] = {20, 2000};
  std::vector<float> x(40000), expected(40000), y(40000);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
  const whet_view in{x.data(), WHET_F32, 2, kManyRows, nullptr};
  const whet_view expected_out{expected.data(), WHET_F32, 2, kManyRows, nullptr};
  const whet_view out{y.data(), WHET_F32, 2, kManyRows, nullptr};
  ASSERT_EQ(whet_softmax(&in, &expected_out, nullptr, nullptr, nullptr), WHET_OK);

  int calls = 0;
  whet_execution execution{};
  execution.struct_size = sizeof execution;
  execution.executor_run = run_counted<0>;
  execution.executor_context = &calls;
  execution.executor_threads = 2;
  ASSERT_EQ(whet_softmax(&in, &out, nullptr, nullptr, &execution), WHET_OK) << whet_last_error();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(y, expected);

  execution.executor_run = run_counted<1>;
  EXPECT_EQ(whet_softmax(&in, &out, nullptr, nullptr, &execution), WHET_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(whet_last_error()).starts_with("executor: ran ")) << whet_last_error();

  execution.executor_threads = -1;
  EXPECT_EQ(whet_softmax(&in, &out, nullptr, nullptr, &execution), WHET_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(whet_last_error()).starts_with("executor.threads is -1")) << whet_last_error();
}

}  // namespace
