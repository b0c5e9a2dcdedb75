// Dequantization of GGUF rows, with the roundings of the formats' definition.
#include "cpu/gguf.h"
#include "cpu/x86/avx512/gguf_unpack.h"

namespace qao::cpu {
namespace {

using namespace gguf;

template <Type kType>
void dequantize(const uint8_t* row, int64_t k, DType dtype, void* out) {
  using B = Blocks<kType>;
  using U = Unpack<kType>;
  constexpr Segments kOrder = segment_order(kType);
  constexpr int64_t kBytes = kUnit / B::kColumns * B::kBytes;
  for (int64_t first = 0; first < k; first += kUnit, row += kBytes) {
    const int64_t columns = least(kUnit, k - first);
    uint8_t padded[kBytes];
    const uint8_t* bytes = row;
    if (columns < kUnit) {
      std::memset(padded, 0, kBytes);
      std::memcpy(padded, row, static_cast<size_t>(columns / B::kColumns * B::kBytes));
      bytes = padded;
    }
    Unit unit;
    U::unpack(bytes, &unit);
    alignas(64) float scales[kUnitSegments], minima[kUnitSegments];
    _mm512_store_ps(scales, unit.scales);
    if constexpr (B::kHasMinima && !U::kPairs) _mm512_store_ps(minima, unit.minima);
#pragma GCC unroll 16
    for (int i = 0; i < kUnitSegments; ++i) {
      const int segment = kOrder.of[i];
      if (segment * kSegment >= columns) continue;
      const __m512i codes = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(unit.codes[i / 4], i % 4));
      const __m512 numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(B::kOffset)));
      __m512 w = _mm512_mul_ps(_mm512_set1_ps(scales[U::kPairs ? segment / 2 : segment]), numbers);
      if constexpr (B::kHasMinima) {
        w = _mm512_sub_ps(w, _mm512_set1_ps(U::kPairs ? scales[8 + segment / 2] : minima[segment]));
      }
      qao::cpu::store16(out, first + segment * kSegment, dtype, w, 0xFFFF);
    }
  }
}

}  // namespace

void avx512::dequantize_gguf(int64_t type, const uint8_t* row, int64_t k, DType dtype, void* out) {
  with_type(static_cast<int>(type), [&]<Type kType> { dequantize<kType>(row, k, dtype, out); });
}

}  // namespace qao::cpu
