// int8 x times int4 W with AMX: a tile of W becomes an A tile of 16 rows x 64 unsigned bytes with no more than a mask,
// B tiles come packed (mm8_pack_tiles_avx512.cpp).
//
// Up to 16 rows of x: 16 rows of W are expanded tile by tile. More, or groups of 32: 32 rows of W are expanded in
// panels of 256 k and meet all rows of x, 32 x 32 of C at a time. Sums are exact integers up to the end of a group,
// then, in registers,
//   total += scale * C - scale * zero * sum(x).
#include "cpu/mm8_int4_parameters_avx512.h"
#include "cpu/mm8_kernels.h"
#include "cpu/mm8_tiles_amx.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/weight_stream.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::kTileK;
using int4_mm::kTileN;

constexpr int64_t kPackedBytes = int4_mm::kTileBytes;  // of a tile of W
constexpr int64_t kTileBytes = kTileRegisterBytes;
// K-tiles of a panel, which stays in L1 with the C tiles of its groups: many of these unless groups are long.
constexpr int64_t kMaxBlockTilesK = 16, kShortBlockTilesK = 4;
constexpr int64_t kFewTilesM = 4;  // x so short that a large panel does not pay

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

int64_t block_tiles(const Mm8Job& job) {
  const bool large = job.group_size >= kMaxBlockTilesK * kTileK && job.tiles_m > kFewTilesM;
  return large ? kMaxBlockTilesK : kShortBlockTilesK;
}

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

// ---- more rows of x: registers 0..3 = C of 1 or 2 N-tiles x 1 or 2 tiles of x, 4..5 = A, 6..7 = B ----

// Steps [begin, end) of kN N-tiles, expanded.
struct Panel {
  const uint8_t* tiles;              // [kN][block_tiles()] A tiles
  const Int4Parameters* parameters;  // [kN][groups]
  int64_t begin, end;
};

// total[16 n][16 m] += the sections of a panel (a section: a group's steps within it), of which `c` has a C tile every
// `stride` values. All at once, so that totals pass through registers only once a panel.
void fold_sections(const Mm8Job& job, const Panel& panel, const Int4Parameters* parameters, int64_t tile_m,
                   const int32_t* c, int64_t stride, float* total) {
  __m512 sums[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) sums[row] = _mm512_load_ps(total + row * kTileRows);
  int64_t group = panel.begin / group_steps(job), group_end = (group + 1) * group_steps(job);
  for (int64_t step = panel.begin; step < panel.end; ++group, group_end += group_steps(job), c += stride) {
    step = least(group_end, panel.end);
    const bool whole = step == group_end || step == job.steps;
    const __m512 x_sums = whole ? load_sums(job, group, tile_m) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int row = 0; row < kTileN; ++row) sums[row] = fold(c, row, parameters[group], x_sums, sums[row]);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) _mm512_store_ps(total + row * kTileRows, sums[row]);
}

// total[kN][tiles_m] += the panel times kM tiles of x from tile_m. Tiles of the next step load between the products of
// this one; those of x, in L2, must not push W out of L1. fetch() is called every step.
template <int kN, int kM, typename Fetch>
void multiply(const Mm8Job& job, const Panel& panel, int64_t tile_m, float* total, const Fetch& fetch) {
  const int64_t next_n = block_tiles(job) * kTileBytes;
  alignas(64) int32_t c[2 * kShortBlockTilesK][kN * kM][kTileSums];
  const int shift = job.steps > job.tiles_k ? 1 : 0;  // with groups of 32 two steps a K-tile
  const int8_t* b = job.bytes + (tile_m * job.steps + panel.begin) * kTileBytes;
  const int64_t b_tile = job.steps * kTileBytes;
  tile_load_once<6>(b);
  tile_load<4>(panel.tiles);
  if constexpr (kN == 2) tile_load<5>(panel.tiles + next_n);
  if constexpr (kM == 2) tile_load_once<7>(b + b_tile);
  const int64_t last = panel.end - 1;
  int64_t section = 0, group_end = (panel.begin / group_steps(job) + 1) * group_steps(job);
  for (int64_t step = panel.begin; step <= last; ++section, group_end += group_steps(job)) {
    const int64_t end = least(panel.end, group_end);
    each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
    for (; step < end; ++step) {
      const int64_t next = least(step + 1, last) - panel.begin;
      const uint8_t* next_a = panel.tiles + (next >> shift) * kTileBytes;
      const int8_t* next_b = b + next * kTileBytes;
      tile_multiply_bytes<0, 4, 6>();
      if constexpr (kN == 2) tile_multiply_bytes<2, 5, 6>();
      tile_load_once<6>(next_b);
      fetch();
      if constexpr (kM == 2) tile_multiply_bytes<1, 4, 7>();
      tile_load<4>(next_a);
      if constexpr (kN == 2 && kM == 2) tile_multiply_bytes<3, 5, 7>();
      if constexpr (kM == 2) tile_load_once<7>(next_b + b_tile);
      if constexpr (kN == 2) tile_load<5>(next_a + next_n);
    }
    each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(c[section][kM * n + m]); });
  }
  each_c<kN, kM>([&]<int n, int m>() {
    fold_sections(job, panel, panel.parameters + n * job.groups, tile_m + m, c[0][kM * n + m], kN * kM * kTileSums,
                  total + (n * job.tiles_m + tile_m + m) * kTileSums);
  });
}

// A panel of W is expanded into L1 and meets all rows of x.
template <int kN>
void many_rows(const Mm8Job& job, int64_t tile_n, const Int4Parameters* parameters, uint8_t* tiles) {
  const int64_t row_bytes = job.tiles_k * kPackedBytes;
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + tile_n * row_bytes;
  const int64_t halves = job.steps / job.tiles_k;
  const int64_t steps = job.groups * group_steps(job);  // with groups of 32 the last K-tile may have but one half
  const int64_t total_values = kN * job.tiles_m * kTileSums;
  float* total = static_cast<float*>(scratch(Scratch::kSums, total_values * int64_t{sizeof(float)}));
  for (int64_t i = 0; i < total_values; i += 16) _mm512_store_ps(total + i, _mm512_setzero_ps());
  const int64_t block = block_tiles(job);
  for (int64_t t = 0; t < job.tiles_k; t += block) {
    const int64_t end = least(job.tiles_k, t + block);
    for (int n = 0; n < kN; ++n) {
      uint8_t* out = tiles + n * block * kTileBytes;
      for (int64_t i = t; i < end; ++i, out += kTileBytes) expand_tile(weight + n * row_bytes + i * kPackedBytes, out);
    }
    const Panel panel = {tiles, parameters, t * halves, least(end * halves, steps)};
    // What comes next of W is fetched meanwhile, a share every step.
    const int64_t slots = (panel.end - panel.begin) * ((job.tiles_m + 1) / 2);
    const int64_t lines = (kPackedBytes / 64 * (end - t) + slots - 1) / slots;
    const uint8_t* next = weight + end * kPackedBytes;
    const auto fetch = [&]() __attribute__((always_inline)) {
      for (int64_t line = 0; line < lines; ++line, next += 64) {
        for (int n = 0; n < kN; ++n) _mm_prefetch(next + n * row_bytes, _MM_HINT_T1);
      }
    };
    int64_t tile_m = 0;
    for (; tile_m + 2 <= job.tiles_m; tile_m += 2) multiply<kN, 2>(job, panel, tile_m, total, fetch);
    if (tile_m < job.tiles_m) multiply<kN, 1>(job, panel, tile_m, total, fetch);
  }
  for (int n = 0; n < kN; ++n) {
    write_tiles(job, tile_n + n, total + n * job.tiles_m * kTileSums,
                [](__m512i sums) { return _mm512_castsi512_ps(sums); });
  }
}

}  // namespace

void mm8_int4_amx(const Mm8Job& job, int64_t begin, int64_t end) {
  const TileScope registers;
  constexpr int64_t kPanelBytes = 2 * kMaxBlockTilesK * kTileBytes;
  const int64_t bytes = kPanelBytes + 2 * job.groups * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* tiles = static_cast<uint8_t*>(scratch(Scratch::kPanel, bytes));
  auto* parameters = reinterpret_cast<Int4Parameters*>(tiles + kPanelBytes);
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + begin * job.tiles_k * kPackedBytes;
  const bool few = job.tiles_m == 1 && job.steps == job.tiles_k;
  for (int64_t tile_n = begin; tile_n < end;) {
    load_parameters(job, tile_n, 0, job.groups, parameters);
    if (few) {
      few_rows(job, tile_n, parameters, WeightStream(weight, tile_n - begin, job.tiles_k));
      ++tile_n;
    } else if (tile_n + 1 < end) {
      load_parameters(job, tile_n + 1, 0, job.groups, parameters + job.groups);
      many_rows<2>(job, tile_n, parameters, tiles);
      tile_n += 2;
    } else {
      many_rows<1>(job, tile_n++, parameters, tiles);
    }
  }
}

}  // namespace qao::cpu
