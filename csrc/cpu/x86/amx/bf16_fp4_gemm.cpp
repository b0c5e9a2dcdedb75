// fp4 weight policy of bf16_gemm.h.
// A code times its scale is exact in bfloat16, so C accumulates over all of K for any dtype of x.
//
// As in bf16_int4_gemm.cpp, `vpermw` looks up words of four nibbles in a table of 32 entries: 16 entries stored twice
// with groups of 32, or those of two groups with groups of 16. The fifth bit of the index then selects the half of the
// section.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/amx/bf16_gemm.h"
#include "cpu/x86/avx512/fp4.h"
#include "cpu/x86/avx512/int4_parameters.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;

// Scales of the groups of a section, 16 rows each.
struct Scales {
  alignas(64) float values[2][kTileN];
};

// A scalar in memory broadcasts for free; see keep_in_memory().
void load_scales(const Job& job, int64_t tile_n, int64_t first, int count, Scales* scales) {
  for (int i = 0; i < count; ++i) {
    _mm512_store_ps(scales->values[i], load_fp4_scales(job, tile_n, least(first + i, job.groups - 1)));
  }
  asm volatile("" ::"r"(scales) : "memory");
}

template <int kPartsOfX, int kGroups>
struct Fp4 {
  static constexpr int kParts = kPartsOfX;
  static constexpr bool kHalves = true, kSectioned = false, kScaledX = true;

  template <int, bool>
  __attribute__((always_inline)) static void expand(const Job& job, int64_t tile_n, int, const Section& section,
                                                    uint16_t* out) {
    Scales scales;
    load_scales(job, tile_n, (2 * section.tile + section.half) * kGroups, kGroups, &scales);
    const uint8_t* weight = job.weight + (tile_n * job.tiles_k + section.tile) * kTileBytes;
    for (int g = 0; g < 8; ++g) {
      if (section.half == 0) _mm_prefetch(weight + g * 64 + kPrefetchBytes, _MM_HINT_T0);
      const __m512i bytes = _mm512_loadu_si512(weight + g * 64);
      // Duplicates 64 bits in every 128-bit lane: once for even bytes, once for odd ones.
      const __m512i words =
          section.half == 0 ? _mm512_unpacklo_epi64(bytes, bytes) : _mm512_unpackhi_epi64(bytes, bytes);
      const __m512i even_odd = _mm512_mask_srli_epi16(words, 0xF0F0F0F0u, words, 8);
      _mm512_store_si512(out + g * 32, look_up(even_odd, scales, g));
      _mm512_store_si512(out + (g + 8) * 32, look_up(_mm512_srli_epi16(even_odd, 4), scales, g + 8));
    }
  }

  static void add_section(const Job&, int64_t, int64_t, int64_t, const float*, float*) {}

  static __m512 row_scales(const Job& job, int64_t n, __mmask16) { return fp4_row_factors(job, n / kTileN); }

 private:
  __attribute__((always_inline)) static __m512i look_up(__m512i words, const Scales& scales, int row) {
    const __m512 first = _mm512_mul_ps(fp4_values(), _mm512_set1_ps(scales.values[0][row]));
    if constexpr (kGroups == 1) {
      return _mm512_permutexvar_epi16(words, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(first, first)));
    } else {
      const __m512 second = _mm512_mul_ps(fp4_values(), _mm512_set1_ps(scales.values[1][row]));
      const __m512i half = _mm512_set1_epi64(0x0010001000000000);
      const __m512i index = _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(0x0F), half, 0xEA);  // (a & b) | c
      return _mm512_permutexvar_epi16(index, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
    }
  }
};

}  // namespace

void amx::bf16_fp4_gemm(const Job& job, int64_t begin, int64_t end) {
  with_parts(job, [&]<int kParts>() {
    job.group_size == fp4::kNvGroup ? run_gemm<Fp4<kParts, 2>>(job, begin, end)
                                    : run_gemm<Fp4<kParts, 1>>(job, begin, end);
  });
}

}  // namespace qao::cpu
