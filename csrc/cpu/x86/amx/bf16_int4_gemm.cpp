// int4 weight policy of bf16_gemm.h.
//
// One 64-byte load of W is 32 words of four nibbles: rows g and g + 8, two columns each. `vpermw` with the word as
// index looks up a 32-entry table by the low five bits. A table of 16 entries stored twice makes the fifth bit
// irrelevant, so the four nibbles need shifts of 0, 4, 8, 12 and no mask.
//   x bfloat16 (1 part):          the table holds (q - zero) * scale, and C accumulates over all of K.
//   x float16, float32 (2, 3):    the table holds q - whole, exact, and every section ends with
//                                 y += scale * (C + (whole - zero) * sum(x)).
// `whole` is the zero point if that is an integer in 0..15, so that weights of 0 contribute nothing to any sum.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/amx/bf16_gemm.h"
#include "cpu/x86/avx512/int4_parameters.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;

// 32 bfloat16 entries, index q: (q - zero) * scale, twice.
__m512i table(float scale, float zero) {
  const __m512 q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 w = _mm512_mul_ps(_mm512_sub_ps(q, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(w, w));
}

__m512 whole_zeros(const Int4Parameters& parameters) {
  const __m512 zero = _mm512_load_ps(parameters.zero);
  const __m512 in_range = _mm512_max_ps(_mm512_min_ps(zero, _mm512_set1_ps(15)), _mm512_setzero_ps());
  return _mm512_roundscale_ps(in_range, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Parameters of the table of expand().
template <bool kSectioned>
void load_entries(const Job& job, int64_t tile_n, int64_t group, Int4Parameters* parameters) {
  load_parameters(job, tile_n, group, parameters);
  if constexpr (kSectioned) {
    _mm512_store_ps(parameters->zero, whole_zeros(*parameters));
    _mm512_store_ps(parameters->scale, _mm512_set1_ps(1));
    keep_in_memory(*parameters);
  }
}

__m512i look_up(__m512i words, __m512i entries) { return _mm512_permutexvar_epi16(words, entries); }

template <int kPartsOfX, bool kHalfTiles>
struct Int4 {
  static constexpr int kParts = kPartsOfX;
  static constexpr bool kHalves = kHalfTiles, kSectioned = kParts > 1, kScaledX = true;

  template <int, bool>
  __attribute__((always_inline)) static void expand(const Job& job, int64_t tile_n, int, const Section& section,
                                                    uint16_t* out) {
    Int4Parameters parameters;
    load_entries<kSectioned>(job, tile_n, section.group, &parameters);
    const uint8_t* weight = job.weight + (tile_n * job.tiles_k + section.tile) * kTileBytes;
    for (int g = 0; g < 8; ++g) {
      const int row0 = g * 32, row8 = (g + 8) * 32;
      const __m512i low = table(parameters.scale[g], parameters.zero[g]);
      const __m512i high = table(parameters.scale[g + 8], parameters.zero[g + 8]);
      if constexpr (kHalves) {
        const __m512i bytes = _mm512_loadu_si512(weight + g * 64);
        // Duplicates 64 bits in every 128-bit lane: once for even bytes, once for odd ones.
        const __m512i words =
            section.half == 0 ? _mm512_unpacklo_epi64(bytes, bytes) : _mm512_unpackhi_epi64(bytes, bytes);
        const __m512i even_odd = _mm512_mask_srli_epi16(words, 0xF0F0F0F0u, words, 8);
        _mm512_store_si512(out + row0, look_up(even_odd, low));
        _mm512_store_si512(out + row8, look_up(_mm512_srli_epi16(even_odd, 4), high));
      } else {
        for (int64_t t = 0; t < section.tiles; ++t) {
          const uint8_t* pair = weight + t * kTileBytes + g * 64;
          _mm_prefetch(pair + kPrefetchBytes, _MM_HINT_T0);
          const __m512i words = _mm512_loadu_si512(pair);
          uint16_t* even = out + t * 2 * kTileValues;
          uint16_t* odd = even + kTileValues;
          _mm512_store_si512(even + row0, look_up(words, low));
          _mm512_store_si512(even + row8, look_up(_mm512_srli_epi16(words, 4), high));
          _mm512_store_si512(odd + row0, look_up(_mm512_srli_epi16(words, 8), low));
          _mm512_store_si512(odd + row8, look_up(_mm512_srli_epi16(words, 12), high));
        }
      }
    }
  }

  // total += scale * (c + (whole - zero) * sums of x)
  static void add_section(const Job& job, int64_t tile_n, int64_t tile_m, int64_t s, const float* c, float* total) {
    Int4Parameters parameters;
    load_parameters(job, tile_n, s / job.sections_per_group, &parameters);
    _mm512_store_ps(parameters.zero, _mm512_sub_ps(whole_zeros(parameters), _mm512_load_ps(parameters.zero)));
    keep_in_memory(parameters);
    const __m512 sums = _mm512_load_ps(job.x_sums + (s * job.tiles_m + tile_m) * kRowsX);
    for (int n = 0; n < kTileN; ++n) {
      const __m512 shifted = _mm512_fmadd_ps(_mm512_set1_ps(parameters.zero[n]), sums, _mm512_load_ps(c + n * kRowsX));
      _mm512_store_ps(total + n * kRowsX, _mm512_fmadd_ps(_mm512_set1_ps(parameters.scale[n]), shifted,
                                                          _mm512_load_ps(total + n * kRowsX)));
    }
  }

  static __m512 row_scales(const Job&, int64_t, __mmask16) { return _mm512_set1_ps(1); }
};

}  // namespace

void amx::bf16_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  with_parts(job, [&]<int kParts>() {
    job.section == 32 ? run_gemm<Int4<kParts, true>>(job, begin, end) : run_gemm<Int4<kParts, false>>(job, begin, end);
  });
}

}  // namespace qao::cpu
