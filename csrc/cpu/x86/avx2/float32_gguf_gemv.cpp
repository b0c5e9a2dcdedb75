// GGUF W by a few rows of float x: 256 columns of a row of W in float32 meet every row of x.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx2/gguf_floats.h"

namespace qao::cpu {
namespace {

using namespace gguf;

constexpr int kLanes = 8, kSums = 4;

// sums[lane] += w[k] * x[k] over whole blocks of 32 columns.
__attribute__((always_inline)) inline void add_products(const float* w, const float* x, int64_t columns, float* sums) {
  __m256 parts[kSums] = {_mm256_load_ps(sums), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t k = 0; k < columns; k += kSums * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
      parts[i] = _mm256_fmadd_ps(_mm256_load_ps(w + k + i * kLanes), _mm256_load_ps(x + k + i * kLanes), parts[i]);
    }
  }
  _mm256_store_ps(sums, _mm256_add_ps(_mm256_add_ps(parts[0], parts[1]), _mm256_add_ps(parts[2], parts[3])));
}

template <Type kType>
void run(const Job& job, int64_t begin, int64_t end) {
  const int64_t x_row = job.tiles_k * kTileColumns;
  float* sums = static_cast<float*>(scratch(Scratch::kSums, job.m * kLanes * int64_t{sizeof(float)}));
  for (int64_t n = begin * kTileRows; n < least(end * kTileRows, job.n); ++n) {
    for (int64_t i = 0; i < job.m * kLanes; ++i) sums[i] = 0;
    const uint8_t* row = job.weight + n * job.row_bytes;
    for (int64_t k = 0; k < job.k; k += kUnit) {
      alignas(32) float w[kUnit];
      const int64_t columns = least(kUnit, job.k - k);
      to_floats<kType>(row + k / Blocks<kType>::kColumns * Blocks<kType>::kBytes, columns, w);
      for (int64_t m = 0; m < job.m; ++m) add_products(w, job.float32 + m * x_row + k, columns, sums + m * kLanes);
    }
    const float bias = job.bias != nullptr ? load(job.bias, n, job.bias_dtype) : 0.0f;
    for (int64_t m = 0; m < job.m; ++m) {
      float sum = 0;
      for (int i = 0; i < kLanes; ++i) sum += sums[m * kLanes + i];
      store(job.y, m * job.n + n, job.y_dtype, sum + bias);
    }
  }
}

}  // namespace

void avx2::float32_gguf_gemv(const Job& job, int64_t begin, int64_t end) {
  with_type(job.gguf_type, [&]<Type kType> { run<kType>(job, begin, end); });
}

}  // namespace qao::cpu
