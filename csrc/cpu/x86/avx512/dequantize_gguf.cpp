// Dequantization of GGUF rows, with the roundings of the formats' definition.
#include "cpu/gguf.h"
#include "cpu/x86/avx512/gguf_unpack.h"

namespace qao::cpu {
namespace {

using namespace gguf;

template <Type kType>
void dequantize(const uint8_t* row, int64_t k, DType dtype, void* out) {
  using B = Blocks<kType>;
  constexpr Segments kOrder = segment_order(kType);
  for (int64_t first = 0; first < k; first += kUnit, row += kUnitBytes<kType>) {
    const int64_t columns = least(kUnit, k - first);
    uint8_t padded[kUnitBytes<kType>];
    Unit unit;
    Unpack<kType>::unpack(whole_unit<kType>(row, columns / B::kColumns * B::kBytes, padded), &unit);
    const SegmentScales<kType> scales(unit);
#pragma GCC unroll 16
    for (int i = 0; i < kUnitSegments; ++i) {
      const int segment = kOrder.of[i];
      if (segment * kSegment >= columns) continue;
      __m512 w = _mm512_mul_ps(scales.scale(segment), numbers_of<kType>(unit, i));
      if constexpr (B::kHasMinima) w = _mm512_sub_ps(w, scales.minimum(segment));
      qao::cpu::store16(out, first + segment * kSegment, dtype, w, 0xFFFF);
    }
  }
}

}  // namespace

void avx512::dequantize_gguf(int64_t type, const uint8_t* row, int64_t k, DType dtype, void* out) {
  with_type(static_cast<int>(type), [&]<Type kType> { dequantize<kType>(row, k, dtype, out); });
}

}  // namespace qao::cpu
