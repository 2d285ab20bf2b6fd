#include <whet/horizon.h>

#include "c_api/convert.h"

using namespace whet::c_api;  // NOLINT(google-build-using-namespace): this file is its C functions

whet_status whet_horizon(double spread, double weight, double beta, double* keys) {
  return guarded([&] { required(keys, "keys") = whet::horizon(spread, weight, beta); });
}

whet_status whet_largest_weight(double keys, double spread, double beta, double* weight) {
  return guarded([&] { required(weight, "weight") = whet::largest_weight(keys, spread, beta); });
}

whet_status whet_paper_bounds(double keys, double spread, double beta, double* lower, double* upper) {
  return guarded([&] {
    required(lower, "lower"), required(upper, "upper");
    const whet::WeightBounds bounds = whet::paper_bounds(keys, spread, beta);
    *lower = bounds.lower;
    *upper = bounds.upper;
  });
}

whet_status whet_largest_singular_value(const whet_view* matrix, double* value) {
  return guarded([&] {
    required(value, "value");
    *value = whet::largest_singular_value(view_of(matrix, "matrix"));
  });
}

whet_status whet_spread_bound(const whet_head_norms* norms, double* spread) {
  return guarded([&] {
    required(norms, "norms"), required(spread, "spread");
    const whet_head_norms n = known_part(norms, "norms");
    *spread = whet::spread_bound({.query_gain = n.query_gain,
                                  .query_bias = n.query_bias,
                                  .query_input = n.query_input,
                                  .key_gain = n.key_gain,
                                  .key_input = n.key_input,
                                  .scale = is_set(n.has_scale, n.scale, "scale") ? n.scale : 1});
  });
}
