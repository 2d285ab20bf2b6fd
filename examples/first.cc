#include <whet/whet.h>

#include <cstdio>
#include <vector>

int main() {
  std::vector<float> logits(1000, 0.0F), weights(1000);
  logits[7] = 5;  // one key should win
  whet::RowStats stats[1];
  whet::softmax({logits.data(), {1, 1000}}, {weights.data(), {1, 1000}},
                {.rule = whet::Rule::target_entropy(0.2)}, {.stats = stats});
  std::printf("weight of the winner: %.2f plain, %.2f at beta %.2f\n", stats[0].peak, weights[7],
              stats[0].beta);
}
