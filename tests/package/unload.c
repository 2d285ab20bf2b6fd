/* The library loaded, used on several threads and unloaded, again and again, as a program does with a plugin:
 * its workers wait for the next call in code that must stay. Argument: the path of libwhet. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <whet/c_api.h>

enum { kRows = 64, kKeys = 4096, kRounds = 20 };

static float logits[kRows][kKeys], weights[kRows][kKeys];

static void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static void use(const char* path) {
  whet_status (*softmax)(const whet_view*, const whet_view*, const whet_softmax_options*,
                         const whet_softmax_outputs*, const whet_execution*);
  const int64_t sizes[2] = {kRows, kKeys};
  const whet_view in = {logits, WHET_F32, 2, sizes, NULL}, out = {weights, WHET_F32, 2, sizes, NULL};
  const whet_execution execution = {.struct_size = sizeof execution, .threads = 4};
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fail(dlerror());
  *(void**)&softmax = dlsym(library, "whet_softmax");
  weights[kRows - 1][kKeys - 1] = 0;
  if (softmax(&in, &out, NULL, NULL, &execution) != WHET_OK) fail("softmax failed");
  if (weights[kRows - 1][kKeys - 1] != 1.0f / kKeys) fail("softmax is wrong");
  if (dlclose(library) != 0) fail(dlerror());
  usleep(2000); /* workers go from looking for the next call to waiting for it */
}

int main(int count, char** arguments) {
  if (count != 2) fail("one argument, the path of libwhet, is needed");
  for (int round = 0; round < kRounds; ++round) use(arguments[1]);
  printf("unloaded %d times\n", kRounds);
  return 0;
}
