// Prefetcher of W, which is read once and in order.
// A single stream of 4 KB pages leaves memory half idle. So while four N-tiles are used, the next four are prefetched
// into L2 concurrently. `static`: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "layout/int4.h"

namespace qao::cpu {

class WeightStream {
 public:
  // For the N-tile `index` tiles after `weight`, with tiles_k K-tiles.
  WeightStream(const uint8_t* weight, int64_t index, int64_t tiles_k)
      : row_bytes_(tiles_k * int4::kTileBytes),
        next_(weight + (index / kStreams + 1) * kStreams * row_bytes_ + index % kStreams * (row_bytes_ / kStreams)) {}

  // To be called once per K-tile used. Reaching past the end of W is harmless.
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
