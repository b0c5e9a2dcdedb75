// int4_mm with AMX: W expands to bfloat16 A tiles of 16 rows x 32 k, x is packed as B tiles (int4_pack_pairs_amx.cpp).
//
// One 64-byte load of W is 32 words of four nibbles: row g and g + 8, at two columns each. `vpermw` with the word as
// index looks up a 32-entry table by its low five bits; a table of 16 entries stored twice makes the fifth irrelevant,
// so the four nibbles need shifts of 0, 4, 8, 12 and no mask.
//   x bfloat16 (1 part):          the table holds (q - zero) * scale, and C accumulates over the whole of K.
//   x float16, float32 (2, 3):    the table holds q - 8, exact; every section ends with
//                                 y += scale * (C + (8 - zero) * sum(x)).
//
// Up to 16 rows of x: four N-tiles at once, C in registers along all of K.
// More: blocks of 512 N x 512 k (256 for x in several parts); 32 rows of W are expanded into L1 and meet all rows of x,
// 32 x 32 of C at a time.
#include <utility>

#include "cpu/amx.h"
#include "cpu/int4_kernels.h"
#include "cpu/parameters_avx512.h"
#include "cpu/scratch.h"
#include "cpu/simd_avx512.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::kTileBytes;
using int4_mm::kTileK;
using int4_mm::kTileN;

constexpr int kRowsX = 16;        // rows of x in a B tile
constexpr int kTileValues = 512;  // bfloat16 values of an A or B tile
constexpr int kTileSums = 256;    // float32 values of a C tile
constexpr int64_t kBlockTilesK = kBlockK / kTileK;
constexpr int64_t kBlockTilesN = 32;  // N-tiles whose C stays in L2
constexpr int kFewRowsTilesN = 4;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Where the section lies: its group, and the K-tiles [first, first + count) it covers (half of one if section is 32).
struct Section {
  Section(const Int4Job& job, int64_t s)
      : group(s / job.sections_per_group),
        tile(s * job.section / kTileK),
        tiles(least(job.section < kTileK ? 1 : job.section / kTileK, job.tiles_k - tile)),
        half(job.section < kTileK ? static_cast<int>(s % 2) : -1) {}

  int64_t group, tile, tiles;
  int half;
};

// 32 bfloat16 entries, index q: (q - zero) * scale, twice.
__m512i table(float scale, float zero) {
  const __m512 q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 w = _mm512_mul_ps(_mm512_sub_ps(q, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(w, w));
}

__m512i look_up(__m512i words, __m512i entries) { return _mm512_permutexvar_epi16(words, entries); }

// One section of an N-tile -> A tiles: two per K-tile (even and odd bytes), or one with sections of 32.
template <int kParts, bool kHalves>
__attribute__((always_inline)) inline void expand(const Int4Job& job, int64_t tile_n, const Section& section,
                                                  uint16_t* out) {
  Parameters parameters;
  if constexpr (kParts == 1) load_parameters(job, tile_n, section.group, &parameters);
  const uint8_t* weight = job.weight + (tile_n * job.tiles_k + section.tile) * kTileBytes;
  for (int g = 0; g < 8; ++g) {
    const int row0 = g * 32, row8 = (g + 8) * 32;
    const __m512i low = kParts == 1 ? table(parameters.scale[g], parameters.zero[g]) : table(1, 8);
    const __m512i high = kParts == 1 ? table(parameters.scale[g + 8], parameters.zero[g + 8]) : table(1, 8);
    if constexpr (kHalves) {
      const __m512i bytes = _mm512_loadu_si512(weight + g * 64);
      // Every 128-bit lane twice the same 64 bits: once for even bytes, once for odd ones.
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

// A tiles of a section, and the B tile that part `part` of A tile `i` meets.
template <bool kHalves>
int64_t a_tiles(const Section& section) {
  return kHalves ? 1 : 2 * section.tiles;
}
template <int kParts, bool kHalves>
const uint16_t* b_tile(const Int4Job& job, int64_t tile_m, const Section& section, int64_t i, int part) {
  const int64_t tile_k = kHalves ? section.tile : section.tile + i / 2;
  const int64_t e = kHalves ? section.half : i % 2;
  const int64_t in_block = (tile_k / kBlockTilesK * job.tiles_m + tile_m) * kBlockTilesK + tile_k % kBlockTilesK;
  return job.pairs + ((in_block * kParts + part) * 2 + e) * kTileValues;
}

// total[16 n][16 m] += scale * (c + (8 - zero) * sums of x), for exact tables.
void add_section(const Int4Job& job, int64_t tile_n, int64_t tile_m, int64_t s, const float* c, float* total) {
  Parameters parameters;
  load_parameters(job, tile_n, s / job.sections_per_group, &parameters);
  const __m512 sums = _mm512_load_ps(job.sums + (s * job.tiles_m + tile_m) * kRowsX);
  for (int n = 0; n < kTileN; ++n) {
    const __m512 shifted = _mm512_fmadd_ps(_mm512_set1_ps(int4_mm::kSymmetricZero - parameters.zero[n]), sums,
                                           _mm512_load_ps(c + n * kRowsX));
    _mm512_store_ps(total + n * kRowsX,
                    _mm512_fmadd_ps(_mm512_set1_ps(parameters.scale[n]), shifted, _mm512_load_ps(total + n * kRowsX)));
  }
}

// y = total + bias for one C tile [16 n][16 m].
void write_tile(const Int4Job& job, int64_t tile_n, int64_t tile_m, const float* total) {
  __m512i rows[kTileN];
  for (int n = 0; n < kTileN; ++n) rows[n] = _mm512_load_si512(total + n * kRowsX);
  transpose16(rows);
  const int64_t n = tile_n * kTileN, m = tile_m * kRowsX, count = least(kRowsX, job.m - m);
  const __mmask16 mask = first(job.n - n);
  const __m512 bias = job.bias != nullptr ? load16(job.bias, n, job.bias_dtype, mask) : _mm512_setzero_ps();
  for (int64_t i = 0; i < count; ++i) {
    store16(job.y, (m + i) * job.n + n, job.x_dtype, _mm512_add_ps(_mm512_castsi512_ps(rows[i]), bias), mask);
  }
}

// ---- up to 16 rows of x: registers 0..3 = C[n], 4 = A, 5..7 = parts of B ----

constexpr int64_t kPanelValues = kMaxSectionAmx * kTileN;

// C[kN...] += A tiles [begin, end) of section `s`. panels: [kN] of kPanelValues.
template <int kParts, bool kHalves, int... kN>
__attribute__((always_inline)) inline void multiply_few(const Int4Job& job, int64_t s, int64_t begin, int64_t end,
                                                        const uint16_t* panels, std::integer_sequence<int, kN...>) {
  const Section section(job, s);
  for (int64_t i = begin; i < end; ++i) {
    tile_load<5>(b_tile<kParts, kHalves>(job, 0, section, i, 0));
    if constexpr (kParts > 1) tile_load<6>(b_tile<kParts, kHalves>(job, 0, section, i, 1));
    if constexpr (kParts > 2) tile_load<7>(b_tile<kParts, kHalves>(job, 0, section, i, 2));
    const auto multiply_row = [&]<int n>() __attribute__((always_inline)) {
      tile_load<4>(panels + n * kPanelValues + i * kTileValues);
      tile_multiply_bf16<n, 4, 5>();
      if constexpr (kParts > 1) tile_multiply_bf16<n, 4, 6>();
      if constexpr (kParts > 2) tile_multiply_bf16<n, 4, 7>();
    };
    (multiply_row.template operator()<kN>(), ...);
  }
}

// While one section expands, the one before is multiplied, a share after each N-tile: the tile loads find their stores
// done, and the two kinds of work overlap.
template <int kParts, bool kHalves, int... kN>
void few_rows_tiles(const Int4Job& job, int64_t tile_n, uint16_t* panels, std::integer_sequence<int, kN...> tiles) {
  constexpr int kCount = sizeof...(kN);
  alignas(64) float totals[kCount][kTileSums] = {};
  const auto panel = [&](int64_t s) { return panels + s % 2 * kFewRowsTilesN * kPanelValues; };
  const auto add_section_to_totals = [&](int64_t s) {
    alignas(64) float c[kCount][kTileSums];
    (tile_store<kN>(c[kN]), ...);
    (tile_zero<kN>(), ...);
    (add_section(job, tile_n + kN, 0, s, c[kN], totals[kN]), ...);
  };
  (tile_zero<kN>(), ...);
  for (int64_t s = 0; s <= job.sections; ++s) {
    const int64_t before = s > 0 ? a_tiles<kHalves>(Section(job, s - 1)) : 0;
    const auto step = [&]<int n>() __attribute__((always_inline)) {
      if (s < job.sections) {
        expand<kParts, kHalves>(job, tile_n + n, Section(job, s), panel(s) + n * kPanelValues);
      }
      multiply_few<kParts, kHalves>(job, s - 1, before * n / kCount, before * (n + 1) / kCount, panel(s + 1), tiles);
    };
    (step.template operator()<kN>(), ...);
    if constexpr (kParts > 1) {
      if (s > 0) add_section_to_totals(s - 1);
    }
  }
  if constexpr (kParts == 1) (tile_store<kN>(totals[kN]), ...);
  (write_tile(job, tile_n + kN, 0, totals[kN]), ...);
}

template <int kParts, bool kHalves>
void few_rows(const Int4Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kPanelBytes = 2 * kFewRowsTilesN * kPanelValues * int64_t{sizeof(uint16_t)};
  uint16_t* panel = static_cast<uint16_t*>(scratch(Scratch::kPanel, kPanelBytes));
  int64_t tile_n = begin;
  for (; tile_n + kFewRowsTilesN <= end; tile_n += kFewRowsTilesN) {
    few_rows_tiles<kParts, kHalves>(job, tile_n, panel, std::make_integer_sequence<int, kFewRowsTilesN>());
  }
  for (; tile_n < end; ++tile_n) few_rows_tiles<kParts, kHalves>(job, tile_n, panel, std::integer_sequence<int, 0>());
}

// ---- more rows: 1 or 2 N-tiles against 1 or 2 tiles of x, registers 0..3 = C[n][m], 4..5 = A[n], 6..7 = B[m] ----

template <int kN, int kM>
__attribute__((always_inline)) inline void each_c(auto&& visit) {
  visit.template operator()<0, 0>();
  if constexpr (kM == 2) visit.template operator()<0, 1>();
  if constexpr (kN == 2) visit.template operator()<1, 0>();
  if constexpr (kN == 2 && kM == 2) visit.template operator()<1, 1>();
}

// C += one section, for x in several parts.
template <int kParts, bool kHalves, int kN, int kM>
__attribute__((always_inline)) inline void multiply_parts(const Int4Job& job, int64_t tile_m, const Section& section,
                                                          const uint16_t* panel) {
  for (int64_t i = 0; i < a_tiles<kHalves>(section); ++i) {
    tile_load<4>(panel + i * kTileValues);
    if constexpr (kN == 2) tile_load<5>(panel + kBlockK * kTileN + i * kTileValues);
    for (int part = 0; part < kParts; ++part) {
      tile_load_once<6>(b_tile<kParts, kHalves>(job, tile_m, section, i, part));
      if constexpr (kM == 2) tile_load_once<7>(b_tile<kParts, kHalves>(job, tile_m + 1, section, i, part));
      each_c<kN, kM>([]<int n, int m>() { tile_multiply_bf16<2 * n + m, 4 + n, 6 + m>(); });
    }
  }
}

// One part: C += `count` A tiles. Tiles of the next step load between the products of this one; B, in L2, must not
// evict A from L1. `next_c` is the C tile that follows, fetched a share per step; an address beyond C does no harm.
template <int kN, int kM>
__attribute__((always_inline)) inline void multiply_one_part(const uint16_t* a, const uint16_t* b, int64_t count,
                                                             const float* next_c, int64_t c_stride) {
  constexpr int64_t kStride = kBlockK * kRowsX;  // from one N-tile of A, or 16 rows of x, to the next
  constexpr int kLine = 16;                      // float32 values
  tile_load_once<6>(b);
  tile_load<4>(a);
  if constexpr (kN == 2) tile_load<5>(a + kStride);
  if constexpr (kM == 2) tile_load_once<7>(b + kStride);
  const auto step = [&]<bool kMore>(int64_t i) __attribute__((always_inline)) {
    const int64_t next = (i + 1) * kTileValues;
    tile_multiply_bf16<0, 4, 6>();
    if constexpr (kN == 2) tile_multiply_bf16<2, 5, 6>();
    if constexpr (kMore) {
      tile_load_once<6>(b + next);
      for (int n = 0; n < kN; ++n) {
        for (int m = 0; m < kM; ++m) _mm_prefetch(next_c + n * c_stride + (i * kM + m) * kLine, _MM_HINT_T0);
      }
    }
    if constexpr (kM == 2) tile_multiply_bf16<1, 4, 7>();
    if constexpr (kMore) tile_load<4>(a + next);
    if constexpr (kN == 2 && kM == 2) tile_multiply_bf16<3, 5, 7>();
    if constexpr (kMore && kM == 2) tile_load_once<7>(b + kStride + next);
    if constexpr (kMore && kN == 2) tile_load<5>(a + kStride + next);
  };
  for (int64_t i = 0; i < count - 1; ++i) step.template operator()<true>(i);
  step.template operator()<false>(count - 1);
}

// C[kN][kM] += the sections [begin, end) of one block of K. total: [kN][tiles_m] C tiles.
template <int kParts, bool kHalves, int kN, int kM>
void multiply_block(const Int4Job& job, int64_t tile_n, int64_t tile_m, int64_t begin, int64_t end,
                    const uint16_t* panel, float* total) {
  const auto at = [&](int n, int m) { return total + (n * job.tiles_m + m) * kTileSums; };
  if constexpr (kParts == 1) {
    if (begin == 0) {
      each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
    } else {
      each_c<kN, kM>([&]<int n, int m>() { tile_load<2 * n + m>(at(n, m)); });
    }
    const Section first(job, begin);
    const int64_t count = kHalves ? end - begin : 2 * least(kBlockTilesK, job.tiles_k - first.tile);
    multiply_one_part<kN, kM>(panel, b_tile<kParts, kHalves>(job, tile_m, first, 0, 0), count, at(0, kM),
                              job.tiles_m * kTileSums);
    each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(at(n, m)); });
  } else {
    for (int64_t s = begin; s < end; ++s) {
      const uint16_t* section_panel = panel + (s - begin) * job.section * kTileN;
      each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
      multiply_parts<kParts, kHalves, kN, kM>(job, tile_m, Section(job, s), section_panel);
      alignas(64) float c[kN * kM][kTileSums];
      each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(c[kM * n + m]); });
      each_c<kN, kM>([&]<int n, int m>() { add_section(job, tile_n + n, tile_m + m, s, c[kM * n + m], at(n, m)); });
    }
  }
}

template <int kParts, bool kHalves, int kN>
void panel_against_rows(const Int4Job& job, int64_t tile_n, int64_t begin, int64_t end, uint16_t* panel, float* total) {
  for (int n = 0; n < kN; ++n) {
    for (int64_t s = begin; s < end; ++s) {
      uint16_t* out = panel + n * kBlockK * kTileN + (s - begin) * job.section * kTileN;
      expand<kParts, kHalves>(job, tile_n + n, Section(job, s), out);
    }
  }
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) {
    multiply_block<kParts, kHalves, kN, 2>(job, tile_n, tile_m, begin, end, panel, total + tile_m * kTileSums);
  }
  if (tile_m < job.tiles_m) {
    multiply_block<kParts, kHalves, kN, 1>(job, tile_n, tile_m, begin, end, panel, total + tile_m * kTileSums);
  }
}

template <int kParts, bool kHalves>
void many_rows(const Int4Job& job, int64_t begin, int64_t end) {
  uint16_t* panel = static_cast<uint16_t*>(scratch(Scratch::kPanel, 2 * kBlockK * kTileN * int64_t{sizeof(uint16_t)}));
  const int64_t total_values = kBlockTilesN * job.tiles_m * kTileSums;
  float* total = static_cast<float*>(scratch(Scratch::kSums, total_values * int64_t{sizeof(float)}));
  // Several parts: half a block of x fills as much of L2.
  const int64_t sections_per_block = (kParts == 1 ? kBlockK : kBlockK / 2) / job.section;
  for (int64_t block_n = begin; block_n < end; block_n += kBlockTilesN) {
    const int64_t end_n = least(end, block_n + kBlockTilesN);
    if constexpr (kParts > 1) {
      for (int64_t i = 0; i < total_values; i += 16) _mm512_store_ps(total + i, _mm512_setzero_ps());
    }
    for (int64_t s = 0; s < job.sections; s += sections_per_block) {
      const int64_t end_s = least(job.sections, s + sections_per_block);
      for (int64_t n = block_n; n < end_n; n += 2) {
        float* pair_total = total + (n - block_n) * job.tiles_m * kTileSums;
        if (n + 1 < end_n) {
          panel_against_rows<kParts, kHalves, 2>(job, n, s, end_s, panel, pair_total);
        } else {
          panel_against_rows<kParts, kHalves, 1>(job, n, s, end_s, panel, pair_total);
        }
      }
    }
    for (int64_t m = 0; m < job.tiles_m; ++m) {  // neighbours in N share cache lines of y
      for (int64_t n = block_n; n < end_n; ++n) {
        write_tile(job, n, m, total + ((n - block_n) * job.tiles_m + m) * kTileSums);
      }
    }
  }
}

template <int kParts, bool kHalves>
void run(const Int4Job& job, int64_t begin, int64_t end) {
  const TileScope tiles;
  job.tiles_m == 1 ? few_rows<kParts, kHalves>(job, begin, end) : many_rows<kParts, kHalves>(job, begin, end);
}

template <int kParts>
void run_parts(const Int4Job& job, int64_t begin, int64_t end) {
  job.section == 32 ? run<kParts, true>(job, begin, end) : run<kParts, false>(job, begin, end);
}

}  // namespace

void int4_gemm_amx(const Int4Job& job, int64_t begin, int64_t end) {
  switch (job.parts) {
    case 1:
      return run_parts<1>(job, begin, end);
    case 2:
      return run_parts<2>(job, begin, end);
    default:
      return run_parts<3>(job, begin, end);
  }
}

}  // namespace qao::cpu
