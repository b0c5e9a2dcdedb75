// int8 x times int4 W with AMX: a tile of W becomes an A tile of 16 rows x 64 unsigned bytes with no more than a mask,
// B tiles come packed (mm8_pack_tiles_avx512.cpp).
//
// 16 rows of W are expanded tile by tile; with more than 16 rows of x, or groups of 32, in panels of 1024 k that stay
// in L1. Sums are exact integers up to the end of a group, then, in registers,
//   total += scale * C - scale * zero * sum(x).
#include "cpu/mm8_int4_parameters_avx512.h"
#include "cpu/mm8_kernels.h"
#include "cpu/mm8_tiles_amx.h"
#include "cpu/scratch.h"
#include "cpu/weight_stream.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::kTileK;
using int4_mm::kTileN;

constexpr int64_t kPackedBytes = int4_mm::kTileBytes;  // of a tile of W
constexpr int64_t kTileBytes = kTileRegisterBytes;
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

// Steps of a group, the last one's aside.
int64_t group_steps(const Mm8Job& job) { return job.group_size < kTileK ? 1 : (job.group_size + kTileK - 1) / kTileK; }

__m512 load_sums(const Mm8Job& job, int64_t group, int64_t tile_m) {
  return _mm512_load_ps(job.sums + (group * job.tiles_m + tile_m) * kTileRows);
}

// total + scale * C - scale * zero * sums of x, for one row of W.
__attribute__((always_inline)) inline __m512 fold(const int32_t* c, int row, const Int4Parameters& parameters,
                                                  __m512 x_sums, __m512 total) {
  const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(c + row * kTileRows));
  total = _mm512_fmadd_ps(_mm512_set1_ps(parameters.scale[row]), sum, total);
  return _mm512_fnmadd_ps(_mm512_set1_ps(parameters.shift[row]), x_sums, total);
}

// Up to 16 rows of x: one N-tile along all of K, its totals in registers. Groups are folded one behind, tiles of W
// expanded one ahead: the tile unit never waits for what was stored just before.
void few_rows(const Mm8Job& job, int64_t tile_n, const Int4Parameters* parameters, WeightStream stream) {
  alignas(64) uint8_t a[2][kTileBytes];
  alignas(64) int32_t c[2][kTileSums];
  __m512 total[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) total[row] = _mm512_setzero_ps();
  const auto fold_group = [&](int64_t group) __attribute__((always_inline)) {
    const __m512 x_sums = load_sums(job, group, 0);
#pragma GCC unroll 16
    for (int row = 0; row < kTileN; ++row) total[row] = fold(c[group % 2], row, parameters[group], x_sums, total[row]);
  };
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + tile_n * job.tiles_k * kPackedBytes;
  expand_tile(weight, a[0]);
  int64_t t = 0;
  for (int64_t group = 0; group < job.groups; ++group) {
    tile_zero<0>();
    for (const int64_t end = least(t + group_steps(job), job.tiles_k); t < end; ++t) {
      stream.fetch();
      if (t + 1 < job.tiles_k) expand_tile(weight + (t + 1) * kPackedBytes, a[(t + 1) % 2]);
      tile_load<4>(a[t % 2]);
      tile_load<6>(job.bytes + t * kTileBytes);
      tile_multiply_bytes<0, 4, 6>();
    }
    tile_store<0>(c[group % 2]);
    if (group > 0) fold_group(group - 1);
  }
  fold_group(job.groups - 1);
  alignas(64) float sums[kTileSums];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) _mm512_store_ps(sums + row * kTileRows, total[row]);
  write_tiles(job, tile_n, sums, [](__m512i row) { return _mm512_castsi512_ps(row); });
}

// total[16 n][16 m] += steps [begin, end) of one N-tile, expanded in `tiles`, times tile_m. fetch() is called every
// step.
template <typename Fetch>
void multiply(const Mm8Job& job, const uint8_t* tiles, const Int4Parameters* parameters, int64_t tile_m, int64_t begin,
              int64_t end, const Fetch& fetch, float* total) {
  alignas(64) int32_t c[2][kTileSums];
  __m512 sums[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) {
    sums[row] = begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(total + row * kTileRows);
  }
  int64_t sections = 0, group = 0;
  __m512 x_sums = _mm512_setzero_ps();
  const auto fold_section = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int row = 0; row < kTileN; ++row) sums[row] = fold(c[sections % 2], row, parameters[group], x_sums, sums[row]);
  };
  const int shift = job.steps > job.tiles_k ? 1 : 0;  // with groups of 32 two steps a K-tile
  const int8_t* b = job.bytes + (tile_m * job.steps + begin) * kTileBytes;
  for (int64_t step = begin; step < end; ++sections) {
    const int64_t next_group = step / group_steps(job), group_end = (next_group + 1) * group_steps(job);
    const int64_t section_end = least(end, group_end);
    tile_zero<0>();
    for (; step < section_end; ++step, b += kTileBytes) {
      fetch();
      tile_load<4>(tiles + ((step - begin) >> shift) * kTileBytes);
      tile_load_once<6>(b);
      tile_multiply_bytes<0, 4, 6>();
    }
    tile_store<0>(c[(sections + 1) % 2]);
    if (sections > 0) fold_section();
    group = next_group;
    x_sums = section_end == group_end || section_end == job.steps ? load_sums(job, group, tile_m) : _mm512_setzero_ps();
  }
  fold_section();
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) _mm512_store_ps(total + row * kTileRows, sums[row]);
}

// More rows of x: a panel of W is expanded into L1 and meets all of them.
void many_rows(const Mm8Job& job, int64_t tile_n, const Int4Parameters* parameters, uint8_t* tiles) {
  constexpr int64_t kLines = kPackedBytes / 64;
  const int64_t row_bytes = job.tiles_k * kPackedBytes;
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + tile_n * row_bytes;
  const int64_t halves = job.steps / job.tiles_k;
  const int64_t steps = job.groups * group_steps(job);  // with groups of 32 the last K-tile may have but one half
  float* total = static_cast<float*>(scratch(Scratch::kSums, job.tiles_m * kTileSums * int64_t{sizeof(float)}));
  for (int64_t t = 0; t < job.tiles_k; t += kBlockTilesK) {
    const int64_t end = least(job.tiles_k, t + kBlockTilesK);
    for (int64_t i = t; i < end; ++i) expand_tile(weight + i * kPackedBytes, tiles + (i - t) * kTileBytes);
    const uint8_t* next = weight + end * kPackedBytes;
    for (int64_t tile_m = 0; tile_m < job.tiles_m; ++tile_m) {
      const int64_t lines = kLines * (tile_m + 1) / job.tiles_m - kLines * tile_m / job.tiles_m;
      const auto fetch = [&]() __attribute__((always_inline)) {
        for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
      };
      multiply(job, tiles, parameters, tile_m, t * halves, least(end * halves, steps), fetch,
               total + tile_m * kTileSums);
    }
  }
  write_tiles(job, tile_n, total, [](__m512i sums) { return _mm512_castsi512_ps(sums); });
}

}  // namespace

void mm8_int4_amx(const Mm8Job& job, int64_t begin, int64_t end) {
  const TileScope registers;
  constexpr int64_t kPanelBytes = kBlockTilesK * kTileBytes;
  const int64_t bytes = kPanelBytes + job.groups * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* tiles = static_cast<uint8_t*>(scratch(Scratch::kPanel, bytes));
  auto* parameters = reinterpret_cast<Int4Parameters*>(tiles + kPanelBytes);
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + begin * job.tiles_k * kPackedBytes;
  for (int64_t tile_n = begin; tile_n < end; ++tile_n) {
    load_parameters(job, tile_n, 0, job.groups, parameters);
    if (job.tiles_m == 1 && job.steps == job.tiles_k) {
      few_rows(job, tile_n, parameters, WeightStream(weight, tile_n - begin, job.tiles_k));
    } else {
      many_rows(job, tile_n, parameters, tiles);
    }
  }
}

}  // namespace qao::cpu
