// int8 x times int4 W with AMX: a tile of W becomes an A tile of 16 rows x 64 unsigned bytes with no more than a mask,
// B tiles come packed (mm8_pack_tiles_avx512.cpp).
//
// 32 rows of W x up to 512 k are expanded into L1 and meet all rows of x, 32 x 32 of C at a time. Sums are exact
// integers up to the end of a group, then
//   total += scale * C - scale * zero * sum(x).
#include "cpu/mm8_int4_parameters_avx512.h"
#include "cpu/mm8_kernels.h"
#include "cpu/mm8_tiles_amx.h"
#include "cpu/scratch.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::kTileK;
using int4_mm::kTileN;

constexpr int64_t kPackedBytes = int4_mm::kTileBytes;  // of a tile of W
constexpr int64_t kTileBytes = kTileRegisterBytes;
constexpr int64_t kBlockTilesN = 16;  // N-tiles whose totals stay in L2
constexpr int64_t kBlockTilesK = 16;  // K-tiles of a panel

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void expand_tile(const uint8_t* tile, uint8_t* a) {
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const __m512i bytes = _mm512_loadu_si512(tile + g * 64);
    _mm512_store_si512(a + g * 64, _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F)));
    _mm512_store_si512(a + (g + 8) * 64, _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0))));
  }
}

// total[16 n][16 m] += scale * c - scale * zero * sums of x; the second term with the last sums of a group.
__attribute__((always_inline)) inline void fold(const int32_t* c, const Int4Parameters& parameters, bool last,
                                                const float* x_sums, float* total) {
  const __m512 x_sum = last ? _mm512_load_ps(x_sums) : _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int n = 0; n < kTileN; ++n) {
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(c + n * kTileRows));
    const __m512 without_zero =
        _mm512_fmadd_ps(_mm512_set1_ps(parameters.scale[n]), sum, _mm512_load_ps(total + n * kTileRows));
    _mm512_store_ps(total + n * kTileRows, _mm512_fnmadd_ps(_mm512_set1_ps(parameters.shift[n]), x_sum, without_zero));
  }
}

// One or two N-tiles of W over a block of K.
struct Panel {
  const uint8_t* tiles;              // [kN][kBlockTilesK] A tiles
  const Int4Parameters* parameters;  // [kN][groups of W]
  const uint8_t* next;               // tiles of W to be fetched
};

// total[kN][tiles_m] += steps [begin, end) of the panel times tile_m and the next kM - 1 of x.
template <int kN, int kM>
void multiply(const Mm8Job& job, const Panel& panel, int64_t tile_m, int64_t begin, int64_t end, float* total) {
  alignas(64) int32_t c[kN * kM][kTileSums];
  const int64_t halves = job.steps / job.tiles_k;
  const int64_t group_steps = job.group_size < kTileK ? 1 : (job.group_size + kTileK - 1) / kTileK;
  const int64_t last_step = least(end, job.groups * group_steps);  // a last K-tile may have but one half
  constexpr int64_t kLines = kPackedBytes / 64;
  const int64_t first_line = kN * kLines * tile_m / job.tiles_m, end_line = kN * kLines * (tile_m + kM) / job.tiles_m;
  const uint8_t* next = panel.next;
  for (int64_t step = begin; step < last_step;) {
    const int64_t group = step / group_steps, group_end = (group + 1) * group_steps;
    const int64_t count = least(last_step, group_end) - step;
    const ATiles a = {panel.tiles + (step - begin) / halves * kTileBytes, kBlockTilesK * kTileBytes, kTileBytes, 64};
    each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
    const auto fetch = [&](int64_t) {
      for (int64_t line = first_line; line < end_line; ++line) {
        _mm_prefetch(next + (line / kLines * job.tiles_k * kLines + line % kLines) * 64, _MM_HINT_T1);
      }
      next += kPackedBytes / halves;
    };
    multiply_tiles<false, kN, kM>(a, job.bytes + (tile_m * job.steps + step) * kTileBytes, job.steps * kTileBytes,
                                  count, fetch);
    each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(c[kM * n + m]); });
    step += count;
    const bool last = step == group_end || step == job.steps;
    each_c<kN, kM>([&]<int n, int m>() {
      fold(c[kM * n + m], panel.parameters[n * job.groups + group], last,
           job.sums + (group * job.tiles_m + tile_m + m) * kTileRows,
           total + (n * job.tiles_m + tile_m + m) * kTileSums);
    });
  }
}

// total[kN][tiles_m] += K-tiles [begin, end).
template <int kN>
void run_block(const Mm8Job& job, int64_t tile_n, int64_t begin, int64_t end, uint8_t* tiles,
               const Int4Parameters* parameters, float* total) {
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + tile_n * job.tiles_k * kPackedBytes;
  for (int n = 0; n < kN; ++n) {
    for (int64_t t = begin; t < end; ++t) {
      expand_tile(weight + (n * job.tiles_k + t) * kPackedBytes, tiles + (n * kBlockTilesK + t - begin) * kTileBytes);
    }
  }
  const Panel panel = {tiles, parameters, weight + (kN * job.tiles_k + begin) * kPackedBytes};
  const int64_t halves = job.steps / job.tiles_k;
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) {
    multiply<kN, 2>(job, panel, tile_m, begin * halves, end * halves, total);
  }
  if (tile_m < job.tiles_m) multiply<kN, 1>(job, panel, tile_m, begin * halves, end * halves, total);
}

}  // namespace

void mm8_int4_amx(const Mm8Job& job, int64_t begin, int64_t end) {
  const TileScope registers;
  constexpr int64_t kPanelBytes = 2 * kBlockTilesK * kTileBytes;
  const int64_t bytes = kPanelBytes + kBlockTilesN * job.groups * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* tiles = static_cast<uint8_t*>(scratch(Scratch::kPanel, bytes));
  auto* parameters = reinterpret_cast<Int4Parameters*>(tiles + kPanelBytes);
  const int64_t row_sums = job.tiles_m * kTileSums;
  float* total = static_cast<float*>(scratch(Scratch::kSums, kBlockTilesN * row_sums * int64_t{sizeof(float)}));
  for (int64_t block = begin; block < end; block += kBlockTilesN) {
    const int64_t block_end = least(end, block + kBlockTilesN);
    for (int64_t tile_n = block; tile_n < block_end; ++tile_n) {
      load_parameters(job, tile_n, 0, job.groups, parameters + (tile_n - block) * job.groups);
    }
    for (int64_t i = 0; i < (block_end - block) * row_sums; i += 16) _mm512_store_ps(total + i, _mm512_setzero_ps());
    for (int64_t t = 0; t < job.tiles_k; t += kBlockTilesK) {
      const int64_t end_t = least(job.tiles_k, t + kBlockTilesK);
      for (int64_t tile_n = block; tile_n < block_end; tile_n += 2) {
        const Int4Parameters* pair = parameters + (tile_n - block) * job.groups;
        float* pair_total = total + (tile_n - block) * row_sums;
        tile_n + 1 < block_end ? run_block<2>(job, tile_n, t, end_t, tiles, pair, pair_total)
                               : run_block<1>(job, tile_n, t, end_t, tiles, pair, pair_total);
      }
    }
    for (int64_t tile_n = block; tile_n < block_end; ++tile_n) {
      write_tiles(job, tile_n, total + (tile_n - block) * row_sums,
                  [](__m512i sums) { return _mm512_castsi512_ps(sums); });
    }
  }
}

}  // namespace qao::cpu
