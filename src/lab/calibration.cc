#include "lab/calibration.h"

#include <Eigen/Dense>
#include <algorithm>
#include <numeric>

#include "lab/model.h"

namespace whet::lab {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Encoded items, one per row.
Matrix encode(const std::vector<float>& parameters, const Architecture& architecture, const Batch& batch) {
  const std::vector<double> exact(parameters.begin(), parameters.end());
  const Weighting weighting{};
  Head<double> head(architecture);
  head.forward(exact.data(), batch, std::span(&weighting, 1), Keep::encoded);
  return Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>(
      head.encoded_items().data(), batch.sets * batch.items, kWidth, Eigen::OuterStride<>(kStride));
}

// What the classes at priority 1 have beyond their mean.
Matrix class_differences(const std::vector<float>& parameters, const Architecture& architecture) {
  Batch batch{.sets = 1, .items = kClasses};
  batch.priorities.assign(kClasses, 1.0F);
  for (int c = 0; c < kClasses; ++c) batch.classes.push_back(static_cast<std::uint8_t>(c));
  batch.queries = {0.5F};
  batch.targets = {0};
  const Matrix encoded = encode(parameters, architecture, batch);
  return encoded.rowwise() - encoded.colwise().mean();
}

// Neighbours in priority among the top 0.4 % of one large set. What their classes are is not looked at.
Matrix pair_differences(const std::vector<float>& parameters, const Architecture& architecture,
                        std::uint64_t seed) {
  constexpr std::int64_t kItems = 1 << 20, kTop = 4096;
  Batch drawn;
  draw_sets(seed, Stream::calibration, kItems, 0, 1, drawn);
  std::vector<std::size_t> order(kItems);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + kTop, order.end(),
                    [&](std::size_t a, std::size_t b) { return drawn.priorities[a] > drawn.priorities[b]; });
  Batch top{.sets = 1, .items = kTop, .queries = drawn.queries, .targets = {0}};
  for (std::size_t i = 0; i < kTop; ++i) {
    top.priorities.push_back(drawn.priorities[order[i]]);
    top.classes.push_back(drawn.classes[order[i]]);
  }
  const Matrix encoded = encode(parameters, architecture, top);
  Matrix differences(kTop / 2, kWidth);
  for (Eigen::Index i = 0; i < kTop / 2; ++i)
    differences.row(i) = encoded.row(2 * i) - encoded.row(2 * i + 1);
  return differences;
}

// How many directions stand out: up to the widest gap between neighbouring eigenvalues, largest first. Those
// below a millionth of the first are what is left of differences in priority.
Eigen::Index widest_gap(const Eigen::VectorXd& eigenvalues) {
  constexpr Eigen::Index kMost = kWidth / 2;
  Eigen::Index best = 1;
  double widest = 0;
  for (Eigen::Index k = 1; k <= kMost; ++k) {
    const double gap = eigenvalues[k - 1] / std::max(eigenvalues[k], 1e-300);
    if (eigenvalues[k - 1] > 1e-6 * eigenvalues[0] && gap > widest) {
      widest = gap;
      best = k;
    }
  }
  return best;
}

}  // namespace

Calibration calibrate(const std::vector<float>& parameters, CalibrationMethod method, std::uint64_t seed,
                      const Architecture& architecture) {
  const bool labelled = method == CalibrationMethod::classes;
  const Matrix differences = labelled ? class_differences(parameters, architecture)
                                      : pair_differences(parameters, architecture, seed);
  const Matrix gram = differences.transpose() * differences;
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(gram);
  const Eigen::VectorXd eigenvalues = solver.eigenvalues().reverse();  // Eigen has the smallest first
  const Eigen::Index directions = labelled ? kClasses - 1 : widest_gap(eigenvalues);
  const Matrix basis = solver.eigenvectors().rightCols(directions);

  Calibration result{.parameters = parameters, .directions = directions};
  const Layer& layer = kModel[kK];
  Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>> kernel(
      result.parameters.data() + layer.kernel, layer.in, layer.out);
  const Matrix exact = kernel.cast<double>();
  kernel = (exact - basis * (basis.transpose() * exact)).cast<float>();
  result.text = std::string("K made blind to ") + std::to_string(directions) +
                " directions of encoded items, from " +
                (labelled ? "the ten classes at priority 1" : "pairs of items close in priority");
  return result;
}

}  // namespace whet::lab
