// Scales and zero points of one N-tile and one group, ready to be broadcast row by row. `static`: see numeric.h.
#pragma once

#include "cpu/mm_job.h"
#include "cpu/x86/avx512/simd.h"
#include "int4_mm/layout.h"

namespace qao::cpu {

struct Parameters {
  alignas(64) float scale[int4_mm::kTileN], zero[int4_mm::kTileN];
};

// A scalar of memory broadcasts for free; without this the compiler permutes the registers that were stored there.
static inline void keep_in_memory(const Parameters& parameters) { asm volatile("" ::"r"(&parameters) : "memory"); }

static inline void load_parameters(const Job& job, int64_t tile_n, int64_t group, Parameters* parameters) {
  const int64_t offset = (tile_n * job.groups + group) * job.parameters * int4_mm::kTileN;
  _mm512_store_ps(parameters->scale, load16(job.scales, offset, job.scale_dtype));
  _mm512_store_ps(parameters->zero, job.parameters == 2 ? load16(job.scales, offset + int4_mm::kTileN, job.scale_dtype)
                                                        : _mm512_set1_ps(int4_mm::kSymmetricZero));
  keep_in_memory(*parameters);
}

}  // namespace qao::cpu
