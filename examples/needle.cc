// One key among many matches the query. Plain attention loses it as keys are added; a rule keeps it.
#include <whet/whet.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

int main() {
  constexpr std::int64_t kSize = 16;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::printf("   keys   plain   paper   target-entropy:0.2   (the needle's value is 1, all others 0)\n");
  for (std::int64_t keys = 256; keys <= 65536; keys *= 4) {
    std::vector<float> q(kSize), k(static_cast<std::size_t>(keys * kSize)),
        v(static_cast<std::size_t>(keys), 0.0F);
    for (float& x : q) x = normal(random);
    for (float& x : k) x = normal(random);
    for (std::size_t i = 0; i < kSize; ++i) k[7 * kSize + i] = 2 * q[i];  // key 7 points where the query does
    v[7] = 1;
    std::printf("%7lld", static_cast<long long>(keys));
    for (const whet::Rule& rule :
         {whet::Rule::none(), whet::Rule::paper(), whet::Rule::target_entropy(0.2)}) {
      float out = 0;
      whet::attention({q.data(), {1, 1, 1, kSize}}, {k.data(), {1, 1, keys, kSize}},
                      {v.data(), {1, 1, keys, 1}}, {&out, {1, 1, 1, 1}}, {.rule = rule});
      std::printf("%8.3f", static_cast<double>(out));
    }
    std::printf("\n");
  }
}
