// Attention over a chunk of keys on any CPU.
#include <cmath>

#include "cpu/attention_chunk.h"

namespace qao::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 1;
  typedef float Floats __attribute__((vector_size(4)));
  static Floats load(const void* data, int64_t index, DType dtype, int64_t) {
    return Floats{cpu::load(data, index, dtype)};
  }
  static Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
  static Floats exponential(Floats v) { return Floats{std::exp(v[0])}; }
  static float sum(Floats v) { return v[0]; }
  static void add_up(const Floats (&vectors)[4], float* to) {
    for (int i = 0; i < 4; ++i) to[i] = vectors[i][0];
  }
};

}  // namespace

const AttentionKernels scalar::kAttention = {Attention<Simd>::floats, Attention<Simd>::chunk};

}  // namespace qao::cpu
