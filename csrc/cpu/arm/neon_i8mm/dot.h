// Byte dot products with `smmla`: two rows of W by two rows of bytes, eight columns at a time.
// Has the interface of LaneDot.
#pragma once

#include "cpu/arm/neon_dotprod/dot.h"

namespace qao::cpu {
namespace {

struct MatrixDot {
  template <int kRows, int kV>
  struct Sums {
    static_assert(kRows % 4 == 0 && kV % 2 == 0);
    int32x4_t products[2][kRows / 2][kV / 2];  // first and last eight columns of 16; w0 x0, w0 x1, w1 x0, w1 x1

    Sums() {
      for (auto& half : products) {
        for (auto& row : half) {
          for (int32x4_t& sum : row) sum = vdupq_n_s32(0);
        }
      }
    }
    __attribute__((always_inline)) void add(const int8x16_t (&w)[kRows], const int8x16_t (&x)[kV]) {
      int8x16_t low[kV / 2], high[kV / 2];
#pragma GCC unroll 2
      for (int v = 0; v < kV / 2; ++v) pair(x[2 * v], x[2 * v + 1], &low[v], &high[v]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows / 2; ++r) {
        int8x16_t w_low, w_high;
        pair(w[2 * r], w[2 * r + 1], &w_low, &w_high);
#pragma GCC unroll 2
        for (int v = 0; v < kV / 2; ++v) {
          products[0][r][v] = vmmlaq_s32(products[0][r][v], w_low, low[v]);
          products[1][r][v] = vmmlaq_s32(products[1][r][v], w_high, high[v]);
        }
      }
    }
    template <int kHalf>
    int32x4_t half(int quad, int v) const {
      const int32x4_t a = products[kHalf][2 * quad][v / 2], b = products[kHalf][2 * quad + 1][v / 2];
      return v % 2 == 0 ? vuzp1q_s32(a, b) : vuzp2q_s32(a, b);
    }
    int32x4_t all(int quad, int v) const { return vaddq_s32(half<0>(quad, v), half<1>(quad, v)); }

    static void pair(int8x16_t a, int8x16_t b, int8x16_t* low, int8x16_t* high) {
      *low = vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
      *high = vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
    }
  };
  template <int kRows>  // `smmla` would waste half of each product
  struct Sums<kRows, 1> : LaneDot<Sdot>::Sums<kRows, 1> {};
};

}  // namespace
}  // namespace qao::cpu
