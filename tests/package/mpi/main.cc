// One query over two equal keys per rank, whose values are 1, 2, ...
#include <mpi.h>
#include <whet/mpi.h>
#include <whet/whet.h>

#include <cstdio>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const float query[] = {1}, keys[] = {1, 1};
  const float first = static_cast<float>(2 * rank), values[] = {first + 1, first + 2};
  float out[1];
  whet::mpi::attention({query, {1, 1, 1, 1}}, {keys, {1, 1, 2, 1}}, {values, {1, 1, 2, 1}},
                       {out, {1, 1, 1, 1}}, {.rule = whet::Rule::paper()});
  if (rank == 0) std::printf("%d ranks: %g\n", ranks, static_cast<double>(out[0]));
  MPI_Finalize();
}
