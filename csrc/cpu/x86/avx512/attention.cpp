// Attention over a chunk of keys with AVX-512.
#include "cpu/attention_chunk.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 16;
  typedef float Floats __attribute__((vector_size(64)));
  static Floats load(const void* data, int64_t index, DType dtype, int64_t count) {
    return load16(data, index, dtype, first(count));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats exponential(Floats v) { return cpu::exponential(v); }
  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
  static void add_up(const Floats (&v)[4], float* to) {
    const auto join = [](__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    };
    const __m512d first = _mm512_castps_pd(join(v[0], v[2])), second = _mm512_castps_pd(join(v[1], v[3]));
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(to, _mm_permute_ps(sums, _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

}  // namespace

const AttentionKernels avx512::kAttention = {Attention<Simd>::floats, Attention<Simd>::chunk};

}  // namespace qao::cpu
