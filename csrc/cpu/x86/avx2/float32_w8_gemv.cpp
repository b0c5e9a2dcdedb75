// float32_w8_gemm.h with AVX2.
#include "cpu/x86/avx2/expand.h"
#include "qao/types.h"

namespace qao::cpu {
namespace {

struct Simd {
  using Vector = __m256;
  static constexpr int kLanes = 8, kColumns = 16;
  static constexpr int kRowsX = 3, kDirectRows = 2;  // registers: 12 sums, 3 of x and one of W

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* values) { return _mm256_load_ps(values); }
  static void store(float* values, Vector v) { _mm256_store_ps(values, v); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector broadcast(float value) { return _mm256_set1_ps(value); }
  static Vector load_values(const void* data, int64_t index, DType dtype, int64_t count) {
    return load_first(data, index, dtype, count);
  }
  static void store_values(void* data, int64_t index, DType dtype, Vector v, int64_t count) {
    store_first(data, index, dtype, v, count);
  }
  static __m128 lane_sums(const Vector (&a)[4]) {
    const Vector four = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    return _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
  }

  template <Format kFormat>
  __attribute__((always_inline)) static void expand(const uint8_t* weight, Vector (&out)[2]) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight));
    kFormat == Format::kInt8 ? expand_int8(bytes, out) : expand_fp8(bytes, out);
  }
  template <Format kFormat>
  static void reorder(Vector (&)[2]) {}
};

}  // namespace
}  // namespace qao::cpu

#include "cpu/float32_w8_gemm.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void avx2::pack_float32(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? pack<Format::kInt8>(job, begin, end) : pack<Format::kFp8>(job, begin, end);
}
void avx2::float32_w8_gemv(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? run<Format::kInt8>(job, begin, end) : run<Format::kFp8>(job, begin, end);
}

}  // namespace qao::cpu
