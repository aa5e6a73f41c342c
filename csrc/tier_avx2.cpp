#define REVRNN_TIER avx2
#include "vec_avx2.h"

#include "tier.inc"

namespace revrnn {
const Tier& tier_avx2() {
  using namespace avx2;
  static const Tier tier{"avx2", packed_floats, pack, scratch_floats, forward, reverse, backprop};
  return tier;
}
}  // namespace revrnn
