// AMX GEMM y = x Wᵀ for any W that expands to bfloat16.
// A tiles are 16 rows x 32 k; x is packed as B tiles (pack_bf16_tiles.cpp). Each includer instantiates it for its
// formats of W.
//
// Up to 64 rows of x: four C tiles stay in registers along all of K, those of four N-tiles or, above 16 rows, two by
// two. More rows: blocks of 512 N x 512 k (256 if x has several parts); 32 rows of W are expanded into L1 and meet all
// rows of x, 32 x 32 of C at a time.
//
// A weight policy W is a class of static members:
//   kParts                  bfloat16 parts of x
//   kHalves                 sections of 32: an A tile holds half a K-tile
//   kSectioned              sums end with every section, otherwise C accumulates over all of K
//   expand<kN, kWholeK>()   expands one section of an N-tile, number `index` of kN expanded together, to A tiles: two
//                           per K-tile, or one with kHalves. Prefetches the next data: with kWholeK sections follow
//                           along all of K, otherwise N-tiles follow first
//   add_section()           kSectioned: adds the sums c of section s to total[16 n][16 m], scaled
//   row_scales()            scales of 16 rows of W, applied to y
//   kScaledX                y is multiplied by the scales of x's rows
//   kFewTiles               optional: tiles of x up to which W is expanded again for every two
#pragma once

#include <utility>

#include "cpu/gemm/job.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/output.h"
#include "cpu/x86/amx/tiles.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileK;
using int4::kTileN;

constexpr int kRowsX = 16;        // rows of x in a B tile
constexpr int kTileValues = 512;  // bfloat16 values of an A or B tile
constexpr int kTileSums = 256;    // float32 values of a C tile
constexpr int64_t kBlockTilesK = kBlockK / kTileK;
constexpr int64_t kBlockTilesN = 32;  // N-tiles with their C in L2
constexpr int kFewRowsTilesN = 4;

// Position of a section: its group, and its K-tiles [tile, tile + tiles), or half of one if section is 32.
struct Section {
  Section(const Job& job, int64_t s)
      : group(s / job.sections_per_group),
        tile(s * job.section / kTileK),
        tiles(least(job.section < kTileK ? 1 : job.section / kTileK, job.tiles_k - tile)),
        half(job.section < kTileK ? static_cast<int>(s % 2) : -1) {}

  int64_t group, tile, tiles;
  int half;
};

// A tiles of a section, and the B tile for part `part` of A tile `i`.
template <typename W>
int64_t a_tiles(const Section& section) {
  return W::kHalves ? 1 : 2 * section.tiles;
}
template <typename W>
const uint16_t* b_tile(const Job& job, int64_t tile_m, const Section& section, int64_t i, int part) {
  const int64_t tile_k = W::kHalves ? section.tile : section.tile + i / 2;
  const int64_t e = W::kHalves ? section.half : i % 2;
  const int64_t in_block = (tile_k / kBlockTilesK * job.tiles_m + tile_m) * kBlockTilesK + tile_k % kBlockTilesK;
  return job.bf16_tiles.values + ((in_block * W::kParts + part) * 2 + e) * kTileValues;
}

// y = total * scales + bias for the C tiles [16 n][16 m] of kN adjacent N-tiles.
template <typename W, int kN>
void write_tiles(const Job& job, int64_t tile_n, int64_t tile_m, const float* first_total, const float* second_total) {
  const int64_t n = tile_n * kTileN, m = tile_m * kRowsX;
  ColumnsOfPair columns;
  load_columns(job, n, &columns);
  alignas(64) float scales[2 * kTileN];
  for (int i = 0; i < kN; ++i) {
    _mm512_store_ps(scales + i * kTileN, W::row_scales(job, n + i * kTileN, first(job.n - n - i * kTileN)));
  }
  const __m512 x_scale = W::kScaledX ? load_rows(job, m).scale : _mm512_set1_ps(1);
  store_tiles<kN>(job, n, m, [&](int i) __attribute__((always_inline)) {
    const float* total = i < kTileN ? first_total + i * kRowsX : second_total + (i - kTileN) * kRowsX;
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(scales[i]), x_scale);
    return _mm512_fmadd_ps(_mm512_load_ps(total), scale, _mm512_set1_ps(columns.bias[i]));
  });
}

// ---- Up to 2 N-tiles by up to 2 tiles of x: registers 0..3 = C[n][m], 4..5 = A[n], 6..7 = B[m] ----

// C += A tiles [begin, end) of a section. panel: [kN] of panel_values.
template <typename W, int kN, int kM>
__attribute__((always_inline)) inline void multiply_parts(const Job& job, int64_t tile_m, const Section& section,
                                                          int64_t begin, int64_t end, const uint16_t* panel,
                                                          int64_t panel_values) {
  for (int64_t i = begin; i < end; ++i) {
    tile_load<4>(panel + i * kTileValues);
    if constexpr (kN == 2) tile_load<5>(panel + panel_values + i * kTileValues);
    for (int part = 0; part < W::kParts; ++part) {
      tile_load_once<6>(b_tile<W>(job, tile_m, section, i, part));
      if constexpr (kM == 2) tile_load_once<7>(b_tile<W>(job, tile_m + 1, section, i, part));
      each_c<kN, kM>([]<int n, int m>() { tile_multiply_bf16<2 * n + m, 4 + n, 6 + m>(); });
    }
  }
}

// ---- Few rows of x, C in registers along all of K: 4 N-tiles by 1 tile of x, or 2 by 2 ----

constexpr int64_t kPanelValues = kMaxSection * kTileN;

// Four N-tiles: registers 0..3 = C[n], 4 = A, 5..7 = parts of B.
template <typename W, int... kC>
__attribute__((always_inline)) inline void multiply_four(const Job& job, int64_t tile_m, const Section& section,
                                                         int64_t begin, int64_t end, const uint16_t* panels,
                                                         std::integer_sequence<int, kC...>) {
  for (int64_t i = begin; i < end; ++i) {
    tile_load<5>(b_tile<W>(job, tile_m, section, i, 0));
    if constexpr (W::kParts > 1) tile_load<6>(b_tile<W>(job, tile_m, section, i, 1));
    if constexpr (W::kParts > 2) tile_load<7>(b_tile<W>(job, tile_m, section, i, 2));
    const auto multiply_row = [&]<int n>() __attribute__((always_inline)) {
      tile_load<4>(panels + n * kPanelValues + i * kTileValues);
      tile_multiply_bf16<n, 4, 5>();
      if constexpr (W::kParts > 1) tile_multiply_bf16<n, 4, 6>();
      if constexpr (W::kParts > 2) tile_multiply_bf16<n, 4, 7>();
    };
    (multiply_row.template operator()<kC>(), ...);
  }
}

// C tile kC belongs to N-tile kC / kM and tile kC % kM of x.
//
// Software pipeline: while one section is expanded, the previous one is multiplied, a share after each N-tile. Tile
// loads find their stores completed, and both kinds of work overlap.
template <typename W, int kM, int... kC>
void few_rows_tiles(const Job& job, int64_t tile_n, int64_t tile_m, uint16_t* panels,
                    std::integer_sequence<int, kC...> tiles) {
  constexpr int kCount = sizeof...(kC), kN = kCount / kM;
  alignas(64) float totals[kCount][kTileSums] = {};
  const auto panel = [&](int64_t s) { return panels + s % 2 * kFewRowsTilesN * kPanelValues; };
  const auto add_section_to_totals = [&](int64_t s) {
    alignas(64) float c[kCount][kTileSums];
    (tile_store<kC>(c[kC]), ...);
    (tile_zero<kC>(), ...);
    (W::add_section(job, tile_n + kC / kM, tile_m + kC % kM, s, c[kC], totals[kC]), ...);
  };
  (tile_zero<kC>(), ...);
  for (int64_t s = 0; s <= job.sections; ++s) {
    const Section section(job, s), before(job, s > 0 ? s - 1 : 0);
    const int64_t count = s > 0 ? a_tiles<W>(before) : 0;
    for (int n = 0; n < kN; ++n) {
      if (s < job.sections) {
        W::template expand<kN, true>(job, tile_n + n, n, section, panel(s) + n * kPanelValues);
      }
      const int64_t begin = count * n / kN, end = count * (n + 1) / kN;
      if constexpr (kM == 1) {
        multiply_four<W>(job, tile_m, before, begin, end, panel(s + 1), tiles);
      } else {
        multiply_parts<W, kN, kM>(job, tile_m, before, begin, end, panel(s + 1), kPanelValues);
      }
    }
    if constexpr (W::kSectioned) {
      if (s > 0) add_section_to_totals(s - 1);
    }
  }
  if constexpr (!W::kSectioned) (tile_store<kC>(totals[kC]), ...);
  for (int n = 0; n < kN; n += 2) {
    for (int m = 0; m < kM; ++m) {
      constexpr int kPair = kN == 1 ? 1 : 2;
      write_tiles<W, kPair>(job, tile_n + n, tile_m + m, totals[n * kM + m], totals[(n + kPair - 1) * kM + m]);
    }
  }
}

// kN N-tiles by all rows of x: the first pass reads W from memory, the others from L2.
template <typename W, int kN>
void few_rows(const Job& job, int64_t tile_n, uint16_t* panels) {
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) {
    if constexpr (kN <= 2) {
      few_rows_tiles<W, 2>(job, tile_n, tile_m, panels, std::make_integer_sequence<int, 2 * kN>());
    }
  }
  if (tile_m < job.tiles_m) few_rows_tiles<W, 1>(job, tile_n, tile_m, panels, std::make_integer_sequence<int, kN>());
}

template <typename W, int kN>
void few_rows_range(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kPanelBytes = 2 * kFewRowsTilesN * kPanelValues * int64_t{sizeof(uint16_t)};
  uint16_t* panels = static_cast<uint16_t*>(scratch(Scratch::kPanel, kPanelBytes));
  int64_t tile_n = begin;
  for (; tile_n + kN <= end; tile_n += kN) few_rows<W, kN>(job, tile_n, panels);
  for (; tile_n < end; ++tile_n) few_rows<W, 1>(job, tile_n, panels);
}

// ---- More rows: blocks of K ----

// C += whole K-tiles, in `count` B tiles: for each K-tile and part the even and the odd one. Tiles of the next step
// load between the multiplications of this one. B, in L2, must not evict A from L1. `next_c` is the next C tile,
// prefetched one share per step; an address past C is harmless.
template <int kParts, int kN, int kM>
__attribute__((always_inline)) inline void multiply_tiles(const uint16_t* a, const uint16_t* b, int64_t count,
                                                          const float* next_c, int64_t c_stride) {
  constexpr int64_t kNextN = kBlockK * kTileN, kNextM = kBlockK * kRowsX * kParts;
  constexpr int kLine = 16;  // float32 values
  tile_load_once<6>(b);
  tile_load<4>(a);
  if constexpr (kN == 2) tile_load<5>(a + kNextN);
  if constexpr (kM == 2) tile_load_once<7>(b + kNextM);
  const auto step = [&]<bool kMore>(int64_t i) __attribute__((always_inline)) {
    const uint16_t* next_b = b + (i + 1) * kTileValues;
    const uint16_t* next_a = a + ((i + 1) / (2 * kParts) * 2 + (i + 1) % 2) * kTileValues;
    tile_multiply_bf16<0, 4, 6>();
    if constexpr (kN == 2) tile_multiply_bf16<2, 5, 6>();
    if constexpr (kMore) {
      tile_load_once<6>(next_b);
      for (int n = 0; n < kN; ++n) {
        for (int m = 0; m < kM; ++m) _mm_prefetch(next_c + n * c_stride + (i * kM + m) * kLine, _MM_HINT_T0);
      }
    }
    if constexpr (kM == 2) tile_multiply_bf16<1, 4, 7>();
    if constexpr (kMore) tile_load<4>(next_a);
    if constexpr (kN == 2 && kM == 2) tile_multiply_bf16<3, 5, 7>();
    if constexpr (kMore && kM == 2) tile_load_once<7>(next_b + kNextM);
    if constexpr (kMore && kN == 2) tile_load<5>(next_a + kNextN);
  };
  for (int64_t i = 0; i < count - 1; ++i) step.template operator()<true>(i);
  step.template operator()<false>(count - 1);
}

// C[kN][kM] += the sections [begin, end) of one block of K. total: [kN][tiles_m] C tiles.
template <typename W, int kN, int kM>
void multiply_block(const Job& job, int64_t tile_n, int64_t tile_m, int64_t begin, int64_t end, const uint16_t* panel,
                    float* total) {
  const auto at = [&](int n, int m) { return total + (n * job.tiles_m + m) * kTileSums; };
  const auto multiply = [&](int64_t s, int64_t a_count) __attribute__((always_inline)) {
    const Section section(job, s);
    const uint16_t* a = panel + (s - begin) * job.section * kTileN;
    if constexpr (W::kHalves && W::kParts > 1) {
      multiply_parts<W, kN, kM>(job, tile_m, section, 0, a_count, a, kBlockK * kTileN);
    } else {
      multiply_tiles<W::kParts, kN, kM>(a, b_tile<W>(job, tile_m, section, 0, 0), a_count * W::kParts, at(0, kM),
                                        job.tiles_m * kTileSums);
    }
  };
  if constexpr (W::kSectioned) {
    for (int64_t s = begin; s < end; ++s) {
      each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
      multiply(s, a_tiles<W>(Section(job, s)));
      alignas(64) float c[kN * kM][kTileSums];
      each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(c[kM * n + m]); });
      each_c<kN, kM>([&]<int n, int m>() { W::add_section(job, tile_n + n, tile_m + m, s, c[kM * n + m], at(n, m)); });
    }
  } else {
    if (begin == 0) {
      each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
    } else {
      each_c<kN, kM>([&]<int n, int m>() { tile_load<2 * n + m>(at(n, m)); });
    }
    if constexpr (W::kHalves && W::kParts > 1) {  // the parts of x lie between the halves
      for (int64_t s = begin; s < end; ++s) multiply(s, 1);
    } else {
      const Section last(job, end - 1);
      multiply(begin, W::kHalves ? end - begin : 2 * (last.tile + last.tiles - Section(job, begin).tile));
    }
    each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(at(n, m)); });
  }
}

template <typename W, int kN>
void panel_against_rows(const Job& job, int64_t tile_n, int64_t begin, int64_t end, uint16_t* panel, float* total) {
  for (int n = 0; n < kN; ++n) {
    for (int64_t s = begin; s < end; ++s) {
      uint16_t* out = panel + n * kBlockK * kTileN + (s - begin) * job.section * kTileN;
      W::template expand<kN, false>(job, tile_n + n, n, Section(job, s), out);
    }
  }
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) {
    multiply_block<W, kN, 2>(job, tile_n, tile_m, begin, end, panel, total + tile_m * kTileSums);
  }
  if (tile_m < job.tiles_m) {
    multiply_block<W, kN, 1>(job, tile_n, tile_m, begin, end, panel, total + tile_m * kTileSums);
  }
}

template <typename W>
void many_rows(const Job& job, int64_t begin, int64_t end) {
  uint16_t* panel = static_cast<uint16_t*>(scratch(Scratch::kPanel, 2 * kBlockK * kTileN * int64_t{sizeof(uint16_t)}));
  const int64_t total_values = kBlockTilesN * job.tiles_m * kTileSums;
  float* total = static_cast<float*>(scratch(Scratch::kSums, total_values * int64_t{sizeof(float)}));
  // Several parts: half a block of x takes as much of L2.
  const int64_t sections_per_block = (W::kParts == 1 ? kBlockK : kBlockK / 2) / job.section;
  for (int64_t block_n = begin; block_n < end; block_n += kBlockTilesN) {
    const int64_t end_n = least(end, block_n + kBlockTilesN);
    if constexpr (W::kSectioned) {
      for (int64_t i = 0; i < total_values; i += 16) _mm512_store_ps(total + i, _mm512_setzero_ps());
    }
    for (int64_t s = 0; s < job.sections; s += sections_per_block) {
      const int64_t end_s = least(job.sections, s + sections_per_block);
      for (int64_t n = block_n; n < end_n; n += 2) {
        float* pair_total = total + (n - block_n) * job.tiles_m * kTileSums;
        if (n + 1 < end_n) {
          panel_against_rows<W, 2>(job, n, s, end_s, panel, pair_total);
        } else {
          panel_against_rows<W, 1>(job, n, s, end_s, panel, pair_total);
        }
      }
    }
    const auto at = [&](int64_t n, int64_t m) { return total + ((n - block_n) * job.tiles_m + m) * kTileSums; };
    for (int64_t m = 0; m < job.tiles_m; ++m) {
      int64_t n = block_n;
      for (; n + 2 <= end_n; n += 2) write_tiles<W, 2>(job, n, m, at(n, m), at(n + 1, m));
      if (n < end_n) write_tiles<W, 1>(job, n, m, at(n, m), nullptr);
    }
  }
}

template <typename W>
constexpr int64_t few_tiles() {
  if constexpr (requires { W::kFewTiles; }) return W::kFewTiles;
  return kFewTilesM;
}

template <typename W>
void run_gemm(const Job& job, int64_t begin, int64_t end) {
  const TileScope tiles;
  if (job.tiles_m == 1) return few_rows_range<W, 4>(job, begin, end);
  if (job.tiles_m <= few_tiles<W>()) return few_rows_range<W, 2>(job, begin, end);
  many_rows<W>(job, begin, end);
}

// Calls run<kParts>() for the number of parts of x.
template <typename Run>
void with_parts(const Job& job, const Run& run) {
  switch (job.bf16_tiles.parts) {
    case 1:
      return run.template operator()<1>();
    case 2:
      return run.template operator()<2>();
    default:
      return run.template operator()<3>();
  }
}

}  // namespace
}  // namespace qao::cpu
