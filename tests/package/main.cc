#include <whet/whet.h>

#include <cstdio>

int main() {
  const float x[4] = {0, 0, 0, 0};
  float w[4];
  whet::softmax({x, {4}}, {w, {4}}, {.rule = whet::Rule::paper()});
  std::printf("%g %s\n", static_cast<double>(w[0]), whet::version().c_str());
}
