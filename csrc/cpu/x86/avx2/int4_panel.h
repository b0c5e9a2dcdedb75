// Panel of W's nibbles as bytes, 16 adjacent rows of W: [four k][16 rows][4 bytes].
// `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx2/simd.h"
#include "layout/int4.h"

namespace qao::cpu {

constexpr int kQuads = int4::kTileK / 4;  // panel rows of a K-tile

// Order of the quads: those of the first 32 columns of a K-tile come first, so that a group of 32 is a range.
static constexpr int quad_of(int visit) { return visit % 8 / 2 * 4 + visit / 8 * 2 + visit % 2; }

// Expands one tile of W to panel rows `stride` bytes apart.
[[maybe_unused]] static void expand_tile(const uint8_t* weight, uint8_t* panel, int64_t stride) {
  const __m256i mask = _mm256_set1_epi8(0x0F);
#pragma GCC unroll 16
  for (int part = 0; part < 2; ++part) {  // quads 8 part .. 8 part + 7 of the row pairs
    __m256i low[8], high[8];
#pragma GCC unroll 16
    for (int g = 0; g < 8; ++g) {
      const uint8_t* pair = weight + g * int4::kTileK;
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair + part * 32));
      low[g] = _mm256_and_si256(both, mask);
      high[g] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
    transpose8(low);
    transpose8(high);
#pragma GCC unroll 16
    for (int visit = 0; visit < kQuads; ++visit) {
      const int quad = quad_of(visit);
      if (quad / 8 != part) continue;
      __m256i* row = reinterpret_cast<__m256i*>(panel + visit * stride);
      _mm256_store_si256(row, low[quad % 8]);
      _mm256_store_si256(row + 1, high[quad % 8]);
    }
  }
}

}  // namespace qao::cpu
