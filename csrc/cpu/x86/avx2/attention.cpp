// Attention over a chunk of keys with AVX2.
#include "cpu/attention_chunk.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 8;
  typedef float Floats __attribute__((vector_size(32)));
  static Floats load(const void* data, int64_t index, DType dtype, int64_t count) {
    return load_first(data, index, dtype, count);
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats exponential(Floats v) { return cpu::exponential(v); }
  static float sum(Floats v) { return lane_sum(v); }
  static void add_up(const Floats (&v)[4], float* to) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
};

}  // namespace

const AttentionKernels avx2::kAttention = {Attention<Simd>::floats, Attention<Simd>::chunk};

}  // namespace qao::cpu
