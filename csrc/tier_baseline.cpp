#define REVRNN_TIER baseline
#include "vec_baseline.h"

#include "tier.inc"

namespace revrnn {
const Tier& tier_baseline() {
  using namespace baseline;
  static const Tier tier{"baseline", packed_floats, pack, scratch_floats, forward, reverse, backprop};
  return tier;
}
}  // namespace revrnn
