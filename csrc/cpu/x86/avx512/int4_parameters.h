// Scales and zero points of int4 W, per N-tile and group, ready to be broadcast row by row.
// `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx512/simd.h"
#include "layout/int4.h"

namespace qao::cpu {

// Scales and zero points of 16 rows of W.
struct GroupVectors {
  __m512 scale, zero;
};

static inline GroupVectors load_group(const Job& job, int64_t tile_n, int64_t group) {
  const int64_t at = (tile_n * job.groups + group) * job.parameters * int4::kTileN;
  return {load16(job.scales, at, job.scale_dtype), job.parameters == 2
                                                       ? load16(job.scales, at + int4::kTileN, job.scale_dtype)
                                                       : _mm512_set1_ps(int4::kSymmetricZero)};
}

// For W's unshifted bytes: `& 0x0F` is row g, `& 0xF0` is 16 times row g + 8. Rows 8..15 get 1/16 of the scale and 16
// times the zero point.
static inline GroupVectors for_shifted_rows(const GroupVectors& group) {
  constexpr __mmask16 kUpperRows = 0xFF00;
  return {_mm512_mask_mul_ps(group.scale, kUpperRows, group.scale, _mm512_set1_ps(1.0f / 16)),
          _mm512_mask_mul_ps(group.zero, kUpperRows, group.zero, _mm512_set1_ps(16))};
}

// GroupVectors in memory.
struct Int4Parameters {
  alignas(64) float scale[int4::kTileN], zero[int4::kTileN];
};

static inline void store_group(const GroupVectors& group, Int4Parameters* parameters) {
  _mm512_store_ps(parameters->scale, group.scale);
  _mm512_store_ps(parameters->zero, group.zero);
}

// A scalar in memory broadcasts for free; without this the compiler permutes the registers that were stored there.
static inline void keep_in_memory(const Int4Parameters& parameters) { asm volatile("" ::"r"(&parameters) : "memory"); }

static inline void load_parameters(const Job& job, int64_t tile_n, int64_t group, Int4Parameters* parameters) {
  store_group(load_group(job, tile_n, group), parameters);
  keep_in_memory(*parameters);
}

// Parameters of all groups, for shifted rows. Not inlined, for the same reason.
[[gnu::noinline, maybe_unused]] static void load_shifted_parameters(const Job& job, int64_t tile_n,
                                                                    Int4Parameters* parameters) {
  for (int64_t group = 0; group < job.groups; ++group) {
    store_group(for_shifted_rows(load_group(job, tile_n, group)), parameters + group);
  }
}

}  // namespace qao::cpu
