// How the weight of the best key falls as keys are added, and what each rule makes of it.
#include <whet/whet.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

int main() {
  const std::vector<std::string> rules = {"none", "paper", "log-length:16", "target-entropy:0.2",
                                          "target-peak:0.9"};
  std::mt19937 generator(7);
  std::uniform_real_distribution<float> logit(-6, 6);
  std::printf("Weight of the largest of n logits, all within 12 of each other:\n%10s", "n");
  for (const std::string& rule : rules) std::printf("%20s", rule.c_str());
  std::printf("\n");
  for (std::int64_t n = 16; n <= 65536; n *= 8) {
    std::vector<float> x(static_cast<std::size_t>(n)), w(x.size());
    for (float& v : x) v = logit(generator);
    std::printf("%10lld", static_cast<long long>(n));
    for (const std::string& rule : rules) {
      whet::RowStats stats[1];
      whet::softmax({x.data(), {1, n}}, {w.data(), {1, n}}, {.rule = whet::Rule::parse(rule)},
                    {.stats = stats});
      std::printf("%9.4f (β %6.2f)", stats[0].sharp_peak, stats[0].beta);
    }
    std::printf("\n");
  }
}
