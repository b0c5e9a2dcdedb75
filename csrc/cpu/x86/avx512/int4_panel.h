// Panel of W's nibbles for VNNI, 16 rows of W in the lanes of a register: [four k][16 rows][4 bytes].
// `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx512/simd.h"
#include "layout/int4.h"

namespace qao::cpu {

constexpr int kQuads = int4::kTileK / 4;                 // panel rows of a K-tile
constexpr int kTilePanel = int4::kTileN * int4::kTileK;  // bytes of a K-tile's panel

// Order of the quads: those of the first 32 columns of a K-tile come first, so that a group of 32 is a range.
static constexpr int quad_of(int visit) { return visit % 8 / 2 * 4 + visit / 8 * 2 + visit % 2; }

static inline __m512i broadcast_quad(const int8_t* bytes) {
  int32_t quad;
  __builtin_memcpy(&quad, bytes, 4);
  return _mm512_set1_epi32(quad);
}

// Expands one tile of W to panel rows `stride` bytes apart. Rows 8..15 hold 16 times their nibble.
static inline void expand_tile(const uint8_t* weight, uint8_t* panel, int64_t stride) {
  __m512i rows[int4::kTileN];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const uint8_t* row = weight + i % 4 * int4::kTileK + i / 4 * 32;
    const __m512i bytes = load_halves(row, row + 4 * int4::kTileK);
    rows[i + i / 4 * 4] = _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F));
    rows[i + i / 4 * 4 + 4] = _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0)));
  }
  halves_to_lanes(rows);
  lanes_to_quads(rows);
#pragma GCC unroll 16
  for (int visit = 0; visit < kQuads; ++visit) _mm512_store_si512(panel + visit * stride, rows[quad_of(visit)]);
}

}  // namespace qao::cpu
