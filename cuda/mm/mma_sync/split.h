// How many CTAs share an output tile of the mma.sync bodies.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qao::mm::mma_sync {

// Splitting K costs a second kernel and a trip through memory, so it must fill the places of `room` that would idle,
// and leave every part enough K-tiles to fill its pipeline, which holds `pipeline` of them.
inline int split_of(int64_t tiles, int64_t room, int64_t k_tiles, int64_t pipeline) {
  if (2 * tiles > room) return 1;
  return static_cast<int>(std::clamp<int64_t>(std::min(room / tiles, k_tiles / pipeline), 1, 32));
}

}  // namespace qao::mm::mma_sync
