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
};

}  // namespace

const AttentionKernels avx512::kAttention = {Attention<Simd>::floats, Attention<Simd>::chunk};

}  // namespace qao::cpu
