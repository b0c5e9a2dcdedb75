// float32_w8_gemm.h with NEON.
#include "cpu/arm/simd.h"
#include "qao/types.h"

namespace qao::cpu {
namespace {

struct Simd {
  using Vector = float32x4_t;
  static constexpr int kLanes = 4, kColumns = 16;
  static constexpr int kRowsX = 4, kDirectRows = 4;  // registers: 16 sums, 4 of W and one of x

  static Vector zero() { return vdupq_n_f32(0); }
  static Vector load(const float* values) { return vld1q_f32(values); }
  static void store(float* values, Vector v) { vst1q_f32(values, v); }
  static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
  static Vector multiply(Vector a, Vector b) { return vmulq_f32(a, b); }
  static Vector broadcast(float value) { return vdupq_n_f32(value); }
  static Vector load_values(const void* data, int64_t index, DType dtype, int64_t count) {
    return load_first(data, index, dtype, count);
  }
  static void store_values(void* data, int64_t index, DType dtype, Vector v, int64_t count) {
    store_first(data, index, dtype, v, count);
  }
  static Vector lane_sums(const Vector (&a)[4]) { return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])); }

  template <Format kFormat>
  __attribute__((always_inline)) static void expand(const uint8_t* weight, Vector (&out)[4]) {
    for (int i = 0; i < 2; ++i) {
      float32x4_t values[2];
      kFormat == Format::kInt8 ? expand_int8(vld1_u8(weight + 8 * i), values)
                               : expand_fp8(vld1_u8(weight + 8 * i), values);
      out[2 * i] = values[0], out[2 * i + 1] = values[1];
    }
  }
  template <Format kFormat>
  static void reorder(Vector (&)[4]) {}
};

}  // namespace
}  // namespace qao::cpu

#include "cpu/float32_w8_gemm.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void neon::pack_float32(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? pack<Format::kInt8>(job, begin, end) : pack<Format::kFp8>(job, begin, end);
}
void neon::float32_w8_gemm(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? run<Format::kInt8>(job, begin, end) : run<Format::kFp8>(job, begin, end);
}

}  // namespace qao::cpu
