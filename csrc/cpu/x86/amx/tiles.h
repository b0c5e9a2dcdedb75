// Wrappers of AMX instructions; tile registers are template arguments 0..7. `static`: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qao::cpu {

constexpr int kTileRegisterRows = 16;
constexpr int kTileRegisterBytes = 1024;

// Configures all eight registers as 16 rows of 64 bytes for a scope. Releases them at its end, which keeps the thread's
// context small.
class TileScope {
 public:
  TileScope() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    const Config config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
};

template <int kTile>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Loads 16 rows of 64 bytes, `stride` bytes apart.
template <int kTile>
static inline void tile_load(const void* data, int64_t stride = 64) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(data), "r"(stride) : "memory");
}
// The same with a non-temporal hint, for data in L2 that should not evict other data from L1.
template <int kTile>
static inline void tile_load_once(const void* data, int64_t stride = 64) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(data), "r"(stride) : "memory");
}
template <int kTile>
static inline void tile_store(void* data, int64_t stride = 64) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(data), "r"(stride) : "memory");
}

// c[16][16] += a[16][32] · b[32][16] in float32, b as pairs: [16][16][2].
template <int kC, int kA, int kB>
static inline void tile_multiply_bf16(void) {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// c[16][16] += a[16][64] · b[64][16] in int32, a unsigned and b signed bytes, b in fours: [16][16][4].
template <int kC, int kA, int kB>
static inline void tile_multiply_bytes(void) {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// The same for signed bytes.
template <int kC, int kA, int kB>
static inline void tile_multiply_signed_bytes(void) {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// Calls visit<n, m>() for each C tile of kN x kM, at most 2 x 2.
template <int kN, int kM>
__attribute__((always_inline)) static inline void each_c(auto&& visit) {
  visit.template operator()<0, 0>();
  if constexpr (kM == 2) visit.template operator()<0, 1>();
  if constexpr (kN == 2) visit.template operator()<1, 0>();
  if constexpr (kN == 2 && kM == 2) visit.template operator()<1, 1>();
}

}  // namespace qao::cpu
