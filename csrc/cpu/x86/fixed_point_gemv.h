// Shared parts of the gemv kernels of x in fixed point and 4-bit W.
// These are static dispatch over a chunk's parameters, and fp4 codes as bytes. Byte multiplication, and when the
// factors of a chunk are computed, differ by instruction set.
#pragma once

#include <immintrin.h>

#include "cpu/gemm/job.h"
#include "layout/fp4.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

constexpr int kPairs = 8;  // row pairs (g, g + 8) of a tile

// Operand byte of each fp4 code: twice the value, plus kFp4Zero.
constexpr int kFp4Zero = 12;
static inline __m128i fp4_bytes() { return _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0); }

// Calls run<format, words of every chunk, groups per K-tile, K-tiles per chunk>().
template <int kWords, typename Run>
void for_chunks_of(const Job& job, const Run& run) {
  if (job.weight_format == Format::kFp4) {
    return job.group_size == fp4::kMxGroup ? run.template operator()<Format::kFp4, kWords, 2, 1>()
                                           : run.template operator()<Format::kFp4, kWords, 4, 1>();
  }
  switch (job.section) {
    case 32:
      return run.template operator()<Format::kInt4, kWords, 2, 1>();
    case 64:
      return run.template operator()<Format::kInt4, kWords, 1, 1>();
    case 128:
      return run.template operator()<Format::kInt4, kWords, 1, 2>();
    default:
      return run.template operator()<Format::kInt4, kWords, 1, 4>();
  }
}
template <typename Run>
void for_chunks_of(const Job& job, const Run& run) {
  job.fixed_point.words == 1 ? for_chunks_of<1>(job, run) : for_chunks_of<2>(job, run);
}

}  // namespace
}  // namespace qao::cpu
