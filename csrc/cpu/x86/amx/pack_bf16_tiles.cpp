// Packing of x as AMX B tiles of bfloat16.
// A tile is 16 pairs of k x 16 rows of x, with pairs in the order in which W's bytes are expanded.
//
// 8-bit W is expanded in order: tile h is half h of a K-tile. In the expansion of int4 (bf16_int4_gemm.cpp), pair
// `4 t + step` of A tile e is column 16 step + 2 t + 8 e and the next. With groups of 32 a tile must not mix the halves
// of a K-tile: tile h is then half h, pair `4 t + 2 e + step % 2`. fp4 is like int4 with groups of 32.
//
// float32 and float16 become sums of 3 and 2 bfloat16 parts, exact except for bits below bfloat16's range.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/simd.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileK;

constexpr int kRows = 16;         // of x in a tile
constexpr int kTileValues = 512;  // 16 pairs x 16 rows
constexpr int kMaxParts = 3;
constexpr int kHalf = kTileK / 2;  // columns handled at once: 16 pairs

constexpr float kHuge = 0x1p91f;  // 2^27 such values, times 448, still have a finite sum

// Splits 32 values of one row into bfloat16 parts; returns their sum.
float split(const Job& job, int64_t m, int64_t k, __m512i (&parts)[kMaxParts]) {
  const int64_t index = m * job.x_stride + k;
  __m512 v[2];
  for (int i = 0; i < 2; ++i) {
    const __mmask16 inside = first(job.k - k - 16 * i);
    v[i] = load16(job.x, index + 16 * i, job.x_dtype, inside);
    const __mmask16 finite = static_cast<__mmask16>(~_mm512_fpclass_ps_mask(v[i], 0x99));  // not NaN, not +-Inf
    if (finite != 0xFFFF) {
      __atomic_fetch_or(job.remarks + m, kHasNonfinite, __ATOMIC_RELAXED);  // blocks of k run on different threads
      v[i] = _mm512_maskz_mov_ps(finite, v[i]);
    }
    if (_mm512_cmp_ps_mask(_mm512_abs_ps(v[i]), _mm512_set1_ps(kHuge), _CMP_GE_OQ) != 0) {
      __atomic_fetch_or(job.remarks + m, kIsHuge, __ATOMIC_RELAXED);
    }
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(v[0], v[1]));
  for (int p = 0; p < job.bf16_tiles.parts; ++p) {
    parts[p] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v[1], v[0]));
    v[0] = _mm512_sub_ps(
        v[0], _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(parts[p])), 16)));
    v[1] = _mm512_sub_ps(v[1], _mm512_castsi512_ps(_mm512_slli_epi32(
                                   _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(parts[p], 1)), 16)));
  }
  return sum;
}

void pack_half_tile(const Job& job, int64_t tile_m, int64_t tile_k, int half) {
  // Load the rows of x as bfloat16 parts
  __m512i rows[kMaxParts][kRows];
  alignas(64) float sums[kRows] = {};
  const int64_t k = tile_k * kTileK + half * kHalf;
  for (int i = 0; i < kRows; ++i) {
    const int64_t m = tile_m * kRows + i;
    for (int p = 0; p < job.bf16_tiles.parts; ++p) rows[p][i] = _mm512_setzero_si512();
    if (m >= job.m || k >= job.k) continue;
    if (job.bf16_tiles.parts == 1) {
      const int64_t left = job.k - k;
      const __mmask32 inside = left >= kHalf ? 0xFFFFFFFFu : (1u << left) - 1;
      rows[0][i] = _mm512_maskz_loadu_epi16(inside, static_cast<const uint16_t*>(job.x) + m * job.x_stride + k);
    } else {
      __m512i parts[kMaxParts];
      sums[i] = split(job, m, k, parts);
      for (int p = 0; p < job.bf16_tiles.parts; ++p) rows[p][i] = parts[p];
    }
  }
  // Store block scales and section sums
  if (job.bf16_tiles.block_scales != nullptr && half == 0 && k % job.section == 0) {
    float* scales = job.bf16_tiles.block_scales + (k / job.section * job.tiles_m + tile_m) * kRows;
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t m = tile_m * kRows + i < job.m ? tile_m * kRows + i : job.m - 1;
      scales[i] = job.x_scales[m * job.x_scale_stride + k / job.section * job.x_block_stride];
    }
  }
  if (job.bf16_tiles.parts > 1 && job.weight_format == Format::kInt4 && k < job.k) {
    float* total = job.x_sums + k / job.section * job.tiles_m * kRows + tile_m * kRows;
    const bool starts_section = k % job.section == 0;
    const __m512 before = starts_section ? _mm512_setzero_ps() : _mm512_load_ps(total);
    _mm512_store_ps(total, _mm512_add_ps(before, _mm512_load_ps(sums)));
  }
  // Transpose and store the tiles
  constexpr int64_t kTilesPerBlock = kBlockK / kTileK;
  const int64_t in_block = (tile_k / kTilesPerBlock * job.tiles_m + tile_m) * kTilesPerBlock + tile_k % kTilesPerBlock;
  for (int p = 0; p < job.bf16_tiles.parts; ++p) {
    transpose16(rows[p]);  // now [pair][row of x]
    uint16_t* tiles = job.bf16_tiles.values + (in_block * job.bf16_tiles.parts + p) * 2 * kTileValues;
    for (int pair = 0; pair < 16; ++pair) {
      const int step = pair / 8, e = pair % 8 / 4, t = pair % 4;  // columns 16 step + 8 e + 2 t of this half
      const bool bytes = !is_packed(job.weight_format);
      const int tile = bytes || job.section == 32 ? half : e;
      const int row = bytes ? pair : job.section == 32 ? 4 * t + 2 * e + step : 4 * t + 2 * half + step;
      _mm512_store_si512(tiles + tile * kTileValues + row * 2 * kRows, rows[p][pair]);
    }
  }
}

}  // namespace

void amx::pack_bf16_tiles(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kTiles = kPackK / kTileK;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t last = (unit + 1) * kTiles;
    for (int64_t tile_m = 0; tile_m < job.tiles_m; ++tile_m) {
      for (int64_t tile_k = unit * kTiles; tile_k < last && tile_k < job.tiles_k; ++tile_k) {
        pack_half_tile(job, tile_m, tile_k, 0);
        pack_half_tile(job, tile_m, tile_k, 1);
      }
    }
  }
}

}  // namespace qao::cpu
