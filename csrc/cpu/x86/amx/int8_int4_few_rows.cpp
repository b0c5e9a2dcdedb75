// AMX W4A8 kernel for up to 16 rows of x.
// 16 rows of W are expanded tile by tile, with only a mask, to A tiles of 16 rows x 64 unsigned bytes. B tiles come
// packed (pack_int8_tiles.cpp). Sums are exact integers up to the end of a group, where, in registers,
//   total += scale * (C - x_zero * sum(q) - zero * sum(x - x_zero)).
// The sums of W's nibbles q are products with the row of ones.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/int8_tiles.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/weight_stream.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileN;

constexpr int64_t kPackedBytes = int4::kTileBytes;  // of a tile of W
constexpr int64_t kTileBytes = kTileRegisterBytes;

void expand_tile(const uint8_t* tile, uint8_t* a) {
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const __m512i bytes = _mm512_loadu_si512(tile + g * 64);
    _mm512_store_si512(a + g * 64, _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F)));
    _mm512_store_si512(a + (g + 8) * 64, _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0))));
  }
}

// Accumulates the sums of one row of W.
template <bool kXZeros>
__attribute__((always_inline)) inline __m512 fold(const int32_t* c, int row, const Int4Parameters& parameters,
                                                  __m512 x_zeros, __m512 x_sums, __m512 total) {
  __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(c + row * kTileRows));
  if constexpr (kXZeros) {
    const __m512 w_sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(c[row * kTileRows + kRowOfOnes]));
    sum = _mm512_fnmadd_ps(x_zeros, w_sum, sum);
  }
  const __m512 value = _mm512_fnmadd_ps(_mm512_set1_ps(parameters.zero[row]), x_sums, sum);
  return _mm512_fmadd_ps(_mm512_set1_ps(parameters.scale[row]), value, total);
}

// One N-tile along all of K, with totals in registers. Groups are accumulated one behind and tiles of W expanded one
// ahead, so that the tile unit never waits for a recent store.
template <bool kXZeros>
void few_rows(const Job& job, int64_t tile_n, const Int4Parameters* parameters, WeightStream stream) {
  alignas(64) uint8_t a[2][kTileBytes];
  alignas(64) int32_t c[2][kTileSums];
  __m512 total[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) total[row] = _mm512_setzero_ps();
  const __m512 x_zeros = load_rows(job, 0).zero;
  const auto fold_group = [&](int64_t group) __attribute__((always_inline)) {
    const __m512 x_sums = load_sums(job, group, 0);
#pragma GCC unroll 16
    for (int row = 0; row < kTileN; ++row) {
      total[row] = fold<kXZeros>(c[group % 2], row, parameters[group], x_zeros, x_sums, total[row]);
    }
  };
  const uint8_t* weight = job.weight + tile_n * job.tiles_k * kPackedBytes;
  expand_tile(weight, a[0]);
  int64_t t = 0;
  for (int64_t group = 0; group < job.groups; ++group) {
    tile_zero<0>();
    for (const int64_t end = least(t + group_steps(job), job.tiles_k); t < end; ++t) {
      stream.fetch();
      if (t + 1 < job.tiles_k) expand_tile(weight + (t + 1) * kPackedBytes, a[(t + 1) % 2]);
      tile_load<4>(a[t % 2]);
      tile_load<6>(job.int8.values + t * kTileBytes);
      tile_multiply_bytes<0, 4, 6>();
    }
    tile_store<0>(c[group % 2]);
    if (group > 0) fold_group(group - 1);
  }
  fold_group(job.groups - 1);
  ColumnsOfPair columns;
  load_columns(job, tile_n * kTileRows, &columns);
  store_integer_tiles<1>(job, tile_n * kTileRows, 0, columns, [&](int i, __m512) { return total[i]; });
}

}  // namespace

void amx::int8_int4_few_rows(const Job& job, int64_t begin, int64_t end) {
  const TileScope registers;
  const int64_t bytes = job.groups * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* parameters = static_cast<Int4Parameters*>(scratch(Scratch::kPanel, bytes));
  const uint8_t* weight = job.weight + begin * job.tiles_k * kPackedBytes;
  const auto run = job.x_zeros != nullptr ? few_rows<true> : few_rows<false>;
  for (int64_t tile_n = begin; tile_n < end; ++tile_n) {
    load_shifted_parameters(job, tile_n, parameters);
    run(job, tile_n, parameters, WeightStream(weight, tile_n - begin, job.tiles_k));
  }
}

}  // namespace qao::cpu
