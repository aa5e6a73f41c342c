#include <cstring>

#include "kernels.h"

namespace revrnn {
namespace {

// The tiers this machine runs, best first. A tier's own code is not touched before its
// instructions are known to be there.
int runnable(const Tier* found[3]) {
  int n = 0;
#ifdef REVRNN_HAVE_X86_TIERS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) found[n++] = &tier_avx512();
  if (avx2) found[n++] = &tier_avx2();
#endif
  found[n++] = &tier_baseline();
  return n;
}

}  // namespace

const Tier* find_tier(const char* name) {
  const Tier* found[3];
  const int n = runnable(found);
  for (int i = 0; i < n; ++i) {
    if (std::strcmp(found[i]->name, name) == 0) return found[i];
  }
  return nullptr;
}

int available_tiers(const char* names[3]) {
  const Tier* found[3];
  const int n = runnable(found);
  for (int i = 0; i < n; ++i) names[i] = found[i]->name;
  return n;
}

}  // namespace revrnn
