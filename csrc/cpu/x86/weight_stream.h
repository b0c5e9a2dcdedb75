// Prefetch of W, which is read once and in order. A single stream of 4 KB pages leaves the memory half idle, so while
// four N-tiles are used, the next four are fetched into L2 side by side. `static`: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "int4/layout.h"

namespace qao::cpu {

class WeightStream {
 public:
  // For the N-tile that is `index` tiles behind `weight`; tiles_k K-tiles long.
  WeightStream(const uint8_t* weight, int64_t index, int64_t tiles_k)
      : row_bytes_(tiles_k * int4::kTileBytes),
        next_(weight + (index / kStreams + 1) * kStreams * row_bytes_ + index % kStreams * (row_bytes_ / kStreams)) {}

  // Once for every K-tile that is used. Reaching past the end of W is harmless.
  __attribute__((always_inline)) void fetch() {
#pragma GCC unroll 8
    for (int i = 0; i < kStreams; ++i) {
#pragma GCC unroll 8
      for (int line = 0; line < int4::kTileBytes / kStreams; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(next_ + i * row_bytes_ + line), _MM_HINT_T1);
      }
    }
    next_ += int4::kTileBytes / kStreams;
  }

 private:
  static constexpr int kStreams = 4;
  int64_t row_bytes_;
  const uint8_t* next_;
};

}  // namespace qao::cpu
