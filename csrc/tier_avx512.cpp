#define REVRNN_TIER avx512
#include "vec_avx512.h"

#include "tier.inc"

namespace revrnn {
const Tier& tier_avx512() {
  using namespace avx512;
  static const Tier tier{"avx512", packed_floats, pack, scratch_floats, forward, reverse, backprop};
  return tier;
}
}  // namespace revrnn
