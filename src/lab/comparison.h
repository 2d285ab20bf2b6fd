// Several experiments side by side: does one differ from another on the same seeds and sizes?
#ifndef WHET_LAB_COMPARISON_H_
#define WHET_LAB_COMPARISON_H_

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <vector>

namespace whet::lab {

// The paired t-test of a - b as results have it: "difference", its 95 % interval "low" to "high", and "p".
nlohmann::ordered_json difference_json(std::span<const double> a, std::span<const double> b);

// Every results object (docs/results.md) but the first against the first: "run" and "against", their places;
// "seeds", how many both have; "sizes", those that both have, with "items" and "rules": NAME to
// difference_json() over those seeds. Without a common seed there is no test, and the difference is that of
// the means.
nlohmann::ordered_json compare(const std::vector<const nlohmann::ordered_json*>& results);

}  // namespace whet::lab

#endif  // WHET_LAB_COMPARISON_H_
