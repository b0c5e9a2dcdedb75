// int8 x times int8 W with AMX: A tiles are 16 rows of W x 64 k, B tiles come packed (mm8_pack_tiles_avx512.cpp).
//
// Up to 32 rows of x: A tiles are loaded from W as it lies; every byte of it is used once.
// More: 32 rows of W x 512 k are copied into L1, where neither pages nor cache sets collide, and meet all rows of x.
// Either way the rows of W that come next are fetched meanwhile, a share with each step.
#include "cpu/mm8_kernels.h"
#include "cpu/mm8_tiles_amx.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

constexpr int64_t kTileBytes = kTileRegisterBytes;
constexpr int64_t kBlockTilesN = 16;  // N-tiles whose C stays in L2
constexpr int64_t kBlockTilesK = 16;  // K-tiles of a panel
constexpr int64_t kDirectTilesM = 2;  // x so short that W is not copied

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// 16 rows of W from row n, columns [begin, end), as A tiles; zeros past N and K.
void copy_tiles(const Mm8Job& job, int64_t n, int64_t begin, int64_t end, uint8_t* out) {
  constexpr int kStreams = 4;
  const int64_t rows = least(kTileRows, job.n - n);
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + n * job.k;
  for (int64_t first = 0; first < kTileRows; first += kStreams) {
    for (int64_t k = begin; k < end; k += kTileColumns) {
      const __mmask64 mask = ~__mmask64{0} >> (kTileColumns - least(kTileColumns, end - k));
#pragma GCC unroll 4
      for (int64_t r = first; r < first + kStreams; ++r) {
        const __m512i bytes = _mm512_maskz_loadu_epi8(r < rows ? mask : 0, weight + r * job.k + k);
        _mm512_store_si512(out + (k - begin) / kTileColumns * kTileBytes + r * kTileColumns, bytes);
      }
    }
  }
}

// c[kN][tiles_m] += `a`, K-tiles [begin, end), times tile_m and the next kM - 1 of x. next: rows of W to be fetched.
template <int kN, int kM>
void multiply(const Mm8Job& job, const ATiles& a, int64_t tile_m, int64_t begin, int64_t end, const uint8_t* next,
              int32_t* c) {
  const auto at = [&](int n, int m) { return c + (n * job.tiles_m + tile_m + m) * kTileSums; };
  if (begin == 0) {
    each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
  } else {
    each_c<kN, kM>([&]<int n, int m>() { tile_load<2 * n + m>(at(n, m)); });
  }
  const uint8_t* first = next + kN * kTileRows * tile_m / job.tiles_m * job.k + begin * kTileColumns;
  const int64_t rows = kN * kTileRows * (tile_m + kM) / job.tiles_m - kN * kTileRows * tile_m / job.tiles_m;
  const int8_t* b = job.bytes + (tile_m * job.tiles_k + begin) * kTileBytes;
  multiply_tiles<true, kN, kM>(a, b, job.tiles_k * kTileBytes, end - begin, [&](int64_t i) {
    for (int64_t row = 0; row < rows; ++row) _mm_prefetch(first + row * job.k + i * kTileColumns, _MM_HINT_T1);
  });
  each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(at(n, m)); });
}

template <int kN>
void multiply_all(const Mm8Job& job, const ATiles& a, int64_t begin, int64_t end, const uint8_t* next, int32_t* c) {
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) multiply<kN, 2>(job, a, tile_m, begin, end, next, c);
  if (tile_m < job.tiles_m) multiply<kN, 1>(job, a, tile_m, begin, end, next, c);
}

// C of kN N-tiles += K-tiles [begin, end).
template <int kN>
void run_block(const Mm8Job& job, int64_t tile_n, int64_t begin, int64_t end, uint8_t* copy, int32_t* c) {
  const int64_t n = tile_n * kTileRows;
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + n * job.k;
  const uint8_t* next = weight + kN * kTileRows * job.k;
  const int64_t whole = job.tiles_m <= kDirectTilesM && n + kN * kTileRows <= job.n ? job.k / kTileColumns : 0;
  const int64_t direct_end = whole > begin ? least(whole, end) : begin;
  if (begin < direct_end) {
    const ATiles a = {weight + begin * kTileColumns, kTileRows * job.k, kTileColumns, job.k};
    multiply_all<kN>(job, a, begin, direct_end, next, c);
  }
  for (int64_t t = direct_end; t < end; t += kBlockTilesK) {
    const int64_t block_end = least(t + kBlockTilesK, end);
    for (int i = 0; i < kN; ++i) {
      copy_tiles(job, n + i * kTileRows, t * kTileColumns, least(block_end * kTileColumns, job.k),
                 copy + i * kBlockTilesK * kTileBytes);
    }
    const ATiles a = {copy, kBlockTilesK * kTileBytes, kTileBytes, kTileColumns};
    multiply_all<kN>(job, a, t, block_end, next, c);
  }
}

}  // namespace

void mm8_int8_amx(const Mm8Job& job, int64_t begin, int64_t end) {
  const TileScope tiles;
  uint8_t* copy = static_cast<uint8_t*>(scratch(Scratch::kPanel, 2 * kBlockTilesK * kTileBytes));
  const int64_t row_sums = job.tiles_m * kTileSums;
  int32_t* c = static_cast<int32_t*>(scratch(Scratch::kSums, kBlockTilesN * row_sums * int64_t{sizeof(int32_t)}));
  const int64_t step_k = job.tiles_m <= kDirectTilesM ? job.tiles_k : kBlockTilesK;
  for (int64_t block = begin; block < end; block += kBlockTilesN) {
    const int64_t block_end = least(end, block + kBlockTilesN);
    for (int64_t t = 0; t < job.tiles_k; t += step_k) {
      const int64_t end_t = least(job.tiles_k, t + step_k);
      for (int64_t tile_n = block; tile_n < block_end; tile_n += 2) {
        int32_t* pair = c + (tile_n - block) * row_sums;
        tile_n + 1 < block_end ? run_block<2>(job, tile_n, t, end_t, copy, pair)
                               : run_block<1>(job, tile_n, t, end_t, copy, pair);
      }
    }
    for (int64_t tile_n = block; tile_n < block_end; ++tile_n) {
      const __m512 scales = load_scales(job, tile_n * kTileRows);
      write_tiles(job, tile_n, c + (tile_n - block) * row_sums,
                  [&](__m512i sums) { return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales); });
    }
  }
}

}  // namespace qao::cpu
