// float32_w8_gemm.h with AVX-512.
#include "cpu/x86/avx512/expand.h"

namespace qao::cpu {
namespace {

struct Simd {
  using Vector = __m512;
  static constexpr int kLanes = 16, kColumns = 64;
  static constexpr int kRowsX = 6, kDirectRows = 6;  // registers: 24 sums, 4 of W, and operands

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* values) { return _mm512_load_ps(values); }
  static void store(float* values, Vector v) { _mm512_store_ps(values, v); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector broadcast(float value) { return _mm512_set1_ps(value); }
  static Vector load_values(const void* data, int64_t index, DType dtype, int64_t count) {
    return load16(data, index, dtype, first(count));
  }
  static void store_values(void* data, int64_t index, DType dtype, Vector v, int64_t count) {
    store16(data, index, dtype, v, first(count));
  }
  static __m128 lane_sums(const Vector (&a)[4]) {
    const Vector pair01 = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const Vector pair23 = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const Vector four = _mm512_add_ps(_mm512_shuffle_ps(pair01, pair23, 0x44), _mm512_shuffle_ps(pair01, pair23, 0xEE));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
  }

  // int8 in order; e4m3 as bfloat16 pairs: of each 32 columns first the even ones, then the odd ones.
  template <Format kFormat>
  __attribute__((always_inline)) static void expand(const uint8_t* weight, Vector (&out)[4]) {
    if constexpr (kFormat == Format::kInt8) {
      for (int i = 0; i < 4; ++i) out[i] = widen_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight) + i));
    } else {
      __m512i pairs[2];
      expand_fp8(_mm512_loadu_si512(weight), pairs);
      for (int i = 0; i < 2; ++i) {
        out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16));
        out[2 * i + 1] =
            _mm512_castsi512_ps(_mm512_and_si512(pairs[i], _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
      }
    }
  }
  template <Format kFormat>
  static void reorder(Vector (&columns)[4]) {
    if constexpr (kFormat == Format::kInt8) return;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int i = 0; i < 4; i += 2) {
      const Vector evens = _mm512_permutex2var_ps(columns[i], even, columns[i + 1]);
      columns[i + 1] = _mm512_permutex2var_ps(columns[i], odd, columns[i + 1]);
      columns[i] = evens;
    }
  }
};

}  // namespace
}  // namespace qao::cpu

#include "cpu/float32_w8_gemm.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void avx512::pack_float32(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? pack<Format::kInt8>(job, begin, end) : pack<Format::kFp8>(job, begin, end);
}
void avx512::float32_w8_gemv(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? run<Format::kInt8>(job, begin, end) : run<Format::kFp8>(job, begin, end);
}

}  // namespace qao::cpu
