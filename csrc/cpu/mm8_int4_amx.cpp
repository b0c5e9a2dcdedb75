// int8 x times int4 W with AMX: a tile of W becomes an A tile of 16 rows x 64 unsigned bytes with no more than a mask,
// B tiles come packed (mm8_pack_tiles_avx512.cpp).
//
// More than 16 rows of x: 32 rows of W x 1024 k are expanded into L1 and meet all of them, 32 x 32 of C at a time. Sums
// are exact integers up to the end of a group, then
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

// One or two N-tiles of W over a block of K.
struct Panel {
  const uint8_t* tiles;              // [kN][kBlockTilesK] A tiles
  const Int4Parameters* parameters;  // [kN][groups of W]
  const uint8_t* next;               // tiles of W to be fetched
};

// total[kN][tiles_m] += steps [begin, end) of the panel times tile_m and the next kM - 1 of x.
template <int kN, int kM>
void multiply(const Mm8Job& job, const Panel& panel, int64_t tile_m, int64_t begin, int64_t end, float* total) {
  constexpr int64_t kLines = kPackedBytes / 64;
  alignas(64) int32_t c[kN * kM][kTileSums];
  const int64_t halves = job.steps / job.tiles_k;
  const int64_t last_step = least(end, job.groups * group_steps(job));  // a last K-tile may have but one half
  const int64_t first_line = kN * kLines * tile_m / job.tiles_m, end_line = kN * kLines * (tile_m + kM) / job.tiles_m;
  const uint8_t* next = panel.next;
  const auto fetch = [&](int64_t) {
    for (int64_t line = first_line; line < end_line; ++line) {
      _mm_prefetch(next + (line / kLines * job.tiles_k * kLines + line % kLines) * 64, _MM_HINT_T1);
    }
    next += kPackedBytes / halves;
  };
  for (int64_t step = begin; step < last_step;) {
    const int64_t group = step / group_steps(job), group_end = (group + 1) * group_steps(job);
    const int64_t count = least(last_step, group_end) - step;
    const ATiles a = {panel.tiles + (step - begin) / halves * kTileBytes, kBlockTilesK * kTileBytes, kTileBytes, 64};
    each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
    multiply_tiles<false, kN, kM>(a, job.bytes + (tile_m * job.steps + step) * kTileBytes, job.steps * kTileBytes,
                                  count, fetch);
    each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(c[kM * n + m]); });
    step += count;
    const bool last = step == group_end || step == job.steps;
    each_c<kN, kM>([&]<int n, int m>() {
      float* at = total + (n * job.tiles_m + tile_m + m) * kTileSums;
      const __m512 x_sums = last ? load_sums(job, group, tile_m + m) : _mm512_setzero_ps();
      const Int4Parameters& parameters = panel.parameters[n * job.groups + group];
      for (int row = 0; row < kTileN; ++row, at += kTileRows) {
        _mm512_store_ps(at, fold(c[kM * n + m], row, parameters, x_sums, _mm512_load_ps(at)));
      }
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

void many_rows(const Mm8Job& job, int64_t begin, int64_t end, uint8_t* tiles, Int4Parameters* parameters) {
  const int64_t row_sums = job.tiles_m * kTileSums;
  float* total = static_cast<float*>(scratch(Scratch::kSums, 2 * row_sums * int64_t{sizeof(float)}));
  for (int64_t tile_n = begin; tile_n < end; tile_n += 2) {
    const int64_t count = least(2, end - tile_n);
    for (int64_t n = 0; n < count; ++n) {
      load_parameters(job, tile_n + n, 0, job.groups, parameters + n * job.groups);
    }
    for (int64_t i = 0; i < count * row_sums; i += 16) _mm512_store_ps(total + i, _mm512_setzero_ps());
    for (int64_t t = 0; t < job.tiles_k; t += kBlockTilesK) {
      const int64_t end_t = least(job.tiles_k, t + kBlockTilesK);
      count == 2 ? run_block<2>(job, tile_n, t, end_t, tiles, parameters, total)
                 : run_block<1>(job, tile_n, t, end_t, tiles, parameters, total);
    }
    for (int64_t n = 0; n < count; ++n) {
      write_tiles(job, tile_n + n, total + n * row_sums, [](__m512i sums) { return _mm512_castsi512_ps(sums); });
    }
  }
}

}  // namespace

void mm8_int4_amx(const Mm8Job& job, int64_t begin, int64_t end) {
  const TileScope registers;
  constexpr int64_t kPanelBytes = 2 * kBlockTilesK * kTileBytes;
  const int64_t bytes = kPanelBytes + 2 * job.groups * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* tiles = static_cast<uint8_t*>(scratch(Scratch::kPanel, bytes));
  auto* parameters = reinterpret_cast<Int4Parameters*>(tiles + kPanelBytes);
  if (job.tiles_m > 1 || job.steps > job.tiles_k) return many_rows(job, begin, end, tiles, parameters);
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + begin * job.tiles_k * kPackedBytes;
  for (int64_t tile_n = begin; tile_n < end; ++tile_n) {
    load_parameters(job, tile_n, 0, job.groups, parameters);
    few_rows(job, tile_n, parameters, WeightStream(weight, tile_n - begin, job.tiles_k));
  }
}

}  // namespace qao::cpu
