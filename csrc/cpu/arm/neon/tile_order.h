// Reordering of bytes to the order of W within a K-tile. `static`: see numeric.h.
#pragma once

#include <arm_neon.h>

namespace qao::cpu {

// Converts four k-steps of 16 bytes each in natural order to one tile in the order of int4::tile_column(): of each step
// the fours of columns 2t, 2t + 8, 2t + 1, 2t + 9; those of one t are adjacent.
static inline void store_in_tile_order(const int8x16_t (&steps)[4], int8_t* out) {
  int32x4x4_t fours;
  for (int i = 0; i < 4; ++i) {
    fours.val[i] = vreinterpretq_s32_s8(vzip1q_s8(steps[i], vextq_s8(steps[i], steps[i], 8)));
  }
  vst4q_s32(reinterpret_cast<int32_t*>(out), fours);  // word t of every step, then word t + 1
}

}  // namespace qao::cpu
