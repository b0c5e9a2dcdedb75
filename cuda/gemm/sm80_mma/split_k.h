// Split-K factor of the mma.sync kernels.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qao::gemm::sm80_mma {

// Split-K costs a second kernel and a round trip through memory. So it must fill otherwise idle slots among the `room`
// concurrent CTAs, and leave every split enough K-tiles for its pipeline of `pipeline` K-tiles.
inline int split_of(int64_t tiles, int64_t room, int64_t k_tiles, int64_t pipeline) {
  if (2 * tiles > room) return 1;
  return static_cast<int>(std::clamp<int64_t>(std::min(room / tiles, k_tiles / pipeline), 1, 32));
}

}  // namespace qao::gemm::sm80_mma
