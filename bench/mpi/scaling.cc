// Times whet::mpi on the ranks it is started with, a thread each, after a comparison with whet::attention.
// bench/mpi/__main__.py starts it and makes tables of the lines it prints, one JSON object per measurement.
#include <mpi.h>
#include <whet/mpi.h>
#include <whet/whet.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kSize = 64;
constexpr int kRounds = 5;

int rank = 0, ranks = 1;

struct Case {
  const char* name;
  std::int64_t heads, queries, keys;
  bool backward;
};

// Contiguous (1, heads, rows, kSize), the same numbers whichever part is asked for.
std::vector<float> draw(std::int64_t heads, std::int64_t rows, std::int64_t first, std::int64_t count,
                        unsigned seed) {
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(heads * count * kSize));
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t row = first; row < first + count; ++row) {
      std::minstd_rand random(seed + static_cast<unsigned>(head * rows + row));
      random.discard(3);
      std::normal_distribution<float> normal;
      for (std::int64_t i = 0; i < kSize; ++i) values.push_back(normal(random));
    }
  }
  return values;
}

whet::View view(std::vector<float>& values, std::int64_t heads, std::int64_t rows) {
  return {values.data(), whet::Dims{1, heads, rows, kSize}};
}

// The median of some rounds, each as long as on the slowest rank.
double seconds(const std::function<void()>& work) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    work();
    double own = MPI_Wtime() - begin, slowest = 0;
    MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    times.push_back(slowest);
  }
  std::ranges::sort(times);
  return times[kRounds / 2];
}

void print(const Case& c, const char* scheme, const std::string& rule, double time) {
  if (rank != 0) return;
  std::printf(R"({"case": "%s", "scheme": "%s", "rule": "%s", "keys": %lld, "ranks": %d, "seconds": %.6g})"
              "\n",
              c.name, scheme, rule.c_str(), static_cast<long long>(c.keys), ranks, time);
  std::fflush(stdout);
}

// Aborts unless both are the same but for rounding.
void compare(const std::vector<float>& got, const std::vector<float>& wanted, const char* what) {
  float difference = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    difference = std::max(difference, std::abs(got[i] - wanted[i]));
  if (difference <= 1e-4F) return;
  std::fprintf(stderr, "%s differs by %g\n", what, static_cast<double>(difference));
  MPI_Abort(MPI_COMM_WORLD, 1);
}

void measure(const Case& c, const std::string& rule) {
  const whet::AttentionOptions options{.rule = whet::Rule::parse(rule)};
  const auto share = [&](std::int64_t rows, int r) { return rows * r / ranks; };
  const std::int64_t first = share(c.keys, rank), count = share(c.keys, rank + 1) - first;
  const std::int64_t first_query = share(c.queries, rank),
                     own_queries = share(c.queries, rank + 1) - first_query;
  std::vector<float> q = draw(c.heads, c.queries, 0, c.queries, 1),
                     k = draw(c.heads, c.keys, first, count, 1U << 28),
                     v = draw(c.heads, c.keys, first, count, 2U << 28), dq = q, dk = k, dv = v;
  std::vector<float> out(q.size()), whole(q.size());
  const whet::View Q = view(q, c.heads, c.queries), K = view(k, c.heads, count), V = view(v, c.heads, count),
                   Out = view(out, c.heads, c.queries);
  const whet::AttentionGradients gradients{view(dq, c.heads, c.queries), view(dk, c.heads, count),
                                           view(dv, c.heads, count)};
  {  // on every rank, with all keys
    std::vector<float> all_k = draw(c.heads, c.keys, 0, c.keys, 1U << 28),
                       all_v = draw(c.heads, c.keys, 0, c.keys, 2U << 28), all_dk = all_k, all_dv = all_v;
    const whet::View AllK = view(all_k, c.heads, c.keys), AllV = view(all_v, c.heads, c.keys),
                     Whole = view(whole, c.heads, c.queries);
    const auto alone = [&] {
      whet::attention(Q, AllK, AllV, Whole, options);
      if (!c.backward) return;
      whet::attention_backward(
          Q, AllK, AllV, Whole,
          {view(dq, c.heads, c.queries), view(all_dk, c.heads, c.keys), view(all_dv, c.heads, c.keys)},
          options);
    };
    alone();
    if (ranks == 1) print(c, "one process", rule, seconds(alone));
  }
  const auto in_place = [&] {
    whet::mpi::Rows rows;
    whet::mpi::attention(Q, K, V, Out, options, {}, &rows);
    if (c.backward) whet::mpi::attention_backward(Q, K, V, Out, gradients, options, {}, {}, &rows);
  };
  in_place();
  compare(out, whole, "in place");
  print(c, "in place", rule, seconds(in_place));
  if (c.queries < ranks) return;
  std::vector<float> own_q = draw(c.heads, c.queries, first_query, own_queries, 1), own_out(own_q.size()),
                     own_dq(own_q.size());
  const whet::View OwnQ = view(own_q, c.heads, own_queries), OwnOut = view(own_out, c.heads, own_queries);
  const whet::AttentionGradients own_gradients{view(own_dq, c.heads, own_queries), view(dk, c.heads, count),
                                               view(dv, c.heads, count)};
  const auto ring = [&] {
    whet::mpi::Rows rows;
    whet::mpi::ring_attention(OwnQ, K, V, OwnOut, options, {}, &rows);
    if (c.backward)
      whet::mpi::ring_attention_backward(OwnQ, K, V, OwnOut, own_gradients, options, {}, {}, &rows);
  };
  ring();
  std::vector<float> own_whole;
  for (std::int64_t head = 0; head < c.heads; ++head) {
    const auto begin = whole.begin() + (head * c.queries + first_query) * kSize;
    own_whole.insert(own_whole.end(), begin, begin + own_queries * kSize);
  }
  compare(own_out, own_whole, "ring");
  print(c, "ring", rule, seconds(ring));
}

// Of messages between two ranks, which `whet scale` is given.
void measure_messages() {
  if (ranks < 2) return;
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{8} << 20}) {
    std::vector<char> buffer(bytes);
    const int times = bytes == 8 ? 2000 : 20;
    const double time = seconds([&] {
      for (int i = 0; i < times && rank < 2; ++i) {
        if (rank == 0) MPI_Send(buffer.data(), static_cast<int>(bytes), MPI_CHAR, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(buffer.data(), static_cast<int>(bytes), MPI_CHAR, 1 - rank, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(buffer.data(), static_cast<int>(bytes), MPI_CHAR, 0, 0, MPI_COMM_WORLD);
      }
    });
    if (rank == 0) {
      std::printf(R"({"case": "message", "bytes": %zu, "ranks": %d, "seconds": %.6g})"
                  "\n",
                  bytes, ranks, time / (2 * times));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  whet::set_threads(1);
  const std::int64_t keys = argc > 1 ? std::atoll(argv[1]) : 16384;
  measure_messages();
  for (const char* rule : {"none", "paper"}) {
    measure({"forward", 4, keys, keys, false}, rule);
    measure({"forward + backward", 4, keys, keys, true}, rule);
    measure({"decoding", 32, 1, keys, false}, rule);
    measure({"weak", 4, keys / 4, keys / 4 * ranks, false}, rule);  // keys grow with the ranks
  }
  MPI_Finalize();
}
