#include "lab/theorem.h"

#include <whet/attention.h>
#include <whet/error.h>
#include <whet/horizon.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <string>

#include "lab/random.h"

namespace whet::lab {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

void check(const TheoremConfig& config) {
  const auto require = [](bool ok, const char* name, std::int64_t given, const std::string& allowed) {
    if (!ok) throw Error(std::string(name) + ": is " + std::to_string(given) + ", must be " + allowed);
  };
  require(config.vocabulary >= 2 && config.vocabulary <= 1024, "vocabulary", config.vocabulary, "2 to 1024");
  require(config.layers >= 1 && config.layers <= 8, "layers", config.layers, "1 to 8");
  require(config.heads >= 1 && config.heads <= kTheoremWidth && kTheoremWidth % config.heads == 0, "heads",
          config.heads, "a divisor of " + std::to_string(kTheoremWidth));
  if (!(config.beta > 0 && std::isfinite(config.beta))) throw Error("beta: must be finite and above 0");
}

// ---- drawing the weights

std::vector<double> draw_normal(Random& random, std::int64_t count, double sd) {
  std::vector<double> values(size(count));
  for (double& value : values) {  // Box and Muller
    const double radius = std::sqrt(-2 * std::log(random.uniform()));
    value = sd * radius * std::cos(2 * std::numbers::pi * random.uniform());
  }
  return values;
}

Affine draw_affine(Random& random, std::int64_t in, std::int64_t out) {
  const double sd = 1 / std::sqrt(static_cast<double>(in));
  std::vector<double> kernel = draw_normal(random, in * out, sd);
  return {in, out, std::move(kernel), draw_normal(random, out, sd)};
}

TheoremLayer draw_layer(Random& random) {
  constexpr std::int64_t kWide = kTheoremWidth, kHidden = kTheoremHidden;
  TheoremLayer layer;
  for (Affine* map : {&layer.query, &layer.key, &layer.value, &layer.output}) {
    *map = draw_affine(random, kWide, kWide);
  }
  layer.up = draw_affine(random, kWide, kHidden);
  layer.down = draw_affine(random, kHidden, kWide);
  return layer;
}

// ---- running the model; x holds one row of the width for each entry of the sequence

std::vector<double> apply(const Affine& map, const std::vector<double>& x) {
  const std::size_t in = size(map.in), out = size(map.out), rows = x.size() / in;
  std::vector<double> y(rows * out);
  for (std::size_t row = 0; row < rows; ++row) {
    double* to = &y[row * out];
    std::copy(map.bias.begin(), map.bias.end(), to);
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t j = 0; j < out; ++j) to[j] += x[row * in + i] * map.kernel[i * out + j];
    }
  }
  return y;
}

void add(std::vector<double>& x, const std::vector<double>& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

double gelu(double x) { return x * std::erfc(-x / std::numbers::sqrt2) / 2; }

double scale_of(const TheoremConfig& config) {
  const std::int64_t depth = kTheoremWidth / config.heads;
  return config.beta / std::sqrt(static_cast<double>(depth));
}

// Attention of all heads, and how sharp each was. The first pass sees the logits of single tokens, the second
// counts how many tokens each stands for: a token's weight is e^(its logit) / (the sum over all tokens).
std::vector<double> attend(const TheoremConfig& config, const TheoremLayer& layer,
                           const std::vector<double>& x, const std::vector<double>& log_counts,
                           std::vector<HeadSharpness>& sharpness) {
  const std::int64_t heads = config.heads, depth = kTheoremWidth / heads;
  const std::int64_t rows = static_cast<std::int64_t>(log_counts.size());
  const std::vector<double> q = apply(layer.query, x), k = apply(layer.key, x), v = apply(layer.value, x);
  std::vector<double> out(x.size());
  const Dims sizes{1, heads, rows, depth}, strides{0, depth, kTheoremWidth, 1};
  const auto head_view = [&](const std::vector<double>& y) { return ConstView(y.data(), sizes, strides); };

  std::vector<RowStats> single(size(heads * rows)), counted(single.size());
  AttentionOptions options{.scale = scale_of(config)};
  const auto run = [&](std::span<RowStats> stats) {
    attention(head_view(q), head_view(k), head_view(v), {out.data(), sizes, strides}, options,
              {.stats = stats});
  };
  run(single);
  options.bias = {log_counts.data(), {1, 1, 1, rows}};
  run(counted);

  for (std::int64_t head = 0; head < heads; ++head) {
    HeadSharpness sharpest{0, 0};
    for (std::size_t row = size(head * rows); row < size((head + 1) * rows); ++row) {
      const double weight = std::exp(single[row].max - counted[row].log_sum_exp);
      sharpest.largest_weight = std::max(sharpest.largest_weight, weight);
      sharpest.spread = std::max(sharpest.spread, single[row].spread);
    }
    sharpness.push_back(sharpest);
  }
  return apply(layer.output, out);
}

// ---- bounding the model

double norm(std::span<const double> x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

// |x kernel + bias| <= gain |x| + offset, for all columns or for those of one head.
struct Growth {
  double gain;
  double offset;

  double operator()(double input) const { return gain * input + offset; }
};

Growth growth(const Affine& map, std::int64_t first, std::int64_t columns) {
  return {largest_singular_value({map.kernel.data() + first, {map.in, columns}, {map.out, 1}}),
          norm(std::span(map.bias).subspan(size(first), size(columns)))};
}

Growth growth(const Affine& map) { return growth(map, 0, map.out); }

}  // namespace

TheoremModel draw_theorem_model(const TheoremConfig& config) {
  check(config);
  Random random(config.seed, Stream::theorem, 0);
  TheoremModel model{config, draw_normal(random, config.vocabulary * kTheoremWidth, 1), {}};
  for (std::int64_t i = 0; i < config.layers; ++i) model.layers.push_back(draw_layer(random));
  return model;
}

std::vector<Tokens> needle_sequence(std::int64_t vocabulary, std::int64_t n) {
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // counts are exact as doubles
  if (n < 2 || n > kMost) throw Error("sizes: " + std::to_string(n) + " tokens, must be 2 to 2^53");
  std::vector<Tokens> sequence = {{0, 1}};
  const std::int64_t others = vocabulary - 1, turns = (n - 1) / others, rest = (n - 1) % others;
  for (std::int64_t symbol = 1; symbol < vocabulary; ++symbol) {
    const std::int64_t count = turns + (symbol <= rest ? 1 : 0);
    if (count > 0) sequence.push_back({symbol, count});
  }
  return sequence;
}

std::vector<HeadSharpness> measure_heads(const TheoremModel& model, std::span<const Tokens> sequence) {
  std::vector<double> x, log_counts;
  for (const auto& [symbol, count] : sequence) {
    const auto embedding = model.embeddings.begin() + symbol * kTheoremWidth;
    x.insert(x.end(), embedding, embedding + kTheoremWidth);
    log_counts.push_back(std::log(static_cast<double>(count)));
  }
  std::vector<HeadSharpness> sharpness;
  for (const TheoremLayer& layer : model.layers) {
    add(x, attend(model.config, layer, x, log_counts, sharpness));
    std::vector<double> hidden = apply(layer.up, x);
    for (double& value : hidden) value = gelu(value);
    add(x, apply(layer.down, hidden));
  }
  return sharpness;
}

std::vector<double> implied_spreads(const TheoremModel& model) {
  const std::int64_t heads = model.config.heads, depth = kTheoremWidth / heads;
  double largest = 0;  // norm of a row that may enter the layer
  for (std::int64_t symbol = 0; symbol < model.config.vocabulary; ++symbol) {
    largest = std::max(
        largest,
        norm(std::span(model.embeddings).subspan(size(symbol * kTheoremWidth), size(kTheoremWidth))));
  }
  std::vector<double> spreads;
  for (const TheoremLayer& layer : model.layers) {
    // A head's output is at most as long as its longest value. Heads may choose different tokens, so of all
    // heads together it is the squares that add up; the longest value of a single token would be no bound.
    double attended = 0;
    for (std::int64_t head = 0; head < heads; ++head) {
      const Growth query = growth(layer.query, head * depth, depth),
                   key = growth(layer.key, head * depth, depth);
      spreads.push_back(spread_bound({.query_gain = query.gain,
                                      .query_bias = query.offset,
                                      .query_input = largest,
                                      .key_gain = key.gain,
                                      .key_input = largest,
                                      .scale = scale_of(model.config)}));
      const double value = growth(layer.value, head * depth, depth)(largest);
      attended += value * value;
    }
    largest += growth(layer.output)(std::sqrt(attended));
    largest += growth(layer.down)(growth(layer.up)(largest));  // |gelu(x)| <= |x|
  }
  return spreads;
}

}  // namespace whet::lab
