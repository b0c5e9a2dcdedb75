// GGUF blocks as float32 with AVX2. `static`: see numeric.h.
#pragma once

#include "cpu/gguf_blocks.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu::gguf {
namespace {

// Whole blocks from `block` on, `columns` columns.
template <Type kType>
inline void to_floats(const uint8_t* block, int64_t columns, float* out) {
  using B = Blocks<kType>;
  for (int64_t k = 0; k < columns; k += B::kColumns, block += B::kBytes) {
    alignas(32) uint8_t codes[B::kColumns];
    float scale[B::kColumns / kSegment], minimum[B::kColumns / kSegment];
    B::codes(block, codes);
    B::scales(block, scale, minimum);
    for (int at = 0; at < B::kColumns; at += 8) {
      const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + at)));
      const __m256 number = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(B::kOffset)));
      __m256 w = _mm256_mul_ps(number, _mm256_set1_ps(scale[at / kSegment]));
      if constexpr (B::kHasMinima) w = _mm256_sub_ps(w, _mm256_set1_ps(minimum[at / kSegment]));
      _mm256_store_ps(out + k + at, w);
    }
  }
}

}  // namespace
}  // namespace qao::cpu::gguf
