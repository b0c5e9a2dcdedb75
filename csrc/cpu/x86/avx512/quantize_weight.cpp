// Quantization of weight groups with AVX-512: sixteen lanes in one register.
#include "cpu/quantize_group.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {
namespace {

struct One {
  __m512 v;
  static One all(float value) { return {_mm512_set1_ps(value)}; }
  static One load(const float* values) { return {_mm512_loadu_ps(values)}; }
};

inline One add(One x, One y) { return {_mm512_add_ps(x.v, y.v)}; }
inline One sub(One x, One y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline One mul(One x, One y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline One div(One x, One y) { return {_mm512_div_ps(x.v, y.v)}; }
inline One least(One x, One y) { return {_mm512_min_ps(x.v, y.v)}; }
inline One largest(One x, One y) { return {_mm512_max_ps(x.v, y.v)}; }
inline float lowest_of(One x) { return _mm512_reduce_min_ps(x.v); }

// Written out, because the compiler may choose the order of a reduction.
inline float sum_of(One x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline void to_bytes(One x, uint8_t (&bytes)[kLanes]) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(_mm512_castps_si512(x.v)));
}

}  // namespace

const GroupKernels avx512::kGroups = group_kernels<One>;

}  // namespace qao::cpu
