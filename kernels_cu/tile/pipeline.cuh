// Rings of shared-memory stages guarded by mbarriers, and the roles' places in them.
#pragma once
#include "types.cuh"
#include "ptx/ptx.cuh"

namespace cf {

// A place in a ring of kStages: the stage, and the parity of the phase that completes there next.
// A consumer waits on `full` with `phase`; a producer waits on `empty` with `phase ^ 1`, so that
// its first pass through the ring does not wait.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  CF_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The address of barrier `index` in an array of mbarriers.
CF_DEVICE saddr barrier_at(saddr barriers, int index) {
  return barriers + 8u * static_cast<uint32_t>(index);
}

}  // namespace cf
