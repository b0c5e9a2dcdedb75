// Byte dot products with lanes along K: kRows rows of W by kV rows of bytes.
// `Instruction::dot(sum, w, x)` adds to each 32-bit lane the products of its four bytes. The bytes of an int4 tile are
// ordered so that a lane is a k-step of 16 columns (int4::tile_column()).
#pragma once

#include <arm_neon.h>

namespace qao::cpu {
namespace {

template <typename Instruction>
struct LaneDot {
  template <int kRows, int kV>
  struct Sums {
    int32x4_t lanes[kRows][kV];

    Sums() {
      for (auto& row : lanes) {
        for (int32x4_t& sum : row) sum = vdupq_n_s32(0);
      }
    }
    __attribute__((always_inline)) void add(const int8x16_t (&w)[kRows], const int8x16_t (&x)[kV]) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) lanes[r][v] = Instruction::dot(lanes[r][v], w[r], x[v]);
      }
    }
    // Sums of rows 4 quad .. 4 quad + 3 with row of bytes v: over lanes 0 and 1, or 2 and 3, or all.
    template <int kHalf>
    int32x4_t half(int quad, int v) const {
      const auto* row = lanes + 4 * quad;
      const int32x4_t a = vpaddq_s32(row[0][v], row[1][v]), b = vpaddq_s32(row[2][v], row[3][v]);
      return kHalf == 0 ? vuzp1q_s32(a, b) : vuzp2q_s32(a, b);
    }
    // The same over one lane, a k-step of 16 columns.
    template <int kStep>
    int32x4_t step(int quad, int v) const {
      const auto* row = lanes + 4 * quad;
      const auto pair = [v](const auto& a, const auto& b) {
        return kStep % 2 == 0 ? vtrn1q_s32(a[v], b[v]) : vtrn2q_s32(a[v], b[v]);
      };
      const int32x4_t first = pair(row[0], row[1]), second = pair(row[2], row[3]);
      return kStep < 2 ? vcombine_s32(vget_low_s32(first), vget_low_s32(second))
                       : vcombine_s32(vget_high_s32(first), vget_high_s32(second));
    }
    int32x4_t all(int quad, int v) const {
      const auto* row = lanes + 4 * quad;
      return vpaddq_s32(vpaddq_s32(row[0][v], row[1][v]), vpaddq_s32(row[2][v], row[3][v]));
    }
  };
};

}  // namespace
}  // namespace qao::cpu
